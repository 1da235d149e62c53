"""The validator against an execution on symbols that knows nothing of it; its messages; CSV files."""

import dataclasses
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_tables import broken, execute, grid, random_table

from jaxtrain.pipeline.schedules import make_table
from jaxtrain.pipeline.table import (
    Op,
    Permute,
    TableError,
    arrivals,
    check,
    directions,
    from_rows,
    local_index,
    peak_stashes,
    units_of,
    wraps,
)
from jaxtrain.pipeline.table_csv import read_csv, to_csv

COLUMNS = ("op", "unit", "microbatch", "permute", "head", "embed", "embed_gradient")
FB = (int(Op.F), int(Op.B))


def accepted(table) -> bool:
    try:
        check(table)
    except TableError:
        return False
    return True


def same(one, two) -> bool:
    fields = ("name", "place", "chunk", "stages", "microbatches", "recompute", "recompute_last", "forward_only", "vocabulary")
    return all(getattr(one, f) == getattr(two, f) for f in fields) and all(
        np.array_equal(getattr(one, c), getattr(two, c)) for c in COLUMNS
    )


# --- what is accepted ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("permute", ["late", "aligned", "early", "spaced"])
def test_every_schedule_is_accepted_and_right(permute):
    for table in grid(permute):
        check(table)
        assert execute(table), table.name


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_random_tables_are_accepted_and_right(seed):
    table = random_table(random.Random(seed))
    check(table)
    assert execute(table)


def test_the_validator_accepts_what_computes_and_nothing_else():
    source, outcomes = random.Random(0), []
    for _ in range(250):
        table = broken(random_table(source), source)
        outcomes.append(execute(table))
        assert accepted(table) == outcomes[-1]
    assert 15 < sum(outcomes) < 190  # the changes are neither all harmless nor all fatal


# --- what is refused, and how it is said -----------------------------------------------------------------------------------------


def changed(table, row, stage, op, unit, microbatch):
    arrays = {name: getattr(table, name).copy() for name in ("op", "unit", "microbatch")}
    for array, value in zip(arrays.values(), (op, unit, microbatch), strict=True):
        array[row, stage] = value
    return dataclasses.replace(table, **arrays)


def column(table, name, row, value):
    array = getattr(table, name).copy()
    array[row] = value
    return dataclasses.replace(table, **{name: array})


