"""Plans of loops over layers: each layer once, in order, and gathered one trip ahead."""

import itertools

import pytest

from jaxtrain.runtime.layers import layer_loops
from jaxtrain.runtime.layers.layer_loops import plan_loops, run_loops, run_loops_gathering

# range → its first layer, its last one + 1; plans ask nothing of a range
BOUNDS = {
    "one range": {"all": (0, 5)},
    "two ranges": {"recomputed": (0, 2), "others": (2, 5)},
    "a range of one layer": {"recomputed": (0, 1), "others": (1, 4)},
    "a range that this stage does not have": {"recomputed": (0, 2), "others": (2, 2)},
}


def trips(loop) -> list[int]:
    return [loop.layer(trip) for trip in range(loop.start, loop.stop)]


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_each_layer_runs_once_in_order(bounds):
    layers = list(range(max(end for _, end in bounds.values())))
    for reverse, first, last in itertools.product([False, True], repeat=3):
        is_empty = bounds.get("others") == (2, 2)
        if is_empty and (first or last):
            continue  # a peeled layer is there on every stage
        loops = plan_loops(bounds, reverse, first, last)
        assert [i for loop in loops for i in trips(loop)] == (layers[::-1] if reverse else layers)
        peeled = [trips(loop) for loop in loops if loop.peeled]
        ends = [layers[-1:], layers[:1]] if reverse else [layers[:1], layers[-1:]]
        assert peeled == list(itertools.compress(ends, (first, last)))


def test_a_layer_is_run_by_the_body_of_its_range():
    loops = plan_loops(BOUNDS["two ranges"], reverse=True, peel_last=True)
    planned = [(loop.layers, trips(loop), loop.peeled) for loop in loops]
    assert planned == [("others", [4, 3, 2], False), ("recomputed", [1], False)] + [
        ("recomputed", [0], True)
    ]


def run_in_python(start, stop, step, carry):
    for trip in range(start, stop):
        carry = step(trip, carry)
    return carry


@pytest.mark.parametrize("peel_last", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_the_next_layer_is_gathered_before_a_layer_runs(monkeypatch, reverse, peel_last):
    monkeypatch.setattr(layer_loops, "run_trips", run_in_python)
    events = []

    def gathered(i):
        events.append(f"gather {i}")
        return i

    def body(layers, i, parameters, carry):
        assert parameters == i and bounds[layers][0] <= i < bounds[layers][1]
        events.append(f"run {i}")
        return [*carry, i]

    bounds = BOUNDS["two ranges"]
    loops = plan_loops(bounds, reverse, peel_last=peel_last)
    order = run_loops_gathering(loops, body, gathered, [])
    assert order == sorted(range(5), reverse=reverse)
    following = [*order[1:], *([] if peel_last else [-1 if reverse else 5])]
    pairs = itertools.zip_longest(following, order)
    texts = [[f"gather {n}"] * (n is not None) + [f"run {i}"] for n, i in pairs]
    assert events == [f"gather {order[0]}", *itertools.chain(*texts)]
    assert run_loops(loops, body, lambda i: i, []) == order
