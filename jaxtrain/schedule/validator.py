"""Whether a table is right: a runtime that follows it computes every task once, on the right
values, and ends. No JAX here."""

import dataclasses

import numpy as np

from jaxtrain.schedule.table import (
    VOCABULARIES,
    Cell,
    Op,
    Permute,
    Table,
    TableError,
    cell_name,
    message_ways,
    peak_residuals,
    unit_lookup,
)
from jaxtrain.schedule.transport import NEVER, Arrivals, arrivals, departures

ROOM = 1e-9  # of rounding


def check(table: Table, memory: float | None = None, count_weight_stash: bool = False) -> None:
    """Raises TableError, for the first tick that is wrong, unless a runtime that follows the table
    does every task once and right.

    memory: the most residuals that a stage may hold, as `peak_residuals` counts them.
    """
    _check_shape(table)
    _check_cells(table)
    for name in ("head", "embed", "embed_gradient"):
        _check_column(table, name)
    permutes = set(table.permute.tolist())
    if permutes - {*Permute}:
        raise TableError(f"permute holds {sorted(permutes)}: use 0, 1 or 2")
    _check_order(table)
    if memory is not None:
        for stage, peak in enumerate(peak_residuals(table, count_weight_stash)):
            if peak > memory + ROOM:
                raise TableError(
                    f"the residuals of {peak:g} chunks at once are more than the bound of "
                    f"{memory:g}",
                    stage=stage,
                )


# --- every task once ------------------------------------------------------------------------------


def _check_shape(table: Table) -> None:
    """TableError for arrays of wrong shapes and types, and stages that do not exist."""
    stages, microbatches, stage_of = table.stages, table.microbatches, table.stage_of
    if stages < 1 or microbatches < 1 or not stage_of or set(stage_of) - set(range(stages)):
        sizes = f"{stages} stages, {microbatches} microbatches, units on stages {stage_of}"
        raise TableError(f"{sizes}: every number from 1 up, every unit on a stage")
    if len(table.chunk_of) != len(stage_of) or table.vocabulary not in VOCABULARIES:
        raise TableError(
            f"{len(stage_of)} units, {len(table.chunk_of)} chunk numbers, vocabulary "
            f"{table.vocabulary!r}"
        )
    of_stages = dict.fromkeys(("op", "local_unit", "microbatch"), (table.ticks, stages))
    of_ticks = dict.fromkeys(("permute", "head", "embed", "embed_gradient"), (table.ticks,))
    for name, shape in (of_stages | of_ticks).items():
        array = getattr(table, name)
        if array.shape != shape or array.dtype != np.int32:
            raise TableError(f"{name} is {array.dtype} {array.shape}: use int32 {shape}")


@dataclasses.dataclass(frozen=True, eq=False)
class _Cells:
    """The cells that are not idle, by ticks and stages: int arrays of one length."""

    tick: np.ndarray
    stage: np.ndarray
    op: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray

    def __getitem__(self, index: int) -> Cell:
        """The cell at an index."""
        return Cell(int(self.op[index]), int(self.unit[index]), int(self.microbatch[index]))


def _check_cells(table: Table) -> None:
    """TableError for cells that do not exist, do not belong into the table, stand there twice or
    are missing."""
    lookup = unit_lookup(table.stage_of, table.stages)
    ticks, stages = np.nonzero(
        (table.op != Op.IDLE) | (table.local_unit != -1) | (table.microbatch != -1)
    )
    op, local, microbatch = (
        array[ticks, stages] for array in (table.op, table.local_unit, table.microbatch)
    )
    exists = (
        (op >= Op.F)
        & (op <= Op.W)
        & (local >= 0)
        & (local < lookup.shape[1])
        & (microbatch >= 0)
        & (microbatch < table.microbatches)
    )
    op_or_idle = np.where(exists, op, Op.IDLE)
    unit = np.where(exists, lookup[stages, np.where(exists, local, 0)], -1)
    foreign = (unit < 0) | ~_ops_of_units(table)[op_or_idle, unit]
    first = _first_of_equals(
        (op_or_idle.astype(np.int64) * table.units + unit) * table.microbatches + microbatch
    )
    wrong = np.flatnonzero(foreign | (first != np.arange(len(first))))
    cells = _Cells(ticks, stages, op, unit, microbatch)
    if len(wrong):
        index = int(wrong[0])
        tick, stage, name = (
            int(ticks[index]),
            int(stages[index]),
            f"op {op[index]}, unit {local[index]}, microbatch {microbatch[index]}",
        )
        if unit[index] < 0:
            raise TableError(
                f"{name}: no such cell on a stage with {table.stage_of.count(stage)} units",
                tick,
                stage,
            )
        name = cell_name(cells[index], table.stage_of)
        if foreign[index]:
            raise TableError(
                f"{name} does not belong in this table: leave the cell empty", tick, stage
            )
        raise TableError(
            f"{name} stands already in {{}}: use it once",
            tick,
            stage,
            ticks=(int(ticks[first[index]]),),
        )
    _check_missing(table, cells)


