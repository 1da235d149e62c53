"""The layers of a chunk: a loop whose length is the stage's own, against the same layers one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.runtime.backward_split import Split
from jaxtrain.runtime.layer_stack import LayerStack, slots
from jaxtrain.schedule.placement import Placement

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


def run(case: str, extra, recompute: bool):
    """What a unit's ops make on its stage; everything is computed twice, by the ops apart and at once."""
    placement, unit, stage, _ = CASES[case]
    rows = placement.stack_size(unit)
    params = {"in": normal(1, rows, WIDTH, 4), "out": normal(2, rows, 4, WIDTH), "bias": normal(3, rows, WIDTH)}
    x, g, sums = normal(4, *SHAPE), normal(5, *SHAPE), jax.tree.map(lambda a: 1 + jnp.zeros_like(a), params)
    layer = lambda params, x, extra: block(params, x, *extra)
    split = Split(layer, jax.tree.map(lambda a: a[0], params), x, extra)
    pool = lambda kept: [jnp.full_like(a, jnp.nan) for a in slots(3, rows, kept)]
    for_b, for_w = map(pool, split.sort(split.residuals))

    @jax.jit
    def ops(stage, params, x, g):
        stack = LayerStack(layer, split, placement, unit, stage)
        y, b, w = stack.forward_keeping(params, x, extra, for_b, for_w, 2, 1)
        dx, stash = stack.input_gradient(params, extra, b, w, 2, 1, g, pool(split.stash), 0)
        apart = (stack.weight_gradient(params, sums, extra, w, 1, stash, 0), dx)
        whole, kept = stack.forward_with(params, x, extra, recompute)
        return (stack.forward(params, x, extra), y, whole), (apart, stack.backward_with(params, sums, extra, kept, g, recompute))

    return params, x, g, ops(stage, params, x, g)


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case, recompute, extra):
    count, extra = CASES[case][-1], EXTRA[extra]
    params, x, g, (outputs, backwards) = run(case, extra, recompute)

    def plain(params, x):
        for i in range(count):
            x = block(jax.tree.map(lambda a, i=i: a[i], params), x, *extra)
        return x

    wanted, vjp = jax.vjp(plain, params, x)
    gradients, dx = vjp(g)
    for y in outputs:
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    for got_sums, got_dx in backwards:
        np.testing.assert_allclose(got_dx, dx, rtol=1e-5, atol=1e-5)
        for got, gradient in zip(jax.tree.leaves(got_sums), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(got, 1 + gradient, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(got[count:], 1)  # unused rows have no gradient


def test_what_is_kept():
    placement, params = Placement(6, 2), {"in": normal(1, 3, WIDTH, 4), "out": normal(2, 3, 4, WIDTH), "bias": normal(3, 3, WIDTH)}
    layer = lambda params, x, extra: block(params, x, *extra)
    x, extra = normal(4, *SHAPE), EXTRA["documents"]
    stack = LayerStack(layer, Split(layer, jax.tree.map(lambda a: a[0], params), x, extra), placement, 0, 0)

    def kept(recompute):
        return [k.shape for k in jax.eval_shape(lambda x: stack.forward_with(params, x, extra, recompute)[1], x)]

    assert kept(True) == [(3, *SHAPE)]  # each layer's input
    assert (3, 2, 5, 4) in kept(False), "the hidden layer is kept as well, not computed again"
    assert not {(3, WIDTH, 4), (3, 4, WIDTH)} & set(kept(False)), "weights are not kept"
