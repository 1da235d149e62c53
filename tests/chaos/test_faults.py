"""One fault at a time, in a run of two processes: it is found and named, nobody is left behind, and
the run ends as if it had not been.

Random kills are in test_kills.py; faults of the storage in tests/checkpoint and
tests/test_train.py.
"""

import os
import re
import signal
import time

import pytest
from support import ROOT, train_runs as runs
from support.chaos import launched
from support.processes import assert_gone, children, process_of_run
from support.train_runs import settings

from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.run_lock import Holder, Process

STEPS = 150
HANG_AFTER = 10.0  # seconds
FLAGS = settings(
    train__steps=STEPS,
    train__hang_after=HANG_AFTER,
    checkpoint__every=10,
    mesh__stage=1,
    mesh__data=2,
)
PATHS = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


@pytest.fixture(scope="module")
def whole(folder):
    """The losses of a run that nobody disturbs."""
    with runs.running(folder, *launched(folder / "whole", 0, *FLAGS)) as command:
        command.end()
    return runs.losses(folder / "whole")


def disturbed(folder, name: str, disturb, status: str) -> tuple[runs.Done, float]:
    """A run that is disturbed once it has steps: what it has printed, and the seconds until it was
    started again. disturb: gets the launcher's pid; status: the pattern of the status with which
    the run ended first."""
    workdir = folder / name
    with runs.running(folder, *launched(workdir, 1, *FLAGS)) as command:
        launcher = command.process.pid
        command.wait_for(lambda: runs.last_step(workdir) > 12, "steps")
        before, began = children(launcher), time.monotonic()
        disturb(launcher)
        command.wait_for(
            lambda: re.search(
                rf"^restart 1 of 1: the run ended with status ({status})$", command.errors(), re.M
            ),
            "its end",
        )
        seconds = time.monotonic() - began
        done = command.end()
    assert_gone([pid for pid in before if pid != launcher])
    assert "Traceback" not in done.out + done.err and "Check failure" not in done.out + done.err
    return done, seconds


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1])
def test_a_stopped_process_is_found_and_named(folder, whole, number):
    name = f"stopped{number}"
    done, seconds = disturbed(
        folder,
        name,
        lambda launcher: os.kill(process_of_run(launcher, number), signal.SIGSTOP),
        str(int(ExitStatus.HUNG)),
    )
    assert seconds < 60
    assert re.search(
        rf"^error: hung after step \d+: .*; process {number} \(.*\) is behind: stopped, or "
        r"out of reach; the stacks",
        done.err,
        re.M,
    )
    stacks = list((folder / name / "hang").iterdir())
    assert [path.name[-5] for path in stacks] == [str(1 - number)] and "loop.py" in stacks[
        0
    ].read_text()
    assert runs.losses(folder / name) == whole


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_process_is_named_at_once(folder, whole, number):
    """Process 0 coordinates jax's runtime, which aborts the others when it dies."""
    name = f"killed{number}"
    done, seconds = disturbed(
        folder,
        name,
        lambda launcher: os.kill(process_of_run(launcher, number), signal.SIGKILL),
        "137|80|134",
    )
    assert seconds < 20
    assert re.search(
        rf"^error: process {number} \(.*\) has gone without a word, after step \d+$", done.err, re.M
    )
    assert runs.losses(folder / name) == whole


@pytest.mark.full
def test_a_run_whose_lock_is_removed_ends_at_once_and_goes_on(folder, whole):
    done, seconds = disturbed(
        folder,
        "lock",
        lambda launcher: (folder / "lock" / "run.lock").unlink(),
        str(int(ExitStatus.STORAGE)),
    )
    assert (
        seconds < 20
        and "lock/run.lock is gone, so another run may use the folder: this run ends without saving"
        in done.err
    )
    assert runs.losses(folder / "lock") == whole


@pytest.mark.full
def test_a_run_whose_folder_is_taken_over_is_not_started_again(folder):
    """It would only find the other run at work."""
    workdir = folder / "taken"
    with runs.running(folder, *launched(workdir, 3, *FLAGS)) as command:
        command.wait_for(lambda: runs.last_step(workdir) > 12, "steps")
        other = Holder(Process("elsewhere", "", "", 7, 70), "then", "0123", 12.0)
        (workdir / "run.lock").write_bytes(other.line(5))
        done = command.end(status=ExitStatus.BAD_CONFIG)
    assert (
        "restart " not in done.err
        and "taken was taken over by the run of process 7 on elsewhere" in done.err
    )
    assert (workdir / "run.lock").read_bytes() == other.line(5)


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1])
def test_one_that_is_told_to_stop_stops_all(folder, whole, number):
    name = f"told{number}"
    done, _ = disturbed(
        folder,
        name,
        lambda launcher: os.kill(process_of_run(launcher, number), signal.SIGTERM),
        str(int(ExitStatus.STOPPED)),
    )
    (stopped,) = re.findall(
        rf"^\[0\] stopped at step (\d+) of {STEPS}, which is saved", done.out, re.M
    )
    assert f"continuing from step {stopped}" in done.out
    assert runs.losses(folder / name) == whole


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "status"), [("stop", ExitStatus.BAD_NUMBERS), ("skip", 0), ("rollback", 0)]
)
def test_numbers_that_are_none(folder, policy, status):
    """Not started again where that would end in the same way."""
    workdir = folder / f"nan_{policy}"
    in_a_row = 4 if policy == "skip" else 2
    flags = [
        *FLAGS,
        *settings(train__on_nonfinite=policy, train__nonfinite_limit=in_a_row, train__steps=40),
    ]
    words = launched(
        workdir, 3, *flags, module="support.bad_batches", before=("nan:21,22,23", "--")
    )
    with runs.running(folder, *words, environment=PATHS) as command:
        done = command.end(status=status)
    assert "restart " not in done.err and "Traceback" not in done.err + done.out
    if policy == "stop":
        assert (
            re.search(r"^error: .* at step 22, batch 21", done.err, re.M)
            and runs.checkpoints(workdir)[-1] == 20
        )
    else:
        assert runs.last_step(workdir) == 40 and "warning: " in done.err
