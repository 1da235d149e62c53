"""The first state: the same weights on every layout, bit for bit, each device making only its own;
and where everything lies."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import small

from jaxtrain.planner.programs.program import Program
from jaxtrain.training.initial_values import initial_values, random_keys
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.state import (
    abstract_state,
    bytes_per_device,
    initial_state,
    stored_shapes,
)
from jaxtrain.training.step import make_step

GPT2 = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.biases": ("qkv", "out", "mlp", "norm"),
}
LAYOUTS = {
    "8x1x1": ((8, 1, 1), "1f1b", 1),
    "2x2x2": ((2, 2, 2), "interleaved", 2),
    "1x4x2": ((1, 4, 2), "gpipe", 1),
    "1x3x2": ((1, 3, 2), "1f1b", 1),
    "1x5x1": ((1, 5, 1), "zb_h1", 1),
}
LONG = ("2x2x2", "1x3x2")


def step_of(mesh=(1, 1, 1), schedule="1f1b", repeats=1, **changes):
    names = {"model.layers": 5, "data.batch_size": 32, "model.init_std": 0.1} | {
        k.replace("__", "."): v for k, v in changes.items()
    }
    cfg = small.config(mesh, schedule, repeats, 4, names)
    return make_step(cfg, small.mesh_of(cfg))


@functools.cache
def initial(name: str, seed: int = 0):
    step = step_of(*LAYOUTS.get(name, ()))
    return step, initial_state(step.layout, step.optimizer, seed)


@functools.cache
def plain_initial(name: str = "one", seed: int = 0) -> dict:
    step, state = initial(name, seed)
    return small.to_plain(step.layout, state.params)  # which fails where padding is not zero


@pytest.mark.parametrize("name", small.named([name for name in LAYOUTS if name not in LONG], LONG))
def test_same_weights_on_every_layout(name):
    jax.tree.map(np.testing.assert_array_equal, plain_initial(name), plain_initial())


def test_weights_are_what_they_should_be():
    layout, params = initial("one")[0].layout, plain_initial()
    specs = {
        "embed": layout.parts.specs["embed"],
        "layers": layout.parts.specs["layer"],
        "head": layout.parts.specs["head"],
    }
    seen = []
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        if spec.std is None:
            assert (array == spec.constant).all()
        else:
            # five standard errors
            assert abs(array.std() / spec.std - 1) < 5 / math.sqrt(2 * array.size)
            assert abs(array.mean()) < 5 * spec.std / math.sqrt(array.size)
            seen += [a[0, :4] / spec.std for a in (array if array.ndim == 3 else array[None])]
    assert len(np.unique(np.round(np.concatenate(seen), 4))) == 4 * len(seen), (
        "two parameters, or two layers, begin alike"
    )


def test_weights_depend_on_the_seed():
    other = plain_initial("one", 1)
    assert not (other["embed"]["table"] == plain_initial()["embed"]["table"]).any()


def test_padding_of_the_vocabulary_and_unused_rows_are_zero():
    step, state = initial("1x4x2")
    assert state.params["head"]["table"].shape == (64, 32)  # 61 rows over 4 stages × 2
    # 2 + 1 + 1 + 1 layers
    assert state.params["layers"]["0"]["mlp"]["up"]["weight"].shape == (4, 2, 32, 64)
    np.testing.assert_array_equal(state.params["layers"]["0"]["mlp_norm"]["scale"][1:, 1], 0)
    assert step.layout.parts.parameter_count == sum(
        a.size for a in jax.tree.leaves(plain_initial())
    )


@pytest.mark.parametrize("name", small.named([name for name in LAYOUTS if name not in LONG], LONG))
def test_the_state_lies_where_it_is_said_to(name):
    step, state = initial(name)
    described = abstract_state(step.layout, step.optimizer)
    assert jax.tree.structure(state) == jax.tree.structure(described)
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(described), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)
    assert int(state.step) == 0 and not any(
        a.any() for a in jax.tree.leaves(optax.tree_utils.tree_get(state.optimizer, "nu"))
    )


def test_optimizer_state_is_shared_out_over_data():
    moments = lambda zero: optax.tree_utils.tree_get(
        step_of((8, 1, 1), parallel__zero=zero).abstract_state().optimizer, "mu"
    )
    whole, shared = bytes_per_device(moments(0)), bytes_per_device(moments(1))
    assert whole == 4 * initial("one")[0].layout.parts.parameter_count
    assert shared == whole / 8  # every dimension of this model divides
    parameters = bytes_per_device(step_of((8, 1, 1)).abstract_state().params)
    assert parameters == whole


def test_embedding_and_head_are_shared_out_over_stages_as_well():
    """Their optimizer state always, the tables where the stages share the vocabulary, whose 61 rows
    are padded for 4 of them."""
    for where, rows, shards in (("parallel", 64, 4), ("end_stages", 61, 1)):
        state = step_of((2, 4, 1), pipeline__vocabulary=where).abstract_state()
        mu = optax.tree_utils.tree_get(state.optimizer, "mu")
        assert bytes_per_device(mu["embed"]) == rows * 32 * 4 / 8
        assert bytes_per_device(state.params["embed"]) == rows * 32 * 4 / shards


def test_stored_shapes_have_no_padding_and_no_layout():
    step = step_of((1, 4, 2))
    shapes = stored_shapes(step.layout, step.optimizer)
    described = step.abstract_state()
    assert jax.tree.structure(shapes) == jax.tree.structure(described)
    assert shapes.params["embed"]["table"].shape == (61, 32)
    assert shapes.params["layers"]["0"]["mlp"]["up"]["weight"].shape == (32, 64)
    assert optax.tree_utils.tree_get(shapes.optimizer, "nu")["head"]["table"].shape == (61, 32)
    assert shapes.step.shape == ()


def test_each_device_makes_its_own_shards():
    """Nothing in the program is larger than a group of equal parameters on one device."""
    step = step_of(
        (2, 2, 2),
        "interleaved",
        2,
        model__vocab_size=4096,
        model__width=64,
        model__heads=8,
        model__mlp_width=512,
    )
    layout: ParameterLayout = step.layout
    shards = [
        math.prod(s.shard_shape(a.shape))
        for s, a in zip(
            jax.tree.leaves(layout.shardings), jax.tree.leaves(layout.shapes), strict=True
        )
    ]
    whole = max(a.size for a in jax.tree.leaves(layout.shapes))
    assert max(shards) == whole // 4, "tables lie over stage and model, layers' matrices over model"
    with jax.set_mesh(layout.mesh):
        make = jax.jit(functools.partial(initial_values, layout), out_shardings=layout.shardings)
        program = Program(make.lower(random_keys(layout, 0)).compile().as_text())
    largest = max(size for i in program.below(program.entry) for size in i.sizes)
    assert largest <= 2 * max(shards), "embedding and head have one shape, and are drawn together"
    assert [i for i in program.below(program.entry) if i.collective] == []


@pytest.mark.parametrize("masters", ["float32", "none"])
def test_16_bit_parameters_begin_as_the_nearest_to_those_of_32(masters):
    """Matrices; what no product of the compute type reads is float32."""
    step = step_of((2, 1, 1), precision__params="bfloat16", precision__masters=masters)
    state = initial_state(step.layout, step.optimizer, 0)
    read = small.to_plain(step.layout, state.read)
    for path, expected in jax.tree_util.tree_leaves_with_path(plain_initial()):
        value = dict(jax.tree_util.tree_leaves_with_path(read))[path]
        is_matrix = value.ndim - (path[0].key == "layers") > 1
        assert value.dtype == (jnp.bfloat16 if is_matrix else np.float32), path
        np.testing.assert_array_equal(value, expected.astype(value.dtype))
    held = small.to_plain(step.layout, state.params)
    if masters == "float32":
        jax.tree.map(np.testing.assert_array_equal, held, plain_initial())
    else:
        jax.tree.map(np.testing.assert_array_equal, held, read)
