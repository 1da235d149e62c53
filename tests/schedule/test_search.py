"""Tables for given op times: how near the coupled clock comes to the independent one, and that `auto` is never worse."""

import time

import pytest

from jaxtrain.schedule import search
from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.list_scheduling import list_schedule
from jaxtrain.schedule.orders import PLACES, SCHEDULES, default_repeats, fits_repeats
from jaxtrain.schedule.search import Problem, memory_of, named
from jaxtrain.schedule.simulate import Times, simulate, walk
from jaxtrain.schedule.table import Op, peak_residuals
from jaxtrain.schedule.validator import check

SMALL = Problem(8, 24, Times(18.522, 18.086, 9.337, 0.601))  # Qi et al. 2023, op times in ms
LARGE = Problem(16, 48, Times(11.347, 11.248, 8.132, 0.377))


def ratio(problem: Problem, schedule: str) -> float:
    """Coupled step time of a named schedule over its independent one with late permutes, the order as published."""
    repeats = default_repeats(schedule)
    late = simulate(named(schedule, repeats, problem, ("late",)), problem.times).step_time
    return walk(named(schedule, repeats, problem), problem.times) / late


@pytest.mark.parametrize("problem", [SMALL, LARGE], ids=["p8", "p16"])
@pytest.mark.parametrize(
    ("schedule", "most"), [("1f1b", 1.01), ("interleaved", 1.05), ("zb_h1", 1.005), ("zb_h2", 1.01), ("zb_v", 1.005), ("dualpipe_v", 1.02)]
)
def test_coupling_costs_little(problem, schedule, most):
    assert ratio(problem, schedule) <= most


def test_late_permutes_alone_would_cost_much():
    late = simulate(named("1f1b", 1, SMALL, ("late",)), SMALL.times)
    assert late.step_time_coupled > 1.15 * late.step_time


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_best_way_takes_no_more_memory(schedule):
    repeats = default_repeats(schedule)
    for problem in (SMALL, Problem(4, 8, Times()), Problem(3, 7, Times(1, 2, 1, 0.3, 1), remat_full=True)):
        best, late = named(schedule, repeats, problem), named(schedule, repeats, problem, ("late",))
        check(best)
        assert memory_of(best) <= memory_of(late) and max(peak_residuals(best)) <= max(peak_residuals(late))
        assert walk(best, problem.times) <= walk(late, problem.times)


PROBLEMS = [
    (Problem(4, 8, Times()), 2),
    (Problem(3, 5, Times(2, 2, 1, 0.1)), 2),
    (Problem(4, 6, Times(1, 1, 1, 0.1, 1), remat_full=True), 1),
    (Problem(4, 6, Times(2, 3, 1, 0.3, head=2), vocabulary="end_stages"), 2),
    (SMALL, 1),
    (SMALL, 2),
]


@pytest.mark.parametrize(("problem", "repeats"), PROBLEMS)
def test_auto_is_never_worse_than_a_named_schedule_at_equal_memory(problem, repeats):
    for schedule in SCHEDULES:
        if not fits_repeats(schedule, repeats):
            continue
        table = named(schedule, repeats, problem)
        auto = search.search(problem, (repeats,), memory_of(table) / repeats)
        check(auto, memory=memory_of(table), count_weight_stash=True)
        assert walk(auto, problem.times) <= walk(table, problem.times) * (1 + 1e-9), schedule


def test_auto_beats_the_named_schedules_where_its_own_orders_do():
    one = search.search(SMALL, (1,), 15)
    assert one.name == "auto-list"
    assert walk(one, SMALL.times) < 0.997 * walk(named("zb_h2", 1, SMALL), SMALL.times)
    # At 12 stashes ZB-H2 does not fit: an order between it and ZB-H1 uses what there is.
    between = search.search(SMALL, (1,), 12)
    check(between, memory=12, count_weight_stash=True)
    assert walk(between, SMALL.times) < 0.985 * walk(named("zb_h1", 1, SMALL), SMALL.times)


def test_more_memory_is_never_slower_and_too_little_is_refused():
    problem = Problem(4, 10, Times(2, 2, 1, 0.1))
    times = [walk(search.search(problem, (1,), bound), problem.times) for bound in (1, 2, 3, 4, 5, 6, 7, 10)]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1]
    with pytest.raises(ValueError, match=r"memory=0\.4 is too little for any table found: use 1"):
        search.search(problem, (1,), 0.4)


def test_auto_is_the_same_every_time():
    one, two = (search.search(Problem(4, 8, Times(2, 2, 1, 0.1))) for _ in range(2))
    assert one.name == two.name and (one.op == two.op).all() and (one.permute == two.permute).all()


