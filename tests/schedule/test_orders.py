"""The named schedules: idle time and memory within what their authors promise, for every number of
stages and microbatches."""

import dataclasses
import itertools

import pytest

from jaxtrain.schedule.by_name import NAMES, check_repeats, make_forward_table, make_table
from jaxtrain.schedule.clocks.simulate import simulate
from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.files.table_csv import to_csv
from jaxtrain.schedule.orders import StageTimes, closed_forms, stage_orders as orders
from jaxtrain.schedule.packing import Tasks, pack_into_ticks
from jaxtrain.schedule.placement import PLACEMENTS
from jaxtrain.schedule.table import Op, TableShape, peak_residuals
from jaxtrain.schedule.table_spec import TableSpec
from jaxtrain.schedule.validator import check


def _in_flight(p, v, m):
    """Interleaved: p v + p − 1 where p divides m; groups are of up to p + m mod p microbatches."""
    return min(m * v, v * (p + m % p) + p - 1)


# schedule, repeats → (most idle time of the whole step in chunk ops, microbatches from which it
# holds, most stashes, whether none of the idle time lies between a stage's first and last op), all
# by p, v, m, in unit times; Qi et al. 2023, Narayanan et al. 2021, DeepSeek-V3
BOUNDS = {
    ("gpipe", 1): (lambda p, v: 2 * (p - 1), lambda p: 1, lambda p, v, m: m, False),
    ("gpipe", 2): (lambda p, v: 2 * (p - 1), lambda p: p, lambda p, v, m: m * v, False),
    ("1f1b", 1): (lambda p, v: 2 * (p - 1), lambda p: 1, lambda p, v, m: p, False),
    ("interleaved", 2): (lambda p, v: 2 * (p - 1), lambda p: p, _in_flight, False),
    ("interleaved", 3): (lambda p, v: 2 * (p - 1), lambda p: p, _in_flight, False),
    ("interleaved", 4): (lambda p, v: 2 * (p - 1), lambda p: p, _in_flight, False),
    ("zb_h1", 1): (lambda p, v: p - 1, lambda p: p, lambda p, v, m: p, False),
    ("zb_h2", 1): (lambda p, v: p - 1, lambda p: 2 * p - 1, lambda p, v, m: 2 * p - 1, True),
    ("zb_v", 2): (lambda p, v: p - 1, lambda p: 2 * p, lambda p, v, m: 2 * p, True),
    ("dualpipe_v", 2): (
        lambda p, v: 2 * (p - 1),
        lambda p: 2 * p,
        lambda p, v, m: 2 * p + 1,
        False,
    ),
}


def check_bounds(schedule: str, repeats: int, stages: int, microbatches: int, **options) -> None:
    idle_bound, enough, peak_bound, no_idle_between = BOUNDS[schedule, repeats]
    table = make_table(TableSpec(schedule, stages, repeats, microbatches, **options))
    check(table)
    # Times of a stage's whole share: an op on a chunk takes 1.
    result = simulate(table, Times(repeats, repeats, repeats))
    where = (schedule, stages, repeats, microbatches)
    work = 3 * repeats * microbatches
    assert result.step_time_coupled >= result.step_time - 1e-9, where
    if options.get("permute") == "late":
        assert result.step_time_coupled == pytest.approx(result.step_time, abs=1e-9), where
    if microbatches >= enough(stages):
        assert result.step_time - work <= idle_bound(stages, repeats) + 1e-9, where
        if no_idle_between:
            assert result.bubble_fraction_span == pytest.approx(0, abs=1e-12), where
    for peak in (result.peak_residuals, result.peak_residuals_with_weight_stash):
        assert max(peak) <= peak_bound(stages, repeats, microbatches), where


@pytest.mark.parametrize(("schedule", "repeats"), BOUNDS)
def test_idle_time_and_stashes(schedule, repeats):
    for stages in range(2, 9):
        for microbatches in sorted(
            {1, 2, stages - 1, *range(stages, 2 * stages + 3), 3 * stages, 4 * stages + 1}
        ):
            check_bounds(schedule, repeats, stages, microbatches, permute="late")


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "repeats"), BOUNDS)
def test_idle_time_and_stashes_of_all(schedule, repeats):
    for stages in range(2, 17):
        for microbatches in range(1, 4 * stages + 2):
            check_bounds(schedule, repeats, stages, microbatches, permute="late")


