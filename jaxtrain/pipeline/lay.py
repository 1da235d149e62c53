"""From the order of each stage's ops to a table: chunks become units, and cells get their rows and rows their permutes.

Four ways to lay an order into rows, for the coupled clock of simulate.py:

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

from jaxtrain.pipeline.orders import Orders
from jaxtrain.pipeline.table import Cell, Op, Permute, Table, TableError, directions, from_rows, makes, needs, task

MODES = ("late", "aligned", "early", "spaced")
PAIR = 2  # rows of F and B between two rows of W in `aligned`


def expand(orders: Orders, groups: Sequence[int], recompute: bool, last_too: bool = False) -> tuple[Orders, tuple[int, ...]]:
    """(orders of units, the chunk of each unit) from orders of chunks and the number of ops that each chunk is cut into.

    With `recompute` units have R ops, the last one only if `last_too`. A chunk's W follows its B at once or later; at once, and with R,
    group by group: R, B, W, so that one group is rebuilt at a time.
    """
    first = [sum(groups[:c]) for c in range(len(groups) + 1)]
    last = first[-1] - 1
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


class Rows:
    """Rows under construction, and which messages have come by then."""

    def __init__(self, place: tuple[int, ...], stages: int):
        self.place, self.ways, self.last = place, directions(place, stages), len(place) - 1
        self.rows: list[list[Cell | None]] = []
        self.permutes: list[int] = []
        self.there: dict[tuple, int] = {}
        self.buffers: list[dict[int, tuple]] = [{} for _ in range(stages)]
        self.done: set[Cell] = set()
        self.idle_rows = 0

    def send(self, row: int) -> None:
        """A permute in this row."""
        for buffer in self.buffers:
            for message in buffer.values():
                self.there[message] = row + 1
            buffer.clear()

    def fits(self, s: int, cell: Cell) -> bool:
        """Whether the row under construction may hold the cell, as far as its message, its own earlier op and the send buffer go."""
        t, (op, g, k) = len(self.rows), cell
        message = needs(cell)
        if message is not None and message[:2] != ("x", 0) and self.there.get(message, t + 1) > t:
            return False
        if op != Op.F and ((Op.B if op == Op.W else Op.F), g, k) not in self.done:
            return False
        made = makes(cell, self.place, self.ways)
        return made is None or made[1] == 0 or made[1] not in self.buffers[s]

    def add(self, row: list[Cell | None]) -> None:
        """Closes a row but for its late permute: `end`."""
        t = len(self.rows)
        for s, cell in enumerate(row):
            if cell is None:
                continue
            self.done.add(cell)
            made = makes(cell, self.place, self.ways)
            if made is not None:
                (kind, g, k), way = made
                if g > self.last:
                    self.there["g", self.last, k] = t + 1  # the head, in the same row
                elif way == 0:
                    self.there[kind, g, k] = t + 1
                else:
                    self.buffers[s][way] = kind, g, k
        self.rows.append(row)
        self.idle_rows = 0 if any(row) else self.idle_rows + 1

    def end(self, when: int) -> None:
        """Writes the row's permute; a late one sends."""
        if when == Permute.LATE:
            if any(self.buffers):
                self.send(len(self.rows) - 1)
            else:
                when = Permute.NONE
        self.permutes.append(when)

    def refuse_endless(self, name: str, stuck: dict[int, Cell]) -> None:
        """TableError when nothing can come any more."""
        if self.idle_rows > 3:
            s, cell = min(stuck.items())
            raise TableError(
                f"the order of {name!r} never finishes: {task(cell, self.place)} is next and waits for ever", len(self.rows) - 1, s
            )


def lay(
    orders: Orders,
    name: str,
    place: tuple[int, ...],
    stages: int,
    microbatches: int,
    mode: str,
    *,
    chunk: tuple[int, ...] | None = None,
    recompute: bool = False,
    recompute_last: bool = False,
    forward_only: bool = False,
    vocabulary: str = "parallel",
) -> Table:
    """The table of an order of units, by mode. Raises TableError for an order that can never finish."""
    rows = Rows(place, stages)
    if mode == "aligned":
        _lay_aligned(orders, rows, name)
    else:
        _lay_in_order(orders, rows, name, early=mode != "late", rows_of_f=2 if mode == "spaced" else 1)
    return from_rows(
        rows.rows,
        name,
        place,
        stages,
        microbatches,
        chunk=chunk,
        permute=rows.permutes,
        recompute=recompute,
        recompute_last=recompute_last,
        forward_only=forward_only,
        vocabulary=vocabulary,
    )


