"""Documents that were read before (`data.duplicates`): keys of each document, which are computed
while it is read, and the documents whose keys an earlier one has.

    exact   1 key: a digest of the text. Two texts among 10^8 different ones have the same with
            probability 3e-4 (2^-64 for each pair)
    near    the same, and BANDS keys of its words, in lower case and without punctuation. A
            document is the set of its runs of SHINGLE words. MinHash (Broder 1997) gives
            BANDS · HASHES numbers, each of which two documents share with a probability of
            their Jaccard similarity J (the runs that both have, over those that one has);
            a key stands for HASHES of them

Two documents share one of the BANDS keys with probability 1 − (1 − J^HASHES)^BANDS:

    J              0.5    0.6    0.7    0.8    0.85   0.9    0.95
    left out       0.4 %  3 %    20 %   68 %   91 %   99.5 % 100 %

A document is left out if an earlier one has one of its keys, whether or not that one was left out
itself. So the result depends on the documents and their order alone, and each column of keys is
sorted on its own, in parts of bounded size.
"""

import hashlib
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.reading.records import TextPiece

SHINGLE = 5  # words
BANDS, HASHES = 16, 12
BLOCK = 1 << 20  # characters whose runs are made at a time
SEED = 57
SORTED = 1 << 23  # keys that are sorted at a time, in some 0.3 GB
WORD = re.compile(r"\w+")
KEYS = {"keep": 0, "exact": 1, "near": 1 + BANDS}  # of a document, by `data.duplicates`


def with_keys(
    pieces: Iterable[TextPiece], duplicates: str, store: Callable[[np.ndarray], None]
) -> Iterator[TextPiece]:
    """The pieces as they are. After the last one the keys of their documents are stored:
    [KEYS · documents] uint64, little-endian, one column after the other. Runs of words across the
    ends of pieces and blocks do not count."""
    minhash: Callable[[], Any] = _minhash if duplicates == "near" else lambda: None
    content, text, words = bytearray(), hashlib.blake2b(digest_size=8), minhash()
    for piece in pieces:
        text.update(piece.text.encode())
        for first in range(0, len(piece.text) if words else 0, BLOCK):
            words.update(_runs(piece.text[first : first + BLOCK]))
        yield piece
        if piece.ends:
            content += text.digest() + (_bands(words) if words else b"")
            text, words = hashlib.blake2b(digest_size=8), minhash()
    store(np.frombuffer(content, "<u8").reshape(-1, KEYS[duplicates]).T.ravel())


def _minhash() -> Any:
    import rensa  # few corpora are prepared so

    return rensa.RMinHash(BANDS * HASHES, SEED)


def _runs(text: str) -> list[str]:
    """The runs of words of a text; the text itself if it has no words."""
    words = WORD.findall(text.lower()) or [text]
    return [" ".join(run) for run in zip(*(words[i:] for i in range(min(SHINGLE, len(words)))))]


def _bands(minhash: Any) -> bytes:
    bands = np.array(minhash.digest(), "<u4").reshape(BANDS, HASHES)
    return b"".join(hashlib.blake2b(band.tobytes(), digest_size=8).digest() for band in bands)


def repeated(files: Sequence[pathlib.Path], count: int) -> np.ndarray:
    """[documents, 2] bool: True for the documents that share the first key, and another key, with
    an earlier document.

    files: of what `with_keys` stores, in the order of the corpus; count: the keys of a document
    """
    sizes = [file.stat().st_size // (8 * count) for file in files]  # documents
    firsts = np.append(0, np.cumsum(sizes))
    flags = np.zeros((firsts[-1], 2), bool)
    parts = -(-len(flags) // SORTED)
    for column in range(count):
        for part in range(parts):
            places, selected = [], []
            for file, first, size in zip(files, firsts, sizes):
                keys = np.fromfile(file, "<u8", size, offset=8 * column * size)
                chosen = np.flatnonzero(keys % parts == part)
                places.append(first + chosen)
                selected.append(keys[chosen])
            place, key = np.concatenate(places), np.concatenate(selected)
            order = np.argsort(key, kind="stable")  # the places of equal keys stay ascending
            same = np.flatnonzero(key[order[1:]] == key[order[:-1]]) + 1
            flags[place[order[same]], min(column, 1)] = True
    return flags