def test_auto_by_name():
    table = make_table("auto", 4, 2, 8, times=Times(2, 2, 1, 0.1), memory=8)
    check(table, memory=8, count_weight_stash=True)
    assert table.units == 8
    cut = make_table("auto", 3, 1, 4, groups=[1, 2, 1], remat_full=True, permute="late")
    check(cut)
    assert cut.units == 4 and set(cut.permute.tolist()) <= {0, 1}


@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize("bound", [2, 3, 5, 9])
def test_list_schedules_keep_their_bound(placement, bound):
    stage_of = PLACES[placement](3, 2)
    for patience, forward_first in ((0.0, False), (0.5, True), (1.0, False)):
        orders = list_schedule(stage_of, 3, 6, bound, Times(2, 2, 1, 0.1), patience, forward_first)
        for s, cells in enumerate(orders):
            held = peak = 0
            for op, g, _ in cells:
                assert stage_of[g] == s
                held += {Op.F: 1, Op.W: -1}.get(op, 0)
                peak = max(peak, held)
            assert peak <= bound and len(cells) == 3 * 2 * 6
    assert list_schedule(stage_of, 3, 6, 1, Times(), 0.5, False) is None  # the second chunk never gets a slot


# --- large problems --------------------------------------------------------------------------------------------------------------


def rules_of(problem: Problem, v: int, memory: float | None = None) -> list[search.Candidate]:
    return [c for c in search.candidates(problem, (v,), memory, search.PACKINGS) if c.name == "list"]


def test_the_larger_a_problem_the_fewer_list_schedules_and_all_named_ones():
    """By size alone: which candidates there are depends on neither times nor memory."""
    for times, memory in ((Times(), None), (Times(18.5, 18.1, 9.3, 0.6, 2), 3.0)):
        counts = {m: len(rules_of(Problem(64, m, times), 1, memory)) for m in (1, 512, 513, 4096, 4097)}
        assert counts == {1: 4, 512: 4, 513: 2, 4096: 2, 4097: 1}
        assert [len(rules_of(Problem(64, m, times), 2, memory)) for m in (256, 257, 2049)] == [8, 4, 2]
    small, large = (search.candidates(Problem(64, m, Times()), (1, 2), None, search.PACKINGS) for m in (2, 10_000))
    others = lambda tried: [(c.name, c.placement, c.repeats, c.modes) for c in tried if c.name != "list"]
    assert others(small) == others(large) and {name for name, *_ in others(large)} == {*SCHEDULES, "between"}
    assert all(c.modes == ["late", "early", "spaced"] for c in large if c.name == "list")
    assert rules_of(Problem(64, 513, Times()), 1)[0].orders.args[-2:] == (0.5, False)
    only = search.candidates(Problem(64, 10_000, Times()), (1,), None, ("aligned",))
    assert all(c.modes for c in only)


def test_a_cut_search_is_no_worse_than_the_named_schedules(monkeypatch):
    monkeypatch.setattr(search, "RULES", ((4, search.RULES[0][1]), (64, search.RULES[1][1]), (None, search.RULES[2][1])))
    for problem, repeats in PROBLEMS[:4]:
        for bound in (None, 2.0, 4.0):
            auto = search.search(problem, (repeats,), bound)
            for schedule in (s for s in SCHEDULES if fits_repeats(s, repeats)):
                table = named(schedule, repeats, problem)
                if bound is None or memory_of(table) / repeats <= bound + search.ROOM:
                    assert walk(auto, problem.times) <= walk(table, problem.times) * (1 + 1e-9), schedule


def test_a_search_says_how_far_it_is():
    told: list[tuple[str, float]] = []
    search.search(Problem(3, 4, Times()), report=lambda what, done: told.append((what, done)))
    parts = [done for _, done in told]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] < 1 and len(set(parts)) > 50
    assert {what.split()[0].rstrip(",") for what, _ in told} == {*SCHEDULES, "between", "list"}


def test_a_large_search_ends_in_time():
    """16 stages, 256 microbatches: two seconds where there were forty."""
    began = time.process_time()
    table = search.search(Problem(16, 256, Times(2, 2, 1, 0.1)))
    check(table)
    assert time.process_time() - began < 20


def test_interleaved_of_64_stages_and_1024_microbatches():
    began = time.process_time()
    table = named("interleaved", 2, Problem(64, 1024, Times(2, 2, 1, 0.1)))
    check(table)
    assert time.process_time() - began < 15 and table.ticks > 6 * 1024
