"""Tables for the tests of several files: a grid over all schedules, random ones that are right by
construction, broken ones; and an execution on symbols that knows no slots (symbolic_tick.py has one
by the columns of the runtime)."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.cell_grid import from_cells
from jaxtrain.schedule.orders import SCHEDULES
from jaxtrain.schedule.placement import PLACEMENTS
from jaxtrain.schedule.table import (
    Cell,
    Op,
    Permute,
    Table,
    TableShape,
    directions,
    overlapped_b,
)
from jaxtrain.schedule.table_spec import TableSpec

# Every schedule with the fewest chunks on a stage that it is made for, and one more where it is for
# any number of them.
KINDS = [
    (name, repeats)
    for name, schedule in SCHEDULES.items()
    for repeats in range(
        schedule.least_repeats, schedule.least_repeats + (1 if schedule.most_repeats else 2)
    )
]


def grid(permute: str) -> Iterator[Table]:
    """Every schedule at 1, 2, 3 and 5 stages and few and many microbatches; by turns with
    recomputation and with chunks cut into ops."""
    turns = itertools.cycle(
        [(False, False), (True, False), (True, True), (False, True), (True, False)]
    )
    for (schedule, repeats), stages, microbatches in itertools.product(
        KINDS, (1, 2, 3, 5), (1, 2, 4, 7, 11)
    ):
        remat_full, cut = next(turns)
        units = [1 + c % 3 for c in range(stages * repeats)] if cut else None
        yield make_table(
            TableSpec(
                schedule,
                stages,
                repeats,
                microbatches,
                permute=permute,
                remat_full=remat_full,
                units_per_chunk=units,
            )
        )
    if permute != "aligned":
        yield from overlapped_grid(permute)


def overlapped_grid(permute: str) -> Iterator[Table]:
    """The same with overlapped cells, whose chunks have as many units or others."""
    for stages, microbatches, remat_full, cut in (
        (2, 4, False, False),
        (2, 7, True, False),
        (3, 11, False, True),
        (4, 9, True, True),
    ):
        units = [1 + c % 3 for c in range(stages * 2)] if cut else None
        table = make_table(
            TableSpec(
                "dualpipe_v",
                stages,
                2,
                microbatches,
                permute=permute,
                remat_full=remat_full,
                units_per_chunk=units,
                overlap=True,
            )
        )
        assert table.overlaps
        yield table


class Message(NamedTuple):
    """What a unit reads: "activation", of the unit before, or "gradient", of the unit after. The
    head is unit `units`, the embedding's gradient unit −1."""

    kind: str
    unit: int
    microbatch: int


class Sent(NamedTuple):
    """A message and the way it goes, 0 where it stays."""

    message: Message
    way: int


def needed(cell: Cell) -> Message | None:
    """The message that a cell reads."""
    kind = {Op.F: "activation", Op.B: "gradient"}.get(cell.op)
    return Message(kind, cell.unit, cell.microbatch) if kind else None


def sent(cell: Cell, ways: tuple[int, ...]) -> Sent | None:
    """What a cell makes, by the `directions` of its table."""
    op, unit, microbatch = cell
    if op == Op.F:
        return Sent(Message("activation", unit + 1, microbatch), ways[unit])
    if op == Op.B:
        return Sent(Message("gradient", unit - 1, microbatch), -ways[unit - 1] if unit else 0)
    return None


def tasks(shape: TableShape) -> Iterator[Cell]:
    """Every cell that a table of this shape must hold."""
    for unit in range(shape.units):
        ops = [Op.F] if shape.forward_only else [Op.F, Op.B, Op.W]
        if shape.recomputes(unit):
            ops.append(Op.R)
        for microbatch in range(shape.microbatches):
            for op in ops:
                yield Cell(int(op), unit, microbatch)


def random_overlapped_table(source: random.Random) -> Table:
    """A random table with overlapped cells, which is right by construction."""
    while not (table := random_table(source, overlapped=0.7)).overlaps:
        pass
    return table


