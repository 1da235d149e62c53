"""Columns: a replay by them alone does every task of every schedule once and on the right values,
and no change to them goes unseen."""

import random

import numpy as np
import pytest
from support.pipeline_tables import expected, grid, random_overlapped_table, random_table
from support.symbolic_tick import Replay, by_name

from jaxtrain.schedule.by_name import make_forward_table, make_table
from jaxtrain.schedule.columns import (
    CELL_OPS,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    TickTable,
    last_weights,
    permute_op,
    result_buffers,
    tick_table,
)
from jaxtrain.schedule.placement import PLACEMENTS
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table import Op, Permute, Table
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.schedule.validator import check


def replay(table: Table) -> set[tuple]:
    return Replay(tick_table(assign_slots(table))).run()


@pytest.mark.parametrize("permute", ["late", "aligned", "early", "spaced"])
def test_replay_of_every_schedule(permute):
    for table in grid(permute):
        assert replay(table) == expected(table), table.name


@pytest.mark.parametrize("seed", range(30))
def test_replay_of_random_tables(seed):
    table = random_table(random.Random(seed))
    check(table)
    assert replay(table) == expected(table)


@pytest.mark.parametrize("seed", range(20))
def test_replay_of_random_overlapped_tables(seed):
    table = random_overlapped_table(random.Random(seed))
    assert replay(table) == expected(table)


def test_replay_of_forward_tables():
    for placement in ("circular", "v"):
        for stages, repeats, microbatches in ((1, 1, 3), (2, 2, 5), (4, 2, 9)):
            for permute in ("late", "early"):
                table = make_forward_table(
                    PLACEMENTS[placement](stages, repeats), stages, microbatches, permute=permute
                )
                assert replay(table) == expected(table)


def reads_of(name: str, ticks: TickTable) -> np.ndarray:
    """bool [ticks, stages]: where something depends on a column of slots or microbatches."""
    runs, table = ticks.columns.runs, ticks.slotted.table
    any_of = lambda *ops: np.any([runs[op] for op in ops if op in runs], axis=0)
    cells = {
        "activation": "FKR",
        "gradient": "B",
        "residual_b": "KRB",
        "residual_w": "KRBW",
        "weight_stash": "BW",
        "microbatch": CELL_OPS,
    }
    overlapped = any_of(*ticks.overlapped) if ticks.overlapped else np.zeros(table.op.shape, bool)
    saving = [op for op, (kind, *_) in ticks.overlapped.items() if kind == "K"]
    of_pairs = {
        **dict.fromkeys(("activation", "gradient", "weight_stash", "microbatch"), overlapped),
        **dict.fromkeys(("residual_b", "residual_w"), any_of(*saving) if saving else ~overlapped),
    }
    slot = name.removesuffix("_slot")
    if slot in cells:
        alone = any_of(*(f"{kind}{unit}" for kind in cells[slot] for unit in range(2)))
        return alone | (overlapped & of_pairs[slot])
    if slot.startswith("b_"):
        return overlapped
    if slot.startswith(("up", "down")):
        return runs[f"take_{slot}"] > 0
    if slot.startswith("stay"):
        return any_of(*(copy.op for copy in ticks.copies.stays if copy.slot == slot))
    if slot == "embedding_gradient":
        op = EMBED_GRADIENT
    else:
        op = next(op for op in (EMBED_GRADIENT, EMBED, HEAD) if slot.startswith(op))
    return (runs[op] > 0) & (np.arange(table.stages) == table.stage_of[-1 if op == HEAD else 0])


def places_of(name: str, ticks: TickTable) -> list[list[int]]:
    """[tick, stage] of entries whose change matters; none for a column that is everywhere 0."""
    column = by_name(ticks.columns)[name]
    if name.endswith(("_slot", "microbatch")):
        return np.argwhere(reads_of(name, ticks) & (column.max() > 0)).tolist()
    if name.startswith("permute"):  # of a tick that sends something
        sends = np.any([way != 0 for way in ticks.slotted.send.values()], axis=(0, 2))
        return np.argwhere(
            column & np.roll(sends, name == permute_op(Permute.EARLY))[:, None]
        ).tolist()
    return np.argwhere(column).tolist()


CASES = {
    "late": ("interleaved", 2, False),
    "early": ("zb_v", 2, False),
    "spaced": ("1f1b", 1, True),
    "overlapped": ("dualpipe_v", 2, False),
}


@pytest.mark.parametrize("permute", CASES)
def test_every_change_of_a_column_is_seen(permute):
    """Another slot or microbatch, or an op left out: each column at several places where the
    runtime reads it."""
    schedule, repeats, remat_full = CASES[permute]
    source, overlap = random.Random(permute), permute == "overlapped"
    spec = TableSpec(
        schedule,
        4,
        repeats,
        10 if overlap else 6,
        permute="late" if overlap else permute,
        remat_full=remat_full,
        overlap=overlap,
    )
    table = make_table(spec)
    ticks = tick_table(assign_slots(table))
    seen = set()
    for name, column in by_name(ticks.columns).items():
        places = places_of(name, ticks)
        for tick, stage in source.sample(places, min(3, len(places))):
            changed, most = column.copy(), int(column.max())
            if name.endswith(("_slot", "microbatch")):
                changed[tick, stage] = (column[tick, stage] + source.randint(1, most)) % (most + 1)
            else:
                changed[tick, ... if name.startswith("permute") else stage] = 0
            try:
                assert Replay(ticks, {name: changed}).run() == expected(table)
            except AssertionError:
                seen.add(name)
            else:
                pytest.fail(f"{name}: a change of tick {tick}, stage {stage} is not seen")
    assert len(seen) > 20


def test_a_unit_s_last_w_is_the_last_one_on_its_stage():
    for table in grid("late"):
        last = last_weights(table)
        is_w = table.op == Op.W
        assert not (last.astype(bool) & ~is_w).any()
        for stage in range(table.stages):
            ticks = {
                int(unit): int(tick)
                for tick, unit in enumerate(table.local_unit[:, stage])
                if is_w[tick, stage]
            }
            assert sorted(ticks.values()) == list(np.flatnonzero(last[:, stage]))


def test_results_go_through_the_buffers_of_their_way():
    """A unit whose message always goes up needs no copy of it; one on both arms of a V has none
    that fits."""
    buffers = result_buffers(assign_slots(make_table(TableSpec("1f1b", 4, 1, 8, permute="late"))))
    assert buffers[Op.F, 0] == "up" and buffers[Op.B, 0] == "down"
    assert set(
        result_buffers(
            assign_slots(make_table(TableSpec("zb_v", 4, 2, 8, permute="late")))
        ).values()
    ) >= {"up", "down"}
