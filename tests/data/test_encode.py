"""Encoding on all cores: the order and the ids are those of one text after the other, and a text
that comes in pieces has the ids of the whole."""

import threading
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from jaxtrain.data.marks import Marks
from jaxtrain.data.preparing import encode as module
from jaxtrain.data.preparing.encode import encode
from jaxtrain.data.reading.records import TextPiece
from jaxtrain.data.tokenizer import ByteTokenizer, DataError, FileTokenizer

DTYPE = np.dtype("<u2")
TEXTS = [f"the quick {'fox ' * (i % 13)}漢" if i % 5 else "" for i in range(200)]
PIECES = [TextPiece(text, bool(i % 3), bool(i % 4), i) for i, text in enumerate(TEXTS)]


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
            yield TextPiece(f"{'slow' if i % 8 == 0 else 'fast'} {i}", True, True, 1)

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
            return np.full(len(texts), 257, np.uint32), [1] * len(texts)

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
        list(encode([TextPiece("dog", True, True, 3)], FileTokenizer(path), DTYPE))


# ---- texts in windows

LETTERS = "▁ \n\r\tabcdefghinopstuv.7Ġ"
PAIRS = ["t h", "th e", "▁ the", "c a", "ca t", "▁ cat", "7 7", "77 7", "Ġ Ġ", "Ċ Ċ"]
BYTES = pre_tokenizers.ByteLevel
CODE = "def f(x):\r\n    the cat\n\n  a hat.\n" * 300


def bpe(pre_tokenizer=None, normalizer=None, **arguments):
    names = [*LETTERS, *BYTES.alphabet(), *("".join(pair.split()) for pair in PAIRS), "</s>", "<u>"]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(pair.split()) for pair in PAIRS]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<u>", **arguments))
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
    if normalizer:
        made.normalizer = normalizer
    return made


LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
WHOLE = {
    "a prefix": (bpe(normalizer=LLAMA2), "the cat and a hat.\n" * 600),
    "no line break": (bpe(normalizer=LLAMA2), "the cat the cat th e" * 600),
    "no last line break": (bpe(normalizer=LLAMA2), "the cat\nthe"),
    "metaspace": (bpe(pre_tokenizers.Metaspace(prepend_scheme="always")), CODE),
    "metaspace first": (bpe(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)), CODE),
    "bytes with a prefix": (bpe(BYTES(add_prefix_space=True)), CODE),
    "bytes": (bpe(BYTES(add_prefix_space=False)), CODE),
    "spaces": (bpe(BYTES(add_prefix_space=False)), CODE + " " * 9001 + CODE + "\n" * 7000),
    "numbers": (
        bpe(
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex("[0-9]{1,3}"), "isolated"),
                    BYTES(False, use_regex=False),
                ]
            )
        ),
        "a" + "7" * 20_000,
    ),
    "quotes": (bpe(pre_tokenizers.Split(Regex('"[^"]*"|.'), "isolated")), '"ab" c' * 900),
    "fixed length": (bpe(pre_tokenizers.FixedLength(length=11)), "the cat a" * 800),
    "unknown": (bpe(fuse_unk=True), "漢" * 3000 + "the cat" * 300 + "漢" * 9000 + "a"),
    "stripped": (bpe(normalizer=normalizers.Strip()), " " * 2000 + "cat " * 500 + " " * 4000),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("task", [1000, 720_720])
def test_a_text_in_pieces_has_the_ids_of_the_whole(tmp_path, monkeypatch, name, task):
    """Wherever it is cut, and whatever the tokenizer puts before a text or takes together; other
    documents stand before and behind it."""
    made, text = WHOLE[name]
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", Marks((2, 3), 1, (1,)))
    monkeypatch.setattr(module, "TASK", task)
    monkeypatch.setattr(module, "SHARED", 256)
    cuts = [*range(0, len(text), 700), len(text)]
    pieces = [
        TextPiece("cat", True, True, 3),
        *(TextPiece(text[a:b], True, False, b - a, goes_on=True) for a, b in zip(cuts, cuts[1:])),
        TextPiece("", True, True, 0),
        TextPiece("the", False, False, 3),
        TextPiece("cat", True, True, 3),
    ]
    parts = list(encode(pieces, tokenizer, DTYPE))
    documents = [["cat"], [text], ["the", "cat"]]
    ids = [
        [2, 3, *(i for t in texts for i in made.encode(t, add_special_tokens=False).ids), 1]
        for texts in documents
    ]
    found, ends, mask = joined(parts)
    assert found == sum(ids, [])
    assert ends == np.cumsum([len(document) for document in ids]).tolist()
    masked = len(made.encode("the").ids) + 2
    assert [i for i, counts in enumerate(mask) if not counts] == [*range(ends[1], ends[1] + masked)]
    assert sum(part.text for part in parts) == len(text.encode()) + 9
    assert sum(part.size for part in parts) == len(text) + 9


def test_a_text_that_no_place_divides(tmp_path, monkeypatch):
    """Memory is bounded: a text that has to be encoded as one and is longer is refused."""
    made, text = WHOLE["unknown"][0], "漢" * 5000
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", Marks((), 1, (1,)))
    for name, value in (("TASK", 1000), ("SHARED", 256), ("LONGEST", 5000)):
        monkeypatch.setattr(module, name, value)
    pieces = lambda text: [TextPiece(text, True, True, 1)]
    (part,) = encode(pieces(text), tokenizer, DTYPE)
    assert part.ids[:-1].tolist() == made.encode(text).ids
    with pytest.raises(DataError, match="of 5,001 characters of a document .* at most 5,000 are"):
        list(encode(pieces(text + "漢"), tokenizer, DTYPE))
