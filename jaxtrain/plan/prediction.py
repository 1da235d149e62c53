"""What is predicted of a step: time, rates and memory, from closed forms, and the slots of its table. No jax."""

import dataclasses
from typing import Any

from jaxtrain.config import Config
from jaxtrain.config.work import OURS, work_of
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.costs.memory import Memory, memory
from jaxtrain.costs.parts import BUBBLE, Parts
from jaxtrain.costs.step_time import Work
from jaxtrain.plan import layout_flag
from jaxtrain.plan.tables import slots_of, with_op_times

DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step of `config`, which is resolved, and what it takes on the device that works most and on the fullest one.

    tokens: of the run, None if not known
    """

    config: Config
    work: Work
    time: Parts
    memory: Memory
    tokens: float | None = None

    @property
    def devices(self) -> int:
        return self.work.layout.devices

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def fits(self) -> bool:
        return self.memory.bytes <= self.work.hardware.memory

    @property
    def tokens_per_s(self) -> float:
        return self.work.layout.batch * self.work.model.sequence / self.seconds

    @property
    def train_days(self) -> float | None:
        return self.tokens / self.tokens_per_s / DAY if self.tokens else None

    @property
    def bubble_fraction(self) -> float:
        """Of the whole step."""
        return self.time.exposed.get(BUBBLE, 0.0) / self.seconds

    @property
    def model_flops_per_s(self) -> float:
        """Of a device; attention counted in full, as published rates do."""
        return self.work.model_flops() / self.seconds / self.devices

    @property
    def hardware_flops_per_s(self) -> float:
        """The same with what is computed again."""
        return self.work.hardware_flops() / self.seconds / self.devices

    def figures(self) -> dict[str, Any]:
        """What --json prints."""
        peak = self.work.hardware.peak(self.work.dtype)
        return {
            "step_time_s": self.seconds,
            "model_tflops_per_device": self.model_flops_per_s / 1e12,
            "hardware_tflops_per_device": self.hardware_flops_per_s / 1e12,
            "mfu": self.model_flops_per_s / peak,
            "hfu": self.hardware_flops_per_s / peak,
            "memory_gib_per_device": self.memory.bytes / GIB,
            "fits": self.fits,
            "bubble_fraction": self.bubble_fraction,
            "tokens_per_s": self.tokens_per_s,
            "train_days": self.train_days,
            "layout": layout_flag.of(self.config),
        }


def predict(config: Config, hardware: Hardware, assume: str = OURS, tokens: float | None = None) -> Prediction:
    """Of a resolved config whose mesh is known and whose rules are kept. Raises ConfigError where our own program has no table for it."""
    work = work_of(config, hardware, assume)
    slots = slots_of(with_op_times(config, work)) if work.program.slots else None
    return Prediction(config, work, work.step(), memory(work, config.model.loss_chunk, slots), tokens)
