"""Whole runs, through the real command, whose batches spoil them: updates skipped, the run taken
back, the status of bad numbers.

A program with a guard is the same for `skip` and `rollback`, and the learning rate goes by the
updates that were made. So two runs that make the same updates have the same losses, bit for bit,
whatever they passed over or skipped.
"""

import contextlib
import json
import os
import signal
import socket

import pytest
from support import ROOT, train_runs as runs
from support.train_runs import settings

from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.metrics import ROLLED_BACK_FILE, read_metrics

ONE_DEVICE = settings(mesh__stage=1)


def train(workdir, spoiled: str, *flags: str, status: int = 0, devices: int = 1) -> runs.Done:
    """The training command with spoiled batches (support/bad_batches.py)."""
    words = runs.training(workdir, *flags, *(ONE_DEVICE if devices == 1 else ()), devices=devices)
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    with runs.running(
        workdir.parent,
        "support.bad_batches",
        *spoiled.split(),
        "--",
        *words[1:],
        environment=environment,
    ) as command:
        return command.end(status)


def by_batch(workdir) -> dict[int, tuple]:
    """batch → (loss, gradient norm, learning rate) of the steps that are logged."""
    return {
        r["batch"]: (r["loss"], r["grad_norm"], r["learning_rate"])
        for r in read_metrics(workdir)
        if "loss" in r
    }


def warnings(done: runs.Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("warning: ")]


@pytest.fixture(scope="module")
def rolled_back(folder):
    """The workdir and the output of a run that skips the update of batch 4, and goes back from
    batch 8, in step 9, to step 6."""
    workdir = folder / "rolled-back"
    return workdir, train(
        workdir, "nan:4,7,8", *settings(train__on_nonfinite="rollback", train__nonfinite_limit=2)
    )


def test_a_run_goes_back_and_passes_over_what_spoiled_it(rolled_back):
    workdir, done = rolled_back
    records = read_metrics(workdir)
    steps = [
        (r["step"], r["batch"], r["skipped"], r["loss"] is None) for r in records if "loss" in r
    ]
    before = [(at, at - 1, int(at > 4), at == 5) for at in range(1, 7)]
    assert steps == before + [(at, at + 2, 1, False) for at in range(7, 13)]
    (back,) = [r for r in records if "rolled_back_from" in r]
    assert (back["step"], back["rolled_back_from"], back["next_batch"], back["rollbacks"]) == (
        6,
        9,
        9,
        1,
    )
    lasting, bad = (
        "2 updates in a row were skipped, from step 8 on: ",
        "the loss is nan (gradient norm nan)",
    )
    assert back["why"].startswith(f"{lasting}{bad} at step 9, batch 8: ")
    lost = [json.loads(line) for line in (workdir / ROLLED_BACK_FILE).read_text().splitlines()]
    assert [(r["step"], r["batch"], r["skipped"]) for r in lost] == [
        (7, 6, 1),
        (8, 7, 2),
        (9, 8, 3),
    ]
    *skips, gone_back = warnings(done)
    assert len(skips) == 3 and skips[0].startswith(
        f"warning: an update was skipped: {bad} at step 5, batch 4: epoch 0"
    )
    assert gone_back.startswith(
        "warning: back from step 9 to step 6, and on with batch 9: 2 updates in a row"
    )
    assert runs.checkpoints(workdir) == [3, 6, 9, 12] and runs.stored_numbers_are_finite(
        workdir, 12
    )
    meta = json.loads((workdir / "checkpoints" / "12" / "meta" / "metadata").read_text())
    assert (meta["step"], meta["position"], meta["memory"]["rollbacks"]) == (12, 15, 1)


@pytest.mark.full
def test_updates_that_were_not_made_leave_nothing(folder, rolled_back):
    """Another way to the same updates: one skip after the other."""
    workdir = folder / "skipped"
    train(workdir, "nan:4,6,7,8", *settings(train__on_nonfinite="skip", train__steps=15))
    gone_back, skipped = by_batch(rolled_back[0]), by_batch(workdir)
    assert [batch for batch, (loss, *_) in skipped.items() if loss is None] == [4, 6, 7, 8]
    assert gone_back == {
        batch: figures for batch, figures in skipped.items() if batch not in (6, 7, 8)
    }


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
    assert warnings(done)[-1].startswith(
        "warning: back from step 3 to step 0, and on with batch 3: "
    )
    assert runs.checkpoints(workdir) == [4]


