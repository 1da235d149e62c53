"""Columns: a replay by them alone does every task of every schedule once and on the right values, and no change to them goes unseen."""

import random

import numpy as np
import pytest
from support.pipeline_tables import grid, random_table
from support.symbolic_tick import Replay, by_name, changed, expected

from jaxtrain.schedule.by_name import make_forward_table, make_table
from jaxtrain.schedule.columns import CELL_OPS, STAYS, TAKES, TickColumns, cell_op, columns, result_buffers, units
from jaxtrain.schedule.orders import PLACES
from jaxtrain.schedule.slots import SlottedTable, assign_slots
from jaxtrain.schedule.table import Op
from jaxtrain.schedule.validator import check


@pytest.mark.parametrize("permute", ["late", "aligned", "early", "spaced"])
def test_replay_of_every_schedule(permute):
    for table in grid(permute):
        assert Replay(assign_slots(table)).run() == expected(table), table.name


@pytest.mark.parametrize("seed", range(30))
def test_replay_of_random_tables(seed):
    table = random_table(random.Random(seed))
    check(table)
    assert Replay(assign_slots(table)).run() == expected(table)


def test_replay_of_forward_tables():
    for placement in ("circular", "v"):
        for stages, repeats, microbatches in ((1, 1, 3), (2, 2, 5), (4, 2, 9)):
            for permute in ("late", "early"):
                table = make_forward_table(PLACES[placement](stages, repeats), stages, microbatches, permute=permute)
                assert Replay(assign_slots(table)).run() == expected(table)


def read_places(name: str, slotted: SlottedTable, found: TickColumns) -> np.ndarray:
    """bool [ticks, stages]: where something depends on a column of slots or microbatches."""
    table, stages = slotted.table, np.arange(slotted.table.stages)
    cells = lambda kinds: np.any([found.runs[cell_op(kind, u)] for kind in CELL_OPS if kind in kinds for u in range(units(table))], axis=0)
    kinds = {"activation": "FKR", "gradient": "B", "residual_b": "KRB", "residual_w": "KRBW", "weight_stash": "BW", "microbatch": "FKRBW"}
    name = name.removeprefix("slot ")
    if name in kinds:
        return cells(kinds[name])
    copies = [copy.op for copy in (*TAKES, *STAYS) if copy.slot == name]
    if copies:
        return np.any([found.runs[op] for op in copies], axis=0)
    op = next(op for op in ("embed_gradient", "embed", "head") if name.startswith(op))
    return (found.runs[op] > 0) & (stages == table.stage_of[-1 if op == "head" else 0])


def places_of(name: str, slotted: SlottedTable, found: TickColumns) -> list[list[int]]:
    """[tick, stage] of entries whose change matters; none for a column that is everywhere 0."""
    column = by_name(found)[name]
    if name.startswith("slot ") or name.endswith("microbatch"):
        return np.argwhere(read_places(name, slotted, found) & (column.max() > 0)).tolist()
    if name.startswith("permute"):  # of a tick that sends something
        sends = (slotted.send != 0).any(axis=1)
        return np.argwhere(column & np.roll(sends, name == "permute_EARLY")[:, None]).tolist()
    return np.argwhere(column).tolist()


CASES = {"late": ("interleaved", 2, False), "early": ("zb_v", 2, False), "spaced": ("1f1b", 1, True)}


@pytest.mark.parametrize("permute", CASES)
def test_every_change_of_a_column_is_seen(permute):
    """Another slot or microbatch, or an op left out: each column at several places where the runtime reads it."""
    schedule, repeats, remat_full = CASES[permute]
    source = random.Random(permute)
    slotted = assign_slots(make_table(schedule, 4, repeats, 6, permute=permute, remat_full=remat_full))
    found, seen = columns(slotted), set()
    for name, column in by_name(found).items():
        places = places_of(name, slotted, found)
        for tick, stage in source.sample(places, min(3, len(places))):
            other, most = column.copy(), int(column.max())
            if name.startswith("slot ") or name.endswith("microbatch"):
                other[tick, stage] = (column[tick, stage] + source.randint(1, most)) % (most + 1)
            else:
                other[tick, ... if name.startswith("permute") else stage] = 0
            try:
                assert Replay(slotted, changed(found, name, other)).run() == expected(slotted.table)
            except AssertionError:
                seen.add(name)
            else:
                pytest.fail(f"{name}: a change of tick {tick}, stage {stage} is not seen")
    assert len(seen) > 20


def test_results_go_through_the_buffers_of_their_way():
    """A unit whose message always goes up needs no copy of it; one on both arms of a V has none that fits."""
    found = result_buffers(assign_slots(make_table("1f1b", 4, 1, 8, permute="late")))
    assert found[Op.F, 0] == "up" and found[Op.B, 0] == "down"
    assert set(result_buffers(assign_slots(make_table("zb_v", 4, 2, 8, permute="late"))).values()) >= {"up", "down"}
