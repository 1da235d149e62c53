"""The stream of a StateFile's groups through the devices: read ahead, and written behind.

    disk ──▶ buffer ──▶ devices ──▶ update ──▶ the same buffer ──▶ disk
      a thread reads as far ahead            threads copy the results
      as there are buffers                   and write them

Buffers bound the memory: those under way together, from the beginning of a read to the end of a
write, have BUFFER_BYTES, or twice the largest group if that is more. A pass goes through all groups
once. The next begins as soon as one ends, so its first groups are read while gradients are
computed.
"""

import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxtrain.devices.state_file import (
    Bounds,
    DiskArray,
    StateFile,
    StateFileError,
    empty_buffer,
)

BUFFER_BYTES = 256 * 2**20
PARALLEL_GROUPS = 2  # are read at a time, and as many written


class BlockGroup:
    """Blocks that are read and written together: a layer of each of some arrays, or these arrays
    entirely outside of stacks. It takes the file's next bytes."""

    def __init__(self, file: StateFile, arrays: Sequence[DiskArray], layer: int):
        self.arrays, self.layer = arrays, layer
        self.begin, self.end = file.arrange((array, layer) for array in arrays)
        self._shards = [array.shards() for array in arrays]

    @property
    def size(self) -> int:
        return self.end - self.begin

    def _views(
        self, buffer: np.ndarray
    ) -> Iterator[tuple[DiskArray, list[tuple[list[jax.Device], np.ndarray]]]]:
        """Each array, with the devices of each of its shards and the shard's numbers in a buffer of
        the group."""
        for array, shards in zip(self.arrays, self._shards, strict=True):
            blocks: list[tuple[list[jax.Device], Bounds]] = [
                (devices, array.block(shard, self.layer)) for shard, devices in shards.items()
            ]
            yield (
                array,
                [(devices, array.view(block, buffer, self.begin)) for devices, block in blocks],
            )

    def on_devices(self, buffer: np.ndarray) -> list[jax.Array]:
        """The arrays on the devices, of stacks the layer [stages, 1, …]. On CPU they may lie in the
        buffer itself."""
        pairs = [
            [(view, device) for devices, view in shards for device in devices]
            for _, shards in self._views(buffer)
        ]
        views, devices = map(list, zip(*itertools.chain(*pairs), strict=True))
        parts = iter(jax.device_put(views, devices))
        return [
            jax.make_array_from_single_device_arrays(
                array.layer_shape, array.sharding, [*itertools.islice(parts, len(of_array))]
            )
            for array, of_array in zip(self.arrays, pairs, strict=True)
        ]

    def from_devices(self, values: Sequence[jax.Array], buffer: np.ndarray) -> None:
        """Waits for the arrays' new values and copies them into a buffer."""
        sources = []
        for value, (_, shards) in zip(values, self._views(buffer), strict=True):
            on_device = {shard.device: shard.data for shard in value.addressable_shards}
            # Devices of one shard have the same numbers: one of them sends these to the host.
            sources += [(on_device[devices[0]], view) for devices, view in shards]
        for source, _ in sources:
            source.copy_to_host_async()
        # All copies have begun before the first is waited for. Nothing is written into the buffer
        # before all devices have computed: on CPU their arguments may lie in it.
        jax.block_until_ready(values)
        for source, view in sources:
            np.copyto(view, np.asarray(source))


