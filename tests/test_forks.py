"""Forks (`train.fork_from`): a run that begins with another run's step goes on as that run would,
on any mesh, and needs it no more once it has a checkpoint; or it begins with its weights alone."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from etils import epath
from support import train_runs as runs

import jaxtrain
from jaxtrain.checkpoint import reading
from jaxtrain.checkpoint.manifest import STATE, read_database
from jaxtrain.config.recipes import load_recipe
from jaxtrain.run.metrics import read_metrics

STABLE_STEPS = 6
SMALL = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.mlp_width": 16,
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "mesh.data": 8,
    "optimizer.schedule": "1-sqrt",
    "checkpoint.every": 3,
    "checkpoint.keep": 9,
    "metrics.log_every": 1,
    "metrics.tensorboard": False,
    "train.eval_batches": 1,
    "train.hang_after": 0,
}


def arrays_of(run: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint: weights, moments and counts."""
    folder = epath.Path(run / "checkpoints" / str(step))
    arrays = reading.open_arrays(folder, read_database(folder / STATE))
    return {name: np.asarray(array.read().result()) for name, array in arrays.items()}


def assert_same_end(fork: pathlib.Path, straight: pathlib.Path, steps: int) -> None:
    """Bit for bit: the losses of the steps that the fork has taken, and the final state."""
    losses = runs.losses(fork)
    assert losses and losses.items() <= runs.losses(straight).items()
    ours, theirs = arrays_of(fork, steps), arrays_of(straight, steps)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_decay_that_is_forked_equals_its_straight_run(tmp_path):
    (tmp_path / "text.txt").write_text("a batch is cut into microbatches " * 200)
    config = jaxtrain.Config()
    here = SMALL | {"data.source": str(tmp_path / "text.txt"), "data.cache": str(tmp_path)}
    train = lambda name, **changes: jaxtrain.train(
        config,
        here | {path.replace("__", "."): value for path, value in changes.items()},
        workdir=tmp_path / name,
    )
    train("stable", train__steps=STABLE_STEPS)
    decay = {"train__steps": STABLE_STEPS - 1, "optimizer__decay_steps": 2}
    train("straight", **decay)
    train("fork", train__fork_from=f"{tmp_path / 'stable'}@3", **decay)
    assert_same_end(tmp_path / "fork", tmp_path / "straight", STABLE_STEPS - 1)
    assert [r["tokens"] for r in read_metrics(tmp_path / "fork") if "loss" in r] == [512, 640]


