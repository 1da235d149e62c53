"""The independent clock: a stage goes through its cells in order and waits only for messages, as
papers on schedules assume. No permute couples it with its neighbours.

Every op becomes an event, which may need a message and may make one; messages have numbers. The
stages then go through their events as far as messages allow, in turn, until all are done:

    2 stages, F = 2, a message takes 1       event          needs   gives   begins   readable at
                                 stage 0     F of unit 0      –       1        0          3
                                 stage 1     F of unit 1      1       2        3          5

Begin with `independent`; `_cell_events` and `_column_events` say what each op needs and makes, and
`_independent_starts` finds the times. No JAX here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.clocks.events import (
    CELL,
    EMBED,
    HEAD,
    ColumnOp,
    column_ops,
    make_events,
    op_durations,
    overlap_factors,
    timeline_of,
    update_events,
)
from jaxtrain.schedule.clocks.times import Timeline, Times
from jaxtrain.schedule.table import Cell, Op, ScheduleError, Table, cell_name, message_ways


class NotFused(ScheduleError):
    """Raised for `fused_backward` with a table in which a W does not follow its B at once; the text
    is one line."""


def independent(
    table: Table, times: Times, shares: Sequence[float] | None = None, fused_backward: bool = False
) -> Timeline:
    """The timeline by the independent clock, ordered by stage and time.

    fused_backward: B and W count as one op, so a gradient leaves its stage after W. Raises NotFused
        if a W does not follow its B at once.
    """
    messages = _Messages(table.units, table.microbatches)
    parts = [
        _cell_events(table, times, shares, messages, fused_backward),
        update_events(table, times, joint_op=-1, needs=-1, gives=-1),
    ]
    joint_ops = 0
    for part, op in column_ops(table, times).items():
        # The number of the first joint op: those of earlier columns have the numbers below it.
        parts.append(_column_events(table, times, part, op, messages, joint_ops))
        joint_ops += len(parts[-1]) // table.stages if op.together else 0
    events = np.concatenate(parts)
    events = events[np.lexsort((events["part"], events["tick"], events["stage"]))]
    if fused_backward:
        _check_fused(table, events[events["part"] == CELL])
    events["start"] = _independent_starts(table, events, messages.count, joint_ops)
    # Column ops and updates that take no time are left out; cells are shown, however short.
    return timeline_of(events[(events["time"] > 0) | (events["unit"] >= 0)])


@dataclasses.dataclass(frozen=True)
class _Messages:
    """The numbering of messages: activations for units 0 … units (the head), gradients for units −1
    (the embedding) … units − 1."""

    # 2 units, 3 microbatches: activations of unit 0 are 0 to 2, of unit 1 3 to 5, of the head 6 to
    # 8; gradients for the embedding are 9 to 11, of unit 0 12 to 14, of unit 1 15 to 17.

    units: int
    microbatches: int

    @property
    def count(self) -> int:
        """The number of all messages."""
        return (2 * self.units + 2) * self.microbatches

    def activation(self, unit: Any, microbatch: np.ndarray) -> np.ndarray:
        """The number of the message with a unit's input."""
        return unit * self.microbatches + microbatch

    def gradient(self, unit: Any, microbatch: np.ndarray) -> np.ndarray:
        """The number of the message with the gradient of a unit's output."""
        return (self.units + 2 + unit) * self.microbatches + microbatch


def _cell_events(
    table: Table,
    times: Times,
    shares: Sequence[float] | None,
    messages: _Messages,
    fused_backward: bool,
) -> np.ndarray:
    """The events of the independent clock for the table's cells, EVENT [cells]; their starts are 0
    until `_independent_starts` finds them.

    messages: numbers the messages that events read and make
    fused_backward: W is part of B, so a gradient leaves its stage after W
    """
    tick, stage, op, unit, microbatch = table.busy
    ways = message_ways(table.stage_of, table.stages)
    way = ways[op, unit]
    forward, backward, weights = (op == kind for kind in (Op.F, Op.B, Op.W))
    needs = np.select(
        [forward, backward],
        [messages.activation(unit, microbatch), messages.gradient(unit, microbatch)],
        -1,
    )
    # The F of an overlapped cell is the event before its B. It waits for the message that its B
    # reads, since both begin together, and its own message leaves at the end of both.
    joined = forward & table.overlapped[tick, stage]
    needs_too = np.full(len(op), -1)
    needs_too[joined] = needs[1:][joined[:-1]]
    durations = op_durations(table, times, shares)
    factors = overlap_factors(table, times, shares, durations)
    time = durations[op, unit] * factors[tick, stage]
    delay = np.where(way != 0, times.message, 0.0)
    delay[joined] += time[1:][joined[:-1]]
    gradient = messages.gradient(unit - 1, microbatch)
    gives = np.select(
        [forward, backward], [messages.activation(unit + 1, microbatch), gradient], -1
    )
    if fused_backward:
        # A gradient that goes to another stage leaves after W. One that stays is there after B,
        # for the next op on the stage is the W anyway.
        gives[backward & (way != 0)] = -1
        gives[weights] = gradient[weights]
        way[weights] = ways[Op.B, unit[weights]]
        delay[weights] = np.where(way[weights] != 0, times.message, 0.0)
    return make_events(
        stage=stage,
        tick=tick,
        part=CELL,
        name=op,
        unit=unit,
        microbatch=microbatch,
        needs=needs,
        needs_too=needs_too,
        gives=gives,
        delay=delay,
        time=time,
        joint_op=-1,
    )


