"""Parts of a command's wall time: each moment belongs to one part, so the parts add up to the
whole.

imports · table · data · tracing · compiling · state │
└──────────────────── the start ────────────────────┘
    │ stepping  awaiting  data wait  stepping  saving … ending
    └─────────────────────── the loop ───────────────────────┘
"""

import contextlib
import dataclasses
import enum
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Part(enum.Enum):
    """What a command does at a moment; the value is its name in files and texts."""

    IMPORTS = "imports"  # Python, jax, the processes finding each other
    TABLE = "table"  # checks of the config and the search for a table
    DATA = "data"  # the lock, the choice of a checkpoint, the corpus prepared or found
    TRACING = "tracing"
    COMPILING = "compiling"
    STATE = "state"  # first values made, or a checkpoint restored
    STEPPING = "stepping"  # steps dispatched, and what is done with their results
    AWAITING = "awaiting"  # the devices, for the results of a step
    WAITING = "data_wait"  # for a batch
    SAVING = "saving"  # the loop stands still for a checkpoint
    EVALUATING = "evaluating"
    ROLLING_BACK = "rolling_back"  # to an earlier checkpoint, in the same process
    ENDING = "ending"  # after the last step: the last save finished, pictures, a sample
    OTHER = "other"


STEPS = (Part.STEPPING, Part.AWAITING, Part.WAITING)  # what a loop does that only takes steps
OWN = (Part.STEPPING, Part.WAITING)  # of these, what a process does by itself


@dataclasses.dataclass(frozen=True)
class Current:
    """What a command is at now: the part, and the seconds since it began or was gone on with."""

    part: Part
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Moment:
    """A change of parts: the seconds of each part until then, the part that began, and when."""

    seconds: dict[Part, float]  # never changed: other threads read it
    part: Part
    since: float


class WallClock:
    """The wall time of a command by parts. One thread changes parts; any thread may ask at any
    moment, without waiting.

    Args:
      began: when the command and its first part, the imports, began, by `clock`; now if not given.
      clock: seconds.
    """

    def __init__(self, began: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.began = clock() if began is None else began
        self._moment = _Moment({}, Part.IMPORTS, self.began)

    def enter(self, part: Part) -> None:
        """The part begins now, and the one before has ended."""
        now, before = self._clock(), self._moment
        self._moment = _Moment(_added(before, now), part, now)

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """A context that is the part's; the part around it goes on afterwards. What is inside a
        part inside is not this part's."""
        around = self._moment.part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(around)

    def each(self, part: Part, items: Iterable[T]) -> Iterator[T]:
        """The items; the time until each is there is the part's."""
        iterator = iter(items)
        while True:
            with self.part(part):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    @property
    def current(self) -> Current:
        """What the command is at now."""
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
        """The seconds of each part that there was, in the order in which they began; their sum is
        the time since `began`."""
        return _added(self._moment, self._clock())


def _added(moment: _Moment, now: float) -> dict[Part, float]:
    """Seconds by part, with those between a moment and now."""
    return moment.seconds | {moment.part: moment.seconds.get(moment.part, 0.0) + now - moment.since}