def _lay_in_order(orders: Orders, rows: Rows, name: str, early: bool, rows_of_f: int) -> None:
    """Every cell in the first row in which it fits, in order; an F keeps its stage for `rows_of_f` rows."""
    at, free = [0] * len(orders), [0] * len(orders)
    while any(i < len(order) for i, order in zip(at, orders, strict=True)):
        t = len(rows.rows)
        when = Permute.EARLY if early else Permute.LATE
        if early:
            rows.send(t)
        row: list[Cell | None] = [None] * len(orders)
        for s, order in enumerate(orders):
            if at[s] < len(order) and t >= free[s] and rows.fits(s, order[at[s]]):
                row[s] = order[at[s]]
                free[s] = t + (rows_of_f if order[at[s]][0] == Op.F else 1)
                at[s] += 1
        rows.add(row)
        rows.end(when)
        rows.refuse_endless(name, {s: orders[s][i] for s, i in enumerate(at) if i < len(orders[s])})


class _Lane:
    """A stage's order cut in two for `aligned`: F and B, and W; R's are done in time for their B's."""

    def __init__(self, order: Sequence[Cell]):
        self.main = [c for c in order if c[0] in (Op.F, Op.B)]
        self.weights = [c for c in order if c[0] == Op.W]
        self.recomputes = [c for c in order if c[0] == Op.R]
        self.done_main = self.done_weights = self.done_recomputes = 0
        self.weights_before = []  # of each cell of `main`: W's before it in the order
        self.recomputes_before = []
        counts = {Op.W: 0, Op.R: 0}
        for cell in order:
            if cell[0] in (Op.F, Op.B):
                self.weights_before.append(counts[Op.W])
                self.recomputes_before.append(counts[Op.R])
            else:
                counts[Op(cell[0])] += 1

    @property
    def unfinished(self) -> bool:
        return self.done_main < len(self.main) or self.done_weights < len(self.weights)

    def next_main(self, rows: Rows, s: int) -> Cell | None:
        """The next F or B, if it fits: an F has at most one W of those before it in the order still to do, a B all its R's done."""
        if self.done_main == len(self.main):
            return None
        i, cell = self.done_main, self.main[self.done_main]
        if cell[0] == Op.F and self.weights_before[i] - 1 > self.done_weights:
            return None
        if self.recomputes_before[i] > self.done_recomputes or not rows.fits(s, cell):
            return None
        return cell

    def next_quiet(self, rows: Rows, s: int) -> Cell | None:
        """An R that one of the next two cells of the order wants, else a W, if there is one to do."""
        ahead = min(self.done_main + PAIR, len(self.main)) - 1
        if ahead >= 0 and self.recomputes_before[ahead] > self.done_recomputes and rows.fits(s, self.recomputes[self.done_recomputes]):
            return self.recomputes[self.done_recomputes]
        if self.done_weights < len(self.weights) and rows.fits(s, self.weights[self.done_weights]):
            return self.weights[self.done_weights]
        return None

    def take(self, cell: Cell) -> Cell:
        if cell[0] == Op.W:
            self.done_weights += 1
        elif cell[0] == Op.R:
            self.done_recomputes += 1
        else:
            self.done_main += 1
        return cell


def _lay_aligned(orders: Orders, rows: Rows, name: str) -> None:
    """Two rows of F and B (or of W and R where there is none to do), then a row of W and R; with recompute, two."""
    lanes = [_Lane(order) for order in orders]
    quiet_rows = 2 if any(lane.recomputes for lane in lanes) else 1
    since, quiet = 0, 0  # rows of F and B since the last row of W, and rows of W since then
    while any(lane.unfinished for lane in lanes):
        t = len(rows.rows)
        waiting = [lane.next_quiet(rows, s) for s, lane in enumerate(lanes)]
        if any(waiting) and (since >= PAIR or 0 < quiet < quiet_rows):
            when = Permute.NONE
            if any(rows.buffers):
                rows.send(t)
                when = Permute.EARLY
            rows.add([cell and lane.take(cell) for lane, cell in zip(lanes, waiting, strict=True)])
            rows.end(when)
            since, quiet = 0, quiet + 1
        else:
            row: list[Cell | None] = []
            for s, lane in enumerate(lanes):
                cell = lane.next_main(rows, s) or waiting[s]
                row.append(cell and lane.take(cell))
            rows.add(row)
            since, quiet = since + 1, 0
            then = since >= PAIR and any(lane.next_quiet(rows, s) for s, lane in enumerate(lanes))
            rows.end(Permute.NONE if then else Permute.LATE)
        rows.refuse_endless(name, {s: lane.main[lane.done_main] for s, lane in enumerate(lanes) if lane.done_main < len(lane.main)})
