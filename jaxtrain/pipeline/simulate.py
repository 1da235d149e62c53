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
from collections.abc import Sequence

from jaxtrain.pipeline.table import Cell, Message, Op, Permute, Table, directions, makes, needs, peak_stashes, task, wraps


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


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` finds. Bubbles are fractions of time that the busiest stage is idle.

    step_time, step_time_coupled       by the independent and by the coupled clock
    bubble_fraction                    1 − busiest stage's work / step_time
    bubble_fraction_span               1 − busiest stage's work / longest time from a stage's first op to the end of its last one
                                       (Qi et al. 2023: the optimizer's step follows on each stage without a barrier)
    bubble_fraction_coupled            1 − busiest stage's work / step_time_coupled
    imbalance                          busiest stage's work / mean work of a stage
    peak_activations                   `peak_stashes`: in chunk stashes, from F to the end of B
    peak_activations_with_stash        the same, to the end of W
    timeline, timeline_coupled         by each clock
    """

    step_time: float
    step_time_coupled: float
    bubble_fraction: float
    bubble_fraction_span: float
    bubble_fraction_coupled: float
    imbalance: float
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
        most * table.stages / sum(busy) if most else 1.0,
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


HEAD, EMBED, EMBED_GRADIENT = -1, -2, -3  # ops of columns, which all stages may share


def _shared(table: Table, times: Times) -> dict[int, tuple[str, float, bool]]:
    """Of each column's op: (name of its event, its time on a stage, whether all stages take part and wait for each other)."""
    p = table.stages if table.vocabulary == "parallel" else 1
    whole = {HEAD: ("H", times.head), EMBED: ("E", times.embed), EMBED_GRADIENT: ("E", times.embed)}
    return {op: (name, time / p, p > 1 and time > 0) for op, (name, time) in whole.items()}


def neighbours(table: Table) -> list[list[int]]:
    """The stages with which each stage exchanges messages when a row permutes."""
    p = table.stages
    pairs = [(s, s + 1) for s in range(p - 1)] + ([(p - 1, 0)] if wraps(table.place, p) and p > 2 else [])
    return [sorted({b if a == s else a for a, b in pairs if s in (a, b)}) for s in range(p)]


# --- the independent clock -------------------------------------------------------------------------------------------------------


def independent(table: Table, times: Times, shares: Sequence[float] | None = None, fused_backward: bool = False) -> list[Event]:
    """The timeline of stages that wait for messages only, each in its own order."""
    run = _Independent(table, times, shares, fused_backward)
    orders = _orders(table, run.shared)
    if fused_backward:
        _check_fused(table, orders)
    at = [0] * table.stages
    todo = list(range(table.stages))
    while todo:
        before = list(at)
        for s in todo:
            while at[s] < len(orders[s]) and run.take(s, orders[s][at[s]]):
                at[s] += 1
        if at == before:
            raise ValueError(f"{table.name}: stages {todo} wait for each other; check the table first")
        todo = [s for s in todo if at[s] < len(orders[s])]
    return run.events


class _Independent:
    """Stages with their clocks, and the messages that have been made."""

    def __init__(self, table: Table, times: Times, shares: Sequence[float] | None, fused_backward: bool):
        self.place, self.last, self.ways = table.place, table.units - 1, directions(table.place, table.stages)
        self.duration, self.shared = _durations(table, times, shares), _shared(table, times)
        self.message, self.fused = times.message, fused_backward
        self.clock = [0.0] * table.stages
        self.there: dict[Message, float] = {}  # when each message can be read
        self.came: dict[tuple[int, int], dict[int, float]] = {}  # (shared op, microbatch) → stage → when it came to it
        self.events: list[Event] = []

    def take(self, s: int, cell: Cell) -> bool:
        """Runs a stage's next cell, unless what it waits for is not known yet."""
        op, g, k = cell
        if op < 0:
            return self._take_shared(s, op, k)
        need = needs(cell)
        if need is not None and need not in self.there:
            return False
        start = self.clock[s] if need is None else max(self.clock[s], self.there[need])
        self._run(s, Op(op).name, g, k, start, self.duration[op][g])
        made = makes((Op.B, g, k) if self.fused and op == Op.W else cell, self.place, self.ways)
        if self.fused and made is not None and made[1] and op == Op.B:
            made = None  # B and W in one: the message leaves after W
        if made is not None:
            self.there[made[0]] = self.clock[s] + (self.message if made[1] else 0.0)
        return True

    def _take_shared(self, s: int, op: int, k: int) -> bool:
        """As `take`, for a column's op: on one stage, or on all when the last of them has come."""
        name, time, together = self.shared[op]
        need: Message | None = {HEAD: ("x", self.last + 1, k), EMBED_GRADIENT: ("g", -1, k)}.get(op)
        if need is not None and need not in self.there:
            return False
        start = self.clock[s] if need is None else max(self.clock[s], self.there[need] + (self.message if together else 0.0))
        if together:
            came = self.came.setdefault((op, k), {})
            came.setdefault(s, start)
            if len(came) < len(self.clock):
                return False
            start = max(came.values())
        self._run(s, name, -1, k, start, time)
        if op != EMBED_GRADIENT:
            self.there[("g", self.last, k) if op == HEAD else ("x", 0, k)] = start + time
        return True

    def _run(self, s: int, name: str, g: int, k: int, start: float, time: float) -> None:
        self.clock[s] = start + time
        if time > 0 or g >= 0:
            self.events.append(Event(s, name, g, k, start, start + time))


def _orders(table: Table, shared: dict[int, tuple[str, float, bool]]) -> list[list[Cell]]:
    """Each stage's cells in order; a column's op on microbatch k is (op, −1, k), on its own stage or on all."""
    orders: list[list[Cell]] = [[] for _ in range(table.stages)]
    home = {EMBED: table.place[0], HEAD: table.place[-1], EMBED_GRADIENT: table.place[0]}
    columns = zip(table.rows(), table.embed.tolist(), table.head.tolist(), table.embed_gradient.tolist(), strict=True)
    for row, embed, head, gradient in columns:
        for s, cell in enumerate(row):
            for op, k in ((EMBED, embed), (0, -1), (HEAD, head), (EMBED_GRADIENT, gradient)):
                if op == 0:
                    orders[s] += [cell] if cell is not None else []
                elif k >= 0 and (s == home[op] or shared[op][2]):
                    orders[s].append((op, -1, k))
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
    p, first, last, message = table.stages, table.place[0], table.place[-1], times.message
    duration, near, shared = _durations(table, times, shares), neighbours(table), _shared(table, times)

    def share(op: int, k: int, clock: list[float], source: int | None) -> list[float]:
        """The clocks after a column's op; `source` is the stage whose value all need first."""
        name, time, together = shared[op]
        if k < 0 or time == 0:
            return clock
        stages = range(p) if together else [first if source is None else source]
        begin = max(clock[s] for s in stages)
        if together and source is not None:
            begin = max(begin, clock[source] + message)
        if events is not None:
            events.extend(Event(s, name, -1, k, begin, begin + time) for s in stages)
        return [begin + time if s in stages else clock[s] for s in range(p)]

    start = [0.0] * p
    columns = (table.permute.tolist(), table.embed.tolist(), table.head.tolist(), table.embed_gradient.tolist())
    for row, when, embed, head, gradient in zip(table.rows(), *columns, strict=True):
        if times.row:
            start = [time + times.row for time in start]
        begin = share(EMBED, embed, start, None)
        end = [begin[s] + duration[c[0]][c[1]] if c is not None else begin[s] for s, c in enumerate(row)]
        if events is not None:
            events += [Event(s, Op(c[0]).name, c[1], c[2], begin[s], end[s]) for s, c in enumerate(row) if c is not None]
        end = share(EMBED_GRADIENT, gradient, share(HEAD, head, end, last), first)
        if when == Permute.NONE:
            start = end
        else:
            sent = start if when == Permute.EARLY else end
            start = [max(end[s], *[sent[n] + message for n in near[s]]) if near[s] else end[s] for s in range(p)]
    return max(start)
