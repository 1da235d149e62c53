"""The layers of a chunk: a loop whose length is the stage's own, against the same layers one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.pipeline.layers import LayerStack
from jaxtrain.pipeline.placement import Placement

WIDTH, SHAPE = 6, (2, 5, 6)


def block(params, x, positions, segments):
    """Uses all that it is given; `segments` may be missing."""
    x = x + jnp.sin(positions)[..., None] * (1 if segments is None else segments[..., None])
    return x + jnp.tanh(x @ params["in"]) @ params["out"] + params["bias"]


def normal(key: int, *shape) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape)


EXTRA = {"one document": (jnp.arange(5.0)[None], None), "documents": (normal(8, 2, 5), normal(9, 2, 5))}
CASES = {  # placement, chunk, stage, layers there
    "one layer": (Placement(4, 4), 0, 2, 1),
    "equal stages": (Placement(6, 2), 0, 1, 3),
    "the fuller stage": (Placement(7, 3), 0, 0, 3),
    "a stage with an unused row": (Placement(7, 3), 0, 1, 2),
    "an unused row in the second chunk": (Placement(7, 2, 2), 1, 1, 1),
}


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("keep_inputs", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case, keep_inputs, extra):
    placement, chunk, stage, count = CASES[case]
    rows, extra = placement.rows(chunk), EXTRA[extra]
    params = {"in": normal(1, rows, WIDTH, 4), "out": normal(2, rows, 4, WIDTH), "bias": normal(3, rows, WIDTH)}
    x, g, sums = normal(4, *SHAPE), normal(5, *SHAPE), jax.tree.map(lambda a: 1 + jnp.zeros_like(a), params)

    @jax.jit
    def run(stage, params, x, g):
        stack = LayerStack(block, placement, chunk, stage, keep_inputs, [])
        y, kept = stack.forward_keeping(params, x, extra)
        return stack.forward(params, x, extra), y, *stack.backward(params, sums, extra, kept, g)

    def plain(params, x):
        for i in range(count):
            x = block(jax.tree.map(lambda a, i=i: a[i], params), x, *extra)
        return x

    wanted, vjp = jax.vjp(plain, params, x)
    gradients, dx = vjp(g)
    forward, y, got_sums, got_dx = run(stage, params, x, g)
    for got, expected in ((forward, wanted), (y, wanted), (got_dx, dx)):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    for got, gradient in zip(jax.tree.leaves(got_sums), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(got, 1 + gradient, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[count:], 1)  # unused rows have no gradient


def test_what_is_kept():
    placement, params = Placement(6, 2), {"in": normal(1, 3, WIDTH, 4), "out": normal(2, 3, 4, WIDTH), "bias": normal(3, 3, WIDTH)}

    def kept(keep_inputs):
        stack = LayerStack(block, placement, 0, 0, keep_inputs, [])
        return [k.shape for k in jax.eval_shape(lambda x: stack.forward_keeping(params, x, EXTRA["documents"])[1], normal(4, *SHAPE))]

    assert kept(True) == [(3, *SHAPE)]  # each layer's input
    assert (3, 2, 5, 4) in kept(False), "the hidden layer is kept as well, not computed again"
    assert not {(3, WIDTH, 4), (3, 4, WIDTH)} & set(kept(False)), "weights are not kept"


def test_stacks_share_one_partition():
    splits, extra = [], EXTRA["documents"]
    params = {"in": normal(1, 1, WIDTH, 4), "out": normal(2, 1, 4, WIDTH), "bias": normal(3, 1, WIDTH)}
    for chunk in range(2):
        LayerStack(block, Placement(4, 2, 2), chunk, 0, False, splits).forward_keeping(params, normal(4, *SHAPE), extra)
    assert len(splits) == 1
