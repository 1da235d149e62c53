"""Pools begin without values, and so do the rows that experts get: nothing of them is read before
it is written, not even to be masked by a product."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.config import kernels, sizes
from jaxtrain.devices import host_memory
from jaxtrain.devices.mesh import partitioned
from jaxtrain.parallel.experts import expert_messages, filled_rows, products
from jaxtrain.runtime.layers import layer_loops
from jaxtrain.training.step import make_step

SEVEN = {"model.layers": 7}
EXPERTS = {"model.experts": 4, "model.expert_width": 16, "mesh.expert": 2}
LAST = {"parallel.zero": 1, "parallel.reduce": "last"}


def without_layers(zero: dict) -> Case:
    """Dense layers and a module of prediction leave the first stage's last chunk without layers."""
    changes = {"model.layers": 6, "model.dense_layers": 1, "model.mtp_depth": 1}
    changes |= EXPERTS | {"mesh.expert": 1, "pipeline.remat": "none"} | zero
    return Case((2, 2, 1), "zb_v", 2, 3, changes)


def no_layers(changes: dict) -> Case:
    """The first stage has a unit more than the second, its last one, which has no layer."""
    chunks = {"model.layers": 5, "pipeline.chunk_layers": (3, 1, 1, 0), "pipeline.layers_per_op": 1}
    return Case((2, 2, 1), "zb_v", 2, 5, EXPERTS | {"mesh.expert": 1} | chunks | changes)


CASES = {
    "interleaved": Case((1, 2, 2), "interleaved", 2, 4, SEVEN),
    "inputs of layers": Case((1, 3, 1), "gpipe", 2, 5, SEVEN | {"pipeline.save": ("layer_input",)}),
    "ends on two stages": Case(
        (2, 2, 1), "zb_h1", 1, 4, SEVEN | {"pipeline.vocabulary": "end_stages"}
    ),
    "k of n": Case((1, 2, 1), "zb_v", 2, 4, SEVEN | {"pipeline.remat": "full:1"}),
    "overlapped, experts": Case(
        (1, 2, 1), "dualpipe_v", 2, 5, EXPERTS | {"pipeline.overlap": True}
    ),
    "one stage": Case((2, 1, 2), changes=SEVEN | {"pipeline.remat": "selective"}),
    "a chunk without layers, ZeRO-3": without_layers({"parallel.zero": 3}),
    "a unit without layers on any stage": no_layers({"parallel.zero": 3}),
    "a unit without layers on any stage, overlapped": no_layers(
        {"pipeline.schedule": "dualpipe_v", "pipeline.overlap": True}
    ),
}
# A layer's gradients are reduced beside the products of the next one, as on GPUs.
ON_GPUS = {
    "one layer on a stage, two on another": Case(
        (2, 2, 1), "1f1b", 1, 3, {"model.layers": 3, **LAST, "parallel.zero": 3}
    ),
    "a chunk without layers, ZeRO-3, on GPUs": without_layers({"parallel.zero": 3}),
    "a chunk without layers, reduced in the last W": without_layers(LAST),
}
ALWAYS = ["interleaved", "one layer on a stage, two on another"]


@pytest.mark.parametrize(
    "name", small.named(ALWAYS, [n for n in (*CASES, *ON_GPUS) if n not in ALWAYS])
)
def test_gradients(monkeypatch, name):
    made = []

    def wrong(shape, dtype, on_host):
        made.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    config = (CASES | ON_GPUS)[name].config(small.PLAIN_LAYER)
    expected = reference(config, 1)
    monkeypatch.setattr(layer_loops, "on_nvidia_gpu", lambda: name in ON_GPUS)
    monkeypatch.setattr(host_memory, "empty_pool", wrong)
    assert_same(gradients(config), expected)
    assert made


@pytest.mark.parametrize("name", small.named(["one stage"], ["interleaved", "overlapped, experts"]))
def test_the_partitioner_gets_values(monkeypatch, name):
    """It has no rule for an array without values: each device would allocate the whole."""
    empty, make, split, made = lax.empty, host_memory.empty_pool, [], []

    def noted(shape, dtype):
        split.append(partitioned())
        return empty(shape, dtype)

    case = CASES[name]
    config = dataclasses.replace(case, mesh=(*case.mesh[:2], 2)).config()
    monkeypatch.setattr(lax, "empty", noted)
    monkeypatch.setattr(host_memory, "empty_pool", lambda *a: made.append(a) or make(*a))
    step = make_step(config, small.mesh_of(config))
    with jax.set_mesh(step.mesh):
        step.gradients.trace(step.abstract_state().params, step.abstract_batch)
    assert made and not any(split)


@pytest.mark.parametrize("on_tpu", [True, False])
def test_libtpu_partitions_arrays_without_values(monkeypatch, on_tpu):
    """On TPUs pools over `model` are not filled either."""
    monkeypatch.setattr(host_memory, "partitioned", lambda: True)
    monkeypatch.setattr(host_memory, "on_tpu", lambda: on_tpu, raising=False)
    made = jax.make_jaxpr(lambda: host_memory.empty_pool((2, 3), jnp.float32, False))()
    assert [each.primitive.name for each in made.eqns] == [
        "empty" if on_tpu else "broadcast_in_dim"
    ]