def random_table(source: random.Random, overlapped: float = 0.0) -> Table:
    """A table whose every choice is random: what runs where and when, permutes, head and embedding.
    It is right by construction.

    overlapped: the chance of an F to have a B overlapped with it where one fits. With any F and B
        have send buffers of their own, as a table with overlapped cells has them: one that happens
        to have none may be wrong
    """
    stages, recompute, forward_only = (
        source.randint(1, 5),
        source.random() < 0.5,
        source.random() < 0.15,
    )
    repeats, microbatches = source.randint(1, 3), source.randint(1, 6)
    chunks = PLACEMENTS[source.choice(["circular", "v"])](stages, repeats)
    stage_of = tuple(s for s in chunks for _ in range(source.randint(1, 2)))
    ways, last = directions(stage_of, stages), len(stage_of) - 1
    recompute_last = recompute and source.random() < 0.3
    shape = TableShape(
        name="random",
        stage_of=stage_of,
        stages=stages,
        microbatches=microbatches,
        recompute=recompute,
        recompute_last=recompute_last,
        forward_only=forward_only,
    )
    todo = set(tasks(shape))
    there, done, rows, permutes = {}, set(), [], []
    overlapped_bs = {}  # (tick, stage) → unit and microbatch
    buffer_of = lambda made, op: (made.way, bool(overlapped) and op == Op.B)
    columns = {name: [] for name in ("head", "embed", "embed_gradient")}
    ended = {name: set() for name in columns}
    buffers = [{} for _ in range(stages)]

    def send(t):
        for buffer in buffers:
            there.update(dict.fromkeys(buffer.values(), t + 1))
            buffer.clear()

    def fits(cell, t):
        op, g, k = cell
        before = {Op.R: Op.F, Op.B: Op.R if shape.recomputes(g) else Op.F, Op.W: Op.B}.get(op)
        message, made = needed(cell), sent(cell, ways)
        return (
            (before is None or (before, g, k) in done)
            and (message is None or there.get(message, t + 1) <= t)
            and not (made and made.way and buffer_of(made, op) in buffers[stage_of[g]])
        )

    def some(candidates, chance):
        candidates = sorted(candidates)
        return source.choice(candidates) if candidates and source.random() < chance else -1

    while todo or any(
        len(ended[n]) < microbatches for n in ended if not (forward_only and n == "embed_gradient")
    ):
        t = len(rows)
        when = source.choice([Permute.NONE, Permute.LATE, Permute.EARLY])
        if when == Permute.EARLY:
            send(t)
        embed = some(set(range(microbatches)) - ended["embed"], 0.6)
        if embed >= 0:
            there["activation", 0, embed] = t
        row = []
        for s in range(stages):
            cells = sorted(c for c in todo if stage_of[c[1]] == s and fits(c, t))
            row.append(source.choice(cells) if cells and source.random() < 0.8 else None)
        of_b = [None] * stages
        for s, cell in enumerate(row):
            if overlapped and cell and cell.op == Op.F and source.random() < overlapped:
                cells = sorted(
                    c for c in todo if c.op == Op.B and stage_of[c[1]] == s and fits(c, t)
                )
                of_b[s] = source.choice(cells) if cells else None
        overlapped_bs |= {(t, s): (b.unit, b.microbatch) for s, b in enumerate(of_b) if b}
        for s, cell in (*enumerate(row), *enumerate(of_b)):
            if cell:
                todo.remove(cell)
                done.add(cell)
                made = sent(cell, ways)
                if made and made.way:
                    buffers[s][buffer_of(made, cell.op)] = made.message
                elif made:
                    there[made.message] = t + (0 <= made.message.unit <= last)
        head = some(
            {k for kind, g, k in there if kind == "activation" and g == last + 1} - ended["head"],
            0.6,
        )
        if head >= 0:
            there["gradient", last, head] = t + 1
        gradient = some(
            {k for kind, g, k in there if (kind, g) == ("gradient", -1)} - ended["embed_gradient"],
            0.6,
        )
        for name, k in (("embed", embed), ("head", head), ("embed_gradient", gradient)):
            columns[name].append(k)
            ended[name] |= {k} - {-1}
        if when == Permute.LATE:
            send(t)
        rows.append(row)
        permutes.append(int(when))
    return from_cells(shape, rows, overlapped_bs, permute=permutes, **columns)


def expected(table) -> set[tuple]:
    tasks = {("H", k) for k in range(table.microbatches)}
    for g in range(table.units):
        ops = "F" if table.forward_only else "FBW" if not table.recomputes(g) else "FRBW"
        tasks |= {(op, g, k) for op in ops for k in range(table.microbatches)}
    return tasks if table.forward_only else tasks | {("E", k) for k in range(table.microbatches)}


