"""Batches as global arrays. The number of a batch alone determines its sequences and their places
in it (batches.py), and so the processes that read them. A place is a number i from 0 to B − 1; in
the arrays [microbatches, B / microbatches, T] it has the indices

    [i // (B / microbatches), i % (B / microbatches)]

Independent replicas have B / replicas consecutive places each, with the same rule for a replica's.

A process reads the sequences that its own devices hold, each once. There is no other state: to
resume at batch n is to read batch n of the same corpora. Step t has batch t − 1, unless the run has
passed over batches; so a checkpoint stores the number of the next batch with the step.

Legend: B the sequences of the global batch, T the sequence length.
"""

import collections
import concurrent.futures
import functools
import itertools
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from jaxtrain.config import DataConfig, TrainConfig
from jaxtrain.config.phases import Span, span_at
from jaxtrain.data.batches import HeldOutBatches, TrainingBatches
from jaxtrain.data.corpora import Corpora, prepare_all
from jaxtrain.data.order import Draw
from jaxtrain.data.row_log import RowLog
from jaxtrain.data.stores.filesystem import given_up
from jaxtrain.data.tokenizer import prompt_ids
from jaxtrain.devices import cluster

Batch = dict[str, jax.Array]
Content = TypeVar("Content", bound=TrainingBatches | HeldOutBatches, covariant=True)


def prepare_corpora(data: DataConfig, vocab_size: int, train: TrainConfig) -> Corpora:
    """The corpora, in every process. Raises ClusterError if processes read different ones, and
    DataError for a `train.sample_prompt` that cannot be encoded."""
    corpora = prepare_all(data, vocab_size, progress=jax.process_index() == 0)
    cluster.agree(
        {
            f"{source.name or 'corpus'}": f"{corpus.checksum[:12]}{cluster.PLACE}{corpus.source}"
            for source, corpus in (*corpora.pairs(), *(each[:2] for each in corpora.named_sets))
        }
    )
    if train.sample_tokens:
        prompt_ids(corpora.tokenizer, train.sample_prompt, vocab_size)
    return corpora


class Loader(Generic[Content]):
    """The batches of a mixture or of a validation set, on devices.

    A batch is a dict of arrays [microbatches, B / microbatches, T] with the given sharding; its
    keys and types are those of document_packing.Sequences. Sequences of weight 0 fill up the last
    batch of a validation set.

    Args:
      content: the sequences of the batches.
      sharding: the sharding of [microbatches, B / microbatches, T], over any axes of any mesh.
      microbatches: the number of parts of a batch; divides B.
      independent_replicas: the number of replicas that train separately, along the slowest axis of
        a batch's sequences.
      prefetch: the number of batches that `iterate` reads ahead.
      log: writes down the sequences of each batch that is taken from `iterate`.
    """

    def __init__(
        self,
        content: Content,
        sharding: jax.sharding.NamedSharding,
        microbatches: int = 1,
        independent_replicas: int = 1,
        prefetch: int = 2,
        log: RowLog | None = None,
    ):
        self.content, self._sharding = content, sharding
        self._microbatches, self._ahead, self._log = microbatches, prefetch, log
        if wrong := next((s for s in content.spans if s.batch_size % microbatches), None):
            raise ValueError(
                f"{microbatches} microbatches do not divide data.batch_size={wrong.batch_size}"
            )
        given_up.clear()
        self._places = functools.cache(
            lambda shape: _local_places(sharding, shape, independent_replicas)
        )
        self._threads = concurrent.futures.ThreadPoolExecutor(
            max(1, prefetch), thread_name_prefix="jaxtrain-batches"
        )

    def shape(self, span: Span | None = None) -> tuple[int, int, int]:
        """The shape of a span's batches; None: the first one's."""
        span = span or self.content.spans[0]
        return self._microbatches, span.batch_size // self._microbatches, span.sequence_length

    def batch(self, number: int) -> Batch:
        """Reads the batch with a number; the first one is 0."""
        return self.read(number)[1]

    def read(self, number: int) -> tuple[dict[int, Draw], Batch]:
        """Reads the batch with a number. Returns two things: the sequence at each place of the
        batch that this process has read, and the batch."""
        for corpus in self.content.corpora.corpora:
            corpus.check_whole()
        span = span_at(self.content.spans, number)
        places, at = self._places(self.shape(span))
        draws = {place: self.content.draw(number, place) for place in places}
        for draw in draws.values():
            draw.sequences.corpus.prefetch(draw.ranges)
        if isinstance(self.content, TrainingBatches):
            self.content.read_ahead(draws.values())
        sequences = [draw.arrays() for draw in draws.values()]
        return draws, {
            name: self._global_array([arrays[name] for arrays in sequences], span, at)
            for name in sequences[0]
        }

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches from number `start` up to `stop` (None: for ever, or to the end of the validation
        split), data.prefetch of them read ahead.

        An error in a thread is raised here, at its batch.
        """
        end = min((n for n in (stop, self.content.batches) if n is not None), default=sys.maxsize)
        numbers = iter(range(start, end))
        if not self._ahead:
            yield from (self._taken(number, *self.read(number)) for number in numbers)
            return
        submit = lambda number: (number, self._threads.submit(self.read, number))
        waiting = collections.deque(map(submit, itertools.islice(numbers, self._ahead)))
        try:
            while waiting:
                number, future = waiting.popleft()
                read = future.result()
                waiting.extend(map(submit, itertools.islice(numbers, 1)))
                yield self._taken(number, *read)
        finally:
            for _, future in waiting:
                future.cancel()

    def close(self) -> None:
        """Ends the threads. Nothing can be iterated afterwards."""
        given_up.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader[Content]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _taken(self, number: int, draws: Mapping[int, Draw], batch: Batch) -> Batch:
        if self._log:
            self._log.write(number, {place: draw.record() for place, draw in draws.items()})
        return batch

    def _global_array(
        self, sequences: Sequence[np.ndarray], span: Span, at: np.ndarray
    ) -> jax.Array:
        """The array of a batch, from this process's sequences. at: as of `_local_places`"""
        local = np.stack(sequences)  # [places that this process reads, T]

        def block(index: Any) -> np.ndarray:
            return local[at[index[:2]]][..., index[2]]

        # JAX takes this for an implicit transfer
        with jax.transfer_guard_host_to_device("allow"):
            return jax.make_array_from_callback(self.shape(span), self._sharding, block)


