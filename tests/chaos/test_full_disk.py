"""A disk that fills up, of the run's folder, its corpora, temporary files or /dev/shm, and when: at
the start, in between, or in a save.

One line for each save that fails, the earlier checkpoints whole, and no loss but of time. What a
run can do without costs a warning.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from support import train_runs as runs
from support.train_runs import settings

from jaxtrain.checkpoint import __main__ as checkpoint
from jaxtrain.data.row_log import read_rows
from jaxtrain.run.exit_status import ExitStatus

FLAGS = settings(train__steps=15, checkpoint__every=3, mesh__stage=1, metrics__tensorboard=True)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
    """A folder on a disk of its own, of this size; the test is skipped where mounting is not
    allowed."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {' '.join(mounted.stderr.split())}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("mount"), reason="there is no mount command here")
def test_a_disk_that_fills_up_and_is_enlarged(folder):
    """There is room for two checkpoints. The last save is tried for a minute; on a larger disk the
    same command then goes on."""
    runs.train(folder / "undisturbed", *FLAGS, devices=1)
    with small_disk(folder / "disk", "900k") as disk:
        os.symlink(disk, folder / "run")
        done = runs.train(folder / "run", *FLAGS, devices=1, status=ExitStatus.STORAGE)
        warnings = [line for line in done.err.splitlines() if line.startswith("warning: step ")]
        why = (
            r"No space left on device \(1 attempt in \d+ s\); the newest checkpoint is 6 in \S+; "
            r"the next save tries again"
        )
        assert [
            re.fullmatch(rf"warning: step (\d+) is not saved: {why}", line)[1] for line in warnings
        ] == ["9", "12"]
        last = done.err.splitlines()[-1]
        assert re.match(
            r"error: step 15, the last of this run, is not saved: No space left on device \(7 "
            r"attempts in 6\d s\)",
            last,
        ), last
        assert (
            "Traceback" not in done.err
            and "absl" not in done.err
            and "Exception ignored" not in done.err
        )
        assert runs.checkpoints(disk) == [3, 6] and not runs.unfinished(disk)
        subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True)
        done = runs.train(folder / "run", *FLAGS, devices=1)
        assert "continuing from step 6" in done.out and runs.checkpoints(disk) == [3, 6, 9, 12, 15]
        assert runs.losses(disk) == runs.losses(folder / "undisturbed")


# --- which disk, and when -------------------------------------------------------------------------

STEPS = 300
WHOLE = settings(
    train__steps=STEPS,
    checkpoint__every=30,
    checkpoint__keep=3,
    mesh__stage=1,
    metrics__tensorboard=True,
    metrics__rows=True,
)


@pytest.fixture(scope="module")
def whole(folder):
    """The losses of a run that nobody disturbs."""
    runs.train(folder / "whole", *WHOLE, devices=1)
    return runs.losses(folder / "whole")


@contextlib.contextmanager
def full(disk: pathlib.Path) -> Iterator[None]:
    """A context in which a disk has no room."""
    filler = disk / ".filler"
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"0")
        yield
    finally:
        filler.unlink(missing_ok=True)  # of a namespace that has gone with its process, too


def own_shm() -> list[str]:
    """The words of a command that gives another a small /dev/shm of its own; the test is skipped
    where that is not allowed."""
    words = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a /dev/shm of its own is not allowed here: {' '.join(tried.stderr.split())}")
    return words


def assert_one_line(done: runs.Done, pattern: str) -> None:
    """A run that was refused: by one line, before anything was compiled."""
    lines = [
        line
        for line in done.err.splitlines()
        if line.strip() and "preparing" not in line.partition("error: ")[0]
    ]
    assert len(lines) == 1 and re.search(pattern, lines[0]), done.err
    assert "compiled in" not in done.out and "Traceback" not in done.err


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("mount"), reason="there is no mount command here")
@pytest.mark.parametrize("what", ["workdir", "checkpoints", "cache"])
def test_a_disk_that_is_full_at_the_start(folder, what):
    """Such a disk may have room again: the status is one that is worth a restart. Nothing is left
    on it."""
    with small_disk(folder / f"full_{what}", "1m") as disk:
        workdir, setting = {
            "workdir": (disk / "run", f"--workdir='{disk}/run'"),
            "checkpoints": (folder / "never", f"checkpoint.directory='{disk}/x'"),
            "cache": (folder / "never", f"data.cache={disk}"),
        }[what]
        place = {
            "checkpoints": [f"--config.checkpoint.directory={disk}/x"],
            "cache": [f"--config.data.cache={disk}"],
        }.get(what, [])
        with full(disk):
            words = [*runs.training(workdir, *WHOLE, *place, devices=1), f"--workdir={workdir}"]
            with runs.running(folder, *words) as command:
                done = command.end(status=ExitStatus.STORAGE)
        assert_one_line(
            done,
            rf"^error: {re.escape(setting)}.* (cannot be written \(|is full: )No space left "
            r"on device",
        )
        assert os.listdir(disk) == [] and not (folder / "never").exists()


