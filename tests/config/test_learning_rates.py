"""Each schedule of the learning rate against its closed form, and the settings that it reads."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config import OptimizerConfig
from jaxtrain.config.learning_rates import LEARNING_RATES, READS

PEAK, WARM_UP, STEPS, DECAY, FINAL = 0.5, 3, 20, 8, 0.2
SETTINGS = OptimizerConfig(
    learning_rate=PEAK, warmup_steps=WARM_UP, decay_steps=DECAY, final_fraction=FINAL
)


def over(step: int) -> float:
    """The fraction of the final decay that is over before a step after the warm-up."""
    return min(max(step - (STEPS - DECAY), 0) / DECAY, 1)


# a step after the warm-up, from 0 → its learning rate, over the peak
CLOSED_FORMS = {
    "cosine": lambda i: FINAL + (1 - FINAL) * (1 + math.cos(math.pi * min(i / STEPS, 1))) / 2,
    "linear": lambda i: 1 - (1 - FINAL) * min(i / STEPS, 1),
    "constant": lambda i: 1 - (1 - FINAL) * over(i),
    "1-sqrt": lambda i: FINAL + (1 - FINAL) * (1 - math.sqrt(over(i))),
    "inverse_sqrt": lambda i: math.sqrt(WARM_UP / (WARM_UP + 1 + i)),
}


class Recorder:
    """Settings that say which of them were read."""

    def __init__(self):
        self.names = set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(SETTINGS, name)


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_closed_form(name):
    rate = LEARNING_RATES[name].make(jnp, optax, SETTINGS, STEPS)
    steps = range(STEPS + 3)
    expected = [PEAK * CLOSED_FORMS[name](i) for i in steps]
    # float32 has 24 binary digits; the root of what is nearly 0 has half of them
    np.testing.assert_allclose([float(rate(i)) for i in steps], expected, rtol=1e-6)
    traced = rate(jnp.arange(STEPS + 3))
    np.testing.assert_allclose(np.broadcast_to(traced, len(expected)), expected, rtol=1e-6)


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_settings_that_it_reads(name):
    recorder = Recorder()
    LEARNING_RATES[name].make(jnp, optax, recorder, STEPS)(STEPS - 1)
    assert recorder.names - {"learning_rate", "warmup_steps"} == {*LEARNING_RATES[name].reads}


def test_every_setting_that_a_schedule_reads_exists():
    assert {*READS} <= {field.name for field in dataclasses.fields(OptimizerConfig)}


@pytest.mark.parametrize("name", [n for n, r in LEARNING_RATES.items() if r.decays_at_the_end])
def test_without_decay_steps_the_rate_stays(name):
    settings = dataclasses.replace(SETTINGS, decay_steps=0)
    rate = LEARNING_RATES[name].make(jnp, optax, settings, STEPS)
    assert {float(rate(i)) for i in range(STEPS + 3)} == {PEAK}
