"""The columns of a table that a tick reads: whether this stage runs an op in this tick, and with
which microbatch and slots.

The ops of a tick, in order:

    take_up_activation, take_down_activation, take_up_gradient, take_down_gradient
                                      the message of the last permute goes into its slot
    permute_EARLY
    embed                             the first unit's input
    F, K, R, B, W of each unit        forward; forward that saves what the backward reads;
                                      recompute; gradients
    send_up, send_down                a result that goes by another buffer than its op writes, into
                                      that buffer
    stay_activation_…, stay_gradient_…    a result that stays on its stage, from the buffer `up`,
                                          `down` or `result` into its slot
    head, embed_gradient
    update_layers, update_ends        where the table has several steps: the optimizer's update of
                                      the stage's layers, and of embedding and head
    permute_LATE

F, K and B write their result into the buffer by which it leaves, `up` or `down`, where the table
allows that for the unit on every stage, and into `result` where it does not. No JAX here.
"""

import dataclasses

import numpy as np

from jaxtrain.schedule.slots import MESSAGES, Array, SlottedTable, TickSlots
from jaxtrain.schedule.table import Op, Permute, Table, directions
from jaxtrain.schedule.transport import waiting

RESULT = "result"
# buffer by which a message leaves → the step from its stage to the other one
WAY = {"up": 1, "down": -1}
BUFFERS = (*WAY, RESULT)
# that buffer → the one in which its message arrives on the other stage
ARRIVED = {"up": "up_arrived", "down": "down_arrived"}
CELL_OPS = ("F", "K", "R", "B", "W")
EMBED, HEAD, EMBED_GRADIENT = "embed", "head", "embed_gradient"
UPDATE_LAYERS, UPDATE_ENDS = "update_layers", "update_ends"


def cell_op(kind: str, local_unit: int) -> str:
    """The name of an op of a unit, one of CELL_OPS."""
    return f"{kind}{local_unit}"


def permute_op(when: Permute) -> str:
    """The name of a tick's permute."""
    return f"permute_{when.name}"


@dataclasses.dataclass(frozen=True)
class Copy:
    """An op that moves a message on its stage. source, target: buffers, or pools; slot: the field
    of `TickSlots` that says where in the pool."""

    op: str
    source: str
    target: str
    slot: str = ""


TAKES = tuple(
    Copy(f"take_{way}_{message}", ARRIVED[way], message, f"{way}_{message}")
    for message in MESSAGES
    for way in WAY
)
SENDS = tuple(Copy(f"send_{way}", RESULT, way) for way in WAY)
STAYS = tuple(
    Copy(f"stay_{message}_{buffer}", buffer, message, f"stay_{message}")
    for message in MESSAGES
    for buffer in BUFFERS
)


@dataclasses.dataclass(frozen=True, eq=False)
class TickColumns:
    """A table by ops: int32 arrays [ticks, stages]; [ticks] inside the runtime, where a device has
    its own stage's; scalars inside a tick.

    microbatch:  of the cell
    embed_microbatch, head_microbatch, embed_gradient_microbatch: of these ops
    update_step, update_ends_step: the step whose update it is
    runs:        op → 1 where the stage runs it, else 0
    busy:        1 where it runs any op besides permutes and those that take in arrived messages

    Microbatches, steps and slots are 0 where a tick has none. On one stage, where a tick is a
    microbatch, there is nothing but `microbatch`.
    """

    microbatch: Array
    embed_microbatch: Array = None
    head_microbatch: Array = None
    embed_gradient_microbatch: Array = None
    update_step: Array = None
    update_ends_step: Array = None
    busy: Array = None
    runs: dict[str, Array] = dataclasses.field(default_factory=dict)
    slots: TickSlots = TickSlots()


@dataclasses.dataclass(frozen=True, eq=False)
class TickTable:
    """A table as the runtime needs it to make its ops.

    columns:        by `columns`, arrays [ticks, stages]
    result_buffers: by `result_buffers`
    permutes:       by `permutes`
    """

    slotted: SlottedTable
    columns: TickColumns
    result_buffers: dict[tuple[Op, int], str]
    permutes: dict[str, int]


def tick_table(slotted: SlottedTable) -> TickTable:
    """The ticks of a table."""
    return TickTable(slotted, columns(slotted), result_buffers(slotted), permutes(slotted.table))


