"""How far a plan may be from its step: the errors that plans of published runs of its kind have, of
validation.json, which benchmarks/planner.py writes. No jax.

A kind of run is dense or with experts, and has a framework, a device and a precision. A kind of
fewer than LEAST runs goes by the nearest kinds, with as many runs together: first those of another
precision, then of another device, then of another framework, then all. Of these the widest error
counts, so that such a plan is never said to be surer than one that runs stand behind. Our own
program was measured on one device, so it goes by all dense kinds or by all with experts, as a plan
for a device does that no run was on.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping

from jaxtrain.planner.step.step_time import StepModel

KEYS = ("model", "framework", "device", "precision")  # the first matter most to an error
# An error holds for this fraction of new runs that are like those behind it (split conformal
# prediction: Vovk et al. 2005, Algorithmic Learning in a Random World); of fewer runs none does.
# A line names so many kinds.
FRACTION, LEAST, NAMED = 0.8, 4, 3


@dataclasses.dataclass(frozen=True)
class Expected:
    """The error that is expected of a plan.

    kind:  the values of KEYS
    error: the step takes 1 + error times as long as planned at most, and 1 / (1 + error) at least
    kinds: those behind the error, the nearest first, with their number of runs and their error
    """

    kind: tuple[str, ...]
    error: float
    kinds: Mapping[tuple[str, ...], tuple[int, float]]

    def range_of(self, planned: float) -> list[float]:
        """The least and the most of what is planned: of a time, a rate or a cost."""
        return [planned / (1 + self.error), planned * (1 + self.error)]

    def lines(self) -> list[str]:
        """The error and the runs behind it as lines of text."""
        runs = lambda count: f"{count or 'no'} measured run{'s'[: count > 1]}"
        own = f"{runs(self.kinds.get(self.kind, (0,))[0])} of this kind ({', '.join(self.kind)})"
        near = [f"{', '.join(kind)} ({runs(n)}, {e:.1%})" for kind, (n, e) in self.kinds.items()]
        if len(near) == 1:
            return [f"how sure: {own}, 8 of 10 within {self.error:.1%} of their plans"]
        near[NAMED:] = [f"{len(near) - NAMED} more kinds"] * (len(near) > NAMED)
        return [
            f"how sure: {own}; of the nearest kinds the widest error counts, {self.error:.1%}",
            f"  nearest: {'; '.join(near)}",
        ]


def expected(work: StepModel) -> Expected:
    """The error that is expected of a step's plan."""
    rows, types = _misses(), work.settings.precision
    kind = (
        "experts" if work.model.experts else "dense",
        work.settings.name.partition("@")[0],
        work.hardware.name,
        types.compute if types.matmul == "compute" else types.matmul,
    )
    unknown = kind[2] not in {other[2] for other in rows}  # no run was on such a device
    differs = lambda other: [a != b for a, b in zip(other, kind, strict=True)][::-1]
    pools = (
        sorted((other for other in rows if other[:same] == kind[:same]), key=differs)
        for same in range(1 if work.settings.ours or unknown else len(kind), -1, -1)
    )
    pool = next(pool for pool in pools if sum(len(rows[other]) for other in pool) >= LEAST)
    kinds = {
        other: (len(runs), runs[min(math.ceil(FRACTION * (len(runs) + 1)), len(runs)) - 1])
        for other, runs in ((other, rows[other]) for other in pool)
    }
    return Expected(kind, max(error for _, error in kinds.values()), kinds)


@functools.cache
def _misses() -> Mapping[tuple[str, ...], list[float]]:
    """The factors between planned and published speed, less 1, of each kind's runs, the least
    first. A framework's releases are one kind."""
    errors = [
        (tuple(record[key].partition("@")[0] for key in KEYS), error)
        for record in json.loads(pathlib.Path(__file__).with_name("validation.json").read_bytes())[
            "kinds"
        ]
        for error in record["errors"]
    ]
    return {
        kind: sorted(max(1 + e, 1 / (1 + e)) - 1 for other, e in errors if other == kind)
        for kind, _ in errors
    }
