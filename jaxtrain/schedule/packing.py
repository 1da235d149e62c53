"""From the order of each stage's ops to a table: chunks become units, cells get their ticks and ticks their permutes.

Four ways to pack an order into ticks, for the coupled clock of simulate.py:

    late      every row that makes messages ends with a permute. The fewest rows; a row lasts as long as the longest op near it
    early     every row begins with a permute, under its ops; what it brings is read a row later. A stage waits for its neighbours'
              starts alone, so ops of different lengths run side by side
    spaced    as early, with an idle row after every F. The row costs no time; F takes two rows, then, and B with its W takes two, so that
              neighbours keep step, one at its F and the other at its B and W: their rows begin at nearly the same time
    aligned   F and B stand in pairs of rows, W and R in rows after them: late permute, none, then an early one under the W's

    1f1b, 3 stages, 4 microbatches   late                                      spaced
    stage 0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 .  B2 W2 .  B3 W3    F0 .  F1 .  F2 .  .  .  .  .  B0 W0 F3 .  B1 W1 .  .  B2 W2 .  .  B3 W3
    stage 1   .  F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 .  B3 W3 .     .  .  F0 .  F1 .  .  .  B0 W0 F2 .  B1 W1 F3 .  B2 W2 .  .  B3 W3 .  .
    stage 2   .  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 .  .     .  .  .  .  F0 .  B0 W0 F1 .  B1 W1 F2 .  B2 W2 F3 .  B3 W3 .  .  .  .

Each stage keeps its order of F and B; in `aligned` W's and R's may move by one. No JAX here.
"""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from jaxtrain.schedule.orders import Orders
from jaxtrain.schedule.table import Cell, Op, Permute, Table, TableError, from_arrays, message_ways, task

NEVER = np.iinfo(np.int64).max

PACKINGS = ("late", "aligned", "early", "spaced")
IN_ORDER = ("late", "early", "spaced")  # those that keep each stage's order, so that they all hold as many stashes
PAIR = 2  # rows of F and B between two rows of W in `aligned`


def expand(orders: Orders, groups: Sequence[int], recompute: bool, last_too: bool = False) -> tuple[Orders, tuple[int, ...]]:
    """(orders of units, the chunk of each unit) from orders of chunks and the number of ops that each chunk is cut into.

    With `recompute` units have R ops, the last one only if `last_too`. A chunk's W follows its B at once or later; at once, and with R,
    group by group: R, B, W, so that one group is rebuilt at a time.
    """
    first = [sum(groups[:c]) for c in range(len(groups) + 1)]
    last = first[-1] - 1
    if last + 1 == len(groups) and not recompute:
        return orders, tuple(range(len(groups)))
    expanded: Orders = []
    for order in orders:
        cells: list[Cell] = []
        skip: Cell | None = None
        for (op, c, k), after in zip(order, [*order[1:], None], strict=True):
            units = range(first[c], first[c + 1])
            if op == Op.F:
                cells += [(Op.F, g, k) for g in units]
            elif op == Op.W and skip != (op, c, k):
                cells += [(Op.W, g, k) for g in reversed(units)]
            elif op == Op.B:
                at_once = recompute and after == (Op.W, c, k)
                for g in reversed(units):
                    cells += [(Op.R, g, k)] * (recompute and (g != last or last_too)) + [(Op.B, g, k)] + [(Op.W, g, k)] * at_once
                if at_once:
                    skip = (Op.W, c, k)
        expanded.append(cells)
    return expanded, tuple(c for c, n in enumerate(groups) for _ in range(n))