def _first_of_equals(keys: np.ndarray) -> np.ndarray:
    """int [keys]: of each key, the index of the one before it that is equal, or its own."""
    first = np.arange(len(keys))
    ordered = np.argsort(keys, kind="stable")
    again = np.flatnonzero(keys[ordered][1:] == keys[ordered][:-1]) + 1
    first[ordered[again]] = ordered[again - 1]
    return first


def _check_missing(table: Table, cells: _Cells) -> None:
    """TableError for tasks of which the table has no cell."""
    present = np.zeros((len(Op), table.units, table.microbatches), bool)
    present[cells.op, cells.unit, cells.microbatch] = True
    missing = _ops_of_units(table)[:, :-1, None] & ~present
    count = int(missing.sum())
    if not count:
        return
    microbatch, op, unit = (int(number) for number in np.argwhere(missing.transpose(2, 0, 1))[0])
    before = (
        Cell(Op.F, unit - 1, microbatch)
        if op == Op.F
        else Cell(int(_earlier_ops(table)[op, unit]), unit, microbatch)
    )
    fix, ticks = "write each task once", []
    if before.unit >= 0 and present[before]:
        fix, ticks = (
            f"write it after {cell_name(before, table.stage_of)} in {{}}",
            [_tick_of(table, before)],
        )
    name = cell_name((op, unit, microbatch), table.stage_of)
    raise TableError(
        f"{name} is missing ({count} in all): {fix}", stage=table.stage_of[unit], ticks=ticks
    )


def _tick_of(table: Table, cell: Cell) -> int:
    """The tick in which a cell stands."""
    cells = (
        (table.op == cell.op) & (table.unit == cell.unit) & (table.microbatch == cell.microbatch)
    )
    return int(np.flatnonzero(cells.any(axis=1))[0])


