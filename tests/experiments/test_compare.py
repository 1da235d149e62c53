"""Runs side by side: the table of what differs, and the picture of the losses."""

import json

import numpy as np
import pytest

from jaxtrain.config import Config, replace
from jaxtrain.config.recipes import config_text
from jaxtrain.experiments import compare
from jaxtrain.experiments.run_folder import read_run

SMALL = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.vocab_size": 300,
    "data.sequence_length": 8,
    "train.steps": 4,
}


def make_run(folder, changes=None, records=()):
    folder.mkdir()
    (folder / "config.json").write_text(config_text(replace(Config(), SMALL | (changes or {}))))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    return read_run(folder)


def records(first=3.0, steps=4):
    for step in range(1, steps + 1):
        yield {"step": step, "wall_s": 3600.0 * step, "tokens": 8 * step, "loss": first - step / 10}
        if step % 2 == 0:
            # the record of an evaluation has no tokens
            yield {"step": step, "wall_s": 3600.0 * step + 60, "validation_loss": first - step / 20}


def test_runs_are_the_columns_of_a_table(tmp_path):
    one = make_run(tmp_path / "one", {"data.loss_mask": ("x" * 60,)}, records())
    other = make_run(tmp_path / "other", {"optimizer.learning_rate": 0.5}, records(2.0))
    name, empty = tmp_path.name, make_run(tmp_path / "empty")
    assert [line.split() for line in compare.table([one, other, empty])] == [
        [f"{name}/one", f"{name}/other", f"{name}/empty"],
        ["data.loss_mask", "x" * 39 + "…"],
        ["optimizer.learning_rate", "0.0003", "0.5", "0.0003"],
        *(["steps", *"4 of 4 4 of 4 0 of 4".split()], ["tokens", "32", "32", "–"]),
        ["hours", "4.02", "4.02", "–"],
        ["last", "loss", "2.6000", "1.6000", "–"],
        ["best", "loss", *"2.6000 at 4 1.6000 at 4 –".split()],
        ["last", "validation", "loss", "2.8000", "1.8000", "–"],
        ["best", "validation", "loss", *"2.8000 at 4 1.8000 at 4 –".split()],
    ]


def test_many_runs_are_the_lines_of_a_table(tmp_path):
    rates = [10.0**-k for k in range(9)]
    runs = [
        make_run(tmp_path / f"{k}", {"optimizer.learning_rate": rate})
        for k, rate in enumerate(rates)
    ]
    head, *lines = compare.table(runs)
    assert head.split()[:2] == ["optimizer.learning_rate", "steps"] and len(lines) == len(rates)
    assert [float(line.split()[1]) for line in lines] == rates


def test_losses_by_step_token_hour_and_flop(tmp_path):
    run = make_run(tmp_path / "run", {}, records())
    points = lambda *of: np.array(compare._points(run, *of))
    assert points("validation_loss", "tokens", 1.0).tolist() == [[16, 32], [2.9, 2.8]]
    assert points("loss", "wall_s", 1 / 3600).tolist() == [[1, 2, 3, 4], [2.9, 2.8, 2.7, 2.6]]
    # matrices of the layer and the head, forward and twice that backward; attention comes to it
    products = 6 * (4 * 16 * 16 + 300 * 16)
    assert products < compare._flops_per_token(run) < 2.5 * products


def test_many_noisy_losses_are_drawn_as_means(tmp_path):
    noisy = [{"step": n, "loss": 3.0 + (-1) ** n} for n in range(1, 201)]
    steps, losses = compare._points(make_run(tmp_path / "run", {}, noisy), "loss", "step", 1.0)
    assert len(losses) == 197 and np.allclose(losses, 3.0) and steps[0] == 2.5


def test_command(tmp_path, capsys):
    make_run(tmp_path / "one", {}, [*records(steps=1)])
    make_run(tmp_path / "other", {"model.block": "not_here.py:Block"}, records())
    runs = [str(tmp_path / name) for name in ("one", "other")]
    out = tmp_path / "picture.png"
    assert not compare.main([*runs, f"--out={out}"])
    assert capsys.readouterr().out.endswith(f"\nlosses: {out}\n") and out.stat().st_size > 9999
    make_run(tmp_path / "empty")
    assert not compare.main([str(tmp_path / "empty"), f"--out={tmp_path / 'none.png'}"])
    assert "no run has any yet" in capsys.readouterr().out
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "no run is named: use jaxtrain compare RUN …"),
        (["nowhere"], "'nowhere' is not the folder of a run"),
        (["{run}", "--out=x"], "--out='x' does not end in .png, .svg, .pdf: use --out=compare.png"),
        (["{run}", "--out=/proc/x.png"], "--out='/proc/x.png' cannot be written"),
    ],
)
def test_refused(tmp_path, capsys, argv, says):
    make_run(tmp_path / "run")
    assert compare.main([each.format(run=tmp_path / "run") for each in argv]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
