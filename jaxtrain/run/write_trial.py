"""Whether something can be written in a place, tried by writing. Nothing is left behind. Standard
library only.

Rights say little: root may write where they forbid it, and nobody may on a disk that is mounted to
be read alone.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import secrets
import stat

TRIAL_BYTES = 4096  # a disk without room takes an empty file
TRIAL_NAME = ".can_be_written"
TRIALS = 100  # processes that try one new folder together remove it from under each other
# What may be otherwise when the same command is started again, be it elsewhere: a disk that is
# full, or does not answer.
PASSES = {
    getattr(errno, name)
    for name in (
        "ENOSPC EDQUOT EIO ESTALE ETIMEDOUT EHOSTDOWN EHOSTUNREACH ENOTCONN EREMOTEIO"
    ).split()
}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a place cannot be written, in words that follow its name; and whether that may pass."""

    why: str
    passes: bool = False


def of_folder(folder: str | os.PathLike) -> Refusal | None:
    """Why nothing can be written in a folder, which may have to be made first; None where it
    can."""
    path = pathlib.Path(os.path.abspath(folder))
    missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
    trial = path / f"{TRIAL_NAME}.{secrets.token_hex(8)}"
    try:
        _write(trial)
    except OSError as error:
        return _refusal(path, error)
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()
        with contextlib.suppress(OSError):  # another process uses it by now
            for each in missing:
                each.rmdir()
    return None


def _write(trial: pathlib.Path) -> None:
    """Writes the trial file, in a folder that is made if it is missing."""
    for left in reversed(range(TRIALS)):
        try:
            trial.parent.mkdir(parents=True, exist_ok=True)
            with open(trial, "xb") as file:
                file.write(bytes(TRIAL_BYTES))
            return
        except (FileNotFoundError, FileExistsError):
            if not left:
                raise


def of_file(file: str | os.PathLike) -> Refusal | None:
    """Why a file in a folder that can be written cannot be; None where it can. Nothing of it is
    changed."""
    path = pathlib.Path(file)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return Refusal(f"is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
    except FileNotFoundError as error:
        return _refusal(path, error) if os.path.lexists(path) else None
    except OSError as error:
        return _refusal(path, error)
    return None


def _refusal(path: pathlib.Path, error: OSError) -> Refusal:
    for each in (path, *path.parents):
        part = "" if each == path else f"cannot be written: {str(each)!r} "
        if os.path.islink(each) and not os.path.exists(each):
            return Refusal(f"{part}is a link to {os.readlink(each)!r}, which does not exist")
        if os.path.exists(each):
            if not os.path.isdir(each) and error.errno in (errno.ENOTDIR, errno.EEXIST):
                return Refusal(f"{part}is not a folder")
            break
    return Refusal(f"cannot be written ({error.strerror or error})", error.errno in PASSES)
