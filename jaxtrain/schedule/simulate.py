"""What a table costs in time and memory, by two clocks.

    independent   each stage goes through its cells on its own and waits for messages only: what the papers on schedules assume
    coupled       the ticks as this runtime executes them: a permute is one operation of all stages, so a stage waits for its neighbours

The coupled clock, for one tick on stage s, with its neighbours n (only those it exchanges messages with) and the cell's time:

    end[s] = start[s] + cell                                                           tick without permute: next start[s] = end[s]
    late permute     next start[s] = max(end[s], end[n] + message)                     begins when the op is done
    early permute    next start[s] = max(end[s], start[n] + message)                   begins with the tick, under the op

A tick's head takes `head` on the last unit's stage if that computes it alone. With the vocabulary over all stages it begins when all have
come to it and the last unit's output has arrived (`message`), and takes head / stages on each. The embedding and its gradient likewise,
with the first unit's stage and `embed`. What takes no time is no event and makes nobody wait.

Times are of one microbatch on a whole stage; an op on a unit takes its share, by default stages / units. No JAX here.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.schedule.table import Cell, Op, Permute, Table, cell_name, message_ways, peak_residuals, wraps


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of ops, in seconds, milliseconds or any other unit.

    F, B, W, R:  of one microbatch on a whole stage
    message:     of a message from a stage to its neighbour
    head, embed: of one microbatch on one stage, the whole head with loss and gradients; the embedding, and as much for its gradient
    tick:        of every tick of the table beside its ops, also of an idle one, by the coupled clock
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
class Event:
    """An op's time on a stage. `name` is F, R, B, W, H for the head or E for the embedding and its gradient, which have `unit` −1; other
    units are in model order."""

    stage: int
    name: str
    unit: int
    microbatch: int
    start: float
    end: float


NAMES = ("", "F", "R", "B", "W", "H", "E")  # of events, by number: those of the ops come first


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline(Iterable[Event]):
    """Events as arrays of one length, int64 and, of times, float64; iterated, as Events. `name` is a place in NAMES."""

    stage: np.ndarray
    name: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.stage)

    def __iter__(self) -> Iterator[Event]:
        columns = (getattr(self, field.name).tolist() for field in dataclasses.fields(self))
        for stage, name, unit, microbatch, start, end in zip(*columns, strict=True):
            yield Event(stage, NAMES[name], unit, microbatch, start, end)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` finds. Bubbles are fractions of time that the busiest stage is idle.

    step_time, step_time_coupled       by the independent and by the coupled clock
    bubble_fraction                    1 − busiest stage's work / step_time
    bubble_fraction_span               1 − busiest stage's work / longest time from a stage's first op to the end of its last one
                                       (Qi et al. 2023: the optimizer's step follows on each stage without a barrier)
    bubble_fraction_coupled            1 − busiest stage's work / step_time_coupled
    imbalance                          busiest stage's work / mean work of a stage
    peak_residuals                     of each stage, by `table.peak_residuals`: in chunks', from F to the end of B
    peak_residuals_with_weight_stash   the same, to the end of W
    timeline, timeline_coupled         by each clock
    """

    step_time: float
    step_time_coupled: float
    bubble_fraction: float
    bubble_fraction_span: float
    bubble_fraction_coupled: float
    imbalance: float
    peak_residuals: list[float]
    peak_residuals_with_weight_stash: list[float]
    timeline: Timeline
    timeline_coupled: Timeline


def simulate(table: Table, times: Times, *, shares: Sequence[float] | None = None, fused_backward: bool = False) -> Simulation:
    """Times a table by both clocks.

    shares: of each unit, its part of a stage's work, where units differ (uneven layers).
    fused_backward: the gradient leaves after W and not after B, as where both are one op. It concerns the independent clock, and needs
    tables whose every W is the next cell after its B. Raises ValueError for others.
    """
    timeline = independent(table, times, shares, fused_backward)
    timeline_coupled = coupled(table, times, shares)
    busy = np.bincount(timeline.stage, timeline.end - timeline.start, table.stages).tolist()
    first, last = np.full(table.stages, np.inf), np.zeros(table.stages)
    np.minimum.at(first, timeline.stage, timeline.start)
    np.maximum.at(last, timeline.stage, timeline.end)
    busiest, step_time = max(busy), float(last.max())
    step_time_coupled = float(timeline_coupled.end.max())
    return Simulation(
        step_time=step_time,
        step_time_coupled=step_time_coupled,
        bubble_fraction=_bubble(busiest, step_time),
        bubble_fraction_span=_bubble(busiest, float((last - first).max())),
        bubble_fraction_coupled=_bubble(busiest, step_time_coupled),
        imbalance=busiest * table.stages / sum(busy) if busiest else 1.0,
        peak_residuals=peak_residuals(table),
        peak_residuals_with_weight_stash=peak_residuals(table, count_weight_stash=True),
        timeline=timeline,
        timeline_coupled=timeline_coupled,
    )


def _bubble(work: float, time: float) -> float:
    return max(0.0, 1 - work / time) if time > 0 else 0.0


