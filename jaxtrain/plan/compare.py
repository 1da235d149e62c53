"""The planned step of a run on the devices at hand and the measured one: `planned.json`. No jax.

The plan is that of `plan --layout --json` for the same config and hardware: closed forms and, with
stages, the table. The record lies in the run's folder.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxtrain.config import Config
from jaxtrain.costs.hardware import GIB
from jaxtrain.costs.step_time import BUBBLE, COMMUNICATION_AXES, FIXED
from jaxtrain.pipeline.step_model import hardware_at_hand
from jaxtrain.plan.predict import Prediction, exactly, predict

PLANNED = "planned.json"
WORTH = 0.02  # of the step: smaller parts are not listed
# parts that are measured and not planned (measured_step.py)
COMMUNICATION, WAITING = "communication", "waiting"
WAITED = (BUBBLE, FIXED, "stage")  # a stage that waits for another does so in a message


@dataclasses.dataclass(frozen=True)
class PlanAtHand:
    """The plan for the devices at hand, or None with a reason (empty for CPU, where no plan is
    expected)."""

    prediction: Prediction | None
    why_not: str = ""

    def as_dict(self) -> dict[str, Any] | None:
        """The plan as JSON: what `plan --json` prints, and seconds by part."""
        plan = self.prediction
        if plan is None:
            return None
        parts = {"parts": dict(plan.time.exposed), "hidden": dict(plan.time.hidden)}
        return {"hardware": plan.work.hardware.name} | plan.figures() | parts

    def lines(self) -> list[str]:
        """The plan as a line of the start-up text, or the reason for none."""
        plan = self.prediction
        if plan is None:
            return [f"planned step: {self.why_not}"] if self.why_not else []
        parts = ", ".join(
            f"{name} {seconds / plan.seconds:.0%}" for name, seconds in listed(plan.time.exposed)
        )
        hardware, rate = plan.work.hardware, f"{plan.tokens_per_s:,.0f} tokens/s"
        needs = (
            f"; it needs {plan.memory.bytes / GIB:.1f} GiB a device, and "
            f"{hardware.memory / GIB:.1f} are there"
        )
        return [
            f"planned step: {plan.seconds:.4g} s for {hardware.name}, {rate}: "
            f"{parts}{needs * (not plan.fits)}"
        ]


def plan_at_hand(config: Config, device_kind: str) -> PlanAtHand:
    """The plan of a resolved config whose mesh is known, on `train.hardware` or else the devices
    that jax calls `device_kind`. Raises HardwareError."""
    kind = hardware_at_hand(config, device_kind)
    if kind is None:
        use = "python -m jaxtrain.plan --calibrate --out=FILE measures it, for train.hardware=FILE"
        return PlanAtHand(
            None, "" if device_kind == "cpu" else f"{device_kind!r} is not known: {use}"
        )
    if config.precision.compute not in kind.peak_tflops:
        return PlanAtHand(
            None, f"{kind.name} has no peak for precision.compute={config.precision.compute}"
        )
    return PlanAtHand(exactly(predict(config, kind)))


def listed(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """The parts of at least WORTH of the step, the largest first."""
    least = WORTH * sum(parts.values())
    return sorted((item for item in parts.items() if item[1] >= least), key=lambda item: -item[1])


@dataclasses.dataclass(frozen=True)
class Trace:
    """Traced steps on one device: seconds of a step, and those by part, exposed and hidden.

    device: the number, in process 0, of the device that computes most
    """

    step_time_s: float
    device: int
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Miss:
    """A part of the step as planned and as measured, seconds."""

    part: str
    planned_s: float
    measured_s: float

    @property
    def seconds(self) -> float:
        return self.measured_s - self.planned_s


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A planned step compared with the measured one.

    step:     after which it was measured
    steps:    how many were; step_time_s is their median
    planned, hidden: seconds by part; planned_step_time_s is the sum of `planned`
    trace:    None where no steps were traced
    """

    step: int
    hardware: str
    planned_step_time_s: float
    planned: Mapping[str, float]
    hidden: Mapping[str, float]
    steps: int
    step_time_s: float
    trace: Trace | None = None

    @property
    def ratio(self) -> float:
        """The measured step over the planned one."""
        return self.step_time_s / self.planned_step_time_s

    def misses(self) -> list[Miss]:
        """Each part as planned and as traced, the largest difference first; nothing without a
        trace.

        Bubble, messages between stages and other waits are one part, since a collective of a stage
        that waits for another lasts as long as the wait. So is all communication if the trace does
        not tell its axes.
        """
        if self.trace is None:
            return []
        merged = COMMUNICATION in self.trace.exposed
        planned, measured = _grouped(self.planned, merged), _grouped(self.trace.exposed, merged)
        parts = [
            Miss(part, planned.get(part, 0.0), measured.get(part, 0.0))
            for part in planned | measured
        ]
        return sorted(parts, key=lambda miss: -abs(miss.seconds))

    def lines(self) -> list[str]:
        """The comparison as lines of text."""
        text = (
            f"planned step {self.planned_step_time_s:.4g} s ({self.hardware}), measured "
            f"{self.step_time_s:.4g} s ({self.ratio:.2f} x)"
        )
        if self.trace is None:
            return [f"{text}; --config.train.profile_steps=2 measures its parts"]
        misses = self.misses()
        least = WORTH * max(self.planned_step_time_s, self.trace.step_time_s)
        shown = [miss for miss in misses if max(miss.planned_s, miss.measured_s) >= least]
        parts = ", ".join(
            f"{miss.part} {miss.planned_s:.3g} → {miss.measured_s:.3g}" for miss in shown
        )
        largest = misses[0]
        return [
            text,
            f"parts in s, planned → measured in traced steps of {self.trace.step_time_s:.4g} "
            f"s: {parts}",
            f"largest miss: {largest.part}, {abs(largest.seconds):.3g} s "
            f"{'more' if largest.seconds > 0 else 'less'} than planned",
        ]

    def as_json(self) -> str:
        """The text of planned.json, which also has what follows from its figures."""
        largest = next(map(dataclasses.asdict, self.misses()), None)
        return (
            json.dumps(
                dataclasses.asdict(self) | {"ratio": self.ratio, "largest_miss": largest}, indent=1
            )
            + "\n"
        )


def read(folder: pathlib.Path) -> PlannedStep | None:
    """The record of the run's newest start; None if it is missing or cannot be read."""
    try:
        values: dict[str, Any] = json.loads((folder / PLANNED).read_bytes())
        values["trace"] = Trace(**values["trace"]) if values["trace"] else None
        return PlannedStep(
            **{field.name: values[field.name] for field in dataclasses.fields(PlannedStep)}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _grouped(parts: Mapping[str, float], merged: bool) -> dict[str, float]:
    """Seconds of the parts that can be compared. merged: all communication is one part."""
    grouped: dict[str, float] = collections.defaultdict(float)
    for part, seconds in parts.items():
        name = (
            WAITING
            if part in WAITED
            else COMMUNICATION
            if merged and part in COMMUNICATION_AXES
            else part
        )
        grouped[name] += seconds
    return dict(grouped)
