"""Layers → chunks → stages."""

import itertools

import numpy as np
import pytest

from jaxtrain.pipeline.placement import Placement

ALL = [Placement(n, s, c) for n, s, c in itertools.product(range(1, 26), range(1, 9), range(1, 4)) if s * c <= n]


@pytest.mark.parametrize("placement", ALL[:: len(ALL) // 40], ids=str)
def test_every_layer_once_in_circular_order(placement):
    # Walking round the circle, chunk by chunk and stage by stage, the layers come in order.
    order = [placement.layer_index(c)[s] for c in range(placement.chunks) for s in range(placement.stages)]
    assert [int(layer) for rows in order for layer in rows if layer >= 0] == list(range(placement.layers))


def test_counts_differ_by_one_at_most_and_index_agrees():
    for placement in ALL:
        counts = [placement.count(c, s) for c in range(placement.chunks) for s in range(placement.stages)]
        assert min(counts) >= 1 and max(counts) - min(counts) <= 1 and sum(counts) == placement.layers
        assert counts == sorted(counts, reverse=True)  # the first have one more: the last stage has the head as well
        for c in range(placement.chunks):
            index = placement.layer_index(c)
            assert index.shape == (placement.stages, placement.rows(c)) and index.dtype == np.int32
            for s in range(placement.stages):
                used = index[s] >= 0
                assert used.sum() == placement.count(c, s) and index[s, 0] == placement.first_layer(c, s)
                assert used[: placement.count(c, s)].all()  # unused rows come last


def test_the_example():
    placement = Placement(7, 2, 2)
    assert placement.layer_index(0).tolist() == [[0, 1], [2, 3]]
    assert placement.layer_index(1).tolist() == [[4, 5], [6, -1]]
    assert placement.describe() == "7 layers over 2 stages × 2 chunks: 2+2, 2+1"
    assert Placement(5, 4).describe() == "5 layers over 4 stages × 1 chunk: 2, 1, 1, 1"
    assert Placement(5).describe() == "5 layers on one stage"


def test_more_chunks_than_layers():
    with pytest.raises(ValueError, match="4 stages of 2 chunks need at least 8 layers, not 7"):
        Placement(7, 4, 2)
