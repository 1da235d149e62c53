"""Packing: the orders of the stages' ops become a table. Chunks are cut into units, ops get their
ticks, and ticks their permutes.

There are four packings; the coupled clock (clocks/coupled.py) says which is fastest:

    late      every tick that makes messages ends with a permute. It needs the fewest ticks; a tick
              lasts as long as the longest op of a stage and its neighbours
    early     every tick begins with a permute, which overlaps with the tick's ops; its messages are
              read a tick later. A stage waits only for its neighbours' starts, so ops of different
              lengths run side by side
    spaced    `early` with an idle tick after every F, which costs no time. So F takes two ticks, as
              B with its W does, and neighbours keep step, one at its F and the other at its B and
              W: their ticks begin at nearly the same time
    aligned   F and B stand in pairs of ticks, W and R in the ticks after them. The pair's first
              tick ends with a permute, its second has none, and the tick of Ws begins with one

    1f1b, 3 stages, 4 microbatches

    late     stage 0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 .  B2 W2 .  B3 W3
             stage 1   .  F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 .  B3 W3 .
             stage 2   .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 .  .
    spaced   stage 0   F0 .  F1 .  F2 .  .  .  .  .  B0 W0 F3 .  B1 W1 .  .  B2 W2 .  .  B3 W3
             stage 1   .  .  F0 .  F1 .  .  .  B0 W0 F2 .  B1 W1 F3 .  B2 W2 .  .  B3 W3 .  .
             stage 2   .  .  .  .  F0 .  B0 W0 F1 .  B1 W1 F2 .  B2 W2 F3 .  B3 W3 .  .  .  .

Each stage keeps its order of F and B; in `aligned` a W or R may move by one. An F that shares a
cell with the B after it waits until both are ready; `aligned` takes no such orders.

How to read this file: `cut_into_units` turns an order of chunks into one of units, `Tasks` puts all
orders into arrays and knows what each task waits for, `pack_into_ticks` packs them, by
`_pack_in_order` (three packings) or `_pack_aligned`. No JAX here.
"""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from jaxtrain.schedule.cell_grid import CellGrid, from_grid
from jaxtrain.schedule.orders.stage_orders import Orders, Task
from jaxtrain.schedule.table import (
    Op,
    Permute,
    ScheduleError,
    Table,
    TableError,
    TableShape,
    cell_name,
    message_ways,
)
from jaxtrain.schedule.transport import NEVER, delays, read_after

PACKINGS = ("late", "aligned", "early", "spaced")
# packings that keep each stage's order, and so hold equally many residuals
IN_ORDER = ("late", "early", "spaced")
PAIR = 2  # ticks of F and B between two ticks of W in `aligned`
MOST_IDLE_TICKS = 3  # one after the other, in a table that ends


