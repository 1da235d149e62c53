"""Logical axes → mesh axes: the table, its errors, and what a constraint means where the trace stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain import sharding
from jaxtrain.mesh import BATCH_AXES, MANUAL_AXES, make_mesh


def mesh_222():
    return make_mesh((1, 2, 2, 1, 1, 2))


def test_spec_follows_the_table():
    assert sharding.spec(("stage", "layer", "width", "heads")) == P("stage", None, None, "model")
    assert sharding.spec(("batch", "sequence", None)) == P(BATCH_AXES, "model", None)


def test_colliding_axes_are_an_error():
    with pytest.raises(ValueError, match="colliding axes.*'heads' and 'mlp'.*'model'"):
        sharding.spec(("heads", "mlp"))
    with pytest.raises(ValueError, match="colliding"):
        sharding.spec(("batch", "sequence", "heads"))


def test_unknown_axis_is_an_error():
    with pytest.raises(KeyError, match="hedas"):
        sharding.spec(("hedas",))


def test_every_rule_names_mesh_axes():
    from jaxtrain.mesh import AXES

    assert {axis for rule in sharding.RULES.values() for axis in rule} <= set(AXES)


def test_constrain_is_the_identity_without_a_mesh():
    x = jnp.ones((4, 4, 4))
    assert sharding.constrain(x, ("batch", "sequence", None)) is x
    assert sharding.shards("sequence") == 1 and not sharding.is_split("heads")


def test_constrain_lays_out_over_all_axes_outside_the_runtime():
    with jax.set_mesh(mesh_222()):
        out = jax.jit(lambda x: sharding.constrain(x, ("batch", "sequence", None)))(jnp.ones((4, 4, 4)))
        assert out.sharding.shard_shape(out.shape) == (2, 2, 4)


def test_constrain_names_the_partitioners_axes_alone_inside_the_runtime():
    seen = []

    def body(x):
        seen.append((sharding.shards("sequence"), sharding.shards("batch")))
        return sharding.constrain(x, ("batch", "sequence", None))

    mesh = mesh_222()
    with jax.set_mesh(mesh):
        run = jax.shard_map(body, mesh=mesh, in_specs=P(BATCH_AXES), out_specs=P(BATCH_AXES), axis_names=set(MANUAL_AXES), check_vma=False)
        out = jax.jit(run)(np.arange(64.0).reshape(4, 4, 4))
    assert seen[0] == (2, 1)
    np.testing.assert_array_equal(out, np.arange(64.0).reshape(4, 4, 4))


def test_reshard_moves_the_gradient_back():
    split, whole = ("batch", "sequence", None), ("batch", "token", None)
    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, 8))):

        def loss(x):
            return jnp.sum(sharding.reshard(x, split, whole) ** 2)

        x = np.arange(32.0, dtype=np.float32).reshape(1, 8, 4)
        gradient = jax.jit(jax.grad(loss))(x)
        assert gradient.sharding.shard_shape(gradient.shape) == (1, 1, 4)
    np.testing.assert_array_equal(gradient, 2 * x)
