"""Two clocks, which compute when each op of a table starts and ends on each stage.

    independent   a stage goes through its cells in order and waits only for messages, as papers on
                  schedules assume
    coupled       ticks as the runtime executes them: a permute is one operation of all stages, so a
                  stage waits for its neighbours

The coupled clock of one tick on stage s, with neighbours n, the stages that it exchanges messages
with:

    end[s] = start[s] + cell
    no permute       next start[s] = end[s]
    late permute     next start[s] = max(end[s], end[n] + message)      begins when the op is done
    early permute    next start[s] = max(end[s], start[n] + message)    begins with the tick, under
                                                                        the op

A tick's head takes `head` on the last unit's stage if that stage computes it alone. If all stages
share the vocabulary, it begins when all of them have come to it and the last unit's output has
arrived (`message`), and takes head / stages on each. The embedding and its gradient do the same
with the first unit's stage and `embed`. An op that takes no time is skipped, and no stage waits for
it.

The F and the B of an overlapped cell begin together, when both have what they wait for, and both
messages leave at its end. Timelines show the F and then the B, each shortened by the same factor.

Times are of one microbatch on all units of a stage; an op on a unit takes its share of them, by
default stages / units. No JAX here.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.table import Cell, Op, Permute, Table, cell_name, message_ways, wraps


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of ops, all in one unit: seconds, milliseconds or any other.

    F, B, W, R:  of one microbatch on all units of a stage; R if it recomputes all their layers
    message:     from a stage to its neighbour
    head, embed: of one microbatch, if one stage computes it: the head with its loss and gradients;
        the embedding, and as much again for its gradient
    update:      the optimizer's update of a stage, where a table has several steps
    tick:        added to every tick, also an idle one, by the coupled clock alone
    overlap:     by which F and B of one microbatch each, on all units of a stage, are faster in
        overlapped cells than one after the other; negative where they are slower
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    message: float = 0.0
    R: float = 0.0
    head: float = 0.0
    tick: float = 0.0
    embed: float = 0.0
    update: float = 0.0
    overlap: float = 0.0


@dataclasses.dataclass(frozen=True)
class TimedOp:
    """An op on a stage, from `start` to `end`.

    name: F, R, B, W, H for the head, E for the embedding and its gradient, or O for the optimizer's
        update
    unit: in model order; −1 for H, E and O
    microbatch: of O, the step
    """

    stage: int
    name: str
    unit: int
    microbatch: int
    start: float
    end: float


# of timed ops, by number: those of `Op`, then the others
NAMES = ("", "F", "R", "B", "W", "H", "E", "O")


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline(Iterable[TimedOp]):
    """Timed ops as arrays [ops], int64, and float64 for times. `name` is an index of NAMES.
    Iterating gives TimedOps."""

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

TINY = 1e-300  # keeps 0 ÷ 0 from ops that take no time

EMBED, CELL, HEAD, EMBED_GRADIENT, UPDATE = range(5)  # the parts of a tick, in this order

# An event: one op on one stage, of a cell or of a column (ColumnOp). −1 stands for no unit, no
# message and no joint op.
EVENT = np.dtype(
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
        ("needs_too", int),  # of another that must be there: B's, for the F of an overlapped cell
        ("gives", int),  # the number of the message that it makes
        ("lag", float),  # time from when its message can be read until it can begin
        ("delay", float),  # time from its end until the message that it makes can be read
        ("joint_op", int),  # the number of the op that all stages do together in this event
    ]
)


def _events(**fields: Any) -> np.ndarray:
    """EVENT [events] with these fields, which are broadcast against each other and flattened; the
    other fields are 0."""
    arrays = np.broadcast_arrays(*fields.values())
    events = np.zeros(arrays[0].size, EVENT)
    for name, array in zip(fields, arrays, strict=True):
        events[name] = array.ravel()
    return events


def _timeline(events: np.ndarray) -> Timeline:
    stage, name, unit, microbatch, start = (
        events[field] for field in ("stage", "name", "unit", "microbatch", "start")
    )
    return Timeline(stage, name, unit, microbatch, start, start + events["time"])


def _shares_of(table: Table, shares: Sequence[float] | None) -> Sequence[float]:
    """Each unit's fraction of a stage's work, by default stages / units."""
    return [table.stages / table.units] * table.units if shares is None else shares


def _durations(table: Table, times: Times, shares: Sequence[float] | None) -> np.ndarray:
    """The time of each op on each unit, float64 [ops, units + 1]. The last column is 0: idle cells
    have unit −1."""
    shares = _shares_of(table, shares)
    of_stage = {Op.IDLE: 0.0, Op.F: times.F, Op.R: times.R, Op.B: times.B, Op.W: times.W}
    durations = np.array([[*(of_stage[op] * share for share in shares), 0.0] for op in Op])
    durations[Op.R, :-1] *= table.recomputed
    return durations


def _factors(
    table: Table, times: Times, shares: Sequence[float] | None, durations: np.ndarray
) -> np.ndarray:
    """The time of each cell's ops, float64 [ticks, stages], in times of the same ops one after the
    other: 1 but in overlapped cells. An op is overlapped as far as its share of a stage's work
    goes, and an overlapped cell takes no less than the longer of its ops.

    durations: by `_durations`
    """
    factors = np.ones(table.op.shape)
    if not table.overlaps or not times.overlap:
        return factors
    cells, share = table.overlapped, np.array(_shares_of(table, shares))
    unit, b_unit = table.unit[cells], table.b_unit[cells]
    forward, backward = durations[Op.F, unit], durations[Op.B, b_unit]
    both = forward + backward
    saved = times.overlap * np.minimum(share[unit], share[b_unit])
    factors[cells] = np.maximum(both - saved, np.maximum(forward, backward)) / np.maximum(
        both, TINY
    )
    return factors


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnOp:
    """An op that a column of the table names: embedding, head, or the embedding's gradient.

    column: int32 [ticks], its microbatch in each tick, −1 for none
    name: an index of NAMES
    time: how long it takes on each stage that takes part
    home: the stage of the first unit, for the head of the last one
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
        """Returns (its start, the stages' clocks after it).

        clock: float64 [stages], before it; lag: time in which the home stage's value reaches all
            stages
        """
        if self.together:
            begin = max(clock.max(), clock[self.home] + lag)
            return begin, np.full(len(clock), begin + self.time)
        begin, after = clock[self.home], clock.copy()
        after[self.home] = begin + self.time
        return begin, after


