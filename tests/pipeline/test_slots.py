"""Slots: a replay of programs on tagged values, written here, finds in every slot what the op wants; and no fewer slots would do."""

import dataclasses
import random

import numpy as np
import pytest
from pipeline_tables import grid, random_table

from jaxtrain.pipeline.schedules import make_forward_table, make_table
from jaxtrain.pipeline.slots import KINDS, Program, assign_slots, colour
from jaxtrain.pipeline.table import Op, Permute, check, units_of


def replay(program: Program) -> set[tuple]:
    """Executes a program on symbols in place of arrays, with nothing but its columns → the tasks done.

    Fails where an op finds something else in its slot. Send buffers keep their contents, as they do in a runtime.
    """
    t, p, last = program.table, program.table.stages, program.table.units - 1
    own = units_of(t.place, p)
    pools = {kind: [[None] * n for n in program.counts[kind]] for kind in KINDS}
    buffers = {+1: [None] * p, -1: [None] * p}
    arrived = {+1: [None] * p, -1: [None] * p}
    done, first, end = set(), t.place[0], t.place[-1]

    def permute():
        arrived[+1] = buffers[+1][-1:] + buffers[+1][:-1]
        arrived[-1] = buffers[-1][1:] + buffers[-1][:1]

    def read(kind, s, slot, wanted):
        assert slot >= 0 and pools[kind][s][slot] == wanted, (row, s, kind, slot, wanted)

    for row in range(t.ticks):
        for s in range(p):
            for way, name in ((+1, "up"), (-1, "down")):
                for kind in "xg":
                    if (slot := getattr(program, f"{name}_{kind}")[row, s]) >= 0:
                        pools[kind][s][slot] = arrived[way][s]
        if t.permute[row] == Permute.EARLY:
            permute()
        if (k := int(t.embed[row])) >= 0:
            pools["x"][first][program.embed_x[row]] = ("x", 0, k)
        for s in range(p):
            op, k = Op(t.op[row, s]), int(t.microbatch[row, s])
            if op == Op.IDLE:
                assert all(getattr(program, kind)[row, s] == -1 for kind in KINDS) and program.send[row, s] == 0
                continue
            g = own[s][t.unit[row, s]]
            slot = {kind: int(getattr(program, kind)[row, s]) for kind in KINDS}
            message = None
            if op in (Op.F, Op.R):
                read("x", s, slot["x"], ("x", g, k))
                message = ("x", g + 1, k) if op == Op.F else None
                assert (slot["residual_b"] >= 0) == (not t.forward_only and (op == Op.R or not t.recompute or g == last))
                if slot["residual_b"] >= 0:
                    pools["residual_b"][s][slot["residual_b"]] = pools["residual_w"][s][slot["residual_w"]] = ("residual", g, k)
            elif op == Op.B:
                read("g", s, slot["g"], ("g", g, k))
                read("residual_b", s, slot["residual_b"], ("residual", g, k))
                pools["stash"][s][slot["stash"]] = ("stash", g, k)
                message = ("g", g - 1, k)
            else:
                read("stash", s, slot["stash"], ("stash", g, k))
                read("residual_w", s, slot["residual_w"], ("residual", g, k))
            stays = int(program.stay_x[row, s]) if op == Op.F else int(program.stay_g[row, s])
            way = int(program.send[row, s])
            assert (message is None) == (stays < 0 and way == 0) and not (stays >= 0 and way)
            if stays >= 0:
                pools[message[0]][s][stays] = message
            elif way:
                buffers[way][s] = message
            done.add((op.name, g, k))
        if (k := int(t.head[row])) >= 0:
            read("x", end, program.head_x[row], ("x", last + 1, k))
            if not t.forward_only:
                pools["g"][end][program.head_g[row]] = ("g", last, k)
            done.add(("H", k))
        if (k := int(t.embed_gradient[row])) >= 0:
            read("g", first, program.embed_gradient_g[row], ("g", -1, k))
            done.add(("E", k))
        if t.permute[row] == Permute.LATE:
            permute()
    return done


def expected(table) -> set[tuple]:
    tasks = {("H", k) for k in range(table.microbatches)}
    for g in range(table.units):
        ops = "F" if table.forward_only else "FBW" if not table.recompute or g == table.units - 1 else "FRBW"
        tasks |= {(op, g, k) for op in ops for k in range(table.microbatches)}
    return tasks if table.forward_only else tasks | {("E", k) for k in range(table.microbatches)}


@pytest.mark.parametrize("permute", ["late", "aligned", "early"])
def test_replay_of_every_schedule(permute):
    for table in grid(permute):
        assert replay(assign_slots(table)) == expected(table), table.name


@pytest.mark.parametrize("seed", range(60))
def test_replay_of_random_tables(seed):
    table = random_table(random.Random(seed))
    check(table)
    assert replay(assign_slots(table)) == expected(table)


def test_replay_of_forward_tables():
    for placement in ("circular", "v"):
        for stages, repeats, microbatches in ((1, 1, 3), (2, 2, 5), (4, 2, 9), (5, 1, 2)):
            for permute in ("late", "early"):
                table = make_forward_table(stages, repeats, microbatches, placement=placement, permute=permute)
                program = assign_slots(table)
                assert replay(program) == expected(table)
                assert program.slots["residual_b"] == program.slots["stash"] == 0
                assert program.slots["x"] <= 2 * stages + 2  # and not the number of microbatches


@pytest.mark.parametrize("kind", KINDS)
def test_the_replay_finds_a_wrong_slot(kind):
    program = assign_slots(make_table("interleaved", 4, 2, 8, permute="late"))
    column = getattr(program, kind).copy()
    row = int(np.argwhere(program.table.op[:, 0] == {"x": Op.F, "stash": Op.W, "residual_w": Op.W}.get(kind, Op.B))[3, 0])
    column[row, 0] = (column[row, 0] + 1) % program.counts[kind][0] if program.counts[kind][0] > 1 else -1
    with pytest.raises(AssertionError):
        replay(dataclasses.replace(program, **{kind: column}))


def test_colouring_takes_as_many_slots_as_are_alive_at_once():
    source = random.Random(1)
    for _ in range(200):
        intervals = {("x", 0, i): (a := source.randrange(30), a + source.randrange(8)) for i in range(source.randrange(1, 25))}
        slots, count = colour(intervals)
        assert count == max(sum(a <= t <= b for a, b in intervals.values()) for t in range(40))
        for one, (a, b) in intervals.items():
            assert not any(slots[one] == slots[two] and a <= d and c <= b for two, (c, d) in intervals.items() if two != one)


def test_slots_of_1f1b_do_not_grow_with_the_microbatches():
    few, many = (assign_slots(make_table("1f1b", 4, 1, m, permute="late")) for m in (8, 32))
    # The first stage's four microbatches in flight; on the last one the output of F beside its input, which the head reads.
    assert few.counts == many.counts
    assert few.counts["residual_b"] == (4, 3, 2, 1) and few.counts["stash"] == (1, 1, 1, 1)


def test_recompute_keeps_inputs_in_place_of_residuals():
    kept, rebuilt = (assign_slots(make_table("1f1b", 4, 1, 12, permute="late", remat_full=full)).counts for full in (False, True))
    assert kept["residual_b"][0] == 4 and rebuilt["residual_b"] == (1, 1, 1, 1)
    assert rebuilt["x"][0] == 4
