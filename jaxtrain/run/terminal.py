"""One line of a terminal, drawn again and again in its place. Standard library only."""

import math
import os
import time
from typing import TextIO

COLUMNS = 80  # of a terminal that does not say
ERASE = "\x1b[K"  # to the end of the line
REDRAW = 0.1  # seconds between two drawings of a line


def redraws(stream: TextIO) -> bool:
    """Whether a line can be drawn again in its place: on a terminal that knows how to erase."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width(stream: TextIO) -> int:
    """The characters that a line may have, at least 1. A column is left free: a full line makes
    some terminals begin the next one."""
    try:
        # a pseudo-terminal that nobody has given a size has 0
        columns = os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        columns = COLUMNS
    return max(columns - 1, 1)


class Line:
    """A line on a terminal, drawn again as often as there is something to see; elsewhere nothing.

    Args:
      stream: the terminal, if it is one.
      shown: False for the processes that say nothing.
    """

    def __init__(self, stream: TextIO, shown: bool = True):
        self._stream = stream
        self.is_live = shown and redraws(stream)
        self._next, self._is_drawn = -math.inf, False

    def draw(self, text: str, now: float | None = None) -> None:
        """Draws the text, unless one was drawn just before. now: by time.monotonic, or by another
        clock at each call."""
        now = time.monotonic() if now is None else now
        if self.is_live and now >= self._next:
            # before it is: Ctrl-C may come in between
            self._is_drawn, self._next = True, now + REDRAW
            draw(self._stream, text)

    def clear(self) -> None:
        """Leaves an empty line where it is drawn."""
        if self._is_drawn:
            clear(self._stream)
        self._is_drawn = False


def draw(stream: TextIO, line: str) -> None:
    """Writes as much of a line as there is room for over the one that is there, and leaves the
    cursor behind it."""
    print(f"\r{line[: width(stream)]}{ERASE}", end="", file=stream, flush=True)


def clear(stream: TextIO) -> None:
    """Leaves an empty line."""
    print(f"\r{ERASE}", end="", file=stream, flush=True)