def _column_ops(table: Table, times: Times) -> dict[int, ColumnOp]:
    """The column ops, by part of a tick."""
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
    """The starts of ops by the coupled clock.

    cells:      for each tick, float64 [stages]
    updates:    for each tick with an update, float64 [stages]
    column_ops: part of a tick → (tick, start) of each of its ops, if they take time
    step_time:  the end of the last tick
    """

    cells: list[np.ndarray]
    updates: list[np.ndarray]
    column_ops: dict[int, list[tuple[int, float]]]
    step_time: float = 0.0


def coupled_starts(
    table: Table, times: Times, shares: Sequence[float] | None = None
) -> CoupledStarts:
    """The starts of all ops by the coupled clock.

    shares: each unit's fraction of a stage's work; None: stages / units
    """
    message, ops = times.message, _column_ops(table, times)
    starts = CoupledStarts([], [], {part: [] for part in ops})
    # stage 0 and the last one are neighbours too
    closed = table.stages > 2 and wraps(table.stage_of, table.stages)
    # An op that takes no time stands in no tick.
    columns = {
        part: op.column.tolist() if op.time else [-1] * table.ticks for part, op in ops.items()
    }
    # Head and embedding's gradient need the home stage's value first; the embedding reads tokens.
    lags = {EMBED: -np.inf, HEAD: message, EMBED_GRADIENT: message}

    def after(part: int, tick: int, clock: np.ndarray) -> np.ndarray:
        """The stages' clocks after a column's op in a tick."""
        if columns[part][tick] < 0:
            return clock
        begin, clock = ops[part].run(clock, lags[part])
        starts.column_ops[part].append((tick, float(begin)))
        return clock

    start = np.zeros(table.stages)
    durations = _durations(table, times, shares)
    duration = durations[table.op, table.unit] + durations[Op.B, table.b_unit]
    duration = duration * _factors(table, times, shares, durations)
    updating = set(np.nonzero(table.update >= 0)[0].tolist())
    for tick, when in enumerate(table.permute.tolist()):
        if times.tick:
            start = start + times.tick
        begin = after(EMBED, tick, start)
        starts.cells.append(begin)
        end = after(EMBED_GRADIENT, tick, after(HEAD, tick, begin + duration[tick]))
        if tick in updating:
            starts.updates.append(end)
            end = end + times.update * (table.update[tick] >= 0)
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
    """The timeline by the coupled clock, ordered by tick, part of the tick and stage."""
    starts = coupled_starts(table, times, shares)
    tick, stage, op, unit, microbatch = table.busy
    durations = _durations(table, times, shares)
    factors = _factors(table, times, shares, durations)
    start = np.array(starts.cells).reshape(table.op.shape)
    # an overlapped B stands behind its F
    after_f = factors * np.where(table.overlapped, durations[Op.F, table.unit], 0.0)
    cells = _events(
        stage=stage,
        tick=tick,
        part=CELL,
        name=op,
        unit=unit,
        microbatch=microbatch,
        start=start[tick, stage] + np.where(op == Op.B, after_f[tick, stage], 0.0),
        time=durations[op, unit] * factors[tick, stage],
    )
    tick, stage = np.nonzero(table.update >= 0)
    ticks_of_updates, index = np.unique(tick, return_inverse=True)
    begun = np.array(starts.updates).reshape(len(ticks_of_updates), table.stages)
    parts = [cells, _update_events(table, times, start=begun[index, stage])]
    for part, column_op in _column_ops(table, times).items():
        started = np.array(starts.column_ops[part], float).reshape(-1, 2)
        ticks = started[:, :1].astype(int)
        parts.append(
            _events(
                stage=column_op.stages(table.stages),
                tick=ticks,
                part=part,
                name=column_op.name,
                unit=-1,
                microbatch=column_op.column[ticks],
                start=started[:, 1:],
                time=column_op.time,
            )
        )
    events = np.concatenate(parts)
    return _timeline(events[np.lexsort((events["stage"], events["part"], events["tick"]))])