class Tasks:
    """Every stage's cells one after the other, and what each waits for: arrays with an entry a cell, and a last one, that is never ready,
    after each stage's own.

    A *fact* is a number: that a message can be read, or that a task is done. `known[fact]` is the row from which on it holds.
    """

    def __init__(self, orders: Orders, stage_of: tuple[int, ...], stages: int, microbatches: int):
        self.stage_of, self.stages, self.microbatches = stage_of, stages, microbatches
        units, m = len(stage_of), microbatches
        closed = [np.array([*order, (Op.IDLE, 0, 0)], np.int32).reshape(-1, 3) for order in orders]
        self.begin = np.cumsum([0, *map(len, closed[:-1])])  # of each stage, its first cell
        self.end = self.begin + [len(order) - 1 for order in closed]
        self.op, self.unit, self.microbatch = np.concatenate(closed).T.copy()
        ways = message_ways(stage_of, stages)
        self.way = ways[self.op, self.unit].astype(np.int64)
        size = units * m
        fact = lambda kind, unit: (kind * units + unit) * m + self.microbatch
        x, g, done = 0, 1, 2  # message to F, message to B, and from 2 + op on: the task is done
        self.always, self.never, self.nobody = (7 * size + i for i in range(3))
        of = {op: self.op == op for op in (Op.IDLE, Op.F, Op.R, Op.B, Op.W)}
        reads = np.full(len(self.op), self.always)
        reads[of[Op.IDLE]] = self.never
        reads[of[Op.F]] = np.where(self.unit == 0, self.always, fact(x, self.unit))[of[Op.F]]
        reads[of[Op.B]] = fact(g, self.unit)[of[Op.B]]
        own = np.full(len(self.op), self.always)
        own[of[Op.B] | of[Op.R]] = fact(done + Op.F, self.unit)[of[Op.B] | of[Op.R]]
        own[of[Op.W]] = fact(done + Op.B, self.unit)[of[Op.W]]
        gives = np.full(len(self.op), self.nobody)
        to = np.where(self.unit == units - 1, fact(g, self.unit), fact(x, self.unit + 1))  # the head is in the row of the last unit's F
        gives[of[Op.F]] = to[of[Op.F]]
        gives[of[Op.B]] = np.where(self.unit == 0, self.nobody, fact(g, self.unit - 1))[of[Op.B]]
        self.reads, self.own, self.gives, self.does = reads, own, gives, fact(done + self.op, self.unit)
        self.forget()

    def forget(self) -> None:
        """Nothing is known yet: another table can be packed."""
        self.known = np.full(self.nobody + 1, NEVER)
        self.known[self.always] = 0

    def fits(self, cells: np.ndarray, t: int) -> np.ndarray:
        """Whether row t may hold each of these cells, as far as its message and its own earlier op go."""
        return (self.known[self.reads[cells]] <= t) & (self.known[self.own[cells]] <= t)

    def table(self, rows: np.ndarray, ticks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int32 [ticks, stages] op, unit and microbatch of cells in these rows."""
        op = np.full((ticks, self.stages), Op.IDLE, np.int32)
        unit, microbatch = (np.full((ticks, self.stages), -1, np.int32) for _ in range(2))
        cells = np.flatnonzero(self.op)
        at = rows[cells], np.repeat(np.arange(self.stages), self.end - self.begin)
        for array, values in ((op, self.op), (unit, self.unit), (microbatch, self.microbatch)):
            array[at] = values[cells]
        return op, unit, microbatch

    def refuse_endless(self, name: str, t: int, waiting: np.ndarray) -> NoReturn:
        """TableError for cells, one a stage, that wait in row t while nothing can come any more."""
        s = int(np.flatnonzero(self.op[waiting])[0])
        op, unit, microbatch = (int(a[waiting[s]]) for a in (self.op, self.unit, self.microbatch))
        raise TableError(
            f"the order of {name!r} never finishes: {task((op, unit, microbatch), self.stage_of)} is next and waits for ever", t, s
        )


def pack_into_ticks(
    tasks: Tasks,
    name: str,
    mode: str,
    *,
    chunk_of: tuple[int, ...] | None = None,
    recompute: bool = False,
    recompute_last: bool = False,
    forward_only: bool = False,
    vocabulary: str = "parallel",
) -> Table:
    """The table of an order of units, by mode. Raises TableError for an order that can never finish."""
    tasks.forget()
    if mode == "aligned":
        rows, permutes = _pack_aligned(tasks, name)
    else:
        rows, permutes = _pack_in_order(tasks, name, early=mode != "late", rows_of_f=2 if mode == "spaced" else 1)
    return from_arrays(
        *tasks.table(rows, len(permutes)),
        name,
        tasks.stage_of,
        tasks.stages,
        tasks.microbatches,
        chunk_of=chunk_of,
        permute=permutes,
        recompute=recompute,
        recompute_last=recompute_last,
        forward_only=forward_only,
        vocabulary=vocabulary,
    )


MOST_IDLE_ROWS = 3  # one after the other, in a table that ends


def _pack_in_order(tasks: Tasks, name: str, early: bool, rows_of_f: int) -> tuple[np.ndarray, list[int]]:
    """(the row of each cell, the permute of each row): every cell in the first row in which it fits, in order; an F keeps its stage for
    `rows_of_f` rows.

    Every row that makes messages sends them, at its end or, if early, at the next one's start: no buffer is ever in the way.
    """
    rows = np.full(len(tasks.op), -1)
    at, free, known = tasks.begin.copy(), np.zeros(tasks.stages, int), tasks.known
    delay = np.where(tasks.way != 0, 2 if early else 1, 1)
    keeps = np.where(tasks.op == Op.F, rows_of_f, 1)
    permutes: list[int] = []
    left, idle = int((tasks.end - tasks.begin).sum()), 0
    while left:
        t = len(permutes)
        stages = np.flatnonzero(tasks.fits(at, t) & (free <= t))
        cells = at[stages]
        rows[cells] = t
        known[tasks.gives[cells]] = t + delay[cells]
        known[tasks.does[cells]] = t + 1
        free[stages] = t + keeps[cells]
        at[stages] += 1
        left -= len(cells)
        permutes.append(Permute.EARLY if early else Permute.LATE if tasks.way[cells].any() else Permute.NONE)
        idle = 0 if len(cells) else idle + 1
        if idle > MOST_IDLE_ROWS:
            tasks.refuse_endless(name, t, at)
    return rows, permutes


class _Lanes:
    """Each stage's order cut in two for `aligned`: F and B, and W; R's are done in time for their B's.

    A lane is the cells of some ops, in order, each stage's followed by one that is never ready; `at` is each stage's next one.
    """

    def __init__(self, tasks: Tasks):
        self.tasks = tasks
        of = lambda *ops: np.isin(tasks.op, (*ops, Op.IDLE))
        self.main, self.weights, self.recomputes = (np.flatnonzero(of(*ops)) for ops in ((Op.F, Op.B), (Op.W,), (Op.R,)))
        firsts = lambda lane: np.searchsorted(lane, tasks.begin)
        self.first_main, self.first_weights, self.first_recomputes = map(firsts, (self.main, self.weights, self.recomputes))
        self.last_main = np.searchsorted(self.main, tasks.end)
        self.at_main, self.at_weights, self.at_recomputes = (a.copy() for a in (self.first_main, self.first_weights, self.first_recomputes))
        # Of each cell of `main`: the W's and R's before it in its stage's order, as places in their lanes.
        self.weights_before = np.searchsorted(self.weights, self.main)
        self.recomputes_before = np.searchsorted(self.recomputes, self.main)
        self.is_f = tasks.op[self.main] == Op.F
        self.buffered = np.zeros((tasks.stages, 2), bool)  # whether a message waits in the send buffer down, up
        self.pending: list[np.ndarray] = []  # what those messages are

    def quiet(self, t: int) -> np.ndarray:
        """Of each stage, an R that one of the next two cells of its order wants, else a W, if there is one to do; −1: none."""
        tasks = self.tasks
        ahead = np.minimum(self.at_main + PAIR, self.last_main) - 1
        r, w = self.recomputes[self.at_recomputes], self.weights[self.at_weights]
        wanted = (self.last_main > self.first_main) & (self.recomputes_before[ahead] > self.at_recomputes) & tasks.fits(r, t)
        return np.where(wanted, r, np.where(tasks.fits(w, t), w, -1))

    def busy(self, t: int) -> np.ndarray:
        """Of each stage, its next F or B, if it fits: an F has at most one W of those before it in the order still to do, a B all its R's
        done; −1: none."""
        tasks, at = self.tasks, self.at_main
        cells = self.main[at]
        behind = self.is_f[at] & (self.weights_before[at] - 1 > self.at_weights)
        way = tasks.way[cells]
        waits = (way != 0) & self.buffered[np.arange(tasks.stages), (way > 0).astype(int)]
        fits = tasks.fits(cells, t) & ~behind & ~waits & (self.recomputes_before[at] <= self.at_recomputes)
        return np.where(fits, cells, -1)

    def put(self, cells: np.ndarray, t: int) -> np.ndarray:
        """Does a row's cells, −1 for none; the cells."""
        tasks = self.tasks
        stages = np.flatnonzero(cells >= 0)
        cells = cells[stages]
        op, way = tasks.op[cells], tasks.way[cells]
        tasks.known[tasks.does[cells]] = t + 1
        tasks.known[tasks.gives[cells[way == 0]]] = t + 1
        moving = way != 0
        if moving.any():
            self.buffered[stages[moving], (way[moving] > 0).astype(int)] = True
            self.pending.append(tasks.gives[cells[moving]])
        self.at_main[stages] += (op == Op.F) | (op == Op.B)
        self.at_weights[stages] += op == Op.W
        self.at_recomputes[stages] += op == Op.R
        return cells

    def send(self, t: int, when: Permute) -> Permute:
        """A permute in row t, if there is anything to send."""
        if not self.pending:
            return Permute.NONE
        self.tasks.known[np.concatenate(self.pending)] = t + 1
        self.pending.clear()
        self.buffered[:] = False
        return when

    def unfinished(self) -> bool:
        return bool(self.tasks.op[self.main[self.at_main]].any() or self.tasks.op[self.weights[self.at_weights]].any())


def _pack_aligned(tasks: Tasks, name: str) -> tuple[np.ndarray, list[int]]:
    """(the row of each cell, the permute of each row): two rows of F and B (or of W and R where there is none to do), then a row of W and
    R; with recompute, two."""
    lanes = _Lanes(tasks)
    quiet_rows = 2 if (tasks.op == Op.R).any() else 1
    rows = np.full(len(tasks.op), -1)
    permutes: list[int] = []
    since, quiet, idle = 0, 0, 0  # rows of F and B since the last row of W, rows of W since then, idle rows since the last other one
    waiting = lanes.quiet(0)
    while lanes.unfinished():
        t, some = len(permutes), (waiting >= 0).any()
        if some and (since >= PAIR or 0 < quiet < quiet_rows):
            when = lanes.send(t, Permute.EARLY)
            cells = lanes.put(waiting, t)
            since, quiet = 0, quiet + 1
            waiting = lanes.quiet(t + 1)
        else:
            busy = lanes.busy(t)
            cells = lanes.put(np.where(busy >= 0, busy, waiting), t)
            since, quiet = since + 1, 0
            waiting = lanes.quiet(t + 1)
            # A row of W and R follows, and sends at its start.
            when = Permute.NONE if since >= PAIR and (waiting >= 0).any() else lanes.send(t, Permute.LATE)
        rows[cells] = t
        permutes.append(when)
        idle = 0 if len(cells) else idle + 1
        if idle > MOST_IDLE_ROWS:
            tasks.refuse_endless(name, t, lanes.main[lanes.at_main])
    return rows, permutes