class Buffers:
    """Memory for groups under way: at most `limit` bytes, unused buffers included; or one
    group."""

    def __init__(self, limit: int):
        self._limit, self._used = limit, 0
        self._free: list[np.ndarray] = []
        self._changed = threading.Condition()
        self._stopped = False

    def take(self, size: int) -> np.ndarray | None:
        """Waits for memory; None if `stop` was called."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or not self._used or self._used + size <= self._limit
            )
            if self._stopped:
                return None
            self._used += size
            for i, buffer in enumerate(self._free):
                if len(buffer) == size:
                    return self._free.pop(i)
            while self._free and self._used + sum(map(len, self._free)) > self._limit:
                self._free.pop(0)
        return empty_buffer(size)

    def give(self, buffer: np.ndarray) -> None:
        """Takes memory back."""
        with self._changed:
            self._used -= len(buffer)
            self._free.append(buffer)
            self._changed.notify_all()

    def stop(self, stopped: bool = True) -> None:
        """Ends waits for memory, or allows them again."""
        with self._changed:
            self._stopped = stopped
            self._changed.notify_all()


# a group's buffer, once it is read
_Reading = concurrent.futures.Future[np.ndarray]


class StateStream:
    """The passes through a file's groups. One thread calls the methods.

    groups: in the order of a pass, not empty
    """

    def __init__(self, file: StateFile, groups: Sequence[BlockGroup]):
        self._file, self._groups = file, groups
        self._buffers = Buffers(max(BUFFER_BYTES, 2 * max(group.size for group in groups)))
        self._readers = concurrent.futures.ThreadPoolExecutor(PARALLEL_GROUPS, "state_ahead")
        self._writers = concurrent.futures.ThreadPoolExecutor(PARALLEL_GROUPS, "state_behind")
        self._pass: threading.Thread | None = None
        self._ready: queue.SimpleQueue[_Reading] = queue.SimpleQueue()
        self._failure: StateFileError | None = None  # the first of a write
        file.interrupt = self.interrupt

    def one_pass(self) -> Iterator[tuple[BlockGroup, np.ndarray]]:
        """Yields the groups in order, each with its numbers in a buffer, which the caller gives to
        `write`. Raises StateFileError.

        The caller has to exhaust the iterator: the lines after the last group end this pass and
        begin to read the next one.
        """
        self._begin_reading()  # nothing to do if the pass before has ended: it has begun this one
        for group in self._groups:
            buffer = self._ready.get().result()
            if self._failure:
                raise self._failure
            yield group, buffer
        # A generator runs on from here only when the caller asks for a group after the last one, as
        # a `for` loop does, and `zip(strict=True)`; `zip` alone need not. Without these lines the
        # thread of this pass would stay, and the next pass would wait for buffers that nobody
        # reads.
        assert self._pass
        self._pass.join()
        self._pass = None
        self._begin_reading()

    def write(self, group: BlockGroup, values: Sequence[jax.Array], buffer: np.ndarray) -> None:
        """Writes the new values of a group's arrays, once the devices have them."""
        self._file.pending[group.begin] = self._writers.submit(self._write, group, values, buffer)

    def interrupt(self) -> None:
        """Drops what was read ahead."""
        if self._pass is None:
            return
        self._buffers.stop()
        self._pass.join()
        self._pass = None
        while not self._ready.empty():
            reading = self._ready.get()
            if not reading.exception():
                self._buffers.give(reading.result())
        self._buffers.stop(False)

    def _begin_reading(self) -> None:
        """Begins to read the groups of the next pass, unless that has begun."""
        if self._pass is None:
            # A daemon thread: a process that ends for another reason does not wait for a disk.
            self._pass = threading.Thread(target=self._read_all, name="state_pass", daemon=True)
            self._pass.start()

    def _read_all(self) -> None:
        for group in self._groups:
            buffer = self._buffers.take(group.size)
            if buffer is None:
                return
            self._ready.put(self._readers.submit(self._read, group, buffer))

    def _read(self, group: BlockGroup, buffer: np.ndarray) -> np.ndarray:
        try:
            # Reading ahead may overtake the write of the pass before.
            if group.begin in self._file.pending:
                self._file.pending[group.begin].result()
            self._file.read_into(buffer, group.begin)
        except BaseException:
            self._buffers.give(buffer)
            raise
        return buffer

    def _write(self, group: BlockGroup, values: Sequence[jax.Array], buffer: np.ndarray) -> None:
        try:
            group.from_devices(values, buffer)
            self._file.write(group.begin, buffer)
        except StateFileError as error:
            self._failure = self._failure or error
            raise
        finally:
            self._buffers.give(buffer)
