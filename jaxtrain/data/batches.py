"""The sequences of every batch, by its number alone. `TrainingBatches` draws them from the sources
of a mixture, each in its own order; `HeldOutBatches` reads a validation set once.

    batch n, place i ─► number of the sequence in the run (config/groups/phase_settings.py: Span)
                     ─► source, ordinal   mixture.py
                     ─► epoch, sequence   order.py

Neither knows of meshes, processes or threads: loader.py puts batches onto devices.
"""

import bisect
import functools
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.groups.mixture_settings import MixtureSource
from jaxtrain.config.phases import Span, span_at
from jaxtrain.data.corpora import Corpora, ValidationSet
from jaxtrain.data.corpus import Corpus
from jaxtrain.data.document_packing import Sequences
from jaxtrain.data.mixture import Segment, in_parts
from jaxtrain.data.order import WINDOW, Draw, Order
from jaxtrain.data.tokenizer import DataError

SHOWN = 8  # sequences of a batch that a line names


class TrainingBatches:
    """The batches of a run's mixture. They go on for ever, unless sources are exhausted.

    spans: the sizes and weights of the batches

    Raises DataError if a source's train split is empty.
    """

    batches: int | None = None  # their number; None: without end

    def __init__(self, corpora: Corpora, spans: Sequence[Span]):
        self.corpora, self.spans = corpora, tuple(spans)
        self._orders = [_order(*one) for one in corpora.pairs()]
        self._segments: list[Segment] = []
        self._exhausted = corpora.sources[0]  # the last one that was; it ends the run
        # Segments are found when they are needed: each source that leaves takes another table.
        self._found, self._covered = self._find_segments(), 0
        self._lock = threading.Lock()
        self._numbers = {source.name: k for k, source in enumerate(corpora.sources)}
        self._requested = [0] * len(corpora.sources)  # the first ordinal that is not read ahead
        self._segment(0)

    def draw(self, batch: int, place: int) -> Draw:
        """The sequence at a place of a batch. Raises DataError after the last one."""
        number = span_at(self.spans, batch).rows_before(batch) + place
        segment = self._segment(number)
        if not segment.parts:
            raise DataError(
                f"batch {batch} is beyond the {self._exhausted.epochs:g} epochs of "
                f"{self._exhausted.setting}: use fewer train.steps (by the batches that the run "
                "has passed over), or more epochs"
            )
        k, ordinal = segment.draw(number)
        return self._orders[k].at(ordinal)

    def read_ahead(self, draws: Iterable[Draw]) -> None:
        """Begins to read the windows of sequences that lie in a store, and the windows after those,
        if that was not done yet. They fill a half of the source's share of the cache at most: more
        would push out what is needed before."""
        for draw in draws:
            k, corpus = self._numbers[draw.source], draw.sequences.corpus
            if draw.ordinal < self._requested[k] or not corpus.in_store:
                continue
            ranges, self._requested[k] = self._orders[k].window(draw.ordinal)
            ranges = [*ranges, *self._orders[k].window(self._requested[k])[0]]
            sizes = [(last - first) * corpus.tokens.dtype.itemsize for first, last in ranges]
            room = self.corpora.sources[k].data.store_cache_gb * 1e9 / 2 / len(self._orders)
            fit = int(np.searchsorted(np.cumsum(sizes), room))
            corpus.prefetch(ranges[:fit], is_needed=False)

    def remarks(self) -> list[str]:
        """Lines of text about sources with too few tokens for a batch, and about a cache that has
        no room for what is read ahead of one."""
        span, lines = self.spans[0], []
        for k, (source, corpus) in enumerate(self.corpora.pairs()):
            sequences = self._orders[k].sequences
            count, length = len(sequences), sequences.length
            few = f"{source.setting}: its train split has {len(corpus.train):,} tokens"
            if sequences.packing.repeated:
                lines.append(
                    f"{few}, and data.sequence_length={length} takes {length + 1}: its documents "
                    "repeat within a sequence"
                )
            elif count < span.batch_size * span.weights[k] / sum(span.weights):
                lines.append(
                    f"{few}, which are {count} sequence{'s'[: count > 1]} of {length}, and "
                    f"data.batch_size={span.batch_size}: they repeat within a batch"
                )
            ranges, _ = self._orders[k].window(0)
            size = sum(last - first for first, last in ranges) * corpus.tokens.dtype.itemsize
            most, windows = source.data.store_cache_gb, 4  # two, and as much again
            needed = math.ceil(10 * windows * size * len(self._orders) / 1e9) / 10
            if corpus.in_store and most < min(needed, 1.1 * corpus.tokens.nbytes / 1e9):
                lines.append(
                    f"data.store_cache_gb={most:g} is little for {source.setting}={corpus.source}, "
                    f"of which sequences are read in windows of {size / 1e9:.3g} GB: its blocks "
                    "are requested again and again: use "
                    f"--config.data.store_cache_gb={needed:g}"
                )
        return lines

    def describe(self, batch: int) -> str:
        """The epochs and the sequences of a batch, in words."""
        draws: dict[str, list[Draw]] = {}
        for place in range(span_at(self.spans, batch).batch_size):
            draw = self.draw(batch, place)
            draws.setdefault(draw.source, []).append(draw)
        texts = [
            f"epoch {draws[source.name][0].epoch}, sequences "
            f"{_listed(draws[source.name])} of the {len(draws[source.name][0].sequences)} of the "
            f"train split of {corpus.source} (checksum {corpus.checksum[:12]}, seed "
            f"{source.data.seed})"
            for source, corpus in self.corpora.pairs()
            if source.name in draws
        ]
        return f"batch {batch}: {'; '.join(texts)}"

    def end(self) -> tuple[MixtureSource, int] | None:
        """The source that ends the run, and the number of whole batches before that, if it is
        before the last span's end."""
        segment = self._segment(self.spans[-1].rows_before(self.spans[-1].end) - 1)
        if segment.parts:
            return None
        span = next(s for s in reversed(self.spans) if s.rows <= segment.first)
        return self._exhausted, span.begin + (segment.first - span.rows) // span.batch_size

    @property
    def windows(self) -> int:
        """The number of windows of the largest source."""
        groups = [len(order.sequences.packing.firsts) - 1 for order in self._orders]
        return -(-max(groups) // WINDOW)

    def history(self, batch: int) -> list[tuple[int, tuple[int, ...]]]:
        """The mixtures of all batches before one: the number of the first sequence of each, and
        the weights of its sources up to the last one with a weight."""
        number = span_at(self.spans, batch).rows_before(batch)
        self._segment(max(0, number - 1))
        return [
            (segment.first, tuple(np.trim_zeros(segment.parts, "b")))
            for segment in self._segments
            if segment.first < number
        ]

    def _segment(self, number: int) -> Segment:
        """The segment of a sequence, by its number among all."""
        with self._lock:
            while self._covered <= number:
                self._covered = next(self._found)
        at = bisect.bisect_right(self._segments, number, key=lambda segment: segment.first)
        return self._segments[at - 1]

    def _find_segments(self) -> Iterator[int]:
        """Adds segments one after the other. Yields the number of sequences for which they are
        known."""
        sources = self.corpora.sources
        counts, present = (0,) * len(sources), [True] * len(sources)
        ends = [*(span.rows for span in self.spans[1:]), sys.maxsize]
        for span, end in zip(self.spans, ends, strict=True):
            begin = span.rows
            if self._segments:
                counts = self._segments[-1].counts_at(begin)
            for order, count in zip(self._orders, counts, strict=True):
                order.cut(count, span.sequence_length)
            while begin < end:
                weights = [w * here for w, here in zip(span.weights, present, strict=True)]
                parts = in_parts(weights) if any(weights) else ()
                if not self._segments or self._segments[-1].parts != parts:
                    self._segments.append(Segment(begin, counts, parts))
                if not parts:
                    yield sys.maxsize
                    return
                segment = self._segments[-1]
                leaving = [
                    (segment.number_at(k, self._orders[k].count_of(source.epochs)), k)
                    for k, source in enumerate(sources)
                    if parts[k] and source.epochs and source.exhausted != "repeat"
                ]
                first, k = min(leaving, default=(sys.maxsize, 0))
                if first > end:
                    yield end
                    break
                begin = max(begin, first)
                yield begin
                counts, present[k] = segment.counts_at(begin), False
                self._exhausted = sources[k]
                if self._exhausted.exhausted == "stop":
                    present = [False] * len(sources)


class HeldOutBatches:
    """The batches of a validation set, which is read once, in the order of its corpus. Nothing is
    in the last batch after its end.

    data: of the run: sequence_length, batch_size and attend_across_documents are used
    most: the largest number of batches; None: the entire set. Their sequences are spread evenly
        over it, because its first ones may all be of one document
    """

    def __init__(self, name: str, held_out: ValidationSet, data: Any, most: int | None = None):
        self._name = name
        self.corpora = Corpora((held_out.source,), (held_out.corpus,))
        self._sequences = Sequences(
            held_out.corpus,
            held_out.stream,
            data.sequence_length,
            data.attend_across_documents,
            padded=True,
            packing=held_out.source.data.packing,
        )
        available = -(-len(self._sequences) // data.batch_size)
        self.batches = available if most is None else min(most, available)
        self.spans = (
            Span("", 0, max(1, self.batches), data.batch_size, data.sequence_length, (), 0, 0),
        )

    def draw(self, batch: int, place: int) -> Draw:
        """The sequence at a place of a batch; padding after the set's end."""
        if not 0 <= batch < self.batches:
            raise IndexError(f"batch {batch} of {self.batches} of validation set {self._name}")
        (span,), count = self.spans, len(self._sequences)
        i, evaluated = span.rows_before(batch) + place, self.batches * span.batch_size
        number = i * count // min(evaluated, count)
        ranges = self._sequences.ranges(number) if number < count else []
        return Draw(self._name, i, 0, number, ranges, self._sequences)

    def remarks(self) -> list[str]:
        """A line of text about a set without tokens."""
        whose = f"validation set {self._name}" if self._name else "corpus: the validation split"
        few = f"{whose} has {len(self._sequences.stream):,} tokens: there is nothing to evaluate on"
        return [] if len(self._sequences) else [few]


def _order(source: MixtureSource, corpus: Corpus) -> Order:
    """The order of a source's train split. Raises DataError if that is empty."""
    data = source.data
    if not len(corpus.train):
        raise DataError(
            f"data.validation_fraction={data.validation_fraction:g} holds out all of the "
            f"{len(corpus.tokens)} tokens of {source.setting}={corpus.source}: use "
            "--config.data.validation_fraction=0.0"
        )
    make = functools.partial(
        Sequences,
        corpus,
        attend_across_documents=data.attend_across_documents,
        packing=data.packing,
    )
    return Order(make, corpus.train, data.seed, source.name)


def _listed(draws: Sequence[Draw]) -> str:
    numbers = ", ".join(str(draw.number) for draw in draws[:SHOWN])
    return numbers + (", …" if len(draws) > SHOWN else "")
