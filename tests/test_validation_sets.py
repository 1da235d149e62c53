"""Runs that are evaluated on several sets: what sources hold out, and sets of data.validation."""

import json
import pathlib

import pytest
from support import train_runs as runs

from jaxtrain.run.metrics import read_metrics

SETS = {
    "data.sources": "web=corpus.txt,code=recipe.py,code.validation_fraction=0.2",
    # the first is what web holds out, the second an entire file
    "data.validation": "same=corpus.txt,same.validation_fraction=0.05,books=recipe.py",
    "data.validation.books.packing": "best_fit",
    "train.eval_every": 2,
    "train.steps": 5,
    "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("sets")
    runs.write_inputs(folder)
    return folder


def validation(workdir: pathlib.Path) -> dict[int, dict[str, float]]:
    """Step → the validation losses of its record."""
    found = {}
    for record in read_metrics(workdir):
        losses = {name: record[name] for name in record if name.startswith("validation_loss")}
        if losses:
            assert record["step"] not in found
            found[record["step"]] = losses
    return found


@pytest.fixture(scope="module")
def run(folder):
    """The workdir of a run, and what it has printed."""
    workdir = folder / "run"
    return workdir, runs.train(workdir, *runs.flags_of(SETS | {"metrics.tensorboard": True}))


def test_each_set_has_a_loss(run):
    workdir, done = run
    losses = validation(workdir)
    assert [*losses] == [0, 2, 4, 5]  # before the first step, too
    of_sets = [f"validation_loss/{name}" for name in ("web", "code", "same", "books")]
    assert all([*one] == ["validation_loss", *of_sets] for one in losses.values())
    for one in losses.values():
        assert one["validation_loss/web"] == one["validation_loss/same"]
        assert len({*one.values()}) == 4
        # of the sources' parts alone: 2 batches of 16 sequences of 32 of web, all of code's
        code = 0.2 * len((workdir.parent / "recipe.py").read_bytes())
        share = code / (code + 2 * 16 * 32)
        mean = one["validation_loss/web"] * (1 - share) + one["validation_loss/code"] * share
        assert one["validation_loss"] == pytest.approx(mean, rel=2e-3)
    last = losses[5]
    assert last["validation_loss/books"] < losses[0]["validation_loss/books"]
    names = ", ".join(
        f"{name} {last[f'validation_loss/{name}']:.4f}" for name in ("web", "code", "same", "books")
    )
    line = f"step 5: validation loss {last['validation_loss']:.4f} nats a token ({names})"
    assert line in done.out.splitlines()
    assert "validation set books: " in done.out
    (events,) = (workdir / "tensorboard").iterdir()
    assert b"validation/validation_loss/books" in events.read_bytes()
    stored = json.loads((workdir / "checkpoints" / "validation_losses.json").read_text())
    assert stored == {str(step): losses[step]["validation_loss"] for step in (2, 4, 5)}


@pytest.mark.full
def test_without_held_out_parts_the_sets_are_the_mean(folder):
    workdir = folder / "alone"
    settings = {"data.source": "corpus.txt", "data.validation_fraction": 0.0, "data.sources": ""}
    first = SETS | settings | {"train.steps": 3, "data.validation": "a=corpus.txt,b=recipe.py"}
    del first["data.validation.books.packing"]
    runs.train(workdir, *runs.flags_of(first))
    # another set may come later
    later = {"train.steps": 5, "data.validation": "b=recipe.py", "data.packing": "stream"}
    runs.train(workdir, *runs.flags_of(first | later))
    losses = validation(workdir)
    assert [*losses] == [0, 2, 3, 4, 5]
    sizes = {"a": 1024, "b": len((folder / "recipe.py").read_bytes())}
    for step in (0, 2, 3):
        means = {name: losses[step][f"validation_loss/{name}"] for name in sizes}
        mean = sum(means[name] * sizes[name] for name in sizes) / sum(sizes.values())
        assert losses[step]["validation_loss"] == pytest.approx(mean, rel=1e-5)
    assert [*losses[4]] == ["validation_loss", "validation_loss/b"]
    assert losses[4]["validation_loss"] == losses[4]["validation_loss/b"]


@pytest.mark.full
def test_two_processes_have_the_same_losses(folder, run):
    workdir = folder / "two"
    launch = ["jaxtrain.launch", "--processes=2", "--devices_per_process=1", "--"]
    words = [*launch, "--config=recipe.py", f"--workdir={workdir.name}", *runs.flags_of(SETS)]
    with runs.running(folder, *words) as command:
        command.end()
    expected, found = validation(run[0]), validation(workdir)
    assert [*found] == [*expected]
    for step, losses in found.items():
        assert losses == pytest.approx(expected[step], rel=1e-6)
