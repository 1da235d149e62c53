"""The wall time of a command by parts: each moment belongs to one part, so the parts add up.

imports · table · data · tracing · compiling · state │
└──────────────────── the start ────────────────────┘
    │ stepping  awaiting  data wait  stepping  saving … ending
    └─────────────────────── the loop ───────────────────────┘

The start ends with a line: "first step after 9.1 s: imports 2.0, data 0.5, tracing 1.1, compiling
4.6, stepping 0.8".
"""

import contextlib
import dataclasses
import enum
import gc
import time
from collections.abc import Callable, Iterator

SHOWN = 0.05  # seconds; a part that took less is not in the start's line


class Part(enum.Enum):
    """The parts of a command's wall time; the value is the name in files and texts."""

    IMPORTS = "imports"  # Python, jax, the processes finding each other
    TABLE = "table"  # checks of the config and the search for a table
    # the lock, the choice of a checkpoint, the corpus prepared or found, a published model read
    DATA = "data"
    TRACING = "tracing"
    COMPILING = "compiling"
    STATE = "state"  # initialized, or restored from a checkpoint
    STEPPING = "stepping"  # steps dispatched, and what is done with their results
    AWAITING = "awaiting"  # the devices, for the results of a step
    WAITING = "data_wait"  # for a batch
    SAVING = "saving"  # the loop stands still for a checkpoint
    EVALUATING = "evaluating"
    ROLLING_BACK = "rolling_back"  # to an earlier checkpoint, in the same process
    ENDING = "ending"  # after the last step: the last save finished, pictures, a sample
    OTHER = "other"


STEPS = (Part.STEPPING, Part.AWAITING, Part.WAITING)  # the parts of a loop that only takes steps
HOST_STEPS = (Part.STEPPING, Part.WAITING)  # those of STEPS in which the devices are not awaited


@dataclasses.dataclass(frozen=True)
class Current:
    """The part that a command is at, and the seconds since it was entered or returned to."""

    part: Part
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Moment:
    """A change of parts: the seconds of each part until then, the part that began, and when."""

    seconds: dict[Part, float]  # never changed: other threads read it
    part: Part
    since: float

    def seconds_until(self, now: float) -> dict[Part, float]:
        """Seconds by part, with those from this moment to `now`."""
        spent = self.seconds.get(self.part, 0.0) + now - self.since
        return self.seconds | {self.part: spent}


class WallClock:
    """The wall time of a command by parts. One thread changes parts; any thread may ask at any
    moment, without waiting.

    Args:
      began: the value of `clock` when the command, and its first part, the imports, began; None:
        now.
      clock: returns seconds.
    """

    def __init__(self, began: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.began = clock() if began is None else began
        self._moment = _Moment({}, Part.IMPORTS, self.began)

    def enter(self, part: Part) -> None:
        """Begins a part, and so ends the one before."""
        now = self._clock()
        self._moment = _Moment(self._moment.seconds_until(now), part, now)

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """A context whose time counts for `part`, except that of such contexts inside it.
        Afterwards, also after an exception, the part before it goes on."""
        before = self._moment.part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def current(self) -> Current:
        """The part that the command is at."""
        moment = self._moment
        return Current(moment.part, self._clock() - moment.since)

    def wall_s(self) -> float:
        """Seconds since the command began."""
        return self._clock() - self.began

    def spent(self, *parts: Part) -> float:
        """Seconds of these parts together."""
        seconds = self.seconds()
        return sum(seconds.get(part, 0.0) for part in parts)

    def seconds(self) -> dict[Part, float]:
        """Seconds of each part so far, in the order in which they began; their sum is the time
        since `began`."""
        return self._moment.seconds_until(self._clock())


def start_record(clock: WallClock) -> dict[str, float]:
    """Seconds of the start and of each of its parts, as metrics.jsonl has them: {"start_up_s": 9.1,
    "imports_s": 2.0, …}."""
    seconds = clock.seconds()
    parts = {f"{part.value}_s": round(s, 3) for part, s in seconds.items()}
    return {"start_up_s": round(sum(seconds.values()), 3)} | parts


def start_line(clock: WallClock) -> str:
    """A line of text with the start's seconds, up to the first finished step."""
    seconds = clock.seconds()
    parts = ", ".join(f"{part.value} {s:.1f}" for part, s in seconds.items() if s >= SHOWN)
    return f"first step after {sum(seconds.values()):.1f} s: {parts}"


@contextlib.contextmanager
def imports_without_collection() -> Iterator[None]:
    """A context for imports: Python's garbage collector does not run in it, and later skips what
    was imported.

    jax and the rest of a run's imports are some 1,700 modules that live as long as the process.
    Collections through their objects take half a second of a start, and later stop the loop.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
