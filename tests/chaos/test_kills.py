"""Random kills of a run of three processes that is started again each time: it ends by itself, and
as if nothing had been.

`scripts/test.sh --full tests/chaos --kills=30` has 30 of them.
"""

import os
import random
import signal
import time

import pytest
from support import train_runs as runs
from support.chaos import launched
from support.processes import assert_gone, children, command_line, process_of_run
from support.train_runs import settings

from jaxtrain.run.goodput import Goodput, read_goodput

PROCESSES = 3
EVERY = 5  # steps between checkpoints
START_UP_S = 8.0  # seconds after a start in which some of the kills fall
# seconds before the first start and after the end, at least: the launcher, and the end of Python
LAUNCHER_S = 4.0


def wait_for_a_moment(command: runs.Running, workdir, chance: random.Random) -> None:
    """Some seconds after a start, or some steps after the newest checkpoint; a save may be under
    way then, or not. However fast steps are, only some are done meanwhile."""
    step, longest = runs.last_step(workdir) + EVERY, START_UP_S
    if chance.random() >= 0.25:
        step = max(runs.checkpoints(workdir), default=0) + chance.randint(1, 2 * EVERY)
        command.wait_for(lambda: runs.last_step(workdir) >= step, f"step {step}")
        step, longest = runs.last_step(workdir) + 2, 0.2
    end = time.monotonic() + chance.uniform(0, longest)
    command.wait_for(
        lambda: time.monotonic() > end or runs.last_step(workdir) >= step, "a moment of a step"
    )


@pytest.mark.full
@pytest.mark.parametrize("axis", ["data", "stage"])
def test_random_kills(folder, pytestconfig, axis):
    kills, seed = pytestconfig.getoption("--kills"), pytestconfig.getoption("--chaos_seed")
    chance = random.Random(seed)
    mesh = {"mesh__stage": 1, "mesh__data": 1, f"mesh__{axis}": PROCESSES}
    flags = settings(
        data__batch_size=12,
        train__steps=4 * EVERY * (kills + 1),
        checkpoint__every=EVERY,
        checkpoint__keep=3,
        **mesh,
    )
    whole, workdir = folder / f"{axis}_whole", folder / f"{axis}_killed"
    with runs.running(folder, *launched(whole, 0, *flags, processes=PROCESSES)) as command:
        undisturbed = command.end()

    redone, victims, began = [], {}, time.monotonic()
    words = launched(workdir, 10 * kills, *flags, processes=PROCESSES)
    with runs.running(folder, *words) as command:
        launcher = command.process.pid
        for kill in range(1, kills + 1):
            command.wait_for(lambda: process_of_run(launcher, PROCESSES - 1), "all processes")
            wait_for_a_moment(command, workdir, chance)
            victims |= {pid: command_line(pid) for pid in children(launcher)}
            pid = process_of_run(launcher, chance.randrange(PROCESSES))
            assert pid is not None, "the run has ended before its kills"
            os.kill(pid, signal.SIGKILL)
            command.wait_for(
                lambda kill=kill: command.errors().count("\nrestart ") >= kill, f"restart {kill}"
            )
            redone.append(runs.last_step(workdir) - max(runs.checkpoints(workdir), default=0))
        done = command.end()
    # the system may give a number to another process
    assert_gone([pid for pid, command in victims.items() if command_line(pid) == command])
    assert runs.losses(workdir) == runs.losses(whole)
    # A save that was under way is lost, and so are the steps that ran beside it; a save waits for
    # the one before.
    assert max(redone) <= 2 * EVERY, redone
    assert (done.out + done.err).partition("Traceback")[2][:3000] == ""
    goodput, wall_s = Goodput(read_goodput(workdir)), time.monotonic() - began
    assert sum(goodput.parts().values()) == pytest.approx(goodput.wall_s())
    # what a run does not count of its command: as much as that of the undisturbed one, which a
    # loaded machine makes longer
    outside = undisturbed.seconds - Goodput(read_goodput(whole)).wall_s()
    assert goodput.wall_s() + goodput.down_s == pytest.approx(
        wall_s - outside, rel=0.02, abs=max(outside, LAUNCHER_S)
    )
