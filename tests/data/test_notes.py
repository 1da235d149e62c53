"""Notes about a prepared corpus: what has no effect on it, and numbers that are no ids."""

import types

import numpy as np
import pytest

from jaxtrain.data.preparing.notes import notes
from jaxtrain.data.tokenizer import ByteTokenizer, NoTokenizer

IDS = np.random.default_rng(0).integers(0, 50_000, 1000)
VOCABULARY = NoTokenizer(50_257)


def config(across=True, source="a.bin", tokenizer="none"):
    return types.SimpleNamespace(source=source, tokenizer=tokenizer, attend_across_documents=across)


@pytest.mark.parametrize(
    "written, read, wider",
    [
        ("<u4", "<u2", "uint32"),
        ("<i8", "<u2", "uint64"),
        ("<i8", "<u4", "uint64"),
        ("<u8", "<i4", "uint64"),
        ("<u2", "<u2", ""),
        ("<i8", "<i8", ""),
        (">u2", ">u2", ""),
    ],
)
def test_ids_of_a_wider_type(written, read, wider):
    ids = np.frombuffer(IDS.astype(written).tobytes(), read)
    lines = notes(ids, 1, config(), VOCABULARY)
    read_as = (
        f"every second number of data.source=a.bin is 0, as if {wider} were read as {ids.dtype}"
    )
    flag = f"if so, read it with --config.data.token_dtype={wider} (an .npy file: write it as such)"
    assert lines == ([f"note: {read_as}: {flag}"] if wider else [])


ALTERNATING = {
    "bytes as uint16": IDS.astype(np.uint16) % 256,
    "few ids": np.tile([1, 0, 5, 0], 500).astype(np.uint16),
    "few numbers": IDS[:30].astype(np.uint32).view(np.uint16),
    "zeros": np.zeros(1000, np.uint16),
    "an odd number": np.append(IDS.astype(np.uint32).view(np.uint16), np.uint16(0)),
    "nearly": np.append(np.uint16([7, 7]), IDS.astype(np.uint32).view(np.uint16)),
    "the other way round": np.append(np.uint16([0]), IDS.astype(np.uint32).view(np.uint16))[:-1],
}


@pytest.mark.parametrize("name", ALTERNATING)
def test_a_genuine_corpus_has_no_note(name):
    assert notes(ALTERNATING[name], 1, config(), VOCABULARY) == []


def test_documents_that_nothing_separates():
    rule = (
        "note: data.attend_across_documents=false has no effect: data.source=a.bin is one document"
    )
    ids, one = np.array([1, 2, 256, 4], np.uint16), config(across=False)
    assert notes(ids, 1, one, VOCABULARY) == [
        f"{rule}, for data.tokenizer=none has no id that ends documents"
    ]
    assert notes(ids, 1, one, ByteTokenizer()) == [
        f"{rule}, in which id 256 would end documents and is not"
    ]
    assert notes(ids[:3], 1, one, ByteTokenizer()) == [rule]
    assert notes(ids, 2, one, ByteTokenizer()) == []
    assert notes(ids, 1, config(), VOCABULARY) == []
