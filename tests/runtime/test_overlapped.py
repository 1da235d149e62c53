"""The plan of an overlapped cell: each layer of both units once, as many as possible in pairs. Its
results are compared in tests/training/test_overlap.py."""

import numpy as np
import pytest

from jaxtrain.runtime.layers import layer_loops
from jaxtrain.runtime.layers.layer_loops import LayerRange, layers_in_order, run_trips_of
from jaxtrain.runtime.layers.overlapped import plan_pairs

KIND = {kind: LayerRange(None, kind=kind, pool_kinds=(kind,)) for kind in "wf"}
RANGES = [LayerRange(None, end=2, recomputed=True), LayerRange(None, begin=2)]
UNITS = {  # the ranges, and on each stage the kinds of F's layers, and of B's
    "equal": ([LayerRange(None)], [3], [3]),
    "two ranges each": (RANGES, [5], [3]),
    "more of B": (RANGES, [1], [4]),
    "no layer of F": (RANGES, [0], [2]),
    "no layer of B": (RANGES, [2], [0]),
    "uneven": (RANGES, [3, 2], [1, 2]),
    "kinds": (list(KIND.values()), ["wwfwwf", "wwfwwf"], ["wfwfwf", "wfwfwf"]),
    "kinds that differ": (list(KIND.values()), ["wwfww", "fwwf"], ["wwf", "fwwfw"]),
}


@pytest.mark.parametrize("ranges, f, b", UNITS.values(), ids=UNITS)
def test_each_layer_once(monkeypatch, ranges, f, b):
    run = lambda start, stop, step, carry: [step(trip, None) for trip in range(start, stop)]
    monkeypatch.setattr(layer_loops, "run_trips", run)
    monkeypatch.setattr(layer_loops, "jnp", np)  # nothing is compiled
    kinds_of = lambda unit: [""] * unit if isinstance(unit, int) else unit
    layers = lambda unit: layers_in_order(ranges, kinds_of(unit))
    f, b = list(map(layers, f)), list(map(layers, b))
    plan = plan_pairs(f, b)
    for stage in range(len(f)):
        of_f, of_b = [], []

        def both(ranges, values, _, of_f=of_f, of_b=of_b):
            of_f.append((ranges[0], *map(int, values[:3])))
            of_b.append((ranges[1], *map(int, values[3:])))

        run_trips_of(plan.both, stage, both, None)
        assert len(of_f) == min(len(f[stage]), len(b[stage]))
        for loops, done in ((plan.rest_of_f, of_f), (plan.rest_of_b, of_b)):
            alone = lambda layers, values, _, done=done: done.append((layers, *map(int, values)))
            run_trips_of(loops, stage, alone, None)
        assert of_f == [(trip.label, *trip.values) for trip in f[stage]]
        assert of_b == [(trip.label, *trip.values) for trip in reversed(b[stage])]
