"""The standard streams of a command, which may be closed, full, on a terminal that has hung up, or
in an encoding with few characters; and a line of a terminal that is redrawn in its place.

The rules for a command (`run`):

    a stream that is closed at the start (`>&-`)    no file that is opened later takes its place
    a character that a stream cannot encode         is replaced by ASCII characters
    standard error cannot be written                the command goes on without it
    standard output cannot be written               the command ends: silently if its reader has
                                                    seen enough (`| head`), else with a line and
                                                    status 74
    the same in a training run (`outlive`)          the run goes on without its log, and says so on
                                                    the other stream

Standard library only.
"""

import codecs
import contextlib
import errno
import io
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from jaxtrain.run.exit_status import ExitStatus

NAMES = {1: "standard output", 2: "standard error"}
# errors that last: a pipe without a reader, a terminal that has hung up, no stream
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
COLUMNS = 80  # of a terminal that does not tell its size
ERASE = "\x1b[K"  # clears to the end of the line
REDRAW = 0.1  # seconds between two drawings of a line
STAND_IN = "jaxtrain.stand_in"  # the name of `_stand_in` among the codecs' error handlers


def run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """Runs a command with safe standard streams, which stay for the rest of the process. The exit
    status; 130 after Ctrl-C."""
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
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(SystemExit):  # `ends_with` has its status
                stream.flush()
    # the loss of a stream may have ended the command in another thread
    lost = (output.ends_with for output in _outputs if output.ends_with)
    return status or next(lost, ExitStatus.FINISHED)


def outlive() -> None:
    """Lets this process go on when its standard output cannot be written: training matters more
    than its log."""
    global _outlives
    _outlives = True


def log(*lines: str) -> None:
    """Prints lines: warnings on standard error, others on standard output."""
    for line in lines:
        print(line, file=sys.stderr if line.startswith("warning: ") else sys.stdout, flush=True)


def aligned(cells: Sequence[Sequence[str]], sides: str = "<") -> list[str]:
    """Lines of cells in columns as wide as they need to be. sides: "<" for a column to the left,
    ">" for one to the right; the last one is for all that follow"""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    columns = [*zip(sides.ljust(len(widths), sides[-1]), widths)]
    return [
        "  ".join(f"{text:{side}{width}}" for text, (side, width) in zip(line, columns)).rstrip()
        for line in cells
    ]


def remark(line: str) -> None:
    """Prints a line on standard error: standard output is for what was asked for."""
    print(line, file=sys.stderr, flush=True)


def write_error(text: str) -> None:
    """Writes on standard error at once, past Python's buffers and locks: for a thread that ends the
    process. Never raises."""
    _write_past(2, text)


_outlives = False
_outputs: list["_Output"] = []


class _Output(io.FileIO):
    """A standard stream's file descriptor. A write that fails raises no OSError: it ends the
    command, or is reported once and skipped.

    When writing works again, a line says that lines are missing before it.
    """

    def __init__(self, descriptor: int, is_closed: bool):
        super().__init__(descriptor, "wb", closefd=False)
        self._is_closed, self._why = is_closed, ""
        self.ends_with: ExitStatus | None = None  # status of the command that its loss has ended

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
            if written is None:  # somebody has made the stream non-blocking, and it is full
                select.select([], [self.fileno()], [])
            rest = rest[written or 0 :]

    def _lose(self, error: OSError) -> None:
        was_reported, self._why = bool(self._why), error.strerror or str(error)
        self._is_closed = self._is_closed or error.errno in CLOSED
        what = f"{NAMES[self.fileno()]} cannot be written ({self._why})"
        if _outlives and not was_reported:
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
    """Opens those of the three descriptors that are closed, and replaces Python's own streams by
    safe ones."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # opens the lowest free number, which is this one
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


def _write_past(descriptor: int, text: str) -> None:
    """Writes a line to a descriptor, over a progress bar if there is one. Errors are ignored."""
    stream = sys.stderr if descriptor == 2 else sys.stdout
    erase = f"\r{ERASE}" if stream and redraws(stream) else ""
    with contextlib.suppress(OSError):  # nobody is left to be told
        os.write(
            descriptor, (erase + text).encode((stream and stream.encoding) or "ascii", STAND_IN)
        )


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """ASCII for characters that cannot be encoded, surrogates for bytes of a name that is no UTF-8
    included."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


def _in_ascii(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return IN_ASCII.get(character) or character.encode("ascii", "backslashreplace").decode()


codecs.register_error(STAND_IN, _stand_in)


# --- a line of a terminal, redrawn in its place ---------------------------------------------------


def redraws(stream: TextIO) -> bool:
    """True if a line can be redrawn in its place: on a terminal that can erase."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width(stream: TextIO) -> int:
    """The characters that a line may have, at least 1. One column stays free: a full line makes
    some terminals begin the next one."""
    try:
        # 0 for a pseudo-terminal without a size
        columns = os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        columns = COLUMNS
    return max(columns - 1, 1)


class TerminalLine:
    """A line of a terminal, redrawn in its place; nothing on a stream that is no terminal.

    Args:
      stream: the terminal, if it is one.
      shown: False for processes that print nothing.
    """

    def __init__(self, stream: TextIO, shown: bool = True):
        self._stream = stream
        self.is_live = shown and redraws(stream)
        self._next, self._is_drawn = -math.inf, False

    def draw(self, text: str, now: float | None = None) -> None:
        """Draws the text, unless a text was drawn just before. now: seconds, of one clock at all
        calls; time.monotonic if not given."""
        now = time.monotonic() if now is None else now
        if self.is_live and now >= self._next:
            # set first, for Ctrl-C may come during the drawing
            self._is_drawn, self._next = True, now + REDRAW
            draw(self._stream, text)

    def clear(self) -> None:
        """Leaves an empty line if one was drawn."""
        if self._is_drawn:
            clear(self._stream)
        self._is_drawn = False


@contextlib.contextmanager
def counting(
    words: str, stream: TextIO, shown: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """A context in which a terminal shows a line such as "3 of 10 tensors checked". It yields
    progress(done, total), which draws the line, unless it drew one less than REDRAW seconds ago:
    the last number may never show.

    words: "tensors checked"; stream, shown: as in TerminalLine
    """
    line = TerminalLine(stream, shown)
    try:
        yield lambda done, total: line.draw(f"{done} of {total} {words}")
    finally:
        line.clear()


def draw(stream: TextIO, line: str) -> None:
    """Overwrites the terminal's line by as much of this one as fits, with the cursor behind it."""
    print(f"\r{line[: width(stream)]}{ERASE}", end="", file=stream, flush=True)


def clear(stream: TextIO) -> None:
    """Leaves an empty line."""
    print(f"\r{ERASE}", end="", file=stream, flush=True)
