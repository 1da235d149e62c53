"""The table of metrics, and metrics.jsonl over kills and resumes, TensorBoard, the plot.

That the rules of metrics are right is tested in tests/training/test_step_metrics.py.
"""

import glob
import itertools
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from support import ROOT

from jaxtrain.run.metrics import (
    METRICS,
    ROLLED_BACK_FILE,
    Metric,
    MetricsWriter,
    host,
    largest,
    mean,
    mean_by_tokens,
    plot_losses,
    read_metrics,
    total,
)

# --- the table ------------------------------------------------------------------------------------

HEAD = ["| metric | unit | what it is | of independent replicas |", "|---|---|---|---|"]


def rows() -> list[str]:
    """The document's rows: one for neighbours of the table that say the same."""
    described = lambda name: words_of(METRICS[name])
    return [
        f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(words)} |"
        for words, names in itertools.groupby(METRICS, described)
    ]


def words_of(metric: Metric) -> tuple[str, str, str]:
    rule = "" if metric.combine is host else metric.combine.__name__.replace("_", " ")
    return metric.unit, metric.meaning, rule


def test_the_document_lists_the_table():
    section = (ROOT / "docs/use.md").read_text().split("\n## The metrics\n")[1].split("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("|")]
    assert listed == [*HEAD, *rows()], "\n".join(["docs/use.md should have", *HEAD, *rows()])


def test_a_metric_without_a_rule_cannot_be_made():
    with pytest.raises(TypeError, match="combine"):
        Metric("", "a number that nobody combines")


def test_rules():
    values, tokens = np.float32([3.0, 1.0]), np.float32([10.0, 30.0])
    assert [rule(values, tokens) for rule in (mean, mean_by_tokens, total, largest)] == [
        2,
        1.5,
        4,
        3,
    ]
    assert mean_by_tokens(values, 0 * tokens) == 0
    with pytest.raises(TypeError, match="has one value"):
        host(values, tokens)


def test_texts():
    lines = {name: metric.line(1234.5) for name, metric in METRICS.items()}
    assert {name: line for name, line in lines.items() if line} == {
        "loss": "loss 1234.5000",
        "tokens_per_s": "1.23k tokens/s",
        "mfu": "MFU 123450.0 %",
        "validation_loss": "validation loss 1234.5000 nats a token",
    }
    assert all(metric.title for metric in METRICS.values() if metric.replayed)


# --- the record -----------------------------------------------------------------------------------


def write(folder, steps, **options):
    writer = MetricsWriter(folder, **{"tensorboard": False} | options)
    for step in steps:
        writer.write(step, loss=10.0 / step, tokens=100 * step)
    return writer


def values(record):
    """A record without the times that every one has."""
    return {k: v for k, v in record.items() if k not in ("time", "wall_s")}


def steps(folder):
    return [r["step"] for r in read_metrics(folder)]


def test_a_record_is_in_the_file_when_write_returns(tmp_path):
    writer = MetricsWriter(tmp_path / "run", tensorboard=False)
    writer.write(1, loss=2.5, mfu=None, why="warm")
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert re.fullmatch(
        r'{"step": 1, "time": [0-9.]+, "wall_s": [0-9.]+, "loss": 2.5, "mfu": null, "why": '
        r'"warm"}\n',
        line,
    )
    writer.close()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(
        1, loss=float("nan"), grad_norm=float("inf"), learning_rate=-float("inf"), tokens=3
    )
    line = (tmp_path / "metrics.jsonl").read_text()
    assert values(json.loads(line)) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "learning_rate": None,
        "tokens": 3,
    }


def test_resuming_keeps_each_step_once(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5])
    writer = write(tmp_path, [4, 5, 6], resume_step=3)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    writer.close()


def test_a_record_of_the_resumed_step_stays(tmp_path):
    write(tmp_path, [1, 2]).write(2, validation_loss=3.0)
    write(tmp_path, [3], resume_step=2)
    kept = [values(record) for record in read_metrics(tmp_path)[1:3]]
    assert kept == [{"step": 2, "loss": 5.0, "tokens": 200}, {"step": 2, "validation_loss": 3.0}]


def test_going_back_moves_later_records_away(tmp_path):
    writer = write(tmp_path, [1, 2, 3, 4])
    writer.go_back(2, rolled_back_from=4, next_batch=4)
    writer.write(3, loss=2.5)
    with (tmp_path / ROLLED_BACK_FILE).open("ab") as file:
        file.write(b"\xff\n")  # damage ends no run
    writer.go_back(1, rolled_back_from=3, next_batch=6)
    writer.close()
    assert [values(record) for record in read_metrics(tmp_path)[1:]] == [
        {"step": 1, "rolled_back_from": 3, "next_batch": 6}
    ]
    lines = (tmp_path / ROLLED_BACK_FILE).read_text().splitlines()
    # the record of the first way back among them
    assert lines.pop(2) == "\ufffd"
    assert [json.loads(line)["step"] for line in lines] == [3, 4, 2, 2, 3]
    write(tmp_path, [2], resume_step=1).close()
    assert (tmp_path / ROLLED_BACK_FILE).exists()
    write(tmp_path, [1]).close()
    assert not (tmp_path / ROLLED_BACK_FILE).exists()