def cut_into_units(
    orders: Orders,
    units_per_chunk: Sequence[int],
    recompute: bool,
    recompute_last: bool = False,
    overlapped: frozenset[Task] = frozenset(),
) -> tuple[Orders, tuple[int, ...], frozenset[Task]]:
    """Turns each stage's order of F, B and W on chunks into one on units, the groups of consecutive
    layers that one op handles. Returns (the stages' orders, the chunk of each unit, the Fs that
    share a cell with the B after them).

    units_per_chunk: number of units of each chunk; units are numbered through all chunks
    recompute: add an R before each B, except on the model's last unit
    recompute_last: add it on that unit, too
    overlapped: the Fs on chunks that share a cell with the B after them

    Where a chunk's W follows its B at once, and there are Rs, the units take turns: R, B and W of
    one, then of the next, so that only one unit's activations are rebuilt at a time. The units of
    an F and of an overlapped B take turns, the F's upwards and the B's downwards.
    """
    # One stage with chunk 0 of two units, its order F0 B0 W0 of one microbatch:
    #   without R                     F0 F1  B1 B0  W1 W0    a chunk's Ws come after all its Bs
    #   with R, on the last unit too  F0 F1  R1 B1 W1  R0 B0 W0
    # `begin` has the lowest unit of each chunk, and at its end the number of units.
    begin = [sum(units_per_chunk[:chunk]) for chunk in range(len(units_per_chunk) + 1)]
    last = begin[-1] - 1
    if last + 1 == len(units_per_chunk) and not recompute:
        return orders, tuple(range(len(units_per_chunk))), overlapped
    orders_of_units: Orders = []
    overlapped_units: set[Task] = set()
    for order in orders:
        tasks: list[Task] = []
        done_with_its_b: Task | None = None  # the W whose units have had theirs after each B
        waiting: list[Task] = []  # the Fs of units that share cells with the next Bs
        for (op, chunk, microbatch), following in zip(order, [*order[1:], None], strict=True):
            units = range(begin[chunk], begin[chunk + 1])
            # An overlapped F waits for the B after it. Each unit of the B, from the highest down,
            # takes the next unit of the F, from the lowest up, into its cell; Fs that are left over
            # follow on their own.
            if op == Op.F and (op, chunk, microbatch) in overlapped:
                waiting = [(Op.F, unit, microbatch) for unit in units]
            elif op == Op.F:
                tasks += [(Op.F, unit, microbatch) for unit in units]
            elif op == Op.W and done_with_its_b != (op, chunk, microbatch):
                tasks += [(Op.W, unit, microbatch) for unit in reversed(units)]
            elif op == Op.B:
                w_at_once = recompute and following == (Op.W, chunk, microbatch)
                for unit in reversed(units):
                    if recompute and (unit != last or recompute_last):
                        tasks.append((Op.R, unit, microbatch))
                    if waiting:
                        overlapped_units.add(waiting[0])
                        tasks.append(waiting.pop(0))
                    tasks.append((Op.B, unit, microbatch))
                    if w_at_once:
                        tasks.append((Op.W, unit, microbatch))
                if w_at_once:
                    done_with_its_b = (Op.W, chunk, microbatch)
                tasks += waiting
                waiting = []
        orders_of_units.append(tasks)
    chunk_of = tuple(chunk for chunk, units in enumerate(units_per_chunk) for _ in range(units))
    return orders_of_units, chunk_of, frozenset(overlapped_units)


# A fact is a number, (kind · units + unit) · microbatches + microbatch. Kinds: ACTIVATION, a unit's
# input can be read; GRADIENT, the gradient of its output can be read; DONE + op, the task is done.
# With 4 units and 8 microbatches "F of unit 2 is done on microbatch 5" is fact
# ((2 + 1) · 4 + 2) · 8 + 5 = 117. One array of ticks, `known`, so answers what all stages wait for.
ACTIVATION, GRADIENT, DONE = 0, 1, 2