EIGHT = {"model.experts": 8, "model.expert_width": 16}
ROWS = {
    "several on a device": Case((1, 1, 2), changes=EIGHT | {"mesh.expert": 4}),
    "one on a device": Case(
        (2, 1, 1), changes=EIGHT | {"model.experts": 4, "mesh.expert": 4, "model.shared_experts": 1}
    ),
    "little room": Case(
        (1, 2, 2), "zb_h1", 1, 3, EIGHT | {"mesh.expert": 2, "model.expert_room": 1.25}
    ),
    "two steps": Case(
        (2, 1, 1), changes=EIGHT | {"mesh.expert": 4, "parallel.expert_nodes": 2, "model.layers": 2}
    ),
    "two steps, little room": Case(
        (1, 1, 2),
        changes=EIGHT
        | {"mesh.expert": 4, "parallel.expert_nodes": 2, "model.expert_room": 1.0}
        | {"model.experts_per_token": 3},
    ),
}


@pytest.mark.parametrize("kernel", ["blocks", "megablox"])
@pytest.mark.parametrize(
    "name",
    small.named(
        ["several on a device"],
        ["one on a device", "little room", "two steps", "two steps, little room"],
    ),
)
def test_rows_of_experts(monkeypatch, name, kernel):
    """Rows that no device sends are not numbers, for XLA's products and for the kernel of TPUs; but
    for the numbers of choices, which are zeros."""
    config, ragged, unfilled = ROWS[name].config(), expert_messages.ragged_all_to_all, []
    expected = reference(config, 1) if not config.model.expert_room else gradients(config)

    def wrong(rows, rows_from_to, room, most, fills_empty, group):
        out = ragged(rows, rows_from_to, room, most, fills_empty, group)
        if rows.dtype == jnp.int32:
            return out
        unfilled.append(not fills_empty)
        arrived = rows_from_to[:, group.me].sum()
        empty = (jnp.arange(room) >= arrived).reshape(-1, *[1] * (out.ndim - 1))
        return jnp.where(empty, jnp.nan, out)

    if kernel == "megablox":
        forms = products.KERNELS[kernels.MEGABLOX]
        interpreted = products.Products(*(functools.partial(f, interpret=True) for f in forms))
        for form in products.KERNELS:
            monkeypatch.setitem(products.KERNELS, form, interpreted)
    monkeypatch.setattr(expert_messages, "ragged_all_to_all", wrong)
    assert_same(gradients(config), expected)
    assert unfilled and all(unfilled)


SOME = EIGHT | {"mesh.expert": 2, "model.expert_room": 1.9}
FILLED = {
    "nothing recomputed": Case((1, 2, 1), "1f1b", 1, 3, SOME | {"pipeline.remat": "none"}),
    "products saved, weights' gradients apart": Case(
        (1, 2, 1), "zb_h1", 1, 3, SOME | {"pipeline.remat": "selective"}
    ),
    "all recomputed, model 2, gelu": Case(
        (1, 2, 2), "zb_h1", 1, 3, SOME | {"model.activation": "gelu", "pipeline.remat": "full"}
    ),
    "layers' inputs, all can arrive, several on a device": Case(
        (1, 2, 1),
        "interleaved",
        2,
        4,
        EIGHT | {"mesh.expert": 4, "pipeline.save": ("layer_input",)},
    ),
    "overlapped": Case(
        (1, 2, 1),
        "dualpipe_v",
        2,
        5,
        SOME | {"pipeline.overlap": True, "pipeline.remat": "none"},
    ),
    "overlapped, layers' inputs": Case(
        (1, 2, 1),
        "interleaved",
        2,
        4,
        SOME | {"pipeline.overlap": True, "pipeline.save": ("layer_input",)},
    ),
    "two steps, shared experts": Case(
        (1, 1, 1),
        changes=EIGHT
        | {"mesh.expert": 4, "parallel.expert_nodes": 2, "model.experts_per_token": 3}
        | {"model.expert_room": 1.9, "model.shared_experts": 1},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FILLED)
def test_elementwise_work_on_filled_rows(monkeypatch, name):
    """Rows that nothing has written are not numbers."""
    config, work = FILLED[name].config(), []
    expected = reference(config, 1) if not config.model.expert_room else gradients(config)
    by_blocks = filled_rows._by_blocks

    def counted(*arguments):
        work.append(arguments)
        return by_blocks(*arguments)

    monkeypatch.setattr(sizes, "FEW_ROWS", 1)
    monkeypatch.setattr(filled_rows, "_by_blocks", counted)
    monkeypatch.setattr(lax, "empty", not_numbers)
    assert_same(gradients(config), expected)
    assert work


def not_numbers(shape, dtype):
    """In the place of `lax.empty`."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)
