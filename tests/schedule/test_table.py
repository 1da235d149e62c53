"""Tables: which unit is where, which way its messages go, and what is held at once."""

import pytest

from jaxtrain.schedule.cell_grid import from_cells
from jaxtrain.schedule.table import (
    Op,
    ScheduleError,
    TableError,
    TableShape,
    directions,
    local_unit_of,
    peak_residuals,
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


def test_errors_have_their_parts_as_fields():
    """A file names its lines in place of ticks, and a flag takes the place of what to use."""
    error = TableError("F0.1 stands already in {}", 7, 2, ticks=(5,), use="it once")
    assert str(error) == "tick 7, stage 2: F0.1 stands already in tick 5: use it once"
    assert (error.rule, error.use, error.ticks) == ("F0.1 stands already in {}", "it once", (5,))
    assert str(ScheduleError("no table")) == "no table" and ScheduleError("no table").use == ""


def test_overlapped_cells_and_the_columns_that_follow():
    """Two microbatches on one stage: the B of the first shares a cell with the F of the second."""
    shape = TableShape(name="t", stage_of=(0,), stages=1, microbatches=2)
    cells = [[(Op.F, 0, 0)], [(Op.F, 0, 1)], [(Op.W, 0, 0)], [(Op.B, 0, 1)], [(Op.W, 0, 1)]]
    table = from_cells(shape, cells, {(1, 0): (0, 0)})
    assert table.orders == [
        [(Op.F, 0, 0), (Op.F, 0, 1), (Op.B, 0, 0), (Op.W, 0, 0), (Op.B, 0, 1), (Op.W, 0, 1)]
    ]
    assert table.head.tolist() == table.embed.tolist() == [0, 1, -1, -1, -1]
    assert table.embed_gradient.tolist() == [-1, 0, -1, 1, -1]
    check(table)
