"""Schedules are data: a table of ticks × stages whose cells are ops, and the slots that its values live in.

A cell is one op on one chunk and one microbatch:

    F  forward of a chunk; keeps the chunk's input
    B  recomputes the chunk, then its gradients, from the gradient that arrived
    L  the last chunk's forward, head, loss and gradients in one op; it takes the place of the F and the B there, so the
       last chunk is never recomputed and L is as much work as a B

Global chunk g = chunk · stages + stage sends its output to g + 1, which is on the next stage, and its input's gradient
to g − 1. A message leaves when its row permutes: at the row's end (`late`: usable in the next row) or at the start of the
row after it, under that row's ops (`early`: usable two rows after it was made). This file makes tables, checks them and
assigns slots; runtime.py executes them. No JAX here.

      1F1B, 3 stages, 4 microbatches        stage 0  F0 F1 F2 .  B0 F3 B1 .  B2 B3
                                            stage 1  .  F0 F1 B0 F2 B1 F3 B2 B3 .
                                            stage 2  .  .  L0 L1 .  L2 .  L3 .  .
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

import numpy as np


class Op(enum.IntEnum):
    """What a cell does."""

    IDLE = 0
    F = 1
    B = 2
    L = 3


class Permute(enum.IntEnum):
    """Whether a row permutes the payloads over the stages, and when."""

    NONE = 0
    LATE = 1
    EARLY = 2


HOP = {"late": 1, "early": 2}  # rows from a message's making to its first use
Cell = tuple[Op, int, int]  # op, chunk, microbatch


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A schedule, tick by tick. Arrays are int32 [ticks, stages]; `permute` is [ticks].

    `chunk` and `microbatch` are −1 in idle cells. `forward_only` tables (evaluation) have F and L cells alone, and L
    there computes the loss without gradients.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    op: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    permute: np.ndarray
    forward_only: bool = False

    @property
    def ticks(self) -> int:
        return len(self.op)

    @property
    def idle_fraction(self) -> float:
        """Idle cells over all cells; every op counts alike."""
        return float((self.op == Op.IDLE).mean())

    def cells(self) -> Iterable[tuple[int, int, Cell]]:
        """(tick, stage, cell) of every busy cell, in time order."""
        for t, s in np.argwhere(self.op != Op.IDLE):
            yield int(t), int(s), (Op(int(self.op[t, s])), int(self.chunk[t, s]), int(self.microbatch[t, s]))


def is_last(stages: int, chunks: int, stage: int, chunk: int) -> bool:
    """Whether this is the model's last chunk, the one with the head."""
    return chunk == chunks - 1 and stage == stages - 1


def gpipe(stages: int, chunks: int, microbatches: int, hop: int) -> list[list[Cell]]:
    """All forwards, then all backwards (Huang et al. 2019); with chunks > 1 the forwards go round the circle chunk by chunk."""
    forward = [(Op.F, c, k) for c in range(chunks) for k in range(microbatches)]
    backward = [(Op.B, c, k) for c in reversed(range(chunks)) for k in range(microbatches)]
    return [forward + backward] * stages


def one_f_one_b(stages: int, chunks: int, microbatches: int, hop: int) -> list[list[Cell]]:
    """1F1B (Narayanan et al. 2019, PipeDream-Flush): at most stages − s microbatches in flight on stage s.

    Messages that are under way for two rows (`hop` 2) take twice as many to and fro: 2 · (stages − s) − 1.
    """
    return _alternate(stages, [range(microbatches)], [hop * (stages - s - 1) for s in range(stages)], 1)


