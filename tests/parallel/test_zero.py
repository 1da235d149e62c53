"""ZeRO: which dimension is shared out, and that a reduction leaves every device its part of the sum
over all."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxtrain.devices.mesh import AXES, MANUAL_AXES, MODEL, SUM_AXES, make_mesh
from jaxtrain.parallel.zero import ParameterArray, reduce, reduction_of

LAYER = ("stage", "layer", "width", "heads")
TABLE = ("vocab", "width")


def test_a_layer_is_shared_out_over_data():
    mesh = make_mesh((1, 2, 2, 1, 1, 2))
    how = reduction_of(ParameterArray(LAYER, (2, 3, 8, 16), 2), mesh, zero=1)
    assert (how.scatter_axes, how.dim, how.sum_axes) == (
        ("data",),
        0,
        ("replica", "expert", "context"),
    )
    assert how.storage == P("stage", None, "data", "model") and how.unsharded == P(
        "stage", None, None, "model"
    )


def test_embedding_and_head_are_shared_out_over_stages_too():
    mesh = make_mesh((1, 2, 2, 1, 1, 2))
    how = reduction_of(ParameterArray(TABLE, (62, 8), 0), mesh, zero=1)
    assert (how.scatter_axes, how.dim, how.sum_axes) == (
        ("data", "stage"),
        1,
        ("replica", "expert", "context"),
    )
    assert how.storage == P("model", ("data", "stage"))
    # 4 does not divide the width: over data alone, and summed over stages.
    how = reduction_of(ParameterArray(TABLE, (62, 6), 0), mesh, zero=1)
    assert (how.scatter_axes, how.dim, how.sum_axes) == (
        ("data",),
        1,
        ("replica", "expert", "context", "stage"),
    )
    # Neither does data: over stages alone, and summed over data.
    how = reduction_of(
        ParameterArray(TABLE, (62, 8), 0), make_mesh((1, 3, 2, 1, 1, 1), jax.devices()[:6]), zero=3
    )
    assert (how.scatter_axes, how.dim, how.sum_axes) == (
        ("stage",),
        1,
        ("replica", "data", "expert", "context"),
    )
    assert how.storage == P("model", "stage") and how.sharded == how.unsharded == P("model", None)


def test_what_stays_whole():
    mesh = make_mesh((1, 4, 2, 1, 1, 1))
    for axes, shape, own, zero in (
        # no dimension of its own divides; layers are not shared out
        (("stage", "layer", "width"), (2, 4, 6), 2, 1),
        (LAYER, (2, 3, 8, 16), 2, 0),
    ):
        how = reduction_of(ParameterArray(axes, shape, own), mesh, zero)
        assert how.scatter_axes == () and how.storage == how.unsharded
        assert how.sum_axes == SUM_AXES
    # replicas keep all
    assert (
        reduction_of(
            ParameterArray(LAYER, (1, 3, 8, 16), 2), make_mesh((8, 1, 1, 1, 1, 1)), 1
        ).scatter_axes
        == ()
    )


CASES = {
    "scattered over data": ((1, 2, 2, 1, 1, 2), LAYER, (2, 3, 8, 16), 2, 1),
    "behind a split dimension": (
        (1, 2, 2, 1, 1, 2),
        ("stage", "layer", "heads", "width"),
        (2, 1, 6, 4),
        2,
        1,
    ),
    "scattered over stages and data": ((1, 2, 2, 1, 1, 2), TABLE, (62, 8), 0, 1),
    "over data, summed over stages": ((1, 2, 2, 1, 1, 2), TABLE, (62, 6), 0, 1),
    "over stages, summed over data": ((1, 3, 2, 1, 1, 1), TABLE, (62, 8), 0, 1),
    "over 3 of data": ((1, 3, 2, 1, 1, 1), LAYER, (2, 1, 9, 4), 2, 1),
    "replicas": ((2, 2, 2, 1, 1, 1), LAYER, (2, 1, 4, 4), 2, 1),
    "not divisible": ((1, 4, 2, 1, 1, 1), ("stage", "layer", "width"), (2, 4, 6), 2, 1),
    "nothing shared out": ((1, 2, 2, 1, 1, 2), LAYER, (2, 3, 8, 16), 2, 0),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_reduction(case, dtype):
    sizes, axes, shape, own, zero = CASES[case]
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes)])
    how = reduction_of(ParameterArray(axes, shape, own), mesh, zero)
    # Each device has a gradient of its own: small integers, which bfloat16 adds exactly.
    own_axes = [a for a in AXES if a != MODEL]
    lead = [mesh.shape[a] for a in own_axes]
    staged = axes[0] == "stage"
    local = (1, *shape[1:]) if staged else shape
    gradients = np.random.default_rng(0).integers(-8, 8, (*lead, *local)).astype(np.float32)

    def body(g):
        return reduce(g.reshape(local), how, jnp.dtype(dtype))

    names = [
        tuple(n for n in ((part,) if isinstance(part, str) else part or ()) if n != MODEL) or None
        for part in how.storage
    ]
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            body,
            in_specs=P(*own_axes),
            out_specs=P(*names),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        got = jax.jit(run, out_shardings=NamedSharding(mesh, how.storage))(gradients)
    over = tuple(i for i, a in enumerate(own_axes) if not (staged and a == "stage"))
    wanted = gradients.sum(over)
    np.testing.assert_array_equal(got, wanted.reshape(shape) if staged else wanted)
    assert got.dtype == jnp.float32


@pytest.mark.parametrize("counts, expected", [(False, 4096), (True, 4104)])
def test_counts_are_not_rounded(counts, expected):
    mesh = make_mesh((1, 8, 1, 1, 1, 1))
    how = reduction_of(ParameterArray((None,), (16,), counts=counts), mesh, 1)
    with jax.set_mesh(mesh):
        body = lambda g: reduce(g, how, jnp.dtype("bfloat16"))
        run = jax.shard_map(
            body, in_specs=P(), out_specs=how.storage, axis_names=set(MANUAL_AXES), check_vma=False
        )
        np.testing.assert_array_equal(jax.jit(run)(jnp.full(16, 513.0)), expected)
