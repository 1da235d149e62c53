"""Files of a run: lines are appended even if the disk is full for a while, JSON lines are read
back, texts are replaced at once, and places are tested by writing. Files that a stranger may have
made are read if they are regular and within bounds. Standard library only.

Permissions do not say whether a place can be written: root may write where they forbid it, and
nobody may on a disk that is mounted read-only.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

# in a run's folder: its settings, its planned step beside the measured one, a line for each start,
# and one for the text that each end has sampled
CONFIG_FILE, PLANNED = "config.json", "planned.json"
STARTS_FILE, SAMPLES_FILE = "starts.jsonl", "samples.jsonl"
TRIAL_BYTES = 4096  # a full disk still takes an empty file
TRIAL_NAME = ".can_be_written"
# Bounds of a file that is read as a whole: published tokenizers have up to 35 MB, and JSON takes
# up to 31 times its bytes in memory.
MOST_BYTES, MOST_DEPTH, MOST_DIGITS = 50_000_000, 64, 40
MOST_LINE = 2**20  # bytes of a line of metrics.jsonl or goodput.jsonl
TRIALS = 100  # processes that try one new folder together remove it from under each other
# Errors that may be over when the same command is started again, perhaps elsewhere: a disk that is
# full, or does not answer.
TRANSIENT = {
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


class LineFile:
    """A file that lines are appended to; a link there, or a file that has another name, too, is
    replaced by a copy first. Lines that cannot be written wait, and are written before the next
    one. A failure is logged once, until something is written again.

    Args:
      path: the file, which need not exist.
      log: gets the warning.
    """

    def __init__(self, path: pathlib.Path, log: Callable[[str], object]):
        self._path, self._log = path, log
        self._descriptor: int | None = None
        self._pending = b""
        self._has_warned = False

    def write(self, line: str) -> None:
        """Appends a line, given without its end, and hands it to the system if the disk is not
        full."""
        self._pending += line.encode() + b"\n"
        try:
            if self._descriptor is None:
                with contextlib.suppress(FileNotFoundError):
                    if self._path.is_symlink() or self._path.stat().st_nlink > 1:
                        with open_regular(self._path) as file:
                            replace_text(self._path, file.read().decode(errors="replace"))
                self._descriptor = os.open(
                    self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666
                )
            while self._pending:
                self._pending = self._pending[os.write(self._descriptor, self._pending) :]
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                self._log(_warning(self._path, error))
            self._has_warned = True

    def close(self) -> None:
        """Closes the file. Lines that could not be written are lost."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def append_record(path: pathlib.Path, record: Any, log: Callable[[str], object]) -> None:
    """Appends a record to a file of JSON lines, as LineFile does."""
    with contextlib.closing(LineFile(path, log)) as file:
        file.write(json.dumps(record))


@contextlib.contextmanager
def warned(path: pathlib.Path, log: Callable[[str], object]) -> Iterator[None]:
    """A context that writes a file which the run can do without: an OSError becomes a warning."""
    try:
        yield
    except OSError as error:
        log(_warning(path, error))


def _warning(path: pathlib.Path, error: OSError) -> str:
    return (
        f"warning: {path} cannot be written ({error.strerror or error}): training goes on "
        "without it"
    )


@contextlib.contextmanager
def without_new_folders(*folders: pathlib.Path) -> Iterator[None]:
    """A context that removes those of some folders, inner ones first, that did not exist before it
    and are empty at its end."""
    missing = [each for each in folders if not os.path.lexists(each)]
    try:
        yield
    finally:
        for each in missing:
            # it does not exist, or another process has something in it by now
            with contextlib.suppress(OSError):
                each.rmdir()


def read_json_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file's lines, none if there is no file. A line that a kill has cut off
    is left out."""
    if not path.is_file():
        return
    with open_regular(path, path.parent) as file:
        while line := file.readline(MOST_LINE):
            with contextlib.suppress(ValueError):
                if isinstance(value := parse_json(line), dict):
                    yield value


def fresh(path: Any) -> Any:
    """The path of a file that will be written, once nothing is there: a link is not written
    through, and a file that has another name, too (`cp -al`), keeps its content under that."""
    path.unlink(missing_ok=True)
    return path


def replace_text(path: Any, text: str) -> None:
    """Replaces a file's text by a rename, so that a kill leaves the text before or after. A link
    there is replaced, and nothing is left behind if that fails. path: pathlib's, or one like it."""
    unfinished = fresh(path.with_name(f".{path.name}.new"))
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# --- files that a stranger may have made ----------------------------------------------------------


