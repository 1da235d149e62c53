"""A pipeline schedule as data: a table of ticks × stages.

The model's layers are cut into *chunks*, and chunks into *units*, 0 … units − 1 in model order.
Unit u lives on stage `stage_of[u]`. Its *local unit* is the number of earlier units there. A cell
is one op on one unit and one microbatch:

    F  forward                   needs the input of the unit: from the embedding, or the message of
                                 F of the unit before
    R  recompute                 needs nothing but its own F, which saved only the unit's input;
                                 rebuilds what B needs. The last unit has no R, unless the table
                                 sets `recompute_last`
    B  gradient of the input     needs R or F, and the gradient of its output: from the head, or the
                                 message of B of the unit after
    W  gradient of the weights   needs its own B

A tick has at most one cell on each stage, and at most one permute. A cell may be *overlapped*: an F
and the B of another microbatch, whose layers take turns, so that the messages of one travel while
the other computes (DualPipe: DeepSeek-V3 2024, section 3.2.1). A tick's parts have this order on
every stage:

    take in what arrived → early permute → embed → the cell's op → head → embedding's gradient
                         → optimizer's update, and its check → late permute

The head of a microbatch may stand in the tick of the last unit's F, but the last unit's B only in a
later one.

How to read this file: `TableShape` is the pipeline without ticks, `Table` adds them, and the
functions behind it answer questions about units and stages; `peak_residuals` is its memory, without
sizes in bytes. transport.py says when a message can be read, validator.py whether a table is
correct, slots.py which slot holds a value. by_name.py makes tables, clocks/ times them. No JAX
here.

    1f1b, 3 stages, 3 microbatches     stage 0  F0 F1 F2 .  .  B0 W0 .  B1 W1 .  B2 W2
                                       stage 1  .  F0 F1 .  B0 W0 F2 B1 W1 .  B2 W2 .
                                       stage 2  .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 .  .
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Op(enum.IntEnum):
    """The kinds of cells."""

    IDLE = 0
    F = 1
    R = 2
    B = 3
    W = 4


class Permute(enum.IntEnum):
    """The place in a tick of the permute that sends messages to the neighbours."""

    NONE = 0
    LATE = 1
    EARLY = 2


class Cell(NamedTuple):
    """One op on one unit, in model order, and one microbatch."""

    op: int
    unit: int
    microbatch: int


class CellArrays(NamedTuple):
    """Cells as int arrays of one length, ordered by tick and stage."""

    tick: np.ndarray
    stage: np.ndarray
    op: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray


class ScheduleError(ValueError):
    """A schedule, an order or a table that cannot be made or run; its text is one line.

    problem: what is wrong; use: what would work in its place, "" where the problem names no value
    """

    def __init__(self, problem: str, use: object = ""):
        self.problem, self.use = problem, str(use)
        super().__init__(f"{problem}: use {use}" if self.use else problem)


class TableError(ScheduleError):
    """A fault in a table, at `tick` and `stage` or `column` (−1 and "": nowhere in particular).

    rule: the fault; each {} in it stands for one of `ticks`, so that a file can name its lines
        instead
    """

    # TableError("F0.1 stands already in {}", 7, 2, ticks=(5,), use="it once") reads
    # "tick 7, stage 2: F0.1 stands already in tick 5: use it once". A file has "line 9" for tick 5.
    def __init__(
        self,
        rule: str,
        tick: int = -1,
        stage: int = -1,
        *,
        column: str = "",
        ticks: Sequence[int] = (),
        use: object = "",
    ):
        place = f"stage {stage}" if stage >= 0 else column
        where = ", ".join(filter(None, (f"tick {tick}" if tick >= 0 else "", place)))
        sentence = rule.format(*(f"tick {number}" for number in ticks)) if ticks else rule
        super().__init__(f"{where}: {sentence}" if where else sentence, use)
        self.rule, self.ticks = rule, tuple(ticks)
        self.tick, self.stage, self.column = tick, stage, column


VOCABULARIES = ("parallel", "end_stages")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TableShape:
    """The pipeline that a table is for, without its ticks.

    stage_of      the stage of each unit, in model order
    chunk_of      the chunk of each unit, in model order; several units have the same chunk where
                  `layers_per_op` cuts it; left out: a chunk for each unit
    recompute     every unit but the last has R ops; `recompute_last`: the last too, because other
                  Fs come between its F and B
    saved         of each unit, the fraction of its layers that save all residuals in F, however
                  the others are recomputed; (): none in any unit
    saves_inputs  F leaves the inputs of a unit's layers for R, not the unit's alone
    forward_only  evaluation: F, embed and head alone
    vocabulary    "parallel": all stages share head and embedding; "end_stages": the last unit's
                  stage has the head, the first unit's the embedding
    steps         training steps in the table; microbatch k is of step k // microbatches_per_step
    """

    name: str
    stage_of: tuple[int, ...]
    stages: int
    microbatches: int
    chunk_of: tuple[int, ...] = ()
    recompute: bool = False
    recompute_last: bool = False
    saved: tuple[float, ...] = ()
    saves_inputs: bool = False
    forward_only: bool = False
    vocabulary: str = "parallel"
    steps: int = 1

    def __post_init__(self):
        if not self.chunk_of:
            object.__setattr__(self, "chunk_of", tuple(range(len(self.stage_of))))

    @property
    def units(self) -> int:
        """The number of units of the model."""
        return len(self.stage_of)

    @property
    def microbatches_per_step(self) -> int:
        """The number of microbatches of one training step."""
        return self.microbatches // self.steps

    @property
    def units_per_stage(self) -> int:
        """The number of units on a stage, the most of all stages."""
        return max(map(self.stage_of.count, range(self.stages)))

    def recomputes(self, unit: int) -> bool:
        """True if a unit has R ops: then its F saves inputs alone."""
        return (
            self.recompute
            and not self.forward_only
            and (unit < self.units - 1 or self.recompute_last)
        )

    @property
    def recomputed(self) -> np.ndarray:
        """float64 [units]: the fraction of each unit's layers that its R recomputes."""
        return 1.0 - np.array(self.saved or (0.0,) * self.units)

    def ops_of(self, unit: int) -> tuple[Op, ...]:
        """The ops of a unit on each microbatch, each after the one on which it waits."""
        if self.forward_only:
            return (Op.F,)
        return (Op.F, Op.R, Op.B, Op.W) if self.recomputes(unit) else (Op.F, Op.B, Op.W)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Table(TableShape):
    """A schedule, tick by tick.

    op, local_unit, microbatch   int32 [ticks, stages]; −1 in idle cells, whose op is 0
    b_local_unit, b_microbatch   int32 [ticks, stages]: the B that runs overlapped with the cell,
                  which is then an F; −1 where none does. Left out: none anywhere
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
    b_local_unit: np.ndarray = None  # type: ignore[assignment]
    b_microbatch: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self):
        super().__post_init__()
        for name in ("b_local_unit", "b_microbatch"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.full_like(self.op, -1))

    @functools.cached_property
    def unit(self) -> np.ndarray:
        """int32 [ticks, stages]: each cell's unit in model order, −1 in idle cells."""
        return self._in_model_order(self.local_unit, self.op != Op.IDLE)

    @functools.cached_property
    def b_unit(self) -> np.ndarray:
        """int32 [ticks, stages]: the unit of each overlapped B, in model order; −1 where there is
        none."""
        return self._in_model_order(self.b_local_unit, self.overlapped)

    def _in_model_order(self, local_unit: np.ndarray, present: np.ndarray) -> np.ndarray:
        lookup = unit_lookup(self.stage_of, self.stages)
        # Idle cells have local unit −1; they look up unit 0, and are set to −1 below.
        units = lookup[np.arange(self.stages), np.maximum(local_unit, 0)]
        return np.where(present, units, -1).astype(np.int32)

    @functools.cached_property
    def overlapped(self) -> np.ndarray:
        """bool [ticks, stages]: the cells that are an F and a B."""
        return self.b_microbatch >= 0

    @functools.cached_property
    def overlaps(self) -> bool:
        """True if any cell is overlapped."""
        return bool(self.overlapped.any())

    @functools.cached_property
    def busy(self) -> CellArrays:
        """The ops of the cells that are not idle; of an overlapped cell its F, then its B."""
        # Two stages, F0 | idle and then F1+B0 | F0: ticks 0 1 1 1, stages 0 0 0 1, ops F F B F.
        tick, stage = np.nonzero(self.op)
        of_cells = (array[tick, stage] for array in (self.op, self.unit, self.microbatch))
        cells = CellArrays(tick, stage, *of_cells)
        if not self.overlaps:
            return cells
        tick, stage = np.nonzero(self.overlapped)
        of_b = (array[tick, stage] for array in (self.b_unit, self.b_microbatch))
        bs = CellArrays(tick, stage, np.full_like(tick, Op.B, np.int32), *of_b)
        both = [np.concatenate(pair) for pair in zip(cells, bs, strict=True)]
        order = np.lexsort((both[1], both[0]))  # stable: an F stands before its B
        return CellArrays(*(array[order] for array in both))

    @property
    def orders(self) -> list[list[Cell]]:
        """Each stage's ops, in the order of its cells."""
        orders: list[list[Cell]] = [[] for _ in range(self.stages)]
        for _, stage, *task in zip(*(array.tolist() for array in self.busy), strict=True):
            orders[stage].append(Cell(*task))
        return orders

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.op)

    @functools.cached_property
    def update(self) -> np.ndarray:
        """int32 [ticks, stages]: the step whose optimizer update a stage does at the end of a tick,
        the one of its last W of that step; −1 none. With one step in the table, whose update
        follows the table, −1 everywhere."""
        # Two steps of two microbatches: a stage with Ws of microbatches 0 1 2 3 in ticks 4 6 9 11
        # updates step 0 in tick 6 and step 1 in tick 11.
        update = np.full(self.op.shape, -1, np.int32)
        if self.steps > 1:
            tick, stage, op, _, microbatch = self.busy
            step = microbatch // self.microbatches_per_step
            last = np.full((self.stages, self.steps), -1)
            weights = op == Op.W
            np.maximum.at(last, (stage[weights], step[weights]), tick[weights])
            for (of_stage, of_step), at in np.ndenumerate(last):
                if at >= 0:
                    update[at, of_stage] = of_step
        return update

    @property
    def update_ends(self) -> np.ndarray:
        """int32 [ticks]: the step whose update of embedding and head all stages do together at the
        end of a tick, that of the first unit's stage; −1 none."""
        # That stage needs the embedding before any other, for the next step's earliest F.
        return self.update[:, self.stage_of[0]]

    @functools.cached_property
    def check_step(self) -> np.ndarray:
        """int32 [ticks]: the step of which the last update is made in a tick, at whose end its norm
        is known; −1 none. Every op of the next step's backward stands later, and so do its
        updates: a microbatch goes through all stages first, in their updated layers."""
        check = np.full(self.ticks, -1, np.int32)
        # The gradient's norm is a sum over all stages, known when the last of them is done.
        for step in range(self.steps if self.steps > 1 else 0):
            check[np.flatnonzero((self.update == step).any(1))[-1]] = step
        return check

    @functools.cached_property
    def cells(self) -> list[list[Cell | None]]:
        """The cells by tick and stage, None for idle ones; of an overlapped cell its F. Not to be
        changed."""
        ticks = zip(self.op.tolist(), self.unit.tolist(), self.microbatch.tolist(), strict=True)
        return [
            [Cell(*cell) if cell[0] else None for cell in zip(*tick, strict=True)] for tick in ticks
        ]


