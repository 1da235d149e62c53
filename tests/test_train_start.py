"""The search for a table at the start of training: Ctrl-C, and who says how far it is."""

import signal

import pytest
import small

from jaxtrain import train
from jaxtrain.config import ConfigError
from jaxtrain.pipeline.setup import make_setup


@pytest.fixture
def config():
    return small.config((1, 3, 1), "auto", 0, 5, {"model.layers": 6})


def test_ctrl_c_is_one_line_there_and_the_handler_is_as_before(config, monkeypatch, capsys):
    heard = []

    def search(*_):
        heard.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train, "make_setup", search)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `main` leaves it
    try:
        assert train.find_tables(config) is False
        assert heard == [signal.default_int_handler] and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "stopped before training began: nothing was written\n" and train.STOPPED == 130


def test_tables_are_found_once_and_a_report_is_told(config):
    told = []
    one = make_setup(config, lambda what, done: told.append(done))
    count = len(told)
    assert count > 20 and told == sorted(told) and told[-1] == 1.0
    assert train.find_tables(config) and make_setup(config, lambda what, done: told.append(done)) is one and len(told) == count


def test_a_file_that_is_wrong_is_answered_with_its_line(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("# mine\n\nstage 0,stage 1\nF0.0,\n,F0.0\n,B0.0\n,W0.0\nB0.0,\nW0.0,W0.0\n")
    with pytest.raises(ConfigError) as found:
        train.find_tables(small.config((1, 2, 1), f"csv:{path}", 0, 1, {"pipeline.remat": "none"}))
    wrong = "line 9 (row 5), column 'stage 1': W0.0 stands already in line 7: use it once"
    assert str(found.value) == f"pipeline.schedule='csv:{path}' does not work: {path}, {wrong}"
