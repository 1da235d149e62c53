"""Whether a table is right: a runtime that follows it computes every task once, on the right values, and ends. No JAX here."""

import dataclasses

import numpy as np

from jaxtrain.schedule.table import VOCABULARIES, Op, Permute, Table, TableError, message_ways, peak_residuals, task, unit_lookup

NEVER = np.iinfo(np.int32).max  # the row of what does not come


def check(table: Table, memory: float | None = None, count_weight_stash: bool = False) -> None:
    """Raises TableError, for the first row that is wrong, unless a runtime that follows the table does every task once and right.

    memory: the most stashes that a stage may hold, as `peak_stashes` counts them.
    """
    _check_shape(table)
    _check_cells(table)
    for name in ("head", "embed", "embed_gradient"):
        _check_column(table, name)
    if set(table.permute.tolist()) - {0, 1, 2}:
        raise TableError(f"permute holds {sorted(set(table.permute.tolist()))}: use 0, 1 or 2")
    arrivals(table)
    if memory is not None:
        for s, peak in enumerate(peak_residuals(table, count_weight_stash)):
            if peak > memory + 1e-9:
                raise TableError(f"{peak:g} stashes at once are more than the bound of {memory:g}", stage=s)


# --- every task once -------------------------------------------------------------------------------------------------------------


def _check_shape(table: Table) -> None:
    """TableError for arrays of wrong shapes and types, and places that do not exist."""
    p, m, ticks = table.stages, table.microbatches, table.ticks
    if p < 1 or m < 1 or not table.stage_of or set(table.stage_of) - set(range(p)):
        raise TableError(f"{p} stages, {m} microbatches, units on stages {table.stage_of}: every number from 1 up, every unit on a stage")
    if len(table.chunk_of) != len(table.stage_of) or table.vocabulary not in VOCABULARIES:
        raise TableError(f"{len(table.stage_of)} units, {len(table.chunk_of)} chunk numbers, vocabulary {table.vocabulary!r}")
    for name in ("op", "local_unit", "microbatch", "permute", "head", "embed", "embed_gradient"):
        array = getattr(table, name)
        wanted = (ticks, p) if name in ("op", "local_unit", "microbatch") else (ticks,)
        if array.shape != wanted or array.dtype != np.int32:
            raise TableError(f"{name} is {array.dtype} {array.shape}: use int32 {wanted}")


def _check_cells(table: Table) -> None:
    """TableError for cells that are foreign, there twice or missing."""
    m, units = table.microbatches, table.units
    lookup = unit_lookup(table.stage_of, table.stages)
    rows, stages = np.nonzero((table.op != Op.IDLE) | (table.local_unit != -1) | (table.microbatch != -1))
    op, local, k = (array[rows, stages] for array in (table.op, table.local_unit, table.microbatch))
    inside = (op >= Op.F) & (op <= Op.W) & (local >= 0) & (local < lookup.shape[1]) & (k >= 0) & (k < m)
    g = np.where(inside, lookup[stages, np.where(inside, local, 0)], -1)
    wanted = _wanted(table)
    foreign = (g < 0) | ~wanted[np.where(inside, op, 0), g]
    key = (np.where(inside, op, 0).astype(np.int64) * units + g) * m + k
    first = np.arange(len(key))
    ordered = np.argsort(key, kind="stable")
    again = np.concatenate([[False], key[ordered][1:] == key[ordered][:-1]]) if len(key) else np.zeros(0, bool)
    earlier = first.copy()
    earlier[ordered[again]] = ordered[np.flatnonzero(again) - 1]
    wrong = np.flatnonzero(foreign | (earlier != first))
    if len(wrong):
        i = int(wrong[0])
        t, s = int(rows[i]), int(stages[i])
        if g[i] < 0:
            many = sum(stage == s for stage in table.stage_of)
            raise TableError(f"op {op[i]}, unit {local[i]}, microbatch {k[i]}: no such cell on a stage with {many} units", t, s)
        cell = (int(op[i]), int(g[i]), int(k[i]))
        if foreign[i]:
            raise TableError(f"{task(cell, table.stage_of)} does not belong in this table: leave the cell empty", t, s)
        raise TableError(f"{task(cell, table.stage_of)} stands already in {{}}: use it once", t, s, rows=(int(rows[earlier[i]]),))
    there = np.zeros((len(Op), units, m), bool)
    there[op, g, k] = True
    missing = wanted[:, :-1, None] & ~there
    if count := int(missing.sum()):
        k0, o, g0 = (int(i) for i in np.argwhere(missing.transpose(2, 0, 1))[0])
        earlier_op, on = (Op.F, g0 - 1) if o == Op.F else (int(_before(table)[o, g0]), g0)
        after = (earlier_op, on, k0) if on >= 0 and there[earlier_op, on, k0] else None
        at = tuple(rows[(op == earlier_op) & (g == on) & (k == k0)].tolist()[:1]) if after else ()
        right = f"write it after {task(after, table.stage_of)} in {{}}" if after else "write each task once"
        name, stage = task((o, g0, k0), table.stage_of), table.stage_of[g0]
        raise TableError(f"{name} is missing ({count} in all): {right}", stage=stage, rows=at)


