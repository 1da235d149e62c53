"""The independent clock: each stage goes through its cells on its own and waits for messages only.
No JAX here."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.clock import (
    CELL,
    EMBED,
    HEAD,
    ColumnOp,
    Timeline,
    Times,
    column_ops,
    durations,
    records,
)
from jaxtrain.schedule.table import Cell, Op, Table, cell_name, message_ways


def independent(
    table: Table, times: Times, shares: Sequence[float] | None = None, fused_backward: bool = False
) -> Timeline:
    """The timeline of stages that wait for messages only, each in its own order; events stand by
    stage and time."""
    messages = _Messages(table.units, table.microbatches)
    parts = [_cell_steps(table, times, shares, messages, fused_backward)]
    meetings = 0
    for part, op in column_ops(table, times).items():
        parts.append(_column_steps(table, times, part, op, messages, meetings))
        meetings += len(parts[-1]) // table.stages if op.together else 0
    steps = np.concatenate(parts)
    steps = steps[np.lexsort((steps["part"], steps["tick"], steps["stage"]))]
    if fused_backward:
        _check_fused(table, steps)
    start = _run(table, steps, messages.count, meetings)
    shown = (steps["time"] > 0) | (steps["unit"] >= 0)
    end = start + steps["time"]
    steps, start, end = steps[shown], start[shown], end[shown]
    return Timeline(steps["stage"], steps["name"], steps["unit"], steps["microbatch"], start, end)


STEP = np.dtype(
    [
        ("stage", int),
        ("tick", int),
        ("part", int),  # of the tick
        ("name", int),  # a place in NAMES
        ("unit", int),  # −1: of none
        ("microbatch", int),
        ("needs", int),  # the number of a message, −1: none
        ("gives", int),  # the number of a message, −1: none
        ("lag", float),  # from when the message can be read until the step can begin
        ("delay", float),  # from the step's end until its message can be read
        ("time", float),
        ("meeting", int),  # the number of what all stages do together, −1: nothing
    ]
)  # what a stage does after another: a cell, or a column's op


class NotFused(ValueError):
    """A table whose W's stand apart, and a gradient that is to leave after W; the text is one
    line."""


@dataclasses.dataclass(frozen=True)
class _Messages:
    """Numbers of messages: activations for units 0 … units (the head), gradients for units −1 (the
    embedding's) … units − 1."""

    units: int
    microbatches: int

    @property
    def count(self) -> int:
        """Messages in all."""
        return (2 * self.units + 2) * self.microbatches

    def activation(self, unit: Any, microbatch: np.ndarray) -> np.ndarray:
        """The input of a unit."""
        return unit * self.microbatches + microbatch

    def gradient(self, unit: Any, microbatch: np.ndarray) -> np.ndarray:
        """The gradient of a unit's output."""
        return (self.units + 2 + unit) * self.microbatches + microbatch


def _cell_steps(
    table: Table,
    times: Times,
    shares: Sequence[float] | None,
    messages: _Messages,
    fused_backward: bool,
) -> np.ndarray:
    """The steps of the cells, STEP [cells]."""
    tick, stage = np.nonzero(table.op)
    op, unit, microbatch = (
        array[tick, stage] for array in (table.op, table.unit, table.microbatch)
    )
    ways = message_ways(table.stage_of, table.stages)
    way = ways[op, unit]
    forward, backward = op == Op.F, op == Op.B
    needs = np.select(
        [forward, backward],
        [messages.activation(unit, microbatch), messages.gradient(unit, microbatch)],
        -1,
    )
    gives = np.select(
        [forward, backward],
        [messages.activation(unit + 1, microbatch), messages.gradient(unit - 1, microbatch)],
        -1,
    )
    if fused_backward:  # what moves leaves after W
        gives[backward & (way != 0)] = -1
        weights = op == Op.W
        gives[weights] = messages.gradient(unit - 1, microbatch)[weights]
        way[weights] = ways[Op.B, unit[weights]]
    return records(
        STEP,
        stage=stage,
        tick=tick,
        part=CELL,
        name=op,
        unit=unit,
        microbatch=microbatch,
        needs=needs,
        gives=gives,
        lag=0.0,
        delay=np.where(way != 0, times.message, 0.0),
        time=durations(table, times, shares)[op, unit],
        meeting=-1,
    )


def _column_steps(
    table: Table, times: Times, part: int, op: ColumnOp, messages: _Messages, meetings: int
) -> np.ndarray:
    """The steps of a column's op, STEP [stages that take part · microbatches]; meetings are
    numbered from `meetings` on."""
    ticks = np.flatnonzero(op.column >= 0)
    microbatch = op.column[ticks]
    needs, gives = np.full(len(ticks), -1), np.full(len(ticks), -1)
    if part == EMBED:
        gives = messages.activation(0, microbatch)
    elif part == HEAD:
        needs, gives = (
            messages.activation(table.units, microbatch),
            messages.gradient(table.units - 1, microbatch),
        )
    else:
        needs = messages.gradient(-1, microbatch)
    stages = np.arange(table.stages) if op.together else np.array([op.home])
    return records(
        STEP,
        stage=stages[:, None],
        tick=ticks,
        part=part,
        name=op.name,
        unit=-1,
        microbatch=microbatch,
        needs=needs,
        gives=gives,
        lag=times.message if op.together else 0.0,
        delay=0.0,
        time=op.time,
        meeting=np.arange(len(ticks)) + meetings if op.together else -1,
    )


def _check_fused(table: Table, steps: np.ndarray) -> None:
    """NotFused for a B whose W is not the next cell of its stage."""
    cells = steps[steps["part"] == CELL]
    following = np.roll(cells, -1)
    same = np.all(
        [cells[name] == following[name] for name in ("stage", "unit", "microbatch")], axis=0
    )
    alone = cells[(cells["name"] == Op.B) & ~(same & (following["name"] == Op.W))]
    if len(alone):
        cell = Cell(int(Op.B), int(alone[0]["unit"]), int(alone[0]["microbatch"]))
        raise NotFused(
            f"fused_backward needs W right after its B; {table.name} has "
            f"{cell_name(cell, table.stage_of)} on its own"
        )


def _run(table: Table, steps: np.ndarray, messages: int, meetings: int) -> np.ndarray:
    """float64 [steps]: when each step starts. Lists and one loop: there are hundreds of thousands
    of steps, each waits for others."""
    needs, gives, meeting = (
        steps["needs"].tolist(),
        steps["gives"].tolist(),
        steps["meeting"].tolist(),
    )
    lag, delay, time = steps["lag"].tolist(), steps["delay"].tolist(), steps["time"].tolist()
    bounds = np.searchsorted(steps["stage"], np.arange(table.stages + 1)).tolist()
    readable = [-1.0] * messages  # when each message can be read
    arrived, begins, counted = [0] * meetings, [0.0] * meetings, [False] * len(needs)
    start = [0.0] * len(needs)
    following, clock = bounds[:-1], [0.0] * table.stages
    unfinished = [stage for stage in range(table.stages) if following[stage] < bounds[stage + 1]]
    while unfinished:
        before = list(following)
        for stage in unfinished:
            now, step, end = clock[stage], following[stage], bounds[stage + 1]
            while step < end:
                begin = now
                if needs[step] >= 0:
                    come = readable[needs[step]]
                    if come < 0:
                        break
                    begin = max(begin, come + lag[step])
                if meeting[step] >= 0:
                    together = meeting[step]
                    if not counted[step]:
                        counted[step], arrived[together], begins[together] = (
                            True,
                            arrived[together] + 1,
                            max(begins[together], begin),
                        )
                    if arrived[together] < table.stages:
                        break
                    begin = begins[together]
                start[step] = begin
                now = begin + time[step]
                if gives[step] >= 0:
                    readable[gives[step]] = now + delay[step]
                step += 1
            clock[stage], following[stage] = now, step
        if following == before:
            raise ValueError(
                f"{table.name}: stages {unfinished} wait for each other; check the table first"
            )
        unfinished = [stage for stage in unfinished if following[stage] < bounds[stage + 1]]
    return np.array(start)