class Feed:
    """A run's batches, one after the other; `position` is the number of the next one.

    Args:
      loader: the loader of the train split.
      position: the number of the first batch.
      count: the number of batches that will be taken.
    """

    def __init__(self, loader: Loader[TrainingBatches], position: int, count: int):
        self._loader = loader
        self.jump(position, count)

    def next(self) -> Batch:
        batch = next(self._batches)
        self.position += 1
        return batch

    def jump(self, position: int, count: int) -> None:
        """Goes on with batch `position`; `count` batches will be taken."""
        self.position, self._batches = position, self._loader.iterate(position, position + count)


def _local_places(
    sharding: jax.sharding.NamedSharding, shape: tuple[int, ...], independent_replicas: int
) -> tuple[list[int], np.ndarray]:
    """The places of a batch whose sequences this process's devices hold, ascending; and an array
    [microbatches, B / microbatches]: the index in that list of the place that is there, or −1."""
    microbatches, size, _ = shape
    places = (
        np.arange(microbatches * size)
        .reshape(independent_replicas, microbatches, -1)
        .swapaxes(0, 1)
        .reshape(microbatches, size)
    )
    needed = np.zeros(shape[:2], bool)
    indices: Any = sharding.addressable_devices_indices_map(shape)
    for index in indices.values():
        needed[index[:2]] = True
    local = np.sort(places[needed])
    return local.tolist(), np.where(needed, np.searchsorted(local, places), -1)


def make_loaders(
    batches: TrainingBatches,
    data: DataConfig,
    like: jax.ShapeDtypeStruct,
    replicas: int,
    eval_batches: int,
    rows_folder: pathlib.Path | None = None,
) -> tuple[Loader[TrainingBatches], dict[str, Loader[HeldOutBatches]]]:
    """The loader of a run's batches, and name → loader of each validation set of its corpora.

    like: an array of a batch, [microbatches, sequences, tokens] with a NamedSharding
    replicas: those that train separately
    rows_folder: the run's, where the sequences of training batches are logged; None: they are not
    """
    log = RowLog(rows_folder, jax.process_index(), jax.process_count()) if rows_folder else None
    load = functools.partial(
        Loader,
        sharding=like.sharding,
        microbatches=like.shape[0],
        independent_replicas=replicas,
        prefetch=data.prefetch,
    )
    return load(batches, log=log), {
        name: load(HeldOutBatches(name, one, data, eval_batches))
        for name, one in batches.corpora.validation_sets.items()
    }
