"""The standard streams of a command: closed, full, on a terminal that has hung up, of an encoding
with few characters.

What becomes of a command (`run`):

    a stream that is closed at the start (`>&-`)    no file that is opened later takes its place
    a character that a stream cannot encode         something in ASCII stands in for it
    standard error cannot be written                the command goes on without it
    standard output cannot be written               the command ends: without a word where a reader
                                                    has seen enough (`| head`), else with a line and
                                                    status 74
    the same of a training run (`outlive`)          the run goes on without its log, and says so on
                                                    the other stream

Standard library only.
"""

import codecs
import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.run import terminal
from jaxtrain.run.exit_status import ExitStatus

NAMES = {1: "standard output", 2: "standard error"}
# a pipe without a reader, a terminal that has hung up, no stream: for good
CLOSED = {errno.EPIPE, errno.EIO, errno.EBADF}
IN_ASCII = {
    "×": "x",
    "·": ".",
    "→": "->",
    "…": "...",
    "–": "-",
    "−": "-",
    "µ": "u",
    "≥": ">=",
    "≤": "<=",
}
IN_ASCII |= dict(zip("▏▎▍▌▋▊▉█", "   #####"))
STAND_IN = "jaxtrain.stand_in"  # the name of `_stand_in` among the codecs' error handlers


def run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """The exit status of a command, whose standard streams are made safe for the rest of the
    process. Ctrl-C ends it with 130."""
    _make_safe()
    try:
        status = main(argv) or ExitStatus.FINISHED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        status = ExitStatus.INTERRUPTED
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        status = end.code or ExitStatus.FINISHED
    finally:
        lost = _flush()
    return status or lost


def outlive() -> None:
    """From now on this process goes on where its standard output cannot be written: what it does
    matters more than what it says."""
    global _outlives
    _outlives = True


def say(*lines: str) -> None:
    """Prints lines for the log: warnings on standard error, others on standard output."""
    for line in lines:
        print(line, file=sys.stderr if line.startswith("warning: ") else sys.stdout, flush=True)


def write_error(text: str) -> None:
    """Writes on standard error at once, beside Python's own buffers and locks: for a thread that
    ends the process. Never raises."""
    _write_past(2, text)


_outlives = False
_outputs: list["_Output"] = []


class _Output(io.FileIO):
    """A standard stream's file descriptor. A write that fails is no OSError: it ends the command,
    or is said once and passed over.

    Where there is room again later, a line says that others are missing before it.
    """

    def __init__(self, descriptor: int, is_closed: bool):
        super().__init__(descriptor, "wb", closefd=False)
        self._is_closed, self._why = is_closed, ""
        self.ends_with: ExitStatus | None = None  # what its loss has ended the command with

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self._is_closed and self._why:
            return size
        try:
            if self._is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            if self._why:
                self._write_all(f"\n(lines are missing here: {self._why})\n".encode())
            self._write_all(data)
            self._why = ""
        except OSError as error:
            self._lose(error)
        return size

    def _write_all(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            written = super().write(rest)
            if written is None:  # somebody has set the stream to not block, and it is full
                select.select([], [self.fileno()], [])
            rest = rest[written or 0 :]

    def _lose(self, error: OSError) -> None:
        said_before, self._why = bool(self._why), error.strerror or str(error)
        self._is_closed = self._is_closed or error.errno in CLOSED
        what = f"{NAMES[self.fileno()]} cannot be written ({self._why})"
        if _outlives and not said_before:
            rest = (
                "its log; metrics.jsonl has the losses"
                if self.fileno() == 1
                else "warnings and errors"
            )
            _write_past(3 - self.fileno(), f"warning: {what}: this run goes on without {rest}\n")
        elif self.fileno() == 1 and not _outlives:
            self._is_closed = True
            self.ends_with = (
                ExitStatus.FINISHED if error.errno == errno.EPIPE else ExitStatus.STORAGE
            )
            if self.ends_with:
                write_error(f"error: {what}: what this command says is lost\n")
            raise SystemExit(self.ends_with)


def _make_safe() -> None:
    """Opens what is closed of the three descriptors, and puts safe streams in the place of Python's
    own, where those still stand."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # the lowest number that is free, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            output = _Output(descriptor, stream is None)
            encoding = stream.encoding if stream else "utf-8"
            setattr(
                sys,
                name,
                io.TextIOWrapper(
                    io.BufferedWriter(output), encoding, STAND_IN, line_buffering=True
                ),
            )
            _outputs.append(output)


def _flush() -> ExitStatus:
    """Writes what is left, and gives what the loss of a stream has ended the command with, in
    whichever thread."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(SystemExit):  # `ends_with` has its status
            stream.flush()
    return next((output.ends_with for output in _outputs if output.ends_with), ExitStatus.FINISHED)


def _write_past(descriptor: int, text: str) -> None:
    """Writes a line to a descriptor, over a progress bar if one is there, and whatever becomes of
    it."""
    stream = sys.stderr if descriptor == 2 else sys.stdout
    erase = f"\r{terminal.ERASE}" if stream and terminal.redraws(stream) else ""
    with contextlib.suppress(OSError):  # nobody is left to be told
        os.write(
            descriptor, (erase + text).encode((stream and stream.encoding) or "ascii", STAND_IN)
        )


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """ASCII for the characters that cannot be encoded, also for those that stand for bytes of a
    name that is no UTF-8."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


def _in_ascii(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return IN_ASCII.get(character) or character.encode("ascii", "backslashreplace").decode()


codecs.register_error(STAND_IN, _stand_in)