@pytest.mark.full
def test_a_run_does_not_go_back_for_ever(folder):
    workdir = folder / "for-ever"
    flags = settings(train__on_nonfinite="rollback", train__nonfinite_limit=1, train__rollbacks=2)
    done = train(workdir, "nan:5,7,9", *flags, status=ExitStatus.BAD_NUMBERS)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert (
        "the run has gone back 2 times, as often as train.rollbacks=2 lets it" in error
        and "Traceback" not in done.err
    )
    assert runs.checkpoints(workdir) == [3] and len(warnings(done)) == 5


@pytest.mark.full
def test_a_run_whose_checkpoints_are_all_too_new_does_not_begin_anew(folder):
    workdir = folder / "too-new"
    flags = settings(
        train__on_nonfinite="rollback",
        train__nonfinite_limit=2,
        checkpoint__every=1,
        checkpoint__keep=1,
    )
    done = train(workdir, "nan:4,5", *flags, status=ExitStatus.BAD_NUMBERS)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert (
        "the checkpoints that are kept begin with step 5, and the run would have to go back "
        "further: keep more of them" in error
    )
    assert runs.checkpoints(workdir) == [5]


@pytest.mark.full
def test_skipping_ends_with_so_many_in_a_row(folder):
    workdir = folder / "in-a-row"
    flags = settings(train__on_nonfinite="skip", train__nonfinite_limit=3)
    done = train(workdir, "nan:2,4,5,6", *flags, status=ExitStatus.BAD_NUMBERS)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert error.startswith(
        "error: 3 updates in a row were skipped, from step 5 on: the loss is nan"
    )
    assert " at step 7, batch 6: epoch 0, sequences " in error
    assert runs.last_step(workdir) == 7 and runs.checkpoints(workdir) == [3, 6]


@pytest.mark.full
def test_spikes_take_a_run_back(folder):
    """The first is alone, and passes; of the two in a row the first has a checkpoint, which is set
    aside."""
    workdir = folder / "spikes"
    flags = settings(
        train__on_nonfinite="rollback",
        train__spike_threshold=3.0,
        train__spike_steps=2,
        train__steps=36,
    )
    done = train(workdir, "wrong:25,29,30", *flags)
    (back,) = [r for r in read_metrics(workdir) if "rolled_back_from" in r]
    assert (back["step"], back["rolled_back_from"], back["next_batch"]) == (27, 31, 31)
    assert "the last of 2 spikes in a row, " in back["why"]
    assert [name for name in os.listdir(workdir / "checkpoints") if ".broken-" in name] == [
        "30.broken-1"
    ]
    assert (
        "set aside in " in done.out
        and "30 (the run went back to step 27) is now 30.broken-1" in done.out
    )
    assert runs.checkpoints(workdir)[-1] == 36 and [*runs.losses(workdir)] == list(range(1, 37))


APART = settings(
    mesh__stage=1,
    mesh__replica=2,
    train__diloco_inner_steps=3,
    metrics__log_every=3,
    train__steps=9,
)


@pytest.mark.full
@pytest.mark.parametrize(("spoiled", "skipped"), [("nan:4", 2), ("half:4", 1)])
def test_replicas_that_train_apart_skip_their_own(folder, spoiled, skipped):
    workdir = folder / f"apart-{skipped}"
    done = train(workdir, spoiled, *APART, *settings(train__on_nonfinite="skip"), devices=2)
    records = [r for r in read_metrics(workdir) if "loss" in r]
    assert [(r["step"], r["skipped"]) for r in records] == [
        (1, 0),
        (3, 0),
        (6, skipped),
        (9, skipped),
    ]
    assert all(r["loss"] is not None for r in records)
    many = "an update was" if skipped == 1 else "2 updates were"
    assert [line.partition(": the")[0] for line in warnings(done)] == [f"warning: {many} skipped"]
    assert runs.stored_numbers_are_finite(workdir, 9)


