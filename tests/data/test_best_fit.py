"""Best-fit packing: which documents are cut, what is predicted, and how much is padding."""

import types

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxtrain.data import best_fit
from jaxtrain.data.best_fit import BestFit, pack
from jaxtrain.data.document_packing import Sequences
from jaxtrain.data.split import make_stream, split
from jaxtrain.data.tokenizer import NoTokenizer


def corpus_of(lengths, folder=None, masked=False):
    documents = np.append(0, np.cumsum(np.array(lengths, np.int64)))
    tokens = np.arange(documents[-1], dtype=np.uint32)  # each token is its place
    return types.SimpleNamespace(
        tokens=tokens,
        documents=documents,
        mask=(tokens % 3 > 0).astype(np.uint8) if masked else None,
        tokenizer=NoTokenizer(1 << 31),
        checksum="abc",
        folder=folder,
    )


def whole(corpus):
    return make_stream(np.array([0]), np.array([corpus.documents[-1]]))


def naive(lengths, capacity):
    """Best fit decreasing, an item at a time."""
    rooms, chosen = [], [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [(room, at) for at, room in enumerate(rooms) if room >= lengths[i]]
        at = min(fits)[1] if fits else len(rooms)
        rooms[at:] = rooms[at:] or [capacity]
        rooms[at] -= lengths[i]
        chosen[i] = at
    return chosen, len(rooms)


@settings(max_examples=150)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), room=st.integers(0, 15))
def test_pack_is_best_fit_decreasing(lengths, room):
    capacity = max(lengths, default=1) + room
    bins, count = pack(np.array(lengths, np.int64), capacity)
    assert (bins.tolist(), count) == naive(lengths, capacity)


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    length=st.integers(1, 15),
    group=st.integers(1, 40),
    fraction=st.sampled_from([0.0, 0.1, 0.4]),
    held=st.booleans(),
    masked=st.booleans(),
    across=st.booleans(),
)
def test_each_token_is_predicted_once_and_no_document_cut_that_fits(
    lengths, length, group, fraction, held, masked, across
):
    corpus = corpus_of(lengths, masked=masked)
    stream = split(corpus.documents, fraction)[held]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "GROUP", group)
        patch.setattr(best_fit, "SEQUENCES", 1)
        patch.setattr(best_fit, "STORED", 1 << 20)
        sequences = Sequences(corpus, stream, length, across, packing="best_fit")
    starts = {*corpus.documents.tolist()}
    read, predicted = [], []
    for s in range(len(sequences)):
        ranges = sequences.packing.ranges(s)
        assert sum(end - begin for begin, end in ranges) <= length + 1
        assert ranges == sorted(ranges)
        sequence = sequences[s]
        seen = [np.concatenate([np.arange(*r) for r in stream.ranges(*each)]) for each in ranges]
        tokens = np.concatenate(seen)
        read += tokens.tolist()
        n = min(len(tokens), length)
        assert sequence["tokens"][:n].tolist() == tokens[:n].tolist()
        counted = sequence["weights"] > 0
        predicted += sequence["targets"][counted].tolist()
        assert not counted[len(tokens) - 1 :].any()
        if not across:
            places = [p for part in seen for p in range(len(part))]
            assert sequence["positions"][:n].tolist() == places[:n]
            segment = [i + 1 for i, part in enumerate(seen) for _ in part]
            assert sequence["segments"][:n].tolist() == segment[:n]
            assert (sequence["segments"][n:] > segment[-1]).all()
    # Documents, or the parts of them that the split has.
    parts = []
    for begin, end in stream.ranges(0, len(stream)):
        edges = sorted({begin, end} | {p for p in starts if begin < p < end})
        parts += [*zip(edges, edges[1:], strict=False)]
    counts = corpus.mask if masked else np.ones(len(corpus.tokens))
    inner = [t for begin, end in parts for t in range(begin + 1, end) if counts[t]]
    assert sorted(t for t in predicted if t not in dict(parts)) == inner
    first = [t for t in predicted if t in dict(parts)]
    assert len(first) == len({*first}) and {*first} <= starts and (across or not first)
    shared = [t for begin, end in parts for t in range(begin + length, end - 1, length)]
    assert sorted(read) == sorted([t for part in parts for t in range(*part)] + shared)
    assert sequences.packing.firsts.tolist() == sorted(sequences.packing.firsts.tolist())


@pytest.mark.parametrize("length", [128, 512, 2048])
@pytest.mark.parametrize("mean", [30, 400, 3000])
def test_padding_is_below_a_hundredth(length, mean):
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, 3_000_000 // mean)
    corpus = corpus_of(np.ceil(drawn))
    packing = BestFit(corpus, whole(corpus), length)
    sequences = int(packing.firsts[-1])
    tokens = sum(end - begin for s in range(sequences) for begin, end in packing.ranges(s))
    # T inputs of a sequence have the targets of T + 1 tokens
    assert tokens - sequences > 0.99 * length * sequences


def test_counts_are_stored_and_made_again_if_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(best_fit, "GROUP", 50)
    monkeypatch.setattr(best_fit, "SEQUENCES", 1)
    corpus = corpus_of([7, 12, 3, 20] * 200, tmp_path)
    firsts = lambda length=9: BestFit(corpus, whole(corpus), length).firsts.tolist()
    expected = firsts()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    monkeypatch.setattr(BestFit, "_pieces", lambda *_: pytest.fail("counted again"))
    assert firsts() == expected
    monkeypatch.undo()
    monkeypatch.setattr(best_fit, "GROUP", 50)
    monkeypatch.setattr(best_fit, "SEQUENCES", 1)
    for damage in (b"", content[:-3], content.replace(b"6", b"7", 1), b"\xff\n[1]", b"[]"):
        path.write_bytes(damage)
        assert firsts() == expected and path.read_bytes() == content
    path.unlink()
    path.mkdir()  # as in a cache that may not be written
    assert firsts() == expected
    firsts(8)
    assert len([*tmp_path.iterdir()]) == 2  # another length has a file of its own


def test_few_groups_write_nothing(tmp_path):
    corpus = corpus_of([7, 12, 3, 20] * 200, tmp_path)
    assert len(Sequences(corpus, whole(corpus), 9, packing="best_fit")) > 100
    assert not [*tmp_path.iterdir()]


def test_one_document_of_a_large_corpus_takes_no_memory():
    """Pieces of one group alone are made: a group of 2^20 tokens, whatever the document has."""
    corpus = types.SimpleNamespace(documents=np.array([0, 1 << 40]))
    packing = BestFit.__new__(BestFit)
    packing._documents, packing._stream = corpus.documents, whole(corpus)
    packing._length, packing._tokens = 128, 1 << 20
    pieces = packing._pieces(1 << 19)
    assert len(pieces) == (1 << 20) // 128
    assert pieces[0].tolist() == [1 << 39, (1 << 39) + 129]
