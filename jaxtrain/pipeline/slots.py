"""Where every value of a table is kept: slots by interval colouring of lifetimes, the fewest that the table allows.

A stage has five pools of slots, each shared by all its units. A value takes one slot of its pool from the row in which it comes to the
row of its last reader, both included, so no row reads a slot and fills it with something else:

    x            a unit's input          from arrival, the embedding or the unit before (if it stays) to F, and to R where there is one;
                 the last unit's output  from its F to the head
    g            an output's gradient    from arrival, the head or the unit after (if it stays) to B;
                 unit 0's input gradient from its B to the embedding's gradient
    residual_b   what B alone needs      from F (from R where there is one) to B
    residual_w   what W needs too        from the same to W
    stash        what B leaves for W     from B to W

Lifetimes on one stage are intervals, and colouring intervals in order of their starts takes as many slots as are alive at once in the
busiest row: fewer is impossible. No JAX here.
"""

import dataclasses

import numpy as np

from jaxtrain.pipeline.table import Cell, Op, Table, arrivals, directions

KINDS = ("x", "g", "residual_b", "residual_w", "stash")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A table with its slots: what the runtime reads. −1 means none.

    x, g, residual_b, residual_w, stash   int32 [ticks, stages]: the slot of each kind that the row's cell reads or fills. F reads x and
                  fills residual_b and residual_w (not where there is an R for it); R reads x and fills them; B reads g and both
                  and fills stash; W reads residual_w and stash
    up_x, up_g, down_x, down_g   int32 [ticks, stages]: the slot into which the row's start puts what the last permute brought from the
                  stage before (up) or after (down)
    stay_x, stay_g   int32 [ticks, stages]: the slot into which the cell's message goes if it stays
    send          int32 [ticks, stages]: the buffer by which the cell's message leaves: +1, −1, or 0 for none
    embed_x, head_x, head_g, embed_gradient_g   int32 [ticks]: on the first unit's stage, the x that embed fills and the g that the
                  embedding's gradient reads; on the last unit's, the x that the head reads and the g that it fills
    counts        kind → the slots that each stage needs
    """

    table: Table
    x: np.ndarray
    g: np.ndarray
    residual_b: np.ndarray
    residual_w: np.ndarray
    stash: np.ndarray
    up_x: np.ndarray
    up_g: np.ndarray
    down_x: np.ndarray
    down_g: np.ndarray
    stay_x: np.ndarray
    stay_g: np.ndarray
    send: np.ndarray
    embed_x: np.ndarray
    head_x: np.ndarray
    head_g: np.ndarray
    embed_gradient_g: np.ndarray
    counts: dict[str, tuple[int, ...]]

    @property
    def slots(self) -> dict[str, int]:
        """Kind → the most slots that any stage needs, which is what every stage's array has in one program for all."""
        return {kind: max(counts) for kind, counts in self.counts.items()}


Key = tuple[str, int, int]  # kind, unit, microbatch; x of unit G is the last unit's output, g of unit −1 the first's input gradient
Use = tuple[int, str]  # row, column that names the slot there


def assign_slots(table: Table) -> Program:
    """The program of a table. Raises TableError where `arrivals` does; check the table first."""
    uses = _uses(table)
    arrays = {name: np.full(table.op.shape, -1, np.int32) for name in (*KINDS, "up_x", "up_g", "down_x", "down_g", "stay_x", "stay_g")} | {
        name: np.full(table.ticks, -1, np.int32) for name in ("embed_x", "head_x", "head_g", "embed_gradient_g")
    }
    counts: dict[str, list[int]] = {kind: [0] * table.stages for kind in KINDS}
    for s in range(table.stages):
        for kind in KINDS:
            values = {key: rows for key, rows in uses[s].items() if key[0] == kind}
            slots, counts[kind][s] = colour({key: (min(rows)[0], max(rows)[0]) for key, rows in values.items()})
            for key, rows in values.items():
                for t, column in rows:
                    arrays[column][(t, s) if arrays[column].ndim == 2 else t] = slots[key]
    return Program(table, **arrays, send=_send(table), counts={kind: tuple(n) for kind, n in counts.items()})


