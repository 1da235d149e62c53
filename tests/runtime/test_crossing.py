"""Plans of what crosses between a layer's ops, from equations alone."""

import jax
import jax.numpy as jnp

from jaxtrain.runtime.layers.backward_split import keep_everything, keep_products
from jaxtrain.runtime.layers.crossing import (
    Fate,
    FlatLayer,
    plan_crossing,
    saved_values,
    weight_fates,
)
from jaxtrain.runtime.layers.equations import CHEAP

SHAPE = (4, 8)


def flat(layer, *shapes) -> FlatLayer:
    """layer(params, x) with its vjp, for a list of parameters of these shapes."""

    def ops(*args):
        y, vjp = jax.vjp(layer, list(args[:-2]), args[-2])
        dp, dx = vjp(args[-1])
        return y, dx, *dp

    args = [jnp.zeros(shape) for shape in (*shapes, SHAPE, SHAPE)]
    # The layers below call no jitted function, so the trace is as flat as `inline` makes it.
    jaxpr = jax.make_jaxpr(ops)(*args).jaxpr
    *params, x, g = jaxpr.invars
    y, dx, *dp = jaxpr.outvars
    return FlatLayer(jaxpr.eqns, {}, params, [], x, g, y, dx, dp)


def names(layer: FlatLayer, values) -> list[str]:
    """For each value the primitive that makes it, or its own name."""
    inputs = {layer.x: "x", layer.g: "g"}
    return [inputs.get(a) or layer.maker[a].primitive.name for a in values]


def mlp(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]


def test_the_example_of_the_module():
    layer = flat(mlp, (8, 16), (16, 8))
    saved = saved_values(layer, keep_everything, CHEAP)
    assert names(layer, saved) == ["x", "tanh"]
    fates = weight_fates(layer, saved, CHEAP)
    of = lambda fate: [value for value, other in fates.items() if other is fate]
    assert set(names(layer, of(Fate.SAVED))) == {"x", "tanh"}
    g, da = sorted(of(Fate.STASHED), key=layer.position)
    assert g is layer.g and da.aval.shape == (4, 16)
    made = {a for e in layer.needed([layer.dx], saved) for a in e.outvars}
    assert da in made  # B computes it in any case
    assert "dot_general" in names(layer, of(Fate.COMPUTED)) and not of(Fate.MISSING)


def test_a_plan_by_the_last_reader():
    """W multiplies with x and tanh."""
    layer = flat(mlp, (8, 16), (16, 8))
    crossing = plan_crossing(layer, keep_everything, CHEAP)
    assert not crossing.for_b and names(layer, crossing.for_w) == ["x", "tanh"]
    # With selective recomputation B computes tanh once more, and leaves it for W.
    crossing = plan_crossing(layer, keep_products, CHEAP)
    assert names(layer, crossing.for_b) == ["dot_general"]
    assert names(layer, crossing.for_w) == ["x"]
    assert "tanh" in names(layer, crossing.stashed)


def test_a_sum_of_saved_values_is_not_saved():
    """The residual stream is read by the second product, and remade from its two terms."""

    def block(params, x):
        middle = x + jnp.tanh(x @ params[0])
        return middle + jnp.tanh(middle @ params[1])

    layer = flat(block, (8, 8), (8, 8))
    assert "add" not in names(layer, saved_values(layer, keep_everything, CHEAP))
    fates = weight_fates(layer, saved_values(layer, keep_everything, CHEAP), CHEAP)
    remade = [a for a, fate in fates.items() if fate is Fate.REMADE]
    assert "add" in names(layer, remade)


def test_results_of_one_equation_cross_in_its_order():
    """Attention's output and its log-sum-exp come from one equation. Ordered by equation alone they
    would lie in a set's order, which differs between processes: devices would run two programs."""

    def layer_of(params, x):
        best, chosen = jax.lax.top_k(x @ params[0], 8)
        return best * best + jnp.take(params[1], chosen)

    layer = flat(layer_of, (8, 8), (8,))
    (top_k,) = (e for e in layer.equations if e.primitive.name == "top_k")
    assert layer.position(top_k.outvars[0]) + 1 == layer.position(top_k.outvars[1])
    saved = plan_crossing(layer, keep_everything, CHEAP).saved
    assert [a for a in saved if a in top_k.outvars] == top_k.outvars


def test_what_depends_on_parameters_alone_never_crosses():
    def layer_of(params, x):
        return x * jnp.exp(params[0]) @ params[1]

    layer = flat(layer_of, (8,), (8, 8))
    crossing = plan_crossing(layer, keep_everything, CHEAP)
    assert not {*crossing.saved, *crossing.stashed} & layer.free
    assert any(layer.maker[a].primitive.name == "exp" for a in layer.free if a in layer.maker)
