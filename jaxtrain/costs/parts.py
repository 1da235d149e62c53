"""Seconds by part, those that count and those that stand beside others."""

import dataclasses
import math
from collections.abc import Mapping

MATMULS, ATTENTION, MEMORY, BUBBLE, OPTIMIZER, HOST, FIXED = "matmuls", "attention", "memory", "bubble", "optimizer", "host", "fixed"
STAGE = "stage"
AXES = ("model", "context", "expert", STAGE, "data", "replica")


@dataclasses.dataclass(frozen=True)
class Parts:
    """Seconds by part: those that count, and those that stand beside others. Communication is named by its axis."""

    exposed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hidden: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.exposed.values())

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(_sum(self.exposed, other.exposed), _sum(self.hidden, other.hidden))

    def __mul__(self, times: float) -> "Parts":
        return Parts({k: v * times for k, v in self.exposed.items()}, {k: v * times for k, v in self.hidden.items()})


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in (*a, *(key for key in b if key not in a))}


def beside(axis: str, seconds: float, part: float, others: float = math.inf) -> Parts:
    """Communication of which a part can stand beside other work, as long as that lasts."""
    hidden = min(part * seconds, part * others)
    return Parts({axis: seconds - hidden}, {axis: hidden} if hidden else {})
