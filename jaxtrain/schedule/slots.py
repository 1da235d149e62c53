"""Where every value of a table is kept: slots by interval colouring of lifetimes, the fewest that the table allows.

A stage has five pools of slots, each shared by all its units. A value takes one slot of its pool from the row in which it comes to the
row of its last reader, both included, so no row reads a slot and fills it with something else:

    activation     a unit's input          from arrival, the embedding or the unit before (if it stays) to F, and to R where there is one;
                   the last unit's output  from its F to the head
    gradient       an output's gradient    from arrival, the head or the unit after (if it stays) to B;
                   unit 0's input gradient from its B to the embedding's gradient
    residual_b     what B alone needs      from F (from R where there is one) to B
    residual_w     what W needs too        from the same to W
    weight_stash   what B leaves for W     from B to W

Lifetimes on one stage are intervals, and colouring intervals in order of their starts takes as many slots as are alive at once in the
busiest row: fewer is impossible. No JAX here.
"""

import dataclasses
import heapq

import numpy as np

from jaxtrain.schedule.table import Op, Table, directions, message_ways
from jaxtrain.schedule.validator import NEVER, arrivals

KINDS = ("activation", "gradient", "residual_b", "residual_w", "weight_stash")
SHARED_SLOTS = ("embed_activation", "head_activation", "head_gradient", "embed_gradient_gradient")  # of the ops that are no cell's


@dataclasses.dataclass(frozen=True, eq=False)
class SlottedTable:
    """A table with its slots: what the runtime reads. −1 means none.

    activation, gradient, residual_b, residual_w, weight_stash   int32 [ticks, stages]: the slot of each pool that the tick's cell reads
                  or fills. F reads activation and fills residual_b and residual_w (not where there is an R for it); R reads activation
                  and fills them; B reads gradient and both and fills weight_stash; W reads residual_w and weight_stash
    up_activation, up_gradient, down_activation, down_gradient   int32 [ticks, stages]: the slot into which the tick's start puts what
                  the last permute brought from the stage before (up) or after (down)
    stay_activation, stay_gradient   int32 [ticks, stages]: the slot into which the cell's message goes if it stays
    send          int32 [ticks, stages]: the buffer by which the cell's message leaves: +1, −1, or 0 for none
    embed_activation, head_activation, head_gradient, embed_gradient_gradient   int32 [ticks]: on the first unit's stage, the activation
                  that embed fills and the gradient that the embedding's gradient reads; on the last unit's, the activation that the
                  head reads and the gradient that it fills
    slots_per_stage   pool → the slots that each stage needs
    """

    table: Table
    activation: np.ndarray
    gradient: np.ndarray
    residual_b: np.ndarray
    residual_w: np.ndarray
    weight_stash: np.ndarray
    up_activation: np.ndarray
    up_gradient: np.ndarray
    down_activation: np.ndarray
    down_gradient: np.ndarray
    stay_activation: np.ndarray
    stay_gradient: np.ndarray
    send: np.ndarray
    embed_activation: np.ndarray
    head_activation: np.ndarray
    head_gradient: np.ndarray
    embed_gradient_gradient: np.ndarray
    slots_per_stage: dict[str, tuple[int, ...]]

    @property
    def pool_sizes(self) -> dict[str, int]:
        """Pool → the most slots that any stage needs, which is what every stage's array has, in one compiled program for all."""
        return {pool: max(counts) for pool, counts in self.slots_per_stage.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Uses:
    """The rows in which values of one kind are filled or read, and the column that names the slot there: arrays of one length.

    unit: −1 … units; the activation of unit G is the last unit's output, the gradient of unit −1 the first's input gradient
    """

    stage: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    row: np.ndarray
    column: np.ndarray


def assign_slots(table: Table) -> SlottedTable:
    """A table with its slots. Raises TableError where `arrivals` does; check the table first."""
    wide = ("up_activation", "up_gradient", "down_activation", "down_gradient", "stay_activation", "stay_gradient")
    arrays: dict[str, np.ndarray] = {name: np.full(table.op.shape, -1, np.int32) for name in (*KINDS, *wide)}
    arrays |= {name: np.full(table.ticks, -1, np.int32) for name in SHARED_SLOTS}
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
    send = np.where(table.op == Op.IDLE, 0, message_ways(table.stage_of, table.stages)[table.op, table.unit]).astype(np.int32)
    return SlottedTable(table, **arrays, send=send, slots_per_stage=counts)


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
    stage_of, last = table.stage_of, table.units - 1
    row, stage = np.nonzero(table.op)
    op, unit, microbatch = (array[row, stage] for array in (table.op, table.unit, table.microbatch))
    stays = message_ways(stage_of, table.stages)[op, unit] == 0
    rebuilt = np.array([table.recomputes(g) for g in range(table.units)])[unit]
    keeps = (op == Op.F) & ~rebuilt if not table.forward_only else np.zeros(len(op), bool)
    residuals = keeps | (op == Op.R) | (op == Op.B)

    def at(cells: np.ndarray, of: int = 0) -> Rows:
        return stage[cells], unit[cells] + of, microbatch[cells], row[cells]

    def shared(column: np.ndarray, s: int, g: int) -> Rows:
        rows = np.flatnonzero(column >= 0)
        return s, g, column[rows], rows

    uses: dict[str, dict[str, Rows]] = {
        "activation": {
            "activation": at((op == Op.F) | (op == Op.R)),
            "stay_activation": at((op == Op.F) & stays, 1),
            "embed_activation": shared(table.embed, stage_of[0], 0),
            "head_activation": shared(table.head, stage_of[last], last + 1),
        },
        "gradient": {
            "gradient": at(op == Op.B),
            "stay_gradient": at((op == Op.B) & stays, -1),
            "embed_gradient_gradient": shared(table.embed_gradient, stage_of[0], -1),
        },
        "residual_b": {"residual_b": at(residuals)},
        "residual_w": {"residual_w": at(residuals | (op == Op.W))},
        "weight_stash": {"weight_stash": at((op == Op.B) | (op == Op.W))},
    }
    if not table.forward_only:
        uses["gradient"]["head_gradient"] = shared(table.head, stage_of[last], last)
    return {kind: columns | _brought(table, kind) for kind, columns in uses.items()}


def _brought(table: Table, kind: str) -> dict[str, Rows]:
    """The uses of the columns that name the slots of what permutes bring; none but for activation and gradient."""
    if kind not in ("activation", "gradient"):
        return {}
    come, ways = arrivals(table), directions(table.stage_of, table.stages)
    found: dict[str, list[np.ndarray]] = {f"{name}_{kind}": [] for name in ("up", "down")}
    for g in range(1, table.units) if kind == "activation" else range(table.units - 1):
        way = ways[g - 1] if kind == "activation" else -ways[g]
        rows = getattr(come, kind)[g]
        there = np.flatnonzero(rows != NEVER)
        if way:
            found[f"{'up' if way > 0 else 'down'}_{kind}"].append(
                np.stack([np.full_like(there, table.stage_of[g]), np.full_like(there, g), there, rows[there]])
            )
    return {name: tuple(np.concatenate(parts, axis=1)) for name, parts in found.items() if parts}
