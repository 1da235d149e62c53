"""Mixtures: every prefix has each source's weight to within one sequence, and look-ups by number
agree with counting."""

import random

import numpy as np
import pytest

from jaxtrain.data.mixture import PARTS, Segment, in_parts, make_table


def drawn_weights(seed):
    """2 to 64 weights down to 1e-4 of the largest, some of them equal or round."""
    chance = random.Random(seed)
    count = chance.choice([2, 3, chance.randint(4, 63), 64])
    kinds = [lambda: 10 ** chance.uniform(-4, 0), lambda: 1.0, lambda: chance.randint(1, 9) / 10]
    kind = chance.choice([*kinds, lambda: chance.choice(kinds)()])
    return [kind() for _ in range(count)]


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 1000), marks=pytest.mark.full)], ids=len
)
def test_every_prefix_has_its_weights(seeds):
    numbers = np.arange(1, PARTS + 1)
    for seed in seeds:
        weights = drawn_weights(seed)
        parts = in_parts(weights)
        assert sum(parts) == PARTS and min(parts) >= 1
        sources, before = make_table(parts)
        assert np.bincount(sources, minlength=len(parts)).tolist() == list(parts)
        # At each place only the source that is drawn there has more than before, so its largest
        # excess is there, and its largest lack just before.
        exact = np.array(parts)[sources] * numbers / PARTS
        lack = exact - before.astype(int)
        most = 1 - 1 / (2 * len(parts) - 2)
        assert (lack - 1).min() >= -most and lack.max() <= most + np.max(parts) / PARTS


def test_sources_of_one_part_are_drawn():
    parts = in_parts([1.0, *[1e-9] * 100, 0.0])
    assert parts == (PARTS - 100, *[1] * 100, 0)
    assert set(make_table(parts)[0].tolist()) == set(range(101))


def test_the_most_sources():
    parts = in_parts([1.0] * PARTS)
    assert parts == (1,) * PARTS
    assert sorted(make_table(parts)[0].tolist()) == list(range(PARTS))


@pytest.mark.parametrize(
    "weights, parts",
    [
        ((1.0,), (PARTS,)),
        ((0.0, 2.0), (0, PARTS)),
        ((0.5, 0.25, 0.25), (32768, 16384, 16384)),
        ((1, 1, 1), (21846, 21845, 21845)),
        ((0.7, 0.2, 0.1), (45875, 13107, 6554)),
    ],
)
def test_weights_in_parts(weights, parts):
    assert in_parts(weights) == parts


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.2, 0.1), (0.0, 1.0, 3.0)], ids=str)
@pytest.mark.parametrize("begin", [100, 10**12])
def test_look_ups_agree_with_counting(weights, begin):
    counts = [5 + k for k in range(len(weights))]
    segment = Segment(begin, tuple(counts), in_parts(weights))
    for number in range(begin, begin + 300):
        assert segment.counts_at(number) == tuple(counts)
        source, ordinal = segment.draw(number)
        assert ordinal == counts[source]
        counts[source] += 1
        assert segment.number_at(source, counts[source]) == number + 1
    far = begin + 10**9 + 7
    source, ordinal = segment.draw(far)
    assert segment.counts_at(far)[source] == ordinal
    assert segment.number_at(source, ordinal + 1) == far + 1
