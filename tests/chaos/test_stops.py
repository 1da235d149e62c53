"""SIGTERM and SIGHUP at every moment of a run: its status, its last line, no lock, no half
checkpoint, and the same losses after all."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest
from support import train_runs as runs
from support.train_runs import settings

from jaxtrain.run.exit_status import ExitStatus

FLAGS = settings(checkpoint__every=2, train__eval_every=4, train__sample_tokens=3, mesh__stage=1)
BEFORE = ("imports", "table", "data", "tracing", "compiling")  # there is nothing to save
IN_LOOP = ("step", "saving", "finishing a save", "evaluating")
AFTER = ("ending", "sampling")  # all is saved


def stopped(workdir, moment: str, number: int, steps: int, status: int) -> runs.Done:
    """The run that gets the signal, at its end."""
    words = runs.training(workdir, *FLAGS, *settings(train__steps=steps), devices=1)
    environment = {"PYTHONPATH": f"{runs.ROOT}{os.pathsep}{runs.ROOT / 'tests'}"}
    environment |= (
        {"JAXTRAIN_CACHE": str(workdir.with_name(f"{workdir.name}.cache"))}
        if moment == "data"
        else {}
    )
    with runs.running(
        workdir.parent,
        "support.signalled",
        moment,
        str(int(number)),
        "--",
        *words[1:],
        environment=environment,
    ) as command:
        done = command.end(status)
    assert (
        "Traceback" not in done.err
        and "error" not in done.err
        and not (workdir / "run.lock").exists()
    ), moment
    return done


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_every_moment(folder, number):
    workdir = folder / f"stopped-by-{int(number)}"
    for moment in BEFORE:
        stopped(workdir, moment, number, 1000, -number)
        assert not (workdir / "checkpoints").exists()
    for moment in IN_LOOP:
        before = runs.last_step(workdir)
        done = stopped(workdir, moment, number, 1000, ExitStatus.STOPPED)
        at = runs.last_step(workdir)
        assert (
            at > before and runs.checkpoints(workdir)[-1] == at and not runs.unfinished(workdir)
        ), moment
        assert (
            f"stopped at step {at} of 1000, which is saved: the same command goes on from there"
            in done.out
        )
        assert before == 0 or f"continuing from step {before}" in done.out
    stopped(workdir, "restoring", number, 1000, -number)
    for moment in AFTER:
        steps = runs.last_step(workdir) + 3
        stopped(workdir, moment, number, steps, 0 if moment == "ending" else -number)
        assert runs.checkpoints(workdir)[-1] == steps
        assert (
            f"already has its {steps} steps"
            in runs.train(workdir, *FLAGS, *settings(train__steps=steps), devices=1).out
        )
    whole = folder / f"whole-{int(number)}"
    runs.train(whole, *FLAGS, *settings(train__steps=steps), devices=1)
    assert runs.losses(workdir) == runs.losses(whole)


ON_A_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@pytest.mark.full
@pytest.mark.parametrize("launcher", [False, True])
def test_a_terminal_that_closes(folder, launcher):
    """The run's signal is SIGHUP, and whatever it prints then is an error: it saves, and its status
    is that of a stop."""
    workdir = folder / f"closed-{launcher}"
    words = runs.training(workdir, *FLAGS, *settings(train__steps=10_000), devices=1)
    if launcher:
        words = [
            "jaxtrain.launch",
            "--processes=2",
            "--devices_per_process=1",
            "--",
            *(w for w in words[1:] if "cpu_devices" not in w),
        ]
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x18\0\x28\0\0\0\0\0")
    command = [sys.executable, "-c", ON_A_TERMINAL, "-m", *words]
    environment = os.environ | {
        "PYTHONPATH": str(runs.ROOT),
        "JAXTRAIN_CACHE": str(folder / "cache"),
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        os.set_blocking(terminal, False)
        while runs.last_step(workdir) < 3:
            assert process.poll() is None
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 1 << 16)
        os.close(terminal)
        assert process.wait(timeout=runs.PATIENCE) == ExitStatus.STOPPED
    finally:
        process.kill()
        process.wait()
    assert (
        runs.checkpoints(workdir)[-1] == runs.last_step(workdir)
        and not (workdir / "run.lock").exists()
    )
