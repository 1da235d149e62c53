"""A run on a disk that fills up: one line for each save that fails, the earlier checkpoints whole, and no loss but of time."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from support import train_runs as runs
from support.train_runs import settings

from jaxtrain.checkpoint import keeping
from jaxtrain.run.exit_status import ExitStatus

FLAGS = settings(train__steps=15, checkpoint__every=3, mesh__stage=1, metrics__tensorboard=True)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
    """A folder on a disk of its own, of this size; the test is skipped where mounting is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {' '.join(mounted.stderr.split())}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("mount"), reason="there is no mount command here")
def test_a_disk_that_fills_up_and_is_enlarged(folder):
    """There is room for two checkpoints. The last save is tried for a minute; on a larger disk the same command then goes on."""
    runs.train(folder / "undisturbed", *FLAGS, devices=1)
    with small_disk(folder / "disk", "900k") as disk:
        os.symlink(disk, folder / "run")
        done = runs.train(folder / "run", *FLAGS, devices=1, status=ExitStatus.STORAGE)
        warnings = [line for line in done.err.splitlines() if line.startswith("warning: step ")]
        why = r"No space left on device \(1 attempt in \d+ s\); the newest checkpoint is 6 in \S+; the next save tries again"
        assert [re.fullmatch(rf"warning: step (\d+) is not saved: {why}", line)[1] for line in warnings] == ["9", "12"]
        last = done.err.splitlines()[-1]
        assert re.match(r"error: step 15, the last of this run, is not saved: No space left on device \(7 attempts in 6\d s\)", last), last
        assert "Traceback" not in done.err and "absl" not in done.err and "Exception ignored" not in done.err
        assert runs.checkpoints(disk) == [3, 6] and not keeping.unfinished(keeping.epath.Path(disk / "checkpoints"))
        subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True)
        done = runs.train(folder / "run", *FLAGS, devices=1)
        assert "continuing from step 6" in done.out and runs.checkpoints(disk) == [3, 6, 9, 12, 15]
        assert runs.losses(disk) == runs.losses(folder / "undisturbed")
