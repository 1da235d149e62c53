"""scripts/launch/slurm_requeue.sh with stand-ins for Slurm's commands: which end is requeued, and
which status counts.

Under a real Slurm: tests/by_hand/rehearse_slurm.py.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from support import ROOT

from jaxtrain.run.exit_status import ExitStatus

REQUEUE = ROOT / "scripts" / "launch" / "slurm_requeue.sh"
KILLED, ABORTED = 128 + signal.SIGKILL, 128 + signal.SIGABRT
# Starts the command once per task, one after the other, with the end of task i as $END; gives the
# highest status, as srun does.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
highest=0 task=0
for end in $ENDS; do
    SLURM_PROCID=$task END=$end "$@"
    status=$?
    ((status > highest)) && highest=$status
    ((task++))
done
exit "$highest"
"""
SQUEUE = '#!/bin/sh\necho "$STATE"\n'
RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n'


@pytest.fixture
def commands(tmp_path):
    """A folder of stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "srun": SRUN,
        "squeue": SQUEUE,
        "scontrol": RECORD,
        "scancel": RECORD,
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def environment(commands, **variables: str) -> dict[str, str]:
    """A batch script's, in the folder above the commands."""
    own = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "CALLS": str(commands.parent / "calls"),
        "STATE": "RUNNING",
    }
    return own | {"SLURM_SUBMIT_DIR": str(commands.parent), "SLURM_JOB_ID": "7"} | variables


def batch(command: str) -> list[str]:
    return [
        "bash",
        "-uo",
        "pipefail",
        "-c",
        f"source {REQUEUE}; run_and_requeue --wait=1 -- {command}",
    ]


