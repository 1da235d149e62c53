"""The schedules of the learning rate that `optimizer.schedule` may name: a record of each has all
in which it differs.

The linear warm-up before it is the same for all (training/update/optimizer.py: learning_rate). This
module works without jax, so jax.numpy and optax are arguments of `make`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True)
class LearningRateRecord:
    """A schedule of the learning rate. `settings` below is the config's group `optimizer`.

    name:  as in `optimizer.schedule`
    text:  its form after the warm-up, with its source
    make:  (jax.numpy, optax, settings, steps) → a function of a step's number after the warm-up,
           from 0, that gives its learning rate. steps: from the warm-up to the end of the run, at
           least 1
    reads: the settings that it reads besides those that all read, `learning_rate` and
           `warmup_steps`
    """

    name: str
    text: str
    make: Callable[[ModuleType, ModuleType, Any, int], Callable[[Any], Any]]
    reads: tuple[str, ...]

    @property
    def decays_at_the_end(self) -> bool:
        """True if the rate is constant until the last `decay_steps` steps. If these are 0 it does
        not decay, and `final_fraction` has no use."""
        return "decay_steps" in self.reads


def _linear(_: ModuleType, optax: ModuleType, settings: Any, steps: int) -> Callable:
    peak = settings.learning_rate
    return optax.linear_schedule(peak, peak * settings.final_fraction, steps)


def _constant(jnp: ModuleType, optax: ModuleType, settings: Any, steps: int) -> Callable:
    line = _linear(jnp, optax, settings, max(1, settings.decay_steps))
    return _decaying_at_the_end(optax, settings, steps, line)


def _one_minus_sqrt(jnp: ModuleType, optax: ModuleType, settings: Any, steps: int) -> Callable:
    peak, final = settings.learning_rate, settings.final_fraction

    def decay(step: Any) -> Any:
        fraction = jnp.clip(step / settings.decay_steps, 0, 1)
        return peak * (final + (1 - final) * (1 - jnp.sqrt(fraction)))

    return _decaying_at_the_end(optax, settings, steps, decay)


def _decaying_at_the_end(
    optax: ModuleType, settings: Any, steps: int, decay: Callable[[Any], Any]
) -> Callable:
    """The peak until the last `decay_steps` steps. decay: from the number of such a step, from 0"""
    constant = optax.constant_schedule(settings.learning_rate)
    if not settings.decay_steps:
        return constant
    return optax.join_schedules([constant, decay], [steps - settings.decay_steps])


def _inverse_sqrt(jnp: ModuleType, _: ModuleType, settings: Any, steps: int) -> Callable:
    # Counted from 1, the warm-up's last step has the number `warm_up` and the peak. Without a
    # warm-up that is the first step.
    peak, warm_up = settings.learning_rate, settings.warmup_steps
    return lambda step: peak * jnp.sqrt(max(warm_up, 1) / (warm_up + step + 1))


LEARNING_RATES: Mapping[str, LearningRateRecord] = {
    record.name: record
    for record in (
        LearningRateRecord(
            "cosine",
            "half a cosine down to final_fraction of the peak at the end of the run (Loshchilov & "
            "Hutter 2017, arXiv:1608.03983)",
            make=lambda _, optax, s, steps: optax.cosine_decay_schedule(
                s.learning_rate, steps, s.final_fraction
            ),
            reads=("final_fraction",),
        ),
        LearningRateRecord(
            "linear",
            "a line down to final_fraction of the peak at the end of the run",
            make=_linear,
            reads=("final_fraction",),
        ),
        LearningRateRecord(
            "constant",
            "the peak, and in the last decay_steps steps a line down to final_fraction of it",
            make=_constant,
            reads=("decay_steps", "final_fraction"),
        ),
        LearningRateRecord(
            "1-sqrt",
            "the peak, and in the last decay_steps steps 1 minus the root of the fraction of them "
            "that is over, down to final_fraction of it (Hägele et al. 2024, arXiv:2405.18392)",
            make=_one_minus_sqrt,
            reads=("decay_steps", "final_fraction"),
        ),
        LearningRateRecord(
            "inverse_sqrt",
            "the peak times the root of warmup_steps over the number of the step (Vaswani et al. "
            "2017, arXiv:1706.03762, section 5.3, with the peak at the end of the warm-up)",
            make=_inverse_sqrt,
            reads=(),
        ),
    )
}
READS = tuple(dict.fromkeys(name for record in LEARNING_RATES.values() for name in record.reads))
