"""The search for a table at the start of training: Ctrl-C, and who says how far it is; and what a
start says that has no memory."""

import signal

import jax
import pytest
from support import small

from jaxtrain import loop, replay, train_command as train
from jaxtrain.config import ConfigError
from jaxtrain.config.rules.checks import Environment
from jaxtrain.devices import cluster
from jaxtrain.phases import prepare, run_context
from jaxtrain.pipeline.prepared_run import CheckedRun
from jaxtrain.pipeline.run_checks import RULES_WITH_TABLES
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner import for_training
from jaxtrain.run.exit_status import ExitStatus

VOCABULARY = {"model.vocab_size": 260}  # as many as the bytes of the corpus want


@pytest.fixture
def config():
    return small.config((1, 4, 2), "auto", 0, 4, VOCABULARY | {"model.layers": 8})


def checked(config):
    environment = Environment(8, "cpu", config, rules=RULES_WITH_TABLES)
    return CheckedRun(config, environment, config.on_own_mesh())


def find_tables(config, folder):
    return prepare.find_tables(checked(config), config, folder)


def test_ctrl_c_is_one_line_there_and_the_handler_is_as_before(
    config, tmp_path, monkeypatch, capsys
):
    heard = []

    def search(*_):
        heard.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(prepare, "make_setup", search)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `main` leaves it
    try:
        assert find_tables(config, tmp_path) is None
        assert (
            heard == [signal.default_int_handler]
            and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert (
        capsys.readouterr().err == "stopped before training began: nothing was written\n"
        and ExitStatus.INTERRUPTED == 130
    )


def test_tables_are_found_once_and_a_report_is_told(config, tmp_path):
    told = []
    one = make_setup(config, lambda what, done: told.append(done))
    count = len(told)
    assert count > 20 and told == sorted(told) and told[-1] == 1.0
    assert (
        find_tables(config, tmp_path)
        and make_setup(config, lambda what, done: told.append(done)) is one
        and len(told) == count
    )


def test_a_file_that_is_wrong_is_answered_with_its_line(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("# mine\n\nstage 0,stage 1\nF0.0,\n,F0.0\n,B0.0\n,W0.0\nB0.0,\nW0.0,W0.0\n")
    with pytest.raises(ConfigError) as found:
        config = small.config(
            (1, 2, 4), f"csv:{path}", 0, 1, VOCABULARY | {"pipeline.remat": "none"}
        )
        find_tables(config, tmp_path)
    wrong = (
        "line 9 (tick 5), column 'stage 1': W0.0 stands already in line 7 (use it once): use "
        "--config."
    )
    assert f"pipeline.schedule='csv:{path}' does not work: {path}, {wrong}" in str(found.value)


@pytest.mark.parametrize("of", ["dry_run", "replay", "run"])
def test_memory_that_is_not_there(of, tmp_path, monkeypatch, capsys):
    """Whatever needs it: one line with the plan and flags that take less, and a status of its
    own."""

    def refused(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 28660090904 bytes."
        )

    module = {"dry_run": for_training, "replay": replay, "run": loop}[of]
    monkeypatch.setattr(module, "open_folder" if module is loop else of, refused)
    byes = []
    monkeypatch.setattr(run_context.Watchdog, "say_bye", lambda watchdog, *bye: byes.append(bye))
    monkeypatch.setattr(train.startup, "start_jax", lambda *_: None)
    monkeypatch.setattr(cluster, "connect_peers", lambda: None)
    words = ["--cpu_devices=8", f"--workdir={tmp_path / 'run'}", "--config.data.batch_size=64"]
    more = {"dry_run": ["--dry_run"], "replay": ["--replay=1"], "run": []}[of]
    assert train.main([*words, *more]) == ExitStatus.OUT_OF_MEMORY
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: out of memory: 28,660,090,904 bytes asked for, ")
    assert "; a device is planned to need " in line
    assert not [*tmp_path.glob("run/*")]
    # what other processes of a run are told
    assert [f"error: {text}" for status, text in byes if status == 82] == [line] * (of == "run")
