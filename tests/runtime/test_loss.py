"""The loss chunk by chunk: the same as of all tokens at once, with its gradients, and never the
logits of more than a chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support import small

from jaxtrain.devices.mesh import make_mesh
from jaxtrain.devices.sharding import constrain
from jaxtrain.planner.programs.program import Program
from jaxtrain.runtime.loss import (
    LossInputs,
    LossRule,
    OutputHead,
    VocabularyShard,
    loss_and_gradients,
    loss_sum,
    token_losses,
)

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 12, 6, 40
random = np.random.default_rng(0)
PARAMS = {
    "table": random.normal(size=(VOCABULARY, WIDTH)).astype(np.float32),
    "bias": random.normal(size=WIDTH).astype(np.float32),
}
X = random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
TARGETS = random.integers(0, VOCABULARY, (BATCH, LENGTH), np.int32)
WEIGHTS = random.random((BATCH, LENGTH)).astype(np.float32) * (random.random((BATCH, LENGTH)) < 0.7)


def head(params, x):
    return jnp.tanh(x + params["bias"]) @ params["table"].T


def inputs(x) -> LossInputs:
    return LossInputs(x, TARGETS, WEIGHTS)


def plain(params, x):
    losses = optax.softmax_cross_entropy_with_integer_labels(head(params, x), TARGETS)
    return (losses * WEIGHTS).sum()


plain_gradients = jax.jit(jax.value_and_grad(plain, (0, 1)))


@pytest.mark.parametrize("limit", small.named([24, 7, 2], [23, 12, 8, 4, 1]))
def test_loss_and_gradients(limit):
    value, (dparams, dx) = plain_gradients(PARAMS, X)
    start = jax.tree.map(jnp.ones_like, PARAMS)
    losses, sums, g = jax.jit(
        lambda x: loss_and_gradients(OutputHead(head, limit), PARAMS, start, inputs(x))
    )(X)
    np.testing.assert_allclose(losses.loss, value, rtol=1e-6)
    np.testing.assert_allclose(g, dx, rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda got, d: np.testing.assert_allclose(got, d + 1, rtol=1e-5, atol=1e-5), sums, dparams
    )
    only = jax.jit(lambda x: loss_sum(OutputHead(head, limit), PARAMS, inputs(x)))(X)
    np.testing.assert_allclose(only, value, rtol=1e-6)


def test_on_a_split_sequence():
    x = jnp.asarray(X)
    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, 4), jax.devices()[:4])):

        def run(x):
            x = constrain(x, ("batch", "sequence", None))
            return loss_and_gradients(
                OutputHead(head, 8), PARAMS, jax.tree.map(jnp.zeros_like, PARAMS), inputs(x)
            )

        losses, _, g = jax.jit(run)(x)
    value, (_, dx) = plain_gradients(PARAMS, X)
    np.testing.assert_allclose(losses.loss, value, rtol=1e-6)
    np.testing.assert_allclose(g, dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("limit", "parts"), [(24, 1), (8, 3), (2, 12)])
def test_logits_of_a_part_at_a_time(limit, parts):
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    program = (
        jax.jit(lambda x: loss_and_gradients(OutputHead(head, limit), PARAMS, zeros, inputs(x)))
        .lower(X)
        .compile()
    )
    parsed = Program(program.as_text())
    largest = max(
        size
        for i in parsed.below(parsed.entry)
        for shape, size in zip(i.shapes, i.sizes, strict=True)
        if VOCABULARY in shape
    )
    # the table itself, where the part is smaller
    assert largest == max(BATCH * LENGTH // parts, WIDTH) * VOCABULARY


def test_token_losses():
    logits = jnp.asarray(random.normal(size=(5, VOCABULARY)) * 50, jnp.float32)
    targets = jnp.arange(5)
    losses, gradient, _ = token_losses(logits, targets)
    wanted = lambda x: optax.softmax_cross_entropy_with_integer_labels(x, targets)
    np.testing.assert_allclose(losses, wanted(logits), rtol=1e-5)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: wanted(x).sum())(logits), atol=1e-6)


def test_z_loss():
    """The term of PaLM (arXiv:2204.02311, section 5), over chunks of tokens, with its gradient."""
    weight = 0.3

    def objective(params, x):
        chunk = inputs(x)
        logits = head(params, chunk.x_BTD)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, chunk.targets_BT)
        z_losses = weight * jax.nn.logsumexp(logits, -1) ** 2
        sums = [jnp.sum(a * chunk.weights_BT) for a in (losses, z_losses)]
        return sums[0] + sums[1], sums

    (_, (loss, z_loss)), (dparams, dx) = jax.value_and_grad(objective, (0, 1), has_aux=True)(
        PARAMS, jnp.asarray(X)
    )
    start = jax.tree.map(jnp.zeros_like, PARAMS)
    chunked = OutputHead(head, 8, rule=LossRule(weight))
    sums, gradients, g = jax.jit(lambda x: loss_and_gradients(chunked, PARAMS, start, inputs(x)))(X)
    np.testing.assert_allclose(sums, (loss, z_loss), rtol=1e-6)
    np.testing.assert_allclose(g, dx, rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradients, dparams
    )
    # evaluation reports the cross-entropy alone
    np.testing.assert_allclose(
        jax.jit(lambda x: loss_sum(chunked, PARAMS, inputs(x)))(X), loss, rtol=1e-6
    )


def test_padded_logits_change_nothing():
    logits = jnp.asarray(random.normal(size=(5, VOCABULARY)), jnp.float32)
    padded = jnp.pad(logits, ((0, 0), (0, 8)), constant_values=-jnp.inf)
    targets = jnp.arange(5)
    losses, gradient, _ = token_losses(padded, targets)
    wanted = token_losses(logits, targets)[0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert np.isfinite(gradient).all() and not gradient[:, VOCABULARY:].any()


def test_parts_of_the_vocabulary():
    """Each device has some rows of the table, one of them mostly padding; losses agree everywhere
    and gradients are parts of the whole."""
    logits = np.asarray(random.normal(size=(5, VOCABULARY)) * 9, np.float32)
    targets, wanted = (
        jnp.asarray([0, 11, 12, 38, VOCABULARY - 1]),
        token_losses(jnp.asarray(logits), jnp.asarray([0, 11, 12, 38, 39])),
    )
    padded = np.pad(logits, ((0, 0), (0, 8)), constant_values=-np.inf)
    mesh = make_mesh((1, 1, 4, 1, 1, 1), jax.devices()[:4])
    part = lambda x: token_losses(
        x, targets, VocabularyShard(jax.lax.axis_index("stage") * 12, ("stage",))
    )
    with jax.set_mesh(mesh):
        both = jax.shard_map(
            part,
            in_specs=P(None, "stage"),
            out_specs=(P(), P(None, "stage"), P()),
            check_vma=False,
        )
        losses, gradient, _ = jax.jit(both)(padded)
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(gradient[:, :VOCABULARY], wanted[1], atol=1e-6)
