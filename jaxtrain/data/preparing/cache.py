"""Folders of the cache, each of which is complete or absent: it is made under another name, and
then renamed.

They are correct without any lock, since a rename is atomic, and the first of two finished folders
stays. The lock only keeps processes of one machine from doing the same work at the same time. This
module does not know what is in a folder.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from jaxtrain.config import flag_text
from jaxtrain.data.tokenizer import DataError
from jaxtrain.run import files, streams
from jaxtrain.run.exit_status import ExitStatus

T = TypeVar("T")
UNFINISHED = ".tmp-"  # in the names of folders that are being made


def folder_of(setting: str) -> pathlib.Path:
    """The cache's folder for `data.cache`: as named, else $JAXTRAIN_CACHE, else
    ~/.cache/jaxtrain. Raises CacheError without a home folder for it."""
    name = setting or os.environ.get("JAXTRAIN_CACHE") or "~/.cache/jaxtrain"
    folder = pathlib.Path(os.path.expanduser(name))
    if name.startswith("~") and str(folder) == name:
        raise CacheError(
            f"data.cache={name} is below a home folder, and this user has none: "
            f"{_instead(folder, full=False)}"
        )
    return folder.resolve()


class CacheError(DataError):
    """A cache that cannot be written; the text is one line."""

    status = ExitStatus.BAD_CONFIG


class FullCacheError(CacheError):
    """A cache whose disk is full."""

    status = ExitStatus.STORAGE


def refusal(error: OSError, root: pathlib.Path) -> CacheError | None:
    """The cache error behind an OSError: a full disk, or a path of the cache at `root` that cannot
    be written; None for an error of other files.

    A preparation writes into the cache alone, so an error of a full disk is the cache's even if it
    names no file.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FullCacheError(
            f"data.cache={root} is full: {error.strerror}: {_instead(root, full=True)}"
        )
    path = pathlib.Path(os.path.abspath(os.fsdecode(error.filename))) if error.filename else None
    if path and (path.is_relative_to(root) or root.is_relative_to(path)):
        return CacheError(
            f"data.cache={root} cannot be written: {path}: {error.strerror}: "
            f"{_instead(root, full=False)}"
        )
    return None


def _instead(root: pathlib.Path, full: bool) -> str:
    """Advice that names another cache: one on another disk if this one is full."""
    which = "with more room" if full else "that can be written"
    for place in map(pathlib.Path, (os.path.expanduser("~/.cache/jaxtrain"), "/tmp/jaxtrain")):
        if (
            place.is_absolute()
            and place.resolve() != root
            and not (full and _disk(place) == _disk(root))
            and files.try_folder(place) is None
        ):
            return f"use {flag_text('config.data.cache', str(place))} (or another folder {which})"
    return f"name a folder {which} with --config.data.cache"


def _disk(path: pathlib.Path) -> int:
    return next(parent for parent in (path, *path.parents) if parent.exists()).stat().st_dev


def ensure(
    folder: pathlib.Path,
    opened: Callable[[pathlib.Path], T | None],
    make: Callable[[pathlib.Path], None],
    progress: bool,
) -> T:
    """What `opened` returns for `folder`, which is made by make(temporary folder) if that is
    nothing: the folder is not complete yet.

    Several processes and machines may do this at once, and a kill at any moment is safe. If `make`
    raises, nothing is left behind. Raises OSError if the folder is gone or damaged at once.
    """
    if content := opened(folder):
        return content
    with files.without_new_folders(folder.parent, *folder.parent.parents):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock"), progress) as alone:
            if content := opened(folder):  # made by the process that we waited for
                return content
            if alone:  # so the makers of folders that are left here were killed
                for left in folder.parent.glob(
                    f"{folder.name}{UNFINISHED}{socket.gethostname()}-*"
                ):
                    shutil.rmtree(left, ignore_errors=True)
            _make(folder, opened, make)
    if content := opened(folder):
        return content
    raise FileNotFoundError(errno.ENOENT, "gone or changed since it was written", str(folder))


def _make(
    folder: pathlib.Path,
    opened: Callable[[pathlib.Path], object],
    make: Callable[[pathlib.Path], None],
) -> None:
    temporary = folder.with_name(
        f"{folder.name}{UNFINISHED}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    )
    temporary.mkdir()
    try:
        make(temporary)
        if folder.exists() and not opened(folder):
            shutil.rmtree(folder)  # damaged since it was made: a file cut short, an older format
        temporary.rename(folder)
    except OSError:
        # A faster machine has made it, with the same content, and may have removed what it is made
        # from.
        if not opened(folder):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: pathlib.Path, progress: bool) -> Iterator[bool]:
    """Holds a lock that ends with the process, however it ends. Yields False on a file system
    without locks."""
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if progress:
                    streams.log(f"waiting for another process that prepares {path.stem}")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                yield False
                return
            if not os.fstat(file.fileno()).st_nlink:
                continue  # its last holder has removed it, and later processes lock another file
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return
