"""A pipeline schedule as data: a table of ticks × stages, what makes one right, and its CSV form.

The model is a sequence of *units* 0 … G − 1: chunks, or groups of a chunk's layers. Unit g lives on stage `place[g]`; on that stage
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
in its own row or later, an early one in a later row. It can be read from the row after that permute on. slots.py says where values
are kept, schedules.py makes tables, simulate.py times them. No JAX here.

    1f1b, 3 stages, 3 microbatches     stage 0  F0 F1 F2 .  .  B0 W0 .  B1 W1 .  B2 W2
                                       stage 1  .  F0 F1 .  B0 W0 F2 B1 W1 .  B2 W2 .
                                       stage 2  .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 .  .
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence

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
    """A table that is not right; `row` and `stage` say where (−1: nowhere in particular; stage −2: in the column named `column`)."""

    def __init__(self, rule: str, row: int = -1, stage: int = -1, column: str = ""):
        where = ([f"row {row}"] if row >= 0 else []) + ([f"stage {stage}"] if stage >= 0 else [column] if column else [])
        super().__init__(f"{', '.join(where)}: {rule}" if where else rule)
        self.rule, self.row, self.stage, self.column = rule, row, stage, column


VOCABULARIES = ("parallel", "end_stages")
Cell = tuple[int, int, int]  # op, unit (in model order), microbatch
Message = tuple[str, int, int]  # "x" or "g", unit that reads it, microbatch


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A schedule, tick by tick.

    place:        the stage of each unit, in model order
    chunk:        the chunk of each unit, in model order; several units of one chunk where `layers_per_op` cuts it
    op, unit, microbatch   int32 [ticks, stages]; `unit` is the local index; −1 in idle cells
    permute       int32 [ticks], a Permute
    head, embed, embed_gradient   int32 [ticks]: the microbatch whose head and loss, embedding, or embedding's gradient is computed
                  in this row, −1 none: by all stages (`vocabulary` "parallel") or by the last or first unit's stage alone ("end_stages")
    recompute     whether every unit but the last has R ops; `recompute_last`: the last too, where other Fs come between its F and B
    forward_only  evaluation: F, embed and head alone
    """

    name: str
    place: tuple[int, ...]
    chunk: tuple[int, ...]
    stages: int
    microbatches: int
    op: np.ndarray
    unit: np.ndarray
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

    @property
    def ticks(self) -> int:
        return len(self.op)

    @property
    def units(self) -> int:
        return len(self.place)

    @property
    def idle_fraction(self) -> float:
        """Idle cells over all cells; every op counts alike."""
        return float((self.op == Op.IDLE).mean())

    def rows(self) -> list[list[Cell | None]]:
        """The cells, by row and stage, with units in model order. One list for all callers: not to be changed."""
        return self._rows

    @functools.cached_property
    def _rows(self) -> list[list[Cell | None]]:
        own = units_of(self.place, self.stages)
        columns = (self.op.tolist(), self.unit.tolist(), self.microbatch.tolist())
        return [
            [(o, own[s][u], k) if o else None for s, (o, u, k) in enumerate(zip(*row, strict=True))] for row in zip(*columns, strict=True)
        ]


# --- places ----------------------------------------------------------------------------------------------------------------------


@functools.lru_cache
def local_index(place: tuple[int, ...]) -> tuple[int, ...]:
    """Of each unit, the number of earlier units on its stage."""
    return tuple(place[:g].count(s) for g, s in enumerate(place))


