"""A run whose clock is put an hour forward, and then an hour back: nothing of it goes by the time
of day.

By libfaketime, which gives one process a clock of its own, and leaves the one that counts seconds
as it is. The machine's is not touched.
"""

import glob
import pathlib
import time

import pytest
from support import train_runs as runs
from support.train_runs import settings

from jaxtrain.run.goodput import Goodput, read_goodput
from jaxtrain.run.metrics import read_metrics

LIBRARY = next(iter(glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")), "")
STEPS, HOUR = 1000, 3600
FLAGS = settings(
    train__steps=STEPS,
    train__hang_after=20,
    checkpoint__every=0,
    checkpoint__minutes=0.02,
    mesh__stage=1,
)


def clock_off_by(path: pathlib.Path) -> dict[str, str]:
    """The environment of a command whose clock is off by the seconds that stand in a file."""
    return {
        "LD_PRELOAD": LIBRARY,
        "FAKETIME_TIMESTAMP_FILE": str(path),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def last_time(workdir: pathlib.Path) -> float:
    """When the last record was written, by the run's clock."""
    return read_metrics(workdir)[-1]["time"]


@pytest.mark.full
@pytest.mark.skipif(not LIBRARY, reason="there is no libfaketime here: apt-get install faketime")
def test_a_clock_that_jumps(folder):
    """The lock holds, nothing counts as hung, saves go on by the minute, no time is negative, and
    the losses are as ever."""
    runs.train(folder / "whole", *FLAGS, devices=1)
    workdir, offset = folder / "jumps", folder / "offset"
    offset.write_text("+0")
    with runs.running(
        folder, *runs.training(workdir, *FLAGS, devices=1), environment=clock_off_by(offset)
    ) as command:
        command.wait_for(lambda: runs.last_step(workdir) > 10, "steps")
        for jump in (HOUR, -HOUR):
            offset.write_text(f"{jump:+}")
            away = lambda jump=jump: abs(last_time(workdir) - time.time() - jump) < HOUR / 2
            command.wait_for(away, "the jump")
            saved = runs.checkpoints(workdir)[-1:]
            command.wait_for(lambda saved=saved: runs.checkpoints(workdir)[-1:] > saved, "a save")
        second = runs.train(workdir, *FLAGS, devices=1, status=2)
        assert "is in use by the run of process" in second.err
        assert command.process.poll() is None, command.errors()
        command.kill()
    done = runs.train(workdir, *FLAGS, devices=1)
    assert "continuing from step" in done.out and "Traceback" not in done.err
    assert runs.losses(workdir) == runs.losses(folder / "whole")
    lines = read_goodput(workdir)
    for before, line in zip(lines, lines[1:], strict=False):
        assert line.time >= before.time and line.step >= before.step or line.start > before.start
        assert all(seconds >= 0 for seconds in line.seconds.values())
    assert 0 <= Goodput(lines).down_s < 120 and min(Goodput(lines).parts().values()) >= 0
    assert [record["wall_s"] for record in read_metrics(workdir)] == sorted(
        record["wall_s"] for record in read_metrics(workdir)
    )
