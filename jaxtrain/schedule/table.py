"""A pipeline schedule as data: a table of ticks × stages.

The model's layers are cut into *chunks*, and chunks into *units*, 0 … units − 1 in model order.
Unit u lives on stage `stage_of[u]`. Its *local unit* is the number of earlier units there. A cell
is one op on one unit and one microbatch:

    F  forward                   needs the input of the unit: from the embedding, or the message of
                                 F of the unit before
    R  recompute                 needs nothing but its own F, which kept the input alone; rebuilds
                                 what B needs. The last unit has none, unless other Fs stand between
                                 its F and B
    B  gradient of the input     needs R or F, and the gradient of its output: from the head, or the
                                 message of B of the unit after
    W  gradient of the weights   needs its own B

A tick is what every stage does between two permutes. Everything in it has this order on every
stage:

    take in what arrived → early permute → embed → the cell's op → head → embedding's gradient
                         → late permute

The head of a microbatch may stand in the tick of the last unit's F, but the last unit's B only in a
later one. transport.py says when a message can be read, validator.py whether a table is right,
slots.py where values are kept. by_name.py makes tables, simulate.py times them. No JAX here.

    1f1b, 3 stages, 3 microbatches     stage 0  F0 F1 F2 .  .  B0 W0 .  B1 W1 .  B2 W2
                                       stage 1  .  F0 F1 .  B0 W0 F2 B1 W1 .  B2 W2 .
                                       stage 2  .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 .  .
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Op(enum.IntEnum):
    """What a cell does."""

    IDLE = 0
    F = 1
    R = 2
    B = 3
    W = 4


class Permute(enum.IntEnum):
    """Whether a tick sends the messages to the neighbours, and when."""

    NONE = 0
    LATE = 1
    EARLY = 2


class Cell(NamedTuple):
    """One op on one unit, in model order, and one microbatch."""

    op: int
    unit: int
    microbatch: int


class TableError(ValueError):
    """A table that is not right; `tick` and `stage`, or `column`, say where (−1: nowhere in
    particular).

    rule: what is wrong, and what would be right; each {} in it stands for one of `ticks`, so that a
    file's lines can be named there.
    """

    def __init__(
        self,
        rule: str,
        tick: int = -1,
        stage: int = -1,
        column: str = "",
        ticks: Sequence[int] = (),
    ):
        where = ([f"tick {tick}"] if tick >= 0 else []) + (
            [f"stage {stage}"] if stage >= 0 else [column] if column else []
        )
        sentence = rule.format(*(f"tick {named}" for named in ticks)) if ticks else rule
        super().__init__(f"{', '.join(where)}: {sentence}" if where else sentence)
        self.rule, self.tick, self.stage, self.column, self.ticks = (
            rule,
            tick,
            stage,
            column,
            tuple(ticks),
        )


VOCABULARIES = ("parallel", "end_stages")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TableShape:
    """What a table is of, without its ticks.

    stage_of      the stage of each unit, in model order
    chunk_of      the chunk of each unit, in model order; several units of one chunk where
                  `layers_per_op` cuts it; left out: as units
    recompute     whether every unit but the last has R ops; `recompute_last`: the last too, where
                  other Fs come between its F and B
    forward_only  evaluation: F, embed and head alone
    vocabulary    whether head and embedding are the work of all stages ("parallel"), or of the last
                  and first unit's ("end_stages")
    """

    name: str
    stage_of: tuple[int, ...]
    stages: int
    microbatches: int
    chunk_of: tuple[int, ...] = ()
    recompute: bool = False
    recompute_last: bool = False
    forward_only: bool = False
    vocabulary: str = "parallel"

    def __post_init__(self):
        if not self.chunk_of:
            object.__setattr__(self, "chunk_of", tuple(range(len(self.stage_of))))

    @property
    def units(self) -> int:
        """The number of units of the model."""
        return len(self.stage_of)

    def recomputes(self, unit: int) -> bool:
        """Whether a unit has R ops: then its F keeps its input alone."""
        return (
            self.recompute
            and not self.forward_only
            and (unit < self.units - 1 or self.recompute_last)
        )

    def ops_of(self, unit: int) -> tuple[Op, ...]:
        """The ops of a unit on each microbatch, each after the one on which it waits."""
        if self.forward_only:
            return (Op.F,)
        return (Op.F, Op.R, Op.B, Op.W) if self.recomputes(unit) else (Op.F, Op.B, Op.W)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Table(TableShape):
    """A schedule, tick by tick.

    op, local_unit, microbatch   int32 [ticks, stages]; −1 in idle cells, whose op is 0
    permute       int32 [ticks], a Permute
    head, embed, embed_gradient   int32 [ticks]: the microbatch whose head and loss, embedding, or
                  embedding's gradient is computed in the tick, −1 none
    """

    op: np.ndarray
    local_unit: np.ndarray
    microbatch: np.ndarray
    permute: np.ndarray
    head: np.ndarray
    embed: np.ndarray
    embed_gradient: np.ndarray

    @functools.cached_property
    def unit(self) -> np.ndarray:
        """int32 [ticks, stages]: each cell's unit in model order, −1 in idle cells."""
        lookup = unit_lookup(self.stage_of, self.stages)
        units = lookup[np.arange(self.stages), np.maximum(self.local_unit, 0)]
        return np.where(self.op == Op.IDLE, -1, units).astype(np.int32)

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.op)

    @property
    def idle_fraction(self) -> float:
        """Idle cells over all cells; every op counts alike."""
        return float((self.op == Op.IDLE).mean())

    def cells(self) -> list[list[Cell | None]]:
        """The cells by tick and stage, None for idle ones. One list for all callers: not to be
        changed."""
        return self._cells

    @functools.cached_property
    def _cells(self) -> list[list[Cell | None]]:
        ticks = zip(self.op.tolist(), self.unit.tolist(), self.microbatch.tolist(), strict=True)
        return [
            [Cell(*cell) if cell[0] else None for cell in zip(*tick, strict=True)] for tick in ticks
        ]