def _wanted(table: Table) -> np.ndarray:
    """bool [ops, units + 1]: which ops a table of this shape has on each unit; none on the last column, which stands for no unit."""
    wanted = np.zeros((len(Op), table.units + 1), bool)
    wanted[[Op.F] if table.forward_only else [Op.F, Op.B, Op.W], :-1] = True
    wanted[Op.R, :-1] = [table.recomputes(g) for g in range(table.units)]
    return wanted


def _check_column(table: Table, name: str) -> None:
    """TableError unless head, embed or embed_gradient names every microbatch once."""
    wanted = 0 if table.forward_only and name == "embed_gradient" else table.microbatches
    seen: dict[int, int] = {}
    for t, k in enumerate(getattr(table, name).tolist()):
        if k == -1:
            continue
        if not 0 <= k < wanted:
            right = f"use 0 to {wanted - 1}" if wanted else "leave the column empty"
            raise TableError(f"microbatch {k} does not exist: {right}", t, column=name)
        if k in seen:
            raise TableError(f"microbatch {k} stands already in {{}}: use it once", t, column=name, rows=(seen[k],))
        seen[k] = t
    if len(seen) < wanted:
        missing = min(set(range(wanted)) - set(seen))
        op, g = {"embed": (Op.F, 0), "head": (Op.F, table.units - 1), "embed_gradient": (Op.B, 0)}[name]
        cells = (table.op == op) & (table.unit == g) & (table.microbatch == missing)
        right = f"write it in {{}}, the row of {task((op, g, missing), table.stage_of)}, or {'before' if name == 'embed' else 'after'}"
        rows = (int(np.flatnonzero(cells.any(axis=1))[0]),)
        raise TableError(f"microbatch {missing} is missing ({wanted - len(seen)} in all): {right}", column=name, rows=rows)


# --- on the right values ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Arrivals:
    """The first row in which each message can be read, NEVER for one that never comes.

    activation: int32 [units + 1, microbatches], input of each unit; of unit G, the head's, from the row in which it is made
    gradient: int32 [units + 1, microbatches], gradient of each unit's output; gradient[-1], of the embedding, from the row in which it
              is made
    """

    activation: np.ndarray
    gradient: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Cells:
    """The cells that are not idle, by rows and stages: int arrays of one length."""

    row: np.ndarray
    stage: np.ndarray
    op: np.ndarray
    unit: np.ndarray
    microbatch: np.ndarray
    way: np.ndarray  # of the message that it makes; 0 stays
    sent: np.ndarray  # the row of the permute that sends it, NEVER where none does or none is wanted


def arrivals(table: Table) -> Arrivals:
    """When messages can be read, as a runtime that goes through the rows would find.

    Raises TableError, for the first row that is wrong, where a cell's message or own earlier op is not there, or a send buffer is
    overwritten. Cells must be those that `check` wants.
    """
    row, stage = np.nonzero(table.op)
    op, unit, microbatch = (array[row, stage] for array in (table.op, table.unit, table.microbatch))
    way = message_ways(table.stage_of, table.stages)[op, unit]
    cells = _Cells(row, stage, op, unit, microbatch, way, np.where(way != 0, _sending_row(table)[row], NEVER))
    last, p = table.units - 1, table.microbatches
    x, g = (np.full((table.units + 1, p), NEVER, np.int32) for _ in range(2))
    shared = {name: _rows_of(getattr(table, name), p) for name in ("embed", "head")}
    x[0] = shared["embed"]
    g[last] = np.where(shared["head"] == NEVER, NEVER, shared["head"] + 1)
    f, b = op == Op.F, op == Op.B
    arrives = np.where(way != 0, np.where(cells.sent == NEVER, NEVER, cells.sent + 1), row + 1)
    x[unit[f] + 1, microbatch[f]] = np.where(unit[f] == last, row[f], arrives[f])
    g[unit[b] - 1, microbatch[b]] = np.where(unit[b] == 0, row[b], arrives[b])
    found = Arrivals(x, g)
    _check_order(table, cells, found)
    return found


def _sending_row(table: Table) -> np.ndarray:
    """int64 [ticks]: the row whose permute sends what a row makes: a late one in it or after, or an early one after it."""
    after = np.full(table.ticks, NEVER, np.int64)
    for when, side in ((Permute.LATE, "left"), (Permute.EARLY, "right")):
        permutes = np.append(np.flatnonzero(table.permute == when), NEVER)
        after = np.minimum(after, permutes[np.searchsorted(permutes, np.arange(table.ticks), side=side)])  # type: ignore[call-overload]
    return after


def _rows_of(column: np.ndarray, microbatches: int) -> np.ndarray:
    """The row in which a column names each microbatch."""
    rows = np.full(microbatches, NEVER, np.int32)
    there = np.flatnonzero(column >= 0)
    rows[column[there]] = there
    return rows


