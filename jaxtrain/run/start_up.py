"""Where the time between a command's start and its first finished step goes.

first step after 9.1 s: imports 2.0, data 0.5, tracing 1.1, compiling 4.6, stepping 0.8
"""

import contextlib
import gc
from collections.abc import Iterator

from jaxtrain.run.goodput import WallClock

SHOWN = 0.05  # seconds; a part that took less is not in the line


def record(clock: WallClock) -> dict[str, float]:
    """Seconds of the whole and of each part so far, as metrics.jsonl has them: {"start_up_s": 9.1,
    "imports_s": 2.0, …}."""
    seconds = clock.seconds()
    return {"start_up_s": round(sum(seconds.values()), 3)} | {
        f"{part.value}_s": round(s, 3) for part, s in seconds.items()
    }


def line(clock: WallClock) -> str:
    """The same for people."""
    seconds = clock.seconds()
    parts = ", ".join(f"{part.value} {s:.1f}" for part, s in seconds.items() if s >= SHOWN)
    return f"first step after {sum(seconds.values()):.1f} s: {parts}"


@contextlib.contextmanager
def imports_without_collection() -> Iterator[None]:
    """A context for imports: Python's garbage collector neither runs in it nor looks at what it
    leaves ever after.

    jax and what a run needs beside it are some 1,700 modules for as long as the process lives;
    going through their objects again and again takes half a second of a start, and later stops the
    loop.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
