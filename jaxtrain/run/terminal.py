"""One line of a terminal, drawn again and again in its place. Standard library only."""

import os
from typing import TextIO

COLUMNS = 80  # of a terminal that does not say
ERASE = "\x1b[K"  # to the end of the line


def width(stream: TextIO) -> int:
    """The characters that a line may have, at least 1. A column is left free: a full line makes some terminals begin the next one."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns or COLUMNS  # a pseudo-terminal that nobody has given a size has 0
    except (OSError, ValueError):
        columns = COLUMNS
    return max(columns - 1, 1)


def draw(stream: TextIO, line: str) -> None:
    """Writes a line over the one that is there, and leaves the cursor behind it."""
    print(f"\r{line}{ERASE}", end="", file=stream, flush=True)


def clear(stream: TextIO) -> None:
    """Leaves an empty line."""
    print(f"\r{ERASE}", end="", file=stream, flush=True)