def test_a_new_run_begins_with_an_empty_file(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [1])
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("cut", ['{"step": 3, "lo', '{"step": 3', "{", "\0\0\0", "17"])
def test_a_line_cut_by_a_kill_is_dropped(tmp_path, cut):
    write(tmp_path, [1, 2]).close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write(cut)
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, [3], resume_step=2)
    assert [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]


def test_every_record_says_when_it_was_written_and_how_long_the_run_had_run(tmp_path):
    before = time.time()
    writer = write(tmp_path, [1], wall_s=iter([100.0004, 103.0]).__next__)
    writer.write(1, validation_loss=2.0)
    records = read_metrics(tmp_path)
    assert all(before - 0.001 <= record["time"] <= time.time() + 0.001 for record in records)
    assert [record["wall_s"] for record in records] == [100.0, 103.0]


def test_records_of_before_have_no_times(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    write(tmp_path, [3], resume_step=2)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_process_without_log_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = MetricsWriter(None)
    writer.write(1, loss=1.0)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_importing_it_brings_in_nothing_slow():
    slow = {"jax", "numpy", "matplotlib", "tensorboardX"}
    code = (
        f"import jaxtrain.run.metrics, jaxtrain.run.progress, sys; print(sorted({slow} & "
        "set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def events(folder):
    """(purge step, {tag: [(step, value)]}) of the newest event file."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import masked_crc32c

    newest = sorted(glob.glob(f"{folder}/tensorboard/*"))[-1]
    with open(newest, "rb") as file:
        data = file.read()
    scalars, purged = {}, None
    while data:
        size = int.from_bytes(data[:8], "little")
        assert masked_crc32c(data[:8]) == int.from_bytes(data[8:12], "little")
        event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
        if event.session_log.status == SessionLog.START:
            purged = event.step
        for value in event.summary.value:
            scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    return purged, scalars


def test_tensorboard_has_the_numbers_and_purges_what_is_done_again(tmp_path):
    writer = write(tmp_path, [1, 2], tensorboard=True)
    writer.write(2, validation_loss=4.0, mfu=None, **{"validation_loss/web": 3.0})
    writer.close()
    expected = {
        "train/loss": [(1, 10.0), (2, 5.0)],
        "train/tokens": [(1, 100.0), (2, 200.0)],
        "validation/validation_loss": [(2, 4.0)],
        "validation/validation_loss/web": [(2, 3.0)],
    }
    scalars = events(tmp_path)[1]
    walls = {group: scalars.pop(f"{group}/wall_s") for group in ("train", "validation")}
    assert scalars == expected
    recorded = [
        (record["step"], pytest.approx(record["wall_s"], abs=1e-3))
        for record in read_metrics(tmp_path)
    ]
    assert walls["train"] + walls["validation"] == recorded
    for file in (tmp_path / "tensorboard").iterdir():
        file.unlink()
    write(tmp_path, [2], tensorboard=True, resume_step=1).close()
    purged, scalars = events(tmp_path)
    assert purged == 2
    assert scalars["train/loss"] == [(2, 5.0)]


def test_the_plot_shows_both_curves(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = {}
    plot = Axes.plot
    monkeypatch.setattr(
        Axes,
        "plot",
        lambda self, x, y, **k: drawn.update({k["label"]: (x, y)}) or plot(self, x, y, **k),
    )
    writer = write(tmp_path, [1, 2, 5])
    writer.write(2, loss=float("nan"))
    writer.write(5, validation_loss=3.0, **{"validation_loss/web": 2.0})
    assert plot_losses(tmp_path) == tmp_path / "loss.png"
    assert drawn == {
        "training": ((1, 2, 5), (10.0, 5.0, 2.0)),
        "validation": ((5,), (3.0,)),
        "validation, web": ((5,), (2.0,)),
    }
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name, title", [("wide", "wide"), ("a $run_{$", "a $run_{$"), ("n" * 90, "n" * 69 + "…")]
)
def test_the_plot_has_the_run_s_name(tmp_path, monkeypatch, name, title):
    """Also one with marks of formulas, and from inside of the folder."""
    from matplotlib.axes import Axes

    titles, set_title = [], Axes.set_title
    monkeypatch.setattr(
        Axes, "set_title", lambda self, text, **k: titles.append(text) or set_title(self, text, **k)
    )
    write(tmp_path / name, [1])
    assert plot_losses(tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    assert plot_losses(".")
    assert titles == [title, title]


def test_nothing_to_plot(tmp_path):
    assert plot_losses(tmp_path) is None
    MetricsWriter(tmp_path, tensorboard=False).write(1, loss=float("nan"))
    assert plot_losses(tmp_path) is None
    assert not (tmp_path / "loss.png").exists()
