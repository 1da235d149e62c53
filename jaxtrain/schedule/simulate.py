"""What a table costs in time and memory, by two clocks.

    independent   each stage goes through its cells on its own and waits for messages only: what the papers on schedules assume
    coupled       the rows as this runtime executes them: a permute is one operation of all stages, so a stage waits for its neighbours

The coupled clock, for row t on stage s, with its neighbours n (only those it exchanges messages with) and the cell's time:

    end[s] = start[s] + cell                                                           row without permute: next start[s] = end[s]
    late permute     next start[s] = max(end[s], end[n] + message)                     begins when the op is done
    early permute    next start[s] = max(end[s], start[n] + message)                   begins with the row, under the op

A row's head: computed by the last unit's stage alone it takes `head` there. With the vocabulary over all stages it begins when all are
there and the last unit's output has come (`message`), and takes head / stages on each. The embedding and its gradient likewise, with the
first unit's stage and `embed`. What takes no time is no event and makes nobody wait.

Times are of one microbatch on a whole stage; an op on a unit takes its share, by default stages / units. No JAX here.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxtrain.schedule.table import Op, Permute, Table, message_ways, peak_residuals, task, wraps


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds, milliseconds or any other unit: of F, B, W and R for one microbatch on a whole stage, of a message, and, of one microbatch
    on one stage, of the whole head (with loss and gradients) and of the embedding or of its gradient. `row` is what every row of the
    table costs, also an idle one: it concerns the coupled clock."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    message: float = 0.0
    R: float = 0.0
    head: float = 0.0
    row: float = 0.0
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
    """Events as arrays of one length, int32 and, of times, float64; iterated, as Events. `name` is a place in NAMES."""

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
        return (Event(stage, NAMES[name], *others) for stage, name, *others in zip(*columns, strict=True))


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` finds. Bubbles are fractions of time that the busiest stage is idle.

    step_time, step_time_coupled       by the independent and by the coupled clock
    bubble_fraction                    1 − busiest stage's work / step_time
    bubble_fraction_span               1 − busiest stage's work / longest time from a stage's first op to the end of its last one
                                       (Qi et al. 2023: the optimizer's step follows on each stage without a barrier)
    bubble_fraction_coupled            1 − busiest stage's work / step_time_coupled
    imbalance                          busiest stage's work / mean work of a stage
    peak_residuals                     `table.peak_residuals`: in chunk stashes, from F to the end of B
    peak_residuals_with_weight_stash        the same, to the end of W
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
    p = table.stages
    busy = np.bincount(timeline.stage, timeline.end - timeline.start, p).tolist()
    first, last = np.full(p, np.inf), np.zeros(p)
    np.minimum.at(first, timeline.stage, timeline.start)
    np.maximum.at(last, timeline.stage, timeline.end)
    most, step = max(busy), float(last.max())
    span = float((last - first).max())
    step_coupled = float(timeline_coupled.end.max())
    return Simulation(
        step,
        step_coupled,
        _bubble(most, step),
        _bubble(most, span),
        _bubble(most, step_coupled),
        most * table.stages / sum(busy) if most else 1.0,
        peak_residuals(table),
        peak_residuals(table, count_weight_stash=True),
        timeline,
        timeline_coupled,
    )


def _bubble(work: float, time: float) -> float:
    return max(0.0, 1 - work / time) if time > 0 else 0.0


def _durations(table: Table, times: Times, shares: Sequence[float] | None) -> np.ndarray:
    """float64 [ops, units + 1] → time; the last column is 0, so that −1 stands for an idle cell."""
    if shares is None:
        shares = [table.stages / table.units] * table.units
    base = {Op.IDLE: 0.0, Op.F: times.F, Op.R: times.R, Op.B: times.B, Op.W: times.W}
    return np.array([[*(base[op] * share for share in shares), 0.0] for op in Op])


EMBED, CELL, HEAD, EMBED_GRADIENT = range(4)  # what a row has, in this order


@dataclasses.dataclass(frozen=True)
class _Shared:
    """A column's op: the row's microbatch or −1, what it is called, its time on a stage, the stage that has it, and whether instead all
    stages take part and wait for each other."""

    column: np.ndarray
    name: str
    time: float
    home: int
    together: bool


def _shared(table: Table, times: Times) -> dict[int, _Shared]:
    p = table.stages if table.vocabulary == "parallel" else 1
    ops = {
        EMBED: (table.embed, "E", times.embed, table.stage_of[0]),
        HEAD: (table.head, "H", times.head, table.stage_of[-1]),
        EMBED_GRADIENT: (table.embed_gradient, "E", times.embed, table.stage_of[0]),
    }
    return {op: _Shared(column, name, time / p, home, p > 1 and time > 0) for op, (column, name, time, home) in ops.items()}


# --- the independent clock -------------------------------------------------------------------------------------------------------


def independent(table: Table, times: Times, shares: Sequence[float] | None = None, fused_backward: bool = False) -> Timeline:
    """The timeline of stages that wait for messages only, each in its own order; events stand by stage and time."""
    steps = _Steps(table, times, shares, fused_backward)
    start = _run(steps, table)
    shown = (steps.time > 0) | (steps.unit >= 0)
    parts = (steps.stage, steps.name, steps.unit, steps.microbatch, start, start + steps.time)
    return Timeline(*(part[shown] for part in parts))


class _Steps:
    """What every stage does, one after the other, as arrays with an entry a step: a cell, or a column's op on one stage.

    A *fact* is the number of a message; `needs` and `gives` are −1 where there is none. `lag` is added to the time of what a step needs,
    `delay` to the time at which its message can be read. `meeting` is the number of what all stages do together, else −1.
    """

    def __init__(self, table: Table, times: Times, shares: Sequence[float] | None, fused_backward: bool):
        units, m, shared = table.units, table.microbatches, _shared(table, times)
        x = lambda unit, k: unit * m + k  # of unit G: what the head reads
        g = lambda unit, k: (units + 2 + unit) * m + k  # of unit −1: what the embedding's gradient reads
        self.facts = (2 * units + 2) * m
        row, stage = np.nonzero(table.op)
        op, unit, k = (array[row, stage] for array in (table.op, table.unit, table.microbatch))
        way = message_ways(table.stage_of, table.stages)[op, unit]
        needs = np.select([op == Op.F, op == Op.B], [x(unit, k), g(unit, k)], -1)
        gives = np.select([op == Op.F, op == Op.B], [x(unit + 1, k), g(unit - 1, k)], -1)
        if fused_backward:  # what moves leaves after W
            gives[(op == Op.B) & (way != 0)] = -1
            w = op == Op.W
            gives[w], way[w] = g(unit - 1, k)[w], message_ways(table.stage_of, table.stages)[Op.B, unit[w]]
        delay = np.where(way != 0, times.message, 0.0)
        nothing, cells = np.zeros(len(op)), np.full(len(op), CELL)
        time = _durations(table, times, shares)[op, unit]
        parts: list[tuple] = [(stage, row, cells, op, unit, k, needs, gives, nothing, delay, time, np.full(len(op), -1))]
        meetings = 0
        for kind, its in shared.items():
            rows = np.flatnonzero(its.column >= 0)
            k = its.column[rows]
            stages = np.arange(table.stages) if its.together else np.array([its.home])
            needs = {HEAD: x(units, k), EMBED_GRADIENT: g(-1, k)}.get(kind, np.full(len(k), -1))
            gives = {HEAD: g(units - 1, k), EMBED: x(0, k)}.get(kind, np.full(len(k), -1))
            lag = times.message if its.together else 0.0
            meeting = np.arange(len(k)) + meetings if its.together else np.full(len(k), -1)
            meetings += len(k) if its.together else 0
            one = (rows, kind, NAMES.index(its.name), -1, k, needs, gives, lag, 0.0, its.time, meeting)
            parts.append(tuple(np.broadcast_arrays(stages[:, None], *one)))
        columns = [np.concatenate([np.ravel(part[i]) for part in parts]) for i in range(12)]
        order = np.lexsort((columns[2], columns[1], columns[0]))
        self.stage, _, self.kind, self.name, self.unit, self.microbatch, *others = (column[order] for column in columns)
        self.needs, self.gives, self.lag, self.delay, self.time, self.meeting = others
        self.begin = np.searchsorted(self.stage, np.arange(table.stages + 1)).tolist()
        self.meetings = meetings
        if fused_backward:
            self._check_fused(table)

    def _check_fused(self, table: Table) -> None:
        cells = np.flatnonzero(self.kind == CELL)
        after = np.append(cells[1:], cells[:1])
        ends = (self.name[after] == Op.W) & np.all([a[cells] == a[after] for a in (self.stage, self.unit, self.microbatch)], axis=0)
        if len(alone := cells[(self.name[cells] == Op.B) & ~ends]):
            cell = int(Op.B), int(self.unit[alone[0]]), int(self.microbatch[alone[0]])
            raise ValueError(f"fused_backward needs W right after its B; {table.name} has {task(cell, table.stage_of)} on its own")


def _run(steps: _Steps, table: Table) -> np.ndarray:
    """When each step starts. Lists and one loop: there are hundreds of thousands of steps, each waits for others."""
    needs, gives, meeting = steps.needs.tolist(), steps.gives.tolist(), steps.meeting.tolist()
    lag, delay, time = steps.lag.tolist(), steps.delay.tolist(), steps.time.tolist()
    there = [-1.0] * steps.facts  # when each message can be read
    came, begins, counted = [0] * steps.meetings, [0.0] * steps.meetings, [False] * len(needs)
    start = [0.0] * len(needs)
    at, clock = steps.begin[:-1], [0.0] * table.stages
    todo = [s for s in range(table.stages) if at[s] < steps.begin[s + 1]]
    while todo:
        before = list(at)
        for s in todo:
            now, i, end = clock[s], at[s], steps.begin[s + 1]
            while i < end:
                begin = now
                if needs[i] >= 0:
                    come = there[needs[i]]
                    if come < 0:
                        break
                    begin = max(begin, come + lag[i])
                if meeting[i] >= 0:
                    n = meeting[i]
                    if not counted[i]:
                        counted[i], came[n], begins[n] = True, came[n] + 1, max(begins[n], begin)
                    if came[n] < table.stages:
                        break
                    begin = begins[n]
                start[i] = begin
                now = begin + time[i]
                if gives[i] >= 0:
                    there[gives[i]] = now + delay[i]
                i += 1
            clock[s], at[s] = now, i
        if at == before:
            raise ValueError(f"{table.name}: stages {todo} wait for each other; check the table first")
        todo = [s for s in todo if at[s] < steps.begin[s + 1]]
    return np.array(start)


# --- the coupled clock -----------------------------------------------------------------------------------------------------------


def coupled(table: Table, times: Times, shares: Sequence[float] | None = None) -> Timeline:
    """The timeline of the rows as this runtime executes them; events stand by row, in the order of what a row has, and by stage."""
    starts: list[np.ndarray] = []
    shared_starts: dict[int, list[tuple[int, float]]] = {EMBED: [], HEAD: [], EMBED_GRADIENT: []}
    walk(table, times, shares, starts, shared_starts)
    row, stage = np.nonzero(table.op)
    op, unit, k = (array[row, stage] for array in (table.op, table.unit, table.microbatch))
    start = np.array(starts).reshape(table.op.shape)[row, stage]
    parts: list[tuple] = [(row, np.full(len(row), CELL), stage, op, unit, k, start, start + _durations(table, times, shares)[op, unit])]
    for kind, its in _shared(table, times).items():
        stages = np.arange(table.stages) if its.together else np.array([its.home])
        rows, begins = (np.array([pair[i] for pair in shared_starts[kind]], kind_of) for i, kind_of in ((0, int), (1, float)))
        k, begin = its.column[rows][:, None], begins[:, None]
        parts.append(tuple(np.broadcast_arrays(rows[:, None], kind, stages, NAMES.index(its.name), -1, k, begin, begin + its.time)))
    columns = [np.concatenate([np.ravel(part[i]) for part in parts]) for i in range(8)]
    order = np.lexsort((columns[2], columns[1], columns[0]))
    return Timeline(*(column[order] for column in columns[2:]))


def walk(
    table: Table,
    times: Times,
    shares: Sequence[float] | None = None,
    starts: list[np.ndarray] | None = None,
    shared_starts: dict[int, list[tuple[int, float]]] | None = None,
) -> float:
    """The coupled step time. If given, adds to `starts` when each row's cells start, float64 [stages], and to `shared_starts` the (row,
    time) at which each column's op does that takes time."""
    p, message, shared = table.stages, times.message, _shared(table, times)
    closed = p > 2 and wraps(table.stage_of, p)  # stage 0 and the last one are neighbours too

    def share(kind: int, t: int, clock: np.ndarray) -> np.ndarray:
        """The clocks after a column's op in row t."""
        its = shared[kind]
        if its.time == 0 or columns[kind][t] < 0:
            return clock
        begin = clock.max() if its.together else clock[its.home]
        if its.together and kind != EMBED:  # all need the home stage's value first
            begin = max(begin, clock[its.home] + message)
        if shared_starts is not None:
            shared_starts[kind].append((t, float(begin)))
        if its.together:
            return np.full(p, begin + its.time)
        clock = clock.copy()
        clock[its.home] = begin + its.time
        return clock

    columns = {kind: its.column.tolist() for kind, its in shared.items()}
    start = np.zeros(p)
    duration = _durations(table, times, shares)[table.op, table.unit]
    for t, when in enumerate(table.permute.tolist()):
        if times.row:
            start = start + times.row
        begin = share(EMBED, t, start)
        if starts is not None:
            starts.append(begin)
        end = share(EMBED_GRADIENT, t, share(HEAD, t, begin + duration[t]))
        if when != Permute.NONE:
            come = (start if when == Permute.EARLY else end) + message
            end = end.copy()
            np.maximum(end[1:], come[:-1], out=end[1:])
            np.maximum(end[:-1], come[1:], out=end[:-1])
            if closed:
                end[0], end[-1] = max(end[0], come[-1]), max(end[-1], come[0])
        start = end
    return float(start.max())
