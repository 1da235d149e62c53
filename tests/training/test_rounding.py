"""Stochastic rounding: its mean is the number, each random number stands for one place of the model
at one update, and neither padding nor a stack changes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small

from jaxtrain.training.update.rounding import random_bits, rounded

KEY = jnp.array([3, 5], jnp.uint32)
BFLOAT16 = jnp.dtype("bfloat16")


def round_at(x, count=0, key=KEY, use=0) -> np.ndarray:
    x = jnp.asarray(x, jnp.float32)
    return np.asarray(rounded(x, BFLOAT16, key, jnp.int32(count), use), np.float32)


@pytest.mark.parametrize("value", [1.001, -1.003, 3e-5, 1.9999, -7e30, 2e-38])
def test_the_mean_is_the_number(value):
    """2¹⁶ numbers are rounded up as often as their distance from the lower one says, within five
    standard deviations of a binomial distribution."""
    n = 2**16
    got = round_at(np.full((256, n // 256), value))
    below, above = np.unique(got)
    exact = np.float32(value)
    assert (
        below < exact < above
        and np.float32(jnp.nextafter(BFLOAT16.type(below), BFLOAT16.type(above))) == above
    )
    share = (exact - below) / (above - below)
    assert abs((got == above).mean() - share) < 5 * np.sqrt(share * (1 - share) / n)


def test_what_16_bits_can_hold_stays():
    held = small.normal(0, 1000).astype(BFLOAT16).astype(np.float32)
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan])
    for exact in held, special:
        assert round_at(exact).tobytes() == exact.tobytes()
    unchanged = jnp.ones(3)
    assert rounded(unchanged, jnp.dtype("float32"), None, jnp.int32(0), 0) is unchanged


def test_a_number_beyond_the_largest_may_become_infinite():
    assert set(np.unique(round_at(np.full(100, 3.395e38)))) <= {np.float32(3.3895314e38), np.inf}


@pytest.mark.parametrize(
    "other",
    [
        {"count": 1},
        {"count": 2**31 - 1},
        {"use": 1},
        {"key": jnp.array([3, 6], jnp.uint32)},
        {"key": jnp.array([4, 5], jnp.uint32)},
    ],
)
def test_bits_are_uniform_and_independent(other):
    """Chi-squared of the upper byte, which has 255 degrees of freedom, and correlations with
    neighbours in both dimensions and with those of another update, array, layer or parameter."""
    given = {"key": KEY, "count": 0, "use": 0}
    draw = lambda key, count, use: np.asarray(random_bits(key, jnp.int32(count), use, (512, 512)))
    bits, others = draw(**given), draw(**given | other)
    for each in bits, others:
        counts = np.bincount(each.reshape(-1) >> 24, minlength=256)
        expected = each.size / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)
    pairs = [(bits, others), (bits[1:], bits[:-1]), (bits[:, 1:], bits[:, :-1])]
    for a, b in pairs:
        correlation = np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]
        assert abs(correlation) < 5 / np.sqrt(a.size)


def test_a_stack_has_the_numbers_of_its_layers_and_padding_changes_none():
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (2, 3, 2), np.uint32))
    x = small.normal(1, 2, 3, 5, 7)
    stacked = round_at(x, 9, keys)
    for place in np.ndindex(2, 3):
        np.testing.assert_array_equal(stacked[place], round_at(x[place], 9, keys[place]))
    padded = np.pad(x, [(0, 0), (0, 0), (0, 3), (0, 0)])
    np.testing.assert_array_equal(round_at(padded, 9, keys)[:, :, :5], stacked)
    assert not round_at(padded, 9, keys)[:, :, 5:].any()


def test_a_mean_of_moments_follows_what_the_nearest_number_would_not():
    """0.999 of a number of 8 binary digits is nearest to the number itself. 1,000 such steps leave
    0.999¹⁰⁰⁰ = 0.37 of it, here on the mean of 4,096 numbers within five of its deviations: each
    step rounds by less than 2⁻⁸ of the number."""

    def step(count, x):
        return rounded(x.astype(jnp.float32) * 0.999, BFLOAT16, KEY, count, 0)

    x = jax.lax.fori_loop(0, 1000, step, jnp.full((64, 64), 0.7, BFLOAT16))
    start = float(jnp.asarray(0.7, BFLOAT16))
    deviation = start * 2**-8 * np.sqrt(1000) / 64
    assert abs(float(x.astype(jnp.float32).mean()) - start * 0.999**1000) < 5 * deviation
    nearest = jax.lax.fori_loop(
        0, 1000, lambda _, x: (x.astype(jnp.float32) * 0.999).astype(BFLOAT16), jnp.bfloat16(0.7)
    )
    assert nearest == jnp.bfloat16(0.7)
