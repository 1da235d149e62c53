"""A pipeline schedule as data: a table of ticks × stages.

The model is a sequence of *units* 0 … G − 1: chunks, or groups of a chunk's layers. Unit g lives on stage `stage_of[g]`; on that stage
it has a local index, the number of earlier units there. A cell is one op on one unit and one microbatch:

    F  forward                   needs the input of the unit: from the embedding, or the message of F of the unit before
    R  recompute                 needs nothing but its own F, which kept the input alone; rebuilds what B needs. The last unit has none,
                                 unless other Fs stand between its F and B
    B  gradient of the input     needs R or F, and the gradient of its output: from the head, or the message of B of the unit after
    W  gradient of the weights   needs its own B

A row is one tick, and everything in it has this order on every stage:

    take in what arrived → early permute → embed → the cell's op → head → embedding's gradient → late permute

so head(k) may stand in the row of the last unit's F(k), but its B(k) only in a later one. A message that stays on its stage can be
read from the next row on. One that moves waits in the stage's send buffer (one for each direction) for the next permute: a late one
in its own row or later, an early one in a later row. It can be read from the row after that permute on. validator.py says whether a
table is right, slots.py where values are kept, by_name.py makes tables, simulate.py times them. No JAX here.

    1f1b, 3 stages, 3 microbatches     stage 0  F0 F1 F2 .  .  B0 W0 .  B1 W1 .  B2 W2
                                       stage 1  .  F0 F1 .  B0 W0 F2 B1 W1 .  B2 W2 .
                                       stage 2  .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 .  .
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class Op(enum.IntEnum):
    """What a cell does."""

    IDLE = 0
    F = 1
    R = 2
    B = 3
    W = 4


class Permute(enum.IntEnum):
    """Whether a row sends the messages to the neighbours, and when."""

    NONE = 0
    LATE = 1
    EARLY = 2


class TableError(ValueError):
    """A table that is not right; `row` and `stage`, or `column`, say where (−1: nowhere in particular).

    rule: what is wrong, and what would be right; each {} in it stands for one of `rows`, so that a file's lines can be named there.
    """

    def __init__(self, rule: str, row: int = -1, stage: int = -1, column: str = "", rows: Sequence[int] = ()):
        where = ([f"row {row}"] if row >= 0 else []) + ([f"stage {stage}"] if stage >= 0 else [column] if column else [])
        said = rule.format(*(f"row {t}" for t in rows)) if rows else rule
        super().__init__(f"{', '.join(where)}: {said}" if where else said)
        self.rule, self.row, self.stage, self.column, self.rows = rule, row, stage, column, tuple(rows)


VOCABULARIES = ("parallel", "end_stages")
Cell = tuple[int, int, int]  # op, unit (in model order), microbatch
Message = tuple[str, int, int]  # "activation" or "gradient", unit that reads it, microbatch


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A schedule, tick by tick.

    stage_of:     the stage of each unit, in model order
    chunk_of:     the chunk of each unit, in model order; several units of one chunk where `layers_per_op` cuts it
    op, local_unit, microbatch   int32 [ticks, stages]; −1 in idle cells, whose op is 0
    permute       int32 [ticks], a Permute
    head, embed, embed_gradient   int32 [ticks]: the microbatch whose head and loss, embedding, or embedding's gradient is computed
                  in this row, −1 none: by all stages (`vocabulary` "parallel") or by the last or first unit's stage alone ("end_stages")
    recompute     whether every unit but the last has R ops; `recompute_last`: the last too, where other Fs come between its F and B
    forward_only  evaluation: F, embed and head alone
    """

    name: str
    stage_of: tuple[int, ...]
    chunk_of: tuple[int, ...]
    stages: int
    microbatches: int
    op: np.ndarray
    local_unit: np.ndarray
    microbatch: np.ndarray
    permute: np.ndarray
    head: np.ndarray
    embed: np.ndarray
    embed_gradient: np.ndarray
    recompute: bool = False
    recompute_last: bool = False
    forward_only: bool = False
    vocabulary: str = "parallel"

    def recomputes(self, unit: int) -> bool:
        """Whether a unit has R ops: then its F keeps its input alone."""
        return self.recompute and not self.forward_only and (unit < self.units - 1 or self.recompute_last)

    @functools.cached_property
    def unit(self) -> np.ndarray:
        """int32 [ticks, stages]: each cell's unit in model order, −1 in idle cells."""
        own = unit_lookup(self.stage_of, self.stages)
        return np.where(self.op == Op.IDLE, -1, own[np.arange(self.stages), np.maximum(self.local_unit, 0)]).astype(np.int32)

    @property
    def ticks(self) -> int:
        return len(self.op)

    @property
    def units(self) -> int:
        return len(self.stage_of)

    @property
    def idle_fraction(self) -> float:
        """Idle cells over all cells; every op counts alike."""
        return float((self.op == Op.IDLE).mean())

    def cells(self) -> list[list[Cell | None]]:
        """The cells, by row and stage, with units in model order. One list for all callers: not to be changed."""
        return self._cells

    @functools.cached_property
    def _cells(self) -> list[list[Cell | None]]:
        columns = (self.op.tolist(), self.unit.tolist(), self.microbatch.tolist())
        return [[cell if cell[0] else None for cell in zip(*row, strict=True)] for row in zip(*columns, strict=True)]


