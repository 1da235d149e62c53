"""Checks of a table: a runtime that executes it computes every task once, with correct values, and
ends.

    every task once           shapes, cells that exist, none twice, none missing, columns
    correct values            what an op reads has arrived, and no message is overwritten
    correct parameters        in a table of several steps, each op stands between two updates

Each check relies on those before it, and reports the fault of the earliest tick. Errors name a cell
as CSV files do, F0.3, and what to change. Begin with `check`. No JAX here.
"""

import numpy as np

from jaxtrain.schedule.table import (
    ROUNDING,
    VOCABULARIES,
    Cell,
    CellArrays,
    Op,
    Permute,
    Table,
    TableError,
    cell_name,
    message_ways,
    peak_residuals,
    unit_lookup,
)
from jaxtrain.schedule.transport import NEVER, Arrivals, arrivals, buffer_numbers, departures


def check(table: Table, memory: float | None = None, count_weight_stash: bool = False) -> None:
    """Raises TableError, for the earliest tick that is wrong, unless a runtime that follows the
    table does every task once, on correct values.

    memory: the most residuals that a stage may hold, as `peak_residuals` counts them.
    """
    _check_shape(table)
    _check_cells(table)
    _check_missing(table)
    for name in ("head", "embed", "embed_gradient"):
        _check_column(table, name)
    permutes = set(table.permute.tolist())
    if permutes - {*Permute}:
        raise TableError(f"permute holds {sorted(permutes)}", use="0, 1 or 2")
    _check_order(table)
    _check_steps(table)
    if memory is not None:
        for stage, peak in enumerate(peak_residuals(table, count_weight_stash)):
            if peak > memory + ROUNDING:
                raise TableError(
                    f"the residuals of {peak:g} chunks at once are more than the bound of "
                    f"{memory:g}",
                    stage=stage,
                )


# --- every task once ------------------------------------------------------------------------------


def _check_shape(table: Table) -> None:
    """Raises TableError for arrays of wrong shapes and types, and stages that do not exist."""
    stages, microbatches, stage_of = table.stages, table.microbatches, table.stage_of
    if stages < 1 or microbatches < 1 or not stage_of or set(stage_of) - set(range(stages)):
        raise TableError(
            f"{stages} stages, {microbatches} microbatches, units on stages {stage_of}: every "
            "number from 1 up, every unit on a stage"
        )
    if len(table.chunk_of) != len(stage_of) or table.vocabulary not in VOCABULARIES:
        raise TableError(
            f"{len(stage_of)} units, {len(table.chunk_of)} chunk numbers, vocabulary "
            f"{table.vocabulary!r}"
        )
    if table.steps < 1 or microbatches % table.steps:
        raise TableError(f"{table.steps} steps do not divide {microbatches} microbatches")
    if len(table.saved) not in (0, len(stage_of)):
        raise TableError(f"{len(stage_of)} units, {len(table.saved)} fractions of saved layers")
    of_cells = ("op", "local_unit", "microbatch", "b_local_unit", "b_microbatch")
    of_stages = dict.fromkeys(of_cells, (table.ticks, stages))
    of_ticks = dict.fromkeys(("permute", "head", "embed", "embed_gradient"), (table.ticks,))
    for name, shape in (of_stages | of_ticks).items():
        array = getattr(table, name)
        if array.shape != shape or array.dtype != np.int32:
            raise TableError(f"{name} is {array.dtype} {array.shape}", use=f"int32 {shape}")


