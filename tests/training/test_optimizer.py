"""Learning rates, and AdamW against its formula."""

import math

import jax
import numpy as np
import pytest

from jaxtrain.config import OptimizerConfig
from jaxtrain.config.phases import RateLine
from jaxtrain.models.spec import Spec
from jaxtrain.training.update.optimizer import Optimizer, learning_rate


def rates(steps: int, **fields) -> list[float]:
    rate = learning_rate(OptimizerConfig(learning_rate=1.0, **fields), steps)
    return [float(rate(i)) for i in range(steps + 3)]


def test_warm_up_reaches_the_peak_in_its_last_step():
    got = rates(10, warmup_steps=4, schedule="constant")
    np.testing.assert_allclose(got, [0.25, 0.5, 0.75, 1] + [1] * 9, rtol=1e-6)
    assert rates(10, warmup_steps=1, schedule="constant")[:2] == [1, 1]


def test_cosine_and_linear_end_at_their_fraction():
    cosine, linear = (
        rates(12, warmup_steps=2, schedule=s, final_fraction=0.2) for s in ("cosine", "linear")
    )
    np.testing.assert_allclose(linear[2:], [1 - 0.08 * i for i in range(11)] + [0.2] * 2, rtol=1e-6)
    np.testing.assert_allclose(
        cosine[2:],
        [0.2 + 0.4 * (1 + math.cos(math.pi * min(i, 10) / 10)) for i in range(13)],
        rtol=1e-6,
    )


def test_constant_with_a_final_decay():
    got = rates(10, schedule="constant", decay_steps=4, final_fraction=0.5)
    np.testing.assert_allclose(got, [1] * 7 + [0.875, 0.75, 0.625] + [0.5] * 3, rtol=1e-6)
    assert rates(5, schedule="constant") == [1] * 8


def test_an_inverse_root_begins_at_the_peak_of_the_warm_up():
    """Vaswani et al. 2017: min(step^-0.5, step · warm-up^-1.5), over its largest value."""
    warm_up, steps = 4, range(1, 14)
    noam = np.array([min(step**-0.5, step * warm_up**-1.5) for step in steps])
    got = rates(10, warmup_steps=warm_up, schedule="inverse_sqrt")
    np.testing.assert_allclose(got, noam / noam.max(), rtol=1e-6)
    got = rates(10, schedule="inverse_sqrt")
    np.testing.assert_allclose(got, [step**-0.5 for step in steps], rtol=1e-6)


def test_phases_put_lines_in_the_place_of_the_schedule():
    settings = OptimizerConfig(learning_rate=1.0, schedule="linear", final_fraction=0.0)
    lines = (RateLine(4, 8, 0.2), RateLine(8, 10, 0.0))
    rate = jax.jit(learning_rate(settings, 10, lines))
    got = [float(rate(i)) for i in range(12)]
    # update 3 has 0.7 of the schedule, from which the first line goes down to 0.2 in update 7
    want = [1, 0.9, 0.8, 0.7, 0.575, 0.45, 0.325, 0.2, 0.1, 0, 0, 0]
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert got[7] == np.float32(0.2) and got[9] == 0


SPECS = {
    "matrix": Spec((2, 3), ("width", "mlp"), std=0.1),
    "norm": Spec((3,), ("width",), constant=1.0),
}


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
def test_adamw(clip_norm):
    cfg = OptimizerConfig(
        learning_rate=0.1,
        schedule="constant",
        weight_decay=0.3,
        clip_norm=clip_norm,
        b1=0.8,
        b2=0.9,
        epsilon=1e-3,
    )
    optimizer = Optimizer(cfg, 10, SPECS)
    random = np.random.default_rng(0)
    params = {k: np.float32(random.normal(size=s.shape)) for k, s in SPECS.items()}
    state, mine = optimizer.init(params), dict(params)
    mu, nu = ({k: np.zeros(s.shape) for k, s in SPECS.items()} for _ in range(2))
    for t in range(1, 4):
        gradients = {k: np.float32(random.normal(size=s.shape)) for k, s in SPECS.items()}
        _, params, state = optimizer.update(gradients, state, params)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for k, g in gradients.items():
            g = g * min(1, clip_norm / norm) if clip_norm else g
            mu[k], nu[k] = 0.8 * mu[k] + 0.2 * g, 0.9 * nu[k] + 0.1 * g**2
            step = mu[k] / (1 - 0.8**t) / (np.sqrt(nu[k] / (1 - 0.9**t)) + 1e-3)
            mine[k] = mine[k] - 0.1 * (step + (0.3 * mine[k] if k == "matrix" else 0))
    for k in SPECS:
        np.testing.assert_allclose(params[k], mine[k], rtol=1e-4)


def test_only_matrices_decay():
    optimizer = Optimizer(
        OptimizerConfig(learning_rate=0.5, schedule="constant", weight_decay=0.1), 10, SPECS
    )
    params = {k: np.ones(s.shape, np.float32) for k, s in SPECS.items()}
    updated = optimizer.update(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updated.values["matrix"], 0.95)
    np.testing.assert_array_equal(updated.values["norm"], 1)


def test_clipping_does_not_change_what_a_checkpoint_holds():
    params = {k: np.ones(s.shape, np.float32) for k, s in SPECS.items()}
    clipped, free = (
        Optimizer(OptimizerConfig(clip_norm=c), 10, SPECS).init(params) for c in (1.0, 0.0)
    )
    assert [p for p, _ in jax.tree_util.tree_leaves_with_path(clipped)] == [
        p for p, _ in jax.tree_util.tree_leaves_with_path(free)
    ]