class Tasks:
    """The tasks of all stages, stage by stage, and the facts that each waits for.

    Arrays have an entry for each task, and after those of each stage one that is never ready.

    begin, end      int [stages]: the entry of each stage's earliest task, and the one after its
                    last
    op, unit, microbatch, way   int [tasks]: the task, and the way of its message (1: to the next
                                stage, −1: to the one before, 0: none, or it stays)
    reads, follows  int [tasks]: the facts that must hold before the task: its message can be read;
                    the earlier op on the same unit and microbatch is done
    sends, does     int [tasks]: the facts that it brings about: its message, itself
    joined          bool [tasks]: an F that shares a cell with the B that is the next task
    known           int64 [facts]: the tick from which on each fact holds
    """

    def __init__(
        self, orders: Orders, shape: TableShape, overlapped: frozenset[Task] = frozenset()
    ):
        self.shape = shape
        # Each stage's tasks end with an idle one that is never ready. So every stage has a next
        # task, and no index runs into the tasks of the following stage.
        closed = [np.array([*order, (Op.IDLE, 0, 0)], np.int32).reshape(-1, 3) for order in orders]
        self.begin = np.cumsum([0, *map(len, closed[:-1])])
        self.end = self.begin + [len(order) - 1 for order in closed]
        self.op, self.unit, self.microbatch = np.concatenate(closed).T.copy()
        self.way = message_ways(shape.stage_of, shape.stages)[self.op, self.unit].astype(np.int64)
        self.joined = np.zeros(len(self.op), bool)
        if overlapped:
            tasks = np.stack([self.op, self.unit, self.microbatch], axis=1).tolist()
            self.joined[:] = [tuple(task) in overlapped for task in tasks]
        kinds = DONE + len(Op)
        # Three further facts: for a task that waits for nothing, for the idle one at a stage's end,
        # and for a result that nobody reads.
        self._always, self._never, self._unread = (
            kinds * shape.units * shape.microbatches + extra for extra in range(3)
        )
        self.does = self._fact(DONE + self.op, self.unit)
        idle, forward, recompute, backward, weights = (
            self.op == op for op in (Op.IDLE, Op.F, Op.R, Op.B, Op.W)
        )
        lowest, last = self.unit == 0, self.unit == self.shape.units - 1
        activation, gradient = self._fact(ACTIVATION, self.unit), self._fact(GRADIENT, self.unit)
        self.reads = np.select(
            [idle, forward & ~lowest, backward], [self._never, activation, gradient], self._always
        )
        f_done, b_done = self._fact(DONE + Op.F, self.unit), self._fact(DONE + Op.B, self.unit)
        self.follows = np.select([backward | recompute, weights], [f_done, b_done], self._always)
        output, input_gradient = (
            self._fact(ACTIVATION, self.unit + 1),
            self._fact(GRADIENT, self.unit - 1),
        )
        # The head is in the tick of the last unit's F, whose message is therefore the gradient that
        # the head makes.
        self.sends = np.select(
            [forward & last, forward, backward & ~lowest],
            [gradient, output, input_gradient],
            self._unread,
        )
        self.forget()

    def _fact(self, kind: int | np.ndarray, unit: np.ndarray) -> np.ndarray:
        """int [tasks]: each task's fact of a kind, of a unit."""
        return (kind * self.shape.units + unit) * self.shape.microbatches + self.microbatch

    def forget(self) -> None:
        """Forgets all facts, so that another table can be packed."""
        self.known = np.full(self._unread + 1, NEVER, np.int64)
        self.known[self._always] = 0

    def ready(self, tasks: np.ndarray, tick: int) -> np.ndarray:
        """bool [tasks]: true for those of `tasks` whose message and earlier op are there at
        `tick`."""
        return (self.known[self.reads[tasks]] <= tick) & (self.known[self.follows[tasks]] <= tick)

    def table(self, ticks: np.ndarray, permutes: list[int]) -> Table:
        """The table of tasks in their ticks.

        ticks: int [tasks], the tick of each task; permutes: the Permute of each tick
        """
        shape = self.shape
        grid = CellGrid.idle(len(permutes), shape.stages)
        stages = np.repeat(np.arange(shape.stages), self.end - self.begin + 1)
        # A joined F is followed by its B, which goes into the same cell, as its overlapped B.
        is_joined_b = np.append(False, self.joined[:-1])
        tasks = np.flatnonzero((self.op != Op.IDLE) & ~is_joined_b)
        cells = ticks[tasks], stages[tasks]
        grid.op[cells], grid.unit[cells] = self.op[tasks], self.unit[tasks]
        grid.microbatch[cells] = self.microbatch[tasks]
        tasks = np.flatnonzero(is_joined_b)
        cells = ticks[tasks], stages[tasks]
        grid.b_unit[cells], grid.b_microbatch[cells] = self.unit[tasks], self.microbatch[tasks]
        return from_grid(shape, grid, permute=permutes)

    def refuse_endless(self, tick: int, waiting: np.ndarray) -> NoReturn:
        """Raises TableError, because no message ever comes for the tasks that wait in a tick.

        waiting: int [stages], each stage's next task
        """
        stage = int(np.flatnonzero(self.op[waiting])[0])
        op, unit, microbatch = (
            int(array[waiting[stage]]) for array in (self.op, self.unit, self.microbatch)
        )
        name = cell_name((op, unit, microbatch), self.shape.stage_of)
        raise TableError(
            f"the order of {self.shape.name!r} never finishes: {name} is next and waits for ever",
            tick,
            stage,
        )


def pack_into_ticks(tasks: Tasks, packing: str) -> Table:
    """The table of tasks, packed by one of PACKINGS. Raises TableError for an order that can never
    finish, and ScheduleError for overlapped cells in `aligned`."""
    tasks.forget()
    if packing == "aligned":
        if tasks.joined.any():
            raise ScheduleError("permute='aligned' takes no overlapped cells", use=IN_ORDER[0])
        return _pack_aligned(tasks)
    when = Permute.LATE if packing == "late" else Permute.EARLY
    return _pack_in_order(tasks, when, ticks_of_f=2 if packing == "spaced" else 1)