def _durations(table: Table, times: Times, shares: Sequence[float] | None) -> np.ndarray:
    """float64 [ops, units + 1] → time; the last column is 0, so that −1 stands for an idle cell."""
    if shares is None:
        shares = [table.stages / table.units] * table.units
    whole = {Op.IDLE: 0.0, Op.F: times.F, Op.R: times.R, Op.B: times.B, Op.W: times.W}
    return np.array([[*(whole[op] * share for share in shares), 0.0] for op in Op])


EMBED, CELL, HEAD, EMBED_GRADIENT = range(4)  # the parts of a tick, in this order


@dataclasses.dataclass(frozen=True, eq=False)
class _ColumnOp:
    """An op that a column of the table names, and not a cell.

    column: int32 [ticks], its microbatch in each tick or −1; name: of its events, a place in NAMES; time: on a stage
    home: the stage that has it; together: whether instead all stages take part and wait for each other
    """

    column: np.ndarray
    name: int
    time: float
    home: int
    together: bool

    def run(self, clock: np.ndarray, lag: float) -> tuple[float, np.ndarray]:
        """(when it begins, the stages' clocks after it). lag: what the home stage's value takes to come to all, where all take part."""
        if self.together:
            begin = max(clock.max(), clock[self.home] + lag)
            return begin, np.full(len(clock), begin + self.time)
        begin, after = clock[self.home], clock.copy()
        after[self.home] = begin + self.time
        return begin, after


def _column_ops(table: Table, times: Times) -> dict[int, _ColumnOp]:
    """Part of a tick → its op."""
    sharing = table.stages if table.vocabulary == "parallel" else 1
    first, last = table.stage_of[0], table.stage_of[-1]
    head, embed = NAMES.index("H"), NAMES.index("E")
    return {
        EMBED: _ColumnOp(table.embed, embed, times.embed / sharing, first, sharing > 1 and times.embed > 0),
        HEAD: _ColumnOp(table.head, head, times.head / sharing, last, sharing > 1 and times.head > 0),
        EMBED_GRADIENT: _ColumnOp(table.embed_gradient, embed, times.embed / sharing, first, sharing > 1 and times.embed > 0),
    }


def _records(kind: np.dtype, **fields: Any) -> np.ndarray:
    """[n]: records with these fields, which are broadcast against each other and flattened."""
    arrays = np.broadcast_arrays(*fields.values())
    records = np.zeros(arrays[0].size, kind)
    for name, array in zip(fields, arrays, strict=True):
        records[name] = array.ravel()
    return records


# --- the independent clock -------------------------------------------------------------------------------------------------------


def independent(table: Table, times: Times, shares: Sequence[float] | None = None, fused_backward: bool = False) -> Timeline:
    """The timeline of stages that wait for messages only, each in its own order; events stand by stage and time."""
    messages = _Messages(table.units, table.microbatches)
    parts = [_cell_steps(table, times, shares, messages, fused_backward)]
    meetings = 0
    for part, op in _column_ops(table, times).items():
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


@dataclasses.dataclass(frozen=True)
class _Messages:
    """Numbers of messages: activations for units 0 … units (the head), gradients for units −1 (the embedding's) … units − 1."""

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


def _cell_steps(table: Table, times: Times, shares: Sequence[float] | None, messages: _Messages, fused_backward: bool) -> np.ndarray:
    """The steps of the cells, STEP [cells]."""
    tick, stage = np.nonzero(table.op)
    op, unit, microbatch = (array[tick, stage] for array in (table.op, table.unit, table.microbatch))
    ways = message_ways(table.stage_of, table.stages)
    way = ways[op, unit]
    forward, backward = op == Op.F, op == Op.B
    needs = np.select([forward, backward], [messages.activation(unit, microbatch), messages.gradient(unit, microbatch)], -1)
    gives = np.select([forward, backward], [messages.activation(unit + 1, microbatch), messages.gradient(unit - 1, microbatch)], -1)
    if fused_backward:  # what moves leaves after W
        gives[backward & (way != 0)] = -1
        weights = op == Op.W
        gives[weights] = messages.gradient(unit - 1, microbatch)[weights]
        way[weights] = ways[Op.B, unit[weights]]
    return _records(
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
        time=_durations(table, times, shares)[op, unit],
        meeting=-1,
    )


