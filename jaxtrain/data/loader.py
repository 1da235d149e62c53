"""Batches as global arrays: which row stands where, in every process and in every batch, from the
batch's number alone.

    row i of batch n  = row order[n·B + i] of the split; order = a permutation of all rows for each
                        epoch, from the seed
    place of row i    = [i // (B / microbatches), i % (B / microbatches)]
                        of arrays [microbatches, B / microbatches, T]
                        where replicas train apart, so in each replica's part of the batch, its
                        B / replicas consecutive rows

Packing and shuffling know nothing of meshes, processes or threads; a process then reads those rows
that its own devices hold, each once. There is no other state: to resume at batch n is to ask for
batch n of the same corpus. Step t has batch t − 1, unless the run has passed over batches: so a
checkpoint has the number of the next batch beside the step.

Legend: B the global batch in rows, T the sequence length. Cutting rows is in packing.py, preparing
a corpus in tokens.py.
"""

import collections
import concurrent.futures
import hashlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from jaxtrain.data.packing import Row, Rows
from jaxtrain.data.row_log import RowLog
from jaxtrain.data.tokens import Corpus, DataError

Batch = dict[str, jax.Array]


class Loader:
    """The batches of one split of a corpus.

    A batch is a dict of arrays [microbatches, B / microbatches, T] with the given sharding: those
    of packing.Rows.

    The train split goes on for ever, shuffled anew each epoch. The validation split is read in the
    order of the corpus, whole or, with `batches`, in rows spread evenly over it (its first rows
    would be one document's); where it ends within a batch, rows of weight 0 fill that up.

    Args:
      corpus: prepared; its checksum and the number of the next batch are all that a checkpoint
        needs.
      data: config; sequence_length, batch_size, seed, attend_across_documents and prefetch are
        used.
      split: "train" or "validation".
      sharding: of [microbatches, rows, T], over any axes of any mesh.
      microbatches: into which the batch is cut; divides B.
      batches: the most that are made of the validation split (None: all of it).
      independent_replicas: replicas that train apart, along the slowest axis of the rows.
      log: gets the rows of each batch of `iterate` as that is taken.

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
        self._corpus = corpus
        self._train, self._batch_size, self._sharding = split == "train", data.batch_size, sharding
        self._stream, self._split, self._wanted = (
            corpus.train if self._train else corpus.validation,
            split,
            data.validation_fraction > 0,
        )
        self._rows = Rows(
            corpus,
            self._stream,
            data.sequence_length,
            data.attend_across_documents,
            padded=not self._train,
        )
        self._name = (
            f"the {split} split of {corpus.source} (checksum {corpus.checksum[:12]}, seed "
            f"{data.seed})"
        )
        order = grain.MapDataset.range(len(self._rows))
        if self._train:
            if not len(self._rows):
                rule = (
                    f"data.validation_fraction={data.validation_fraction:g} holds out all of the "
                    f"{len(corpus.tokens)} tokens"
                )
                raise DataError(
                    f"{rule} of data.source={corpus.source}: use "
                    "--config.data.validation_fraction=0.0"
                )
            order = order.shuffle(seed=_grain_seed(data.seed)).repeat()
            self.batches = None
        else:
            available = -(-len(self._rows) // self._batch_size)
            self.batches = available if batches is None else min(batches, available)
        self._order = order
        self.shape = (microbatches, self._batch_size // microbatches, data.sequence_length)
        self._local, self._place = _local_rows(sharding, self.shape, independent_replicas)
        self._ahead, self._log = data.prefetch, log
        self._threads = concurrent.futures.ThreadPoolExecutor(
            max(1, data.prefetch), thread_name_prefix=f"jaxtrain-{split}"
        )

    def remarks(self) -> list[str]:
        """For people: what is unusual about so little text; nothing where there is enough."""
        tokens, rows, length = f"{len(self._stream):,} tokens", len(self._rows), self.shape[2]
        few = f"corpus: the {self._split} split has {tokens}"
        if not self._train:
            return [] if rows or not self._wanted else [f"{few}: there is nothing to evaluate on"]
        if self._rows.repeated:
            return [
                f"{few}, and data.sequence_length={length} takes {length + 1}: its documents "
                "repeat within a sequence"
            ]
        if rows < self._batch_size:
            count = f"{rows} sequence{'s'[: rows > 1]} of {length}"
            return [
                f"{few}, which are {count}, and data.batch_size={self._batch_size}: they "
                "repeat within a batch"
            ]
        return []

    @property
    def rows(self) -> int:
        """Rows in the split: an epoch."""
        return len(self._rows)

    def specification(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and shardings of a batch, for compiling before there is one."""
        return {
            k: jax.ShapeDtypeStruct(self.shape, v.dtype, sharding=self._sharding)
            for k, v in self._rows.empty().items()
        }

    def batch(self, number: int) -> Batch:
        """The batch with a number, from 0, read now."""
        return self.read(number)[1]

    def read(self, number: int) -> tuple[dict[int, int | None], Batch]:
        """The same after place → row of the split, of those rows that this process has read for
        it."""
        if number < 0 or (self.batches is not None and number >= self.batches):
            raise IndexError(f"batch {number} of {self.batches} of {self._name}")
        self._corpus.check_whole()
        indices = {i: self._index(number * self._batch_size + i) for i in self._local}
        rows: list[Row] = [
            self._rows.empty() if index is None else self._rows[index] for index in indices.values()
        ]
        return indices, {name: self._place_array([row[name] for row in rows]) for name in rows[0]}

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches from number `start` up to `stop` (None: for ever, or all of the validation
        split), data.prefetch of them read ahead.

        An error in a thread is raised here, at the batch that it belongs to.
        """
        last = min((end for end in (stop, self.batches) if end is not None), default=sys.maxsize)
        numbers = iter(range(start, last))
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

    def rows_of(self, number: int) -> str:
        """For people: which rows a batch is made of."""
        first = number * self._batch_size
        rows = [self._index(first + i) for i in range(self._batch_size)]
        shown = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
        return (
            f"batch {number}: epoch {first // max(1, self.rows)}, rows {shown} of the {self.rows} "
            f"of {self._name}"
        )

    def close(self) -> None:
        """Ends the threads. Nothing can be iterated afterwards."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _index(self, i: int) -> int | None:
        """The split's row at place i of the order; None behind the end of the validation split."""
        if self.batches is None:
            return self._order[i]
        wanted = self.batches * self._batch_size
        return (
            self._order[i * self.rows // wanted if wanted < self.rows else i]
            if i < self.rows
            else None
        )

    def _taken(self, number: int, rows: dict[int, int | None], batch: Batch) -> Batch:
        if self._log:
            self._log.write(number, rows)
        return batch

    def _place_array(self, rows: list[np.ndarray]) -> jax.Array:
        local = np.stack(rows)  # [rows that this process needs, T]

        def block(index: Any) -> np.ndarray:
            return local[self._place[index[:2]]][..., index[2]]

        # JAX takes this for an implicit transfer, and it is meant
        with jax.transfer_guard_host_to_device("allow"):
            return jax.make_array_from_callback(self.shape, self._sharding, block)


class Feed:
    """A run's batches, one after the other. position: the number of the next.

    loader: of the train split; count: how many batches will be taken.
    """

    def __init__(self, loader: Loader, position: int, count: int):
        self._loader = loader
        self.jump(position, count)

    def next(self) -> Batch:
        batch = next(self._batches)
        self.position += 1
        return batch

    def jump(self, position: int, count: int) -> None:
        """The next batch is another one."""
        self.position, self._batches = position, self._loader.iterate(position, position + count)


def _local_rows(
    sharding: jax.sharding.NamedSharding, shape: tuple[int, ...], independent_replicas: int
) -> tuple[list[int], np.ndarray]:
    """The rows of a batch that this process's devices hold, ascending; and [microbatches, rows] the
    place of each in that list, or −1."""
    microbatches, rows, _ = shape
    row = (
        np.arange(microbatches * rows)
        .reshape(independent_replicas, microbatches, -1)
        .swapaxes(0, 1)
        .reshape(microbatches, rows)
    )
    needed = np.zeros(shape[:2], bool)
    indices: Any = sharding.addressable_devices_indices_map(shape)
    for index in indices.values():
        needed[index[:2]] = True
    local = np.sort(row[needed])
    return local.tolist(), np.where(needed, np.searchsorted(local, row), -1)


def _grain_seed(seed: int) -> int:
    """Grain adds the epoch to its seed, so neighbouring seeds would share epochs: spread them over
    its 32 bits."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "little")
