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


# --- layers of several kinds ----------------------------------------------------------------------


def cut_of(
    pattern: str, layers: int, stages: int, full: float = 1.3, ends: tuple[float, float] = (0, 0)
) -> tuple[int, ...]:
    """The layers of each stage, where a layer `f` costs `full` and all others 1. ends: the time of
    what is before and after all layers, over that of the mean layer"""
    costs = [full if kind == "f" else 1.0 for kind in (pattern * layers)[:layers]]
    mean = sum(costs) / layers
    work = TimesToBalance(1.0, *ends, tuple(cost / mean for cost in costs), len(pattern))
    least = (0, *(1,) * (stages - 2), 0) if any(ends) else (1,) * stages
    return balanced(layers, tuple(range(stages)), least, work)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("layers", [12, 26])
@pytest.mark.parametrize("pattern", ["wwwf", "wwwwwf", "wf"])
def test_chunks_of_several_kinds_are_even(pattern, layers, stages):
    """Where entire periods would make a stage longer, counts are those of layers of one kind."""
    assert cut_of(pattern, layers, stages) == spread(layers, stages)


def test_entire_periods_where_they_cost_little():
    assert cut_of("wf", 7, 3) == (2, 2, 3)  # as long as 3, 2, 2
    assert cut_of("wwwf", 62, 4) == (16, 16, 16, 14)
    assert cut_of("wwwwwf", 62, 4) == (16, 16, 15, 15)  # 18 layers would be 13 % longer
    assert cut_of("wf", 62, 2) == (32, 30)
    assert cut_of("wf", 62, 2, full=20) == (32, 30)


def test_kinds_count_where_stages_balance_times():
    """Eight layers, of which every fourth takes as long as ten others, and nothing else in the way:
    the cheap ones go where no dear one is."""
    assert cut_of("wwwf", 8, 2, full=10, ends=(0, 1e-9)) == (4, 4)
    assert cut_of("wwwwwwf", 7, 2, full=6, ends=(0, 1e-9)) == (6, 1)
    # the head takes the time of six: its stage has none of the dear layers
    busy = cut_of("wf", 8, 2, full=3, ends=(0, 3))
    assert sum(busy) == 8
    assert busy[0] > busy[1]


def test_ends_of_one_stage_add_up():
    """In a V both ends are on stage 0."""
    costs = (1.0,) * 8
    work = TimesToBalance(1.0, 2.0, 2.0, costs, 1)
    sizes = balanced(8, (0, 1, 1, 0), (0, 1, 1, 0), work)
    assert sizes[0] + sizes[3] == 2