def open_regular(path: str | os.PathLike, folder: str | os.PathLike | None = None) -> BinaryIO:
    """A regular file, opened to be read. Raises OSError for anything else: a pipe would be waited
    for, and a device has no end.

    folder: that the file may not leave by a link, except for the blobs of a hub's cache; None: it
    may lie anywhere
    """
    try:
        target = os.path.realpath(path)
        if folder is not None and not belongs(pathlib.Path(target), folder):
            is_link = target != os.path.abspath(path)  # else the path itself leads there, by "../"
            why = f"it is a link to {target[:200]!r}," if is_link else "it lies"
            raise OSError(errno.EPERM, f"{why} outside of the folder", os.fspath(path))
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file has such a name", os.fspath(path)) from None
    except OSError as error:
        error.filename = os.fspath(path)  # as the caller has it
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def belongs(target: pathlib.Path, folder: str | os.PathLike) -> bool:
    """True for a real path in a folder, and for one in the blobs of the hub's cache that the folder
    is in: KIND--NAME/snapshots/REVISION/FILE is a link to KIND--NAME/blobs/DIGEST, which may be a
    link to blobs/DI/DIGEST beside all repositories."""
    home = pathlib.Path(os.path.realpath(folder))
    repositories = [each.parent for each in home.parents if each.name == "snapshots"]
    blobs = [repository / "blobs" for repository in repositories]
    blobs += [each.parent / "blobs" / target.name[:2] for each in repositories]
    return target.is_relative_to(home) or target.parent in blobs


def read_regular(
    path: str | os.PathLike, most: int = MOST_BYTES, folder: str | os.PathLike | None = None
) -> bytes:
    """The bytes of a regular file. Raises OSError if it is none, or has more bytes than `most`.
    folder: as in `open_regular`"""
    with open_regular(path, folder) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
    return content


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for what is no JSON, is nested deeper than
    MOST_DEPTH, or has a whole number of more than MOST_DIGITS digits."""

    def whole_number(digits: str) -> int:
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"a number has {len(digits):,} digits")
        return int(digits)

    too_deep = ValueError(f"it is nested deeper than {MOST_DEPTH} levels")
    try:
        value = json.loads(content, parse_int=whole_number)
    except RecursionError:
        raise too_deep from None
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        nested = [each for each in level if isinstance(each, dict | list)]
        if not nested:
            return value
        level = [v for each in nested for v in (each.values() if isinstance(each, dict) else each)]
    raise too_deep


def read_json(
    path: str | os.PathLike, most: int = MOST_BYTES, folder: str | os.PathLike | None = None
) -> Any:
    """The value of a JSON file. Raises OSError as `read_regular`, ValueError as `parse_json`."""
    return parse_json(read_regular(path, most, folder))


# --- places that can be written -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Unwritable:
    """Why a place cannot be written, in words that follow its name. passes: whether it may be
    writable when the command is started again."""

    why: str
    passes: bool = False


def _try_file(path: pathlib.Path) -> None:
    """Makes a file, appends to it, gives it another name and removes it, as runs do with theirs."""
    renamed = path.with_name(f"{path.name}.renamed")
    try:
        for mode in ("xb", "ab"):
            with open(path, mode) as file:
                file.write(bytes(TRIAL_BYTES))
        os.replace(path, renamed)
    finally:
        for left in (path, renamed):
            with contextlib.suppress(OSError):
                left.unlink()


def try_folder(
    folder: str | os.PathLike, trial: Callable[[pathlib.Path], object] = _try_file
) -> Unwritable | None:
    """Why a folder, which is created for the trial if missing, cannot be written; None where it
    can. Nothing is left behind. trial: writes at a path in it, removes what it has written, and
    raises OSError where that fails."""
    path = pathlib.Path(os.path.abspath(folder))
    place = path / f"{TRIAL_NAME}.{secrets.token_hex(8)}"
    with without_new_folders(path, *path.parents):
        try:
            for left in reversed(range(TRIALS)):
                try:
                    path.mkdir(parents=True, exist_ok=True)
                    trial(place)
                    break
                except (FileNotFoundError, FileExistsError):
                    if not left:
                        raise
        except OSError as error:
            return _unwritable(path, error)
    return None


def try_file(file: str | os.PathLike) -> Unwritable | None:
    """Why a file in a writable folder cannot be written; None where it can. The file is not
    changed."""
    path = pathlib.Path(file)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return Unwritable(f"is {_kind(mode)}, not a file")
        if not belongs(pathlib.Path(os.path.realpath(path)), path.parent):
            return Unwritable(f"is a link to {os.path.realpath(path)!r}, outside of the folder")
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
    except FileNotFoundError as error:
        return _unwritable(path, error) if os.path.lexists(path) else None
    except OSError as error:
        return _unwritable(path, error)
    return None


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def _unwritable(path: pathlib.Path, error: OSError) -> Unwritable:
    for each in (path, *path.parents):
        part = "" if each == path else f"cannot be written: {str(each)!r} "
        if os.path.islink(each) and not os.path.exists(each):
            return Unwritable(f"{part}is a link to {os.readlink(each)!r}, which does not exist")
        if os.path.exists(each):
            if not os.path.isdir(each) and error.errno in (errno.ENOTDIR, errno.EEXIST):
                return Unwritable(f"{part}is not a folder")
            break
    what = "cannot be written" if error.filename2 is None else "does not let files be renamed"
    return Unwritable(f"{what} ({error.strerror or error})", error.errno in TRANSIENT)
