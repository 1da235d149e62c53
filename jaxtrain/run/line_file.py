"""A file that lines are appended to, also on a disk that is full for a while; and what else of a
run's own files must not end it."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator


class LineFile:
    """Lines that cannot be written are kept and written before the next one. What fails is said
    once, until something is written again.

    Args:
      path: the file, which need not exist.
      say: gets the warning.
    """

    def __init__(self, path: pathlib.Path, say: Callable[[str], object]):
        self._path, self._say = path, say
        self._descriptor: int | None = None
        self._pending = b""
        self._has_warned = False

    def write(self, line: str) -> None:
        """Appends a line, which is given without its end. It is on its way to the disk then, if
        there is room."""
        self._pending += line.encode() + b"\n"
        try:
            if self._descriptor is None:
                self._descriptor = os.open(
                    self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
                )
            while self._pending:
                self._pending = self._pending[os.write(self._descriptor, self._pending) :]
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                self._say(warning(self._path, error))
            self._has_warned = True

    def close(self) -> None:
        """Ends the file. What could not be written is lost."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def warned(path: pathlib.Path, say: Callable[[str], object]) -> Iterator[None]:
    """A context in which a file of the run is written that it can do without: an OSError becomes a
    warning."""
    try:
        yield
    except OSError as error:
        say(warning(path, error))


def warning(path: pathlib.Path, error: OSError) -> str:
    """The line about a file that cannot be written."""
    return (
        f"warning: {path} cannot be written ({error.strerror or error}): training goes on without "
        "it"
    )
