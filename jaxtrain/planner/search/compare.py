"""The planned step of a run on the devices at hand, and its record with the measured step. No jax.

The plan is that of `plan --layout --json` for the same config and hardware: closed forms and, with
stages, the table. The record is `planned.json` in the run's folder.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtrain.config import ResolvedConfig
from jaxtrain.planner.layer.hardware import GIB
from jaxtrain.planner.search.predict import Prediction, exactly, predict
from jaxtrain.planner.step.step_model import hardware_at_hand, unfollowed
from jaxtrain.planner.step.time_breakdown import BUBBLE, COMMUNICATION_AXES
from jaxtrain.run.files import PLANNED, read_json

WORTH = 0.02  # of a time: smaller parts and gains are not listed
# Parts that are measured and not planned (measured_step.py).
COMMUNICATION, WAITING = "communication", "waiting"
# Planned part → the measured part that it is compared with, if it has another name: a stage that
# waits for another one does so in a message.
WAITS = dict.fromkeys((BUBBLE, "stage"), WAITING)
ANY_AXIS = dict.fromkeys(COMMUNICATION_AXES, COMMUNICATION)


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
        return {
            "hardware": plan.work.hardware.name,
            **plan.figures(),
            "parts": dict(plan.time.exposed),
            "hidden": dict(plan.time.hidden),
        }

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
            f"planned step: {plan.seconds:.4g} s for {hardware.name}, {rate}: {parts}"
            f"{needs * (not plan.fits)}",
            *plan.expected.lines(),
            *unfollowed(plan.config, plan.work.settings),
        ]


def plan_at_hand(config: ResolvedConfig, device_kind: str) -> PlanAtHand:
    """The plan of a config. Raises HardwareError.

    device_kind: jax's name of the devices, which count unless `train.hardware` names others
    """
    kind = hardware_at_hand(config.train.hardware, device_kind)
    if kind is None:
        unknown = (
            f"{device_kind!r} is not known: python -m jaxtrain.plan --calibrate --out=FILE "
            "measures it, for train.hardware=FILE"
        )
        return PlanAtHand(None, "" if device_kind == "cpu" else unknown)
    dtype = config.precision.compute
    if dtype not in kind.peak_tflops:
        return PlanAtHand(None, f"{kind.name} has no peak for precision.compute={dtype}")
    return PlanAtHand(exactly(predict(config, kind)))


def listed(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """The parts of at least WORTH of the step, the largest first."""
    least = WORTH * sum(parts.values())
    return sorted((item for item in parts.items() if item[1] >= least), key=lambda item: -item[1])


@dataclasses.dataclass(frozen=True)
class Trace:
    """Traced steps on one device: seconds of a step, and seconds by part, exposed and hidden.

    device: the number, in process 0, of the device that computes most
    """

    step_time_s: float
    device: int
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]


class ComparedPart(NamedTuple):
    """A part of the step as planned and as measured, seconds."""

    part: str
    planned_s: float
    measured_s: float


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A planned step compared with the measured one.

    step:     the last step that was measured
    planned, hidden: planned seconds by part; planned_step_time_s is the sum of `planned`
    steps:    the number of measured steps, of whose times step_time_s is the median
    trace:    None if no steps were traced
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

    def parts_compared(self) -> list[ComparedPart]:
        """Each part as planned and as traced, the largest difference first; [] without a trace.

        The bubble, messages between stages and other waits are compared as one sum: a stage that
        waits for another does so inside a collective, whose time in the trace includes the wait.
        All communication is one sum as well if the trace does not tell the mesh axes.
        """
        if self.trace is None:
            return []
        names = (ANY_AXIS if COMMUNICATION in self.trace.exposed else {}) | WAITS
        planned, measured = (collections.defaultdict[str, float](float) for _ in range(2))
        for sums, parts in ((planned, self.planned), (measured, self.trace.exposed)):
            for part, seconds in parts.items():
                sums[names.get(part, part)] += seconds
        compared = [
            ComparedPart(part, planned[part], measured[part]) for part in {**planned, **measured}
        ]
        return sorted(compared, key=lambda part: -abs(part.measured_s - part.planned_s))

    def lines(self) -> list[str]:
        """The comparison as lines of text."""
        text = (
            f"planned step {self.planned_step_time_s:.4g} s ({self.hardware}), measured "
            f"{self.step_time_s:.4g} s ({self.ratio:.2f} x)"
        )
        if self.trace is None:
            return [f"{text}; --config.train.profile_steps=2 measures its parts"]
        compared = self.parts_compared()
        least = WORTH * max(self.planned_step_time_s, self.trace.step_time_s)
        parts = ", ".join(
            f"{part.part} {part.planned_s:.3g} → {part.measured_s:.3g}"
            for part in compared
            if max(part.planned_s, part.measured_s) >= least
        )
        largest, planned_s, measured_s = compared[0]
        sign = "more" if measured_s > planned_s else "less"
        return [
            text,
            f"parts in s, planned → measured in traced steps of {self.trace.step_time_s:.4g} "
            f"s: {parts}",
            f"largest miss: {largest}, {abs(measured_s - planned_s):.3g} s {sign} than planned",
        ]

    def as_json(self) -> str:
        """The text of planned.json: the fields, their ratio, and the largest miss."""
        largest = next((part._asdict() for part in self.parts_compared()), None)
        values = dataclasses.asdict(self) | {"ratio": self.ratio, "largest_miss": largest}
        return json.dumps(values, indent=1) + "\n"


def read(folder: pathlib.Path) -> PlannedStep | None:
    """The record of the run's newest start; None if it is missing or cannot be read."""
    try:
        values: dict[str, Any] = read_json(folder / PLANNED, folder=folder)
        values["trace"] = Trace(**values["trace"]) if values["trace"] else None
        fields = dataclasses.fields(PlannedStep)
        return PlannedStep(**{field.name: values[field.name] for field in fields})
    except (OSError, ValueError, KeyError, TypeError):
        return None
