"""Both clocks: by hand on small tables, against published bubble rates, and against each other."""

import dataclasses
import itertools

import pytest

from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.cell_grid import from_cells
from jaxtrain.schedule.clocks.coupled import coupled, coupled_starts
from jaxtrain.schedule.clocks.independent import independent
from jaxtrain.schedule.clocks.simulate import simulate
from jaxtrain.schedule.clocks.times import KnownTimes, Times
from jaxtrain.schedule.files.table_csv import read_csv
from jaxtrain.schedule.orders import SCHEDULES, default_repeats
from jaxtrain.schedule.table import Op, TableShape, peak_residuals
from jaxtrain.schedule.table_spec import TableSpec

F, B, W = int(Op.F), int(Op.B), int(Op.W)
# Qi et al. 2023: stages, microbatches, times of F, B, W and a message in ms, and the bubble rates
# of 1F1B and ZB-H1.
PUBLISHED = [
    (8, 24, Times(18.522, 18.086, 9.337, 0.601), 0.2431, 0.1585),
    (16, 48, Times(11.347, 11.248, 8.132, 0.377), 0.2552, 0.1397),
]


def two_stages(permute, head=None):
    """F on stage 0, F B W on stage 1, B W on stage 0, one microbatch."""
    cells = [
        [(F, 0, 0), None],
        [None, (F, 1, 0)],
        [None, (B, 1, 0)],
        [None, (W, 1, 0)],
        [(B, 0, 0), None],
        [(W, 0, 0), None],
    ]
    shape = TableShape(
        name="two", stage_of=(0, 1), stages=2, microbatches=1, vocabulary=head or "parallel"
    )
    return from_cells(shape, cells, permute=permute)


# --- by hand --------------------------------------------------------------------------------------


def test_independent_by_hand():
    result = simulate(two_stages([1, 0, 1, 0, 0, 0]), Times(F=3, B=5, W=2, message=1))
    # F 0-3, message, F 4-7, B 7-12, message: B 13-18, W 18-20; stage 1's W beside it, 12-14.
    assert result.step_time == 20
    assert [
        (e.stage, e.name, e.start, e.end)
        for e in sorted(result.timeline, key=lambda e: (e.start, e.stage))
    ] == [
        (0, "F", 0, 3),
        (1, "F", 4, 7),
        (1, "B", 7, 12),
        (1, "W", 12, 14),
        (0, "B", 13, 18),
        (0, "W", 18, 20),
    ]
    assert result.bubble_fraction == pytest.approx(1 - 10 / 20)
    assert result.bubble_fraction_span == pytest.approx(1 - 10 / 20)
    assert result.peak_residuals == [1, 1]


def test_coupled_by_hand():
    times = Times(F=3, B=5, W=2, message=1)
    # Late after the tick of B: stage 0 goes on at 13; stage 1 has waited for stage 0's message,
    # which was there at 4.
    late = simulate(two_stages([1, 0, 1, 0, 0, 0]), times)
    starts = {(e.stage, e.name): e.start for e in late.timeline_coupled}
    assert late.step_time_coupled == 20 and (starts[1, "W"], starts[0, "B"]) == (12, 13)
    # Early in the tick of W: the message travels under it, and stage 0 waits for the start of that
    # tick, 12, and the message.
    early = simulate(two_stages([1, 0, 0, 2, 0, 0]), times)
    assert {(e.stage, e.name): e.start for e in early.timeline_coupled}[1, "W"] == 12
    assert early.step_time_coupled == 20
    # Late in the tick of W: stage 0 waits for its end.
    waits = simulate(two_stages([1, 0, 0, 1, 0, 0]), times)
    assert waits.step_time_coupled == 22
    assert (
        simulate(two_stages([1, 0, 0, 1, 0, 0]), Times(3, 5, 2, 1, tick=0.5)).step_time_coupled
        == 22 + 6 * 0.5
    )


def test_fused_backward_sends_after_w():
    table = two_stages([1, 0, 0, 1, 0, 0])
    assert simulate(table, Times(3, 5, 2, 1), fused_backward=True).step_time == 22
    with pytest.raises(
        ValueError, match="fused_backward needs W right after its B; zb_h1 has B0.0 on its own"
    ):
        simulate(
            make_table(TableSpec("zb_h1", 4, 1, 8, permute="late")), Times(), fused_backward=True
        )


