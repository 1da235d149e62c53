"""Where every value of a table is kept: slots by interval colouring of lifetimes, the fewest that
the table allows.

A stage has five pools of slots, each shared by all its units. A value takes one slot of its pool
from the tick in which it comes to the tick of its last reader, both included, so no tick reads a
slot and fills it with something else:

    activation     a unit's input          from arrival, the embedding or the unit before (if it
                                           stays) to F, and to R where there is one;
                   the last unit's output  from its F to the head
    gradient       an output's gradient    from arrival, the head or the unit after (if it stays)
                                           to B;
                   unit 0's input gradient from its B to the embedding's gradient
    residual_b     what B alone needs      from F (from R where there is one) to B
    residual_w     what W needs too        from the same to W
    weight_stash   what B leaves for W     from B to W

Lifetimes on one stage are intervals, and colouring intervals in order of their starts takes as many
slots as are alive at once in the busiest tick: fewer is impossible. No JAX here.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from jaxtrain.schedule.table import Op, Table, directions, message_ways
from jaxtrain.schedule.transport import NEVER, arrivals

POOLS = ("activation", "gradient", "residual_b", "residual_w", "weight_stash")
MESSAGES = ("activation", "gradient")  # those of them that travel
# of the ops that are no cell's
SHARED_SLOTS = ("embed_activation", "head_activation", "head_gradient", "embed_gradient_gradient")


@dataclasses.dataclass(frozen=True, eq=False)
class SlottedTable:
    """A table with its slots: what the runtime reads. −1 means none.

    activation, gradient, residual_b, residual_w, weight_stash   int32 [ticks, stages]: the slot of
                  each pool that the tick's cell reads or fills. F reads activation and fills
                  residual_b and residual_w (not where there is an R for it); R reads activation and
                  fills them; B reads gradient and both and fills weight_stash; W reads residual_w
                  and weight_stash
    up_activation, up_gradient, down_activation, down_gradient   int32 [ticks, stages]: the slot
                  into which the tick's start puts what the last permute brought from the stage
                  before (up) or after (down)
    stay_activation, stay_gradient   int32 [ticks, stages]: the slot into which the cell's message
                                     goes if it stays
    send          int32 [ticks, stages]: the buffer by which the cell's message leaves: +1, −1, or 0
                  for none
    embed_activation, head_activation, head_gradient, embed_gradient_gradient   int32 [ticks]: on
                  the first unit's stage, the activation that embed fills and the gradient that the
                  embedding's gradient reads; on the last unit's, the activation that the head reads
                  and the gradient that it fills
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
        """Pool → the most slots that any stage needs, which is what every stage's array has, in one
        compiled program for all."""
        return {pool: max(counts) for pool, counts in self.slots_per_stage.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Uses:
    """The ticks in which something fills or reads values of one pool: int arrays of one length.

    unit: −1 … units; the activation of unit `units` is the last unit's output, the gradient of unit
    −1 the first's input gradient
    """

    stage: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    tick: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["_Uses"]) -> "_Uses":
        """One after the other."""
        return cls(
            *(
                np.concatenate([getattr(part, field.name) for part in parts])
                for field in dataclasses.fields(cls)
            )
        )


def assign_slots(table: Table) -> SlottedTable:
    """A table with its slots. The table must be right: check it first."""
    of_stage = (
        *POOLS,
        *(f"{way}_{message}" for way in ("up", "down", "stay") for message in MESSAGES),
    )
    columns: dict[str, np.ndarray] = {
        name: np.full(table.op.shape, -1, np.int32) for name in of_stage
    }
    columns |= {name: np.full(table.ticks, -1, np.int32) for name in SHARED_SLOTS}
    slots_per_stage: dict[str, tuple[int, ...]] = {}
    for pool, uses_of in _uses(table).items():
        uses = _Uses.joined(list(uses_of.values()))
        slots, slots_per_stage[pool] = _assign(uses, table)
        begin = 0
        for name, part in uses_of.items():
            column, end = columns[name], begin + len(part.tick)
            column[part.tick if column.ndim == 1 else (part.tick, part.stage)] = slots[begin:end]
            begin = end
    send = np.where(
        table.op == Op.IDLE, 0, message_ways(table.stage_of, table.stages)[table.op, table.unit]
    ).astype(np.int32)
    return SlottedTable(table, **columns, send=send, slots_per_stage=slots_per_stage)


