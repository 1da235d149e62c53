"""The wall time of a command by phases: each moment belongs to one phase, so the phases add up.

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

SHOWN = 0.05  # seconds; a phase that took less is not in the start's line


class Phase(enum.Enum):
    """The phases of a command's wall time; the value is the name in files and texts."""

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


# the phases of a loop that only takes steps
STEPS = (Phase.STEPPING, Phase.AWAITING, Phase.WAITING)
HOST_STEPS = (Phase.STEPPING, Phase.WAITING)  # those of STEPS in which the devices are not awaited


@dataclasses.dataclass(frozen=True)
class Current:
    """The phase that a command is at, and the seconds since it was entered or returned to."""

    phase: Phase
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Moment:
    """A change of phases: the seconds of each phase until then, the phase that began, and when."""

    seconds: dict[Phase, float]  # never changed: other threads read it
    phase: Phase
    since: float

    def seconds_until(self, now: float) -> dict[Phase, float]:
        """Seconds by phase, with those from this moment to `now`."""
        spent = self.seconds.get(self.phase, 0.0) + now - self.since
        return self.seconds | {self.phase: spent}


class WallClock:
    """The wall time of a command by phases. One thread changes phases; any thread may ask at any
    moment, without waiting.

    Args:
      began: the value of `clock` when the command, and its first phase, the imports, began; None:
        now.
      clock: returns seconds.
    """

    def __init__(self, began: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.began = clock() if began is None else began
        self._moment = _Moment({}, Phase.IMPORTS, self.began)

    def enter(self, phase: Phase) -> None:
        """Begins a phase, and so ends the one before."""
        now = self._clock()
        self._moment = _Moment(self._moment.seconds_until(now), phase, now)

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """A context whose time counts for `phase`, except that of such contexts inside it.
        Afterwards, also after an exception, the phase before it goes on."""
        before = self._moment.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def current(self) -> Current:
        """The phase that the command is at."""
        moment = self._moment
        return Current(moment.phase, self._clock() - moment.since)

    def wall_s(self) -> float:
        """Seconds since the command began."""
        return self._clock() - self.began

    def spent(self, *phases: Phase) -> float:
        """Seconds of these phases together."""
        seconds = self.seconds()
        return sum(seconds.get(phase, 0.0) for phase in phases)

    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase so far, in the order in which they began; their sum is the time
        since `began`."""
        return self._moment.seconds_until(self._clock())


def start_record(clock: WallClock) -> dict[str, float]:
    """Seconds of the start and of its phases, as metrics.jsonl has them: {"start_up_s": 9.1,
    "imports_s": 2.0, …}."""
    seconds = clock.seconds()
    return {
        "start_up_s": round(sum(seconds.values()), 3),
        **{f"{phase.value}_s": round(s, 3) for phase, s in seconds.items()},
    }


def start_line(clock: WallClock) -> str:
    """A line of text with the start's seconds, up to the first finished step."""
    seconds = clock.seconds()
    phases = ", ".join(f"{phase.value} {s:.1f}" for phase, s in seconds.items() if s >= SHOWN)
    return f"first step after {sum(seconds.values()):.1f} s: {phases}"


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
