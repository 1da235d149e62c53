"""The ops of a tick say what they use; what they compute is tested with whole steps."""

import jax
import numpy as np
import pytest
from support import small
from support.plain_loop import assert_same, gradients, reference

from jaxtrain.runtime import tick
from jaxtrain.runtime.tick import TickOrder, tick_order
from jaxtrain.runtime.tick_ops import TickOp
from jaxtrain.runtime.tick_state import TickState
from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.columns import TickColumns, tick_table
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.training.step import make_step


@pytest.mark.parametrize("schedule, remat", [("interleaved", "full"), ("zb_v", "none")])
def test_every_op_gets_what_its_masks_name_and_returns_all_of_that(schedule, remat, monkeypatch):
    """An op that used anything else would find None there; one without an effect would leave every
    part as it was."""
    changed, once = {}, tick.Tick._once

    def checked(self, op, state, columns):
        def run(part, constants, columns):
            after = op.run(part, constants, columns)
            assert jax.tree.structure(after) == jax.tree.structure(part)
            pairs = zip(jax.tree.leaves(after), jax.tree.leaves(part), strict=True)
            changed[op.name] = any(new is not old for new, old in pairs)
            return after

        return once(self, TickOp(op.name, op.state, op.constants, run), state, columns)

    monkeypatch.setattr(tick.Tick, "_once", checked)
    cfg = small.config((1, 2, 1), schedule, 2, 4, {"pipeline.remat": remat, "model.mtp_depth": 1})
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        step.gradients.trace(step.abstract_state().params, step.abstract_batch)
    assert {"embed", "B0", "W1", "K1", "head", "embed_gradient"} <= set(changed)
    assert all(changed.values()), changed


def test_loops_of_all_stages_beside_those_of_a_stage(monkeypatch):
    """As on TPUs: embedding and head of a shared vocabulary stand in loops of their own."""
    monkeypatch.setattr(tick, "on_tpu", lambda: True)
    groups, run = [], tick.Tick._run_if_busy

    def noted(self, names, state, columns):
        groups.append(list(names))
        return run(self, names, state, columns)

    monkeypatch.setattr(tick.Tick, "_run_if_busy", noted)
    changes = {"pipeline.permute": "early", "pipeline.vocabulary": "parallel"}
    cfg = small.config((1, 2, 1), "interleaved", 2, 4, changes)
    assert_same(gradients(cfg), reference(cfg, 1))
    before, own, after = groups[:3]
    assert before == ["embed"] and after == ["head", "embed_gradient"]
    assert {"F0", "K1", "B1"} <= set(own)


def order(tpu: bool, schedule: str = "1f1b", repeats: int = 1, **settings) -> TickOrder:
    table = make_table(TableSpec(schedule, 2, repeats, 4, **settings))
    return tick_order(tick_table(assign_slots(table)), tpu)


def test_the_order_has_the_ops_of_the_table():
    late = order(False, permute="late", vocabulary="end_stages", remat_full=True)
    assert late == TickOrder(
        takes=("take_up_activation", "take_down_gradient"),
        before=(),
        between=(
            *("embed", "F0", "K0", "R0", "B0", "W0"),
            *("stay_activation_up", "stay_gradient_down"),
            *("head", "embed_gradient"),
        ),
        after=(),
        always_early=False,
    )


def test_one_place_orders_ops_for_all_platforms():
    """On TPUs a shared vocabulary's ops are outside of the loop that overlaps with the permute; the
    order of the ops is the same everywhere."""
    early = {"permute": "early", "vocabulary": "parallel"}
    gpu, tpu = order(False, **early), order(True, **early)
    assert tpu.before == ("embed",) and tpu.after == ("head", "embed_gradient")
    assert gpu.between == tpu.before + tpu.between + tpu.after and gpu.takes == tpu.takes
    assert tpu.always_early and gpu.always_early
    for change in ({"permute": "late"}, {"vocabulary": "end_stages"}):
        assert order(True, **early | change) == order(False, **early | change)


def test_columns_cross_a_scan():
    columns = TickColumns(np.arange(3), runs={"F0": np.ones(3, np.int32)})
    total, _ = jax.lax.scan(
        lambda total, c: (total + c.microbatch * c.runs["F0"], None), 0, columns
    )
    assert total == 3 and len(jax.tree.leaves(columns)) == 2 and jax.tree.leaves(TickState()) == []
