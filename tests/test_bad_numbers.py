"""Whole runs, through the real command, whose batches spoil them: updates skipped, the run taken back, the status of bad numbers.

A program with a guard is the same for `skip` and `rollback`, and the learning rate goes by the updates that were made. So two runs that
make the same updates have the same losses, bit for bit, whatever they passed over or skipped.
"""

import json
import os

import pytest
from support import ROOT
from support import train_runs as runs
from support.train_runs import settings

from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.metrics import ROLLED_BACK_FILE, read_metrics

ONE_DEVICE = settings(mesh__stage=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds recipe, corpus and its cache, and the workdirs of all tests here."""
    folder = tmp_path_factory.mktemp("numbers")
    runs.write_inputs(folder)
    return folder


def train(workdir, spoiled: str, *flags: str, status: int = 0, devices: int = 1) -> runs.Done:
    """The training command with spoiled batches (support/bad_batches.py)."""
    words = runs.training(workdir, *flags, *(ONE_DEVICE if devices == 1 else ()), devices=devices)
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    with runs.running(workdir.parent, "support.bad_batches", *spoiled.split(), "--", *words[1:], environment=environment) as command:
        return command.end(status)


def by_batch(workdir) -> dict[int, tuple]:
    """batch → (loss, gradient norm, learning rate) of the steps that are logged."""
    return {r["batch"]: (r["loss"], r["grad_norm"], r["learning_rate"]) for r in read_metrics(workdir) if "loss" in r}


def warnings(done: runs.Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("warning: ")]


@pytest.fixture(scope="module")
def rolled_back(folder):
    """The workdir and the output of a run that skips the update of batch 4, and goes back from batch 8, in step 9, to step 6."""
    workdir = folder / "rolled-back"
    return workdir, train(workdir, "nan:4,7,8", *settings(train__on_nonfinite="rollback", train__nonfinite_limit=2))


def test_a_run_goes_back_and_passes_over_what_spoiled_it(rolled_back):
    workdir, done = rolled_back
    records = read_metrics(workdir)
    steps = [(r["step"], r["batch"], r["skipped"], r["loss"] is None) for r in records if "loss" in r]
    before = [(at, at - 1, int(at > 4), at == 5) for at in range(1, 7)]
    assert steps == before + [(at, at + 2, 1, False) for at in range(7, 13)]
    (back,) = [r for r in records if "rolled_back_from" in r]
    assert (back["step"], back["rolled_back_from"], back["next_batch"], back["rollbacks"]) == (6, 9, 9, 1)
    lasting, bad = "2 updates in a row were skipped, from step 8 on: ", "the loss is nan (gradient norm nan)"
    assert back["why"].startswith(f"{lasting}{bad} at step 9, batch 8: ")
    lost = [json.loads(line) for line in (workdir / ROLLED_BACK_FILE).read_text().splitlines()]
    assert [(r["step"], r["batch"], r["skipped"]) for r in lost] == [(7, 6, 1), (8, 7, 2), (9, 8, 3)]
    *skips, gone_back = warnings(done)
    assert len(skips) == 3 and skips[0].startswith(f"warning: an update was skipped: {bad} at step 5, batch 4: epoch 0")
    assert gone_back.startswith("warning: back from step 9 to step 6, and on with batch 9: 2 updates in a row")
    assert runs.checkpoints(workdir) == [3, 6, 9, 12] and runs.stored_numbers_are_finite(workdir, 12)
    meta = json.loads((workdir / "checkpoints" / "12" / "meta" / "metadata").read_text())
    assert (meta["step"], meta["position"], meta["memory"]["rollbacks"]) == (12, 15, 1)


@pytest.mark.full
def test_updates_that_were_not_made_leave_nothing(folder, rolled_back):
    """Another way to the same updates: one skip after the other."""
    workdir = folder / "skipped"
    train(workdir, "nan:4,6,7,8", *settings(train__on_nonfinite="skip", train__steps=15))
    gone_back, skipped = by_batch(rolled_back[0]), by_batch(workdir)
    assert [batch for batch, (loss, *_) in skipped.items() if loss is None] == [4, 6, 7, 8]
    assert gone_back == {batch: figures for batch, figures in skipped.items() if batch not in (6, 7, 8)}


@pytest.mark.full
@pytest.mark.parametrize("stopped_at", [5, 6, 11])
def test_killed_at_any_step_the_same_command_comes_to_the_same_end(folder, rolled_back, stopped_at):
    """Before the rollback, at the checkpoint that it goes back to, and after it."""
    workdir = folder / f"killed-{stopped_at}"
    flags = settings(train__on_nonfinite="rollback", train__nonfinite_limit=2)
    train(workdir, "nan:4,7,8", *flags, *settings(train__steps=stopped_at))
    train(workdir, "nan:4,7,8", *flags)
    assert by_batch(workdir) == by_batch(rolled_back[0])


@pytest.mark.full
def test_without_a_checkpoint_a_run_begins_again(folder):
    workdir = folder / "again"
    flags = settings(train__on_nonfinite="rollback", train__nonfinite_limit=1, checkpoint__every=0)
    done = train(workdir, "nan:2", *flags, *settings(train__steps=4))
    assert [r["batch"] for r in read_metrics(workdir) if "loss" in r] == [3, 4, 5, 6]
    assert warnings(done)[-1].startswith("warning: back from step 3 to step 0, and on with batch 3: ")
    assert runs.checkpoints(workdir) == [4]


@pytest.mark.full
def test_a_run_does_not_go_back_for_ever(folder):
    workdir = folder / "for-ever"
    flags = settings(train__on_nonfinite="rollback", train__nonfinite_limit=1, train__rollbacks=2)
    done = train(workdir, "nan:5,7,9", *flags, status=ExitStatus.BAD_NUMBERS)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "the run has gone back 2 times, as often as train.rollbacks=2 lets it" in error and "Traceback" not in done.err
    assert runs.checkpoints(workdir) == [3] and len(warnings(done)) == 5


@pytest.mark.full
def test_skipping_ends_with_so_many_in_a_row(folder):
    workdir = folder / "in-a-row"
    flags = settings(train__on_nonfinite="skip", train__nonfinite_limit=3)
    done = train(workdir, "nan:2,4,5,6", *flags, status=ExitStatus.BAD_NUMBERS)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: 3 updates in a row were skipped, from step 5 on: the loss is nan")
    assert " at step 7, batch 6: epoch 0, rows " in error
    assert runs.last_step(workdir) == 7 and runs.checkpoints(workdir) == [3, 6]


@pytest.mark.full
def test_spikes_take_a_run_back(folder):
    """The first is alone, and passes; of the two in a row the first has a checkpoint, which is set aside."""
    workdir = folder / "spikes"
    flags = settings(train__on_nonfinite="rollback", train__spike_threshold=3.0, train__spike_steps=2, train__steps=36)
    done = train(workdir, "wrong:25,29,30", *flags)
    (back,) = [r for r in read_metrics(workdir) if "rolled_back_from" in r]
    assert (back["step"], back["rolled_back_from"], back["next_batch"]) == (27, 31, 31)
    assert "the last of 2 spikes in a row, " in back["why"]
    assert [name for name in os.listdir(workdir / "checkpoints") if ".broken-" in name] == ["30.broken-1"]
    assert "set aside in " in done.err and "30 (the run went back to step 27) is now 30.broken-1" in done.err
    assert runs.checkpoints(workdir)[-1] == 36 and [*runs.losses(workdir)] == list(range(1, 37))


@pytest.mark.full
@pytest.mark.parametrize("choice", ["skip", "rollback"])
def test_replicas_that_train_apart(folder, choice):
    workdir = folder / f"apart-{choice}"
    flags = settings(mesh__stage=1, mesh__replica=2, train__diloco_inner_steps=3, metrics__log_every=2)
    flags += settings(train__on_nonfinite=choice, train__nonfinite_limit=3, train__steps=9)
    train(workdir, "nan:4", *flags, devices=2)
    records = [r for r in read_metrics(workdir) if "loss" in r]
    assert records[-1]["skipped"] == 2 and records[-1]["step"] == 9 and records[-1]["loss"] is not None
    assert runs.stored_numbers_are_finite(workdir, 9)


FOUR = settings(mesh__stage=1, mesh__data=4, parallel__zero=0, train__hash_every=2)


@pytest.mark.full
def test_a_copy_that_differs_ends_the_run(folder):
    workdir = folder / "flipped"
    done = train(workdir, "flip:4", *FOUR, status=ExitStatus.BAD_NUMBERS, devices=4)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert error.startswith(
        "error: cpu:2 (process 0) has parameters that are not those of the 3 others that hold them, at step 8 (not yet at step 6)"
    )
    assert runs.last_step(workdir) == 8 and runs.checkpoints(workdir) == [3, 6]


@pytest.mark.full
def test_a_copy_that_differs_takes_a_run_back_to_the_same_batches(folder):
    rolled_back, undisturbed = folder / "flipped-back", folder / "not-flipped"
    flags = (*FOUR, *settings(train__on_nonfinite="rollback"))
    train(rolled_back, "flip:5", *flags, devices=4)  # at step 10, after a checkpoint of step 9: the one of step 6 is known to be right
    train(undisturbed, "flip:99", *flags, devices=4)
    (back,) = [r for r in read_metrics(rolled_back) if "rolled_back_from" in r]
    assert (back["step"], back["rolled_back_from"], back["next_batch"]) == (6, 10, 6)
    assert by_batch(rolled_back) == by_batch(undisturbed) and len(by_batch(rolled_back)) == 12
