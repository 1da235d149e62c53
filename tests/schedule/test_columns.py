"""Columns: a replay by them alone does every task of every schedule once and on the right values, and no change to them goes unseen."""

import random

import numpy as np
import pytest
from support.pipeline_tables import expected, grid, random_table
from support.symbolic_tick import Replay

from jaxtrain.schedule.by_name import make_forward_table, make_table
from jaxtrain.schedule.columns import columns, results
from jaxtrain.schedule.orders import PLACES
from jaxtrain.schedule.slots import assign_slots


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


def reads_of(name: str, program) -> np.ndarray:
    """bool [ticks, stages]: where something depends on a column of slots or microbatches."""
    found, stages = columns(program), np.arange(program.table.stages)
    ran = lambda *ops: np.any([found[f"{op}{u}"] for op in "FKRBW" if op in ops for u in range(2) if f"{op}{u}" in found], axis=0)
    ops = {"x": "FKR", "g": "B", "residual_b": "KRB", "residual_w": "KRBW", "stash": "BW", "microbatch": "FKRBW"}
    what = name.removesuffix("_slot")
    if what in ops:
        return ran(*ops[what])
    if what.startswith(("up", "down")):
        return found[f"take_{what}"] > 0
    if what.startswith("stay"):
        return np.any([found[column] for column in found if column.startswith(f"{what}_") and not column.endswith("_slot")], axis=0)
    op = next(op for op in ("embed_gradient", "embed", "head") if what.startswith(op))
    return (found[op] > 0) & (stages == program.table.place[-1 if op == "head" else 0])


def places_of(name: str, program) -> list[list[int]]:
    """[tick, stage] of entries whose change matters; none for a column that is everywhere 0."""
    column = columns(program)[name]
    if name.endswith(("_slot", "microbatch")):
        return np.argwhere(reads_of(name, program) & (column.max() > 0)).tolist()
    if name.startswith("permute"):  # of a row that sends something
        sends = (program.send != 0).any(axis=1)
        return np.argwhere(column & np.roll(sends, name == "permute_EARLY")[:, None]).tolist()
    return np.argwhere(column).tolist()


CASES = {"late": ("interleaved", 2, False), "early": ("zb_v", 2, False), "spaced": ("1f1b", 1, True)}


@pytest.mark.parametrize("permute", CASES)
def test_every_change_of_a_column_is_seen(permute):
    """Another slot or microbatch, or an op left out: each column at several places where the runtime reads it."""
    schedule, repeats, remat_full = CASES[permute]
    source = random.Random(permute)
    program = assign_slots(make_table(schedule, 4, repeats, 6, permute=permute, remat_full=remat_full))
    seen = set()
    for name, column in columns(program).items():
        places = places_of(name, program)
        for tick, stage in source.sample(places, min(3, len(places))):
            changed, most = column.copy(), int(column.max())
            if name.endswith(("_slot", "microbatch")):
                changed[tick, stage] = (column[tick, stage] + source.randint(1, most)) % (most + 1)
            else:
                changed[tick, ... if name.startswith("permute") else stage] = 0
            try:
                assert Replay(program, {name: changed}).run() == expected(program.table)
            except AssertionError:
                seen.add(name)
            else:
                pytest.fail(f"{name}: a change of tick {tick}, stage {stage} is not seen")
    assert len(seen) > 20


def test_results_go_through_the_buffers_of_their_way():
    """A unit whose message always goes up needs no copy of it; one on both arms of a V has none that fits."""
    found = results(assign_slots(make_table("1f1b", 4, 1, 8, permute="late")))
    assert found["F", 0] == "up" and found["B", 0] == "down"
    assert set(results(assign_slots(make_table("zb_v", 4, 2, 8, permute="late"))).values()) >= {"up", "down"}