def train_in_two(workdir, spoiled: str, *flags: str, status: int = 0) -> list[runs.Done]:
    """Two processes of one device each, started one by one: the launcher has a command of its
    own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    with contextlib.ExitStack() as commands:
        started = []
        for number in (0, 1):
            own = ["--processes=2", f"--process_id={number}", f"--coordinator=localhost:{port}"]
            words = [
                "support.bad_batches",
                *spoiled.split(),
                "--",
                *runs.training(workdir, *flags, *own, devices=1)[1:],
            ]
            started.append(
                commands.enter_context(
                    runs.running(workdir.parent, *words, environment=environment)
                )
            )
        return [command.end(status) for command in started]


@pytest.mark.full
def test_two_processes_go_back_together(folder, rolled_back):
    """A stage in each: the trajectory of one process on one device, to rounding."""
    workdir = folder / "two"
    first, second = train_in_two(
        workdir, "nan:4,7,8", *settings(train__on_nonfinite="rollback", train__nonfinite_limit=2)
    )
    assert warnings(first)[-1].startswith(
        "warning: back from step 9 to step 6, and on with batch 9: "
    ) and not warnings(second)
    found, expected = by_batch(workdir), by_batch(rolled_back[0])
    assert found.keys() == expected.keys()
    for batch, figures in expected.items():
        assert found[batch] == (pytest.approx(figures, rel=1e-4) if figures[0] else figures), batch


@pytest.mark.full
def test_replicas_in_two_processes_go_back_where_they_meet(folder):
    """The first one's numbers are not finite in steps 5 and 6; the other learns of that in step
    6."""
    workdir = folder / "two-apart"
    flags = settings(train__on_nonfinite="rollback", train__nonfinite_limit=2)
    first, second = train_in_two(workdir, "half:4,5", *APART, *flags)
    (back,) = [r for r in read_metrics(workdir) if "rolled_back_from" in r]
    assert (back["step"], back["rolled_back_from"], back["next_batch"]) == (3, 6, 6)
    records = [r for r in read_metrics(workdir) if "loss" in r]
    assert [(r["step"], r["batch"], r["skipped"]) for r in records] == [
        (1, 0, 0),
        (3, 2, 0),
        (6, 8, 0),
        (9, 11, 0),
    ]


FOUR = settings(mesh__stage=1, mesh__data=4, parallel__zero=0, train__hash_every=2)


@pytest.mark.full
def test_a_copy_that_differs_ends_the_run(folder):
    workdir = folder / "flipped"
    done = train(workdir, "flip:4", *FOUR, status=ExitStatus.BAD_NUMBERS, devices=4)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert error.startswith(
        "error: cpu:2 (process 0) has parameters that are not those of the 3 others that hold "
        "them, at step 8 (not yet at step 6)"
    )
    assert runs.last_step(workdir) == 8 and runs.checkpoints(workdir) == [3, 6]


@pytest.mark.full
def test_a_copy_that_differs_takes_a_run_back_to_the_same_batches(folder):
    rolled_back, undisturbed = folder / "flipped-back", folder / "not-flipped"
    flags = (*FOUR, *settings(train__on_nonfinite="rollback"))
    # at step 10, after a checkpoint of step 9: the one of step 6 is known to be right
    train(rolled_back, "flip:5", *flags, devices=4)
    train(undisturbed, "flip:99", *flags, devices=4)
    (back,) = [r for r in read_metrics(rolled_back) if "rolled_back_from" in r]
    assert (back["step"], back["rolled_back_from"], back["next_batch"]) == (6, 10, 6)
    assert by_batch(rolled_back) == by_batch(undisturbed) and len(by_batch(rolled_back)) == 12


# --- replays --------------------------------------------------------------------------------------


# as of `rolled_back`
ROLLING_BACK = settings(train__on_nonfinite="rollback", train__nonfinite_limit=2)


def replayed(
    workdir, at: int, *flags: str, spoiled: str = "nan:4,7,8", status: int = 0, devices: int = 1
) -> runs.Done:
    """The command with --replay, which leaves the run's folder as it is."""
    files = runs.contents(workdir)
    done = train(
        workdir, spoiled, *ROLLING_BACK, *flags, f"--replay={at}", status=status, devices=devices
    )
    assert runs.contents(workdir) == files
    return done


