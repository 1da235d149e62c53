"""Tables for given op times: how near the coupled clock comes to the independent one, and that
`auto` is never worse."""

import dataclasses
import time

import pytest

from jaxtrain.schedule import table_search
from jaxtrain.schedule.by_name import make_table, named_table
from jaxtrain.schedule.clocks.coupled import coupled_time
from jaxtrain.schedule.clocks.simulate import simulate
from jaxtrain.schedule.clocks.times import Times
from jaxtrain.schedule.orders import SCHEDULES, default_repeats, fits_repeats
from jaxtrain.schedule.placement import PLACEMENTS
from jaxtrain.schedule.table import ROUNDING, Op, Table, peak_residuals
from jaxtrain.schedule.table_search import ListRule, list_schedule
from jaxtrain.schedule.table_spec import TableSpec, memory_of
from jaxtrain.schedule.validator import check

# Qi et al. 2023, op times in ms
SMALL = TableSpec("auto", 8, 1, 24, times=Times(18.522, 18.086, 9.337, 0.601))
LARGE = TableSpec("auto", 16, 1, 48, times=Times(11.347, 11.248, 8.132, 0.377))


def named(schedule: str, spec: TableSpec, permute: str = "auto") -> Table:
    """The table of a named schedule for a spec, with as many chunks as the schedule is made for
    where the spec's do not fit."""
    repeats = spec.repeats if fits_repeats(schedule, spec.repeats) else default_repeats(schedule)
    return named_table(
        dataclasses.replace(spec, schedule=schedule, repeats=repeats, permute=permute)
    )


def auto(spec: TableSpec, memory: float | None = None) -> Table:
    """The best table found for a spec within `memory`."""
    return table_search.search([dataclasses.replace(spec, memory=memory)])


def least(schedule: str, spec: TableSpec) -> TableSpec:
    """The spec with the fewest chunks that a schedule is made for."""
    return dataclasses.replace(spec, repeats=default_repeats(schedule))


def ratio(spec: TableSpec, schedule: str) -> float:
    """Coupled step time of a named schedule over its independent one with late permutes, the order
    as published."""
    spec = least(schedule, spec)
    late = simulate(named(schedule, spec, "late"), spec.times).step_time
    return coupled_time(named(schedule, spec), spec.times) / late


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["p8", "p16"])
@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("1f1b", 1.01),
        ("interleaved", 1.05),
        ("zb_h1", 1.005),
        ("zb_h2", 1.01),
        ("zb_v", 1.005),
        ("dualpipe_v", 1.02),
    ],
)
def test_coupling_costs_little(spec, schedule, most):
    assert ratio(spec, schedule) <= most


def test_late_permutes_alone_would_cost_much():
    late = simulate(named("1f1b", SMALL, "late"), SMALL.times)
    assert late.step_time_coupled > 1.15 * late.step_time


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_best_way_takes_no_more_memory(schedule):
    rebuilt = TableSpec("auto", 3, 1, 7, times=Times(1, 2, 1, 0.3, 1), remat_full=True)
    for spec in (SMALL, TableSpec("auto", 4, 1, 8), rebuilt):
        spec = least(schedule, spec)
        best, late = named(schedule, spec), named(schedule, spec, "late")
        check(best)
        assert memory_of(best) <= memory_of(late) and max(peak_residuals(best)) <= max(
            peak_residuals(late)
        )
        assert coupled_time(best, spec.times) <= coupled_time(late, spec.times)


SPECS = [
    TableSpec("auto", 4, 2, 8),
    TableSpec("auto", 3, 2, 5, times=Times(2, 2, 1, 0.1)),
    TableSpec("auto", 4, 1, 6, times=Times(1, 1, 1, 0.1, 1), remat_full=True),
    TableSpec("auto", 4, 2, 6, times=Times(2, 3, 1, 0.3, head=2), vocabulary="end_stages"),
    SMALL,
    dataclasses.replace(SMALL, repeats=2),
]


@pytest.mark.parametrize("spec", SPECS)
def test_auto_is_never_worse_than_a_named_schedule_at_equal_memory(spec):
    for schedule in SCHEDULES:
        if not fits_repeats(schedule, spec.repeats):
            continue
        table = named(schedule, spec)
        best = auto(spec, memory_of(table) / spec.repeats)
        check(best, memory=memory_of(table), count_weight_stash=True)
        assert coupled_time(best, spec.times) <= coupled_time(table, spec.times) * (1 + 1e-9), (
            schedule
        )


def test_auto_beats_the_named_schedules_where_its_own_orders_do():
    one = auto(SMALL, 15)
    assert one.name == "auto-list"
    assert coupled_time(one, SMALL.times) < 0.997 * coupled_time(named("zb_h2", SMALL), SMALL.times)
    # Within 12 residuals ZB-H2 does not fit: an order between it and ZB-H1 uses what there is.
    between = auto(SMALL, 12)
    check(between, memory=12, count_weight_stash=True)
    assert coupled_time(between, SMALL.times) < 0.985 * coupled_time(
        named("zb_h1", SMALL), SMALL.times
    )


def test_more_memory_is_never_slower_and_too_little_is_refused():
    spec = TableSpec("auto", 4, 1, 10, times=Times(2, 2, 1, 0.1))
    times = [coupled_time(auto(spec, bound), spec.times) for bound in (1, 2, 3, 4, 5, 6, 7, 10)]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1]
    with pytest.raises(ValueError, match=r"memory=0\.4 is too little for any table found: use 1"):
        auto(spec, 0.4)