def colour(intervals: dict[Key, tuple[int, int]]) -> tuple[dict[Key, int], int]:
    """(slot of each value, number of slots) from first and last rows, both included; the lowest slot that is free."""
    last_row: list[int] = []
    slots = {}
    for key, (first, last) in sorted(intervals.items(), key=lambda item: (item[1], item[0])):
        slot = next((i for i, row in enumerate(last_row) if row < first), len(last_row))
        if slot == len(last_row):
            last_row.append(last)
        last_row[slot] = last
        slots[key] = slot
    return slots, len(last_row)


def _uses(table: Table) -> list[dict[Key, list[Use]]]:
    """Of each stage, every value with the rows in which something fills or reads it, and the column that names its slot there."""
    place, last, there = table.place, table.units - 1, arrivals(table)
    ways = directions(place, table.stages)
    uses: list[dict[Key, list[Use]]] = [{} for _ in range(table.stages)]

    def use(s: int, kind: str, g: int, k: int, t: int, column: str = "") -> None:
        uses[s].setdefault((kind, g, k), []).append((t, column or kind))

    for (kind, g, k), t in there.items():
        way = (ways[g - 1] if kind == "x" else -ways[g]) if 0 <= g <= last and (kind, g) not in (("x", 0), ("g", last)) else 0
        if way:
            use(place[g], kind, g, k, t, f"{'up' if way > 0 else 'down'}_{kind}")
    for t, row in enumerate(table.rows()):
        for s, cell in enumerate(row):
            if cell is not None:
                for kind, g, k, column in _cell_uses(table, cell, ways):
                    use(s, kind, g, k, t, column)
    for t, (head, embed, gradient) in enumerate(zip(table.head.tolist(), table.embed.tolist(), table.embed_gradient.tolist(), strict=True)):
        if embed >= 0:
            use(place[0], "x", 0, embed, t, "embed_x")
        if head >= 0:
            use(place[last], "x", last + 1, head, t, "head_x")
            if not table.forward_only:
                use(place[last], "g", last, head, t, "head_g")
        if gradient >= 0:
            use(place[0], "g", -1, gradient, t, "embed_gradient_g")
    return uses


def _cell_uses(table: Table, cell: Cell, ways: tuple[int, ...]) -> list[tuple[str, int, int, str]]:
    """(kind, unit, microbatch, column) of what a cell fills and reads on its own stage."""
    op, g, k = cell
    residuals = [("residual_b", g, k, ""), ("residual_w", g, k, "")]
    if op == Op.F:
        found = [("x", g, k, "")]
        if not table.forward_only and not table.recomputes(g):
            found += residuals
        return [*found, ("x", g + 1, k, "stay_x")] if ways[g] == 0 else found
    if op == Op.R:
        return [("x", g, k, ""), *residuals]
    if op == Op.B:
        stays = g == 0 or ways[g - 1] == 0
        return [("g", g, k, ""), *residuals, ("stash", g, k, ""), *([("g", g - 1, k, "stay_g")] if stays else [])]
    return [residuals[1], ("stash", g, k, "")]


def _send(table: Table) -> np.ndarray:
    """int32 [ticks, stages]: the way that each cell's message goes."""
    ways = directions(table.place, table.stages)
    send = np.zeros(table.op.shape, np.int32)
    for t, row in enumerate(table.rows()):
        for s, cell in enumerate(row):
            if cell is not None and cell[0] == Op.F:
                send[t, s] = ways[cell[1]]
            elif cell is not None and cell[0] == Op.B and cell[1] > 0:
                send[t, s] = -ways[cell[1] - 1]
    return send
