"""The order of a source: every epoch has every token once, whatever the groups, the windows and the
changes of length."""

import random
import types

import numpy as np
import pytest

from jaxtrain.data import document_packing, order
from jaxtrain.data.document_packing import Sequences
from jaxtrain.data.order import Order
from jaxtrain.data.split import split
from jaxtrain.data.tokenizer import NoTokenizer


def corpus_of(tokens, documents=40, seed=0):
    """A corpus whose tokens are their places."""
    ends = np.sort(np.random.default_rng(seed).choice(tokens - 1, documents - 1, False) + 1)
    return types.SimpleNamespace(
        tokens=np.arange(tokens, dtype=np.uint32),
        documents=np.concatenate([[0], ends, [tokens]]),
        mask=None,
        tokenizer=NoTokenizer(tokens),
    )


def order_of(corpus, seed=0, name="", fraction=0.1, packing="stream"):
    stream = split(corpus.documents, fraction)[0]
    make = lambda of, length: Sequences(corpus, of, length, False, packing=packing)
    return Order(make, stream, seed, name), stream


@pytest.fixture(params=[(1 << 20, 64), (64, 16), (600, 2)], ids=str)
def sizes(request, monkeypatch):
    """Groups and windows of some sizes; the first are the real ones: all is one window."""
    monkeypatch.setattr(document_packing, "GROUP", request.param[0])
    monkeypatch.setattr(order, "WINDOW", request.param[1])
    return request.param


def test_an_epoch_has_every_sequence_once(sizes):
    made, _ = order_of(corpus_of(5000))
    made.cut(0, 16)
    count = len(made.sequences)
    epochs = [[made.at(i).number for i in range(e * count, (e + 1) * count)] for e in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == list(range(count)) and epoch != sorted(epoch)
        assert made.at(number * count).epoch == number
    assert epochs[0] != epochs[1] != epochs[2]
    assert made.at(10**12).epoch == 10**12 // count


def test_a_window_has_the_sequences_that_are_read_next(sizes):
    made, stream = order_of(corpus_of(5000))
    made.cut(0, 16)
    begin, windows, covered = 0, 0, 0
    while begin < len(made.sequences):
        ranges, end = made.window(begin)
        assert made.window(end - 1) == (ranges, end)
        places = {i for low, high in ranges for i in range(low, high)}
        for ordinal in range(begin, end):
            assert {*made.at(ordinal).sequences[made.at(ordinal).number]["tokens"]} <= places
        begin, windows, covered = end, windows + 1, covered + len(places)
    groups = -(-len(made.sequences) // max(1, sizes[0] // 16))
    assert windows == -(-groups // sizes[1])
    edges = 2 * windows * sizes[1] if windows > 1 else 0  # tokens of two groups
    assert len(stream) - 16 < covered <= len(stream) + edges


def test_names_and_seeds_have_orders_of_their_own():
    orders = [order_of(corpus_of(5000), *which)[0] for which in ((0, ""), (0, "a"), (1, ""))]
    for each in orders:
        each.cut(0, 16)
    assert len({tuple(each.at(i).number for i in range(50)) for each in orders}) == 3


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 30))]
)
def test_changes_of_length_repeat_and_pass_over_no_token(sizes, seed, packing, tmp_path):
    """Any number of changes in an epoch, up and down, also before a sequence was read with the
    last length. A target that counts is the token after its input; the first tokens of documents
    do not count here."""
    chance = random.Random(seed)
    corpus = corpus_of(3000, seed=seed)
    corpus.folder, corpus.checksum = tmp_path, str(seed)
    made, stream = order_of(corpus, seed, packing=packing)
    ordinal, epochs, length = 0, {}, 0
    for _ in range(8):
        length = chance.choice([8, 16, 32, 64, 9])
        made.cut(ordinal, length)
        for _ in range(chance.choice([0, 1, 30, 100])):
            place = made.at(ordinal)
            arrays = place.sequences[place.number]
            assert len(arrays["tokens"]) == length
            counted = arrays["weights"] == 1
            assert (arrays["targets"] == arrays["tokens"] + 1)[counted].all()
            epochs.setdefault(place.epoch, []).extend(arrays["targets"][counted].tolist())
            ordinal += 1
    assert list(epochs) == list(range(len(epochs)))
    every = {*stream.read(corpus.tokens, 0, len(stream)).tolist()} - {*corpus.documents.tolist()}
    for epoch, tokens in epochs.items():
        assert len(tokens) == len({*tokens}) and {*tokens} <= every, epoch
        if epoch < len(epochs) - 1:
            assert len(every) - len(tokens) < (64 if packing == "stream" else 1), epoch


def test_a_length_with_which_nothing_was_read_leaves_the_rest_of_an_epoch():
    """The rest is too short for the length between."""
    made, stream = order_of(corpus_of(200), fraction=0.0)
    made.cut(0, 16)
    last = len(made.sequences) - 1
    (rest,) = made.at(last).ranges
    made.cut(last, 64)
    assert made.at(last).epoch == 1
    made.cut(last, 4)
    count = made.count_of(1) - last
    assert count >= 4 and [made.at(last + count + i).epoch for i in (-1, 0)] == [0, 1]
    first, *_ = sorted(each for i in range(count) for each in made.at(last + i).ranges)
    assert first[0] == rest[0]
    made.cut(last + count, 8)  # exactly at the end of the rest
    assert made.at(last + count).epoch == 1 and len(stream) == 200


def test_a_rest_that_is_left_out_ends_its_epoch():
    made, _ = order_of(corpus_of(40), fraction=0.0)
    made.cut(0, 4)
    assert made.count_of(0.5) == 4
    made.cut(2, 38)
    assert made.at(2).epoch == 1 and [made.count_of(n) for n in (0.1, 0.5, 1, 2)] == [0, 2, 2, 3]


def test_counts_of_epochs():
    made, stream = order_of(corpus_of(5000))
    made.cut(0, 16)
    count = len(made.sequences)
    assert [made.count_of(epochs) for epochs in (0, 0.5, 1, 2.25)] == [
        *(0, count // 2, count),
        2 * count + int(0.25 * count),
    ]
    made.cut(count + count // 2, 32)  # in the middle of the second epoch
    halves = made.count_of(2) - (count + count // 2)
    # a token more for each run of sequences that were not read
    assert 0 <= halves - (len(stream) - 1 - count // 2 * 16) // 32 <= count // 4 // 32 + 1
    assert made.at(made.count_of(2)).epoch == 2 and made.at(made.count_of(2) - 1).epoch == 1
    assert abs(made.count_of(1.75) - (count + count // 2 + halves / 2)) < 2
