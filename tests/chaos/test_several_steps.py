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

KILLS = 4
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


def assert_same_on_two_processes(workdir: pathlib.Path, expected: pathlib.Path) -> None:
    """All numbers have the same bits but the norm of the parameters, whose last one differs at
    times."""
    of_steps, others = numbers(workdir), numbers(expected)
    for step, record in of_steps.items():
        norm = others[step]["param_norm"]
        assert record.pop("param_norm") == pytest.approx(norm, rel=1e-6), f"step {step}"
        del others[step]["param_norm"]
    assert of_steps == others


def one_process(workdir: pathlib.Path, *flags: str, devices: int = 2) -> list[str]:
    """The words of the command with spoiled batches."""
    words = runs.training(workdir, *FLAGS, *flags, devices=devices)
    return ["support.bad_batches", *SPOILED, *words[1:]]


def two_processes(workdir: pathlib.Path, *flags: str) -> list[str]:
    """The same on two processes of two devices each."""
    flags = (*FLAGS, *TWO_PROCESSES, *flags)
    return launched(workdir, 0, *flags, module="support.bad_batches", before=SPOILED, devices=2)


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
    """They have the numbers of one step at a time, whatever stops them, and those of one process to
    rounding: sums over processes have another order. A rollback from the middle of a program goes
    on with the batch after the one at fault; a step out of a program is replayed."""
    run(folder, two_processes(folder / "one_step_each"))
    chance = random.Random(pytestconfig.getoption("--chaos_seed"))
    workdir = folder / "stopped"
    words = two_processes(workdir, *TOGETHER)
    for number, status in (
        (signal.SIGTERM, ExitStatus.STOPPED),
        (signal.SIGINT, ExitStatus.INTERRUPTED),
    ):
        with runs.running(folder, *words, environment=ENVIRONMENT) as command:
            wait_for_steps(command, workdir, chance)
            command.signal(number)
            command.end(status)
        assert runs.checkpoints(workdir)[-1] == runs.last_step(workdir)
    done = run(folder, words)
    assert "steps ran without a barrier between them" in done.out
    assert_same_on_two_processes(workdir, folder / "one_step_each")
    run(folder, one_process(folder / "one_process", *TWO_PROCESSES, *TOGETHER, devices=4))
    single, stopped = runs.losses(folder / "one_process"), runs.losses(workdir)
    finite = {step for step, (loss, _) in single.items() if loss is not None}
    assert finite == {step for step, (loss, _) in stopped.items() if loss is not None}
    runs.assert_same_trajectory({step: stopped[step] for step in finite}, single)

    back = settings(train__on_nonfinite="rollback", train__nonfinite_limit=1)
    run(folder, two_processes(folder / "taken_back", *back, *TOGETHER))
    run(folder, two_processes(folder / "taken_back_one_step_each", *back))
    assert_same_on_two_processes(folder / "taken_back", folder / "taken_back_one_step_each")
    assert 16 not in [record["batch"] for record in numbers(folder / "taken_back").values()]
    done = run(folder, two_processes(folder / "taken_back", *back, *TOGETHER, "--replay=39"))
    assert done.out.rstrip().endswith("the same, bit for bit")