def test_head_by_hand():
    times = Times(F=3, B=5, W=2, message=1, head=4)
    # On the last stage alone: between its F and its B.
    alone = simulate(two_stages([1, 0, 1, 0, 0, 0], "end_stages"), times)
    assert alone.step_time == alone.step_time_coupled == 24
    assert [(e.stage, e.name) for e in alone.timeline if e.name == "H"] == [(1, "H")]
    # On both: half as long, and the last unit's output has to come to all first.
    shared = simulate(two_stages([1, 0, 1, 0, 0, 0]), times)
    assert shared.step_time == shared.step_time_coupled == 20 + 1 + 2
    assert sorted((e.stage, e.start, e.end) for e in shared.timeline if e.name == "H") == [
        (0, 8, 10),
        (1, 8, 10),
    ]
    assert shared.bubble_fraction == pytest.approx(
        1 - 12 / 23
    ) and alone.bubble_fraction == pytest.approx(1 - 14 / 24)


def test_embedding_by_hand():
    times = Times(F=3, B=5, W=2, message=1, embed=4)
    # On the first stage alone: before its F and, in the tick of its B, after that B and before its
    # W.
    alone = simulate(two_stages([1, 0, 1, 0, 0, 0], "end_stages"), times)
    assert alone.step_time == alone.step_time_coupled == 20 + 8
    assert [(e.stage, e.start, e.end) for e in alone.timeline if e.name == "E"] == [
        (0, 0, 4),
        (0, 22, 26),
    ]
    # On both: half as long, and the gradient has to come to all first.
    shared = simulate(two_stages([1, 0, 1, 0, 0, 0]), times)
    assert shared.step_time == shared.step_time_coupled == 20 + 2 + 1 + 2
    assert sorted((e.start, e.end) for e in shared.timeline if e.name == "E") == [
        (0, 2),
        (0, 2),
        (21, 23),
        (21, 23),
    ]


def test_an_op_takes_its_units_share():
    table = make_table(TableSpec("1f1b", 2, 1, 1, permute="late", units_per_chunk=[1, 2]))
    # three units on two stages: 2 for each, so 4 of 6 on stage 1
    even = simulate(table, Times(3, 3, 3))
    assert even.step_time == pytest.approx(2 + 4 + 4 + 2 + 2)
    whole = simulate(table, Times(3, 3, 3), shares=[1, 0.5, 0.5])
    assert whole.step_time == pytest.approx(3 + 3 + 3 + 3 + 3)


@pytest.mark.parametrize(
    ("schedule", "stages", "repeats", "waiting"),
    [
        ("1f1b", 4, 1, {0, 1}),
        ("zb_v", 4, 2, {0, 1}),
        ("interleaved", 4, 2, {0, 1, 3}),
        ("interleaved", 2, 2, {0, 1}),
    ],
)
def test_those_wait_that_exchange_messages(schedule, stages, repeats, waiting):
    table = make_table(TableSpec(schedule, stages, repeats, 4, permute="late"))
    starts = coupled_starts(table, Times())  # stage 0 alone has something to do in tick 0
    assert {s for s, start in enumerate(starts.cells[1]) if start > 0} == waiting


# --- published ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "microbatches", "times", "of_1f1b", "of_zb_h1"), PUBLISHED)
@pytest.mark.parametrize("permute", ["late", "early"])
def test_published_bubble_rates(stages, microbatches, times, of_1f1b, of_zb_h1, permute):
    one = simulate(
        make_table(TableSpec("1f1b", stages, 1, microbatches, permute=permute)),
        times,
        fused_backward=True,
    )
    h1 = simulate(make_table(TableSpec("zb_h1", stages, 1, microbatches, permute=permute)), times)
    assert one.bubble_fraction_span == pytest.approx(of_1f1b, abs=5e-4)
    assert h1.bubble_fraction_span == pytest.approx(of_zb_h1, abs=5e-4)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 12), (8, 24)])
