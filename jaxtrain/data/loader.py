"""Batches as global arrays. The number of a batch alone determines its sequences and their places
in it, and so the processes that read them. A place is a number i from 0 to B − 1:

    at place i of batch n  is sequence order[n·B + i] of the split; order = a permutation of all
                           sequences for each epoch, from the seed
    in the arrays          [microbatches, B / microbatches, T] it has the indices
                           [i // (B / microbatches), i % (B / microbatches)];
                           independent replicas have B / replicas consecutive places each, with the
                           same rule for a replica's

Packing and shuffling know nothing of meshes, processes or threads. A process reads the sequences
that its own devices hold, each once. There is no other state: to resume at batch n is to read batch
n of the same corpus. Step t has batch t − 1, unless the run has passed over batches; so a
checkpoint stores the number of the next batch with the step.

Legend: B the sequences of the global batch, T the sequence length. document_packing.py cuts
sequences, preparing/prepare.py prepares a corpus.
"""

import collections
import concurrent.futures
import functools
import hashlib
import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from jaxtrain.config import DataConfig, TrainConfig
from jaxtrain.data.corpus import Corpus
from jaxtrain.data.document_packing import Sequences
from jaxtrain.data.preparing.prepare import prepare
from jaxtrain.data.row_log import RowLog
from jaxtrain.data.tokenizer import DataError, prompt_ids
from jaxtrain.devices import cluster

Batch = dict[str, jax.Array]


def prepare_corpus(data: DataConfig, vocab_size: int, train: TrainConfig) -> Corpus:
    """The corpus, in every process. Raises ClusterError if processes read different ones, and
    DataError for a `train.sample_prompt` that cannot be encoded."""
    corpus = prepare(data, vocab_size, progress=jax.process_index() == 0)
    cluster.agree({"corpus": f"{corpus.checksum[:12]}{cluster.PLACE}{corpus.source}"})
    if train.sample_tokens:
        prompt_ids(corpus.tokenizer, train.sample_prompt, vocab_size)
    return corpus