def _pack_in_order(tasks: Tasks, when: Permute, ticks_of_f: int) -> Table:
    """Packs every task into the earliest tick in which it is ready, in order; an F occupies its
    stage for `ticks_of_f` ticks.

    A tick's messages are sent at its end or, if `when` is early, at the next tick's start. So no
    send buffer is ever occupied when the next message is made.
    """
    ticks = np.full(len(tasks.op), -1)
    following, free, known = tasks.begin.copy(), np.zeros(len(tasks.begin), int), tasks.known
    delay = delays(tasks.way, when)
    # Spaced: an F is followed by an idle tick, as a B is by its W, so that neighbours keep step. An
    # overlapped cell is as long as a B with its W, and needs none.
    duration = np.where((tasks.op == Op.F) & ~tasks.joined, ticks_of_f, 1)
    permutes: list[int] = []
    remaining, idle = int((tasks.end - tasks.begin).sum()), 0
    while remaining:
        # All stages that are free choose before anything of this tick becomes known: a result can
        # be read in the next tick at the earliest.
        tick = len(permutes)
        # An F that shares its cell with the next B waits for what that needs, too.
        with_b = np.where(tasks.joined[following], following + 1, following)
        ready = tasks.ready(following, tick) & tasks.ready(with_b, tick)
        stages = np.flatnonzero(ready & (free <= tick))
        begun = following[stages]
        free[stages] = tick + duration[begun]
        following[stages] += 1 + tasks.joined[begun]
        done = np.concatenate([begun, begun[tasks.joined[begun]] + 1])
        ticks[done] = tick
        known[tasks.sends[done]] = tick + delay[done]
        known[tasks.does[done]] = tick + 1
        remaining -= len(done)
        permutes.append(when if when == Permute.EARLY or tasks.way[done].any() else Permute.NONE)
        # A message travels for at most two ticks, and an F occupies two. After more idle ticks of
        # all stages nothing is on its way, and nothing will ever come.
        idle = 0 if len(done) else idle + 1
        if idle > MOST_IDLE_TICKS:
            tasks.refuse_endless(tick, following)
    return tasks.table(ticks, permutes)


class _Lane:
    """The tasks of some ops in order. Those of each stage are followed by one that is never ready.

    at: int [stages], the index of each stage's next task
    """

    def __init__(self, tasks: Tasks, *ops: Op):
        self.tasks = np.flatnonzero(np.isin(tasks.op, (*ops, Op.IDLE)))
        self.begin = np.searchsorted(self.tasks, tasks.begin)
        self.end = np.searchsorted(self.tasks, tasks.end)
        self.at = self.begin.copy()

    @property
    def following(self) -> np.ndarray:
        """int [stages]: each stage's next task."""
        return self.tasks[self.at]


