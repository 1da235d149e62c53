"""How far a search has come, while it lasts: in place where standard error is a terminal, elsewhere
a line every few seconds. No JAX here.

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
BAR = 20  # characters


class SearchProgress:
    """A search.Report that shows what it is told, and a context that clears its line at the end.

    Args:
      title: what is searched for.
      stream: where it is drawn if that is a terminal, standard error if not given.
      log: where lines go elsewhere, the same stream if not given.
      shown: False for the processes that say nothing.
      clock: seconds.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO | None = None,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
        log: TextIO | None = None,
    ):
        self._title, self._shown, self._clock = title, shown, clock
        self._line = terminal.Line(stream or sys.stderr, shown)
        self._log = log or stream or sys.stderr
        self._began = clock()
        self._next = self._began + (FIRST if self._line.is_live else EVERY)

    def __call__(self, what: str, done: float) -> None:
        """`what` begins, when the part `done` of the whole, 0 to 1, is behind."""
        now = self._clock()
        if not self._shown or now < self._next:
            return
        minutes, seconds = divmod(int(now - self._began), 60)
        text = f"{what}, {minutes}:{seconds:02}"
        if self._line.is_live:
            filled = int(BAR * done)
            self._line.draw(
                f"{self._title} [{'#' * filled}{'.' * (BAR - filled)}] {done:4.0%} {text}", now
            )
        else:
            print(f"{self._title}: {done:.0%}, {text}", file=self._log, flush=True)
            self._next = now + EVERY

    def __enter__(self) -> "SearchProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._line.clear()