MOMENTS = {
    "between saves": lambda workdir: (
        runs.last_step(workdir) > 40 and runs.checkpoints(workdir) and not runs.unfinished(workdir)
    ),
    "in a save": lambda workdir: runs.checkpoints(workdir) and runs.unfinished(workdir),
}


def assert_as_undisturbed(workdir: pathlib.Path, done: runs.Done, whole: dict) -> None:
    """The run has ended well: all records are there, its last three checkpoints are whole, and
    nothing else is left."""
    assert "Traceback" not in done.err and "Exception" not in done.err and "absl" not in done.err
    assert runs.losses(workdir) == whole
    assert runs.checkpoints(workdir)[-1] == STEPS and not runs.unfinished(workdir)
    assert checkpoint.main(["verify", str(workdir)]) == 0
    assert {"loss.png", "goodput.png", "config.json", "tensorboard"} <= set(os.listdir(workdir))


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("mount"), reason="there is no mount command here")
@pytest.mark.parametrize("moment", [*MOMENTS, "in a trace"])
def test_a_disk_that_is_full_for_a_while(folder, whole, moment):
    """The run's own: what could not be written is written later, and a save that failed is tried
    again. A trace is lost."""
    workdir = folder / f"run_{moment.replace(' ', '_')}"
    traced = settings(train__profile_steps=30) if moment == "in a trace" else []
    comes = MOMENTS.get(moment, lambda workdir: runs.last_step(workdir) > 5)
    with small_disk(folder / "disk", "9m") as disk:
        os.symlink(disk, workdir)
        with runs.running(folder, *runs.training(workdir, *WHOLE, *traced, devices=1)) as command:
            command.stop_in(lambda: comes(workdir), moment)
            with full(disk):
                command.signal(signal.SIGCONT)
                warned = lambda: (
                    "/profile cannot" in command.errors()
                    or (not traced and "warning: " in command.errors())
                )
                command.wait_for(warned, "a warning")
                time.sleep(1)
            done = command.end()
        assert_as_undisturbed(workdir, done, whole)
        assert len(read_rows(workdir)) == STEPS
        assert (
            "/profile cannot be written (No space left on device): training goes on" in done.err
        ) == bool(traced)


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("mount"), reason="there is no mount command here")
@pytest.mark.parametrize("moment", ["at the start", *MOMENTS])
def test_disks_that_a_run_can_do_without(folder, whole, moment):
    """Temporary files, /dev/shm with local checkpoints in it, the cache of a prepared corpus: no
    word but of what is not saved."""
    workdir, within = folder / f"without_{moment.replace(' ', '_')}", own_shm()
    with contextlib.ExitStack() as disks:
        temporary, cache = (
            disks.enter_context(small_disk(folder / name, "1m")) for name in ("temporary", "cached")
        )
        local = (
            settings(checkpoint__local="/dev/shm/jaxtrain", checkpoint__local_every=7)
            if moment in MOMENTS
            else []
        )
        flags = [*WHOLE, *settings(data__cache=cache), *local]
        runs.train(folder / "prepares", *flags, *settings(train__steps=1), devices=1)
        environment = {"TMPDIR": str(temporary)}
        if moment not in MOMENTS:
            within = [
                *within[:-2],
                "mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 1m /dev/zero "
                '>/dev/shm/x; exec "$@"',
                "sh",
            ]
            disks.enter_context(full(temporary))
            disks.enter_context(full(cache))
        words = runs.training(workdir, *flags, devices=1)
        with runs.running(folder, *words, environment=environment, within=within) as command:
            if moment in MOMENTS:
                command.stop_in(lambda: MOMENTS[moment](workdir), moment)
                for disk in (
                    temporary,
                    cache,
                    pathlib.Path(f"/proc/{command.process.pid}/root/dev/shm"),
                ):
                    disks.enter_context(full(disk))
                command.signal(signal.SIGCONT)
            done = command.end()
        said = "the local checkpoint of step"
        assert (done.err + done.out).count(said) <= (moment in MOMENTS), done.err
        assert_as_undisturbed(workdir, done, whole)
