"""Slots: a replay of tables on tagged values finds in every slot what the op wants; and no fewer slots would do."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from support.pipeline_tables import expected, grid, random_table, replay

from jaxtrain.schedule.by_name import make_forward_table, make_table
from jaxtrain.schedule.orders import PLACEMENTS
from jaxtrain.schedule.slots import POOLS, assign_slots, colour
from jaxtrain.schedule.table import Op
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.schedule.validator import check


@pytest.mark.parametrize("permute", ["late", "aligned", "early", "spaced"])
def test_replay_of_every_schedule(permute):
    for table in grid(permute):
        assert replay(assign_slots(table)) == expected(table), table.name


@pytest.mark.parametrize("seed", range(30))
def test_replay_of_random_tables(seed):
    table = random_table(random.Random(seed))
    check(table)
    assert replay(assign_slots(table)) == expected(table)


def test_replay_of_forward_tables():
    for placement in ("circular", "v"):
        for stages, repeats, microbatches in ((1, 1, 3), (2, 2, 5), (4, 2, 9), (5, 1, 2)):
            for permute in ("late", "early"):
                table = make_forward_table(PLACEMENTS[placement](stages, repeats), stages, microbatches, permute=permute)
                slotted = assign_slots(table)
                assert replay(slotted) == expected(table)
                assert slotted.pool_sizes["residual_b"] == slotted.pool_sizes["weight_stash"] == 0
                assert slotted.pool_sizes["activation"] <= 2 * stages + 2  # and not the number of microbatches


@pytest.mark.parametrize("pool", POOLS)
def test_the_replay_finds_a_wrong_slot(pool):
    slotted = assign_slots(make_table(TableSpec("interleaved", 4, 2, 8, permute="late")))
    column = getattr(slotted, pool).copy()
    tick = int(np.argwhere(slotted.table.op[:, 0] == {"activation": Op.F, "weight_stash": Op.W, "residual_w": Op.W}.get(pool, Op.B))[3, 0])
    column[tick, 0] = (column[tick, 0] + 1) % slotted.slots_per_stage[pool][0] if slotted.slots_per_stage[pool][0] > 1 else -1
    with pytest.raises(AssertionError):
        replay(dataclasses.replace(slotted, **{pool: column}))


def test_colouring_takes_as_many_slots_as_are_alive_at_once():
    source = random.Random(1)
    for _ in range(200):
        first = np.array([source.randrange(30) for _ in range(source.randrange(1, 25))])
        last = first + np.array([source.randrange(8) for _ in first])
        slots, count = colour(first, last)
        assert count == max(int(((first <= t) & (t <= last)).sum()) for t in range(40))
        for i, j in itertools.combinations(range(len(first)), 2):
            assert not (slots[i] == slots[j] and first[i] <= last[j] and first[j] <= last[i])


def test_slots_of_1f1b_do_not_grow_with_the_microbatches():
    few, many = (assign_slots(make_table(TableSpec("1f1b", 4, 1, m, permute="late"))) for m in (8, 32))
    # The first stage's four microbatches in flight; on the last one the output of F beside its input, which the head reads.
    assert few.slots_per_stage == many.slots_per_stage
    assert few.slots_per_stage["residual_b"] == (4, 3, 2, 1) and few.slots_per_stage["weight_stash"] == (1, 1, 1, 1)


def test_recompute_keeps_inputs_in_place_of_residuals():
    kept, rebuilt = (
        assign_slots(make_table(TableSpec("1f1b", 4, 1, 12, permute="late", remat_full=full))).slots_per_stage for full in (False, True)
    )
    assert kept["residual_b"][0] == 4 and rebuilt["residual_b"] == (1, 1, 1, 1)
    assert rebuilt["activation"][0] == 4
