"""The embedding split by rows over `model`, against plain indexing: on its own, and inside the
runtime's manual region."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import BATCH_AXES, MANUAL_AXES, make_mesh, psum
from jaxtrain.devices.sharding import constrain, named
from jaxtrain.hlo.program import Program
from jaxtrain.parallel.vocabulary import add_lookup_gradient, lookup

ROWS, WIDTH, BATCH, LENGTH = 64, 6, 4, 8
random = np.random.default_rng(0)
TABLE = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
TOKENS = random.integers(0, ROWS, (BATCH, LENGTH), np.int32)
TOKENS[0, :4] = 0, ROWS - 1, ROWS // 2, ROWS // 2 - 1  # the ends of parts; and 0 again, elsewhere
TOKENS[1, 0] = 0
GRADIENT = random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)

MESHES = [(1, 1, 1, 1, 1, 2), (1, 1, 1, 1, 1, 4), (1, 2, 1, 1, 1, 2), (1, 2, 2, 1, 1, 2)]


def run(fn, sizes, *arrays, manual: bool):
    """fn(table-like, batch-like…) → batch-like or table-like, under jit on a mesh, or in a region
    that is manual but for `model`."""
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(sizes))])
    rows = P(BATCH_AXES)
    with jax.set_mesh(mesh):
        if manual:
            out = rows if fn is lookup else P()
            fn = jax.shard_map(
                fn if fn is lookup else lambda *a: psum(add_lookup_gradient(*a), BATCH_AXES),
                in_specs=(P(), *(rows for _ in arrays[1:])),
                out_specs=out,
                axis_names=set(MANUAL_AXES),
                check_vma=False,
            )
        table = jax.device_put(arrays[0], named(mesh, ("vocab", "width")))
        compiled = jax.jit(fn).lower(table, *arrays[1:]).compile()
        return compiled(table, *arrays[1:]), Program(compiled.as_text())


@pytest.mark.parametrize("manual", [False, True], ids=["jit", "runtime"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_lookup(sizes, manual):
    got, program = run(lookup, sizes, TABLE, TOKENS, manual=manual)
    np.testing.assert_array_equal(got, TABLE[TOKENS])
    assert got.sharding.shard_shape(got.shape)[1] == LENGTH // sizes[-1], (
        "the sequence leaves split"
    )
    gathered = [
        i
        for i in program.below(program.entry)
        if i.collective == "all-gather" and max(i.sizes) >= TABLE.size
    ]
    assert not gathered, "the table was gathered"


@pytest.mark.parametrize("manual", [False, True], ids=["jit", "runtime"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gradient_is_added_to_what_is_there(sizes, manual):
    start = np.zeros_like(TABLE) if manual else TABLE  # the region's sum is over all devices
    got, _ = run(add_lookup_gradient, sizes, start, TOKENS, GRADIENT, manual=manual)
    wanted = start.copy()
    np.add.at(wanted, TOKENS, GRADIENT)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_gradient_of_lookup_itself():
    mesh = make_mesh((1, 1, 1, 1, 1, 4), jax.devices()[:4])
    wanted = jax.grad(lambda t: (t[TOKENS] * GRADIENT).sum())(TABLE)
    with jax.set_mesh(mesh):
        got = jax.jit(
            jax.grad(
                lambda t: (constrain(lookup(t, TOKENS), ("batch", "token", None)) * GRADIENT).sum()
            )
        )(TABLE)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_bfloat16_rows():
    """On CPU too, whose compiler aborts on a 16-bit sum over devices."""
    got, _ = run(lookup, (1, 1, 2, 1, 1, 2), TABLE.astype(jnp.bfloat16), TOKENS, manual=True)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, TABLE.astype(jnp.bfloat16)[TOKENS])


def test_a_bfloat16_gradient_is_added_in_float32():
    rounded = GRADIENT.astype(jnp.bfloat16)
    got, _ = run(add_lookup_gradient, (1, 1, 1, 1, 1, 4), TABLE, TOKENS, rounded, manual=False)
    wanted = TABLE.copy()
    np.add.at(wanted, TOKENS, rounded.astype(np.float32))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_one_device():
    assert lookup(jnp.asarray(TABLE), TOKENS).shape == (BATCH, LENGTH, WIDTH)
    total = functools.reduce(
        lambda a, _: add_lookup_gradient(a, TOKENS, GRADIENT), range(2), jnp.zeros_like(TABLE)
    )
    np.testing.assert_allclose(total.sum(), 2 * GRADIENT.sum(), rtol=1e-4)
