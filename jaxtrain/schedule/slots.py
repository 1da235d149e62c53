"""The slots that hold the values of a table, found by interval colouring of the values' lifetimes.
They are the fewest that the table allows.

A stage has five pools of slots, each shared by all its units; some settings add further ones. A
value takes one slot of its pool from the tick in which it arrives to the tick of its last
reader, both included, so no tick reads a slot and fills it with another value:

    activation     a unit's input          from its arrival, from the embedding, or from the unit
                                           before if it stays on its stage; to F, or to R if there
                                           is one
                   the last unit's output  from its F to the head
    gradient       an output's gradient    from its arrival, from the head, or from the unit after
                                           if it stays; to B
                   unit 0's input gradient from its B to the embedding's gradient
    residual_b     values that only B      from F (from R if there is one) to B
                   needs
    residual_w     values that W needs too from F (from R if there is one) to W
    weight_stash   values of B for W       from B to W
    saved_b,       the same of the layers  from F, B and W, as those of a unit without R
    saved_w,       that save all while
    saved_stash    others are recomputed

Lifetimes on one stage are intervals, and colouring intervals in order of their starts takes as many
slots as are alive at once in the busiest tick: fewer is impossible.

A *value* is the array that a unit makes for a microbatch on a stage. A *use* is a tick in which an
op fills its slot or reads it; a value has several. How to read this file: `TickSlots` names the
slots that a tick uses, `_uses` finds all uses in the table, `_assign` gives values their slots, by
`colour`, and `assign_slots` puts it together. No JAX here.
"""

import dataclasses
import heapq
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.schedule.table import Op, Table, directions, message_ways
from jaxtrain.schedule.transport import NEVER, arrivals, sent_ways

MESSAGES = ("activation", "gradient")  # pools whose values travel
# pools of the layers that save all, where others are recomputed
SAVED = ("saved_b", "saved_w", "saved_stash")
READ_BY_B = ("residual_b", "residual_w", "saved_b", "saved_w")
# A column of a table: int32, an array of numpy or JAX, or a tracer of one tick's number.
Column = Any


@dataclasses.dataclass(frozen=True, eq=False)
class TickSlots:
    """The slots that a tick reads or fills, each named by its op and its pool. None: one stage has
    no slots.

    activation, gradient, residual_b, residual_w, weight_stash: by the tick's cell. F reads
        activation and fills residual_b and residual_w, unless an R follows that does; R reads
        activation and fills them; B reads gradient and both, and fills weight_stash; W reads
        residual_w and weight_stash
    layer_input: filled by an F that an R follows, and read by that in place of activation; None
        where the table has no saves_inputs
    saved_b, saved_w, saved_stash: the same of the layers that save all, which every F fills; None
        where no unit has any
    b_residual_b, b_residual_w, b_saved_b, b_saved_w: read by the B of an overlapped cell, whose F
        fills others; None in a table without these cells
    up_activation, up_gradient, down_activation, down_gradient: filled at the tick's start with the
        message that the last permute brought from the stage before (up) or after (down)
    stay_activation, stay_gradient: filled with the cell's message if it stays on its stage
    embed_activation, embedding_gradient: on the first unit's stage, filled by the embedding, and
        read by its gradient
    head_activation, head_gradient: on the last unit's stage, read and filled by the head
    """

    activation: Column = None
    layer_input: Column = None
    gradient: Column = None
    residual_b: Column = None
    residual_w: Column = None
    weight_stash: Column = None
    saved_b: Column = None
    saved_w: Column = None
    saved_stash: Column = None
    b_residual_b: Column = None
    b_residual_w: Column = None
    b_saved_b: Column = None
    b_saved_w: Column = None
    up_activation: Column = None
    up_gradient: Column = None
    down_activation: Column = None
    down_gradient: Column = None
    stay_activation: Column = None
    stay_gradient: Column = None
    embed_activation: Column = None
    embedding_gradient: Column = None
    head_activation: Column = None
    head_gradient: Column = None

    def of_overlapped_b(self) -> "TickSlots":
        """The slots for the B of an overlapped cell, under the names that any B reads."""
        return dataclasses.replace(self, **{name: getattr(self, f"b_{name}") for name in READ_BY_B})


@dataclasses.dataclass(frozen=True, eq=False)
class SlottedTable:
    """A table with its slots.

    slots   int32 [ticks, stages], −1 for none; those of head and embedding int32 [ticks]
    send    F or B → int32 [ticks, stages]: the way that its message of the tick leaves: +1, −1, or
            0 for none
    slots_per_stage   pool → the slots that each stage needs
    """

    table: Table
    slots: TickSlots
    send: dict[Op, np.ndarray]
    slots_per_stage: dict[str, tuple[int, ...]]

    @property
    def pool_sizes(self) -> dict[str, int]:
        """Pool → the most slots that any stage needs: the size of every stage's array, since all
        run one compiled program."""
        return {pool: max(counts) for pool, counts in self.slots_per_stage.items()}