def _check_cells(table: Table) -> None:
    """Raises TableError for a cell that does not exist, does not belong in the table, or stands
    there twice."""
    lookup = unit_lookup(table.stage_of, table.stages)
    ticks, stages = np.nonzero(
        (table.op != Op.IDLE) | (table.local_unit != -1) | (table.microbatch != -1)
    )
    op, local, microbatch = (
        array[ticks, stages] for array in (table.op, table.local_unit, table.microbatch)
    )
    # Not `table.busy`: it reads units that may not exist. What is no idle cell here has an op, a
    # unit or a microbatch, sensible or not.
    b_ticks, b_stages = np.nonzero((table.b_local_unit != -1) | (table.b_microbatch != -1))
    alone = np.flatnonzero(table.op[b_ticks, b_stages] != Op.F)
    if len(alone):
        tick, stage = int(b_ticks[alone[0]]), int(b_stages[alone[0]])
        raise TableError("a B is overlapped with a cell that is no F", tick, stage, use="an F")
    if len(b_ticks):
        order = np.lexsort((np.concatenate([stages, b_stages]), np.concatenate([ticks, b_ticks])))
        joined = lambda a, b: np.concatenate([a, b])[order]
        op = joined(op, np.full_like(b_ticks, Op.B))
        local = joined(local, table.b_local_unit[b_ticks, b_stages])
        microbatch = joined(microbatch, table.b_microbatch[b_ticks, b_stages])
        ticks, stages = joined(ticks, b_ticks), joined(stages, b_stages)
    exists = (
        (op >= Op.F)
        & (op <= Op.W)
        & (local >= 0)
        & (local < lookup.shape[1])
        & (microbatch >= 0)
        & (microbatch < table.microbatches)
    )
    op_or_idle = np.where(exists, op, Op.IDLE)
    # Cells that do not exist get op 0 and unit −1, so that the tables below can be read for all.
    unit = np.where(exists, lookup[stages, np.where(exists, local, 0)], -1)
    foreign = (unit < 0) | ~_ops_of_units(table)[op_or_idle, unit]
    # Of each cell, the one before it that is equal, or itself: equal cells have equal keys, and a
    # stable sort keeps them in the order of their ticks. Keys 7 3 7 become 3 7 7, from cells 1 0 2,
    # so cell 2 repeats cell 0.
    keys = (op_or_idle.astype(np.int64) * table.units + unit) * table.microbatches + microbatch
    equal_before, ordered = np.arange(len(keys)), np.argsort(keys, kind="stable")
    repeated = np.flatnonzero(keys[ordered][1:] == keys[ordered][:-1]) + 1
    equal_before[ordered[repeated]] = ordered[repeated - 1]
    wrong = np.flatnonzero(foreign | (equal_before != np.arange(len(keys))))
    if not len(wrong):
        return
    i = int(wrong[0])
    tick, stage = int(ticks[i]), int(stages[i])
    if unit[i] < 0:
        raise TableError(
            f"op {op[i]}, unit {local[i]}, microbatch {microbatch[i]}: no such cell on a stage "
            f"with {table.stage_of.count(stage)} units",
            tick,
            stage,
        )
    name = cell_name((op[i], unit[i], microbatch[i]), table.stage_of)
    if foreign[i]:
        raise TableError(f"{name} does not belong in this table: leave the cell empty", tick, stage)
    earlier = int(ticks[equal_before[i]])
    raise TableError(f"{name} stands already in {{}}", tick, stage, ticks=(earlier,), use="it once")


def _check_missing(table: Table) -> None:
    """Raises TableError for tasks of which the table has no cell."""
    present = np.zeros((len(Op), table.units, table.microbatches), bool)
    present[table.busy.op, table.busy.unit, table.busy.microbatch] = True
    # [ops, units, 1] against [ops, units, microbatches]
    missing = _ops_of_units(table)[:, :-1, None] & ~present
    if not missing.any():
        return
    # The missing task to name: of the lowest microbatch the earliest op, of that the lowest unit.
    microbatch, op, unit = (int(number) for number in np.argwhere(missing.transpose(2, 0, 1))[0])
    before = Cell(int(_earlier_ops(table)[op, unit]), unit, microbatch)
    if op == Op.F:
        before = Cell(Op.F, unit - 1, microbatch)
    fix, ticks = "write each task once", []
    if before.unit >= 0 and present[before]:
        fix = f"write it after {cell_name(before, table.stage_of)} in {{}}"
        ticks = [_tick_of(table, before)]
    name = cell_name((op, unit, microbatch), table.stage_of)
    raise TableError(
        f"{name} is missing ({int(missing.sum())} in all): {fix}",
        stage=table.stage_of[unit],
        ticks=ticks,
    )


def _tick_of(table: Table, cell: Cell) -> int:
    """The tick in which a cell stands."""
    cells = table.busy
    same = (cells.op == cell.op) & (cells.unit == cell.unit) & (cells.microbatch == cell.microbatch)
    return int(cells.tick[same][0])


def _ops_of_units(table: Table) -> np.ndarray:
    """bool [ops, units + 1]: the ops that a table of this shape has on each unit; none on the last
    column, which stands for no unit."""
    ops = np.zeros((len(Op), table.units + 1), bool)
    for unit in range(table.units):
        ops[list(table.ops_of(unit)), unit] = True
    return ops


def _earlier_ops(table: Table) -> np.ndarray:
    """int8 [ops, units]: the op that must stand before each on the same unit and microbatch, 0 for
    none."""
    earlier = np.zeros((len(Op), table.units), np.int8)
    for unit in range(table.units):
        ops = table.ops_of(unit)
        earlier[list(ops[1:]), unit] = ops[:-1]
    return earlier


