"""Plans of loops over layers: each layer once, in order, and gathered one trip ahead."""

import itertools
import types

import numpy as np
import pytest

from jaxtrain.runtime.layers import layer_loops
from jaxtrain.runtime.layers.layer_loops import (
    MOST_BODIES,
    LayerIndex,
    LayerRange,
    Trip,
    layers_in_order,
    plan_loops,
    plan_unit,
    run_loops,
    run_loops_gathering,
    run_trips_of,
)

# The kinds of the layers of a unit on each stage, a letter each. Capitals are of another form.
STAGES = {
    "one kind": ["wwwww", "wwwww"],
    "one kind, uneven": ["www", "ww", ""],
    "a period": ["wwwf" * 3, "wwwf" * 3],
    "a period and a half": ["wfwfw", "wfwfw"],
    "within a period": ["wwfwwwfwww"],
    "stages that differ": ["wwwfwww", "fwwwfww"],
    "a kind on one stage": ["ww", "wf"],
    "two forms": ["wEwEw", "EwEwE"],
    "without a pattern": ["wfwwfwwwfnwfnnw"],
}
RANGES = {
    "one range": [LayerRange(None)],
    "two ranges": [LayerRange(None, end=2), LayerRange(None, begin=2, residual_b="saved_b")],
}


def ranges_of(ranges: list[LayerRange], stages: list[str]) -> list[LayerRange]:
    """A range for each kind."""
    kinds = sorted(set("".join(stages)))
    form = lambda kind: kind.upper() if kind.isupper() else ""
    return [
        LayerRange(None, r.begin, r.end, kind=kind, form=form(kind), pool_kinds=(kind,))
        for r, kind in itertools.product(ranges, kinds)
    ]


def in_python(start, stop, step, carry):
    """As `run_trips`: the number of a trip is an int where there is no loop."""
    is_known = isinstance(stop, int) and stop - start <= 1
    for trip in range(start, stop):
        carry = step(trip if is_known else np.int32(trip), carry)
    return carry


def trips_run(loops, stage: int) -> list[Trip]:
    """The trips of a plan on a stage."""
    add = lambda label, values, done: [*done, Trip(label, tuple(map(int, values)))]
    return run_trips_of(loops, stage, add, [])


@pytest.fixture(autouse=True)
def loops_in_python(monkeypatch):
    monkeypatch.setattr(layer_loops, "run_trips", in_python)
    # Nothing is compiled. As in XLA, an index behind the end is the last one.
    clamped = lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 1)], "edge")
    monkeypatch.setattr(layer_loops, "jnp", types.SimpleNamespace(asarray=clamped))


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_each_layer_runs_once_in_order(ranges, stages):
    ranges = ranges_of(ranges, stages)
    for reverse, peel_first in itertools.product((False, True), repeat=2):
        layers = [layers_in_order(ranges, kinds) for kinds in stages]
        layers = [of_stage[::-1] if reverse else of_stage for of_stage in layers]
        if peel_first and len({t[0].label if t else None for t in layers}) > 1:
            continue  # a peeled layer is there on every stage, of one range
        loops = plan_loops(layers, peel_first)
        for stage, of_stage in enumerate(layers):
            assert trips_run(loops, stage) == of_stage
            assert not peel_first or trips_run(loops[:1], stage) == of_stage[:1]


def test_a_layer_has_its_row_and_its_entry():
    ranges = ranges_of(RANGES["two ranges"], ["wEwEw"])
    layers = layers_in_order(ranges, "wEwEw")
    assert [trip.values for trip in layers] == [
        LayerIndex(0, 0, 0),  # w of the first range
        LayerIndex(1, 0, 0),
        LayerIndex(2, 1, 0),  # w of the second range, whose entries begin at 0
        LayerIndex(3, 1, 0),
        LayerIndex(4, 2, 1),
    ]
    assert [trip.label.begin for trip in layers] == [0, 0, 2, 2, 2]