def interleaved(stages: int, chunks: int, microbatches: int, hop: int) -> list[list[Cell]]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): microbatches go through the chunks in groups of `stages`.

    Where the microbatches do not divide, the last group takes the rest as well: groups of p to 2p − 1 keep the bubble at
    1/chunks of 1F1B's. With fewer microbatches than stages there is one short group: right, but with idle ticks.
    """
    count = max(1, microbatches // stages)
    sizes = [stages] * (count - 1) + [microbatches - stages * (count - 1)]
    starts = np.cumsum([0, *sizes])
    groups = [range(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    ahead = (chunks - 1) * max(sizes)
    return _alternate(stages, groups, [2 * (stages - s - 1) + ahead for s in range(stages)], chunks)


def _alternate(stages: int, groups: Sequence[range], warmup: Sequence[int], chunks: int) -> list[list[Cell]]:
    """Per stage: `warmup` forwards, then forward and backward in turn, then the remaining backwards."""
    forward = [(Op.F, c, int(k)) for group in groups for c in range(chunks) for k in group]
    backward = [(Op.B, c, int(k)) for group in groups for c in reversed(range(chunks)) for k in group]
    orders = []
    for s in range(stages):
        w = min(warmup[s], len(forward))
        pairs = [cell for pair in zip(forward[w:], backward, strict=False) for cell in pair]
        orders.append(forward[:w] + pairs + backward[len(forward) - w :])
    return orders


# (stages, chunks, microbatches, rows from a message's making to its use) → the cells of each stage, in order
SCHEDULES: dict[str, Callable[[int, int, int, int], list[list[Cell]]]] = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}


def make_table(schedule: str, stages: int, chunks: int, microbatches: int, permute: str = "late") -> Table:
    """The training table of a named schedule.

    On one stage there is nothing to interleave: the table is one L a microbatch over a single chunk, which is gradient
    accumulation. Raises ValueError for an order that can never finish.
    """
    if stages == 1:
        return _fill("accumulate", 1, 1, microbatches, [[(Op.L, 0, k) for k in range(microbatches)]], permute)
    orders = SCHEDULES[schedule](stages, chunks, microbatches, HOP[permute])
    fused = []
    for s, order in enumerate(orders):
        cells = []
        for op, c, k in order:
            if not is_last(stages, chunks, s, c):
                cells.append((op, c, k))
            elif op == Op.B:
                cells.append((Op.L, c, k))
        fused.append(cells)
    return _fill(schedule, stages, chunks, microbatches, fused, permute)


def make_forward_table(stages: int, chunks: int, microbatches: int, permute: str = "late") -> Table:
    """Forwards and losses alone, for evaluation."""
    orders = [
        [(Op.L if is_last(stages, chunks, s, c) else Op.F, c, k) for c in range(chunks) for k in range(microbatches)] for s in range(stages)
    ]
    return _fill("forward", stages, chunks, microbatches, orders, permute, forward_only=True)


def _needs(stages: int, chunks: int, stage: int, cell: Cell) -> tuple[str, int, int] | None:
    """The message that a cell waits for: ("x" or "g", global chunk that sends it, microbatch)."""
    op, c, k = cell
    g = c * stages + stage
    if op == Op.B:
        return ("g", g + 1, k)
    return ("x", g - 1, k) if g else None


def _makes(stages: int, chunks: int, stage: int, cell: Cell, forward_only: bool = False) -> tuple[str, int, int] | None:
    """The message that a cell sends."""
    op, c, k = cell
    g = c * stages + stage
    if op == Op.F:
        return ("x", g, k)
    return ("g", g, k) if g and not forward_only else None


def _fill(name, stages, chunks, microbatches, orders, permute, forward_only=False) -> Table:
    """Every stage keeps its order; a cell takes the first row in which its message is there."""
    hop, at = HOP[permute], [0] * stages
    made: dict[tuple, int] = {}
    rows: list[list[Cell | None]] = []
    idle_rows = 0
    while any(at[s] < len(orders[s]) for s in range(stages)):
        t = len(rows)
        row: list[Cell | None] = [None] * stages
        for s in range(stages):
            if at[s] < len(orders[s]):
                cell = orders[s][at[s]]
                need = _needs(stages, chunks, s, cell)
                own_forward = cell[0] != Op.B or ("F", s, cell[1], cell[2]) in made
                if own_forward and (need is None or (need in made and made[need] + hop <= t)):
                    row[s] = cell
        for s, cell in enumerate(row):
            if cell:
                at[s] += 1
                made[cell[0].name, s, cell[1], cell[2]] = t
                message = _makes(stages, chunks, s, cell, forward_only)
                if message:
                    made[message] = t
        idle_rows = 0 if any(row) else idle_rows + 1
        if idle_rows > hop:
            stuck = {s: orders[s][at[s]] for s in range(stages) if at[s] < len(orders[s])}
            raise ValueError(
                f"{name} with {stages} stages, {chunks} chunks, {microbatches} microbatches never finishes: row {t} waits for {stuck}"
            )
        rows.append(row)
    array = np.array([[(c[0], c[1], c[2]) if c else (Op.IDLE, -1, -1) for c in row] for row in rows], np.int32)
    when = np.full(len(rows), Permute.NONE if stages == 1 else Permute[permute.upper()], np.int32)
    return Table(name, stages, chunks, microbatches, array[..., 0], array[..., 1], array[..., 2], when, forward_only)


def check(table: Table) -> None:
    """Raises ValueError unless every task stands in the table once and every message arrives before it is read."""
    p, v, m = table.stages, table.chunks, table.microbatches
    wanted = set()
    for s in range(p):
        for c in range(v):
            last = is_last(p, v, s, c)
            ops = [Op.L] if last else [Op.F] if table.forward_only else [Op.F, Op.B]
            wanted |= {(s, op, c, k) for op in ops for k in range(m)}
    at: dict = {}
    for t, s, cell in table.cells():
        if (s, *cell) in at or (s, *cell) not in wanted:
            raise ValueError(f"row {t}, stage {s}: {cell[0].name}{cell[1]}.{cell[2]} stands there twice or does not belong there")
        at[(s, *cell)] = t
    if missing := wanted - set(at):
        raise ValueError(f"tasks that never run: {sorted(missing)[:4]}")
    arrival = _arrivals(table)
    for t, s, cell in table.cells():
        need = _needs(p, v, s, cell)
        if need is not None and (need not in arrival or arrival[need] > t):
            raise ValueError(
                f"row {t}, stage {s}: {cell[0].name}{cell[1]}.{cell[2]} waits for {need}, which arrives in row {arrival.get(need)}"
            )
        if cell[0] == Op.B and at[(s, Op.F, cell[1], cell[2])] >= t:
            raise ValueError(f"row {t}, stage {s}: B{cell[1]}.{cell[2]} stands before its F")


def _arrivals(table: Table) -> dict[tuple[str, int, int], int]:
    """The first row in which each message can be read."""
    arrival = {}
    for t, s, cell in table.cells():
        message = _makes(table.stages, table.chunks, s, cell, table.forward_only)
        if message is None:
            continue
        if table.permute[t] == Permute.LATE:
            arrival[message] = t + 1
        elif t + 1 < table.ticks and table.permute[t + 1] == Permute.EARLY:
            arrival[message] = t + 2
    return arrival


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A table with its slots: what the runtime reads. Arrays are int32 [ticks, stages]; −1 means none.

    x_slot, g_slot:        where the cell's input, and the gradient of its output, are kept
    arriving_x, _g:        the slot into which this row first puts what the last permute brought
    x_slots, g_slots:      slots a stage needs, the most over the stages
    """

    table: Table
    x_slot: np.ndarray
    g_slot: np.ndarray
    arriving_x: np.ndarray
    arriving_g: np.ndarray
    x_slots: int
    g_slots: int


