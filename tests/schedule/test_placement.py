"""Layers → chunks → stages."""

import itertools

import numpy as np
import pytest

from jaxtrain.schedule.placement import Placement, TimesToBalance, balanced, cut, spread

ALL = [
    Placement(n, s, c)
    for n, s, c in itertools.product(range(1, 26), range(1, 9), range(1, 4))
    if s * c <= n
]


@pytest.mark.parametrize("placement", ALL[:: len(ALL) // 40], ids=str)
def test_every_layer_once_in_circular_order(placement):
    # Walking round the circle, chunk by chunk and stage by stage, the layers come in order.
    order = [
        placement.layer_index(c)[s]
        for c in range(placement.units_per_stage)
        for s in range(placement.stages)
    ]
    assert [int(layer) for rows in order for layer in rows if layer >= 0] == list(
        range(placement.layers)
    )


def test_counts_differ_by_one_at_most_and_index_agrees():
    for placement in ALL:
        counts = [
            placement.layer_count(c, s)
            for c in range(placement.units_per_stage)
            for s in range(placement.stages)
        ]
        assert (
            min(counts) >= 1 and max(counts) - min(counts) <= 1 and sum(counts) == placement.layers
        )
        # the first have one more: the last stage has the head as well
        assert counts == sorted(counts, reverse=True)
        for c in range(placement.units_per_stage):
            index = placement.layer_index(c)
            assert (
                index.shape == (placement.stages, placement.stack_size(c))
                and index.dtype == np.int32
            )
            for s in range(placement.stages):
                used = index[s] >= 0
                assert (
                    used.sum() == placement.layer_count(c, s)
                    and index[s, 0] == placement.layers_of(c, s).start
                )
                assert used[: placement.layer_count(c, s)].all()  # unused rows come last


def test_the_example():
    placement = Placement(7, 2, 2)
    assert placement.layer_index(0).tolist() == [[0, 1], [2, 3]]
    assert placement.layer_index(1).tolist() == [[4, 5], [6, -1]]
    assert placement.describe() == "7 layers on 2 pipeline stages: 4, 3"
    assert Placement(5, 4).describe() == "5 layers on 4 pipeline stages: 2, 1, 1, 1"
    assert Placement(5).describe() == "5 layers on one stage"


def test_more_chunks_than_layers():
    with pytest.raises(ValueError, match="4 stages of 2 units need at least 8 layers, not 7"):
        Placement(7, 4, 2)


def test_any_place():
    """In a V, and with more units on one stage than on another: rows that a stage does not have are
    unused."""
    placement = Placement(7, 2, stage_of=(0, 1, 1, 0, 0), sizes=(2, 1, 1, 2, 1))
    assert placement.units_per_stage == 3 and [placement.stack_size(u) for u in range(3)] == [
        2,
        2,
        1,
    ]
    assert placement.layer_index(0).tolist() == [[0, 1], [2, -1]]
    assert placement.layer_index(1).tolist() == [[4, 5], [3, -1]]
    assert placement.layer_index(2).tolist() == [[6], [-1]]
    assert placement.unit_at(2, 1) is None and placement.layer_count(2, 1) == 0
    assert placement.describe() == "7 layers on 2 pipeline stages: 5, 2"
    with pytest.raises(ValueError, match="are not 7 layers"):
        Placement(7, 2, stage_of=(0, 1), sizes=(2, 1))


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8])
def test_spread_by_costs_is_the_best_cut(chunks):
    random = np.random.default_rng(chunks)
    for costs in (np.ones(8), random.random(8) + 0.1, np.arange(1.0, 9.0)):
        sizes = spread(8, chunks, tuple(costs))
        dearest = lambda sizes, costs=costs: max(
            part.sum() for part in np.split(costs, np.cumsum(sizes)[:-1])
        )
        cuts = itertools.combinations(range(1, 8), chunks - 1)
        best = min(dearest(np.diff([0, *cut, 8])) for cut in cuts)
        assert sum(sizes) == 8 and min(sizes) >= 1 and dearest(sizes) == pytest.approx(best)


def test_cut():
    assert cut((4, 3, 1), 0) == ((1, 1, 1), (4, 3, 1))
    assert cut((4, 3, 1), 2) == ((2, 2, 1), (2, 2, 2, 1, 1))
    assert cut((4, 3, 1), 1) == ((4, 3, 1), (1,) * 8)
    assert cut((4, 3), 9) == ((1, 1), (4, 3))


def test_balanced_chunks_leave_the_busiest_stage_least():
    # by trying all cuts of the layers
    for layers, stage_of, first, last in [
        (7, (0, 1, 2), 1.5, 2.5),
        (8, (0, 1, 1, 0), 0.7, 1.2),
        (9, (0, 1, 0, 1), 3.0, 0.0),
        (4, (0, 1, 2, 3), 9.0, 9.0),
    ]:

        def busiest(sizes, stage_of=stage_of, first=first, last=last):
            busy = [0.0] * (max(stage_of) + 1)
            for size, stage in zip(sizes, stage_of, strict=True):
                busy[stage] += size
            busy[stage_of[0]] += first
            busy[stage_of[-1]] += last
            return max(busy)

        chunks = len(stage_of)
        cuts = itertools.product(range(1, layers + 1), repeat=chunks)
        least = min(busiest(sizes) for sizes in cuts if sum(sizes) == layers)
        sizes = balanced(layers, stage_of, (1,) * chunks, TimesToBalance(1.0, first, last))
        assert sum(sizes) == layers and min(sizes) >= 1
        assert busiest(sizes) == least
    # the chunks of a stage are even, and none has fewer layers than it must have
    assert balanced(10, (0, 1, 1, 0), (1, 1, 3, 1), TimesToBalance(1.0, 0.0, 0.0)) == (3, 2, 3, 2)
