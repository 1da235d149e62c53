"""Tables from their cells: `from_cells` for lists of cells, `from_grid` for arrays. Columns and
permutes that are left out follow from the cells. No JAX here."""

import dataclasses
import types
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtrain.schedule.table import Op, Permute, Table, TableShape, local_unit_of, message_ways


@dataclasses.dataclass(frozen=True, eq=False)
class CellGrid:
    """The cells of a table, by tick and stage: int32 [ticks, stages], −1 in idle cells, whose op is
    0.

    unit, b_unit: in model order
    b_unit, b_microbatch: the Bs that are overlapped with these cells' Fs; −1 where none is
    """

    op: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    b_unit: np.ndarray
    b_microbatch: np.ndarray

    @classmethod
    def idle(cls, ticks: int, stages: int) -> "CellGrid":
        """A grid of idle cells, to be filled."""
        nothing = (np.full((ticks, stages), -1, np.int32) for _ in range(4))
        return cls(np.full((ticks, stages), Op.IDLE, np.int32), *nothing)


def from_cells(
    shape: TableShape,
    cells: Sequence[Sequence[tuple[int, int, int] | None]],
    overlapped: Mapping[tuple[int, int], tuple[int, int]] = types.MappingProxyType({}),
    **columns: Sequence[int],
) -> Table:
    """A table, not checked, of cells by tick and stage; None for idle ones.

    overlapped: (tick, stage) → unit and microbatch of the B that is overlapped with the F there
    columns: those of `from_grid`
    """
    # [[(F, 0, 0), None], [None, (F, 1, 0)]]: tick 0 has F of unit 0 on stage 0, tick 1 F of unit 1
    # on stage 1
    grid = CellGrid.idle(len(cells), shape.stages)
    for tick, cells_of_tick in enumerate(cells):
        for stage, cell in enumerate(cells_of_tick):
            if cell is not None:
                grid.op[tick, stage], grid.unit[tick, stage], grid.microbatch[tick, stage] = cell
    for at, (b_unit, b_microbatch) in overlapped.items():
        grid.b_unit[at], grid.b_microbatch[at] = b_unit, b_microbatch
    return from_grid(shape, grid, **columns)


def from_grid(
    shape: TableShape,
    grid: CellGrid,
    *,
    permute: Sequence[int] | None = None,
    head: Sequence[int] | None = None,
    embed: Sequence[int] | None = None,
    embed_gradient: Sequence[int] | None = None,
) -> Table:
    """A table, not checked, of these cells.

    permute: int [ticks]; left out, late in every tick in which a message that moves is made
    head, embed, embed_gradient: int [ticks]; left out, in the tick of the last unit's F, the first
        unit's F and the first unit's B
    """
    # The head of microbatch k stands in the tick of the last unit's F of k, and so on for the other
    # columns: `column` looks for the op on the unit that a column goes with, also among overlapped
    # Bs.
    op, unit, microbatch = grid.op, grid.unit, grid.microbatch

    def column(values: Sequence[int] | None, op_of_column: Op, unit_of_column: int) -> np.ndarray:
        if values is not None:
            return np.array(values, np.int32)
        microbatches = np.full(len(op), -1, np.int32)
        ticks, stages = np.nonzero((op == op_of_column) & (unit == unit_of_column))
        microbatches[ticks] = microbatch[ticks, stages]
        if op_of_column == Op.B:
            ticks, stages = np.nonzero(grid.b_unit == unit_of_column)
            microbatches[ticks] = grid.b_microbatch[ticks, stages]
        return microbatches

    # Units in model order become local ones. The last entry is for idle cells: index −1 is −1.
    local = np.array([*local_unit_of(shape.stage_of), -1], np.int32)
    if permute is None:
        ways = message_ways(shape.stage_of, shape.stages)
        moves = (ways[op, unit] != 0) | (ways[Op.B, grid.b_unit] != 0)
        if shape.forward_only:
            moves &= op == Op.F
        permute = np.where(moves.any(axis=1), Permute.LATE, Permute.NONE).tolist()
    return Table(
        **dataclasses.asdict(shape),
        op=op,
        local_unit=local[unit],
        microbatch=microbatch,
        b_local_unit=local[grid.b_unit],
        b_microbatch=grid.b_microbatch,
        permute=np.array(permute, np.int32),
        head=column(head, Op.F, shape.units - 1),
        embed=column(embed, Op.F, 0),
        embed_gradient=column(embed_gradient, Op.B, 0),
    )