def _check_column(table: Table, name: str) -> None:
    """TableError unless head, embed or embed_gradient names every microbatch once."""
    microbatches = 0 if table.forward_only and name == "embed_gradient" else table.microbatches
    ticks: dict[int, int] = {}
    for tick, microbatch in enumerate(getattr(table, name).tolist()):
        if microbatch == -1:
            continue
        if not 0 <= microbatch < microbatches:
            rule = f"microbatch {microbatch} does not exist"
            if not microbatches:
                raise TableError(f"{rule}: leave the column empty", tick, column=name)
            raise TableError(rule, tick, column=name, use=f"0 to {microbatches - 1}")
        if microbatch in ticks:
            raise TableError(
                f"microbatch {microbatch} stands already in {{}}",
                tick,
                column=name,
                ticks=(ticks[microbatch],),
                use="it once",
            )
        ticks[microbatch] = tick
    if len(ticks) < microbatches:
        missing = min(set(range(microbatches)) - set(ticks))
        op, unit = {
            "embed": (Op.F, 0),
            "head": (Op.F, table.units - 1),
            "embed_gradient": (Op.B, 0),
        }[name]
        cell = Cell(op, unit, missing)
        side = "before" if name == "embed" else "after"
        raise TableError(
            f"microbatch {missing} is missing ({microbatches - len(ticks)} in all): write it in "
            f"{{}}, the tick of {cell_name(cell, table.stage_of)}, or {side}",
            column=name,
            ticks=(_tick_of(table, cell),),
        )


# --- correct values -------------------------------------------------------------------------------


def _check_order(table: Table) -> None:
    """Raises TableError for the earliest tick, and part of it, that reads what is not there or
    overwrites a message that has not left."""
    readable = arrivals(table)
    faults = [
        _early_cell(table, readable),
        _lost_message(table),
        _early_column(table, "head", readable.activation[-1]),
        _early_column(table, "embed_gradient", readable.gradient[-1]),
    ]
    # In a tick the cell comes before the head, and the head before the embedding's gradient.
    in_order = [(fault.tick, part, fault) for part, fault in enumerate(faults) if fault is not None]
    if in_order:
        raise min(in_order)[-1]


def _cell_at(cells: CellArrays, index: int) -> Cell:
    return Cell(int(cells.op[index]), int(cells.unit[index]), int(cells.microbatch[index]))


def _early_cell(table: Table, readable: Arrivals) -> TableError | None:
    """The fault of the earliest cell whose message or own earlier op is not there in its tick."""
    # A cell waits for the op before it on its own unit and microbatch (`before`, such as R for B),
    # and F and B wait for a message as well.
    cells = table.busy
    ticks = np.full((len(Op), table.units, table.microbatches), NEVER, np.int32)
    ticks[cells.op, cells.unit, cells.microbatch] = cells.tick
    before = _earlier_ops(table)[cells.op, cells.unit]
    early = (before > 0) & (ticks[before, cells.unit, cells.microbatch] >= cells.tick)
    for op, arrival in ((Op.F, readable.activation), (Op.B, readable.gradient)):
        early |= (cells.op == op) & (arrival[cells.unit, cells.microbatch] > cells.tick)
    if not early.any():
        return None
    index = int(np.argmax(early))
    cell, tick, stage = _cell_at(cells, index), int(cells.tick[index]), int(cells.stage[index])
    rule, named = _waits(table, cell, tick, Cell(int(before[index]), *cell[1:]), readable)
    return TableError(
        f"{cell_name(cell, table.stage_of)} waits for {rule}", tick, stage, ticks=named
    )


def _waits(
    table: Table, cell: Cell, tick: int, before: Cell, readable: Arrivals
) -> tuple[str, tuple[int, ...]]:
    """Returns (what a cell waits for that stands too early, and the fix; the ticks named there).
    before: the op of its own unit on which it waits, IDLE for none."""
    op, unit, microbatch = cell
    if before.op and (earlier := _tick_of(table, before)) >= tick:
        return f"its {cell_name(before, table.stage_of)} in {{}}: move it after that", (earlier,)
    arrival = int((readable.activation if op == Op.F else readable.gradient)[unit, microbatch])
    source = Cell(op, unit - 1 if op == Op.F else unit + 1, microbatch)
    if not 0 <= source.unit < table.units:
        column = "embed" if op == Op.F else "head"
        column_tick = int(np.flatnonzero(getattr(table, column) == microbatch)[0])
        return (
            f"{column} of microbatch {microbatch} in {{}}: move it to {{}} or later",
            (column_tick, arrival),
        )
    name = cell_name(source, table.stage_of)
    source_tick = _tick_of(table, source)
    message = f"{name} of stage {table.stage_of[source.unit]} in {{}}, whose message"
    if arrival == NEVER:
        return f"{message} no permute sends: send it by one in that tick or after", (source_tick,)
    return (
        f"{message} can be read from {{}} on: move it there or later",
        (source_tick, arrival),
    )


