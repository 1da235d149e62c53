"""The layers of a unit: a loop whose length is the stage's own, against the same layers one after
the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small
from support.small import normal

from jaxtrain.runtime.layers.backward_split import LayerSplit, RecomputedLayer
from jaxtrain.runtime.layers.layer_loops import LayerRange
from jaxtrain.runtime.layers.layer_stack import LayerStack
from jaxtrain.runtime.state_plan import empty, pool_arrays
from jaxtrain.runtime.tick_state import Pools
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import TickSlots

WIDTH, SHAPE = 6, (2, 5, 6)


def block(params, x, positions, segments):
    """Uses all that it is given; `segments` may be missing."""
    x = x + jnp.sin(positions)[..., None] * (1 if segments is None else segments[..., None])
    return x + jnp.tanh(x @ params["in"]) @ params["out"] + params["bias"]


EXTRA = {
    "one document": (jnp.arange(5.0)[None], None),
    "documents": (normal(8, 2, 5), normal(9, 2, 5)),
}
CASES = {  # placement, chunk, stage, layers there
    "one layer": (Placement(4, 4), 0, 2, 1),
    "equal stages": (Placement(6, 2), 0, 1, 3),
    "the fuller stage": (Placement(7, 3), 0, 0, 3),
    "a stage with an unused row": (Placement(7, 3), 0, 1, 2),
    "an unused row in the second chunk": (Placement(7, 2, 2), 1, 1, 1),
}


def run(case: str, extra, recompute: bool):
    """What a unit's ops make on its stage; everything is computed twice, by the ops apart and at
    once."""
    placement, unit, stage, _ = CASES[case]
    rows = placement.stack_size(unit)
    params = {
        "in": normal(1, rows, WIDTH, 4),
        "out": normal(2, rows, 4, WIDTH),
        "bias": normal(3, rows, WIDTH),
    }
    x, g, sums = (
        normal(4, *SHAPE),
        normal(5, *SHAPE),
        jax.tree.map(lambda a: 1 + jnp.zeros_like(a), params),
    )
    layer = lambda params, x, extra: block(params, x, *extra)
    split = LayerSplit(layer, jax.tree.map(lambda a: a[0], params), x, extra)
    nan = lambda a: jnp.full_like(empty(a), jnp.nan)
    pool = lambda shapes: {"": [nan(a) for a in pool_arrays(3, rows, shapes)]}
    pools = Pools(
        residual_b=pool(split.residuals.for_b),
        residual_w=pool(split.residuals.for_w),
        weight_stash=pool(split.weight_stash),
    )
    slots = TickSlots(residual_b=2, residual_w=1, weight_stash=0)
    at_once = RecomputedLayer(layer, params, x) if recompute else split

    @jax.jit
    def ops(stage, params, x, g):
        stack = LayerStack([LayerRange(split)], placement, unit, stage)
        y, filled = stack.output_and_residuals(params, x, extra, pools, slots, "K")
        dx, filled = stack.input_gradient(params, extra, filled, slots, g)
        apart = stack.weight_gradient(params, sums, extra, filled, slots), dx
        both = LayerStack([LayerRange(at_once)], placement, unit, stage)
        whole, saved = both.output_saving(params, x, extra)
        return (stack.output(params, x, extra), y, whole), (
            apart,
            both.gradients(params, sums, extra, saved, g),
        )

    return params, x, g, ops(stage, params, x, g)


@pytest.mark.parametrize("extra", small.named(["documents"], ["one document"]))
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case, recompute, extra):
    count, extra = CASES[case][-1], EXTRA[extra]
    params, x, g, (outputs, backwards) = run(case, extra, recompute)

    def plain(params, x):
        for i in range(count):
            x = block(jax.tree.map(lambda a, i=i: a[i], params), x, *extra)
        return x

    def with_gradients(params, x, g):
        wanted, vjp = jax.vjp(plain, params, x)
        return wanted, *vjp(g)

    wanted, gradients, dx = jax.jit(with_gradients)(params, x, g)
    for y in outputs:
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    for got_sums, got_dx in backwards:
        np.testing.assert_allclose(got_dx, dx, rtol=1e-5, atol=1e-5)
        for got, gradient in zip(
            jax.tree.leaves(got_sums), jax.tree.leaves(gradients), strict=True
        ):
            np.testing.assert_allclose(got, 1 + gradient, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(got[count:], 1)  # unused rows have no gradient


def test_what_is_kept():
    placement, params = (
        Placement(6, 2),
        {"in": normal(1, 3, WIDTH, 4), "out": normal(2, 3, 4, WIDTH), "bias": normal(3, 3, WIDTH)},
    )
    layer = lambda params, x, extra: block(params, x, *extra)
    x, extra = normal(4, *SHAPE), EXTRA["documents"]
    split = LayerSplit(layer, jax.tree.map(lambda a: a[0], params), x, extra)

    def saved(split):
        stack = LayerStack([LayerRange(split)], placement, 0, 0)
        of_pools = jax.eval_shape(lambda x: stack.output_saving(params, x, extra)[1], x)
        return of_pools["residual_b", ""]

    assert saved(RecomputedLayer(layer, params, x)).shape == (3, *SHAPE)  # each layer's input
    residuals = saved(split)
    shapes = {a.shape for a in jax.tree.leaves(residuals)}
    assert (3, 2, 5, 4) in shapes, "the hidden layer is kept as well, not computed again"
    assert not {(3, WIDTH, 4), (3, 4, WIDTH)} & shapes, "weights are not kept"
