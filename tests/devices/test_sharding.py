"""Logical axes → mesh axes: one table, collisions, and what may be named where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import AXES, MANUAL_AXES, make_mesh
from jaxtrain.devices.sharding import (
    RULES,
    constrain,
    cut_count,
    is_split,
    named,
    reshard,
    shards,
    spec,
)


def test_specs():
    assert spec(("stage", "layer", "width", "heads")) == P("stage", None, None, "model")
    assert spec(("batch", "sequence", None)) == P(("replica", "data", "expert"), "model", None)
    assert spec(()) == P()
    assert named(make_mesh((1, 2, 2, 1, 1, 2)), ("vocab", "width")).spec == P("model", None)


def test_cut_count():
    limits = {24: 1, 23: 2, 12: 2, 8: 3, 7: 4, 4: 6, 2: 12, 1: 12}  # tokens of a part: parts
    assert {limit: cut_count(2, 12, 1, limit) for limit in limits} == limits
    assert cut_count(1, 7, 1, 3) == 7  # 7 is a prime
    assert cut_count(64, 1, 1, 1) == 1  # a part has one position of every sequence at least
    assert cut_count(2, 16, 4, 1) == 4  # and one of every shard of the sequence


def test_every_rule_names_mesh_axes():
    assert {axis for rule in RULES.values() for axis in rule} <= set(AXES)


@pytest.mark.parametrize(
    ("axes", "both"),
    [
        (("heads", "mlp"), "'heads' and 'mlp'"),
        (("batch", "sequence", "vocab"), "'sequence' and 'vocab'"),
    ],
)
def test_collisions_are_an_error(axes, both):
    with pytest.raises(
        ValueError, match=rf"colliding axes in .*: {both} are both laid on mesh axis 'model'"
    ):
        spec(axes)


def test_an_axis_twice_collides_with_itself():
    with pytest.raises(ValueError, match="colliding"):
        spec(("batch", "batch"))


def test_unknown_names_are_an_error():
    with pytest.raises(KeyError, match="hedas"):
        spec(("width", "hedas"))


def test_on_one_device_nothing_is_constrained():
    x = jnp.ones((4, 8))
    assert constrain(x, ("batch", "heads")) is x
    assert shards("heads") == 1 and not is_split("heads")


def in_runtime(fn, mesh, *arrays):
    """fn as the runtime would call it: all axes manual but `model`."""
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            fn, in_specs=P(), out_specs=P(), axis_names=set(MANUAL_AXES), check_vma=False
        )
        return jax.jit(run).lower(*arrays).compile()


def test_shards():
    seen = []

    def look(x):
        seen.append((shards("heads"), shards("batch"), is_split("sequence"), is_split("width")))
        return x

    mesh = make_mesh((1, 2, 2, 1, 1, 2))
    with jax.set_mesh(mesh):
        jax.jit(look).lower(jnp.ones(4))
    in_runtime(look, mesh, jnp.ones(4))
    # Under jit the batch is the partitioner's as well, in the runtime it is not.
    assert seen == [(2, 2, True, False), (2, 1, True, False)]


def test_constrain_names_in_the_runtime_what_is_left_to_the_partitioner():
    """`batch` and `stage` are manual there, and naming them would be an error: they are left
    out."""
    mesh = make_mesh((1, 2, 2, 1, 1, 2))
    x = jnp.arange(4.0 * 8).reshape(4, 8)
    compiled = in_runtime(lambda x: constrain(x * 2, ("batch", "mlp")), mesh, x)
    # half of the columns on each device of `model`, and every row
    assert "f32[4,4]" in compiled.as_text()
    np.testing.assert_array_equal(compiled(x), x * 2)
    in_runtime(lambda x: constrain(x, ("stage", None)), make_mesh((1, 2, 4, 1, 1, 1)), x)


def test_constrain_under_jit_lays_out_everything():
    with jax.set_mesh(make_mesh((1, 2, 2, 1, 1, 2))):
        y = jax.jit(lambda x: constrain(x + 1, ("batch", "heads")))(jnp.ones((4, 8)))
    assert y.sharding.shard_shape(y.shape) == (2, 4)


def test_gradients_go_back_the_way_they_came():
    """A constraint's own gradient comes in the layout that it went to; reshard's in the one that it
    came from."""
    split, whole = ("batch", "sequence", None), ("batch", "token", None)
    x, g = jnp.ones((2, 8, 16)), jnp.arange(2.0 * 8 * 16).reshape(2, 8, 16)

    def backward(fn):
        return jax.jit(lambda g: jax.vjp(fn, constrain(x, split))[1](g)[0])(g)

    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, 4), jax.devices()[:4])):
        forward = jax.jit(lambda x: reshard(x, split, whole))(x)
        gathered, scattered = (
            backward(lambda x: constrain(x, whole)),
            backward(lambda x: reshard(x, split, whole)),
        )
    assert (
        forward.sharding.shard_shape(x.shape)
        == gathered.sharding.shard_shape(x.shape)
        == (2, 8, 16)
    )
    assert scattered.sharding.shard_shape(x.shape) == (2, 2, 16)
    np.testing.assert_array_equal(scattered, g)
