"""What a device has before the first tick, planned without one: no array is made and nothing is
compiled."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.config.sizes import remat_of
from jaxtrain.models.layers import SPLIT
from jaxtrain.models.spec import Spec
from jaxtrain.parallel.zero import Reduction, Zero
from jaxtrain.runtime.layers.backward_split import Residuals
from jaxtrain.runtime.state_plan import (
    ParameterPlan,
    PoolArray,
    UnitPlan,
    buffer_names,
    slot_shape,
)
from jaxtrain.runtime.tick_state import ModelTree, Pools
from jaxtrain.schedule.by_name import make_forward_table, make_table
from jaxtrain.schedule.columns import tick_table
from jaxtrain.schedule.slots import SlottedTable, assign_slots
from jaxtrain.schedule.table_spec import TableSpec

MESSAGE, COMPUTE = (2, 8, 16), jnp.dtype("bfloat16")  # B, T, D
HEADS = jax.ShapeDtypeStruct((2, 8, 4, 4), COMPUTE)
EXP = jax.make_jaxpr(jnp.exp)(1.0).eqns[0]
SCALES = jax.ShapeDtypeStruct((2, 8), jnp.float32)


class Layer:
    """A layer whose forward leaves arrays of heads for B and scales for W, whose B leaves an array
    of heads for W that it has gathered, and which is cut without being traced."""

    compute, form = COMPUTE, ""

    def split(self, message, extra, keep, hosted):
        pools = types.SimpleNamespace
        return pools(
            residuals=Residuals([HEADS], [SCALES]),
            on_host=Residuals([hosted(EXP)], [False]),
            weight_stash=[HEADS],
            gathered=[True],
        )


def train_table() -> SlottedTable:
    return assign_slots(make_table(TableSpec("1f1b", 2, 1, 4)))


def plan_of(slotted: SlottedTable | None, remat="none", sizes=(3, 2), offload=False) -> UnitPlan:
    units = [("",) * size for size in sizes]
    return UnitPlan({"": Layer()}, units, slotted, remat_of(remat), (), offload)


def test_an_array_of_heads_has_three_dimensions_in_a_slot():
    assert slot_shape((2, 8, 4, 16)) == (2, 8, 64) and slot_shape((2, 8, 64)) == (2, 8, 64)


def test_layers_by_what_they_save():
    bounds = lambda remat: [
        (r.begin, r.end, r.recomputed, r.residual_b)
        for r in plan_of(train_table(), remat).ranges(MESSAGE, None)
    ]
    assert bounds("none") == [(0, None, False, "residual_b")]
    assert bounds("full") == [(0, None, True, "residual_b")]
    assert bounds("full:1") == [(0, 1, True, "residual_b"), (1, None, False, "saved_b")]


@pytest.mark.parametrize("offload", [False, True])
def test_pools_of_a_table(offload):
    slotted = train_table()
    plan = plan_of(slotted, offload=offload)
    slots = slotted.pool_sizes
    messages = lambda name: PoolArray((slots[name], *MESSAGE), COMPUTE, False, (None, *SPLIT))
    # the most layers of any unit, for each slot
    layers = 3
    stash = PoolArray((slots["weight_stash"] * layers, 2, 8, 16), COMPUTE, False, (None,) * 4)
    assert plan.pools(plan.ranges(MESSAGE, None), MESSAGE) == Pools(
        activation=messages("activation"),
        gradient=messages("gradient"),
        residual_b={"": [PoolArray((slots["residual_b"] * layers, 2, 8, 16), COMPUTE, offload)]},
        residual_w={"": [PoolArray((slots["residual_w"] * layers, 2, 8), jnp.dtype("float32"))]},
        weight_stash={"": [stash]},
    )


def test_full_recomputation_begins_on_the_host():
    plan = plan_of(train_table(), "full", offload=True)
    assert plan.input_on_host == "activation"
    pools = plan.pools(plan.ranges(MESSAGE, None), MESSAGE)
    assert pools.activation.on_host and not pools.gradient.on_host
    assert pools.activation.axes is None
    assert plan_of(train_table(), "none", offload=True).input_on_host == ""


def test_evaluation_has_inputs_alone():
    slotted = assign_slots(make_forward_table((0, 1), 2, 4))
    plan = plan_of(slotted)
    pools = plan.pools(plan.ranges(MESSAGE, None), MESSAGE)
    assert pools == Pools(activation=pools.activation) and pools.activation.shape[1:] == MESSAGE


def test_buffers_of_a_table():
    assert buffer_names(tick_table(train_table())) == ["down", "down_arrived", "up", "up_arrived"]
    forward = assign_slots(make_forward_table((0, 1), 2, 4))
    assert {"up", "up_arrived"} <= set(buffer_names(tick_table(forward)))


def test_parameters_by_their_part_of_the_model():
    """ZeRO 3 of the layers, ZeRO 0 of all others."""
    stack = P("stage", None, "data", None)
    of_table = Reduction(("data",), (), (), 0, 0, P(None, None), P(None, None), P(None, None))
    of_layer = Reduction((), ("data",), ("data",), 0, 2, P("stage", None, None, None), stack, stack)
    matrix = Spec((8, 4), ("embed", "mlp"), std=1.0)
    plan = ParameterPlan(
        ModelTree(embed={"table": matrix}, layers={"0": {"w": matrix}}),
        ModelTree(embed={"table": of_table}, layers={"0": {"w": of_layer}}),
        Zero(3, reduce="last"),
        Zero(0),
        COMPUTE,
        None,
        {"data": 4},
    )
    assert plan.each(
        lambda zero, spec, r, a: (zero.stage, a),
        ModelTree(embed={"table": "e"}, layers={"0": {"w": "l"}}),
    ) == ModelTree(embed={"table": (0, "e")}, layers={"0": {"w": (3, "l")}})
    assert plan.held_specs() == ModelTree(
        embed={"table": P(None, None)}, layers={"0": {"w": stack}}
    )
    # a device holds 2 of 8 rows of a layer's matrix, gathers all, and keeps 2 of its reduced sum
    params = ModelTree(embed={"table": jnp.ones((8, 4))}, layers={"0": {"w": jnp.ones((3, 2, 4))}})
    sums = jax.eval_shape(plan.zero_sums, params)
    assert sums.embed["table"].shape == (8, 4) and sums.layers["0"]["w"].shape == (3, 8, 4)
    shards = jax.eval_shape(plan.zero_shards, sums)
    assert shards == ModelTree(layers={"0": {"w": jax.ShapeDtypeStruct((3, 2, 4), jnp.float32)}})