class Loader:
    """The batches of one split of a corpus.

    A batch is a dict of arrays [microbatches, B / microbatches, T] with the given sharding; its
    keys and types are those of packing.Sequences.

    The train split goes on for ever, with another order each epoch. The validation split is read
    once, in the order of the corpus. With `batches` only that many are read, of sequences spread
    evenly over the split, because its first ones may all be of one document. Sequences of weight 0
    fill up the last batch.

    Args:
      corpus: a prepared corpus; a checkpoint needs only its checksum and the number of the next
        batch.
      data: the config's group; sequence_length, batch_size, seed, attend_across_documents,
        packing and prefetch are used.
      split: "train" or "validation".
      sharding: the sharding of [microbatches, B / microbatches, T], over any axes of any mesh.
      microbatches: the number of parts of a batch; divides B.
      batches: the largest number of batches of the validation split (None: the entire split).
      independent_replicas: the number of replicas that train separately, along the slowest axis of
        a batch's sequences.
      log: writes down the sequences of each batch that is taken from `iterate`.

    Raises DataError if the train split is empty.
    """

    def __init__(
        self,
        corpus: Corpus,
        data: Any,
        split: str,
        sharding: jax.sharding.NamedSharding,
        microbatches: int = 1,
        batches: int | None = None,
        independent_replicas: int = 1,
        log: RowLog | None = None,
    ):
        if split not in ("train", "validation"):
            raise ValueError(f"split {split!r}: use train or validation")
        if data.batch_size % microbatches:
            raise ValueError(
                f"{microbatches} microbatches do not divide data.batch_size={data.batch_size}"
            )
        self._corpus, self._split, self._train = corpus, split, split == "train"
        self._batch_size, self._sharding = data.batch_size, sharding
        self._has_validation = data.validation_fraction > 0
        self._stream = corpus.train if self._train else corpus.validation
        self._sequences = Sequences(
            corpus,
            self._stream,
            data.sequence_length,
            data.attend_across_documents,
            padded=not self._train,
            packing=data.packing,
        )
        self._name = (
            f"the {split} split of {corpus.source} (checksum {corpus.checksum[:12]}, seed "
            f"{data.seed})"
        )
        order = grain.MapDataset.range(len(self._sequences))
        if self._train:
            if not len(self._sequences):
                raise DataError(
                    f"data.validation_fraction={data.validation_fraction:g} holds out all of the "
                    f"{len(corpus.tokens)} tokens of data.source={corpus.source}: use "
                    "--config.data.validation_fraction=0.0"
                )
            # Grain adds the epoch to its seed of 32 bits. A digest spreads the seeds, so that
            # neighbouring ones do not share epochs.
            digest = hashlib.sha256(str(data.seed).encode()).digest()
            order = order.shuffle(seed=int.from_bytes(digest[:4], "little")).repeat()
            self.batches = None
        else:
            available = -(-len(self._sequences) // self._batch_size)
            self.batches = available if batches is None else min(batches, available)
        self._order = order
        self.shape = (microbatches, self._batch_size // microbatches, data.sequence_length)
        self._local, self._local_index = _local_places(sharding, self.shape, independent_replicas)
        self._ahead, self._log = data.prefetch, log
        self._threads = concurrent.futures.ThreadPoolExecutor(
            max(1, data.prefetch), thread_name_prefix=f"jaxtrain-{split}"
        )

    def remarks(self) -> list[str]:
        """Lines of text about a split with too few tokens for a batch; [] if it has enough."""
        count, length = len(self._sequences), self.shape[2]
        few = f"corpus: the {self._split} split has {len(self._stream):,} tokens"
        if not self._train:
            nothing = f"{few}: there is nothing to evaluate on"
            return [nothing] if self._has_validation and not count else []
        if self._sequences.packing.repeated:
            return [
                f"{few}, and data.sequence_length={length} takes {length + 1}: its documents "
                "repeat within a sequence"
            ]
        if count < self._batch_size:
            return [
                f"{few}, which are {count} sequence{'s'[: count > 1]} of {length}, and "
                f"data.batch_size={self._batch_size}: they repeat within a batch"
            ]
        return []

    @property
    def sequences(self) -> int:
        """The number of sequences in the split: an epoch."""
        return len(self._sequences)

    def specification(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and shardings of a batch, for compilation before the first one is read."""
        return {
            k: jax.ShapeDtypeStruct(self.shape, v.dtype, sharding=self._sharding)
            for k, v in self._sequences.empty().items()
        }

    def batch(self, number: int) -> Batch:
        """Reads the batch with a number; the first one is 0."""
        return self.read(number)[1]

    def read(self, number: int) -> tuple[dict[int, int | None], Batch]:
        """Reads the batch with a number. Returns two things: the sequence of the split at each
        place of the batch that this process has read (None: padding), and the batch."""
        if number < 0 or (self.batches is not None and number >= self.batches):
            raise IndexError(f"batch {number} of {self.batches} of {self._name}")
        self._corpus.check_whole()
        indices = {i: self._index(number * self._batch_size + i) for i in self._local}
        sequences = [
            self._sequences.empty() if index is None else self._sequences[index]
            for index in indices.values()
        ]
        return indices, {
            name: self._global_array([arrays[name] for arrays in sequences])
            for name in sequences[0]
        }

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches from number `start` up to `stop` (None: for ever, or to the end of the validation
        split), data.prefetch of them read ahead.

        An error in a thread is raised here, at its batch.
        """
        end = min((n for n in (stop, self.batches) if n is not None), default=sys.maxsize)
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

    def describe(self, number: int) -> str:
        """The epoch and the sequences of a batch, in words."""
        begin = number * self._batch_size
        sequences = [self._index(begin + i) for i in range(self._batch_size)]
        shown = ", ".join(map(str, sequences[:8])) + (", …" if len(sequences) > 8 else "")
        return (
            f"batch {number}: epoch {begin // max(1, self.sequences)}, sequences {shown} of the "
            f"{self.sequences} of {self._name}"
        )

    def close(self) -> None:
        """Ends the threads. Nothing can be iterated afterwards."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _index(self, i: int) -> int | None:
        """The split's sequence at index i of the order; None after the validation split."""
        if self.batches is None:
            return self._order[i]
        if i >= self.sequences:
            return None
        evaluated = self.batches * self._batch_size
        return self._order[i * self.sequences // evaluated if evaluated < self.sequences else i]

    def _taken(self, number: int, sequences: dict[int, int | None], batch: Batch) -> Batch:
        if self._log:
            self._log.write(number, sequences)
        return batch

    def _global_array(self, sequences: list[np.ndarray]) -> jax.Array:
        """The array of a batch, from this process's sequences, in the order of `_local`."""
        local = np.stack(sequences)  # [places that this process reads, T]

        def block(index: Any) -> np.ndarray:
            return local[self._local_index[index[:2]]][..., index[2]]

        # JAX takes this for an implicit transfer
        with jax.transfer_guard_host_to_device("allow"):
            return jax.make_array_from_callback(self.shape, self._sharding, block)


class Feed:
    """A run's batches, one after the other; `position` is the number of the next one.

    Args:
      loader: the loader of the train split.
      position: the number of the first batch.
      count: the number of batches that will be taken.
    """

    def __init__(self, loader: Loader, position: int, count: int):
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
    corpus: Corpus,
    data: DataConfig,
    like: jax.ShapeDtypeStruct,
    replicas: int,
    eval_batches: int,
    rows_folder: pathlib.Path | None = None,
) -> tuple[Loader, Loader]:
    """The loaders of training batches and of held-out ones.

    like: an array of a batch, [microbatches, sequences, tokens] with a NamedSharding
    replicas: those that train separately
    rows_folder: the run's, where the training batches' rows are logged; None: they are not
    """
    log = RowLog(rows_folder, jax.process_index(), jax.process_count()) if rows_folder else None
    load = functools.partial(
        Loader,
        corpus,
        data,
        sharding=like.sharding,
        microbatches=like.shape[0],
        independent_replicas=replicas,
    )
    return load(split="train", log=log), load(split="validation", batches=eval_batches)
