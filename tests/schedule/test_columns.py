"""Columns: a replay by them alone does every task of every schedule once and on the right values, and no change to them goes unseen."""

import dataclasses
import random

import numpy as np
import pytest
from support.pipeline_tables import expected, grid, random_table
from support.symbolic_tick import Replay

from jaxtrain.schedule.by_name import make_forward_table, make_table
from jaxtrain.schedule.columns import (
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    STAYS,
    TAKES,
    TickColumns,
    TickTable,
    cell_op,
    permute_op,
    result_buffers,
    tick_table,
    units,
)
from jaxtrain.schedule.orders import PLACES
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table import Op, Permute


@pytest.mark.parametrize("permute", ["late", "aligned", "early", "spaced"])
def test_replay_of_every_schedule(permute):
    for table in grid(permute):
        assert Replay(assign_slots(table)).run() == expected(table), table.name


@pytest.mark.parametrize("seed", range(30))
def test_replay_of_random_tables(seed):
    table = random_table(random.Random(seed))
    assert Replay(assign_slots(table)).run() == expected(table)


def test_replay_of_forward_tables():
    for placement in ("circular", "v"):
        for stages, repeats, microbatches in ((1, 1, 3), (2, 2, 5), (4, 2, 9)):
            for permute in ("late", "early"):
                table = make_forward_table(PLACES[placement](stages, repeats), stages, microbatches, permute=permute)
                assert Replay(assign_slots(table)).run() == expected(table)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of TickColumns: a field, or an entry of one that is a dict."""

    field: str
    key: str = ""

    def of(self, columns: TickColumns) -> np.ndarray:
        value = getattr(columns, self.field)
        return value[self.key] if self.key else value

    def replaced(self, columns: TickColumns, column: np.ndarray) -> TickColumns:
        value = {**getattr(columns, self.field), self.key: column} if self.key else column
        return dataclasses.replace(columns, **{self.field: value})


def every_column(columns: TickColumns) -> list[Column]:
    entries = [Column(field, key) for field in ("runs", "slots") for key in getattr(columns, field)]
    return [*entries, *map(Column, ("microbatch", "embed_microbatch", "head_microbatch", "embed_gradient_microbatch", "busy"))]


# Slot or microbatch → the kinds of cells that read it.
CELLS = {"activation": "FKR", "gradient": "B", "residual_b": "KRB", "residual_w": "KRBW", "weight_stash": "BW", "microbatch": "FKRBW"}
SHARED = {  # and, of the ops that are no cell's, the op, and which unit's stage keeps what it makes
    "embed_activation": (EMBED, 0),
    "head_activation": (HEAD, -1),
    "head_gradient": (HEAD, -1),
    "embed_gradient_gradient": (EMBED_GRADIENT, 0),
    "embed_microbatch": (EMBED, 0),
    "head_microbatch": (HEAD, -1),
    "embed_gradient_microbatch": (EMBED_GRADIENT, 0),
}


def reads_of(name: str, ticks: TickTable) -> np.ndarray:
    """bool [ticks, stages]: where something depends on a slot or a microbatch."""
    runs, table = ticks.columns.runs, ticks.slotted.table
    if name in SHARED:
        op, unit = SHARED[name]
        return (runs[op] > 0) & (np.arange(table.stages) == table.stage_of[unit])
    if name in CELLS:
        ops = [cell_op(kind, u) for kind in CELLS[name] for u in range(units(table))]
    else:
        ops = [copy.op for copy in (*TAKES, *STAYS) if copy.slot == name]
    return np.any([runs[op] for op in ops], axis=0)


def places_of(which: Column, ticks: TickTable) -> list[list[int]]:
    """[tick, stage] of entries whose change matters; none for a column that is everywhere 0."""
    column = which.of(ticks.columns)
    if which.field not in ("runs", "busy"):
        return np.argwhere(reads_of(which.key or which.field, ticks) & (column.max() > 0)).tolist()
    if which.key in PERMUTES:  # of a tick that sends something
        sends = (ticks.slotted.send != 0).any(axis=1)
        return np.argwhere(column & np.roll(sends, which.key == permute_op(Permute.EARLY))[:, None]).tolist()
    return np.argwhere(column).tolist()


PERMUTES = [permute_op(when) for when in Permute]
CASES = {"late": ("interleaved", 2, False), "early": ("zb_v", 2, False), "spaced": ("1f1b", 1, True)}


@pytest.mark.parametrize("permute", CASES)
def test_every_change_of_a_column_is_seen(permute):
    """Another slot or microbatch, or an op left out: each column at several places where the runtime reads it."""
    schedule, repeats, remat_full = CASES[permute]
    source = random.Random(permute)
    ticks = tick_table(assign_slots(make_table(schedule, 4, repeats, 6, permute=permute, remat_full=remat_full)))
    seen = set()
    for which in every_column(ticks.columns):
        column, places = which.of(ticks.columns), places_of(which, ticks)
        for tick, stage in source.sample(places, min(3, len(places))):
            changed, most = column.copy(), int(column.max())
            if which.field in ("runs", "busy"):
                changed[tick, ... if which.key in PERMUTES else stage] = 0
            else:
                changed[tick, stage] = (column[tick, stage] + source.randint(1, most)) % (most + 1)
            try:
                assert Replay(ticks.slotted, which.replaced(ticks.columns, changed)).run() == expected(ticks.slotted.table)
            except AssertionError:
                seen.add(which)
            else:
                pytest.fail(f"{which}: a change of tick {tick}, stage {stage} is not seen")
    assert len(seen) > 20


def test_results_go_through_the_buffers_of_their_way():
    """A unit whose message always goes up needs no copy of it; one on both arms of a V has none that fits."""
    buffers = result_buffers(assign_slots(make_table("1f1b", 4, 1, 8, permute="late")))
    assert buffers[Op.F, 0] == "up" and buffers[Op.B, 0] == "down"
    assert set(result_buffers(assign_slots(make_table("zb_v", 4, 2, 8, permute="late"))).values()) >= {"up", "down"}