def _column_steps(table: Table, times: Times, part: int, op: _ColumnOp, messages: _Messages, meetings: int) -> np.ndarray:
    """The steps of a column's op, STEP [stages that take part · microbatches]; meetings are numbered from `meetings` on."""
    ticks = np.flatnonzero(op.column >= 0)
    microbatch = op.column[ticks]
    needs, gives = np.full(len(ticks), -1), np.full(len(ticks), -1)
    if part == EMBED:
        gives = messages.activation(0, microbatch)
    elif part == HEAD:
        needs, gives = messages.activation(table.units, microbatch), messages.gradient(table.units - 1, microbatch)
    else:
        needs = messages.gradient(-1, microbatch)
    stages = np.arange(table.stages) if op.together else np.array([op.home])
    return _records(
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
    """ValueError for a B whose W is not the next cell of its stage."""
    cells = steps[steps["part"] == CELL]
    following = np.roll(cells, -1)
    same = np.all([cells[name] == following[name] for name in ("stage", "unit", "microbatch")], axis=0)
    alone = cells[(cells["name"] == Op.B) & ~(same & (following["name"] == Op.W))]
    if len(alone):
        cell = Cell(int(Op.B), int(alone[0]["unit"]), int(alone[0]["microbatch"]))
        raise ValueError(f"fused_backward needs W right after its B; {table.name} has {cell_name(cell, table.stage_of)} on its own")


def _run(table: Table, steps: np.ndarray, messages: int, meetings: int) -> np.ndarray:
    """float64 [steps]: when each step starts. Lists and one loop: there are hundreds of thousands of steps, each waits for others."""
    needs, gives, meeting = steps["needs"].tolist(), steps["gives"].tolist(), steps["meeting"].tolist()
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
                        counted[step], arrived[together], begins[together] = True, arrived[together] + 1, max(begins[together], begin)
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
            raise ValueError(f"{table.name}: stages {unfinished} wait for each other; check the table first")
        unfinished = [stage for stage in unfinished if following[stage] < bounds[stage + 1]]
    return np.array(start)


# --- the coupled clock -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Starts:
    """When things start by the coupled clock, as `walk` finds it.

    cells: of each tick, float64 [stages]; column_ops: part of a tick → the (tick, time) of its op, where it takes time
    """

    cells: list[np.ndarray] = dataclasses.field(default_factory=list)
    column_ops: dict[int, list[tuple[int, float]]] = dataclasses.field(default_factory=lambda: {EMBED: [], HEAD: [], EMBED_GRADIENT: []})


STARTED = np.dtype(
    [("tick", int), ("part", int), ("stage", int), ("name", int), ("unit", int), ("microbatch", int), ("start", float), ("end", float)]
)


def coupled(table: Table, times: Times, shares: Sequence[float] | None = None) -> Timeline:
    """The timeline of the ticks as this runtime executes them; events stand by tick, in the order of a tick's parts, and by stage."""
    starts = Starts()
    walk(table, times, shares, starts)
    tick, stage = np.nonzero(table.op)
    op, unit, microbatch = (array[tick, stage] for array in (table.op, table.unit, table.microbatch))
    start = np.array(starts.cells).reshape(table.op.shape)[tick, stage]
    end = start + _durations(table, times, shares)[op, unit]
    parts = [_records(STARTED, tick=tick, part=CELL, stage=stage, name=op, unit=unit, microbatch=microbatch, start=start, end=end)]
    for part, column_op in _column_ops(table, times).items():
        stages = np.arange(table.stages) if column_op.together else np.array([column_op.home])
        ticks = np.array([tick for tick, _ in starts.column_ops[part]], int)[:, None]
        begin = np.array([begin for _, begin in starts.column_ops[part]], float)[:, None]
        parts.append(
            _records(
                STARTED,
                tick=ticks,
                part=part,
                stage=stages,
                name=column_op.name,
                unit=-1,
                microbatch=column_op.column[ticks],
                start=begin,
                end=begin + column_op.time,
            )
        )
    events = np.concatenate(parts)
    events = events[np.lexsort((events["stage"], events["part"], events["tick"]))]
    return Timeline(*(events[field.name] for field in dataclasses.fields(Timeline)))


def walk(table: Table, times: Times, shares: Sequence[float] | None = None, starts: Starts | None = None) -> float:
    """The coupled step time. If given, `starts` gets when everything starts."""
    message, ops = times.message, _column_ops(table, times)
    closed = table.stages > 2 and wraps(table.stage_of, table.stages)  # stage 0 and the last one are neighbours too
    # What takes no time is left out: none of its ticks.
    columns = {part: op.column.tolist() if op.time else [-1] * table.ticks for part, op in ops.items()}
    # All need the home stage's value first, but for the embedding, which reads tokens.
    lags = {EMBED: -np.inf, HEAD: message, EMBED_GRADIENT: message}

    def after(part: int, tick: int, clock: np.ndarray) -> np.ndarray:
        """The stages' clocks after a column's op in a tick."""
        if columns[part][tick] < 0:
            return clock
        begin, clock = ops[part].run(clock, lags[part])
        if starts is not None:
            starts.column_ops[part].append((tick, float(begin)))
        return clock

    start = np.zeros(table.stages)
    duration = _durations(table, times, shares)[table.op, table.unit]
    for tick, when in enumerate(table.permute.tolist()):
        if times.tick:
            start = start + times.tick
        begin = after(EMBED, tick, start)
        if starts is not None:
            starts.cells.append(begin)
        end = after(EMBED_GRADIENT, tick, after(HEAD, tick, begin + duration[tick]))
        if when != Permute.NONE:
            come = (start if when == Permute.EARLY else end) + message
            end = end.copy()
            np.maximum(end[1:], come[:-1], out=end[1:])
            np.maximum(end[:-1], come[1:], out=end[:-1])
            if closed:
                end[0], end[-1] = max(end[0], come[-1]), max(end[-1], come[0])
        start = end
    return float(start.max())