def _column_events(
    table: Table, times: Times, part: int, op: ColumnOp, messages: _Messages, joint_ops: int
) -> np.ndarray:
    """The events of a column's op, EVENT [stages that take part · microbatches].

    part: the part of a tick; joint_ops: the number of the first joint op
    """
    ticks = np.flatnonzero(op.column >= 0)
    microbatch = op.column[ticks]
    needs, gives = np.full(len(ticks), -1), np.full(len(ticks), -1)
    if part == EMBED:
        gives = messages.activation(0, microbatch)
    elif part == HEAD:
        needs = messages.activation(table.units, microbatch)
        gives = messages.gradient(table.units - 1, microbatch)
    else:
        needs = messages.gradient(-1, microbatch)
    return make_events(
        stage=op.stages(table.stages)[:, None],
        tick=ticks,
        part=part,
        name=op.name,
        unit=-1,
        microbatch=microbatch,
        needs=needs,
        needs_too=-1,
        gives=gives,
        lag=times.message if op.together else 0.0,
        time=op.time,
        joint_op=np.arange(len(ticks)) + joint_ops if op.together else -1,
    )


def _check_fused(table: Table, cells: np.ndarray) -> None:
    """Raises NotFused if the cell after a B on its stage is not its W. cells: EVENT, ordered by
    stage and tick."""
    following = np.roll(cells, -1)
    same = np.all(
        [cells[name] == following[name] for name in ("stage", "unit", "microbatch")], axis=0
    )
    separate = cells[(cells["name"] == Op.B) & ~(same & (following["name"] == Op.W))]
    if len(separate):
        cell = Cell(int(Op.B), int(separate[0]["unit"]), int(separate[0]["microbatch"]))
        raise NotFused(
            f"fused_backward needs W right after its B; {table.name} has "
            f"{cell_name(cell, table.stage_of)} on its own"
        )


def _independent_starts(
    table: Table, events: np.ndarray, messages: int, joint_ops: int
) -> np.ndarray:
    """The start of each event, float64 [events].

    events: EVENT, ordered by stage and by their order on it
    messages, joint_ops: their numbers

    Raises ScheduleError for stages that wait for each other.
    """
    # Lists and one loop: an event waits for others, so nothing here can be done for all events at
    # once, and with hundreds of thousands of them each NumPy scalar would cost.
    needs, needs_too, gives, joint_op, lag, delay, time = (
        events[name].tolist()
        for name in ("needs", "needs_too", "gives", "joint_op", "lag", "delay", "time")
    )
    bounds = np.searchsorted(events["stage"], np.arange(table.stages + 1)).tolist()
    readable = [-1.0] * messages  # when each message can be read
    # Of each joint op: how many stages have come to it, and the latest time at which one could
    # begin. A stage may come to its event in several rounds, and is counted once.
    arrived, begins, counted = [0] * joint_ops, [0.0] * joint_ops, [False] * len(needs)
    start = [0.0] * len(needs)
    following, clock = bounds[:-1], [0.0] * table.stages
    unfinished = [stage for stage in range(table.stages) if following[stage] < bounds[stage + 1]]
    # A round takes each stage as far as it comes without messages that are still to be made. A
    # round in which no stage moves is a deadlock.
    while unfinished:
        before = list(following)
        for stage in unfinished:
            now, event, end = clock[stage], following[stage], bounds[stage + 1]
            while event < end:
                begin = now
                if needs[event] >= 0:
                    arrival = readable[needs[event]]
                    if arrival < 0:
                        break
                    begin = max(begin, arrival + lag[event])
                if needs_too[event] >= 0:
                    arrival = readable[needs_too[event]]
                    if arrival < 0:
                        break
                    begin = max(begin, arrival)
                if joint_op[event] >= 0:
                    together = joint_op[event]
                    if not counted[event]:
                        counted[event] = True
                        arrived[together] += 1
                        begins[together] = max(begins[together], begin)
                    if arrived[together] < table.stages:
                        break
                    begin = begins[together]
                start[event] = begin
                now = begin + time[event]
                if gives[event] >= 0:
                    readable[gives[event]] = now + delay[event]
                event += 1
            clock[stage], following[stage] = now, event
        if following == before:
            raise ScheduleError(
                f"{table.name}: stages {unfinished} wait for each other; check the table first"
            )
        unfinished = [stage for stage in unfinished if following[stage] < bounds[stage + 1]]
    return np.array(start)