def _check_order(table: Table, cells: _Cells, found: Arrivals) -> None:
    """TableError for the first thing, as rows run, that reads what is not there or overwrites what has not left."""
    wrong = [(int(cells.row[i]), 0, int(cells.stage[i]), i, -1) for i in _first(_early_cells(table, cells, found))]
    by_buffer = np.lexsort((cells.row, cells.way, cells.stage))
    by_buffer = by_buffer[cells.way[by_buffer] != 0]
    one, two = by_buffer[:-1], by_buffer[1:]
    same = (cells.stage[one] == cells.stage[two]) & (cells.way[one] == cells.way[two]) & (cells.sent[one] == cells.sent[two])
    lost = sorted(zip(two[same].tolist(), one[same].tolist(), strict=True))[:1]  # cells stand by rows and stages
    wrong += [(int(cells.row[i]), 1, int(cells.stage[i]), i, j) for i, j in lost]
    for phase, (name, come) in enumerate((("head", found.activation[-1]), ("embed_gradient", found.gradient[-1])), 2):
        column = getattr(table, name)
        rows = np.flatnonzero(column >= 0)
        wrong += [(int(t), phase, 0, int(column[t]), int(come[column[t]])) for t in _first(come[column[rows]] > rows, rows)]
    if not wrong:
        return
    t, phase, s, i, j = min(wrong)
    stage_of, last = table.stage_of, table.units - 1
    if phase == 0:
        raise _waits(table, found, t, s, (int(cells.op[i]), int(cells.unit[i]), int(cells.microbatch[i])))
    if phase == 1:
        over, lost_cell = (task((int(cells.op[n]), int(cells.unit[n]), int(cells.microbatch[n])), stage_of) for n in (i, j))
        since = int(cells.row[j])
        raise TableError(f"{over} overwrites the message of {lost_cell} in {{}}: send that by a permute before", t, s, rows=(since,))
    source = task((Op.F, last, i), stage_of) if phase == 2 else task((Op.B, 0, i), stage_of)
    stage = stage_of[last if phase == 2 else 0]
    column = "head" if phase == 2 else "embed_gradient"
    raise TableError(f"microbatch {i} waits for {source} of stage {stage} in {{}}: not before it", t, column=column, rows=(j,))


def _first(wrong: np.ndarray, values: np.ndarray | None = None) -> list[int]:
    """The first place (or its value) that is wrong, if there is one."""
    places = np.flatnonzero(wrong)[:1]
    return (places if values is None else values[places]).tolist()


def _own_rows(table: Table, cells: _Cells) -> np.ndarray:
    """int32 [ops, units, microbatches]: the row of each task."""
    rows = np.full((len(Op), table.units, table.microbatches), NEVER, np.int32)
    rows[cells.op, cells.unit, cells.microbatch] = cells.row
    return rows


def _before(table: Table) -> np.ndarray:
    """[ops, units]: the op that must stand before each on the same unit and microbatch, 0 for none."""
    before = np.zeros((len(Op), table.units), np.int8)
    before[Op.R], before[Op.W] = Op.F, Op.B
    before[Op.B] = [Op.R if table.recomputes(g) else Op.F for g in range(table.units)]
    return before


def _early_cells(table: Table, cells: _Cells, found: Arrivals) -> np.ndarray:
    """bool [cells]: whether what a cell reads is not there in its row."""
    rows, before = _own_rows(table, cells), _before(table)[cells.op, cells.unit]
    early = (before > 0) & (rows[before, cells.unit, cells.microbatch] >= cells.row)
    for op, come in ((Op.F, found.activation), (Op.B, found.gradient)):
        early |= (cells.op == op) & (come[cells.unit, cells.microbatch] > cells.row)
    return early


def _waits(table: Table, found: Arrivals, t: int, s: int, cell: tuple[int, int, int]) -> TableError:
    """The error of a cell in row t that stands too early."""
    op, g, k = cell
    stage_of, name = table.stage_of, task(cell, table.stage_of)
    row_of = lambda o, u: int(np.flatnonzero(((table.op == o) & (table.unit == u) & (table.microbatch == k)).any(axis=1))[0])
    before = int(_before(table)[op, g])
    if before and (own := row_of(before, g)) >= t:
        return TableError(f"{name} waits for its {task((before, g, k), stage_of)} in {{}}: move it after that", t, s, rows=(own,))
    come = int((found.activation if op == Op.F else found.gradient)[g, k])
    source = (Op.F, g - 1) if op == Op.F else (Op.B, g + 1)
    if not 0 <= source[1] < table.units:
        column = "embed" if op == Op.F else "head"
        where = int(np.flatnonzero(getattr(table, column) == k)[0])
        return TableError(f"{name} waits for {column} of microbatch {k} in {{}}: move it to {{}} or later", t, s, rows=(where, come))
    waits = f"{name} waits for {task((*source, k), stage_of)} of stage {stage_of[source[1]]} in {{}}"
    if come == NEVER:
        return TableError(f"{waits}, whose message no permute sends: send it by one in that row or after", t, s, rows=(row_of(*source),))
    return TableError(f"{waits}, whose message can be read from {{}} on: move it there or later", t, s, rows=(row_of(*source), come))
