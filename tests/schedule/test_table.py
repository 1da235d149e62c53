"""Tables: which unit is where, which way its messages go, and what is held at once."""

import pytest

from jaxtrain.schedule.cell_grid import from_cells
from jaxtrain.schedule.residuals import peak_residuals
from jaxtrain.schedule.table import (
    Op,
    TableError,
    TableShape,
    directions,
    local_unit_of,
    units_of,
    wraps,
)
from jaxtrain.schedule.validator import check


def test_where_units_are():
    circle, v = (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)
    assert local_unit_of(circle) == (0, 0, 0, 1, 1, 1) and units_of(v, 3) == (
        (0, 5),
        (1, 4),
        (2, 3),
    )
    assert directions(circle, 3) == (1, 1, 1, 1, 1, 0) and directions(v, 3) == (1, 1, 0, -1, -1, 0)
    assert directions((0, 0, 1, 1), 2) == (0, 1, 0, 0) and directions((0, 1, 1, 0), 2) == (
        1,
        0,
        1,
        0,
    )
    assert wraps(circle, 3) and not wraps(v, 3) and not wraps((0, 1, 2), 3)


def test_units_must_be_neighbours():
    with pytest.raises(
        TableError,
        match="unit 0 is on stage 0 and unit 1 on stage 2: put them on one stage or on neighbours",
    ):
        directions((0, 2), 4)


def test_residuals_are_counted_from_f_to_b_or_w():
    cells = [
        [(Op.F, 0, 0)],
        [(Op.F, 0, 1)],
        [(Op.B, 0, 0)],
        [(Op.F, 0, 2)],
        [(Op.B, 0, 1)],
        [(Op.B, 0, 2)],
        *[[(Op.W, 0, k)] for k in range(3)],
    ]
    table = from_cells(TableShape(name="t", stage_of=(0,), stages=1, microbatches=3), cells)
    check(table)
    assert peak_residuals(table) == [2] and peak_residuals(table, count_weight_stash=True) == [3]
    shape = TableShape(name="t", stage_of=(0, 0), stages=1, microbatches=1, chunk_of=(0, 0))
    halves = from_cells(
        shape,
        [
            [(Op.F, 0, 0)],
            [(Op.F, 1, 0)],
            [(Op.B, 1, 0)],
            [(Op.B, 0, 0)],
            [(Op.W, 1, 0)],
            [(Op.W, 0, 0)],
        ],
    )
    assert peak_residuals(halves) == [1]