# --- which unit is where --------------------------------------------------------------------------


@functools.lru_cache
def local_unit_of(stage_of: tuple[int, ...]) -> tuple[int, ...]:
    """The local unit of each unit: the number of earlier units on its stage."""
    return tuple(stage_of[:unit].count(stage) for unit, stage in enumerate(stage_of))


@functools.lru_cache
def units_of(stage_of: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """The units of each stage, by local unit."""
    return tuple(
        tuple(unit for unit, home in enumerate(stage_of) if home == stage)
        for stage in range(stages)
    )


@functools.lru_cache(64)
def unit_lookup(stage_of: tuple[int, ...], stages: int) -> np.ndarray:
    """int32 [stages, most units on a stage]: the unit of each local unit, −1 where the stage has
    fewer."""
    units = units_of(stage_of, stages)
    lookup = np.full((stages, max(1, *map(len, units))), -1, np.int32)
    for stage, units_there in enumerate(units):
        lookup[stage, : len(units_there)] = units_there
    return lookup


@functools.lru_cache
def directions(stage_of: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """The way each unit's output goes to the next unit: +1, −1, or 0 where it stays; its gradient
    comes back the other way.

    The last entry is 0: the head reads the last unit's output on its stage. Where both ways lead
    there (two stages), outputs go +1. TableError for units that are not on the same stage or on
    neighbours.
    """
    ways = []
    for unit, (stage, following) in enumerate(zip(stage_of, stage_of[1:], strict=False)):
        way = next((step for step in (0, 1, -1) if (stage + step) % stages == following), None)
        if way is None:
            raise TableError(
                f"unit {unit} is on stage {stage} and unit {unit + 1} on stage {following}: "
                "put them on one stage or on neighbours"
            )
        ways.append(way)
    return (*ways, 0)


@functools.lru_cache(64)
def message_ways(stage_of: tuple[int, ...], stages: int) -> np.ndarray:
    """int8 [ops, units + 1]: the way that the message of an op on a unit goes, 0 where it stays or
    there is none.

    The last column is 0, so that −1 stands for an idle cell.
    """
    ways = np.zeros((len(Op), len(stage_of) + 1), np.int8)
    ways[Op.F, :-1] = directions(stage_of, stages)
    ways[Op.B, 1:-1] = -ways[Op.F, :-2]
    return ways


def wraps(stage_of: tuple[int, ...], stages: int) -> bool:
    """Whether any message goes between the last stage and stage 0, so that the permutes must close
    the circle."""
    return any(
        not 0 <= stage + way < stages
        for stage, way in zip(stage_of, directions(stage_of, stages), strict=True)
    )


def cell_name(cell: tuple[int, int, int], stage_of: tuple[int, ...]) -> str:
    """A cell as CSV files and errors name it: `F0.3` is F of local unit 0 on microbatch 3."""
    op, unit, microbatch = cell
    return f"{Op(op).name}{local_unit_of(stage_of)[unit]}.{microbatch}"


# --- memory ---------------------------------------------------------------------------------------

# of a chunk's residuals: its input, which F keeps where R rebuilds the rest. A Llama layer's are
# some 24 times its input
INPUT = 1 / 20


def peak_residuals(table: Table, count_weight_stash: bool = False) -> list[float]:
    """The most residuals that each stage holds in one tick, in those of one chunk for one
    microbatch.

    Residuals are held from the tick of F to the tick of B. With `count_weight_stash` they are held
    to the tick of W, so that what B leaves for W counts as much as what F left for B; and of a unit
    that is computed again, F keeps the input alone, a twentieth, and R the rest. A unit counts as
    the part that it is of its chunk. Forward-only tables hold none.
    """
    if table.forward_only:
        return [0.0] * table.stages
    last_reader = Op.W if count_weight_stash else Op.B
    # what a cell adds or takes; the last column: of idle cells
    change = np.zeros((len(Op), table.units + 1))
    for unit, chunk in enumerate(table.chunk_of):
        part = 1 / table.chunk_of.count(chunk)
        kept = (
            {Op.F: INPUT, Op.R: 1 - INPUT}
            if count_weight_stash and table.recomputes(unit)
            else {Op.F: 1.0}
        )
        for op, share in kept.items():
            change[op, unit] = part * share
        change[last_reader, unit] = -part
    held = np.cumsum(change[table.op, table.unit], axis=0)
    return [round(peak, 9) for peak in held.max(axis=0, initial=0.0).tolist()]


# --- making tables --------------------------------------------------------------------------------


def from_cells(
    shape: TableShape,
    cells: Sequence[Sequence[tuple[int, int, int] | None]],
    *,
    permute: Sequence[int] | None = None,
    columns: Mapping[str, Sequence[int]] | None = None,
) -> Table:
    """A table, not checked, of cells by tick and stage; None for idle ones. `permute` and `columns`
    as in `from_arrays`."""
    arrays = np.full((3, len(cells), shape.stages), -1, np.int32)
    arrays[0] = Op.IDLE
    for tick, cells_of_tick in enumerate(cells):
        for stage, cell in enumerate(cells_of_tick):
            if cell is not None:
                arrays[:, tick, stage] = cell
    op, unit, microbatch = arrays
    return from_arrays(shape, op, unit, microbatch, permute=permute, columns=columns)


def from_arrays(
    shape: TableShape,
    op: np.ndarray,
    unit: np.ndarray,
    microbatch: np.ndarray,
    *,
    permute: Sequence[int] | np.ndarray | None = None,
    columns: Mapping[str, Sequence[int]] | None = None,
) -> Table:
    """A table, not checked, of int32 [ticks, stages] arrays, `unit` in model order; unit and
    microbatch are −1 in idle cells.

    permute: int [ticks]; left out, late in every tick in which a message that moves is made.
    columns: head, embed and embed_gradient, int [ticks]; those left out stand in the tick of the
        last unit's F, the first unit's F and the first unit's B.
    """

    def microbatch_of(op_wanted: int, unit_wanted: int) -> np.ndarray:
        column = np.full(len(op), -1, np.int32)
        ticks, stages = np.nonzero((op == op_wanted) & (unit == unit_wanted))
        column[ticks] = microbatch[ticks, stages]
        return column

    filled = {
        "head": microbatch_of(Op.F, shape.units - 1),
        "embed": microbatch_of(Op.F, 0),
        "embed_gradient": microbatch_of(Op.B, 0),
    }
    filled |= {name: np.array(column, np.int32) for name, column in (columns or {}).items()}
    if permute is None:
        moves = message_ways(shape.stage_of, shape.stages)[op, unit] != 0
        if shape.forward_only:
            moves &= op == Op.F
        permute = np.where(moves.any(axis=1), Permute.LATE, Permute.NONE)
    return Table(
        name=shape.name,
        stage_of=shape.stage_of,
        stages=shape.stages,
        microbatches=shape.microbatches,
        chunk_of=shape.chunk_of,
        recompute=shape.recompute,
        recompute_last=shape.recompute_last,
        forward_only=shape.forward_only,
        vocabulary=shape.vocabulary,
        op=op,
        local_unit=np.array([*local_unit_of(shape.stage_of), -1], np.int32)[unit],
        microbatch=microbatch,
        permute=np.asarray(permute, np.int32),
        head=filled["head"],
        embed=filled["embed"],
        embed_gradient=filled["embed_gradient"],
    )