class _Lanes:
    """Each stage's order as three lanes for `aligned`: F and B; W; and R, which only has to be done
    before its B."""

    def __init__(self, tasks: Tasks):
        self._tasks = tasks
        self.main, self.weights, self.recomputes = (
            _Lane(tasks, Op.F, Op.B),
            _Lane(tasks, Op.W),
            _Lane(tasks, Op.R),
        )
        # For each task of `main`: the indices in their lanes of the earliest W and the earliest R
        # that come after it in its stage's order.
        self._weights_before = np.searchsorted(self.weights.tasks, self.main.tasks)
        self._recomputes_before = np.searchsorted(self.recomputes.tasks, self.main.tasks)
        self._is_f = tasks.op[self.main.tasks] == Op.F
        # bool [stages, 2]: a message waits in the stage's send buffer, to the stage before, to the
        # next
        self._buffered = np.zeros((len(tasks.begin), 2), bool)
        self._waiting: list[np.ndarray] = []  # the facts of these messages

    def quiet(self, tick: int) -> np.ndarray:
        """int [stages]: the task of each stage in a tick of W and R: the R that one of the stage's
        next two Fs and Bs needs, else its next W if that is ready; −1: none."""
        # `second`: the index of the later one of the stage's next two Fs and Bs. An R that stands
        # before it in the order is needed in the next pair of ticks, and so goes before a W.
        tasks, main = self._tasks, self.main
        second = np.minimum(main.at + PAIR, main.end) - 1
        r, w = self.recomputes.following, self.weights.following
        needed = (
            (main.end > main.begin)
            & (self._recomputes_before[second] > self.recomputes.at)
            & tasks.ready(r, tick)
        )
        return np.where(needed, r, np.where(tasks.ready(w, tick), w, -1))

    def busy(self, tick: int) -> np.ndarray:
        """int [stages]: the task of each stage in a tick of F and B: the next one, if it is ready;
        −1: none.

        An F is ready if at most one W from before it remains, a B if every R from before it is
        done.
        """
        tasks, at = self._tasks, self.main.at
        candidates = self.main.following
        behind = self._is_f[at] & (self._weights_before[at] - 1 > self.weights.at)
        # A stage has one send buffer for each way. While a message waits in it for the tick's
        # permute, an op whose message would overwrite it has to wait, too.
        way = tasks.way[candidates]
        blocked = (way != 0) & self._buffered[np.arange(len(at)), (way > 0).astype(int)]
        recomputed = self._recomputes_before[at] <= self.recomputes.at
        return np.where(
            tasks.ready(candidates, tick) & ~behind & ~blocked & recomputed, candidates, -1
        )

    def do(self, chosen: np.ndarray, tick: int) -> np.ndarray:
        """Does the tasks of a tick and returns them.

        chosen: int [stages], −1 for a stage without a task
        """
        tasks = self._tasks
        stages = np.flatnonzero(chosen >= 0)
        done = chosen[stages]
        op, way = tasks.op[done], tasks.way[done]
        tasks.known[tasks.does[done]] = tick + 1
        tasks.known[tasks.sends[done[way == 0]]] = read_after(tick)
        moving = way != 0
        if moving.any():
            self._buffered[stages[moving], (way[moving] > 0).astype(int)] = True
            self._waiting.append(tasks.sends[done[moving]])
        self.main.at[stages] += (op == Op.F) | (op == Op.B)
        self.weights.at[stages] += op == Op.W
        self.recomputes.at[stages] += op == Op.R
        return done

    def send(self, tick: int, when: Permute) -> Permute:
        """Sends the messages that wait, by a permute in this tick: returns `when`, or NONE if there
        is nothing to send."""
        if not self._waiting:
            return Permute.NONE
        self._tasks.known[np.concatenate(self._waiting)] = read_after(tick)
        self._waiting.clear()
        self._buffered[:] = False
        return when

    def unfinished(self) -> bool:
        """True while any stage has an F, B or W to do."""
        return bool(
            self._tasks.op[self.main.following].any()
            or self._tasks.op[self.weights.following].any()
        )


def _pack_aligned(tasks: Tasks) -> Table:
    """Packs in turn two ticks of F and B, in which a stage without a ready one does a W or R, and
    one tick of W and R, or two with recompute."""
    lanes = _Lanes(tasks)
    quiet_ticks = 2 if (tasks.op == Op.R).any() else 1
    ticks = np.full(len(tasks.op), -1)
    permutes: list[int] = []
    # 1f1b on 2 stages, some ticks in the middle; a pair of ticks of F and B, then one of W:
    #   stage 0    .   B0 F2   W0   B1 F3   W1
    #   stage 1    W0  F1 B1   W1   F2 B2   W2
    #   permute  early   –    early   –    early
    # Ticks of F and B since the last tick of W, ticks of W since then, idle ticks up to now.
    since, quiet, idle = 0, 0, 0
    waiting = lanes.quiet(0)
    while lanes.unfinished():
        tick, any_waits = len(permutes), (waiting >= 0).any()
        if any_waits and (since >= PAIR or 0 < quiet < quiet_ticks):
            when = lanes.send(tick, Permute.EARLY)
            done = lanes.do(waiting, tick)
            since, quiet = 0, quiet + 1
            waiting = lanes.quiet(tick + 1)
        else:
            busy = lanes.busy(tick)
            done = lanes.do(np.where(busy >= 0, busy, waiting), tick)
            since, quiet = since + 1, 0
            waiting = lanes.quiet(tick + 1)
            # A tick of W and R follows, and sends at its start.
            when = (
                Permute.NONE
                if since >= PAIR and (waiting >= 0).any()
                else lanes.send(tick, Permute.LATE)
            )
        ticks[done] = tick
        permutes.append(when)
        idle = 0 if len(done) else idle + 1
        if idle > MOST_IDLE_TICKS:
            tasks.refuse_endless(tick, lanes.main.following)
    return tasks.table(ticks, permutes)