def permutes(table: Table) -> dict[str, int]:
    """The buffers that ever leave their stages → the step that they make."""
    ways = set(directions(table.stage_of, table.stages)) - {0}
    if not table.forward_only:
        ways |= {-way for way in ways}
    return {name: step for name, step in WAY.items() if step in ways}


def result_buffers(slotted: SlottedTable) -> dict[tuple[Op, int], str]:
    """(F or B, local unit) → the buffer into which the op writes its result on every stage."""
    table, buffers = slotted.table, {}
    unsent = waiting(table)
    for op in (Op.F, Op.B):
        for unit in range(table.units_per_stage):
            cells = (table.op == op) & (table.local_unit == unit)
            leaves_by = [way for way, step in WAY.items() if (cells & (slotted.send == step)).any()]
            stays = cells & (slotted.send == 0)
            # A result that stays passes through the buffer too, which must not hold a message then.
            direct = len(leaves_by) == 1 and not (unsent[WAY[leaves_by[0]]] & stays).any()
            buffers[op, unit] = leaves_by[0] if direct else RESULT
    return buffers


def columns(slotted: SlottedTable) -> TickColumns:
    """The columns of a table, arrays [ticks, stages]."""
    table, slots = slotted.table, slotted.slots

    def of_all(column: np.ndarray) -> np.ndarray:
        """[ticks] → [ticks, stages]: the same for all stages."""
        return np.broadcast_to(column[:, None], table.op.shape)

    def taking_part(column: np.ndarray, end_stage: int) -> np.ndarray:
        """bool [ticks, stages]: the stages that run the column's op, in its ticks."""
        stages = (np.arange(table.stages) == end_stage) | (table.vocabulary == "parallel")
        return of_all(column >= 0) & stages

    written = {buffer: np.zeros(table.op.shape, bool) for buffer in BUFFERS}
    for (op, unit), buffer in result_buffers(slotted).items():
        written[buffer] |= (table.op == op) & (table.local_unit == unit)
    takes = {copy.op: getattr(slots, copy.slot) >= 0 for copy in TAKES}
    sends = {copy.op: (slotted.send == WAY[copy.target]) & written[copy.source] for copy in SENDS}
    stays = {copy.op: (getattr(slots, copy.slot) >= 0) & written[copy.source] for copy in STAYS}
    ops = {
        EMBED: taking_part(table.embed, table.stage_of[0]),
        **_cells(table),
        **sends,
        **stays,
        HEAD: taking_part(table.head, table.stage_of[-1]),
        EMBED_GRADIENT: taking_part(table.embed_gradient, table.stage_of[0]),
    }
    if table.steps > 1:
        ops[UPDATE_LAYERS] = table.update >= 0
        ops[UPDATE_ENDS] = of_all(table.update_ends >= 0)
    permuted = {
        permute_op(when): of_all(table.permute == when) for when in (Permute.EARLY, Permute.LATE)
    }
    slot_columns = {
        name: _numbers(column if column.ndim == 2 else of_all(column))
        for name, column in vars(slots).items()
        if column is not None
    }
    return TickColumns(
        _numbers(table.microbatch),
        _numbers(of_all(table.embed)),
        _numbers(of_all(table.head)),
        _numbers(of_all(table.embed_gradient)),
        _numbers(table.update),
        _numbers(of_all(table.update_ends)),
        busy=np.any(list(ops.values()), axis=0).astype(np.int32),
        runs={op: column.astype(np.int32) for op, column in (takes | ops | permuted).items()},
        slots=TickSlots(**slot_columns),
    )


def _numbers(column: np.ndarray) -> np.ndarray:
    return np.maximum(column, 0).astype(np.int32)


def _cells(table: Table) -> dict[str, np.ndarray]:
    """Op of a unit → bool [ticks, stages]."""
    recomputed = np.array([table.forward_only or table.recomputes(g) for g in range(table.units)])
    kinds = {kind: table.op == Op[kind] for kind in "FRBW"}
    kinds["K"] = kinds["F"] & ~recomputed[table.unit]
    kinds["F"] = kinds["F"] & ~kinds["K"]
    return {
        cell_op(kind, unit): kinds[kind] & (table.local_unit == unit)
        for unit in range(table.units_per_stage)
        for kind in CELL_OPS
    }
