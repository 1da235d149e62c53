"""The loss in chunks equals the loss at once, and its gradients; no chunk holds more logits than it may."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.transformer import vocabulary_logits
from jaxtrain.training.loss import chunk_count, loss_and_gradients, loss_sum, token_losses

B, T, D, V = 3, 8, 4, 11


def inputs():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(B, T, D)), jnp.float32)
    table = jnp.asarray(random.normal(size=(V, D)), jnp.float32)
    targets = jnp.asarray(random.integers(0, V, (B, T)), jnp.int32)
    weights = jnp.asarray(random.random((B, T)) < 0.6, jnp.float32)
    return x, table, targets, weights


def head(table, x):
    return vocabulary_logits(x.reshape(-1, D), table).reshape(*x.shape[:-1], V)


def plain(table, x, targets, weights):
    logits = jnp.einsum("btd,vd->btv", x, table)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return -jnp.sum(picked * weights)


@pytest.mark.parametrize("limit", [1000, 12, 6, 3, 1])
def test_chunks_change_nothing(limit):
    x, table, targets, weights = inputs()
    wanted, (d_table, dx) = jax.value_and_grad(plain, (0, 1))(table, x, targets, weights)
    np.testing.assert_allclose(loss_sum(lambda x: head(table, x), x, targets, weights, limit), wanted, rtol=1e-5)
    sums = jnp.full(table.shape, 2.0)
    loss, sums, ours = jax.jit(lambda: loss_and_gradients(head, table, sums, x, targets, weights, limit))()
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(ours, dx, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sums, d_table + 2, rtol=1e-4, atol=1e-6)


def test_chunk_count_is_the_fewest_that_fit():
    assert chunk_count(3, 8, 24) == 1 and chunk_count(3, 8, 23) == 2 and chunk_count(3, 8, 6) == 4
    assert chunk_count(100, 8, 10) == 8  # a chunk is at least one token of each row


def test_the_program_never_holds_all_logits():
    x, table, targets, weights = inputs()
    text = jax.jit(lambda: loss_and_gradients(head, table, jnp.zeros_like(table), x, targets, weights, 6)).lower().compile().as_text()
    assert f"f32[6,{V}]" in text.replace(f"f32[3,2,{V}]", f"f32[6,{V}]")
    assert f"f32[{B},{T},{V}]" not in text and f"f32[{B * T},{V}]" not in text


def test_masked_logits_have_no_probability():
    logits = jnp.array([[1.0, 2.0, -jnp.inf]])
    losses, gradient = jax.value_and_grad(lambda a: token_losses(a, jnp.array([1])).sum())(logits)
    np.testing.assert_allclose(losses, np.log(1 + np.exp(-1.0)), rtol=1e-6)
    assert np.isfinite(gradient).all() and gradient[0, 2] == 0