GOOD = make_table("1f1b", 3, 1, 4, permute="late")
EARLY = make_table("1f1b", 3, 1, 4, permute="early")
ROW_OF_HEAD = int(np.argwhere(GOOD.head == 1)[0, 0])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(GOOD, 0, 0, Op.IDLE, -1, -1), "stage 0: F0.0 is missing (1 in all)"),
        (changed(GOOD, 1, 0, Op.F, 0, 0), "row 1, stage 0: F0.0 stands already in row 0"),
        (changed(GOOD, 0, 1, Op.F, 1, 0), "row 0, stage 1: op 1, unit 1, microbatch 0: no such cell on a stage with 1 units"),
        (changed(GOOD, 0, 1, Op.R, 0, 0), "row 0, stage 1: R0.0 does not belong in this table"),
        (changed(GOOD, 0, 1, 9, 0, 0), "row 0, stage 1: op 9, unit 0, microbatch 0: no such cell on a stage with 1 units"),
        (changed(GOOD, 0, 1, Op.IDLE, 0, -1), "row 0, stage 1: op 0, unit 0, microbatch -1: no such cell on a stage with 1 units"),
        (column(GOOD, "head", ROW_OF_HEAD, -1), "head: microbatch 1 is missing"),
        (column(GOOD, "head", 0, 1), f"row {ROW_OF_HEAD}, head: microbatch 1 stands already in row 0"),
        (column(GOOD, "embed", 9, 7), "row 9, embed: microbatch 7 does not exist"),
        (column(EARLY, "permute", 1, Permute.NONE),
         "row 1, stage 0: F0.1 overwrites a message made in row 0 for unit 1, microbatch 0, which no permute has sent"),
        (column(GOOD, "permute", 0, Permute.NONE), "row 1, stage 1: F0.0 waits for F0.0 of stage 0, which has not come by then"),
        (column(GOOD, "permute", 0, 5), "permute holds [0, 1, 5]: use 0, 1 or 2"),
        (dataclasses.replace(GOOD, head=np.roll(GOOD.head, -1)), "row 1, head: microbatch 0 waits for F of the last unit"),
        (dataclasses.replace(GOOD, head=np.roll(GOOD.head, 1)),
         "row 3, stage 2: B0.0 waits for head of microbatch 0, which has not come by then"),
        (dataclasses.replace(GOOD, embed=np.roll(GOOD.embed, 1)),
         "row 0, stage 0: F0.0 waits for embed of microbatch 0, which has not come by then"),
        (dataclasses.replace(GOOD, embed_gradient=np.roll(GOOD.embed_gradient, -1)), "embed_gradient: microbatch 0 waits for B of unit 0"),
        (dataclasses.replace(GOOD, place=(0, 2, 0)), "row 1, stage 1: op 1, unit 0, microbatch 0: no such cell on a stage with 0 units"),
        (dataclasses.replace(GOOD, place=(0, 1, 5)), "every unit on a stage"),
        (dataclasses.replace(GOOD, op=GOOD.op.astype(np.int64)), "op is int64"),
        (dataclasses.replace(GOOD, vocabulary="none"), "vocabulary 'none'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(table, message):
    with pytest.raises(TableError) as error:
        check(table)
    assert message in str(error.value)


def test_an_op_before_its_own_earlier_one():
    table = make_table("gpipe", 2, 1, 3, permute="late", remat_full=True)
    own = {(int(table.op[t, 0]), int(table.microbatch[t, 0])): int(t) for t in range(table.ticks) if table.op[t, 0]}
    for early, late, said in (
        (Op.F, Op.R, "R0.2 waits for its F0.2"),
        (Op.R, Op.B, "B0.2 waits for its R0.2"),
        (Op.B, Op.W, "W0.2 waits for its B0.2"),
    ):
        arrays = {name: getattr(table, name).copy() for name in ("op", "unit", "microbatch")}
        a, b = own[early, 2], own[late, 2]
        for array in arrays.values():
            array[[a, b], 0] = array[[b, a], 0]
        with pytest.raises(TableError, match=re.escape(said)):
            check(dataclasses.replace(table, **arrays))


def test_units_must_be_neighbours():
    with pytest.raises(TableError, match="unit 0 is on stage 0 and unit 1 on stage 2: put them on one stage or on neighbours"):
        directions((0, 2), 4)


def test_memory_bound():
    table = make_table("gpipe", 4, 1, 6, permute="late")
    check(table, memory=6)
    with pytest.raises(TableError, match="stage 0: 6 stashes at once are more than the bound of 5"):
        check(table, memory=5)


def test_stashes_are_counted_from_f_to_b_or_w():
    rows = [
        [(Op.F, 0, 0)],
        [(Op.F, 0, 1)],
        [(Op.B, 0, 0)],
        [(Op.F, 0, 2)],
        [(Op.B, 0, 1)],
        [(Op.B, 0, 2)],
        *[[(Op.W, 0, k)] for k in range(3)],
    ]
    table = from_rows(rows, "t", (0,), 1, 3)
    check(table)
    assert peak_stashes(table) == [2] and peak_stashes(table, count_stash=True) == [3]
    halves = from_rows(
        [[(Op.F, 0, 0)], [(Op.F, 1, 0)], [(Op.B, 1, 0)], [(Op.B, 0, 0)], [(Op.W, 1, 0)], [(Op.W, 0, 0)]], "t", (0, 0), 1, 1, chunk=(0, 0)
    )
    assert peak_stashes(halves) == [1]


# --- places ----------------------------------------------------------------------------------------------------------------------


def test_places():
    circle, v = (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)
    assert local_index(circle) == (0, 0, 0, 1, 1, 1) and units_of(v, 3) == ((0, 5), (1, 4), (2, 3))
    assert directions(circle, 3) == (1, 1, 1, 1, 1, 0) and directions(v, 3) == (1, 1, 0, -1, -1, 0)
    assert directions((0, 0, 1, 1), 2) == (0, 1, 0, 0) and directions((0, 1, 1, 0), 2) == (1, 0, 1, 0)
    assert wraps(circle, 3) and not wraps(v, 3) and not wraps((0, 1, 2), 3)


def test_arrivals_of_late_and_early_permutes():
    rows = [[(Op.F, 0, 0), None], [None, None], [None, None], [None, (Op.F, 1, 0)]]
    late, early = (from_rows(rows, "t", (0, 1), 2, 1, permute=when, forward_only=True) for when in ([0, 1, 0, 0], [0, 0, 2, 0]))
    assert arrivals(late)["x", 1, 0] == 2 and arrivals(early)["x", 1, 0] == 3
    check(late), check(early)
    with pytest.raises(TableError, match="which has not come by then"):  # an early permute sends what was made before its row
        check(dataclasses.replace(late, permute=np.array([2, 0, 0, 0], np.int32)))


# --- CSV -------------------------------------------------------------------------------------------------------------------------


def test_csv_there_and_back(tmp_path):
    tables = [t for permute in ("late", "early", "aligned") for t in grid(permute) if t.stages in (1, 3) and t.microbatches in (1, 4)]
    source = random.Random(3)
    tables += [random_table(source) for _ in range(30)]
    path = tmp_path / "t.csv"
    for table in tables:
        path.write_text(to_csv(table))
        again = read_csv(str(path))
        # R shows itself: with one unit there is none, whatever the table says.
        assert same(again, dataclasses.replace(table, recompute=bool((table.op == Op.R).any()))), table.name


def test_csv_columns_left_out_are_filled_in(tmp_path):
    table = make_table("interleaved", 3, 2, 5, permute="late")
    lines = [",".join(line.split(",")[:3]) for line in to_csv(table).splitlines()[1:]]
    path = tmp_path / "mine.csv"
    path.write_text("# a schedule of my own\n\n" + "\n".join(lines) + "\n")
    assert same(read_csv(str(path)), dataclasses.replace(table, name="mine"))
    path.write_text("# place=v\n0,1\nF0.0,\n,F0.0\n,F1.0\nF1.0,\nB1.0,\nW1.0,B1.0\n,W1.0\n,B0.0\n,W0.0\nB0.0,\nW0.0,\n")
    assert read_csv(str(path)).place == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stage 0,stage 1\nF0.0,\n,F0.0\n,B0.0\nW0.0,W0.0\nB0.0,\n",
         "line 5 (row 3), column 'stage 0': W0.0 waits for its B0.0, which does not stand before it"),
        ("stage 0,stage 1\nF0.0,F0.0\n,B0.0\nB0.0,W0.0\nW0.0,\n",
         "line 2 (row 0), column 'stage 1': F0.0 waits for F0.0 of stage 0, which has not come by then"),
        ("# hello\nstage 0\nF0.0\n\nfoo\n",
         "line 5 (row 1), column 'stage 0': 'foo' is no cell: write op, unit, dot, microbatch, such as F0.3"),
        ("stage 0,permute\nF0.0,later\n", "line 2 (row 0), column 'permute': 'later' is no permute: use late, early or none"),
        ("stage 0,head\nF0.0,x\n", "line 2 (row 0), column 'head': 'x' is no microbatch: use a number or nothing"),
        ("stage 0\nF0.0,F0.1\n", "line 2 (row 0): 2 fields under a header of 1"),
        ("stage 0,stage 2\nF0.0,\n", "the header is 'stage 0,stage 2': use stage 0,stage 1"),
        ("stage 0,head,loss\nF0.0,,\n", "the header has 'loss' after the stages: use each of permute, head, embed, embed_gradient once"),
        ("", "no rows: write a header line"),
        ("stage 0\n,\n", "2 fields"),
        ("# place=0,1\nstage 0\nF0.0\n", "place='0,1' names stage 1, and the header has 1 stages"),
        ("# place=x\nstage 0\nF0.0\n", "place='x': use circular, v, or the stage of each unit"),
        ("# chunk=0,2\n# place=0,0\nstage 0\nF0.0\n", "chunk='0,2': use 2 numbers"),
        ("# place=0\nstage 0\nF1.0\n", "line 3 (row 0), column 'stage 0': there is no local unit 1 on a stage with 1"),
        ("# vocabulary=some\nstage 0\nF0.0\n", "vocabulary='some': use parallel or end_stages"),
        ("stage 0\nF0.0\nB0.0\n", "column 'stage 0': W0.0 is missing (1 in all)"),
        ("stage 0,permute,head,embed,embed_gradient\nF0.1,,1,0,\nF0.0,,0,1,\n",
         "line 2 (row 0), column 'stage 0': F0.1 waits for embed of microbatch 1"),
    ],
)  # fmt: skip
def test_a_bad_csv_is_answered_with_the_place(content, said, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_csv(str(path))
    text = str(error.value)
    assert text.startswith(str(path)) and said in text and "\n" not in text


def test_no_csv_at_all(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "binary", "."):
        with pytest.raises(ValueError, match="cannot be read"):
            read_csv(str(tmp_path / name))