def assign_slots(table: Table) -> Program:
    """Slots by interval colouring: a value's slot is taken from its arrival to its last reader's row, inclusive."""
    p = table.stages
    arrival = _arrivals(table)
    columns = {k: np.full(table.op.shape, -1, np.int32) for k in ("x_slot", "g_slot", "arriving_x", "arriving_g")}
    most = {"x": 0, "g": 0}
    for s in range(p):
        uses: dict[tuple[str, int, int], list[tuple[int, str]]] = {}
        for t, s_, (op, c, k) in table.cells():
            if s_ == s:
                uses.setdefault(("x", c, k), []).append((t, "x_slot"))
                if op == Op.B:
                    uses.setdefault(("g", c, k), []).append((t, "g_slot"))
        for kind in ("x", "g"):
            intervals = []
            for key, readers in uses.items():
                if key[0] == kind:
                    g = key[1] * p + s
                    sender = ("x", g - 1, key[2]) if kind == "x" else ("g", g + 1, key[2])
                    born = arrival.get(sender, readers[0][0])
                    intervals.append((born, max(t for t, _ in readers), key, sender in arrival))
            slots, count = _colour([(a, b, key) for a, b, key, _ in intervals])
            most[kind] = max(most[kind], count)
            for born, _, key, arrives in intervals:
                for t, column in uses[key]:
                    columns[column][t, s] = slots[key]
                if arrives:
                    columns[f"arriving_{kind}"][born, s] = slots[key]
    return Program(table, **columns, x_slots=max(1, most["x"]), g_slots=max(1, most["g"]))


def _colour(intervals: list[tuple[int, int, tuple]]) -> tuple[dict[tuple, int], int]:
    """[(first row, last row, key)] → {key: slot}, number of slots: the fewest, as intervals are taken in order of their start."""
    free_from: list[int] = []
    slots = {}
    for first, last, key in sorted(intervals):
        slot = next((i for i, row in enumerate(free_from) if row <= first), len(free_from))
        if slot == len(free_from):
            free_from.append(0)
        free_from[slot] = last + 1
        slots[key] = slot
    return slots, len(free_from)
