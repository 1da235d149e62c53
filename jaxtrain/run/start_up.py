"""Where the time between a command's start and its first finished step goes.

first step after 9.1 s: imports 2.0, data 0.5, tracing 1.1, compiling 4.6, running 0.8
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

SHOWN = 0.05  # seconds; a part that took less is not in the line


class StartUp:
    """The start of a command as a sequence of parts, each of which lasts from the end of the part before.

    Args:
      began: when the first part began, by `clock`.
    """

    def __init__(self, began: float, clock: Callable[[], float] = time.monotonic):
        self.began, self._clock, self._last = began, clock, began
        self._seconds: dict[str, float] = {}

    def ended(self, part: str) -> float:
        """Ends a part now and returns its seconds; what is ended a second time lasts longer."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        return seconds

    def record(self) -> dict[str, float]:
        """Seconds of the whole and of each part, as metrics.jsonl has them: {"start_up_s": 9.1, "imports_s": 2.0, …}."""
        parts = {f"{part}_s": round(seconds, 3) for part, seconds in self._seconds.items()}
        return {"start_up_s": round(self._last - self.began, 3)} | parts

    def line(self) -> str:
        """The same for people."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self._seconds.items() if seconds >= SHOWN)
        return f"first step after {self._last - self.began:.1f} s: {parts}"


@contextlib.contextmanager
def imports_without_collection() -> Iterator[None]:
    """A context for imports: Python's garbage collector neither runs in it nor looks at what it leaves ever after.

    jax and what a run needs beside it are some 1,700 modules for as long as the process lives; going through their objects again and
    again takes half a second of a start, and later stops the loop.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