def end(commands, *statuses: int, **variables: str) -> tuple[int, bool]:
    """The status of the batch script for these ends of its tasks, in this order, and whether it was
    requeued."""
    calls = commands.parent / "calls"
    calls.write_text("")
    own = environment(commands, ENDS=" ".join(str(int(status)) for status in statuses), **variables)
    done = subprocess.run(
        batch("bash -c 'exit $END'"),
        env=own,
        cwd=commands.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not list(commands.parent.glob(".statuses-*")), "something is left behind"
    requeued = calls.read_text() == "scontrol requeue 7\n"
    assert requeued or not calls.read_text()
    assert requeued == (": requeued, restart" in done.stdout)
    return done.returncode, requeued


def test_every_status_is_requeued_where_it_goes_on(commands):
    text = f"source {REQUEUE}; for status in {{0..255}}; do goes_on $status && echo $status; done"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    expected = {status.value for status in ExitStatus if status.goes_on} | set(range(129, 256)) - {
        ExitStatus.INTERRUPTED
    }
    assert {int(word) for word in done.stdout.split()} == expected


@pytest.mark.parametrize(
    "ends, status, requeued",
    [
        ((0, 0), 0, False),
        ((ExitStatus.STOPPED, ExitStatus.STOPPED), 75, True),
        ((KILLED, ExitStatus.LOST_PEER), KILLED, True),
        # the fault is what the death of the other looks like
        ((KILLED, ExitStatus.FAULT), KILLED, True),
        ((ExitStatus.FAULT, ABORTED), 1, False),
        ((ExitStatus.BAD_CONFIG, KILLED), 2, False),
        ((ABORTED, ExitStatus.BAD_NUMBERS), 81, False),  # a verdict wins, also late
        ((0, ExitStatus.STORAGE), 74, True),
    ],
)
def test_the_status_that_counts(commands, ends, status, requeued):
    assert end(commands, *ends) == (status, requeued)


@pytest.mark.parametrize(("loss", "status", "requeued"), [("gone", 74, True), ("taken", 2, False)])
def test_a_run_that_loses_its_lock_is_requeued_unless_another_run_has_it(
    commands, loss, status, requeued
):
    """A real lock that is really lost; with the other processes of the run killed."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    own = environment(commands, ENDS=f"1 {KILLED}", PYTHONPATH=paths)
    lose = f"(($SLURM_PROCID)) && exit $END; exec {sys.executable} -m support.lock_loser {loss}"
    done = subprocess.run(
        batch(f"bash -c '{lose}'"),
        env=own,
        cwd=commands.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, ": requeued, restart 1" in done.stdout) == (status, requeued), done


def test_restarts_are_bounded_but_for_stops_on_request(commands):
    assert end(commands, KILLED, SLURM_RESTART_COUNT="19") == (KILLED, True)
    assert end(commands, KILLED, SLURM_RESTART_COUNT="20") == (KILLED, False)
    assert end(commands, KILLED, SLURM_RESTART_COUNT="1", MAX_RESTARTS="1") == (KILLED, False)
    assert end(commands, ExitStatus.STOPPED, SLURM_RESTART_COUNT="500") == (75, True)


def test_tasks_of_an_array_train_a_run_of_a_sweep_and_are_requeued_by_their_names(commands):
    """slurm.sbatch with and without an array."""
    folder, calls = commands.parent, commands.parent / "calls"
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "python").write_text('#!/bin/sh\necho "$@" >>said\nexit 75\n')
    (folder / "python").chmod(0o755)
    script = ["bash", str(REQUEUE.with_name("slurm.sbatch")), "--grid", "a.b=1,2 3"]
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    for variables in ({}, array):
        own = environment(commands, ENDS="75", PYTHON=str(folder / "python"), **variables)
        assert subprocess.run(script, cwd=folder, env=own).returncode == 75
    assert (folder / "said").read_text().splitlines() == [
        "-m jaxtrain train --grid a.b=1,2 3",
        "-m jaxtrain sweep --grid a.b=1,2 3 --index=1",
    ]
    assert calls.read_text() == "scontrol requeue 7\nscontrol requeue 7_1\n"


def test_a_cancelled_job_is_not_requeued(commands):
    assert end(commands, ExitStatus.STOPPED, STATE="COMPLETING") == (75, False)


def test_a_task_that_leaves_no_status(commands):
    """As of a node that is gone: srun's own status counts."""
    (commands / "srun").write_text(f"#!/bin/sh\nexit {KILLED}\n")
    assert end(commands) == (KILLED, True)


def test_a_signal_to_the_script_is_passed_on_to_the_tasks(commands):
    """By scancel, which is known by its call here; the script waits until the step has ended."""
    started, calls = commands.parent / "started", commands.parent / "calls"
    own = environment(commands, ENDS="75")
    wait = f'bash -c "touch {started}; until [ -s {calls} ]; do sleep 0.02; done; exit 75"'
    process = subprocess.Popen(
        batch(wait), env=own, cwd=commands.parent, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert calls.read_text() == "scancel --signal=TERM 7\nscontrol requeue 7\n"


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_pyxis.sbatch"])
def test_the_templates(name):
    """They parse, allow requeueing, keep one log, and leave time to save before the limit."""
    path = REQUEUE.with_name(name)
    subprocess.run(["bash", "-n", path], check=True)
    options = {
        line.split()[1].partition("=")[0]: line.split()[1]
        for line in path.read_text().splitlines()
        if line.startswith("#SBATCH")
    }
    assert (
        "--requeue" in options
        and options["--open-mode"] == "--open-mode=append"
        and options["--signal"] == "--signal=B:TERM@300"
    )
    assert "run_and_requeue" in path.read_text() and "--coordinator" not in path.read_text()


def test_the_rehearsal_says_what_it_needs():
    """Without root, or without Slurm: one line and status 2."""
    script = ROOT / "tests" / "by_hand" / "rehearse_slurm.py"
    own = {"PATH": "/nowhere"}
    done = subprocess.run([sys.executable, script], env=own, capture_output=True, text=True)
    needs = "missing: use --install" if os.geteuid() == 0 else "use sudo"
    assert done.returncode == 2 and needs in done.stderr and done.stderr.count("\n") == 1