def execute(table: Table) -> bool:
    """Whether a table computes everything once on the right values: with room for all values, but
    one send buffer a direction (two where cells are overlapped, for F and B) that every message
    overwrites. It knows nothing of the validator."""
    p, stage_of = table.stages, table.stage_of
    ways, last = directions(stage_of, p), len(stage_of) - 1
    there: list[set] = [set() for _ in range(p)]
    own = table.overlaps
    keys = [(way, of_b) for way in (+1, -1) for of_b in {False, own}]
    buffers, arrived = ({key: [None] * p for key in keys} for _ in range(2))
    done = []

    def permute():
        for way, of_b in keys:
            sent_now = buffers[way, of_b]
            arrived[way, of_b] = [sent_now[(s - way) % p] for s in range(p)]

    for t, row in enumerate(table.cells):
        staying = []
        for key in keys:
            for s in range(p):
                there[s].add(arrived[key][s])
        if table.permute[t] == Permute.EARLY:
            permute()
        if table.embed[t] >= 0:
            there[stage_of[0]].add(("activation", 0, int(table.embed[t])))
            done.append(("embed", int(table.embed[t])))
        cells = [(s, cell) for s, cell in enumerate(row) if cell]
        cells += [(s, b) for s in range(p) if (b := overlapped_b(table, t, s))]
        for s, (op, g, k) in cells:
            before = {Op.R: Op.F, Op.W: Op.B, Op.B: Op.R if table.recomputes(g) else Op.F}.get(op)
            message = needed(Cell(op, g, k))
            if (before is not None and (before, g, k) not in done) or (
                message is not None and message not in there[s]
            ):
                return False
        for s, cell in cells:
            done.append(cell)
            made = sent(cell, ways)
            if made and made.way:
                buffers[made.way, own and cell.op == Op.B][s] = made.message
            elif made:
                staying.append((s, made.message))
        if table.head[t] >= 0:
            k = int(table.head[t])
            if (Op.F, last, k) not in done:
                return False
            staying.append((stage_of[last], ("gradient", last, k)))
            done.append(("head", k))
        if table.embed_gradient[t] >= 0:
            if (Op.B, 0, int(table.embed_gradient[t])) not in done:
                return False
            done.append(("embed_gradient", int(table.embed_gradient[t])))
        for s, message in staying:
            there[s].add(message)
        if table.permute[t] == Permute.LATE:
            permute()
    wanted = {*tasks(table)} | {
        (name, k)
        for name in ("head", "embed", "embed_gradient")
        if not (table.forward_only and name == "embed_gradient")
        for k in range(table.microbatches)
    }
    return len(done) == len(wanted) and set(done) == wanted


def broken(table: Table, source: random.Random) -> Table:
    """The table with one change, of a kind that most often breaks it."""
    arrays = {
        n: getattr(table, n).copy()
        for n in ("op", "local_unit", "microbatch", "permute", "head", "embed", "embed_gradient")
    }
    if table.overlaps and source.random() < 0.3:
        return _with_another_b(table, source)
    kind = source.choice(["swap", "swap", "move", "drop", "permute", "column", "microbatch"])
    s, rows = source.randrange(table.stages), range(table.ticks)
    busy = [t for t in rows if table.op[t, s]]
    a, b = source.choice(busy), source.choice(rows)
    if kind == "swap" or (kind == "move" and not table.op[b, s]):
        for n in ("op", "local_unit", "microbatch"):
            arrays[n][[a, b], s] = arrays[n][[b, a], s]
    elif kind == "drop":
        arrays["op"][a, s], arrays["local_unit"][a, s], arrays["microbatch"][a, s] = 0, -1, -1
    elif kind == "permute":
        arrays["permute"][b] = (arrays["permute"][b] + source.choice([1, 2])) % 3
    elif kind == "column":
        column = arrays[source.choice(["head", "embed", "embed_gradient"])]
        near = min(max(0, b + source.choice([-1, 1])), table.ticks - 1)
        column[[b, near]] = column[[near, b]]
    else:
        arrays["microbatch"][a, s] = source.randrange(table.microbatches)
    return dataclasses.replace(table, **arrays)


def _with_another_b(table: Table, source: random.Random) -> Table:
    """The table with one overlapped B of another microbatch, in another cell, or left out."""
    units, microbatches = table.b_local_unit.copy(), table.b_microbatch.copy()
    t, s = source.choice(np.argwhere(table.overlapped).tolist())
    kind, other = source.choice(["microbatch", "move", "drop"]), source.randrange(table.ticks)
    if kind == "microbatch":
        microbatches[t, s] = source.randrange(table.microbatches)
    elif kind == "move":
        for array in (units, microbatches):
            array[[t, other], s] = array[[other, t], s]
    else:
        units[t, s] = microbatches[t, s] = -1
    return dataclasses.replace(table, b_local_unit=units, b_microbatch=microbatches)