@pytest.mark.parametrize(("schedule", "repeats"), BOUNDS)
def test_the_best_way_of_laying_in_unit_times_keeps_the_bounds(schedule, repeats):
    for stages, microbatches in itertools.product((2, 3, 4, 7), (1, 4, 8, 15)):
        check_bounds(schedule, repeats, stages, microbatches)


@pytest.mark.parametrize(("schedule", "repeats"), [(s, r) for s, r in BOUNDS if s != "gpipe"])
def test_memory_does_not_grow_with_the_microbatches(schedule, repeats):
    peaks = [
        peak_residuals(
            make_table(TableSpec(schedule, 4, repeats, m, permute="early")), count_weight_stash=True
        )
        for m in (8, 16, 40)
    ]
    assert peaks[0] == peaks[1] == peaks[2]


def test_published_steps_of_the_order():
    """The first stage's ops as the figures of the papers have them: 1F1B and ZB-H1 (4 stages),
    ZB-H2 (4 stages, 7 forwards first)."""

    def names(cells):
        return " ".join(f"{Op(op).name}{k}" for op, _, k in cells)

    assert names(orders.one_f_one_b(4, 1, 5)[0]) == "F0 F1 F2 F3 B0 W0 F4 B1 W1 B2 W2 B3 W3 B4 W4"
    assert names(orders.zb_h1(4, 1, 5)[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4"
    assert names(orders.zb_h2(4, 1, 8)[0][:12]) == "F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1"


def test_interleaving_divides_the_bubble_of_1f1b():
    times = Times(1, 1, 1)
    one = simulate(make_table(TableSpec("1f1b", 4, 1, 12, permute="late")), times)
    for repeats in (2, 3, 4):
        many = simulate(make_table(TableSpec("interleaved", 4, repeats, 12, permute="late")), times)
        assert many.step_time - 36 == pytest.approx((one.step_time - 36) / repeats)


@pytest.mark.parametrize(("schedule", "repeats"), [("1f1b", 1), ("interleaved", 2)])
def test_overlapped_cells_save_time(schedule, repeats):
    """F and B of two microbatches share a cell from the warm-up on; the stage with fewest of these
    holds as many chunks, and waits as long, as the closed forms say."""
    known = closed_forms(schedule, overlap=True)
    for stages, microbatches in itertools.product((2, 3, 4, 8), (7, 16, 24)):
        times = Times(1, 1, 1, message=0.01, overlap=0.6)
        spec = TableSpec(schedule, stages, repeats, microbatches, times=times)
        apart = make_table(spec)
        table = make_table(dataclasses.replace(spec, overlap=True))
        check(table)
        cells = known.shared_cells(stages, repeats, microbatches)
        assert table.overlapped.sum(0).min() == cells and not apart.overlaps
        assert max(peak_residuals(table)) <= known.residuals(stages, repeats, microbatches)
        result, before = simulate(table, times), simulate(apart, times)
        busy = 3 * microbatches - 0.6 * cells / repeats
        idle = known.idle(stages, repeats, StageTimes(1, 0, 1, 1, overlap=0.6))
        if microbatches % stages == 0:
            assert result.step_time_coupled == pytest.approx(busy + idle, rel=0.03)
        assert result.step_time_coupled < before.step_time_coupled or not cells


def test_between_h1_and_h2_memory_buys_time():
    times = []
    for bound in range(1, 16):
        order = orders.between(8, 24, bound)
        for s, cells in enumerate(order):
            held = peak = 0
            for op, _, _ in cells:
                held += {Op.F: 1, Op.W: -1}.get(op, 0)
                peak = max(peak, held)
            assert peak <= bound, (bound, s)
        shape = TableShape(name="between", stage_of=tuple(range(8)), stages=8, microbatches=24)
        table = pack_into_ticks(Tasks(order, shape), "late")
        check(table)
        times.append(table.ticks)
    assert times == sorted(times, reverse=True)
    assert times[7] <= 24 * 3 + 7 and times[14] <= 24 * 3 + 7  # ZB-H1 and ZB-H2 at 8 and 15


@pytest.mark.parametrize("permute", ["late", "early", "aligned", "spaced", "auto"])
def test_one_stage_is_accumulation(permute):
    for name in NAMES:
        table = make_table(TableSpec(name, 1, 2, 3, permute=permute))
        check(table)
        assert not table.permute.any() and not (table.op == Op.IDLE).any()
        assert [Op(o).name for o in table.op[:6, 0]] == ["F", "F", "B", "W", "B", "W"]
        assert peak_residuals(table) == [2]


@pytest.mark.parametrize("placement", ["circular", "v"])
def test_forward_tables(placement):
    for stages, repeats, microbatches, permute in itertools.product(
        (1, 2, 3, 6), (1, 2), (1, 2, 5, 12), ("late", "early")
    ):
        table = make_forward_table(
            PLACEMENTS[placement](stages, repeats), stages, microbatches, permute=permute
        )
        check(table)
        assert set(table.op.ravel().tolist()) <= {Op.IDLE, Op.F}
        if permute == "late" and placement == "circular" and microbatches >= stages:
            assert table.ticks <= repeats * microbatches + 2 * stages


def test_units_are_ops_of_their_own():
    whole = make_table(TableSpec("1f1b", 3, 1, 4, permute="late"))
    cut = make_table(
        TableSpec("1f1b", 3, 1, 4, permute="late", units_per_chunk=[1, 3, 2], remat_full=True)
    )
    check(cut)
    assert cut.stage_of == (0, 1, 1, 1, 2, 2) and cut.chunk_of == (0, 1, 1, 1, 2, 2)
    assert max(peak_residuals(cut)) == max(peak_residuals(whole)) == 3
    middle = [
        (Op(int(o)).name, int(u))
        for o, u in zip(cut.op[:, 1], cut.local_unit[:, 1], strict=True)
        if o in (Op.R, Op.B, Op.W)
    ]
    assert middle[:9] == [(op, u) for u in (2, 1, 0) for op in "RBW"]  # one group rebuilt at a time
    # the last unit needs no R
    assert not ((cut.op[:, 2] == Op.R) & (cut.local_unit[:, 2] == 1)).any()


def test_csv_schedules(tmp_path):
    path = tmp_path / "mine.csv"
    table = make_table(TableSpec("zb_v", 3, 2, 6))
    path.write_text(to_csv(table))
    assert (make_table(TableSpec(f"csv:{path}", 3, 2, 6)).op == table.op).all()
    with pytest.raises(ValueError, match="is a table of stages=3, not 4: use 3"):
        make_table(TableSpec(f"csv:{path}", 4, 2, 6))
    with pytest.raises(ValueError, match="is a table of microbatches=6, not 8: use 6"):
        make_table(TableSpec(f"csv:{path}", 3, 2, 8))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("1f1b", 4, 2, 8),
            "repeats=2 does not fit schedule='1f1b', which has exactly 1 chunk on a stage: use 1",
        ),
        (
            ("zb_v", 4, 1, 8),
            "repeats=1 does not fit schedule='zb_v', which has exactly 2 chunks on a stage: use 2",
        ),
        (
            ("interleaved", 4, 1, 8),
            "repeats=1 does not fit schedule='interleaved', which has at least 2 chunks on a "
            "stage: use 2",
        ),
        (("zbv", 4, 1, 8), "schedule='zbv' is unknown"),
        (("1f1b", 0, 1, 8), "stages=0 must be at least 1: use 1"),
        (("1f1b", 4, 1, 0), "microbatches=0 must be at least 1: use 1"),
    ],
)
def test_what_does_not_fit_is_said(arguments, said):
    with pytest.raises(ValueError) as error:
        make_table(TableSpec(*arguments))
    assert said in str(error.value)


def test_numbers_of_units_and_permutes_that_do_not_exist():
    with pytest.raises(ValueError, match="units_per_chunk has 2 numbers, and 1f1b has 4 chunks"):
        make_table(TableSpec("1f1b", 4, 1, 8, units_per_chunk=[1, 1]))
    with pytest.raises(ValueError, match="permute='never' is unknown"):
        make_table(TableSpec("1f1b", 4, 1, 8, permute="never"))
    check_repeats("zb_v", 1, 1)  # one stage is accumulation
