"""Tables of several steps: the span of the papers' formulas, the place of every update, and what
the check refuses."""

import dataclasses

import numpy as np
import pytest

from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.clocks.simulate import simulate
from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.orders import SCHEDULES, StageTimes
from jaxtrain.schedule.repeated_table import repeated, same_sums
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table import Op, Table, TableError
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.schedule.validator import check

ALIKE = Times()
# (schedule, stages, chunks on a stage, microbatches)
SIZES = [("zb_h2", 8, 1, 16), ("zb_h1", 3, 1, 7), ("zb_v", 4, 2, 9), ("1f1b", 2, 1, 3)]


def several(name, stages, repeats, microbatches, steps=3, times=ALIKE) -> Table:
    spec = TableSpec(name, stages, repeats, microbatches, times=times)
    return repeated(make_table(spec), steps, times)


@pytest.mark.parametrize("times", [Times(), Times(F=1.2, B=1.0, W=0.7), Times(F=1.0, B=1.5, W=1.0)])
@pytest.mark.parametrize("microbatches", [15, 16, 20])
def test_three_steps_of_zb_h2_have_the_span_of_the_paper(microbatches, times):
    """Qi et al. 2023, section 2.3: m (F + B + W) + (p − 1) (F + B − 2 W) a step."""
    stages, result = 8, simulate(several("zb_h2", 8, 1, microbatches, times=times), times)
    busy = microbatches * (times.F + times.B + times.W)
    formula = busy + (stages - 1) * max(0.0, times.F + times.B - 2 * times.W)
    idle = SCHEDULES["zb_h2"].idle(stages, 1, StageTimes(times.F, 0.0, times.B, times.W))
    assert busy + idle == pytest.approx(formula)
    assert result.span / 3 == pytest.approx(formula)
    # one step after the other, each waits for the last stage's W
    alone = simulate(several("zb_h2", 8, 1, microbatches, 1, times), times)
    assert alone.step_time > formula + 2


def test_an_update_takes_its_time_once_a_step_on_every_stage():
    times = Times(update=0.5)
    with_update = simulate(several("zb_h2", 4, 1, 8, times=times), times)
    without = simulate(several("zb_h2", 4, 1, 8), Times())
    assert with_update.span == pytest.approx(without.span + 3 * 0.5)
    updates = [op for op in with_update.timeline if op.name == "O"]
    assert {(op.stage, op.microbatch) for op in updates} == {
        (stage, step) for stage in range(4) for step in range(3)
    }
    ends = {(op.stage, op.end) for op in with_update.timeline_coupled if op.name == "W"}
    for op in with_update.timeline_coupled:
        assert op.name != "O" or (op.stage, op.start) in ends


@pytest.mark.parametrize("size", SIZES)
def test_each_stage_repeats_its_order_and_updates_between(size):
    one, table = several(*size, steps=1), several(*size)
    check(table)
    assign_slots(table)
    assert table.microbatches_per_step == size[3] and table.steps == 3
    for stage, order in enumerate(table.orders):
        expected = one.orders[stage]
        assert order == [(op, u, k + i * size[3]) for i in range(3) for op, u, k in expected]
        ticks = np.flatnonzero(table.update[:, stage] >= 0)
        assert table.update[ticks, stage].tolist() == [0, 1, 2]
        steps = np.where(table.op[:, stage] > 0, table.microbatch[:, stage] // size[3], -1)
        for step, tick in enumerate(ticks):
            assert table.op[tick, stage] == Op.W and steps[tick] == step
            assert (steps[:tick] <= step).all() and not (steps[tick + 1 :] == step).any()
    assert (one.update == -1).all()
    assert same_sums(table, one)


def test_slots_do_not_grow_with_the_steps():
    sizes = [assign_slots(several("zb_h2", 4, 1, 8, steps)).pool_sizes for steps in (2, 5)]
    assert sizes[0] == sizes[1]


def moved(table: Table, tick: int, to: int, stage: int) -> Table:
    """The table with a cell in another tick, and an idle one in its place."""
    arrays = {}
    for name, idle in (("op", 0), ("local_unit", -1), ("microbatch", -1)):
        array = getattr(table, name).copy()
        assert array[to, stage] == idle
        array[to, stage], array[tick, stage] = array[tick, stage], idle
        arrays[name] = array
    return dataclasses.replace(table, **arrays)


def test_an_op_behind_one_of_a_later_step_is_refused():
    table = several("1f1b", 2, 1, 3, 2)
    stage = 1
    last_w = int(np.flatnonzero(table.update[:, stage] == 0)[0])
    following = int(np.flatnonzero(table.op[last_w + 1 :, stage])[0]) + last_w + 1
    idle = next(t for t in range(following + 1, table.ticks) if not table.op[t, stage])
    with pytest.raises(TableError, match=r"W0\.2 of step 0 follows an op of a later step"):
        check(moved(table, last_w, idle, stage))


def test_an_embedding_before_its_update_is_refused():
    table = several("1f1b", 2, 1, 3, 2)
    embed = table.embed.copy()
    tick = int(np.flatnonzero(embed == 3)[0])
    before = max(t for t in range(tick) if embed[t] < 0)
    embed[before], embed[tick] = 3, -1
    with pytest.raises(TableError, match="microbatch 3 of step 1: move it between the updates of"):
        check(dataclasses.replace(table, embed=embed))


def test_steps_divide_the_microbatches():
    table = dataclasses.replace(several("1f1b", 2, 1, 3, 2), steps=4)
    with pytest.raises(TableError, match="4 steps do not divide 6 microbatches"):
        check(table)


def test_the_order_of_sums_is_compared():
    """Two heads of one step in the other order, and a head behind an embedding's gradient."""
    one, table = several("1f1b", 2, 1, 3, 1), several("1f1b", 2, 1, 3, 2)
    head = table.head.copy()
    at = [int(np.flatnonzero(head == k)[0]) for k in (3, 4)]
    head[at] = head[at[::-1]]
    assert not same_sums(dataclasses.replace(table, head=head), one)