@pytest.mark.full
def test_a_step_after_a_rollback_is_the_same_bit_for_bit(rolled_back):
    done = replayed(rolled_back[0], 8)
    *_, replaying, loss, norm, verdict = done.out.splitlines()
    assert replaying == "replaying step 8 from the checkpoint of step 6, with batches 9 to 10"
    assert verdict == "the same, bit for bit" and "difference 0" in loss and "difference 0" in norm
    assert f"loss of step 8: {runs.losses(rolled_back[0])[8][0]:.9g} in metrics.jsonl" in loss


@pytest.mark.full
def test_a_step_on_another_mesh_is_the_same_to_rounding(rolled_back):
    done = replayed(rolled_back[0], 12, *settings(mesh__stage=2), devices=2)
    assert done.out.splitlines()[-1].startswith("the same to rounding (0.0001 of each")


@pytest.mark.full
def test_a_step_whose_batch_is_another_now_is_not_the_same(rolled_back):
    done = replayed(rolled_back[0], 8, spoiled="wrong:9", status=ExitStatus.BAD_NUMBERS)
    assert done.out.splitlines()[-1].startswith("not the same: more than 0.0001 of each")


@pytest.mark.full
def test_the_step_that_ended_a_run_is_bad_again(folder):
    workdir = folder / "stopped"
    stopping = settings(train__on_nonfinite="stop")
    train(workdir, "nan:7", *stopping, status=ExitStatus.BAD_NUMBERS)
    done = replayed(workdir, 8, *stopping, spoiled="nan:7")
    assert "loss of step 8: not finite in metrics.jsonl, nan now, difference 0" in done.out


@pytest.mark.full
def test_a_step_that_cannot_be_replayed_is_a_line(rolled_back):
    workdir = rolled_back[0]
    no_record = "has no record of step 40 (metrics.log_every): use --replay=12 (or 9, 10, 11)"
    for at, said in (
        (40, no_record),
        (3, "has no checkpoint before step 3: use --replay=4 (or 5, 6, 7)"),
    ):
        done = replayed(workdir, at, status=ExitStatus.BAD_CONFIG)
        (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert said in error and "Traceback" not in done.err


@pytest.mark.full
def test_replaying_a_run_that_is_at_work(folder):
    """Its lock is in nobody's way."""
    workdir = folder / "at-work"
    flags = (*ROLLING_BACK, *settings(train__steps=4000, checkpoint__keep=1000))
    words = runs.training(workdir, *flags, *ONE_DEVICE, devices=1)
    with runs.running(folder, *words) as command:
        command.wait_for(
            lambda: 3 in runs.checkpoints(workdir) and runs.last_step(workdir) > 5,
            "a checkpoint and a step after it",
        )
        done = train(workdir, "nan:99999", *flags, "--replay=5")
        assert command.process.poll() is None
        command.signal(signal.SIGTERM)
        command.end(ExitStatus.STOPPED)
    assert done.out.splitlines()[-1] == "the same, bit for bit"


@pytest.mark.full
def test_replicas_that_train_apart_are_replayed_over_an_exchange(folder):
    workdir = folder / "apart-again"
    flags = settings(
        mesh__stage=1,
        mesh__replica=2,
        train__diloco_inner_steps=3,
        metrics__log_every=1,
        train__steps=6,
    )
    flags += settings(checkpoint__every=2, train__on_nonfinite="stop")
    train(workdir, "nan:99", *flags, devices=2)
    done = replayed(workdir, 4, *flags, devices=2)
    assert "from the checkpoint of step 2, with batches 2 to 3" in done.out
    assert done.out.splitlines()[-1] == "the same, bit for bit"
