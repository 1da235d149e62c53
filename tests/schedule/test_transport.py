"""When messages leave and can be read: by hand, tick by tick, and as the check says it."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from support.pipeline_tables import grid, random_table

from jaxtrain.schedule.cell_grid import from_cells
from jaxtrain.schedule.table import Op, Permute, TableError, TableShape, message_ways
from jaxtrain.schedule.transport import NEVER, arrivals, delays, departures, readable_from, waiting
from jaxtrain.schedule.validator import check

NONE, LATE, EARLY = Permute.NONE, Permute.LATE, Permute.EARLY


def test_departures_by_hand():
    # A late permute sends what its own tick makes, an early one what earlier ticks made.
    assert departures(np.array([NONE, LATE, NONE, EARLY, NONE])).tolist() == [1, 1, 3, NEVER, NEVER]
    assert departures(np.array([EARLY, LATE, EARLY])).tolist() == [1, 1, NEVER]
    assert departures(np.array([], int)).tolist() == []


def test_what_stays_is_read_in_the_next_tick_and_what_moves_after_its_permute():
    permute, ticks = np.array([NONE, LATE, NONE, EARLY]), np.array([0, 0, 2, 2, 3])
    assert readable_from(ticks, np.array([0, 1, 0, -1, 1]), permute).tolist() == [1, 2, 3, 4, NEVER]
    assert delays(np.array([0, 1, -1]), LATE).tolist() == [1, 1, 1]
    assert delays(np.array([0, 1, -1]), EARLY).tolist() == [1, 2, 2]


def test_arrivals_of_late_and_early_permutes():
    cells = [[(Op.F, 0, 0), None], [None, None], [None, None], [None, (Op.F, 1, 0)]]
    shape = TableShape(name="t", stage_of=(0, 1), stages=2, microbatches=1, forward_only=True)
    late, early = (
        from_cells(shape, cells, permute=permute) for permute in ([0, 1, 0, 0], [0, 0, 2, 0])
    )
    assert arrivals(late).activation[1, 0] == 2 and arrivals(early).activation[1, 0] == 3
    check(late), check(early)
    with pytest.raises(
        TableError, match="whose message no permute sends: send it by one in that tick or after"
    ):
        # it sends what was made before its tick
        check(dataclasses.replace(late, permute=np.array([2, 0, 0, 0], np.int32)))


def agree(table) -> bool:
    """Whether `waiting` says what a runtime's way through the ticks finds."""
    ways, found = message_ways(table.stage_of, table.stages), waiting(table)
    one, other = ways[table.op, table.unit], ways[Op.B, table.b_unit]
    for op, way in itertools.product((Op.F, Op.B), (1, -1)):
        made = (one == way) | (other == way)
        if table.overlaps:  # F and B have buffers of their own
            made = (one == way) & (table.op == op) | (other == way) & (op == Op.B)
        holds = np.zeros(table.stages, bool)
        for tick, when in enumerate(table.permute):
            holds &= when != EARLY
            if (found[op, way][tick] != holds).any():
                return False
            holds |= made[tick]
            holds &= when != LATE
    return True


@pytest.mark.parametrize("permute", ["late", "aligned", "early", "spaced"])
def test_what_waits_in_the_buffers(permute):
    for table in grid(permute):
        assert agree(table), table.name


def test_what_waits_in_the_buffers_of_random_tables():
    for seed in range(40):
        table = random_table(random.Random(seed))
        assert agree(table) and agree(
            dataclasses.replace(table, permute=np.zeros_like(table.permute))
        ), seed
