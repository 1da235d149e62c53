"""The validator against an execution on symbols that knows nothing of it; and its messages."""

import dataclasses
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.pipeline_tables import broken, execute, grid, random_overlapped_table, random_table

from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.table import (
    Op,
    Permute,
    TableError,
)
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.schedule.validator import check


def accepted(table) -> bool:
    try:
        check(table)
    except TableError:
        return False
    return True


# --- what is accepted -----------------------------------------------------------------------------


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


def test_overlapped_cells_are_accepted_where_they_compute_and_nowhere_else():
    source, outcomes = random.Random(1), []
    for _ in range(80):
        table = random_overlapped_table(source)
        check(table)
        assert execute(table)
        table = broken(table, source)
        alone = table.overlapped & (table.op != Op.F)  # no cell for an execution
        outcomes.append(not alone.any() and execute(table))
        assert accepted(table) == outcomes[-1]
    assert 5 < sum(outcomes) < 70


# --- what is refused, and how it is said ----------------------------------------------------------


def changed(table, tick, stage, op, unit, microbatch):
    arrays = {name: getattr(table, name).copy() for name in ("op", "local_unit", "microbatch")}
    for array, value in zip(arrays.values(), (op, unit, microbatch), strict=True):
        array[tick, stage] = value
    return dataclasses.replace(table, **arrays)


def column(table, name, tick, value):
    array = getattr(table, name).copy()
    array[tick] = value
    return dataclasses.replace(table, **{name: array})


GOOD = make_table(TableSpec("1f1b", 3, 1, 4, permute="late"))
EARLY = make_table(TableSpec("1f1b", 3, 1, 4, permute="early"))
TICK_OF_HEAD = int(np.argwhere(GOOD.head == 1)[0, 0])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            changed(GOOD, 0, 0, Op.IDLE, -1, -1),
            "stage 0: F0.0 is missing (1 in all): write each task once",
        ),
        (changed(GOOD, 1, 0, Op.F, 0, 0), "tick 1, stage 0: F0.0 stands already in tick 0"),
        (
            changed(GOOD, 0, 1, Op.F, 1, 0),
            "tick 0, stage 1: op 1, unit 1, microbatch 0: no such cell on a stage with 1 units",
        ),
        (changed(GOOD, 0, 1, Op.R, 0, 0), "tick 0, stage 1: R0.0 does not belong in this table"),
        (
            changed(GOOD, 0, 1, 9, 0, 0),
            "tick 0, stage 1: op 9, unit 0, microbatch 0: no such cell on a stage with 1 units",
        ),
        (
            changed(GOOD, 0, 1, Op.IDLE, 0, -1),
            "tick 0, stage 1: op 0, unit 0, microbatch -1: no such cell on a stage with 1 units",
        ),
        (column(GOOD, "head", TICK_OF_HEAD, -1), "head: microbatch 1 is missing"),
        (
            column(GOOD, "head", 0, 1),
            f"tick {TICK_OF_HEAD}, head: microbatch 1 stands already in tick 0",
        ),
        (column(GOOD, "embed", 9, 7), "tick 9, embed: microbatch 7 does not exist"),
        (
            column(EARLY, "permute", 1, Permute.NONE),
            "tick 1, stage 0: F0.1 overwrites the message of F0.0 in tick 0: send that by a "
            "permute before",
        ),
        (
            column(GOOD, "permute", 0, Permute.NONE),
            "tick 1, stage 1: F0.0 waits for F0.0 of stage 0 in tick 0, whose message can be "
            "read from tick 2 on: move it there or later",
        ),
        (column(GOOD, "permute", 0, 5), "permute holds [0, 1, 5]: use 0, 1 or 2"),
        (
            dataclasses.replace(GOOD, head=np.roll(GOOD.head, -1)),
            "tick 1, head: microbatch 0 waits for F0.0 of stage 2 in tick 2: not before it",
        ),
        (
            dataclasses.replace(GOOD, head=np.roll(GOOD.head, 1)),
            "tick 3, stage 2: B0.0 waits for head of microbatch 0 in tick 3: move it to tick 4 "
            "or later",
        ),
        (
            dataclasses.replace(GOOD, embed=np.roll(GOOD.embed, 1)),
            "tick 0, stage 0: F0.0 waits for embed of microbatch 0 in tick 1: move it to tick 1 "
            "or later",
        ),
        (
            dataclasses.replace(GOOD, embed_gradient=np.roll(GOOD.embed_gradient, -1)),
            "tick 4, embed_gradient: microbatch 0 waits for B0.0 of stage 0 in tick 5: not before "
            "it",
        ),
        (
            dataclasses.replace(GOOD, stage_of=(0, 2, 0)),
            "tick 1, stage 1: op 1, unit 0, microbatch 0: no such cell on a stage with 0 units",
        ),
        (dataclasses.replace(GOOD, stage_of=(0, 1, 5)), "every unit on a stage"),
        (dataclasses.replace(GOOD, op=GOOD.op.astype(np.int64)), "op is int64"),
        (dataclasses.replace(GOOD, vocabulary="none"), "vocabulary 'none'"),
    ],
)
def test_what_is_wrong_is_said(table, message):
    with pytest.raises(TableError) as error:
        check(table)
    assert message in str(error.value)


def test_an_op_before_its_own_earlier_one():
    table = make_table(TableSpec("gpipe", 2, 1, 3, permute="late", remat_full=True))
    own = {
        (int(table.op[t, 0]), int(table.microbatch[t, 0])): int(t)
        for t in range(table.ticks)
        if table.op[t, 0]
    }
    for early, late, said in (
        (Op.F, Op.R, "R0.2 waits for its F0.2 in tick"),
        (Op.R, Op.B, "B0.2 waits for its R0.2"),
        (Op.B, Op.W, "W0.2 waits for its B0.2"),
    ):
        arrays = {name: getattr(table, name).copy() for name in ("op", "local_unit", "microbatch")}
        a, b = own[early, 2], own[late, 2]
        for array in arrays.values():
            array[[a, b], 0] = array[[b, a], 0]
        with pytest.raises(TableError, match=re.escape(said)):
            check(dataclasses.replace(table, **arrays))


def test_memory_bound():
    table = make_table(TableSpec("gpipe", 4, 1, 6, permute="late"))
    check(table, memory=6)
    with pytest.raises(
        TableError, match="stage 0: the residuals of 6 chunks at once are more than the bound of 5"
    ):
        check(table, memory=5)