def _ops_of_units(table: Table) -> np.ndarray:
    """bool [ops, units + 1]: which ops a table of this shape has on each unit; none on the last
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
            fix = f"use 0 to {microbatches - 1}" if microbatches else "leave the column empty"
            raise TableError(f"microbatch {microbatch} does not exist: {fix}", tick, column=name)
        if microbatch in ticks:
            raise TableError(
                f"microbatch {microbatch} stands already in {{}}: use it once",
                tick,
                column=name,
                ticks=(ticks[microbatch],),
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
        fix = f"write it in {{}}, the tick of {cell_name(cell, table.stage_of)}, or {side}"
        rule = f"microbatch {missing} is missing ({microbatches - len(ticks)} in all): {fix}"
        raise TableError(rule, column=name, ticks=(_tick_of(table, cell),))


# --- on the right values --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Fault:
    """Something that is wrong, where a runtime that goes through the ticks would find it: by tick,
    the part of the tick, and stage."""

    tick: int
    phase: int
    stage: int
    error: TableError


def _check_order(table: Table) -> None:
    """TableError for the first thing, as ticks run, that reads what is not there or overwrites what
    has not left."""
    tick, stage = np.nonzero(table.op)
    cells = _Cells(
        tick, stage, *(array[tick, stage] for array in (table.op, table.unit, table.microbatch))
    )
    come = arrivals(table)
    faults = [
        *_early_cells(table, cells, come),
        *_lost_messages(table, cells),
        *_early_columns(table, "head", come.activation[-1], 2),
        *_early_columns(table, "embed_gradient", come.gradient[-1], 3),
    ]
    if faults:
        raise min(faults, key=lambda fault: (fault.tick, fault.phase, fault.stage)).error


def _early_cells(table: Table, cells: _Cells, come: Arrivals) -> list[_Fault]:
    """The first cell whose message or own earlier op is not there in its tick, if there is one."""
    ticks = np.full((len(Op), table.units, table.microbatches), NEVER, np.int32)
    ticks[cells.op, cells.unit, cells.microbatch] = cells.tick
    before = _earlier_ops(table)[cells.op, cells.unit]
    early = (before > 0) & (ticks[before, cells.unit, cells.microbatch] >= cells.tick)
    for op, readable in ((Op.F, come.activation), (Op.B, come.gradient)):
        early |= (cells.op == op) & (readable[cells.unit, cells.microbatch] > cells.tick)
    first = np.flatnonzero(early)[:1].tolist()
    return [
        _Fault(
            int(cells.tick[index]), 0, int(cells.stage[index]), _waits(table, cells, come, index)
        )
        for index in first
    ]


def _waits(table: Table, cells: _Cells, come: Arrivals, index: int) -> TableError:
    """The error of a cell that stands too early."""
    cell, tick, stage = cells[index], int(cells.tick[index]), int(cells.stage[index])
    op, unit, microbatch = cell
    stage_of, name = table.stage_of, cell_name(cell, table.stage_of)
    before = Cell(int(_earlier_ops(table)[op, unit]), unit, microbatch)
    if before.op and (earlier := _tick_of(table, before)) >= tick:
        rule = f"{name} waits for its {cell_name(before, stage_of)} in {{}}: move it after that"
        return TableError(rule, tick, stage, ticks=(earlier,))
    readable = int((come.activation if op == Op.F else come.gradient)[unit, microbatch])
    source = Cell(Op.F, unit - 1, microbatch) if op == Op.F else Cell(Op.B, unit + 1, microbatch)
    if not 0 <= source.unit < table.units:
        column = "embed" if op == Op.F else "head"
        named = int(np.flatnonzero(getattr(table, column) == microbatch)[0])
        rule = (
            f"{name} waits for {column} of microbatch {microbatch} in {{}}: move it to {{}} or "
            "later"
        )
        return TableError(rule, tick, stage, ticks=(named, readable))
    waits, sent = (
        f"{name} waits for {cell_name(source, stage_of)} of stage {stage_of[source.unit]} in {{}}",
        _tick_of(table, source),
    )
    if readable == NEVER:
        return TableError(
            f"{waits}, whose message no permute sends: send it by one in that tick or after",
            tick,
            stage,
            ticks=(sent,),
        )
    return TableError(
        f"{waits}, whose message can be read from {{}} on: move it there or later",
        tick,
        stage,
        ticks=(sent, readable),
    )


def _lost_messages(table: Table, cells: _Cells) -> list[_Fault]:
    """The first cell that overwrites a message in its stage's send buffer, if there is one."""
    ways = message_ways(table.stage_of, table.stages)[cells.op, cells.unit]
    leaves = departures(table.permute)[cells.tick]
    by_buffer = np.lexsort((cells.tick, ways, cells.stage))
    by_buffer = by_buffer[ways[by_buffer] != 0]
    earlier, later = by_buffer[:-1], by_buffer[1:]
    lost = np.all([array[earlier] == array[later] for array in (cells.stage, ways, leaves)], axis=0)
    if not lost.any():
        return []
    later, earlier = later[lost], earlier[lost]
    first = int(np.argmin(later))  # cells stand by ticks and stages
    over, under = int(later[first]), int(earlier[first])
    names = [cell_name(cells[index], table.stage_of) for index in (over, under)]
    rule = f"{names[0]} overwrites the message of {names[1]} in {{}}: send that by a permute before"
    tick, stage = int(cells.tick[over]), int(cells.stage[over])
    return [_Fault(tick, 1, stage, TableError(rule, tick, stage, ticks=(int(cells.tick[under]),)))]


def _early_columns(table: Table, name: str, readable: np.ndarray, phase: int) -> list[_Fault]:
    """The first tick whose head or embedding's gradient reads what is not made, if there is one.
    readable: int [microbatches]."""
    column = getattr(table, name)
    ticks = np.flatnonzero(column >= 0)
    early = ticks[readable[column[ticks]] > ticks][:1].tolist()
    faults = []
    for tick in early:
        microbatch = int(column[tick])
        source = (
            Cell(Op.F, table.units - 1, microbatch) if name == "head" else Cell(Op.B, 0, microbatch)
        )
        waits = (
            f"microbatch {microbatch} waits for {cell_name(source, table.stage_of)} of stage "
            f"{table.stage_of[source.unit]} in {{}}"
        )
        error = TableError(
            f"{waits}: not before it", tick, column=name, ticks=(int(readable[microbatch]),)
        )
        faults.append(_Fault(tick, phase, 0, error))
    return faults