def test_bubbles_by_formula(stages, microbatches):
    # Qi et al. 2023, table 1, without message time and with F = B: (p − 1)(F + B + W) as one op, (p
    # − 1)(F + B − W) for ZB-H1.
    F, B, W = 4.0, 4.0, 3.0
    work = microbatches * (F + B + W)
    one = simulate(
        make_table(TableSpec("1f1b", stages, 1, microbatches, permute="late")),
        Times(F, B, W),
        fused_backward=True,
    )
    assert one.step_time - work == pytest.approx((stages - 1) * (F + B + W))
    split = simulate(
        make_table(TableSpec("1f1b", stages, 1, microbatches, permute="late")), Times(F, B, W)
    )
    assert split.step_time - work == pytest.approx((stages - 1) * (F + B))
    h1 = simulate(
        make_table(TableSpec("zb_h1", stages, 1, microbatches, permute="late")), Times(F, B, W)
    )
    assert h1.step_time - work == pytest.approx((stages - 1) * (F + B - W))
    # ZB-V, m ≥ 2 p, F = B = W: no idle time between a stage's first op and its last.
    v = simulate(make_table(TableSpec("zb_v", stages, 2, microbatches, permute="late")), Times())
    assert v.bubble_fraction_span == pytest.approx(0, abs=1e-12) and v.bubble_fraction > 0


# --- one against the other ------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_coupled_clock_is_never_faster(schedule):
    repeats = default_repeats(schedule)
    for permute, times, remat_full in itertools.product(
        ("late", "aligned", "early", "spaced"),
        (Times(), Times(2, 2, 1, 0.1, 2), Times(1, 3, 2, 0.5, 1, head=2, embed=1)),
        (False, True),
    ):
        table = make_table(
            TableSpec(schedule, 4, repeats, 9, permute=permute, remat_full=remat_full)
        )
        result = simulate(table, times)
        assert result.step_time <= result.step_time_coupled + 1e-9
        work = [sum(e.end - e.start for e in result.timeline if e.stage == s) for s in range(4)]
        assert work == pytest.approx(
            [
                sum(e.end - e.start for e in result.timeline_coupled if e.stage == s)
                for s in range(4)
            ]
        )
        for timeline in (result.timeline, result.timeline_coupled):
            for s in range(4):
                own = sorted((e.start, e.end) for e in timeline if e.stage == s)
                # one op at a time
                assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))


def test_overlapped_cells_by_both_clocks():
    """An F of 2 and a B of 3 that save 1 take 4; both begin when both can, and the messages leave
    at the end of both."""
    cells = "# place=0,1\nstage 0,stage 1\nF0.0,\nF0.1,F0.0\n,F0.1\n,B0.0\n,B0.1\n"
    cells += "F0.2+B0.0,\nW0.0,F0.2\nB0.1,B0.2\nW0.1,W0.0\nB0.2,W0.1\nW0.2,W0.2\n"
    table = read_csv("mine.csv", cells)
    times = Times(2.0, 3.0, 1.0, message=0.25, overlap=1.0)
    for timeline in (independent(table, times), coupled(table, times)):
        ops = {(op.stage, op.name, op.microbatch): op for op in timeline}
        f, b = ops[0, "F", 2], ops[0, "B", 0]
        assert f.end - f.start == pytest.approx(1.6) and b.end - b.start == pytest.approx(2.4)
        assert b.start == pytest.approx(f.end) and b.end == pytest.approx(f.start + 4)
        assert f.start >= ops[1, "B", 0].end + 0.25
        assert ops[1, "F", 2].start >= b.end + 0.25 and ops[0, "W", 0].start >= b.end
    apart = simulate(table, dataclasses.replace(times, overlap=0.0))
    assert apart.step_time - simulate(table, times).step_time == pytest.approx(1.0)
    most = simulate(table, dataclasses.replace(times, overlap=9.0))
    assert apart.step_time - most.step_time == pytest.approx(2.0)  # B alone takes 3
    assert peak_residuals(table) == [3.0, 2.0]


def test_overlapped_cells_save_what_the_times_say():
    spec = TableSpec("dualpipe_v", 4, 2, 12, overlap=True)
    table, apart = (make_table(dataclasses.replace(spec, overlap=on)) for on in (True, False))
    figures = [simulate(t, Times(overlap=0.3)) for t in (table, apart)]
    assert figures[0].step_time < figures[1].step_time - 1
    assert figures[1].step_time == simulate(apart, Times()).step_time


def test_known_times_are_a_setting_up_to_the_last_one():
    """`pipeline.times` is a list of numbers: 0 stands for a time that is not known before one that
    is."""
    known = KnownTimes(3.0, 2.0, 1.0, 0.1, 2.0, 4.0, embedding=0.5)
    assert known.setting() == (3.0, 2.0, 1.0, 0.1, 2.0, 4.0, 0.0, 0.0, 0.5)
    assert KnownTimes(3.0, 2.0, 1.0).setting() == (3.0, 2.0, 1.0)
    assert KnownTimes(*known.setting()).embedding == 0.5 and KnownTimes(3.0, 2.0, 1.0).head is None