# --- units and their stages -----------------------------------------------------------------------


@functools.lru_cache
def local_unit_of(stage_of: tuple[int, ...]) -> tuple[int, ...]:
    """The local unit of each unit: the number of earlier units on its stage."""
    # stages 0 1 1 0, two chunks in a V: local units 0 0 1 1
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
    # stages 0 1 0: stage 0 has units 0 and 2, stage 1 has unit 1 → [[0, 2], [1, −1]]
    units = units_of(stage_of, stages)
    lookup = np.full((stages, max(1, *map(len, units))), -1, np.int32)
    for stage, units_of_stage in enumerate(units):
        lookup[stage, : len(units_of_stage)] = units_of_stage
    return lookup


@functools.lru_cache
def directions(stage_of: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """The way of each unit's output to the next unit: +1, −1, or 0 where it stays. Its gradient
    comes back the other way.

    The last entry is 0: the head reads the last unit's output on its stage. With two stages, where
    both ways lead to the other one, outputs go +1. Raises TableError for consecutive units on
    stages that are not neighbours.
    """
    # In a circle of 3 stages, 0 1 2 0: +1 +1 +1 0. In a V, 0 1 2 2 1 0: +1 +1 0 −1 −1 0. On two
    # stages +1 and −1 lead to the same one, and by the order of (0, 1, −1) all outputs go +1, as on
    # more stages, and all gradients −1.
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
    """The way of the message of each op on each unit, int8 [ops, units + 1]: 0 where it stays or
    there is none.

    The last column is 0, so that −1 stands for an idle cell.
    """
    # F of the last unit sends nothing, for its reader is the head in the same tick. B of unit u + 1
    # makes the gradient of unit u's output, and so goes against the way of that output.
    ways = np.zeros((len(Op), len(stage_of) + 1), np.int8)
    ways[Op.F, :-1] = directions(stage_of, stages)
    ways[Op.B, 1:-1] = -ways[Op.F, :-2]
    return ways


def wraps(stage_of: tuple[int, ...], stages: int) -> bool:
    """True if any message goes between the last stage and stage 0: the permutes then close the
    circle."""
    return any(
        not 0 <= stage + way < stages
        for stage, way in zip(stage_of, directions(stage_of, stages), strict=True)
    )


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as "1 chunk" and "2 chunks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def overlapped_b(table: Table, tick: int, stage: int) -> Cell | None:
    """The B that runs overlapped with the F of a cell; None where none does."""
    if not table.overlapped[tick, stage]:
        return None
    unit, microbatch = table.b_unit[tick, stage], table.b_microbatch[tick, stage]
    return Cell(int(Op.B), int(unit), int(microbatch))


def cell_name(cell: tuple[int, int, int], stage_of: tuple[int, ...]) -> str:
    """A cell as CSV files and errors name it: `F0.3` is F of local unit 0 on microbatch 3."""
    op, unit, microbatch = cell
    return f"{Op(op).name}{local_unit_of(stage_of)[unit]}.{microbatch}"


# --- residuals ------------------------------------------------------------------------------------

# A chunk's input as a fraction of its residuals: in a Llama layer they are some 24 times the input.
# F saves the input alone where R rebuilds the rest.
INPUT = 1 / 20
ROUNDING = 1e-9  # of sums of residuals


def peak_residuals(table: Table, count_weight_stash: bool = False) -> list[float]:
    """The most residuals that each stage holds in one tick; 1 is those of one chunk for one
    microbatch.

    Residuals count from the tick of F to the tick of B. With `count_weight_stash` they count to the
    tick of W, so that the weight stash counts as much as the residuals of B; and of the
    recomputed layers of a unit F saves the input alone, a twentieth, and R the rest. A unit counts
    as its fraction of its chunk. Forward-only tables hold none.
    """
    if table.forward_only:
        return [0.0] * table.stages
    last_reader = Op.W if count_weight_stash else Op.B
    # 1f1b, stage 1 of 2, one unit a chunk: the cells F0 B0 W0 F1 B1 W1 change the number by
    # +1 −1 0 +1 −1 0, or counted to the end of W by +1 0 −1 +1 0 −1. The peak is the largest sum up
    # to a tick. The last column is of idle cells.
    change = np.zeros((len(Op), table.units + 1))
    for unit, chunk in enumerate(table.chunk_of):
        fraction = 1 / table.chunk_of.count(chunk)
        if count_weight_stash and table.recomputes(unit):
            rebuilt = fraction * (1 - INPUT) * table.recomputed[unit]
            change[Op.F, unit], change[Op.R, unit] = fraction - rebuilt, rebuilt
        else:
            change[Op.F, unit] = fraction
        change[last_reader, unit] = -fraction
    saved = np.cumsum(change[table.op, table.unit], axis=0)
    if table.overlaps:
        # An overlapped B frees residuals only after the tick in which its F saves others.
        freed = change[np.where(table.overlapped, Op.B, Op.IDLE), table.b_unit]
        saved += np.cumsum(freed, axis=0) - freed
    return [round(peak, 9) for peak in saved.max(axis=0, initial=0.0).tolist()]
