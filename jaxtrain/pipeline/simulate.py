"""What a table costs in time and memory, by two clocks.

    independent   each stage goes through its cells on its own and waits for messages only: what the papers on schedules assume
    coupled       the rows as this runtime executes them: a permute is one operation of all stages, so a stage waits for its neighbours

The coupled clock, for row t on stage s, with its neighbours n (only those it exchanges messages with) and the cell's time:

    end[s] = start[s] + cell                                                           row without permute: next start[s] = end[s]
    late permute     next start[s] = max(end[s], end[n] + message)                     begins when the op is done
    early permute    next start[s] = max(end[s], start[n] + message)                   begins with the row, under the op

A row's head: computed by the last unit's stage alone it takes `head` there. With the vocabulary over all stages it begins when all are
there and the last unit's output has come (`message`), and takes head / stages on each. A head that takes no time is no event. The
embedding and its gradient take no time here and make nobody wait, which flatters "parallel" a little.

Times are of one microbatch on a whole stage; an op on a unit takes its share, by default stages / units. No JAX here.
"""

import dataclasses
from collections.abc import Sequence

from jaxtrain.pipeline.table import Cell, Op, Permute, Table, directions, makes, needs, peak_stashes, task, wraps


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds, milliseconds or any other unit: of F, B, W and R for one microbatch on a whole stage, of a message, and of the whole
    head (with loss and gradients) of one microbatch on one stage. `row` is what every row of the table costs, also an idle one: it
    concerns the coupled clock."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    message: float = 0.0
    R: float = 0.0
    head: float = 0.0
    row: float = 0.0


