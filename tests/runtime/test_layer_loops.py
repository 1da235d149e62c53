"""Plans of loops over layers: each layer once, in order, and gathered one trip ahead."""

import itertools

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
    run_loops,
    run_loops_gathering,
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
    for trip in range(start, stop):
        carry = step(trip, carry)
    return carry


def trips_run(loops, stage: int) -> list[Trip]:
    """The trips of a plan on a stage."""
    add = lambda run, values, done: [*done, Trip(run.label, tuple(map(int, values)))]
    return list(itertools.chain(*(loop.run(stage, add, []) for loop in loops)))


@pytest.fixture(autouse=True)
def loops_in_python(monkeypatch):
    monkeypatch.setattr(layer_loops, "run_trips", in_python)


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_each_layer_runs_once_in_order(ranges, stages):
    ranges = ranges_of(ranges, stages)
    for reverse in (False, True):
        layers = [layers_in_order(ranges, kinds) for kinds in stages]
        layers = [of_stage[::-1] if reverse else of_stage for of_stage in layers]
        for first, last in itertools.product((False, True), repeat=2):
            ends = [{t[at].label for t in layers if t} for at in (0, -1)]
            if (first or last) and (not all(layers) or any(len(labels) > 1 for labels in ends)):
                continue  # a peeled layer is there on every stage, of one range
            loops = plan_loops(layers, first, last)
            for stage, of_stage in enumerate(layers):
                assert trips_run(loops, stage) == of_stage
            peeled = [trips_run([loop], 0) for loop in loops if loop.peeled]
            ends = [layers[0][:1], layers[0][-1:]]
            assert peeled == list(itertools.compress(ends, (first, last)))


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
    return sum(len(loop.runs) for loop in loops)


def shapes(loops) -> list:
    """The loops as (repeats, [(kind, trips or None where they differ)])."""
    known = lambda count: int(count.flat[0]) if np.ptp(count) == 0 else None
    return [(loop.repeats, [(r.label.kind, known(r.count)) for r in loop.runs]) for loop in loops]


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


@pytest.mark.parametrize("peel_last", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_the_next_layer_is_gathered_before_a_layer_runs(reverse, peel_last):
    events = []

    def gathered(layers, row):
        events.append(f"gather {row}")
        return row

    def body(layers, i, parameters, carry):
        assert parameters == i.row == i.number and layers.kind == "wwwfw"[i.number]
        events.append(f"run {i.row}")
        return [*carry, i.row]

    trips = layers_in_order(ranges_of(RANGES["two ranges"], ["wwwfw"]), "wwwfw")
    trips = trips[::-1] if reverse else trips
    loops = plan_loops([trips], peel_last=peel_last)
    first, way = trips[0].values[0], -1 if reverse else 1
    order = run_loops_gathering(loops, 0, body, gathered, [first], way, [])
    assert order == sorted(range(5), reverse=reverse)
    following = [*order[1:], *([] if peel_last else [-1 if reverse else 5])]
    pairs = itertools.zip_longest(following, order)
    texts = [[f"gather {n}"] * (n is not None) + [f"run {i}"] for n, i in pairs]
    assert events == [f"gather {order[0]}", *itertools.chain(*texts)]
    assert run_loops(loops, 0, body, lambda layers, row: row, []) == order