# --- with the real command ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stable(tmp_path_factory) -> pathlib.Path:
    """A run of a constant rate, with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("forks")
    runs.write_inputs(folder)
    runs.train(folder / "stable", *runs.settings(train__steps=9, train__eval_every=3))
    return folder / "stable"


def of(run: pathlib.Path, step: int | str, **values: object) -> list[str]:
    """The flags of a fork. values: settings, by names as of `runs.settings`"""
    return runs.settings(train__fork_from=f"{run.name}@{step}", **values)


def fork_record(run: pathlib.Path) -> dict:
    return json.loads((run / "config.json").read_text())["fork"]


@pytest.mark.full
@pytest.mark.parametrize("steps, schedule", [(8, "constant"), (9, "1-sqrt"), (10, "constant")])
def test_three_decays(stable, steps, schedule):
    folder = stable.parent
    decay = {
        "train__steps": steps,
        "optimizer__decay_steps": steps - 6,
        "optimizer__schedule": schedule,
    }
    runs.train(folder / f"straight{steps}", *runs.settings(**decay))
    done = runs.train(folder / f"decay{steps}", *of(stable, 6, **decay))
    assert "fork: position of step 6 in stable/checkpoints" in done.out
    assert_same_end(folder / f"decay{steps}", folder / f"straight{steps}", steps)
    record = fork_record(folder / f"decay{steps}")
    changed = f"optimizer.decay_steps: 0 → {steps - 6}"
    assert changed in record["changes"] and record["tokens"] == 6 * 16 * 32
    assert (record["step"], record["inherits"]) == (6, "position")
    # the settings are read as before
    assert load_recipe(folder / f"decay{steps}" / "config.json").train.steps == steps


@pytest.mark.full
def test_a_fork_goes_on_without_its_origin(stable):
    folder, flags = stable.parent, of(stable.with_name("copy"), 6, train__steps=9)
    shutil.copytree(stable, folder / "copy")
    with runs.running(folder, *runs.training(folder / "fork", *flags)) as command:
        command.wait_for(lambda: runs.last_step(folder / "fork") > 6, "its first step")
        command.kill()
    if not runs.checkpoints(folder / "fork"):  # it begins again
        runs.train(folder / "fork", *flags, "--config.train.steps=7")
    record = fork_record(folder / "fork")
    shutil.rmtree(folder / "copy")
    done = runs.train(folder / "fork", *flags, "--config.train.steps=10")
    assert "train.fork_from=copy@6 is passed over" in done.out
    assert fork_record(folder / "fork") == record
    runs.train(stable, *runs.settings(train__steps=10))
    assert_same_end(folder / "fork", stable, 10)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["2x2x2", "8x1x1"])
def test_on_another_mesh(stable, mesh):
    fork, settings = stable.with_name(mesh), runs.flags_of(runs.MESHES[mesh])
    flags = of(stable, 3, train__steps=6, parallel__zero=3, pipeline__microbatches=1)
    flags = [*settings, *flags] if mesh != "2x2x2" else [*flags, *settings]
    runs.train(fork, *flags, "--config.pipeline.microbatches=2", devices=8)
    losses = runs.losses(stable)
    for step, loss in runs.losses(fork).items():
        assert loss == pytest.approx(losses[step], rel=1e-5), step
    assert [*runs.losses(fork)] == [4, 5, 6]


@pytest.mark.full
@pytest.mark.parametrize("inherits", ["moments", "weights"])
def test_a_fork_that_begins_at_its_own_step_0(stable, inherits):
    """Its own schedule and batches; validation before its first step is that of the origin."""
    fork = stable.with_name(inherits)
    own = {"train__steps": 3, "data__batch_size": 8, "train__eval_every": 1}
    own["train__eval_batches"] = 4  # as many sequences as two batches of 16
    runs.train(fork, *of(stable, 6, train__fork_inherits=inherits, **own))
    validated = lambda run, step: next(
        r["validation_loss"]
        for r in read_metrics(run)
        if r["step"] == step and "validation_loss" in r
    )
    assert validated(fork, 0) == pytest.approx(validated(stable, 6), rel=1e-5)
    steps = [r for r in read_metrics(fork) if "loss" in r]
    assert [(r["step"], r["batch"], r["tokens"]) for r in steps] == [
        (1, 0, 256),
        (2, 1, 512),
        (3, 2, 768),
    ]
    # its own warm-up
    assert [r["learning_rate"] for r in steps] == pytest.approx([1.25e-3, 2.5e-3, 3.75e-3])
    after, before = arrays_of(fork, 3), arrays_of(stable, 6)
    counts = {name: int(after[name]) - int(before[name]) for name in after if not after[name].ndim}
    assert sorted(counts.values()) == ([-3, -3, 3] if inherits == "moments" else [-3, -3, -3])


@pytest.mark.full
def test_a_fork_goes_back_to_its_beginning(stable):
    fork = stable.with_name("back")
    flags = of(stable, 6, train__steps=9, train__on_nonfinite="rollback", checkpoint__every=0)
    words = runs.training(fork, *flags, "--config.train.nonfinite_limit=1")
    spoiled = ["support.bad_batches", "nan:7", "--", *words[1:]]
    path = {"PYTHONPATH": f"{pathlib.Path(__file__).parent}:{pathlib.Path(__file__).parents[1]}"}
    with runs.running(stable.parent, *spoiled, environment=path) as command:
        done = command.end()
    assert "back from step 8 to step 6, and on with batch 8" in done.out + done.err
    assert [r["batch"] for r in read_metrics(fork) if "loss" in r] == [8, 9, 10]


@pytest.mark.full
def test_refused_before_anything_is_written(stable):
    diloco = {"train__diloco_inner_steps": 2, "mesh__replica": 2, "mesh__stage": 1}
    cases = [
        (of(stable, 5), "train.fork_from='stable@5' is no complete step: use ", "stable@3"),
        (
            runs.settings(train__fork_from="stable/checkpoints/9.broken-1"),
            "'stable/checkpoints/9.broken-1' is no complete step: use ",
            "fork_from=stable/checkpoints@",
        ),
        (runs.settings(train__fork_from="stabel"), "train.fork_from='stabel'", "use stable"),
        (runs.settings(train__fork_from="s3:/x"), "train.fork_from='s3:/x' is not", ""),
        (of(stable, 6, model__layers=4), "model.layers=4 cannot", "of model.layers=3 (step 6 in"),
        (of(stable, 6, model__vocab_size=300), "model.vocab_size=300", "model.vocab_size=257"),
        (of(stable, 6, optimizer__name="lion"), "optimizer.name='lion'", "optimizer.name='adamw'"),
        (of(stable, 6, data__batch_size=8), "data.batch_size=8", "from_6.batch_size=8"),
        (of(stable, 6, train__steps=6), "train.steps=6 is not beyond step 6", "train.steps=12"),
        (of(stable, 6, **diloco), "train.diloco_inner_steps=2", "train.diloco_inner_steps=0"),
    ]
    shutil.copytree(stable / "checkpoints" / "9", stable / "checkpoints" / "9.broken-1")
    for flags, says, also in cases:
        done = runs.train(stable.with_name("refused"), *flags, status=2)
        assert says in done.err and also in done.err and done.err.count("\n") == 1, done.err
        assert not stable.with_name("refused").exists()
    done = runs.train(stable, *of(stable, 6), status=2)
    assert "'stable@6' is the run that is to begin with it: use another --workdir" in done.err