def _lost_message(table: Table) -> TableError | None:
    """The fault of the earliest cell that overwrites a message in its stage's send buffer."""
    # Two messages that follow each other in one buffer and leave by one permute: the later one has
    # overwritten the earlier one. Sorted by stage, buffer and tick they are neighbours.
    cells = table.busy
    ways = message_ways(table.stage_of, table.stages)[cells.op, cells.unit]
    leaves = departures(table.permute)[cells.tick]
    buffer = buffer_numbers(table, cells.op, ways.astype(int))
    by_buffer = np.lexsort((cells.tick, buffer, cells.stage))
    by_buffer = by_buffer[ways[by_buffer] != 0]
    earlier, later = by_buffer[:-1], by_buffer[1:]
    same = [array[earlier] == array[later] for array in (cells.stage, buffer, leaves)]
    lost = np.all(same, axis=0)
    if not lost.any():
        return None
    later, earlier = later[lost], earlier[lost]
    earliest = int(np.argmin(later))  # cells stand by ticks and stages
    fault, lost_cell = int(later[earliest]), int(earlier[earliest])
    writer, message = (cell_name(_cell_at(cells, i), table.stage_of) for i in (fault, lost_cell))
    return TableError(
        f"{writer} overwrites the message of {message} in {{}}: send that by a permute before",
        int(cells.tick[fault]),
        int(cells.stage[fault]),
        ticks=(int(cells.tick[lost_cell]),),
    )


def _early_column(table: Table, name: str, readable: np.ndarray) -> TableError | None:
    """The fault of the earliest tick whose head or embedding's gradient reads what is not made.
    readable: int [microbatches]."""
    column = getattr(table, name)
    ticks = np.flatnonzero(column >= 0)
    early = ticks[readable[column[ticks]] > ticks]
    if not len(early):
        return None
    tick, microbatch = int(early[0]), int(column[early[0]])
    source = Cell(Op.F, table.units - 1, microbatch)
    if name == "embed_gradient":
        source = Cell(Op.B, 0, microbatch)
    return TableError(
        f"microbatch {microbatch} waits for {cell_name(source, table.stage_of)} of stage "
        f"{table.stage_of[source.unit]} in {{}}: not before it",
        tick,
        column=name,
        ticks=(int(readable[microbatch]),),
    )


# --- correct parameters ---------------------------------------------------------------------------


def _check_steps(table: Table) -> None:
    """Raises TableError, in a table of several steps, for the earliest op that stands on its stage
    before an update whose result it needs: after each stage's last W of a step comes its update,
    and only then an op of the next step. Head and embedding have theirs with the first unit's
    stage."""
    # On a stage the steps of its ops may only grow from tick to tick: 0 0 0 1 1, never 0 1 0. Its
    # update of step 0 follows its last W of it, and so precedes all ops of step 1.
    per_step = table.microbatches_per_step
    for stage in range(table.stages) if table.steps > 1 else ():
        ticks = np.flatnonzero(table.op[:, stage])
        step = table.microbatch[ticks, stage] // per_step
        late = np.flatnonzero(np.maximum.accumulate(step) > step)
        if len(late):
            tick = int(ticks[late[0]])
            op, unit, microbatch = (
                int(a[tick, stage]) for a in (table.op, table.unit, table.microbatch)
            )
            raise TableError(
                f"{cell_name((op, unit, microbatch), table.stage_of)} of step {step[late[0]]} "
                "follows an op of a later step: move it before",
                tick,
                stage,
            )
    for name in ("head", "embed", "embed_gradient") if table.steps > 1 else ():
        column = getattr(table, name)
        for tick in np.flatnonzero(column >= 0).tolist():
            step = int(column[tick]) // per_step
            (updated,) = np.flatnonzero(table.update_ends == step)
            (before,) = np.flatnonzero(table.update_ends == step - 1) if step else (-1,)
            if not before < tick <= updated:
                raise TableError(
                    f"microbatch {column[tick]} of step {step}: move it between the updates of "
                    f"step {step - 1} and step {step}",
                    tick,
                    column=name,
                )
