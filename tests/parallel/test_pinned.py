"""Values pinned over `model`: the same numbers, and no permute, whatever a function does along the
dimension that is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from support import small

from jaxtrain.devices.mesh import MANUAL_AXES, make_mesh
from jaxtrain.parallel.pinned import pinned

SHAPE = (2, 8, 16)  # [batch, tokens, columns], columns split


def depth_first(x):
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([second, jnp.tanh(first)], -1)


def along_tokens(x):
    return jnp.cumsum(x, 1)[:, ::-1] + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def loop(x):
    step = lambda h, token: (h + token, jnp.maximum(h, token))
    return jax.lax.scan(step, 0 * x[:, 0], x.swapaxes(0, 1))[1].swapaxes(0, 1)


def carried_along(x):
    step = lambda h, column: (h * 0.5 + column, h)
    columns = jnp.moveaxis(x, -1, 0)
    return jnp.moveaxis(jax.lax.scan(step, columns[0], columns)[1], 0, -1)


def barrier(x):
    """Of operands with other dimensions: each result has the layout of its own operand at most."""
    x, weights = jax.lax.optimization_barrier((x, jnp.arange(8.0)))
    return x * weights[None, :, None]


@jax.custom_vjp
def ruled(x):
    return jnp.roll(x, 1, -1)


ruled.defvjp(lambda x: (ruled(x), None), lambda _, g: (jnp.roll(g, -1, -1),))

# function → where its result is split over `model`, or None
FUNCTIONS = {
    "elementwise": (lambda x: jax.nn.silu(x) * 2 + jnp.where(x > 0, x, 0), 2),
    "along tokens": (along_tokens, 2),
    "heads": (lambda x: jnp.einsum("btnh,bsnh->btsn", *2 * [x.reshape(2, 8, 4, 4)]), 3),
    "merged": (lambda x: x.reshape(2, 128), None),
    "scores": (lambda x: jax.nn.softmax(x @ x.mT, -1), None),
    "columns": (depth_first, None),
    "roll": (lambda x: jnp.roll(x, 3, -1), None),
    "sum over columns": (lambda x: x.sum(-1, keepdims=True) + x, 2),
    "loop over tokens": (loop, 2),
    "loop over columns": (carried_along, None),
    "custom rule": (ruled, None),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(x) * x), 2),
    "barrier": (barrier, None),
    "sort": (lambda x: jnp.sort(x, 1), None),
    "gather": (lambda x: x[:, :, jnp.array([3, 1, 2])], None),
}
IN_DEFAULT = ("along tokens", "columns", "heads", "loop over columns", "custom rule")


@pytest.mark.parametrize("name", small.named(IN_DEFAULT, sorted({*FUNCTIONS} - {*IN_DEFAULT})))
def test_same_numbers_without_a_permute(name):
    run, dim = FUNCTIONS[name]
    mesh = make_mesh((1, 1, 1, 1, 1, 2), jax.devices()[:2])
    weighted = lambda x: (run(x) * jnp.cos(jnp.arange(run(x).size)).reshape(run(x).shape)).sum()
    x = small.normal(3, *SHAPE)

    def on_device(x):
        y, gradient = pinned(run, [2])(x), jax.grad(pinned(weighted, [2]))(x)
        return y, gradient

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            on_device, in_specs=P(), out_specs=P(), axis_names=set(MANUAL_AXES), check_vma=False
        )
        split = NamedSharding(mesh, P(None, None, "model"))
        compiled = jax.jit(mapped, in_shardings=split).lower(x).compile()
        y, gradient = compiled(jax.device_put(x, split))
    np.testing.assert_allclose(y, run(x), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, jax.grad(weighted)(x), rtol=2e-5, atol=2e-6)
    assert "collective-permute" not in compiled.as_text()
    spec = [*y.sharding.spec, *[None] * y.ndim][: y.ndim]
    assert spec == ["model" if i == dim else None for i in range(y.ndim)]


def test_outside_of_ops_a_function_is_as_it_is():
    run = FUNCTIONS["roll"][0]
    assert pinned(run, [2]) is run