class _Uses(NamedTuple):
    """The uses of the values of one pool by one op: int arrays [uses]. A value is known by its
    stage, unit and microbatch; its uses differ in their ticks.

    unit: −1 … units; the activation of unit `units` is the last unit's output, the gradient of unit
        −1 the lowest unit's input gradient
    """

    stage: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    tick: np.ndarray


def assign_slots(table: Table) -> SlottedTable:
    """A table with its slots. The table must have passed `validator.check`.

    >>> from jaxtrain.schedule.by_name import make_table
    >>> from jaxtrain.schedule.table_spec import TableSpec
    >>> table = make_table(TableSpec("1f1b", stages=2, repeats=1, microbatches=3))
    >>> assign_slots(table).pool_sizes["residual_b"]  # of three microbatches
    2
    """
    pools = _uses(table)
    # Fields of pools that this table does not have become None below, not columns of −1: the
    # runtime then has no op that could read them.
    absent = [name for name in (*SAVED, "layer_input") if name not in pools]
    absent += [f"b_{name}" for name in READ_BY_B if not table.overlaps or name in absent]
    columns = {
        field.name: np.full(
            table.ticks if field.name.startswith(("embed", "head")) else table.op.shape,
            -1,
            np.int32,
        )
        for field in dataclasses.fields(TickSlots)
    }
    slots_per_stage: dict[str, tuple[int, ...]] = {}
    for pool, uses_of in pools.items():
        # All ops' uses of a pool are numbered in one go, since they share its slots. `slots` has
        # them one op after the other, and goes back into the ops' columns in that order.
        uses = _Uses(*map(np.concatenate, zip(*uses_of.values(), strict=True)))
        slots, slots_per_stage[pool] = _assign(uses, table)
        begin = 0
        for name, uses_of_op in uses_of.items():
            column, end = columns[name], begin + len(uses_of_op.tick)
            at = uses_of_op.tick if column.ndim == 1 else (uses_of_op.tick, uses_of_op.stage)
            column[at] = slots[begin:end]
            begin = end
    used = TickSlots(**columns | dict.fromkeys(absent))
    return SlottedTable(table, used, sent_ways(table), slots_per_stage)


