"""A prepared corpus: its arrays, its two splits, and the entropy of neighbouring bytes."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from jaxtrain.data.reading.bad_records import BadFile, Skipped
from jaxtrain.data.reading.joined import Joined, Sliced, parts_of
from jaxtrain.data.split import Stream, split
from jaxtrain.data.stores.ranges import StoreArray
from jaxtrain.data.tokenizer import ByteTokenizer, Tokenizer
from jaxtrain.run import files

CHUNK = 4 << 20  # tokens examined at a time
NEAR = 1 << 17  # tokens between two ranges that are read ahead as one
BIGRAMS = 1 << 28  # the pairs that bigram_entropy counts at most
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus; its arrays are memory-mapped.

    tokens: [tokens] uint16 or uint32, or the integer type of the source's token files, several of
      which are Joined: it is read by slices.
    documents: [documents + 1] int64, the place of each document, then the number of tokens.
    mask: [tokens] uint8, 1 where a token counts in the loss, or None if all count.
    checksum: sha256 over tokens, documents, mask and the end-of-document id, as hexadecimal.
    skipped: the bad records that were left out.
    prepared: the time of its preparation, in seconds since the epoch.
    """

    tokens: Sliced
    documents: np.ndarray
    mask: Sliced | None
    checksum: str
    tokenizer: Tokenizer
    folder: pathlib.Path
    source: str
    validation_fraction: float
    skipped: Skipped
    prepared: float

    @functools.cached_property
    def _splits(self) -> tuple[Stream, Stream]:
        return split(self.documents, self.validation_fraction)

    @property
    def train(self) -> Stream:
        """The documents of the training split."""
        return self._splits[0]

    @property
    def validation(self) -> Stream:
        """The documents of the held-out split."""
        return self._splits[1]

    def describe(self) -> str:
        """A line of text: tokens, documents, held-out tokens."""
        return (
            f"corpus: {len(self.tokens):,} tokens, {len(self.documents) - 1:,} documents from "
            f"{self.source}, {len(self.validation):,} tokens held out"
        )

    @functools.cached_property
    def in_store(self) -> bool:
        """True if tokens are read from a store."""
        return any(isinstance(part, StoreArray) for part in parts_of(self.tokens))

    def prefetch(self, ranges: Iterable[tuple[int, int]], is_needed: bool = True) -> None:
        """Begins to read ranges of tokens ahead that lie in a store. is_needed: they will be read
        at once."""
        if not self.in_store:
            return
        merged: list[tuple[int, int]] = []  # held-out documents lie between them
        for first, last in sorted(ranges):
            if merged and first - merged[-1][1] < NEAR:
                first, before = merged.pop()
                last = max(last, before)
            merged.append((first, last))
        for (first, last), array in itertools.product(merged, (self.tokens, self.mask)):
            places: Iterable[tuple[Any, int, int]] = (
                array.places(first, last) if isinstance(array, Joined) else [(array, first, last)]
            )
            for part, begin, end in places:
                if isinstance(part, StoreArray):
                    part.prefetch(begin, end, is_needed)

    def check_whole(self) -> None:
        """Raises BadFile if a mapped file was cut short since it was opened. Reading the missing
        part of the map would kill the process without a message."""
        for part in [*parts_of(self.tokens), *parts_of(self.mask)]:
            if isinstance(part, np.memmap):
                file: Any = part.base
                if file.size() < part.offset + part.nbytes:
                    raise BadFile(
                        f"{part.filename}: the file was cut short while it was in use, and "
                        f"{file.size():,} bytes are left: put it back as it was, and start again"
                    )


def bigram_entropy(corpus: Corpus) -> float | None:
    """H(next byte | byte) of the training split in nats, from counts of neighbouring tokens; None
    if its tokens are not bytes.

    This is the loss of the best table of 257 × 257 probabilities, so a model with a lower loss has
    learned more than pairs. An end of document counts as a byte. At most BIGRAMS pairs are counted,
    in blocks spread evenly over the split.
    """
    if not isinstance(corpus.tokenizer, ByteTokenizer) or len(corpus.train) < 2:
        return None
    return stored(
        corpus.folder / f"bigram-{corpus.validation_fraction:g}.txt",
        lambda: _entropy_of_pairs(corpus),
    )


def _entropy_of_pairs(corpus: Corpus) -> float:
    n, pairs = corpus.tokenizer.vocab_size, len(corpus.train) - 1
    blocks = -(-pairs // CHUNK)
    chosen = np.unique(np.linspace(0, blocks - 1, min(blocks, BIGRAMS // CHUNK)).astype(np.int64))
    counts = np.zeros(n * n, np.int64)
    corpus.check_whole()
    for block in chosen.tolist():
        ids = corpus.train.read(
            corpus.tokens, block * CHUNK, min((block + 1) * CHUNK, pairs) + 1
        ).astype(np.int32)
        counts += np.bincount(ids[:-1] * n + ids[1:], minlength=n * n)
    table = counts.reshape(n, n)
    before = np.broadcast_to(table.sum(1, keepdims=True), table.shape)
    seen = table > 0
    return float(np.sum(table[seen] * np.log(before[seen] / table[seen])) / table.sum())


def stored(path: pathlib.Path, compute: Callable[[], T]) -> T:
    """The result of `compute`, a JSON value, which a file in a corpus's folder has. It is computed
    again if that is missing or damaged, or cannot be written."""
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        checksum, _, text = path.read_text().partition("\n")
        if digest(text) == checksum:
            return json.loads(text)
    value = compute()
    text = json.dumps(value)
    with contextlib.suppress(OSError):
        files.replace_text(path, f"{digest(text)}\n{text}")
    return value
