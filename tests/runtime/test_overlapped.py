"""The plan of an overlapped cell: each layer of both units once, as many as possible in pairs. Its
results are compared in tests/training/test_overlap.py."""

import pytest

from jaxtrain.runtime.layers.overlapped import plan_pairs

UNITS = {  # the bounds of F's ranges, and of B's
    "equal": ({"f": (0, 3)}, {"b": (0, 3)}),
    "two ranges each": ({"f0": (0, 2), "f1": (2, 5)}, {"b0": (0, 1), "b1": (1, 3)}),
    "more of B": ({"f": (0, 1)}, {"b0": (0, 2), "b1": (2, 4)}),
    "no layer of F": ({}, {"b": (0, 2)}),
    "no layer of B": ({"f": (0, 2)}, {}),
}


@pytest.mark.parametrize("f_bounds, b_bounds", UNITS.values(), ids=UNITS)
def test_each_layer_once(f_bounds, b_bounds):
    count = lambda bounds: max((end for _, end in bounds.values()), default=0)
    range_of = lambda bounds, i: next(r for r, (begin, end) in bounds.items() if begin <= i < end)
    f, b, pairs = [], [], 0
    for loop in plan_pairs(f_bounds, b_bounds):
        for trip in range(loop.start, loop.stop):
            pairs += bool(loop.f and loop.b)
            if loop.f:
                assert range_of(f_bounds, trip) == loop.f
                f.append(trip)
            if loop.b:
                layer = count(b_bounds) - 1 - trip
                assert range_of(b_bounds, layer) == loop.b
                b.append(layer)
    assert f == list(range(count(f_bounds)))
    assert b == list(reversed(range(count(b_bounds))))
    assert pairs == min(len(f), len(b))