def _assign(uses: _Uses, table: Table) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns (the slot of each use, int32 [uses]; the number of slots that each stage needs).

    uses: all uses of one pool
    """
    # Uses of one value get the same slot. So each value has a number, stage · units · microbatches
    # + unit · microbatches + microbatch, with units counted from −1: with 4 units (so 6 with those
    # before and after) and 8 microbatches, unit 2 on stage 1 and microbatch 5 is
    # (1 · 6 + 2 + 1) · 8 + 5 = 77. int64, for a product of large tables is beyond int32.
    units = table.units + 2
    unit_on_stage = uses.stage.astype(np.int64) * units + (uses.unit + 1)
    value_numbers = unit_on_stage * table.microbatches + uses.microbatch
    # `values`: each number once; `value_of_use`: the index there of each use's value.
    values, value_of_use = np.unique(value_numbers, return_inverse=True)
    # A value lives from the earliest to the latest tick of its uses.
    begin = np.full(len(values), table.ticks, np.int64)
    end = np.full(len(values), -1, np.int64)
    np.minimum.at(begin, value_of_use, uses.tick)
    np.maximum.at(end, value_of_use, uses.tick)
    stage_of_value = values // (units * table.microbatches)
    slots, counts = np.zeros(len(values), np.int32), []
    for stage in range(table.stages):
        of_stage = np.flatnonzero(stage_of_value == stage)
        slots[of_stage], count = colour(begin[of_stage], end[of_stage])
        counts.append(count)
    return slots[value_of_use], tuple(counts)


def colour(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, int]:
    """(slot of each value, number of slots) for values from ticks `begins` to `ends`, both
    included.

    Values, in the order of their ticks, take the lowest slot that is free.
    """
    # Lifetimes (0, 3), (1, 2), (3, 5), (4, 4): slots 0, 1, 1 and 0. In tick 3 the value of slot 0
    # still has a reader, so the third one takes slot 1, free since tick 2. Taking the lowest one
    # makes the result the same in every process.
    slots = np.zeros(len(begins), np.int32)
    busy: list[tuple[int, int]] = []  # last tick, slot
    free: list[int] = []
    count = 0
    order = np.lexsort((ends, begins))
    for value, begin, end in zip(
        order.tolist(), begins[order].tolist(), ends[order].tolist(), strict=True
    ):
        # `<`, not `<=`: a slot that is read in a tick is not filled in it.
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
    """Pool → field of TickSlots → the uses of the pool's slots that the field names."""
    lowest_stage, last_stage, last = table.stage_of[0], table.stage_of[-1], table.units - 1
    tick, stage, op, unit, microbatch = table.busy
    stays = message_ways(table.stage_of, table.stages)[op, unit] == 0
    rebuilt = np.array([table.recomputes(each) for each in range(table.units)])[unit]
    # F fills the residuals' slots where no R does it later. Evaluation saves nothing.
    saves = (op == Op.F) & ~rebuilt if not table.forward_only else np.zeros(len(op), bool)
    residuals = saves | (op == Op.R) | (op == Op.B)
    # An overlapped cell is in `table.busy` as an F and as a B, in one tick. Both use slots of the
    # residuals' pools, so the B's have columns of their own.
    overlapped_b = (op == Op.B) & table.overlapped[tick, stage]

    def of_cells(cells: np.ndarray, units_on: int = 0) -> _Uses:
        return _Uses(stage[cells], unit[cells] + units_on, microbatch[cells], tick[cells])

    def read_by_b(pool: str, cells: np.ndarray) -> dict[str, _Uses]:
        """The uses of a pool by an F and the B that is overlapped with it, one column for each."""
        uses = {pool: of_cells(cells & ~overlapped_b)}
        return uses | ({f"b_{pool}": of_cells(cells & overlapped_b)} if table.overlaps else {})

    # Whatever fills or reads an activation's slot, each with the unit whose input it is: the F of
    # unit u makes the input of u + 1, the head reads that of a unit after the last one.
    activation = {
        "activation": of_cells((op == Op.F) | (op == Op.R) & (not table.saves_inputs)),
        "stay_activation": of_cells((op == Op.F) & stays, 1),
        "embed_activation": _of_column(table.embed, lowest_stage, 0),
        "head_activation": _of_column(table.head, last_stage, last + 1),
    }
    gradient = {
        "gradient": of_cells(op == Op.B),
        "stay_gradient": of_cells((op == Op.B) & stays, -1),
        "embedding_gradient": _of_column(table.embed_gradient, lowest_stage, -1),
    }
    if not table.forward_only:
        gradient["head_gradient"] = _of_column(table.head, last_stage, last)
    arrived = arrivals(table)
    ways = np.array(directions(table.stage_of, table.stages))
    saved: dict[str, dict[str, _Uses]] = {}
    if any(table.saved) and not table.forward_only:
        saving = np.array(table.saved)[unit] > 0
        saved = {
            "saved_b": read_by_b("saved_b", np.isin(op, (Op.F, Op.B)) & saving),
            "saved_w": read_by_b("saved_w", np.isin(op, (Op.F, Op.B, Op.W)) & saving),
            "saved_stash": {"saved_stash": of_cells(np.isin(op, (Op.B, Op.W)) & saving)},
        }
    pools = {
        "activation": activation
        | _brought(table, "activation", arrived.activation, np.concatenate([[0], ways[:-1]])),
        "gradient": gradient | _brought(table, "gradient", arrived.gradient, -ways),
        "residual_b": read_by_b("residual_b", residuals),
        "residual_w": read_by_b("residual_w", residuals | (op == Op.W)),
        "weight_stash": {"weight_stash": of_cells((op == Op.B) | (op == Op.W))},
    }
    if table.saves_inputs and not table.forward_only:
        saved["layer_input"] = {"layer_input": of_cells(rebuilt & np.isin(op, (Op.F, Op.R)))}
    return pools | saved


def _of_column(column: np.ndarray, stage: int, unit: int) -> _Uses:
    """The uses of one unit's values, on one stage, by an op that a column of the table names."""
    ticks = np.flatnonzero(column >= 0)
    return _Uses(np.full_like(ticks, stage), np.full_like(ticks, unit), column[ticks], ticks)


def _brought(table: Table, pool: str, arrived: np.ndarray, ways: np.ndarray) -> dict[str, _Uses]:
    """Field of TickSlots → the uses of the slots that messages of permutes fill.

    arrived: int [units + 1, microbatches], the tick in which each unit can read its message
    ways:    int [units], the way of this message; 0 where it stays or is no other unit's
    """
    brought: dict[str, _Uses] = {}
    for name, direction in (("up", 1), ("down", -1)):
        readers = np.flatnonzero(ways == direction)
        index, microbatches = np.nonzero(arrived[readers] != NEVER)
        units = readers[index]
        brought[f"{name}_{pool}"] = _Uses(
            np.array(table.stage_of)[units], units, microbatches, arrived[units, microbatches]
        )
    return brought
