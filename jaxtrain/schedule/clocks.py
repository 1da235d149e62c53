"""Two clocks: when each op of a table starts and ends on each stage.

    independent   a stage goes through its cells on its own and waits for messages only, as papers
                  on schedules assume
    coupled       the ticks as the runtime executes them: a permute is one operation of all stages,
                  so a stage waits for its neighbours

The coupled clock of one tick on stage s, for its neighbours n (those it exchanges messages with):

    end[s] = start[s] + cell
    no permute       next start[s] = end[s]
    late permute     next start[s] = max(end[s], end[n] + message)      begins when the op is done
    early permute    next start[s] = max(end[s], start[n] + message)    begins with the tick, under
                                                                        the op

A tick's head takes `head` on the last unit's stage if that computes it alone. With the vocabulary
over all stages it begins when all have come to it and the last unit's output has arrived
(`message`), and takes head / stages on each. The embedding and its gradient likewise, with the
first unit's stage and `embed`. An op that takes no time is no event and makes nobody wait.

Times are of one microbatch on a whole stage; an op on a unit takes its share, by default stages /
units. No JAX here.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.table import Cell, Op, Permute, Table, cell_name, message_ways, wraps


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of ops, in seconds, milliseconds or any other unit.

    F, B, W, R:  of one microbatch on a whole stage
    message:     of a message from a stage to its neighbour
    head, embed: of one microbatch on one stage: the head with loss and gradients; the embedding,
        and as much for its gradient
    tick:        of every tick, idle ones too, in addition to its ops; by the coupled clock
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    message: float = 0.0
    R: float = 0.0
    head: float = 0.0
    tick: float = 0.0
    embed: float = 0.0


@dataclasses.dataclass(frozen=True)
class TimedOp:
    """An op on a stage, from `start` to `end`.

    name: F, R, B, W, H for the head, or E for the embedding and its gradient
    unit: in model order; −1 for H and E
    """

    stage: int
    name: str
    unit: int
    microbatch: int
    start: float
    end: float


NAMES = ("", "F", "R", "B", "W", "H", "E")  # of timed ops, by number: those of `Op`, then H and E


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline(Iterable[TimedOp]):
    """Timed ops as arrays of one length: int64, and float64 for times. Iterating gives TimedOps.
    `name` is an index of NAMES."""

    stage: np.ndarray
    name: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.stage)

    def __iter__(self) -> Iterator[TimedOp]:
        columns = (getattr(self, field.name).tolist() for field in dataclasses.fields(self))
        for stage, name, unit, microbatch, start, end in zip(*columns, strict=True):
            yield TimedOp(stage, NAMES[name], unit, microbatch, start, end)


# --- what both clocks time ------------------------------------------------------------------------

EMBED, CELL, HEAD, EMBED_GRADIENT = range(4)  # the parts of a tick, in this order

# An op on a stage: a cell, or that of a column. −1: no unit, no message, no meeting.
STEP = np.dtype(
    [
        ("stage", int),
        ("tick", int),
        ("part", int),  # of the tick
        ("name", int),  # an index of NAMES
        ("unit", int),
        ("microbatch", int),
        ("start", float),
        ("time", float),
        # for the independent clock
        ("needs", int),  # the number of the message that it reads
        ("gives", int),  # the number of the message that it makes
        ("lag", float),  # from the time at which its message can be read until it can begin
        ("delay", float),  # from its end until the message that it makes can be read
        ("meeting", int),  # the number of an op that all stages do together
    ]
)


def _steps(**fields: Any) -> np.ndarray:
    """STEP [n] with these fields, broadcast against each other and flattened; other fields are
    0."""
    arrays = np.broadcast_arrays(*fields.values())
    steps = np.zeros(arrays[0].size, STEP)
    for name, array in zip(fields, arrays, strict=True):
        steps[name] = array.ravel()
    return steps


def _timeline(steps: np.ndarray) -> Timeline:
    stage, name, unit, microbatch, start = (
        steps[field] for field in ("stage", "name", "unit", "microbatch", "start")
    )
    return Timeline(stage, name, unit, microbatch, start, start + steps["time"])


def _durations(table: Table, times: Times, shares: Sequence[float] | None) -> np.ndarray:
    """The time of each op on each unit, float64 [ops, units + 1]; the last column is 0, so that −1
    stands for an idle cell."""
    if shares is None:
        shares = [table.stages / table.units] * table.units
    of_stage = {Op.IDLE: 0.0, Op.F: times.F, Op.R: times.R, Op.B: times.B, Op.W: times.W}
    return np.array([[*(of_stage[op] * share for share in shares), 0.0] for op in Op])


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnOp:
    """An op that a column of the table names: embedding, head, or the embedding's gradient.

    column: int32 [ticks], its microbatch in each tick or −1
    name, time: an index of NAMES; on one stage
    home: the stage that has it
    together: all stages take part, and wait for each other
    """

    column: np.ndarray
    name: int
    time: float
    home: int
    together: bool

    def stages(self, count: int) -> np.ndarray:
        """The stages that take part, of `count`."""
        return np.arange(count) if self.together else np.array([self.home])

    def run(self, clock: np.ndarray, lag: float) -> tuple[float, np.ndarray]:
        """(when it begins, the stages' clocks after it). lag: time in which the home stage's value
        reaches all stages that take part."""
        if self.together:
            begin = max(clock.max(), clock[self.home] + lag)
            return begin, np.full(len(clock), begin + self.time)
        begin, after = clock[self.home], clock.copy()
        after[self.home] = begin + self.time
        return begin, after


def _column_ops(table: Table, times: Times) -> dict[int, ColumnOp]:
    """Part of a tick → its op."""
    sharing = table.stages if table.vocabulary == "parallel" else 1

    def column_op(column: np.ndarray, name: str, time: float, home: int) -> ColumnOp:
        together = sharing > 1 and time > 0
        return ColumnOp(column, NAMES.index(name), time / sharing, home, together)

    return {
        EMBED: column_op(table.embed, "E", times.embed, table.stage_of[0]),
        HEAD: column_op(table.head, "H", times.head, table.stage_of[-1]),
        EMBED_GRADIENT: column_op(table.embed_gradient, "E", times.embed, table.stage_of[0]),
    }


# --- the coupled clock ----------------------------------------------------------------------------


@dataclasses.dataclass
class CoupledStarts:
    """When ops start by the coupled clock.

    cells:      of each tick, float64 [stages]
    column_ops: part of a tick → (tick, time) of its op, where that takes time
    step_time:  the end of the last tick
    """

    cells: list[np.ndarray]
    column_ops: dict[int, list[tuple[int, float]]]
    step_time: float = 0.0


def coupled_starts(
    table: Table, times: Times, shares: Sequence[float] | None = None
) -> CoupledStarts:
    """When everything starts, tick by tick. shares: of each unit, its part of a stage's work."""
    message, ops = times.message, _column_ops(table, times)
    starts = CoupledStarts([], {part: [] for part in ops})
    # stage 0 and the last one are neighbours too
    closed = table.stages > 2 and wraps(table.stage_of, table.stages)
    # An op that takes no time stands in no tick.
    columns = {
        part: op.column.tolist() if op.time else [-1] * table.ticks for part, op in ops.items()
    }
    # All need the home stage's value first, but for the embedding, which reads tokens.
    lags = {EMBED: -np.inf, HEAD: message, EMBED_GRADIENT: message}

    def after(part: int, tick: int, clock: np.ndarray) -> np.ndarray:
        """The stages' clocks after a column's op in a tick."""
        if columns[part][tick] < 0:
            return clock
        begin, clock = ops[part].run(clock, lags[part])
        starts.column_ops[part].append((tick, float(begin)))
        return clock

    start = np.zeros(table.stages)
    duration = _durations(table, times, shares)[table.op, table.unit]
    for tick, when in enumerate(table.permute.tolist()):
        if times.tick:
            start = start + times.tick
        begin = after(EMBED, tick, start)
        starts.cells.append(begin)
        end = after(EMBED_GRADIENT, tick, after(HEAD, tick, begin + duration[tick]))
        if when != Permute.NONE:
            arrival = (start if when == Permute.EARLY else end) + message
            end = end.copy()
            np.maximum(end[1:], arrival[:-1], out=end[1:])
            np.maximum(end[:-1], arrival[1:], out=end[:-1])
            if closed:
                end[0], end[-1] = max(end[0], arrival[-1]), max(end[-1], arrival[0])
        start = end
    starts.step_time = float(start.max())
    return starts


def coupled_time(table: Table, times: Times, shares: Sequence[float] | None = None) -> float:
    """The step time by the coupled clock."""
    return coupled_starts(table, times, shares).step_time


def coupled(table: Table, times: Times, shares: Sequence[float] | None = None) -> Timeline:
    """The timeline of the ticks as the runtime executes them, ordered by tick, part of the tick and
    stage."""
    starts = coupled_starts(table, times, shares)
    tick, stage, op, unit, microbatch = table.busy
    cells = _steps(
        stage=stage,
        tick=tick,
        part=CELL,
        name=op,
        unit=unit,
        microbatch=microbatch,
        start=np.array(starts.cells).reshape(table.op.shape)[tick, stage],
        time=_durations(table, times, shares)[op, unit],
    )
    parts = [cells]
    for part, column_op in _column_ops(table, times).items():
        started = np.array(starts.column_ops[part], float).reshape(-1, 2)
        ticks = started[:, :1].astype(int)
        steps = _steps(
            stage=column_op.stages(table.stages),
            tick=ticks,
            part=part,
            name=column_op.name,
            unit=-1,
            microbatch=column_op.column[ticks],
            start=started[:, 1:],
            time=column_op.time,
        )
        parts.append(steps)
    steps = np.concatenate(parts)
    return _timeline(steps[np.lexsort((steps["stage"], steps["part"], steps["tick"]))])


# --- the independent clock ------------------------------------------------------------------------


class NotFused(ValueError):
    """A table whose W's are separate from their B's, where a gradient is to leave after W; the text
    is one line."""


def independent(
    table: Table, times: Times, shares: Sequence[float] | None = None, fused_backward: bool = False
) -> Timeline:
    """The timeline of stages that wait for messages only, each in its own order; ordered by stage
    and time. Raises NotFused for `fused_backward` and a W that does not follow its B."""
    messages = _Messages(table.units, table.microbatches)
    parts = [_cell_steps(table, times, shares, messages, fused_backward)]
    meetings = 0
    for part, op in _column_ops(table, times).items():
        parts.append(_column_steps(table, times, part, op, messages, meetings))
        meetings += len(parts[-1]) // table.stages if op.together else 0
    steps = np.concatenate(parts)
    steps = steps[np.lexsort((steps["part"], steps["tick"], steps["stage"]))]
    if fused_backward:
        _check_fused(table, steps[steps["part"] == CELL])
    steps["start"] = _independent_starts(table, steps, messages.count, meetings)
    return _timeline(steps[(steps["time"] > 0) | (steps["unit"] >= 0)])


@dataclasses.dataclass(frozen=True)
class _Messages:
    """Numbers of messages: activations for units 0 … units (the head), gradients for units −1 (the
    embedding's) … units − 1."""

    units: int
    microbatches: int

    @property
    def count(self) -> int:
        """The number of all messages."""
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
    tick, stage, op, unit, microbatch = table.busy
    ways = message_ways(table.stage_of, table.stages)
    way = ways[op, unit]
    forward, backward, weights = (op == kind for kind in (Op.F, Op.B, Op.W))
    needs = np.select(
        [forward, backward],
        [messages.activation(unit, microbatch), messages.gradient(unit, microbatch)],
        -1,
    )
    gradient = messages.gradient(unit - 1, microbatch)
    gives = np.select(
        [forward, backward], [messages.activation(unit + 1, microbatch), gradient], -1
    )
    if fused_backward:  # a gradient that moves leaves after W
        gives[backward & (way != 0)] = -1
        gives[weights] = gradient[weights]
        way[weights] = ways[Op.B, unit[weights]]
    return _steps(
        stage=stage,
        tick=tick,
        part=CELL,
        name=op,
        unit=unit,
        microbatch=microbatch,
        needs=needs,
        gives=gives,
        delay=np.where(way != 0, times.message, 0.0),
        time=_durations(table, times, shares)[op, unit],
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
        needs = messages.activation(table.units, microbatch)
        gives = messages.gradient(table.units - 1, microbatch)
    else:
        needs = messages.gradient(-1, microbatch)
    return _steps(
        stage=op.stages(table.stages)[:, None],
        tick=ticks,
        part=part,
        name=op.name,
        unit=-1,
        microbatch=microbatch,
        needs=needs,
        gives=gives,
        lag=times.message if op.together else 0.0,
        time=op.time,
        meeting=np.arange(len(ticks)) + meetings if op.together else -1,
    )


def _check_fused(table: Table, cells: np.ndarray) -> None:
    """NotFused for a B whose W is not the next cell of its stage; cells: STEP, by stage and
    tick."""
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
    table: Table, steps: np.ndarray, messages: int, meetings: int
) -> np.ndarray:
    """When each step starts, float64 [steps]. One loop over lists: a step waits for others, and
    there are hundreds of thousands."""
    needs, gives, meeting, lag, delay, time = (
        steps[name].tolist() for name in ("needs", "gives", "meeting", "lag", "delay", "time")
    )
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
                    arrival = readable[needs[step]]
                    if arrival < 0:
                        break
                    begin = max(begin, arrival + lag[step])
                if meeting[step] >= 0:
                    together = meeting[step]
                    if not counted[step]:
                        counted[step] = True
                        arrived[together] += 1
                        begins[together] = max(begins[together], begin)
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
