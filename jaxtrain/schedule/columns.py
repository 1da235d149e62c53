"""The columns of a table that a tick reads: whether this stage runs an op in this tick, and with
which microbatch and slots.

The ops of a tick, in order:

    take_up_activation, take_down_activation, take_up_gradient, take_down_gradient
                                      the message of the last permute goes into its slot
    permute_EARLY
    embed                             the first unit's input
    F, K, R, B, W of each unit        forward; forward that saves what the backward reads;
                                      recompute; gradients
    FB, KB of two units               an F or K and a B of another microbatch, layer by layer
    send_up, send_down                a result that goes by another buffer than its op writes, into
                                      that buffer
    stay_activation_…, stay_gradient_…    a result that stays on its stage, from the buffer `up`,
                                          `down` or `result` into its slot
    head, embed_gradient
    update_layers, update_ends        where the table has several steps: the optimizer's update of
                                      the stage's layers, and of embedding and head
    check_step                        there, after a step's last update: whether the step has to be
                                      clipped or skipped instead
    permute_LATE

F, K and B write their result into the buffer by which it leaves, `up` or `down`, where the table
allows that for the unit on every stage, and into `result` where it does not. In a table with
overlapped cells messages of B have buffers of their own: `up_gradient`, `down_gradient`,
`result_gradient`.

    1f1b on 2 stages, 2 microbatches, some columns of stage 0:
        cells         F0 F1 .  B0 W0 .  B1 W1
        K0            1  1  0  0  0  0  0  0     the F of local unit 0, which saves residuals
        B0            0  0  0  1  0  0  1  0
        microbatch    0  1  0  0  0  0  1  1

How to read this file: `columns` makes all arrays; `result_buffers` decides where an op writes its
result, `_copies` lists the ops that move messages on their stage. No JAX here.
"""

import dataclasses

import numpy as np

from jaxtrain.schedule.slots import MESSAGES, Column, SlottedTable, TickSlots
from jaxtrain.schedule.table import Op, Permute, Table, directions
from jaxtrain.schedule.transport import waiting

RESULT = "result"
OF_GRADIENTS = "_gradient"  # ends the names of B's buffers where F has others
# buffer by which a message leaves → the step from its stage to the other one
WAY = {"up": 1, "down": -1, f"up{OF_GRADIENTS}": 1, f"down{OF_GRADIENTS}": -1}
BUFFERS = (*WAY, RESULT, f"{RESULT}{OF_GRADIENTS}")
# that buffer → the one in which its message arrives on the other stage
ARRIVED = {way: f"{way}_arrived" for way in WAY}
CELL_OPS = ("F", "K", "R", "B", "W")
EMBED, HEAD, EMBED_GRADIENT = "embed", "head", "embed_gradient"
LAST_WEIGHTS = "last_weights"  # the scope of a unit's last W, where that is an op of its own
UPDATE_LAYERS, UPDATE_ENDS, CHECK_STEP = "update_layers", "update_ends", "check_step"


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


@dataclasses.dataclass(frozen=True)
class MessageCopies:
    """The ops of a tick that move messages on their stage: what arrived into its slot, results into
    the buffers by which they leave, and results that stay into their slots."""

    takes: tuple[Copy, ...]
    sends: tuple[Copy, ...]
    stays: tuple[Copy, ...]


def _copies(overlaps: bool) -> MessageCopies:
    """The copies of a table. overlaps: any of its cells is overlapped"""
    # Without overlapped cells a tick makes one message at most, and one set of buffers serves F and
    # B. An overlapped cell makes two, which may leave the same way.
    suffixes = {
        message: OF_GRADIENTS if overlaps and message == "gradient" else "" for message in MESSAGES
    }
    ways = ("up", "down")
    return MessageCopies(
        takes=tuple(
            Copy(
                f"take_{way}_{message}",
                ARRIVED[way + suffixes[message]],
                message,
                f"{way}_{message}",
            )
            for message in MESSAGES
            for way in ways
        ),
        sends=tuple(
            Copy(f"send_{way}{ending}", RESULT + ending, way + ending)
            for ending in dict.fromkeys(suffixes.values())
            for way in ways
        ),
        stays=tuple(
            Copy(f"stay_{message}_{buffer}", buffer + suffixes[message], message, f"stay_{message}")
            for message in MESSAGES
            for buffer in (*ways, RESULT)
        ),
    )


COPIES = {overlaps: _copies(overlaps) for overlaps in (False, True)}


