"""Tables for the tests of several files: a grid over all schedules, and random ones that are right by construction."""

import itertools
import random
from collections.abc import Iterator

from jaxtrain.pipeline.orders import PLACES, SCHEDULES
from jaxtrain.pipeline.schedules import make_table
from jaxtrain.pipeline.table import Op, Permute, Table, directions, from_rows, makes, needs, tasks

KINDS = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
]
assert {name for name, _ in KINDS} == set(SCHEDULES)


def grid(permute: str) -> Iterator[Table]:
    """Every schedule at 1, 2, 3 and 5 stages, few and many microbatches, with and without recomputation, chunks whole and cut."""
    for (schedule, repeats), stages, microbatches in itertools.product(KINDS, (1, 2, 3, 5), (1, 2, 4, 7, 11)):
        for remat_full, cut in ((False, False), (True, False), (True, True), (False, True)):
            groups = [1 + c % 3 for c in range(stages * repeats)] if cut else None
            yield make_table(schedule, stages, repeats, microbatches, permute=permute, remat_full=remat_full, groups=groups)


def random_table(source: random.Random) -> Table:
    """A table whose every choice is random: what runs where and when, permutes, head and embedding. It is right by construction."""
    stages, recompute, forward_only = source.randint(1, 5), source.random() < 0.5, source.random() < 0.15
    repeats, microbatches = source.randint(1, 3), source.randint(1, 6)
    chunks = PLACES[source.choice(["circular", "v"])](stages, repeats)
    place = tuple(s for s in chunks for _ in range(source.randint(1, 2)))
    ways, last = directions(place, stages), len(place) - 1
    shape = from_rows([], "random", place, stages, microbatches, recompute=recompute, forward_only=forward_only)
    todo = set(tasks(shape))
    there, done, rows, permutes = {}, set(), [], []
    columns = {name: [] for name in ("head", "embed", "embed_gradient")}
    ended = {name: set() for name in columns}
    buffers = [{} for _ in range(stages)]

    def send(t):
        for buffer in buffers:
            there.update(dict.fromkeys(buffer.values(), t + 1))
            buffer.clear()

    def fits(cell, t):
        op, g, k = cell
        before = {Op.R: Op.F, Op.B: Op.R if recompute and g < last else Op.F, Op.W: Op.B}.get(op)
        message = needs(cell)
        made = makes(cell, place, ways)
        return (
            (before is None or (before, g, k) in done)
            and (message is None or there.get(message, t + 1) <= t)
            and not (made and made[1] and made[1] in buffers[place[g]])
        )

    def some(candidates, chance):
        candidates = sorted(candidates)
        return source.choice(candidates) if candidates and source.random() < chance else -1

    while todo or any(len(ended[n]) < microbatches for n in ended if not (forward_only and n == "embed_gradient")):
        t = len(rows)
        when = source.choice([Permute.NONE, Permute.LATE, Permute.EARLY])
        if when == Permute.EARLY:
            send(t)
        embed = some(set(range(microbatches)) - ended["embed"], 0.6)
        if embed >= 0:
            there["x", 0, embed] = t
        row = []
        for s in range(stages):
            cells = sorted(c for c in todo if place[c[1]] == s and fits(c, t))
            row.append(source.choice(cells) if cells and source.random() < 0.8 else None)
        for s, cell in enumerate(row):
            if cell:
                todo.remove(cell)
                done.add(cell)
                made = makes(cell, place, ways)
                if made and made[1]:
                    buffers[s][made[1]] = made[0]
                elif made:
                    there[made[0]] = t + (0 <= made[0][1] <= last)
        head = some({k for kind, g, k in there if kind == "x" and g == last + 1} - ended["head"], 0.6)
        if head >= 0:
            there["g", last, head] = t + 1
        gradient = some({k for kind, g, k in there if (kind, g) == ("g", -1)} - ended["embed_gradient"], 0.6)
        for name, k in (("embed", embed), ("head", head), ("embed_gradient", gradient)):
            columns[name].append(k)
            ended[name] |= {k} - {-1}
        if when == Permute.LATE:
            send(t)
        rows.append(row)
        permutes.append(int(when))
    return from_rows(
        rows, "random", place, stages, microbatches, permute=permutes, columns=columns, recompute=recompute, forward_only=forward_only
    )
