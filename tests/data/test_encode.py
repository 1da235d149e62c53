"""Encoding on all cores: the order and the ids are those of one text after the other."""

import threading
import time

import numpy as np
import pytest

from jaxtrain.data import encode as module
from jaxtrain.data.encode import encode
from jaxtrain.data.marks import Marks
from jaxtrain.data.records import Piece
from jaxtrain.data.tokenizer import ByteTokenizer, DataError, FileTokenizer

DTYPE = np.dtype("<u2")
TEXTS = [f"the quick {'fox ' * (i % 13)}漢" if i % 5 else "" for i in range(200)]
PIECES = [Piece(text, bool(i % 3), bool(i % 4), i) for i, text in enumerate(TEXTS)]


def expected(tokenizer):
    """(ids, ends, mask), text by text."""
    ids, ends, mask = [], [], []
    begins = True
    for piece in PIECES:
        new = [*tokenizer.begin_of_document] * begins + tokenizer.encode(piece.text).tolist()
        new, begins = new + [tokenizer.end_of_document] * piece.ends, piece.ends
        ids, mask = ids + new, mask + [piece.counts] * len(new)
        ends += [len(ids)] * piece.ends
    return ids, ends, mask


def joined(parts):
    ends, before = [], 0
    for part in parts:
        ends += (before + part.ends).tolist()
        before += len(part.ids)
    return (
        np.concatenate([part.ids for part in parts]).tolist(),
        ends,
        np.concatenate([part.mask for part in parts]).tolist(),
    )


@pytest.mark.parametrize("kind", ["bytes", "file", "begins"])
@pytest.mark.parametrize("task", [1, 500, 1 << 20])
@pytest.mark.parametrize("cores", [1, 7])
def test_the_same_whatever_the_cores_and_lists(tokenizer_file, monkeypatch, kind, task, cores):
    begins = Marks((2, 3), 1, (1,)) if kind == "begins" else None
    tokenizer = ByteTokenizer() if kind == "bytes" else FileTokenizer(tokenizer_file(), begins)
    monkeypatch.setattr(module, "TASK", task)
    monkeypatch.setattr(module, "cores", lambda: cores)
    parts = list(encode(PIECES, tokenizer, DTYPE))
    assert joined(parts) == expected(tokenizer)
    assert all(part.ids.dtype == DTYPE and part.mask.dtype == np.uint8 for part in parts)
    assert sum(part.text for part in parts) == sum(len(text.encode()) for text in TEXTS)
    assert sum(part.size for part in parts) == sum(range(200))


class Slow(ByteTokenizer):
    """Lets several threads in at once, and the first come last."""

    def encode_batch(self, texts):
        time.sleep(0.05 if "slow" in texts[0] else 0.001)
        return super().encode_batch(texts)


def test_several_at_once_and_in_order(monkeypatch):
    """One text that takes long does not hold up the others, nor come behind them; and what is read
    ahead is bounded."""
    monkeypatch.setattr(module, "TASK", 1)
    monkeypatch.setattr(module, "cores", lambda: 4)
    read, inside, most = [], set(), []

    class Counting(Slow):
        def encode_batch(self, texts):
            inside.add(threading.get_ident())
            most.append(len(inside))
            try:
                return super().encode_batch(texts)
            finally:
                inside.discard(threading.get_ident())

    def pieces():
        for i in range(40):
            read.append(i)
            yield Piece(f"{'slow' if i % 8 == 0 else 'fast'} {i}", True, True, 1)

    stream = encode(pieces(), Counting(), DTYPE)
    first = next(stream)
    assert bytes(first.ids[:-1].astype(np.uint8)) == b"slow 0" and len(read) <= 10
    rest = [bytes(part.ids[:-1].astype(np.uint8)).decode() for part in stream]
    assert [int(text.split()[1]) for text in rest] == list(range(1, 40))
    assert max(most) > 1
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("jaxtrain-encode")
    ]


def test_errors_come_out_and_threads_end(tokenizer_file, monkeypatch):
    monkeypatch.setattr(module, "TASK", 1)

    def pieces():
        yield from PIECES[:50]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(encode(pieces(), ByteTokenizer(), DTYPE))

    class Wrong(ByteTokenizer):
        def encode_batch(self, texts):
            return [np.array([257], np.uint32) for _ in texts]

    with pytest.raises(DataError, match="makes id 257, beyond its own 257"):
        list(encode(PIECES, Wrong(), DTYPE))
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("jaxtrain-encode")
    ]


def test_a_tokenizer_that_cannot_encode(tokenizer_file):
    """A vocabulary of words without one for the others: an error in one line, not the library's."""
    import json

    path = tokenizer_file()
    content = json.loads(path.read_text())
    content["model"] = {
        "type": "WordLevel",
        "vocab": {"fox": 0, "<|endoftext|>": 1},
        "unk_token": "nothing",
    }
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"^data.tokenizer={path} cannot encode a text: .*"):
        list(encode([Piece("dog", True, True, 3)], FileTokenizer(path), DTYPE))