@functools.lru_cache
def units_of(place: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """The units of each stage, by local index."""
    return tuple(tuple(g for g, s in enumerate(place) if s == stage) for stage in range(stages))


@functools.lru_cache
def directions(place: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Which way each unit's output goes to the next unit: +1, −1, or 0 where it stays; its gradient comes back the other way.

    The last entry is 0: the head reads the last unit's output on its stage. Where both ways lead there (two stages), outputs go +1.
    TableError for units that are not on the same stage or on neighbours.
    """
    ways = []
    for g, (a, b) in enumerate(zip(place, place[1:], strict=False)):
        way = next((d for d in (0, 1, -1) if (a + d) % stages == b), None)
        if way is None:
            raise TableError(f"unit {g} is on stage {a} and unit {g + 1} on stage {b}: put them on one stage or on neighbours")
        ways.append(way)
    return (*ways, 0)


def wraps(place: tuple[int, ...], stages: int) -> bool:
    """Whether any message goes between the last stage and stage 0, so that the permutes must close the circle."""
    return any(not 0 <= a + d < stages for a, d in zip(place, directions(place, stages), strict=True))


def task(cell: Cell, place: tuple[int, ...]) -> str:
    """A cell as CSV files and errors name it: `F0.3` is F of local unit 0 on microbatch 3."""
    return f"{Op(cell[0]).name}{local_index(place)[cell[1]]}.{cell[2]}"


def needs(cell: Cell) -> Message | None:
    """The message that a cell reads."""
    op, g, k = cell
    return ("x", g, k) if op == Op.F else ("g", g, k) if op == Op.B else None


def makes(cell: Cell, place: tuple[int, ...], ways: Sequence[int]) -> tuple[Message, int] | None:
    """(the message that a cell makes, the way it goes). The head is unit G, the embedding's gradient unit −1."""
    op, g, k = cell
    if op == Op.F:
        return ("x", g + 1, k), ways[g]
    if op == Op.B:
        return ("g", g - 1, k), -ways[g - 1] if g else 0
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


# --- the validator ---------------------------------------------------------------------------------------------------------------


def check(table: Table, memory: float | None = None, count_stash: bool = False) -> None:
    """Raises TableError unless a runtime that follows the table computes every task once, on the right values, and ends.

    memory: the most stashes that a stage may hold, as `peak_stashes` counts them.
    """
    _check_shape(table)
    arrivals(table)
    if memory is not None:
        for s, peak in enumerate(peak_stashes(table, count_stash)):
            if peak > memory + 1e-9:
                raise TableError(f"{peak:g} stashes at once are more than the bound of {memory:g}", stage=s)


def _check_shape(table: Table) -> None:
    """TableError for arrays of wrong shapes, places that do not exist, and cells that are foreign, missing or there twice."""
    p, m, ticks = table.stages, table.microbatches, table.ticks
    if p < 1 or m < 1 or not table.place or set(table.place) - set(range(p)):
        raise TableError(f"{p} stages, {m} microbatches, units on stages {table.place}: every number from 1 up, every unit on a stage")
    if len(table.chunk) != len(table.place) or table.vocabulary not in VOCABULARIES:
        raise TableError(f"{len(table.place)} units, {len(table.chunk)} chunk numbers, vocabulary {table.vocabulary!r}")
    for name in ("op", "unit", "microbatch", "permute", "head", "embed", "embed_gradient"):
        array = getattr(table, name)
        wanted = (ticks, p) if name in ("op", "unit", "microbatch") else (ticks,)
        if array.shape != wanted or array.dtype != np.int32:
            raise TableError(f"{name} is {array.dtype} {array.shape}: use int32 {wanted}")
    own = units_of(table.place, p)
    at: dict[Cell, int] = {}
    wanted_cells = set(tasks(table))
    for t, s in np.argwhere((table.op != Op.IDLE) | (table.unit != -1) | (table.microbatch != -1)).tolist():
        o, u, k = int(table.op[t, s]), int(table.unit[t, s]), int(table.microbatch[t, s])
        if o not in (1, 2, 3, 4) or not 0 <= u < len(own[s]) or not 0 <= k < m:
            raise TableError(f"op {o}, unit {u}, microbatch {k}: no such cell on a stage with {len(own[s])} units", t, s)
        cell = (o, own[s][u], k)
        if cell not in wanted_cells:
            raise TableError(f"{task(cell, table.place)} does not belong in this table", t, s)
        if cell in at:
            raise TableError(f"{task(cell, table.place)} stands already in row {at[cell]}", t, s)
        at[cell] = t
    if missing := sorted(wanted_cells - set(at), key=lambda c: (c[2], c[0], c[1])):
        raise TableError(f"{task(missing[0], table.place)} is missing ({len(missing)} in all)", stage=table.place[missing[0][1]])
    for name in ("head", "embed", "embed_gradient"):
        _check_column(table, name)
    if set(table.permute.tolist()) - {0, 1, 2}:
        raise TableError(f"permute holds {sorted(set(table.permute.tolist()))}: use 0, 1 or 2")


def _check_column(table: Table, name: str) -> None:
    """TableError unless head, embed or embed_gradient names every microbatch once."""
    column = getattr(table, name).tolist()
    wanted = 0 if table.forward_only and name == "embed_gradient" else table.microbatches
    seen: dict[int, int] = {}
    for t, k in enumerate(column):
        if k == -1:
            continue
        if not 0 <= k < wanted or k in seen:
            raise TableError(f"microbatch {k} " + (f"stands already in row {seen[k]}" if k in seen else "does not exist"), t, column=name)
        seen[k] = t
    if len(seen) < wanted:
        raise TableError(f"microbatch {min(set(range(wanted)) - set(seen))} is missing", column=name)


def arrivals(table: Table) -> dict[Message, int]:
    """The first row in which each message can be read, found by going through the rows as a runtime does.

    Messages to the head (unit G) and to the embedding's gradient (unit −1) are there from the row in which they are made.
    Raises TableError for a cell whose message or own earlier op is not there and for a send buffer that is overwritten.
    """
    p, place = table.stages, table.place
    ways = directions(place, p)
    last = len(place) - 1
    there: dict[Message, int] = {}
    done: set[Cell] = set()
    buffers: list[dict[int, tuple[Message, int]]] = [{} for _ in range(p)]  # stage → direction → (message, row it was made in)

    def permute(row: int) -> None:
        for buffer in buffers:
            there.update({message: row + 1 for message, _ in buffer.values()})
            buffer.clear()

    columns = zip(
        table.rows(), table.permute.tolist(), table.head.tolist(), table.embed.tolist(), table.embed_gradient.tolist(), strict=True
    )
    for t, (cells, when, head, embed, embed_gradient) in enumerate(columns):
        if when == Permute.EARLY:
            permute(t)
        if embed >= 0:
            there["x", 0, embed] = t
        for s, cell in enumerate(cells):
            if cell is not None:
                _check_cell(table, t, s, cell, there, done)
        for s, cell in enumerate(cells):
            if cell is None:
                continue
            done.add(cell)
            made = makes(cell, place, ways)
            if made is None:
                continue
            message, way = made
            if way == 0:
                there[message] = t + (0 <= message[1] <= last)
            elif way in buffers[s]:
                waiting, since = buffers[s][way]
                raise TableError(
                    f"{task(cell, place)} overwrites a message made in row {since} for unit {waiting[1]}, microbatch {waiting[2]}, "
                    "which no permute has sent",
                    t,
                    s,
                )
            else:
                buffers[s][way] = message, t
        if head >= 0:
            if there.get(("x", last + 1, head), t + 1) > t:
                raise TableError(f"microbatch {head} waits for F of the last unit", t, column="head")
            there["g", last, head] = t + 1
        if embed_gradient >= 0 and there.get(("g", -1, embed_gradient), t + 1) > t:
            raise TableError(f"microbatch {embed_gradient} waits for B of unit 0", t, column="embed_gradient")
        if when == Permute.LATE:
            permute(t)
    return there


def _check_cell(table: Table, t: int, s: int, cell: Cell, there: dict[Message, int], done: set[Cell]) -> None:
    """TableError unless what a cell of row t reads is there."""
    op, g, k = cell
    last = table.units - 1
    before = {Op.R: Op.F, Op.B: Op.R if table.recomputes(g) else Op.F, Op.W: Op.B}.get(Op(op))
    if before is not None and (int(before), g, k) not in done:
        raise TableError(
            f"{task(cell, table.place)} waits for its {task((before, g, k), table.place)}, which does not stand before it", t, s
        )
    message = needs(cell)
    if message is None or there.get(message, t + 1) <= t:
        return
    if op == Op.F:
        source = f"{task((Op.F, g - 1, k), table.place)} of stage {table.place[g - 1]}" if g else f"embed of microbatch {k}"
    else:
        source = f"{task((Op.B, g + 1, k), table.place)} of stage {table.place[g + 1]}" if g < last else f"head of microbatch {k}"
    arrives = f", which can be read from row {there[message]} on" if message in there else ", which has not come by then"
    raise TableError(f"{task(cell, table.place)} waits for {source}{arrives}", t, s)


INPUT = 1 / 20  # of a chunk's stash: its input, which F keeps where R rebuilds the rest. A Llama layer's stash is some 24 times its input


def peak_stashes(table: Table, count_stash: bool = False) -> list[float]:
    """The most stashes that each stage holds in one row. The unit is one chunk's stash for one microbatch.

    A stash begins in the row of F and ends with the row of B. With `count_stash` it ends with the row of W, so that what B leaves for W
    counts as much as what F left for B; and of a unit that is computed again, F keeps the input alone, a twentieth, and R the rest.
    A unit counts as the part that it is of its chunk. Forward-only tables hold none.
    """
    part = [1 / table.chunk.count(c) for c in table.chunk]
    ends = Op.W if count_stash else Op.B
    fills = [{Op.F: INPUT, Op.R: 1 - INPUT} if count_stash and table.recomputes(g) else {Op.F: 1.0} for g in range(table.units)]
    held, peak = [0.0] * table.stages, [0.0] * table.stages
    if table.forward_only:
        return peak
    for row in table.rows():
        for s, cell in enumerate(row):
            if cell is not None:
                op, g = Op(cell[0]), cell[1]
                held[s] += part[g] * fills[g].get(op, 0.0)
                peak[s] = max(peak[s], held[s])
                held[s] -= part[g] * (op == ends)
    return [round(x, 9) for x in peak]


# --- making tables of rows -------------------------------------------------------------------------------------------------------


def from_rows(
    rows: Sequence[Sequence[Cell | None]],
    name: str,
    place: tuple[int, ...],
    stages: int,
    microbatches: int,
    *,
    chunk: tuple[int, ...] | None = None,
    permute: Sequence[int] | None = None,
    columns: dict[str, Sequence[int]] | None = None,
    recompute: bool = False,
    recompute_last: bool = False,
    forward_only: bool = False,
    vocabulary: str = "parallel",
) -> Table:
    """A table, not checked, of cells by row and stage.

    Left out, `permute` is late in every row in which a message that moves is made, and the columns head, embed and embed_gradient stand
    in the row of the last unit's F, the first unit's F and the first unit's B.
    """
    index, last = local_index(place), len(place) - 1
    ways = directions(place, stages)
    cells = np.full((3, len(rows), stages), -1, np.int32)
    cells[0] = Op.IDLE
    auto = {name: np.full(len(rows), -1, np.int32) for name in ("head", "embed", "embed_gradient")}
    late = np.full(len(rows), Permute.NONE, np.int32)
    for t, row in enumerate(rows):
        for s, cell in enumerate(row):
            if cell is None:
                continue
            op, g, k = cell
            cells[:, t, s] = op, index[g], k
            if op == Op.F and g == last:
                auto["head"][t] = k
            if g == 0 and op == Op.F:
                auto["embed"][t] = k
            if g == 0 and op == Op.B:
                auto["embed_gradient"][t] = k
            if (made := makes(cell, place, ways)) and made[1] and not (forward_only and made[0][0] == "g"):
                late[t] = Permute.LATE
    auto |= {name: np.array(column, np.int32) for name, column in (columns or {}).items()}
    return Table(
        name=name,
        place=place,
        chunk=chunk or tuple(range(len(place))),
        stages=stages,
        microbatches=microbatches,
        op=cells[0],
        unit=cells[1],
        microbatch=cells[2],
        permute=late if permute is None else np.array(permute, np.int32),
        head=auto["head"],
        embed=auto["embed"],
        embed_gradient=auto["embed_gradient"],
        recompute=recompute,
        recompute_last=recompute_last,
        forward_only=forward_only,
        vocabulary=vocabulary,
    )
