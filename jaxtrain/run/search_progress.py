"""How far a search has come, on standard error while it lasts: in place on a terminal, elsewhere a line every few seconds. No JAX here.

terminal    tables [########............] 40 % list late, 2 chunks a stage, 0:12
elsewhere   tables: 40 %, list late, 2 chunks a stage, 0:12
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from jaxtrain.run import terminal

FIRST, EVERY = 1.0, 5.0  # seconds before anything is said on a terminal; before each line elsewhere
BAR, REDRAW = 20, 0.1  # characters; seconds between two pictures of it


class SearchProgress:
    """A search.Report that shows what it is told, and a context that clears its line at the end.

    Args:
      title: what is searched for.
      stream: where the line goes, standard error if not given.
      shown: False for the processes that say nothing.
      clock: seconds.
    """

    def __init__(self, title: str, stream: TextIO | None = None, shown: bool = True, clock: Callable[[], float] = time.monotonic):
        self._title, self._stream, self._shown, self._clock = title, stream or sys.stderr, shown, clock
        self._terminal = shown and self._stream.isatty()
        self._began = clock()
        self._next = self._began + (FIRST if self._terminal else EVERY)
        self._drawn = False

    def __call__(self, what: str, done: float) -> None:
        """`what` begins, when the part `done` of the whole, 0 to 1, is behind."""
        now = self._clock()
        if not self._shown or now < self._next:
            return
        minutes, seconds = divmod(int(now - self._began), 60)
        text = f"{what}, {minutes}:{seconds:02}"
        if self._terminal:
            filled = int(BAR * done)
            line = f"{self._title} [{'#' * filled}{'.' * (BAR - filled)}] {done:4.0%} {text}"
            self._drawn, self._next = True, now + REDRAW  # before it is: Ctrl-C may come in between
            terminal.draw(self._stream, line[: terminal.width(self._stream)])
        else:
            print(f"{self._title}: {done:.0%}, {text}", file=self._stream, flush=True)
            self._next = now + EVERY

    def __enter__(self) -> "SearchProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._drawn:
            terminal.clear(self._stream)
