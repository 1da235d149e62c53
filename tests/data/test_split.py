"""The held-out split: whole documents, about the fraction, fixed; and streams of ranges."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxtrain.data import split as module
from jaxtrain.data.split import make_stream, split


def offsets(lengths):
    return np.append(0, np.cumsum(np.array(lengths, np.int64)))


def covered(stream):
    return [token for first, last in stream.ranges(0, len(stream)) for token in range(first, last)]


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(lengths, st.floats(0, 0.9))
def test_every_token_is_in_one_split(lengths, fraction):
    documents = offsets(lengths)
    train, validation = split(documents, fraction)
    assert covered(train) == sorted(covered(train)) and covered(validation) == sorted(
        covered(validation)
    )
    assert sorted(covered(train) + covered(validation)) == list(range(documents[-1]))
    assert len(train) == len(covered(train)) and len(validation) == len(covered(validation))


@given(lengths, st.floats(0, 0.5))
def test_about_the_fraction(lengths, fraction):
    documents = offsets(lengths)
    target = round(fraction * documents[-1])
    _, validation = split(documents, fraction)
    assert target / 2 <= len(validation) <= 2 * target


def test_whole_documents_where_they_are_short():
    documents = offsets(np.random.default_rng(0).integers(1, 50, 2000))
    train, validation = split(documents, 0.05)
    for stream in (train, validation):
        ranges = list(stream.ranges(0, len(stream)))
        assert np.isin([edge for pair in ranges for edge in pair], documents).all()
        assert all(a[1] < b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    assert abs(len(validation) - 0.05 * documents[-1]) <= 25
    # Spread over the corpus, not in one place.
    middle = np.array([first for first, _ in validation.ranges(0, len(validation))]).mean()
    assert 0.3 < middle / documents[-1] < 0.7


@pytest.mark.parametrize("lengths", [[100], [60, 40], [90, 1, 2]])
def test_few_long_documents_are_cut(lengths):
    train, validation = split(offsets(lengths), 0.1)
    total = sum(lengths)
    held = round(0.1 * total)
    assert covered(train) == list(range(total - held)) and covered(validation) == list(
        range(total - held, total)
    )


def test_nothing_held_out():
    train, validation = split(offsets([5, 5]), 0.0)
    assert len(train) == 10 and len(validation) == 0 and list(validation.ranges(0, 0)) == []


def test_fixed_for_ever():
    """A run that goes on must hold out what it held out before."""
    documents = offsets([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4])
    _, validation = split(documents, 0.15)
    assert list(validation.ranges(0, len(validation))) == [(8, 9), (39, 44), (85, 93)]


def test_looking_in_chunks_and_at_the_head_changes_nothing(monkeypatch):
    documents = offsets(np.random.default_rng(1).integers(1, 50, 3000))
    expected = covered(split(documents, 0.05)[1])
    monkeypatch.setattr(module, "CHUNK", 7)
    assert covered(split(documents, 0.05)[1]) == expected
    candidates = module._candidates
    monkeypatch.setattr(
        module,
        "_candidates",
        lambda documents, longest, cutoff: candidates(documents, longest, 1.0),
    )
    assert covered(split(documents, 0.05)[1]) == expected


@given(st.data())
def test_stream_reads_what_lists_read(data):
    edges = sorted(data.draw(st.lists(st.integers(0, 100), min_size=2, max_size=20)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    stream = make_stream(*np.array(pairs, np.int64).T)
    array = np.arange(1000, 1101)
    expected = [int(array[i]) for first, last in pairs for i in range(first, last)]
    assert len(stream) == len(expected)
    begin = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(begin, len(expected)))
    assert stream.read(array, begin, end).tolist() == expected[begin:end]
