"""Seconds of a step by part: work, the communication over each mesh axis, and waits."""

import dataclasses
from collections.abc import Mapping

from jaxtrain.planner.layer.links import CONTEXT, DATA, EXPERT, MODEL, REPLICA, STAGE

MATMULS, ATTENTION, MEMORY, LAUNCHES, BUBBLE, OPTIMIZER, HOST, DISK = (
    "matmuls",
    "attention",
    "memory",
    "launches",
    "bubble",
    "optimizer",
    "host",
    "disk",
)
COMMUNICATION_AXES = (MODEL, CONTEXT, EXPERT, STAGE, DATA, REPLICA)


@dataclasses.dataclass(frozen=True)
class TimeBreakdown:
    """Seconds by part. Communication is named by its mesh axis.

    exposed: parts that add up to the time
    hidden:  seconds that overlap with other parts
    """

    exposed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hidden: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.exposed.values())

    def __add__(self, other: "TimeBreakdown") -> "TimeBreakdown":
        return TimeBreakdown(_sum(self.exposed, other.exposed), _sum(self.hidden, other.hidden))

    def __mul__(self, times: float) -> "TimeBreakdown":
        return TimeBreakdown(
            {k: v * times for k, v in self.exposed.items()},
            {k: v * times for k, v in self.hidden.items()},
        )


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> Mapping[str, float]:
    if not a or not b:
        return a or b
    return {**a, **{part: a.get(part, 0.0) + seconds for part, seconds in b.items()}}


def overlapped(
    seconds: Mapping[str, float], overlaps: Mapping[str, tuple[float, float]]
) -> TimeBreakdown:
    """Communication by mesh axis, or HOST, of which a part is hidden.

    overlaps: by axis, the fraction that can overlap with other work, and the seconds of that work
    """
    hidden = {
        axis: fraction * min(seconds[axis], work)
        for axis, (fraction, work) in overlaps.items()
        if fraction and axis in seconds
    }
    return TimeBreakdown({axis: s - hidden.get(axis, 0.0) for axis, s in seconds.items()}, hidden)


def hidden_messages(seconds: float) -> TimeBreakdown:
    """What changes where so many seconds of routed tokens' messages are hidden behind other
    work."""
    return TimeBreakdown({EXPERT: -seconds}, {EXPERT: seconds}) if seconds else TimeBreakdown()
