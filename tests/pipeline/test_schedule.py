"""Tables: every task once, in time, in slots that nothing writes over. A simulation of the buffers, written here, executes them."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxtrain.pipeline.schedule import SCHEDULES, Op, Permute, Program, Table, assign_slots, check, make_forward_table, make_table

STAGES, MICROBATCHES = (2, 3, 4, 7), (1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 16)
KINDS = [("gpipe", 1), ("gpipe", 2), ("gpipe", 3), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4)]
PERMUTES = ("late", "early")


def tables(schedule: str, chunks: int, permute: str):
    """The table of each number of stages and microbatches."""
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        if schedule == "forward":
            yield make_forward_table(stages, chunks, microbatches, permute)
        else:
            yield make_table(schedule, stages, chunks, microbatches, permute)


def execute(program: Program) -> list[set]:
    """Runs a program on symbols in place of arrays → the tasks done on each stage.

    Global chunk g makes ("x", g + 1, k), the input of the next, and ("g", g − 1, k), its own input's gradient: what leaves for the chunk
    before. Fails where an op finds something else in its slot.
    """
    t = program.table
    p, last = t.stages, t.stages * t.chunks - 1
    x = [[None] * program.x_slots for _ in range(p)]
    g_kept = [[None] * program.g_slots for _ in range(p)]
    y, g, x_in, g_in = ([None] * p for _ in range(4))
    done = [set() for _ in range(p)]
    for row in range(t.ticks):
        for s in range(p):
            for slots, arriving, payload in ((x, program.arriving_x, x_in), (g_kept, program.arriving_g, g_in)):
                if arriving[row, s] >= 0:
                    slots[s][arriving[row, s]] = payload[s]
        if t.permute[row] == Permute.EARLY:
            x_in, g_in = y[-1:] + y[:-1], g[1:] + g[:1]
        for s in range(p):
            op, c, k = Op(t.op[row, s]), int(t.chunk[row, s]), int(t.microbatch[row, s])
            if op == Op.IDLE:
                continue
            chunk = c * p + s
            if chunk == 0 and op != Op.B:  # the embedding
                x[s][program.x_slot[row, s]] = ("x", 0, k)
            assert x[s][program.x_slot[row, s]] == ("x", chunk, k), (row, s, op, c, k)
            assert (chunk == last) == (op == Op.L)
            if op == Op.F:
                y[s] = ("x", chunk + 1, k)
            elif op == Op.B:
                assert g_kept[s][program.g_slot[row, s]] == ("g", chunk, k), (row, s, op, c, k)
                assert ("F", c, k) in done[s]
            if op != Op.F and not t.forward_only:
                g[s] = ("g", chunk - 1, k)
            assert (op.name, c, k) not in done[s]
            done[s].add((op.name, c, k))
        if t.permute[row] == Permute.LATE:
            x_in, g_in = y[-1:] + y[:-1], g[1:] + g[:1]
    return done


def expected(t: Table) -> list[set]:
    """The tasks of each stage."""
    stages = []
    for s in range(t.stages):
        tasks = set()
        for c, k in itertools.product(range(t.chunks), range(t.microbatches)):
            last = (s, c) == (t.stages - 1, t.chunks - 1)
            tasks |= {("L", c, k)} if last else {("F", c, k)} if t.forward_only else {("F", c, k), ("B", c, k)}
        stages.append(tasks)
    return stages


@pytest.mark.parametrize("permute", PERMUTES)
@pytest.mark.parametrize(("schedule", "chunks"), [*KINDS, ("forward", 1), ("forward", 2), ("forward", 3)])
def test_every_task_once_on_the_right_values(schedule, chunks, permute):
    for table in tables(schedule, chunks, permute):
        check(table)
        assert execute(assign_slots(table)) == expected(table)
        assert set(table.permute) == {Permute[permute.upper()]}


def test_one_stage_is_accumulation_whatever_the_schedule():
    made = [make_table(schedule, 1, chunks, 5, permute) for (schedule, chunks), permute in itertools.product(KINDS, PERMUTES)]
    for table in made:
        check(table)
        assert (table.stages, table.chunks, table.microbatches, table.name) == (1, 1, 5, "accumulate")
        assert table.op.tolist() == [[Op.L]] * 5 and table.microbatch.tolist() == [[k] for k in range(5)]
        assert not table.permute.any() and table.idle_fraction == 0
        assert assign_slots(table).x_slots == 1


# --- idle cells ------------------------------------------------------------------------------------------------------------------


def rows_beyond_work(schedule: str, stages: int, chunks: int, microbatches: int) -> int:
    """Rows more than the first stage has ops."""
    return make_table(schedule, stages, chunks, microbatches).ticks - 2 * chunks * microbatches


@pytest.mark.parametrize("stages", STAGES)
def test_1f1b_waits_for_one_trip_there_and_back(stages):
    # One less than 2 (p − 1): the last stage's forward and backward are one op.
    assert {rows_beyond_work("1f1b", stages, 1, m) for m in range(2, 40)} == {2 * (stages - 2)}


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("stages", STAGES)
def test_interleaving_divides_the_bubble_by_the_chunks(stages, chunks):
    # As many rows as 1F1B's, whose ops are `chunks` times longer: for every m ≥ p, also where p does not divide it.
    assert {rows_beyond_work("interleaved", stages, chunks, m) for m in range(stages, 4 * stages)} == {2 * (stages - 2)}


def test_fewer_microbatches_than_stages_have_idle_cells():
    few, enough = make_table("interleaved", 4, 2, 3), make_table("interleaved", 4, 2, 4)
    assert few.idle_fraction > enough.idle_fraction > 0


# --- memory ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("permute", PERMUTES)
@pytest.mark.parametrize("stages", STAGES)
def test_1f1b_keeps_p_inputs(stages, permute):
    slots = [assign_slots(make_table("1f1b", stages, 1, m, permute)) for m in range(1, 4 * stages)]
    most = stages if permute == "late" else 2 * stages - 1  # a message under way for two rows: twice as many to and fro
    assert [s.x_slots for s in slots] == [min(m, most) for m in range(1, 4 * stages)]
    assert max(s.g_slots for s in slots) == (1 if permute == "late" else 2)


@pytest.mark.parametrize("stages", STAGES)
def test_early_permutes_cost_1f1b_no_idle_rows_but_the_first_and_last(stages):
    rows = [make_table("1f1b", stages, 1, m, "early").ticks - 2 * m for m in (16, 32, 64)]
    assert len(set(rows)) == 1


@pytest.mark.parametrize("permute", PERMUTES)
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("stages", STAGES)
def test_interleaving_keeps_a_bounded_number_of_inputs(stages, chunks, permute):
    def slots(m: int) -> int:
        return assign_slots(make_table("interleaved", stages, chunks, m, permute)).x_slots

    for m in range(stages, 3 * stages):
        # chunks · group are in flight on the first stage when its first backward comes, and p − 1 more come in before; on 2 and 3
        # stages one of them arrives a row early.
        group = stages + m % stages
        assert slots(m) <= chunks * group + stages - (m % stages == 0 and stages > 3), m
    for rest in {0, 1, stages - 1}:  # more groups, the same memory
        assert len({slots(stages * groups + rest) for groups in (3, 4, 6)}) == 1


def test_gpipe_keeps_every_input():
    assert [assign_slots(make_table("gpipe", 4, 1, m)).x_slots for m in (4, 8, 16)] == [4, 8, 16]


# --- what is refused -------------------------------------------------------------------------------------------------------------


def changed(table: Table, row: int, stage: int, **cell) -> Table:
    arrays = {name: getattr(table, name).copy() for name in cell}
    for name, value in cell.items():
        arrays[name][row, stage] = value
    return dataclasses.replace(table, **arrays)


def swapped(table: Table, stage: int, rows: tuple[int, int]) -> Table:
    arrays = {name: getattr(table, name).copy() for name in ("op", "chunk", "microbatch")}
    for array in arrays.values():
        array[list(rows), stage] = array[list(reversed(rows)), stage]
    return dataclasses.replace(table, **arrays)


def test_broken_tables_are_refused():
    good = make_table("1f1b", 3, 1, 4)
    check(good)
    last = np.argwhere(good.op[:, 0] == Op.B)[-1, 0]
    cases = {
        "never run": changed(good, last, 0, op=Op.IDLE, chunk=-1, microbatch=-1),
        "stands there twice": changed(good, last, 0, microbatch=0),
        "does not belong there": changed(good, last, 0, chunk=1),
        "which arrives in row 1": swapped(good, 1, (0, 1)),  # its first forward, a row early
        "which arrives in row None": dataclasses.replace(good, permute=np.zeros_like(good.permute)),
    }
    for message, table in cases.items():
        with pytest.raises(ValueError, match=message):
            check(table)


def test_a_table_made_for_late_permutes_does_not_pass_with_early_ones():
    late = make_table("interleaved", 4, 2, 8)
    with pytest.raises(ValueError, match="waits for"):
        check(dataclasses.replace(late, permute=np.full_like(late.permute, Permute.EARLY)))


def test_a_backward_before_its_forward_is_refused():
    # One stage's own order: with the messages there, only this rule is broken.
    good = make_table("gpipe", 2, 1, 2)
    f, b = (int(np.argwhere((good.op[:, 0] == op) & (good.microbatch[:, 0] == 1))[0, 0]) for op in (Op.F, Op.B))
    with pytest.raises(ValueError):
        check(swapped(good, 0, (f, b)))


def test_an_order_that_never_finishes(monkeypatch):
    def stuck(stages, chunks, microbatches, hop):
        return [[(Op.B, 0, k) for k in range(microbatches)] + [(Op.F, 0, k) for k in range(microbatches)]] * stages

    monkeypatch.setitem(SCHEDULES, "stuck", stuck)
    with pytest.raises(ValueError, match=r"stuck with 2 stages, 1 chunks, 3 microbatches never finishes"):
        make_table("stuck", 2, 1, 3)


def test_the_simulation_finds_a_wrong_slot():
    program = assign_slots(make_table("1f1b", 4, 1, 8))
    wrong = program.x_slot.copy()
    row = int(np.argwhere(program.table.op[:, 0] == Op.B)[0, 0])
    wrong[row, 0] = (wrong[row, 0] + 1) % program.x_slots
    with pytest.raises(AssertionError):
        execute(dataclasses.replace(program, x_slot=wrong))