def with_any_repeats(stages: int, microbatches: int) -> list[TableSpec]:
    """What `auto` tries where the chunks are left to it."""
    times = Times(2, 2, 1, 0.1)
    return [
        TableSpec("auto", stages, repeats, microbatches, times=times)
        for repeats in table_search.ANY_REPEATS
    ]


def test_auto_is_the_same_every_time():
    one, two = (table_search.search(with_any_repeats(4, 8)) for _ in range(2))
    assert one.name == two.name and (one.op == two.op).all() and (one.permute == two.permute).all()


def test_auto_by_name():
    table = make_table(TableSpec("auto", 4, 2, 8, times=Times(2, 2, 1, 0.1), memory=4))
    check(table, memory=8, count_weight_stash=True)
    assert table.units == 8
    cut = make_table(
        TableSpec("auto", 3, 1, 4, units_per_chunk=[1, 2, 1], remat_full=True, permute="late")
    )
    check(cut)
    assert cut.units == 4 and set(cut.permute.tolist()) <= {0, 1}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("bound", [2, 3, 5, 9])
def test_list_schedules_keep_their_bound(placement, bound):
    stage_of = PLACEMENTS[placement](3, 2)
    for rule in (ListRule(0.0, False), ListRule(0.5, True), ListRule(1.0, False)):
        orders = list_schedule(stage_of, 3, 6, bound, Times(2, 2, 1, 0.1), rule)
        for s, cells in enumerate(orders):
            held = peak = 0
            for op, g, _ in cells:
                assert stage_of[g] == s
                held += {Op.F: 1, Op.W: -1}.get(op, 0)
                peak = max(peak, held)
            assert peak <= bound and len(cells) == 3 * 2 * 6
    # the second chunk never gets a slot
    assert list_schedule(stage_of, 3, 6, 1, Times(), ListRule(0.5, False)) is None


# --- large tables ---------------------------------------------------------------------------------


def rules_of(spec: TableSpec) -> list[table_search.OrderCandidate]:
    """The list schedules that are tried for a spec."""
    return [candidate for candidate in table_search.candidates(spec) if candidate.name == "list"]


def test_the_larger_a_table_the_fewer_list_schedules_and_all_named_ones():
    """By size alone: which candidates there are depends on neither times nor memory."""
    for times, memory in ((Times(), None), (Times(18.5, 18.1, 9.3, 0.6, 2), 3.0)):
        rules = lambda repeats, m, times=times, memory=memory: rules_of(
            TableSpec("auto", 64, repeats, m, times=times, memory=memory)
        )
        assert {m: len(rules(1, m)) for m in (1, 512, 513, 4096, 4097)} == {
            1: 4,
            512: 4,
            513: 2,
            4096: 2,
            4097: 1,
        }
        assert [len(rules(2, m)) for m in (256, 257, 2049)] == [8, 4, 2]
    tried = lambda m: [
        c for repeats in (1, 2) for c in table_search.candidates(TableSpec("auto", 64, repeats, m))
    ]
    others = lambda m: [
        (c.name, c.placement, c.spec.repeats, c.packings) for c in tried(m) if c.name != "list"
    ]
    assert others(2) == others(10_000) and {name for name, *_ in others(10_000)} == {
        *SCHEDULES,
        "between",
    }
    assert all(c.packings == ["late", "early", "spaced"] for c in tried(10_000) if c.name == "list")
    assert rules_of(TableSpec("auto", 64, 1, 513))[0].orders.args[-1] == (0.5, False)
    assert all(
        c.packings
        for c in table_search.candidates(TableSpec("auto", 64, 1, 10_000, permute="aligned"))
    )


def test_a_cut_search_is_no_worse_than_the_named_schedules(monkeypatch):
    monkeypatch.setattr(
        table_search,
        "RULES",
        (
            (4, table_search.RULES[0][1]),
            (64, table_search.RULES[1][1]),
            (None, table_search.RULES[2][1]),
        ),
    )
    for spec in SPECS[:4]:
        for bound in (None, 2.0, 4.0):
            best = auto(spec, bound)
            for schedule in (name for name in SCHEDULES if fits_repeats(name, spec.repeats)):
                table = named(schedule, spec)
                if bound is None or memory_of(table) / spec.repeats <= bound + ROUNDING:
                    assert coupled_time(best, spec.times) <= coupled_time(table, spec.times) * (
                        1 + 1e-9
                    ), schedule


def test_a_search_says_how_far_it_is():
    told: list[tuple[str, float]] = []
    table_search.search(with_any_repeats(3, 4), report=lambda what, done: told.append((what, done)))
    parts = [done for _, done in told]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] < 1 and len(set(parts)) > 50
    assert {what.split()[0].rstrip(",") for what, _ in told} == {*SCHEDULES, "between", "list"}


@pytest.mark.full
def test_a_large_search_ends_in_time():
    """16 stages, 256 microbatches: two seconds where there were forty."""
    began = time.process_time()
    table = table_search.search(with_any_repeats(16, 256))
    check(table)
    assert time.process_time() - began < 20


def test_interleaved_of_64_stages_and_1024_microbatches():
    began = time.process_time()
    table = named_table(TableSpec("interleaved", 64, 2, 1024, times=Times(2, 2, 1, 0.1)))
    check(table)
    assert time.process_time() - began < 15 and table.ticks > 6 * 1024