def _assign(uses: _Uses, table: Table) -> tuple[np.ndarray, tuple[int, ...]]:
    """(the slot of each use, the slots that each stage needs)."""
    units = table.units + 2  # with those before the first and after the last
    key = (
        uses.stage.astype(np.int64) * units + uses.unit + 1
    ) * table.microbatches + uses.microbatch
    values, value_of_use = np.unique(key, return_inverse=True)
    first, last = np.full(len(values), table.ticks, np.int64), np.full(len(values), -1, np.int64)
    np.minimum.at(first, value_of_use, uses.tick)
    np.maximum.at(last, value_of_use, uses.tick)
    stage_of_value = values // (units * table.microbatches)
    slots, counts = np.zeros(len(values), np.int32), []
    for stage in range(table.stages):
        of_stage = np.flatnonzero(stage_of_value == stage)
        slots[of_stage], count = colour(first[of_stage], last[of_stage])
        counts.append(count)
    return slots[value_of_use], tuple(counts)


def colour(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, int]:
    """(slot of each value, number of slots) from first and last ticks, both included.

    Values, in the order of their ticks, take the lowest slot that is free.
    """
    slots = np.zeros(len(first), np.int32)
    busy: list[tuple[int, int]] = []  # last tick, slot
    free: list[int] = []
    count = 0
    order = np.lexsort((last, first))
    for value, begin, end in zip(
        order.tolist(), first[order].tolist(), last[order].tolist(), strict=True
    ):
        while busy and busy[0][0] < begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, count = count, count + 1
        slots[value] = slot
        heapq.heappush(busy, (end, slot))
    return slots, count


def _uses(table: Table) -> dict[str, dict[str, _Uses]]:
    """Pool → column that names a slot → where something fills or reads a value of the pool by
    it."""
    first_stage, last_stage, last = table.stage_of[0], table.stage_of[-1], table.units - 1
    tick, stage = np.nonzero(table.op)
    op, unit, microbatch = (
        array[tick, stage] for array in (table.op, table.unit, table.microbatch)
    )
    stays = message_ways(table.stage_of, table.stages)[op, unit] == 0
    rebuilt = np.array([table.recomputes(each) for each in range(table.units)])[unit]
    keeps = (op == Op.F) & ~rebuilt if not table.forward_only else np.zeros(len(op), bool)
    residuals = keeps | (op == Op.R) | (op == Op.B)

    def of_cells(cells: np.ndarray, units_on: int = 0) -> _Uses:
        return _Uses(stage[cells], unit[cells] + units_on, microbatch[cells], tick[cells])

    activation = {
        "activation": of_cells((op == Op.F) | (op == Op.R)),
        "stay_activation": of_cells((op == Op.F) & stays, 1),
        "embed_activation": _of_column(table.embed, first_stage, 0),
        "head_activation": _of_column(table.head, last_stage, last + 1),
    }
    gradient = {
        "gradient": of_cells(op == Op.B),
        "stay_gradient": of_cells((op == Op.B) & stays, -1),
        "embed_gradient_gradient": _of_column(table.embed_gradient, first_stage, -1),
    }
    if not table.forward_only:
        gradient["head_gradient"] = _of_column(table.head, last_stage, last)
    come = arrivals(table)
    ways = np.array(directions(table.stage_of, table.stages))
    return {
        "activation": activation
        | _brought(table, "activation", come.activation, np.concatenate([[0], ways[:-1]])),
        "gradient": gradient | _brought(table, "gradient", come.gradient, -ways),
        "residual_b": {"residual_b": of_cells(residuals)},
        "residual_w": {"residual_w": of_cells(residuals | (op == Op.W))},
        "weight_stash": {"weight_stash": of_cells((op == Op.B) | (op == Op.W))},
    }


def _of_column(column: np.ndarray, stage: int, unit: int) -> _Uses:
    """The uses of an op that a column of the table names: in one unit's values on one stage."""
    ticks = np.flatnonzero(column >= 0)
    return _Uses(np.full_like(ticks, stage), np.full_like(ticks, unit), column[ticks], ticks)


def _brought(table: Table, pool: str, come: np.ndarray, ways: np.ndarray) -> dict[str, _Uses]:
    """The uses of the columns that name the slots of what permutes bring.

    come: int [units + 1, microbatches], the tick in which each unit can read its message
    ways: int [units], the way that this message comes; 0 where it stays or is no other unit's
    """
    brought: dict[str, _Uses] = {}
    for name, direction in (("up", 1), ("down", -1)):
        readers = np.flatnonzero(ways == direction)
        index, microbatches = np.nonzero(come[readers] != NEVER)
        units = readers[index]
        brought[f"{name}_{pool}"] = _Uses(
            np.array(table.stage_of)[units], units, microbatches, come[units, microbatches]
        )
    return brought