# --- the independent clock ------------------------------------------------------------------------


class NotFused(ValueError):
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
        _update_events(table, times, joint_op=-1, needs=-1, gives=-1),
    ]
    joint_ops = 0
    for part, op in _column_ops(table, times).items():
        parts.append(_column_events(table, times, part, op, messages, joint_ops))
        joint_ops += len(parts[-1]) // table.stages if op.together else 0
    events = np.concatenate(parts)
    events = events[np.lexsort((events["part"], events["tick"], events["stage"]))]
    if fused_backward:
        _check_fused(table, events[events["part"] == CELL])
    events["start"] = _independent_starts(table, events, messages.count, joint_ops)
    return _timeline(events[(events["time"] > 0) | (events["unit"] >= 0)])


@dataclasses.dataclass(frozen=True)
class _Messages:
    """The numbering of messages: activations for units 0 … units (the head), gradients for units −1
    (the embedding) … units − 1."""

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
    # the F of an overlapped cell stands before its B, waits for what that reads, and its message
    # leaves at the end of both
    joined = forward & table.overlapped[tick, stage]
    needs_too = np.full(len(op), -1)
    needs_too[joined] = needs[1:][joined[:-1]]
    durations = _durations(table, times, shares)
    time = durations[op, unit] * _factors(table, times, shares, durations)[tick, stage]
    delay = np.where(way != 0, times.message, 0.0)
    delay[joined] += time[1:][joined[:-1]]
    gradient = messages.gradient(unit - 1, microbatch)
    gives = np.select(
        [forward, backward], [messages.activation(unit + 1, microbatch), gradient], -1
    )
    if fused_backward:  # a gradient that moves leaves after W
        gives[backward & (way != 0)] = -1
        gives[weights] = gradient[weights]
        way[weights] = ways[Op.B, unit[weights]]
        delay[weights] = np.where(way[weights] != 0, times.message, 0.0)
    return _events(
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
    return _events(
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


def _update_events(table: Table, times: Times, **fields: Any) -> np.ndarray:
    """The events of the optimizer's updates in a table of several steps, by tick and stage, EVENT
    [updates]. fields: further ones of `_events`"""
    tick, stage = np.nonzero(table.update >= 0)
    return _events(
        stage=stage,
        tick=tick,
        part=UPDATE,
        name=NAMES.index("O"),
        unit=-1,
        microbatch=table.update[tick, stage],
        time=times.update,
        **fields,
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

    It is one loop over lists, because an event waits for others, and there are hundreds of
    thousands. Raises ValueError for stages that wait for each other.
    """
    needs, needs_too, gives, joint_op, lag, delay, time = (
        events[name].tolist()
        for name in ("needs", "needs_too", "gives", "joint_op", "lag", "delay", "time")
    )
    bounds = np.searchsorted(events["stage"], np.arange(table.stages + 1)).tolist()
    readable = [-1.0] * messages  # when each message can be read
    arrived, begins, counted = [0] * joint_ops, [0.0] * joint_ops, [False] * len(needs)
    start = [0.0] * len(needs)
    following, clock = bounds[:-1], [0.0] * table.stages
    unfinished = [stage for stage in range(table.stages) if following[stage] < bounds[stage + 1]]
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
            raise ValueError(
                f"{table.name}: stages {unfinished} wait for each other; check the table first"
            )
        unfinished = [stage for stage in unfinished if following[stage] < bounds[stage + 1]]
    return np.array(start)