def bodies(loops) -> int:
    return sum(len(loop.stretches) for loop in loops)


def shapes(loops) -> list:
    """The loops as (repeats, [(kind, trips or None where they differ)])."""
    known = lambda count: int(count.flat[0]) if np.ptp(count) == 0 else None
    return [
        (loop.repeats, [(s.label.kind, known(s.count)) for s in loop.stretches]) for loop in loops
    ]


@pytest.mark.parametrize(
    "stages, wanted",
    [
        (["wwww"] * 2, [(1, [("w", 4)])]),
        (["wwwfwwwfw"] * 2, [(2, [("w", 3), ("f", 1)]), (1, [("w", 1)])]),
        (["wfwwwfwwwf"], [(1, [("w", 1)]), (2, [("f", 1), ("w", 3)]), (1, [("f", 1)])]),
        (["www", "ww"], [(1, [("w", None)])]),
        (["www", "fww"], [(1, [("f", None), ("w", None)])]),  # one repeat is enough
    ],
)
def test_whole_periods_are_loops(stages, wanted):
    ranges = ranges_of(RANGES["one range"], stages)
    assert shapes(plan_loops([layers_in_order(ranges, kinds) for kinds in stages])) == wanted


def test_a_kind_has_one_body_where_there_would_be_many():
    stages = STAGES["without a pattern"]
    ranges = ranges_of(RANGES["one range"], stages)
    loops = plan_loops([layers_in_order(ranges, kinds) for kinds in stages])
    assert len(list(itertools.groupby(stages[0]))) > MOST_BODIES and bodies(loops) == 3


def runs_gathering(ranges, stages, stage: int, reverse: bool = False) -> list[str]:
    """The gathers and layers of a stage, by form and row, in the order in which they run."""
    events = []

    def gathered(layers, row):
        events.append(f"gather {layers.form}{int(row)}")
        return layers.form, int(row)

    def body(layers, i, parameters, carry):
        assert parameters == (layers.form, int(i.row))
        events.append(f"run {layers.form}{int(i.row)}")
        return [*carry, (layers, tuple(map(int, i)))]

    trips = [layers_in_order(ranges, kinds) for kinds in stages]
    plan = plan_unit(trips, reverse)
    order = run_loops_gathering(plan, stage, body, gathered, [])
    assert order == (trips[stage][::-1] if reverse else trips[stage])
    alone = run_loops(plan.loops, stage, body, lambda layers, row: (layers.form, int(row)), [])
    assert alone == order
    return events[: -len(order)]


def ahead(events: list[str], more: str = "") -> list[str]:
    """The gathers and layers where each layer is gathered before the one in front of it runs."""
    runs = [event for event in events if event.startswith("run")]
    gathers = [event.replace("run", "gather") for event in runs[1:]] + [more] * bool(more)
    in_trips = itertools.zip_longest(gathers, runs)
    return [runs[0].replace("run", "gather")] + [e for pair in in_trips for e in pair if e]


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("kinds", ["wwwww", "wwwfwwwfw", "wfwfwf", "EwEw", "wwEwwEwwE", "EEwwEEww"])
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_the_next_layer_is_gathered_before_a_layer_runs(ranges, kinds, reverse):
    """None twice, and none that no layer reads."""
    events = runs_gathering(ranges_of(ranges, [kinds]), [kinds], 0, reverse)
    assert events == ahead(events)


@pytest.mark.parametrize("stages", [["wwww", "www"], ["wwwfwww", "fwwwfww"], ["fwww", "fwwwf"]])
@pytest.mark.parametrize("reverse", [True, False])
def test_stages_that_differ_gather_one_layer_more_at_most(stages, reverse):
    ranges = ranges_of(RANGES["one range"], stages)
    for stage, kinds in enumerate(stages):
        events = runs_gathering(ranges, stages, stage, reverse)
        beyond = f"gather {-1 if reverse else len(kinds)}"
        assert events in (ahead(events), ahead(events, beyond))