@dataclasses.dataclass(frozen=True, eq=False)
class TickColumns:
    """A table by ops: int32 arrays [ticks, stages]; [ticks] inside the runtime, where a device has
    its own stage's; scalars inside a tick.

    microbatch:  of the cell
    b_microbatch: of the B in an overlapped cell; None in a table without these cells
    embed_microbatch, head_microbatch, embed_gradient_microbatch: of these ops
    last_weights: 1 in the cell of a local unit's last W on its stage; None: no op asks for it
    update_step, update_ends_step, checked_step: the step whose update, or check, it is
    runs:        op → 1 where the stage runs it, else 0
    busy:        1 where it runs any op besides permutes and those that take in arrived messages

    Microbatches, steps and slots are 0 where a tick has none. On one stage, where a tick is a
    microbatch, there is nothing but `microbatch`.
    """

    microbatch: Column
    b_microbatch: Column = None
    embed_microbatch: Column = None
    head_microbatch: Column = None
    embed_gradient_microbatch: Column = None
    update_step: Column = None
    update_ends_step: Column = None
    checked_step: Column = None
    busy: Column = None
    last_weights: Column = None
    runs: dict[str, Column] = dataclasses.field(default_factory=dict)
    slots: TickSlots = TickSlots()


@dataclasses.dataclass(frozen=True, eq=False)
class TickTable:
    """A table as the runtime needs it to make its ops.

    columns:        by `columns`, arrays [ticks, stages]
    copies:         of COPIES
    overlapped:     by `overlapped_ops`
    result_buffers: by `result_buffers`
    permutes:       by `permutes`
    """

    slotted: SlottedTable
    columns: TickColumns
    copies: MessageCopies
    overlapped: dict[str, tuple[str, int, int]]
    result_buffers: dict[tuple[Op, int], str]
    permutes: dict[str, int]


def tick_table(slotted: SlottedTable) -> TickTable:
    """The ticks of a table."""
    table = slotted.table
    return TickTable(
        slotted,
        columns(slotted),
        COPIES[table.overlaps],
        overlapped_ops(table),
        result_buffers(slotted),
        permutes(table),
    )


def permutes(table: Table) -> dict[str, int]:
    """The buffers that ever leave their stages → the step that they make."""
    of_f = set(directions(table.stage_of, table.stages)) - {0}
    of_b = set() if table.forward_only else {-way for way in of_f}
    up_down, of_gradients = (of_f, of_b) if table.overlaps else (of_f | of_b, set())
    return {
        name: step
        for name, step in WAY.items()
        if step in (of_gradients if name.endswith(OF_GRADIENTS) else up_down)
    }


def overlapped_ops(table: Table) -> dict[str, tuple[str, int, int]]:
    """The ops of overlapped cells that the table has: name, such as `KB0_1` → (F or K, local unit
    of that, local unit of the B)."""
    if not table.overlaps:
        return {}
    return {
        f"{kind}B{unit}_{b_unit}": (kind, unit, b_unit)
        for unit in range(table.units_per_stage)
        for b_unit in range(table.units_per_stage)
        for kind in "FK"
        if (_cells(table, kind, unit, overlapped=True) & (table.b_local_unit == b_unit)).any()
    }


def result_buffers(slotted: SlottedTable) -> dict[tuple[Op, int], str]:
    """(F or B, local unit) → the buffer into which the op writes its result on every stage."""
    table, buffers = slotted.table, {}
    unsent = waiting(table)
    for op in (Op.F, Op.B):
        suffix = OF_GRADIENTS if op == Op.B and table.overlaps else ""
        for unit in range(table.units_per_stage):
            cells, send = _results(table, op, unit), slotted.send[op]
            leaves_by = [way for way in ("up", "down") if (cells & (send == WAY[way])).any()]
            stays = cells & (send == 0)
            # In a V the result of one local unit's F goes up on some stages, and stays on the one
            # where the V turns. The program is the same on all stages, so the op writes into one
            # buffer: that of the only way, if there is one. A result that stays passes through it,
            # too, and must not overwrite a message that is still to leave.
            direct = len(leaves_by) == 1 and not (unsent[op, WAY[leaves_by[0]]] & stays).any()
            buffers[op, unit] = (leaves_by[0] if direct else RESULT) + suffix
    return buffers


def _results(table: Table, op: Op, unit: int) -> np.ndarray:
    """bool [ticks, stages]: the ticks in which a stage makes the result of F or B of a local
    unit."""
    alone = (table.op == op) & (table.local_unit == unit)
    return alone | (table.b_local_unit == unit) if op == Op.B else alone