# --- places ----------------------------------------------------------------------------------------------------------------------


@functools.lru_cache
def local_index(stage_of: tuple[int, ...]) -> tuple[int, ...]:
    """Of each unit, the number of earlier units on its stage."""
    return tuple(stage_of[:g].count(s) for g, s in enumerate(stage_of))


@functools.lru_cache
def units_of(stage_of: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """The units of each stage, by local index."""
    return tuple(tuple(g for g, s in enumerate(stage_of) if s == stage) for stage in range(stages))


@functools.lru_cache(64)
def unit_lookup(stage_of: tuple[int, ...], stages: int) -> np.ndarray:
    """int32 [stages, most units on a stage]: the unit in model order of each local index, −1 where the stage has fewer."""
    own = units_of(stage_of, stages)
    found = np.full((stages, max(1, *map(len, own))), -1, np.int32)
    for s, units in enumerate(own):
        found[s, : len(units)] = units
    return found


@functools.lru_cache
def directions(stage_of: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Which way each unit's output goes to the next unit: +1, −1, or 0 where it stays; its gradient comes back the other way.

    The last entry is 0: the head reads the last unit's output on its stage. Where both ways lead there (two stages), outputs go +1.
    TableError for units that are not on the same stage or on neighbours.
    """
    ways = []
    for g, (a, b) in enumerate(zip(stage_of, stage_of[1:], strict=False)):
        way = next((d for d in (0, 1, -1) if (a + d) % stages == b), None)
        if way is None:
            raise TableError(f"unit {g} is on stage {a} and unit {g + 1} on stage {b}: put them on one stage or on neighbours")
        ways.append(way)
    return (*ways, 0)


@functools.lru_cache(64)
def message_ways(stage_of: tuple[int, ...], stages: int) -> np.ndarray:
    """int8 [ops, units + 1]: the way that the message of an op on a unit goes, 0 where it stays or there is none; the last column is 0,
    so that −1 stands for an idle cell."""
    ways = directions(stage_of, stages)
    found = np.zeros((len(Op), len(stage_of) + 1), np.int8)
    found[Op.F, :-1] = ways
    found[Op.B, 1:-1] = -found[Op.F, :-2]
    return found


def wraps(stage_of: tuple[int, ...], stages: int) -> bool:
    """Whether any message goes between the last stage and stage 0, so that the permutes must close the circle."""
    return any(not 0 <= a + d < stages for a, d in zip(stage_of, directions(stage_of, stages), strict=True))


def task(cell: Cell, stage_of: tuple[int, ...]) -> str:
    """A cell as CSV files and errors name it: `F0.3` is F of local unit 0 on microbatch 3."""
    return f"{Op(cell[0]).name}{local_index(stage_of)[cell[1]]}.{cell[2]}"


def needs(cell: Cell) -> Message | None:
    """The message that a cell reads."""
    op, g, k = cell
    return ("activation", g, k) if op == Op.F else ("gradient", g, k) if op == Op.B else None


def makes(cell: Cell, stage_of: tuple[int, ...], ways: Sequence[int]) -> tuple[Message, int] | None:
    """(the message that a cell makes, the way it goes). The head is unit G, the embedding's gradient unit −1."""
    op, g, k = cell
    if op == Op.F:
        return ("activation", g + 1, k), ways[g]
    if op == Op.B:
        return ("gradient", g - 1, k), -ways[g - 1] if g else 0
    return None


def tasks(table: Table) -> Iterable[Cell]:
    """Every cell that a table of this shape must hold."""
    for g in range(table.units):
        ops = [Op.F] if table.forward_only else [Op.F, Op.B, Op.W]
        if table.recomputes(g):
            ops.append(Op.R)
        for k in range(table.microbatches):
            for op in ops:
                yield int(op), g, k


# --- memory -----------------------------------------------------------------------------------------------------------------------

INPUT = 1 / 20  # of a chunk's stash: its input, which F keeps where R rebuilds the rest. A Llama layer's stash is some 24 times its input


def peak_residuals(table: Table, count_weight_stash: bool = False) -> list[float]:
    """The most stashes that each stage holds in one row. The unit is one chunk's stash for one microbatch.

    A stash begins in the row of F and ends with the row of B. With `count_weight_stash` it ends with the row of W, so that what
    B leaves for W counts as much as what F left for B; and of a unit that is computed again, F keeps the input alone, a twentieth, and R
    the rest.
    A unit counts as the part that it is of its chunk. Forward-only tables hold none.
    """
    if table.forward_only:
        return [0.0] * table.stages
    ends = Op.W if count_weight_stash else Op.B
    change = np.zeros((len(Op), table.units + 1))  # what a cell adds or takes; the last column: of idle cells
    for g, c in enumerate(table.chunk_of):
        part = 1 / table.chunk_of.count(c)
        fills = {Op.F: INPUT, Op.R: 1 - INPUT} if count_weight_stash and table.recomputes(g) else {Op.F: 1.0}
        for op, fill in fills.items():
            change[op, g] = part * fill
        change[ends, g] = -part
    held = np.cumsum(change[table.op, table.unit], axis=0)
    return [round(x, 9) for x in held.max(axis=0, initial=0.0).tolist()]


# --- making tables -----------------------------------------------------------------------------------------------------------------


def from_cells(
    rows: Sequence[Sequence[Cell | None]], name: str, stage_of: tuple[int, ...], stages: int, microbatches: int, **others: Any
) -> Table:
    """A table, not checked, of cells by row and stage; `others` are those of `from_cells`."""
    cells = np.full((3, len(rows), stages), -1, np.int32)
    cells[0] = Op.IDLE
    for t, row in enumerate(rows):
        for s, cell in enumerate(row):
            if cell is not None:
                cells[:, t, s] = cell
    return from_arrays(cells[0], cells[1], cells[2], name, stage_of, stages, microbatches, **others)


def from_arrays(
    op: np.ndarray,
    unit: np.ndarray,
    microbatch: np.ndarray,
    name: str,
    stage_of: tuple[int, ...],
    stages: int,
    microbatches: int,
    *,
    chunk_of: tuple[int, ...] | None = None,
    permute: Sequence[int] | np.ndarray | None = None,
    columns: dict[str, Sequence[int]] | None = None,
    recompute: bool = False,
    recompute_last: bool = False,
    forward_only: bool = False,
    vocabulary: str = "parallel",
) -> Table:
    """A table, not checked, of int32 [ticks, stages] arrays, `unit` in model order; unit and microbatch are −1 in idle cells.

    Left out, `permute` is late in every row in which a message that moves is made, and the columns head, embed and embed_gradient stand
    in the row of the last unit's F, the first unit's F and the first unit's B.
    """
    index = np.array([*local_index(stage_of), -1], np.int32)

    def column(of: int, g: int) -> np.ndarray:
        found = np.full(len(op), -1, np.int32)
        t, s = np.nonzero((op == of) & (unit == g))
        found[t] = microbatch[t, s]
        return found

    auto = {"head": column(Op.F, len(stage_of) - 1), "embed": column(Op.F, 0), "embed_gradient": column(Op.B, 0)}
    if permute is None:
        moves = message_ways(stage_of, stages)[op, unit] != 0
        if forward_only:
            moves &= op == Op.F
        permute = np.where(moves.any(axis=1), Permute.LATE, Permute.NONE)
    auto |= {name: np.array(column, np.int32) for name, column in (columns or {}).items()}
    return Table(
        name=name,
        stage_of=stage_of,
        chunk_of=chunk_of or tuple(range(len(stage_of))),
        stages=stages,
        microbatches=microbatches,
        op=op,
        local_unit=index[unit],
        microbatch=microbatch,
        permute=np.asarray(permute, np.int32),
        head=auto["head"],
        embed=auto["embed"],
        embed_gradient=auto["embed_gradient"],
        recompute=recompute,
        recompute_last=recompute_last,
        forward_only=forward_only,
        vocabulary=vocabulary,
    )