@dataclasses.dataclass(frozen=True)
class Event:
    """An op's time on a stage. `name` is F, R, B, W or H; `unit` is in model order, −1 for the head."""

    stage: int
    name: str
    unit: int
    microbatch: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` finds. Bubbles are fractions of time that the busiest stage is idle.

    step_time, step_time_coupled       by the independent and by the coupled clock
    bubble_fraction                    1 − busiest stage's work / step_time
    bubble_fraction_span               1 − busiest stage's work / longest time from a stage's first op to the end of its last one
                                       (Qi et al. 2023: the optimizer's step follows on each stage without a barrier)
    bubble_fraction_coupled            1 − busiest stage's work / step_time_coupled
    peak_activations                   `peak_stashes`: in chunk stashes, from F to the end of B
    peak_activations_with_stash        the same, to the end of W
    timeline, timeline_coupled         by each clock
    """

    step_time: float
    step_time_coupled: float
    bubble_fraction: float
    bubble_fraction_span: float
    bubble_fraction_coupled: float
    peak_activations: list[float]
    peak_activations_with_stash: list[float]
    timeline: list[Event]
    timeline_coupled: list[Event]


def simulate(table: Table, times: Times, *, shares: Sequence[float] | None = None, fused_backward: bool = False) -> Simulation:
    """Times a table by both clocks.

    shares: of each unit, its part of a stage's work, where units differ (uneven layers).
    fused_backward: the gradient leaves after W and not after B, as where both are one op. It concerns the independent clock, and needs
    tables whose every W is the next cell after its B. Raises ValueError for others.
    """
    timeline = independent(table, times, shares, fused_backward)
    timeline_coupled = coupled(table, times, shares)
    busy, first, last = [0.0] * table.stages, [float("inf")] * table.stages, [0.0] * table.stages
    for e in timeline:
        busy[e.stage] += e.end - e.start
        first[e.stage], last[e.stage] = min(first[e.stage], e.start), max(last[e.stage], e.end)
    most, step = max(busy), max(last)
    span = max(b - a for a, b in zip(first, last, strict=True))
    step_coupled = max(e.end for e in timeline_coupled)
    return Simulation(
        step,
        step_coupled,
        _bubble(most, step),
        _bubble(most, span),
        _bubble(most, step_coupled),
        peak_stashes(table),
        peak_stashes(table, count_stash=True),
        timeline,
        timeline_coupled,
    )


def _bubble(work: float, time: float) -> float:
    return max(0.0, 1 - work / time) if time > 0 else 0.0


def _durations(table: Table, times: Times, shares: Sequence[float] | None) -> list[list[float]]:
    """[op][unit] → time."""
    if shares is None:
        shares = [table.stages / table.units] * table.units
    base = {Op.IDLE: 0.0, Op.F: times.F, Op.R: times.R, Op.B: times.B, Op.W: times.W}
    return [[base[op] * share for share in shares] for op in Op]


def _head_time(table: Table, times: Times) -> float:
    return times.head / (table.stages if table.vocabulary == "parallel" else 1)


def neighbours(table: Table) -> list[list[int]]:
    """The stages with which each stage exchanges messages when a row permutes."""
    p = table.stages
    pairs = [(s, s + 1) for s in range(p - 1)] + ([(p - 1, 0)] if wraps(table.place, p) and p > 2 else [])
    return [sorted({b if a == s else a for a, b in pairs if s in (a, b)}) for s in range(p)]


# --- the independent clock -------------------------------------------------------------------------------------------------------


def independent(table: Table, times: Times, shares: Sequence[float] | None = None, fused_backward: bool = False) -> list[Event]:
    """The timeline of stages that wait for messages only, each in its own order."""
    p, last = table.stages, table.units - 1
    ways = directions(table.place, p)
    duration, head_time = _durations(table, times, shares), _head_time(table, times)
    together = table.vocabulary == "parallel" and head_time > 0 and p > 1
    orders = _orders(table, together)
    if fused_backward:
        _check_fused(table, orders)
    there: dict[tuple, float] = {}  # message → when it can be read
    waiting: dict[int, list[float]] = {}  # microbatch → when each stage came to its head
    at, clock = [0] * p, [0.0] * p
    events: list[Event] = []
    todo = list(range(p))
    while todo:
        moved = False
        for s in todo:
            order = orders[s]
            while at[s] < len(order):
                op, g, k = order[at[s]]
                if op < 0:  # the head
                    ready = there.get(("x", last + 1, k))
                    if ready is None:
                        break
                    if together:
                        came = waiting.setdefault(k, [-1.0] * p)
                        came[s] = clock[s]
                        if min(came) < 0:
                            break
                        ready += times.message
                        start = max(*came, ready)
                    else:
                        start = max(clock[s], ready)
                    end = start + head_time
                    there["g", last, k] = end
                    clock[s] = end
                    if head_time:
                        events.append(Event(s, "H", -1, k, start, end))
                    at[s] += 1
                    moved = True
                    continue
                need = needs((op, g, k))
                if need is not None and need[:2] != ("x", 0):
                    if need not in there:
                        break
                    start = max(clock[s], there[need])
                else:
                    start = clock[s]
                clock[s] = end = start + duration[op][g]
                events.append(Event(s, Op(op).name, g, k, start, end))
                made = makes((op, g, k), table.place, ways)
                if fused_backward and op in (Op.B, Op.W):
                    made = makes((Op.B, g, k), table.place, ways) if op == Op.W else None
                if made is not None:
                    there[made[0]] = end + (times.message if made[1] else 0.0)
                at[s] += 1
                moved = True
        todo = [s for s in todo if at[s] < len(orders[s])]
        if todo and not moved:
            raise ValueError(f"{table.name}: stages {todo} wait for each other; check the table first")
    return events


def _orders(table: Table, together: bool) -> list[list[Cell]]:
    """Each stage's cells in order; the head of microbatch k is (−1, −1, k), on the last unit's stage or on all."""
    orders: list[list[Cell]] = [[] for _ in range(table.stages)]
    end = table.place[-1]
    for row, head in zip(table.rows(), table.head.tolist(), strict=True):
        for s, cell in enumerate(row):
            if cell is not None:
                orders[s].append(cell)
            if head >= 0 and (together or s == end):
                orders[s].append((-1, -1, head))
    return orders


def _check_fused(table: Table, orders: list[list[Cell]]) -> None:
    for order in orders:
        cells = [c for c in order if c[0] >= 0]
        for cell, after in zip(cells, [*cells[1:], None], strict=True):
            if cell[0] == Op.B and after != (Op.W, *cell[1:]):
                raise ValueError(f"fused_backward needs W right after its B; {table.name} has {task(cell, table.place)} on its own")


# --- the coupled clock -----------------------------------------------------------------------------------------------------------


def coupled(table: Table, times: Times, shares: Sequence[float] | None = None) -> list[Event]:
    """The timeline of the rows as this runtime executes them."""
    events: list[Event] = []
    walk(table, times, shares, events)
    return events


def walk(table: Table, times: Times, shares: Sequence[float] | None = None, events: list[Event] | None = None) -> float:
    """The coupled step time; adds to `events` if given."""
    p, end_stage = table.stages, table.place[-1]
    duration, head_time, near, message = _durations(table, times, shares), _head_time(table, times), neighbours(table), times.message
    together = table.vocabulary == "parallel" and p > 1
    start = [0.0] * p
    for row, when, head in zip(table.rows(), table.permute.tolist(), table.head.tolist(), strict=True):
        if times.row:
            start = [time + times.row for time in start]
        end = [start[s] + duration[c[0]][c[1]] if c is not None else start[s] for s, c in enumerate(row)]
        if events is not None:
            events += [Event(s, Op(c[0]).name, c[1], c[2], start[s], end[s]) for s, c in enumerate(row) if c is not None]
        if head >= 0 and head_time > 0:
            begins = [max(max(end), end[end_stage] + message)] * p if together else end
            stages = range(p) if together else [end_stage]
            if events is not None:
                events += [Event(s, "H", -1, head, begins[s], begins[s] + head_time) for s in stages]
            end = [begins[s] + head_time if s in stages else end[s] for s in range(p)]
        if when == Permute.NONE:
            start = end
        else:
            sent = start if when == Permute.EARLY else end
            start = [max(end[s], *[sent[n] + message for n in near[s]]) if near[s] else end[s] for s in range(p)]
    return max(start)
