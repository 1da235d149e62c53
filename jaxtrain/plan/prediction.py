"""What is predicted of a step: time, rates and memory, from closed forms, and the slots of its table. No jax."""

import dataclasses
import sys
from typing import Any

from jaxtrain.config import Config
from jaxtrain.config.work import OURS, work_of
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.costs.memory import Memory, memory
from jaxtrain.costs.step_time import BUBBLE, Parts, Work
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
    def bubble_fraction(self) -> float:
        """Fraction of the step in which a device waits for others."""
        return self.time.exposed.get(BUBBLE, 0.0) / self.seconds

    @property
    def model_flops_per_s(self) -> float:
        """Model FLOP/s of a device. Attention is counted as the framework's published rates do; ours counts it causally."""
        return self.work.model_flops() / self.seconds / self.devices

    @property
    def hardware_flops_per_s(self) -> float:
        """FLOP/s of a device with recomputation counted."""
        return self.work.hardware_flops() / self.seconds / self.devices

    def figures(self) -> dict[str, Any]:
        """What --json prints."""
        peak, bubble_s = self.work.hardware.peak(self.work.dtype), self.time.exposed.get(BUBBLE, 0.0)
        return step_figures(self.config, self.work, self.seconds, peak, self.memory.bytes, self.fits, bubble_s, self.tokens)


def step_figures(
    config: Config, work: Work, seconds: float, peak: float, held: float, fits: bool, bubble_s: float, tokens: float | None
) -> dict[str, Any]:
    """What --json prints of a step of so many seconds, by devices whose peak is the mean of all. held: bytes of the fullest one."""
    model, hardware = (flops / seconds / work.layout.devices for flops in (work.model_flops(), work.hardware_flops()))
    tokens_per_s = work.layout.batch * work.model.sequence / seconds
    return {
        "step_time_s": seconds,
        "model_tflops_per_device": model / 1e12,
        "hardware_tflops_per_device": hardware / 1e12,
        "mfu": model / peak,
        "hfu": hardware / peak,
        "attention_flops": "causal" if work.program.causal_rates else "full",
        "memory_gib_per_device": held / GIB,
        "fits": fits,
        "bubble_fraction": bubble_s / seconds,
        "tokens_per_s": tokens_per_s,
        "train_days": min(tokens / tokens_per_s / DAY, sys.float_info.max) if tokens else None,  # JSON has no infinity
        "layout": layout_flag.of(config),
    }


def predict(config: Config, hardware: Hardware, assume: str = OURS, tokens: float | None = None) -> Prediction:
    """The prediction for a resolved config whose mesh is known and whose rules are kept.

    Raises ConfigError where our own program has no table for it.
    """
    work = work_of(config, hardware, assume)
    slots = slots_of(with_op_times(config, work)) if work.program.slots else None
    return Prediction(config, work, work.step(), memory(work, config.model.loss_chunk, slots), tokens)