def columns(slotted: SlottedTable) -> TickColumns:
    """The columns of a table, arrays [ticks, stages]."""
    table, slots, copies = slotted.table, slotted.slots, COPIES[slotted.table.overlaps]

    def of_all(column: np.ndarray) -> np.ndarray:
        """[ticks] → [ticks, stages]: the same for all stages."""
        return np.broadcast_to(column[:, None], table.op.shape)

    def taking_part(column: np.ndarray, end_stage: int) -> np.ndarray:
        """bool [ticks, stages]: the stages that run the column's op, in its ticks."""
        stages = (np.arange(table.stages) == end_stage) | (table.vocabulary == "parallel")
        return of_all(column >= 0) & stages

    # A `send` copies a result that its op has written into another buffer than the one by which it
    # leaves; a `stay` copies one from its buffer into its slot. Both follow from `written` (buffer
    # → the ticks in which a result is written there) and `leaving` (those in which it then leaves
    # by each way).
    written = {buffer: np.zeros(table.op.shape, bool) for buffer in BUFFERS}
    leaving = {(buffer, way): np.zeros(table.op.shape, bool) for buffer in BUFFERS for way in WAY}
    for (op, unit), buffer in result_buffers(slotted).items():
        results = _results(table, op, unit)
        written[buffer] |= results
        for way, step in WAY.items():
            leaving[buffer, way] |= results & (slotted.send[op] == step)
    takes = {copy.op: getattr(slots, copy.slot) >= 0 for copy in copies.takes}
    sends = {copy.op: leaving[copy.source, copy.target] for copy in copies.sends}
    stays = {
        copy.op: (getattr(slots, copy.slot) >= 0) & written[copy.source] for copy in copies.stays
    }
    ops = {
        EMBED: taking_part(table.embed, table.stage_of[0]),
        **_cell_columns(table),
        **sends,
        **stays,
        HEAD: taking_part(table.head, table.stage_of[-1]),
        EMBED_GRADIENT: taking_part(table.embed_gradient, table.stage_of[0]),
    }
    if table.steps > 1:
        ops[UPDATE_LAYERS] = table.update >= 0
        ops[UPDATE_ENDS] = of_all(table.update_ends >= 0)
        ops[CHECK_STEP] = of_all(table.check_step >= 0)
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
        _numbers(table.b_microbatch) if table.overlaps else None,
        _numbers(of_all(table.embed)),
        _numbers(of_all(table.head)),
        _numbers(of_all(table.embed_gradient)),
        _numbers(table.update),
        _numbers(of_all(table.update_ends)),
        _numbers(of_all(table.check_step)),
        busy=np.any(list(ops.values()), axis=0).astype(np.int32),
        runs={op: column.astype(np.int32) for op, column in (takes | ops | permuted).items()},
        slots=TickSlots(**slot_columns),
    )


def last_weights(table: Table) -> np.ndarray:
    """int32 [ticks, stages]: 1 in the cell of a local unit's last W on its stage."""
    # A column reversed: argmax finds the last 1, or 0 on a stage without any, which is left out.
    last = np.zeros(table.op.shape, np.int32)
    for unit in range(table.units_per_stage):
        cells = _cells(table, "W", unit)
        ticks = len(cells) - 1 - cells[::-1].argmax(0)
        stages = np.flatnonzero(cells.any(0))
        last[ticks[stages], stages] = 1
    return last


def _numbers(column: np.ndarray) -> np.ndarray:
    # A slice at index −1 would be clamped or wrapped by the program; 0 is valid, and no op that
    # runs reads it.
    return np.maximum(column, 0).astype(np.int32)


def _cells(table: Table, kind: str, unit: int, overlapped: bool = False) -> np.ndarray:
    """bool [ticks, stages]: the cells of one of CELL_OPS on a local unit, overlapped ones or the
    others."""
    cells = (table.op == Op["F" if kind == "K" else kind]) & (table.local_unit == unit)
    # F and K are both cells of Op.F: F where an R follows (it saves inputs alone) or in evaluation,
    # K where it saves what B reads.
    if kind in "FK":
        recomputed = np.array(
            [table.forward_only or table.recomputes(each) for each in range(table.units)]
        )
        cells &= recomputed[table.unit] == (kind == "F")
    return cells & (table.overlapped == overlapped)


def _cell_columns(table: Table) -> dict[str, np.ndarray]:
    """Op of a unit, or of two, → bool [ticks, stages]."""
    # An overlapped cell is one op, `FB0_1` or `KB0_1`, and neither an F nor a B by itself.
    alone = {
        cell_op(kind, unit): _cells(table, kind, unit)
        for unit in range(table.units_per_stage)
        for kind in CELL_OPS
    }
    return alone | {
        name: _cells(table, kind, unit, overlapped=True) & (table.b_local_unit == b_unit)
        for name, (kind, unit, b_unit) in overlapped_ops(table).items()
    }
