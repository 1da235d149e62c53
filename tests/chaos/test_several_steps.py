"""Runs with several steps in a program, some of them clipped or skipped, that are killed, stopped
and taken back: every line of their metrics is that of a run of one step at a time, bit for bit."""

import os
import pathlib
import random
import signal

import pytest
from support import train_runs as runs
from support.chaos import launched
from support.train_runs import settings

from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.metrics import METRICS, host, read_metrics

KILLS = STOPS = 4
# Norms fall below this limit after some twenty steps, and a few are above it then.
CLIP = 1.1
# No interval of the program's steps divides the run's or the checkpoints'.
FLAGS = settings(
    train__steps=40,
    train__sample_tokens=0,
    train__on_nonfinite="skip",
    checkpoint__every=4,
    pipeline__schedule="zb_h2",
    optimizer__clip_norm=CLIP,
)
TOGETHER = settings(pipeline__steps_per_program=3)
SPOILED = ("nan:16,31", "--")
# XLA's default flags, as in runs of users
ENVIRONMENT = {
    "XLA_FLAGS": "",
    "PYTHONPATH": os.pathsep.join([str(runs.ROOT), str(runs.ROOT / "tests")]),
}
TWO_PROCESSES = settings(mesh__data=2)


def numbers(workdir: pathlib.Path) -> dict[int, dict]:
    """step → what its program computed, and its batch."""
    names = [name for name, metric in METRICS.items() if metric.combine is not host]
    records = [record for record in read_metrics(workdir) if "loss" in record]
    of_steps = {r["step"]: {name: r.get(name) for name in ("batch", *names)} for r in records}
    assert len(of_steps) == len(records), "a step is there twice"
    return of_steps


def one_process(workdir: pathlib.Path, *flags: str, devices: int = 2) -> list[str]:
    """The words of the command with spoiled batches."""
    words = runs.training(workdir, *FLAGS, *flags, devices=devices)
    return ["support.bad_batches", *SPOILED, *words[1:]]


def two_processes(workdir: pathlib.Path, *flags: str) -> list[str]:
    """The same on two processes of two devices each."""
    flags = (*FLAGS, *TWO_PROCESSES, *flags)
    return launched(
        workdir, 0, *flags, module="support.bad_batches", before=SPOILED, devices=2
    )


def run(folder: pathlib.Path, words: list[str], status: int = 0) -> runs.Done:
    with runs.running(folder, *words, environment=ENVIRONMENT) as command:
        return command.end(status)


def wait_for_steps(command: runs.Running, workdir: pathlib.Path, chance: random.Random) -> None:
    """Returns when some further steps of the run are logged."""
    step = runs.last_step(workdir) + chance.randint(1, 6)
    command.wait_for(lambda: runs.last_step(workdir) >= step, f"step {step}")


@pytest.mark.full
def test_kills(folder, pytestconfig):
    run(folder, one_process(folder / "single"))
    chance = random.Random(pytestconfig.getoption("--chaos_seed"))
    workdir = folder / "killed"
    words = one_process(workdir, *TOGETHER)
    for _ in range(KILLS):
        with runs.running(folder, *words, environment=ENVIRONMENT) as command:
            wait_for_steps(command, workdir, chance)
            command.kill()
    done = run(folder, words)
    assert "continuing from step" in done.out
    assert numbers(workdir) == numbers(folder / "single")
    norms = [record["grad_norm"] for record in numbers(workdir).values()]
    assert norms[16] is None and any(n and n > CLIP for n in norms[24:])


@pytest.mark.full
def test_two_processes_stopped_and_taken_back(folder, pytestconfig):
    """They have the numbers of one process, whatever stops them; a rollback from the middle of a
    program goes on with the batch after the one at fault; a step out of a program is replayed."""
    run(folder, one_process(folder / "one_process", *TWO_PROCESSES, *TOGETHER, devices=4))
    chance = random.Random(pytestconfig.getoption("--chaos_seed"))
    workdir = folder / "stopped"
    words = two_processes(workdir, *TOGETHER)
    for number in (signal.SIGTERM, signal.SIGINT) * (STOPS // 2):
        with runs.running(folder, *words, environment=ENVIRONMENT) as command:
            wait_for_steps(command, workdir, chance)
            command.signal(number)
            interrupted = number == signal.SIGINT
            command.end(ExitStatus.INTERRUPTED if interrupted else ExitStatus.STOPPED)
        assert runs.checkpoints(workdir)[-1] == runs.last_step(workdir)
    done = run(folder, words)
    assert "steps ran without a barrier between them" in done.out
    assert numbers(workdir) == numbers(folder / "one_process")

    back = settings(train__on_nonfinite="rollback", train__nonfinite_limit=1)
    run(folder, two_processes(folder / "taken_back", *back, *TOGETHER))
    run(folder, two_processes(folder / "taken_back_single", *back))
    of_steps = numbers(folder / "taken_back")
    assert of_steps == numbers(folder / "taken_back_single")
    assert 16 not in [record["batch"] for record in of_steps.values()]
    done = run(folder, two_processes(folder / "taken_back", *back, *TOGETHER, "--replay=39"))
    assert done.out.rstrip().endswith("the same, bit for bit")
