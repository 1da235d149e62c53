"""Sequences against a brute-force packing of random documents."""

import types

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxtrain.data.document_packing import Sequences
from jaxtrain.data.split import make_stream, split
from jaxtrain.data.tokenizer import DataError, NoTokenizer


def corpus_of(lengths, masked, seed=0):
    rng = np.random.default_rng(seed)
    documents = np.append(0, np.cumsum(np.array(lengths, np.int64)))
    tokens = rng.integers(0, 60_000, documents[-1]).astype(np.uint16)
    mask = rng.integers(0, 2, documents[-1]).astype(np.uint8) if masked else None
    return types.SimpleNamespace(
        tokens=tokens, documents=documents, mask=mask, tokenizer=NoTokenizer(60_000)
    )


def brute_force(corpus, ranges, length, across, padded):
    """The sequences, token by token."""
    starts = set(corpus.documents.tolist())
    stream = []  # (token, counts, begins a document)
    for first, last in ranges:
        for i in range(first, last):
            stream.append(
                (
                    int(corpus.tokens[i]),
                    # a part of a document begins with a token that is no target
                    0
                    if i == first and i not in starts
                    else 1
                    if corpus.mask is None
                    else int(corpus.mask[i]),
                    i == first or i in starts,
                )
            )
    if not padded and len(stream) <= length:
        stream = (stream * (length + 1))[: length + 1]
    sequences = []
    for begin in range(0, len(stream) - 1, length):
        window = stream[begin : begin + length + 1]
        if len(window) < length + 1 and not padded:
            break
        sequence = {name: [] for name in ("tokens", "targets", "weights", "segments", "positions")}
        segment, position = 0, 0
        for j in range(length):
            begins = j == 0 or j == len(window) or (j < len(window) and window[j][2])
            segment, position = (segment + 1, 0) if begins else (segment, position + 1)
            sequence["tokens"].append(window[j][0] if j < len(window) else 0)
            sequence["segments"].append(segment)
            sequence["positions"].append(position)
            target = window[j + 1] if j + 1 < len(window) else (0, 0, False)
            sequence["targets"].append(target[0])
            sequence["weights"].append(target[1] if across or not target[2] else 0)
        sequences.append(
            sequence
            if not across
            else {name: sequence[name] for name in ("tokens", "targets", "weights")}
        )
    return sequences


@settings(max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=25),
    length=st.integers(1, 15),
    fraction=st.sampled_from([0.0, 0.1, 0.4]),
    masked=st.booleans(),
    across=st.booleans(),
    padded=st.booleans(),
    held=st.booleans(),
)
def test_sequences_match_brute_force(lengths, length, fraction, masked, across, padded, held):
    corpus = corpus_of(lengths, masked)
    stream = split(corpus.documents, fraction)[held]
    sequences = Sequences(corpus, stream, length, across, padded)
    expected = brute_force(corpus, list(stream.ranges(0, len(stream))), length, across, padded)
    assert len(sequences) == len(expected)
    for r in range(len(sequences)):
        assert {name: array.tolist() for name, array in sequences[r].items()} == expected[r]


def test_example_of_the_docstring():
    documents = np.array([0, 4, 7, 12])
    tokens = np.array([1, 2, 3, 256, 4, 5, 256, 6, 7, 8, 9, 256], np.uint16)
    corpus = types.SimpleNamespace(
        tokens=tokens, documents=documents, mask=None, tokenizer=NoTokenizer(257)
    )
    sequence = Sequences(
        corpus, make_stream(np.array([0]), np.array([12])), 6, attend_across_documents=False
    )[0]
    assert {name: array.tolist() for name, array in sequence.items()} == {
        "tokens": [1, 2, 3, 256, 4, 5],
        "targets": [2, 3, 256, 4, 5, 256],
        "weights": [1, 1, 1, 0, 1, 1],
        "segments": [1, 1, 1, 1, 2, 2],
        "positions": [0, 1, 2, 3, 0, 1],
    }


@pytest.mark.parametrize("across", [True, False])
def test_types_and_lengths(across):
    corpus = corpus_of([50], masked=True)
    sequences = Sequences(corpus, make_stream(np.array([0]), np.array([50])), 10, across)
    kinds = {"tokens": np.int32, "targets": np.int32, "weights": np.float32} | (
        {} if across else {"segments": np.int32, "positions": np.int32}
    )
    for sequence in (sequences[0], sequences.read([])):
        assert {name: array.dtype for name, array in sequence.items()} == kinds
        assert {array.shape for array in sequence.values()} == {(10,)}
    assert not sequences.read([])["weights"].any()


@pytest.mark.parametrize("across", [True, False])
def test_too_few_tokens_repeat(across):
    corpus = types.SimpleNamespace(
        tokens=np.array([1, 2, 9, 3, 9], np.uint16), documents=np.array([0, 3, 5]), mask=None
    )
    corpus.tokenizer = NoTokenizer(10)
    (sequence,) = Sequences(corpus, make_stream(np.array([0]), np.array([5])), 12, across)
    assert sequence["tokens"].tolist() == [1, 2, 9, 3, 9, 1, 2, 9, 3, 9, 1, 2]
    assert sequence["targets"].tolist() == [2, 9, 3, 9, 1, 2, 9, 3, 9, 1, 2, 9]
    assert (
        sequence["weights"].tolist() == [1] * 12 if across else [1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1]
    )
    if not across:
        assert sequence["segments"].tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5]
        assert sequence["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 0, 1]


@pytest.mark.parametrize(
    "bad, kind", [(10, np.uint16), (2**32 - 1, np.uint32), (2**40, np.int64), (-1, np.int32)]
)
def test_an_id_beyond_the_vocabulary_is_an_error(bad, kind):
    """Also an id that the file got after it was prepared, and one that int32 would change."""
    tokens = np.array([1, 2, 3, 4, bad, 5, 6], kind)
    fields = {
        "documents": np.array([0, 7]),
        "mask": None,
        "tokenizer": NoTokenizer(10),
        "source": "ids.bin",
        "folder": "/cache/ids",
    }
    sequences = Sequences(
        types.SimpleNamespace(tokens=tokens, **fields), make_stream(np.array([0]), np.array([7])), 3
    )
    assert sequences[0]["tokens"].tolist() == [1, 2, 3]
    with pytest.raises(
        DataError,
        match=f"^data.source=ids.bin: token {bad} is beyond the 10 ids of .*: remove /cache/ids, "
        "and it is pre",
    ):
        sequences[1]


def test_length_of_an_epoch():
    corpus = corpus_of([100], masked=False)
    stream = make_stream(np.array([0]), np.array([100]))
    assert [
        len(Sequences(corpus, stream, length)) for length in (1, 49, 50, 98, 99, 100, 1000)
    ] == [
        99,
        2,
        1,
        1,
        1,
        1,
        1,
    ]
    assert [Sequences(corpus, stream, length).packing.repeated for length in (99, 100)] == [
        False,
        True,
    ]
    assert [
        len(Sequences(corpus, stream, length, padded=True)) for length in (1, 49, 50, 99, 100)
    ] == [
        99,
        3,
        2,
        1,
        1,
    ]
    sequences = Sequences(corpus, stream, 49)
    # no token is only ever read, but the first
    assert sequences[1]["tokens"][0] == sequences[0]["targets"][-1]
    for r in (-1, 2):
        with pytest.raises(IndexError):
            sequences[r]
