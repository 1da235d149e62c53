"""A run whose optimizer's state is on disk: killed in an update, with a full or failing disk."""

import os
import random
import re

import pytest
from chaos.test_full_disk import small_disk
from support import train_runs as runs
from support.chaos import launched
from support.train_runs import settings

from jaxtrain.run.exit_status import ExitStatus

KILLS = 10
FLAGS = settings(
    train__steps=60, checkpoint__every=4, checkpoint__keep=3, mesh__stage=1, train__sample_tokens=0
)
# As in runs of users: with the suite's flags (support: COMPILE_QUICKLY) kernels of one layer and of
# all layers may have other last bits.
XLA_DEFAULTS = {"XLA_FLAGS": ""}
# fails the writes of the state's file, and no other, after the first 40
FAILING = """
import errno, itertools, os, sys
from jaxtrain import train_command as train
count, write = itertools.count(), os.pwritev
def failing(*words):
    if next(count) > 40:
        raise OSError(errno.{error}, os.strerror(errno.{error}))
    return write(*words)
os.pwritev = failing
sys.exit(train.main(sys.argv[1:]))
"""


def on_disk(folder) -> list[str]:
    return settings(parallel__offload="optimizer", parallel__offload_directory=folder)


@pytest.mark.full
def test_kills_in_updates(folder, pytestconfig):
    """The steps after a kill are those of a run on devices that nobody disturbs, and nothing is
    left on the disk."""
    runs.train(folder / "whole", *FLAGS, devices=1, environment=XLA_DEFAULTS)
    chance = random.Random(pytestconfig.getoption("--chaos_seed"))
    disk, workdir = folder / "disk", folder / "killed"
    words = runs.training(workdir, *FLAGS, *on_disk(disk), devices=1)
    for kill in range(KILLS):
        with runs.running(folder, *words, environment=XLA_DEFAULTS) as command:
            step = runs.last_step(workdir) + chance.randint(1, 7)
            command.wait_for(lambda step=step: runs.last_step(workdir) >= step, f"kill {kill}")
            command.kill()
    done = runs.train(workdir, *FLAGS, *on_disk(disk), devices=1, environment=XLA_DEFAULTS)
    assert "continuing from step" in done.out and os.listdir(disk) == []
    assert runs.losses(workdir) == runs.losses(folder / "whole")


@pytest.mark.full
@pytest.mark.parametrize(
    "error, words", [("EIO", "Input/output error"), ("ENOSPC", "No space left on device")]
)
def test_a_disk_that_fails_ends_the_run_by_name(folder, error, words):
    """One line, and the checkpoint before is good: the same command goes on from it."""
    workdir, disk = folder / f"failing_{error}", folder / "disk"
    (folder / "failing.py").write_text(FAILING.format(error=error))
    flags = runs.training(workdir, *FLAGS, *on_disk(disk), devices=1)[1:]
    with runs.running(folder, "failing", *flags) as command:
        done = command.end(ExitStatus.STORAGE)
    last = done.err.strip().splitlines()[-1]
    expected = (
        rf"error: parallel.offload_directory='{disk}': [\d,]+ bytes of the optimizer's state "
    )
    assert re.match(
        expected + rf"cannot be written \({words}\); checkpoints are as they were", last
    )
    assert "Traceback" not in done.err
    saved = runs.checkpoints(workdir)[-1]
    done = runs.train(workdir, *FLAGS, *on_disk(disk), devices=1)
    assert f"continuing from step {saved}" in done.out


@pytest.mark.full
def test_a_disk_that_is_too_small_is_refused(folder):
    with small_disk(folder / "small", "64k") as disk:
        done = runs.train(
            folder / "refused", *FLAGS, *on_disk(disk), devices=1, status=ExitStatus.STORAGE
        )
    last = done.err.strip().splitlines()[-1]
    assert last.startswith(f"error: parallel.offload_directory='{disk}': ") and last.endswith(
        "bytes of the optimizer's state cannot be reserved (No space left on device); checkpoints "
        "are as they were"
    )
    assert "compiled in" not in done.out and not (folder / "refused" / "checkpoints").exists()


@pytest.mark.full
def test_two_processes_go_on_with_and_without_the_disk(folder):
    """Each has a file of its own. A run that began with one goes on without, and the other way."""

    def launch(workdir, steps: int, *flags: str) -> None:
        words = settings(train__steps=steps, checkpoint__every=5, mesh__stage=2, mesh__data=1)
        command = launched(workdir, 0, *words, *flags)
        with runs.running(folder, *command, environment=XLA_DEFAULTS) as running:
            running.end()

    disk, first, second = folder / "disks", folder / "disk_first", folder / "disk_second"
    launch(first, 12, *on_disk(disk))
    launch(second, 12)
    assert os.listdir(disk) == [] and runs.losses(first) == runs.losses(second)
    launch(first, 16)
    launch(second, 16, *on_disk(disk))
    assert runs.losses(first) == runs.losses(second) and len(runs.losses(first)) == 16


@pytest.mark.full
def test_a_replayed_step(folder):
    workdir, flags = folder / "replayed", [*FLAGS, *on_disk(folder / "disk")]
    runs.train(workdir, *flags, *settings(train__steps=11), devices=1)
    done = runs.train(workdir, *flags, "--replay=10", devices=1)
    assert done.out.rstrip().endswith("the same, bit for bit")
