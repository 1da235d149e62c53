"""The times of ops, as a caller gives them, and the timelines that clocks make of them.

Times are of one microbatch on all units of a stage; an op on a unit takes its share of them, by
default stages / units. No JAX here.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of ops, all in one unit: seconds, milliseconds or any other.

    F, B, W, R:  of one microbatch on all units of a stage; R if it recomputes all their layers
    message:     from a stage to its neighbour
    head, embed: of one microbatch, if one stage computes it: the head with its loss and gradients;
        the embedding, and as much again for its gradient
    update:      the optimizer's update of a stage, where a table has several steps
    tick:        added to every tick, also an idle one, by the coupled clock alone
    overlap:     by which F and B of one microbatch each, on all units of a stage, are faster in
        overlapped cells than one after the other; negative where they are slower

    >>> Times(F=2.0, B=2.0, W=1.5, message=0.1).W
    1.5
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    message: float = 0.0
    R: float = 0.0
    head: float = 0.0
    tick: float = 0.0
    embed: float = 0.0
    update: float = 0.0
    overlap: float = 0.0


@dataclasses.dataclass(frozen=True)
class KnownTimes:
    """The op times that the setting `pipeline.times` has, in its order: KnownTimes(*setting). They
    are given, planned for a kind of device, or measured. None: not known.

    FB: an F and a B in one overlapped cell, 0 where they are not overlapped
    embedding: with the dense layers behind it
    """

    # The setting is a plain list of numbers, and this is the one place that gives each its name.
    # Lists in checkpoints and in op_times.json may be older, so a new time can only come last.
    F: float
    B: float
    W: float
    message: float | None = None
    R: float | None = None
    head: float | None = None
    FB: float | None = None
    update: float | None = None
    embedding: float | None = None

    def setting(self) -> tuple[float, ...]:
        """These times as a value of `pipeline.times`: up to the last known one, 0 for a time before
        it that is not known."""
        values = dataclasses.astuple(self)
        # F, B, W, message, R, head and embedding known, FB and update not:
        # (3, 2, 1, 0.1, 2, 4, 0, 0, 0.5)
        count = max(number for number, value in enumerate(values, 1) if value is not None)
        return tuple(value or 0.0 for value in values[:count])


@dataclasses.dataclass(frozen=True)
class TimedOp:
    """An op on a stage, from `start` to `end`.

    name: F, R, B, W, H for the head, E for the embedding and its gradient, or O for the optimizer's
        update
    unit: in model order; −1 for H, E and O
    microbatch: of O, the step
    """

    stage: int
    name: str
    unit: int
    microbatch: int
    start: float
    end: float


# The names of timed ops. The numbers of the earlier ones are those of `Op`, so that a cell's op is
# its name's index here.
NAMES = ("", "F", "R", "B", "W", "H", "E", "O")


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline(Iterable[TimedOp]):
    """Timed ops as arrays [ops], int64, and float64 for times. `name` is an index of NAMES.
    Iterating gives TimedOps."""

    stage: np.ndarray
    name: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.stage)

    def __iter__(self) -> Iterator[TimedOp]:
        # Lists of Python's own numbers: reading numpy's one by one would take ten times as long.
        columns = (getattr(self, field.name).tolist() for field in dataclasses.fields(self))
        for stage, name, unit, microbatch, start, end in zip(*columns, strict=True):
            yield TimedOp(stage, NAMES[name], unit, microbatch, start, end)
