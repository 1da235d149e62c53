"""Where every value of a table is kept: slots by interval colouring of lifetimes, the fewest that the table allows.

A stage has five pools of slots, each shared by all its units. A value takes one slot of its pool from the row in which it comes to the
row of its last reader, both included, so no row reads a slot and fills it with something else:

    x            a unit's input          from arrival, the embedding or the unit before (if it stays) to F, and to R where there is one;
                 the last unit's output  from its F to the head
    g            an output's gradient    from arrival, the head or the unit after (if it stays) to B;
                 unit 0's input gradient from its B to the embedding's gradient
    residual_b   what B alone needs      from F (from R where there is one) to B
    residual_w   what W needs too        from the same to W
    stash        what B leaves for W     from B to W

Lifetimes on one stage are intervals, and colouring intervals in order of their starts takes as many slots as are alive at once in the
busiest row: fewer is impossible. No JAX here.
"""

import dataclasses
import heapq

import numpy as np

from jaxtrain.schedule.table import Op, Table, directions, message_ways
from jaxtrain.schedule.validator import NEVER, arrivals

KINDS = ("x", "g", "residual_b", "residual_w", "stash")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A table with its slots: what the runtime reads. −1 means none.

    x, g, residual_b, residual_w, stash   int32 [ticks, stages]: the slot of each kind that the row's cell reads or fills. F reads x and
                  fills residual_b and residual_w (not where there is an R for it); R reads x and fills them; B reads g and both
                  and fills stash; W reads residual_w and stash
    up_x, up_g, down_x, down_g   int32 [ticks, stages]: the slot into which the row's start puts what the last permute brought from the
                  stage before (up) or after (down)
    stay_x, stay_g   int32 [ticks, stages]: the slot into which the cell's message goes if it stays
    send          int32 [ticks, stages]: the buffer by which the cell's message leaves: +1, −1, or 0 for none
    embed_x, head_x, head_g, embed_gradient_g   int32 [ticks]: on the first unit's stage, the x that embed fills and the g that the
                  embedding's gradient reads; on the last unit's, the x that the head reads and the g that it fills
    counts        kind → the slots that each stage needs
    """

    table: Table
    x: np.ndarray
    g: np.ndarray
    residual_b: np.ndarray
    residual_w: np.ndarray
    stash: np.ndarray
    up_x: np.ndarray
    up_g: np.ndarray
    down_x: np.ndarray
    down_g: np.ndarray
    stay_x: np.ndarray
    stay_g: np.ndarray
    send: np.ndarray
    embed_x: np.ndarray
    head_x: np.ndarray
    head_g: np.ndarray
    embed_gradient_g: np.ndarray
    counts: dict[str, tuple[int, ...]]

    @property
    def slots(self) -> dict[str, int]:
        """Kind → the most slots that any stage needs, which is what every stage's array has in one program for all."""
        return {kind: max(counts) for kind, counts in self.counts.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Uses:
    """The rows in which values of one kind are filled or read, and the column that names the slot there: arrays of one length.

    unit: −1 … units; x of unit G is the last unit's output, g of unit −1 the first's input gradient
    """

    stage: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    row: np.ndarray
    column: np.ndarray


def assign_slots(table: Table) -> Program:
    """The program of a table. Raises TableError where `arrivals` does; check the table first."""
    wide = ("up_x", "up_g", "down_x", "down_g", "stay_x", "stay_g")
    arrays: dict[str, np.ndarray] = {name: np.full(table.op.shape, -1, np.int32) for name in (*KINDS, *wide)}
    arrays |= {name: np.full(table.ticks, -1, np.int32) for name in ("embed_x", "head_x", "head_g", "embed_gradient_g")}
    counts: dict[str, tuple[int, ...]] = {}
    for kind, columns in _uses(table).items():
        names = sorted(columns)
        parts = [np.broadcast_arrays(*map(np.asarray, columns[name]), np.asarray(i)) for i, name in enumerate(names)]
        every = _Uses(*(np.concatenate(several) for several in zip(*parts, strict=True)))
        slots, counts[kind] = _assign(every, table)
        for i, name in enumerate(names):
            of = every.column == i
            array = arrays[name]
            array[(every.row[of], every.stage[of]) if array.ndim == 2 else every.row[of]] = slots[of]
    send = np.where(table.op == Op.IDLE, 0, message_ways(table.place, table.stages)[table.op, table.model_unit]).astype(np.int32)
    return Program(table, **arrays, send=send, counts=counts)


def _assign(uses: _Uses, table: Table) -> tuple[np.ndarray, tuple[int, ...]]:
    """(the slot of each use, the slots that each stage needs)."""
    wide = table.units + 2
    key = (uses.stage.astype(np.int64) * wide + uses.unit + 1) * table.microbatches + uses.microbatch
    values, value = np.unique(key, return_inverse=True)
    first, last = np.full(len(values), table.ticks, np.int64), np.full(len(values), -1, np.int64)
    np.minimum.at(first, value, uses.row)
    np.maximum.at(last, value, uses.row)
    stage = values // (wide * table.microbatches)
    slots, counts = np.zeros(len(values), np.int32), []
    for s in range(table.stages):
        own = np.flatnonzero(stage == s)
        slots[own], count = colour(first[own], last[own])
        counts.append(count)
    return slots[value], tuple(counts)


def colour(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, int]:
    """(slot of each value, number of slots) from first and last rows, both included; the lowest slot that is free, values by their rows."""
    slots = np.zeros(len(first), np.int32)
    busy: list[tuple[int, int]] = []  # last row, slot
    free: list[int] = []
    count = 0
    order = np.lexsort((last, first))
    for i, begin, end in zip(order.tolist(), first[order].tolist(), last[order].tolist(), strict=True):
        while busy and busy[0][0] < begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, count = count, count + 1
        slots[i] = slot
        heapq.heappush(busy, (end, slot))
    return slots, count


Rows = tuple[np.ndarray | int, ...]  # stage, unit, microbatch and row of the uses of one column, arrays or one number for all


def _uses(table: Table) -> dict[str, dict[str, Rows]]:
    """Kind → column that names a slot → where something fills or reads a value of that kind by it."""
    place, last = table.place, table.units - 1
    row, stage = np.nonzero(table.op)
    op, unit, microbatch = (array[row, stage] for array in (table.op, table.model_unit, table.microbatch))
    stays = message_ways(place, table.stages)[op, unit] == 0
    rebuilt = np.array([table.recomputes(g) for g in range(table.units)])[unit]
    keeps = (op == Op.F) & ~rebuilt if not table.forward_only else np.zeros(len(op), bool)
    residuals = keeps | (op == Op.R) | (op == Op.B)

    def at(cells: np.ndarray, of: int = 0) -> Rows:
        return stage[cells], unit[cells] + of, microbatch[cells], row[cells]

    def shared(column: np.ndarray, s: int, g: int) -> Rows:
        rows = np.flatnonzero(column >= 0)
        return s, g, column[rows], rows

    uses: dict[str, dict[str, Rows]] = {
        "x": {
            "x": at((op == Op.F) | (op == Op.R)),
            "stay_x": at((op == Op.F) & stays, 1),
            "embed_x": shared(table.embed, place[0], 0),
            "head_x": shared(table.head, place[last], last + 1),
        },
        "g": {
            "g": at(op == Op.B),
            "stay_g": at((op == Op.B) & stays, -1),
            "embed_gradient_g": shared(table.embed_gradient, place[0], -1),
        },
        "residual_b": {"residual_b": at(residuals)},
        "residual_w": {"residual_w": at(residuals | (op == Op.W))},
        "stash": {"stash": at((op == Op.B) | (op == Op.W))},
    }
    if not table.forward_only:
        uses["g"]["head_g"] = shared(table.head, place[last], last)
    return {kind: columns | _brought(table, kind) for kind, columns in uses.items()}


def _brought(table: Table, kind: str) -> dict[str, Rows]:
    """The uses of the columns that name the slots of what permutes bring; none but for x and g."""
    if kind not in ("x", "g"):
        return {}
    come, ways = arrivals(table), directions(table.place, table.stages)
    found: dict[str, list[np.ndarray]] = {f"{name}_{kind}": [] for name in ("up", "down")}
    for g in range(1, table.units) if kind == "x" else range(table.units - 1):
        way = ways[g - 1] if kind == "x" else -ways[g]
        rows = getattr(come, kind)[g]
        there = np.flatnonzero(rows != NEVER)
        if way:
            found[f"{'up' if way > 0 else 'down'}_{kind}"].append(
                np.stack([np.full_like(there, table.place[g]), np.full_like(there, g), there, rows[there]])
            )
    return {name: tuple(np.concatenate(parts, axis=1)) for name, parts in found.items() if parts}
