"""Arrays whose numbers lie on a local disk: each process has a file for its devices' shards.

    blocks     a shard, or one layer of a stack's shard, is a block: a run of bytes that begins and
               ends at a multiple of ALIGNMENT
    groups     blocks that are read and written together follow each other in the file
    requests   a group is read and written in requests of REQUEST_BYTES, several at a time, past the
               page cache (O_DIRECT) if the file system can

The file is scratch. It has no name in its folder, so no other run can open it, and the system frees
it when the process ends, however that happens. All its bytes are reserved when it is opened: a disk
without enough of them ends the run before it trains.
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jaxtrain.run.exit_status import ExitStatus, RunError

ALIGNMENT = 4096  # bytes: what O_DIRECT needs of offsets, sizes and memory on every disk
REQUEST_BYTES = 8 * 2**20
REQUESTS = 4  # that are under way at a time, of reads and of writes each

# (start, stop) in each dimension
Bounds = tuple[tuple[int, int], ...]


class StateFileError(RunError):
    """A disk that cannot hold the optimizer's state, or does not give it back; the text is one
    line. The step that was under way is lost, and checkpoints are as they were."""

    status = ExitStatus.STORAGE


@jax.tree_util.register_static
class DiskArray:
    """An array that is laid out as a jax.Array and whose numbers lie in a StateFile. In pytrees it
    is a node without leaves: programs do not get it, and `jax.tree` needs `is_leaf=is_on_disk` to
    see it.

    sharding: as on the devices that get parts of it
    stacked:  its dimensions are [stages, layers, …], and a block is one layer
    """

    def __init__(
        self,
        file: "StateFile",
        shape: tuple[int, ...],
        dtype: np.dtype,
        sharding: jax.sharding.NamedSharding,
        stacked: bool,
    ):
        self.file, self.shape, self.dtype, self.sharding = file, shape, np.dtype(dtype), sharding
        self.stacked = stacked
        self.offsets: dict[Bounds, int] = {}  # of the blocks of this process

    @property
    def layers(self) -> int:
        """The number of parts of which each has one block of each shard."""
        return self.shape[1] if self.stacked else 1

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of one of the `layers`, [stages, 1, …] in a stack."""
        return (self.shape[0], 1, *self.shape[2:]) if self.stacked else self.shape

    def block(self, shard: Bounds, layer: int) -> Bounds:
        """The bounds of a layer of a shard; of the complete shard outside of stacks."""
        return (shard[0], (layer, layer + 1), *shard[2:]) if self.stacked else shard

    def shards(self) -> dict[Bounds, list[jax.Device]]:
        """The distinct shards of this process, each with its devices."""
        devices: dict[Bounds, list[jax.Device]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            assert index is not None
            bounds = tuple(i.indices(n)[:2] for i, n in zip(index, self.shape, strict=True))
            devices.setdefault(bounds, []).append(device)
        return devices

    def read(self, block: Bounds) -> np.ndarray:
        """The numbers of one of this process's blocks. Raises StateFileError."""
        self.file.settle()
        return self._view(block, self.file.read(self.offsets[block], self.size_in_file(block)))

    def write(self, block: Bounds, numbers: np.ndarray) -> None:
        """Replaces the numbers of one of this process's blocks. Raises StateFileError."""
        self.file.interrupt()
        self.file.settle()
        buffer = empty_buffer(self.size_in_file(block))
        np.copyto(self._view(block, buffer), numbers)
        self.file.write(self.offsets[block], buffer)

    def fill(self, value: jax.Array) -> None:
        """Replaces all numbers by those of an array on the devices. Raises StateFileError."""
        on_device = {shard.device: shard.data for shard in value.addressable_shards}
        for shard, devices in self.shards().items():
            numbers = np.asarray(on_device[devices[0]])
            for layer in range(self.layers):
                part = numbers[:, layer : layer + 1] if self.stacked else numbers
                self.write(self.block(shard, layer), part)

    def load(self) -> jax.Array:
        """All numbers, on the devices. Raises StateFileError."""
        parts = []
        for shard, devices in self.shards().items():
            numbers = np.empty(block_shape(shard), self.dtype)
            for layer in range(self.layers):
                part = numbers[:, layer : layer + 1] if self.stacked else numbers
                np.copyto(part, self.read(self.block(shard, layer)))
            parts += [jax.device_put(numbers, device) for device in devices]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)

    def view(self, block: Bounds, buffer: np.ndarray, begin: int) -> np.ndarray:
        """The numbers of a block in the bytes of a group that begins at this offset."""
        return self._view(block, buffer[self.offsets[block] - begin :])

    def _view(self, block: Bounds, buffer: np.ndarray) -> np.ndarray:
        return buffer[: self.bytes_of(block)].view(self.dtype).reshape(block_shape(block))

    def bytes_of(self, block: Bounds) -> int:
        """Bytes of a block's numbers."""
        return int(np.prod(block_shape(block), dtype=np.int64)) * self.dtype.itemsize

    def size_in_file(self, block: Bounds) -> int:
        """Bytes that a block takes in the file, a multiple of ALIGNMENT."""
        return -(-self.bytes_of(block) // ALIGNMENT) * ALIGNMENT

    def bytes_per_device(self) -> int:
        """Bytes of one device's shard."""
        return int(np.prod(self.sharding.shard_shape(self.shape))) * self.dtype.itemsize


def is_on_disk(a: object) -> bool:
    """True for a DiskArray: the `is_leaf` of jax.tree's functions."""
    return isinstance(a, DiskArray)


def block_shape(block: Bounds) -> tuple[int, ...]:
    """The sizes of a block or a shard."""
    return tuple(stop - start for start, stop in block)


def empty_buffer(size: int) -> np.ndarray:
    """Bytes [size] of memory that O_DIRECT can use."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


class StateFile:
    """This process's file. Nothing is read or written before `open`.

    folder: on the local disk; it is made if it does not exist
    """

    def __init__(self, folder: str):
        self.folder = pathlib.Path(os.path.expanduser(folder))
        self.arrays: dict[str, DiskArray] = {}
        self.size = 0
        self.direct = False
        # of groups that are written behind the update, by their first byte
        self.pending: dict[int, concurrent.futures.Future[None]] = {}
        # drops what was read ahead, before numbers are replaced
        self.interrupt: Callable[[], None] = lambda: None
        self._fd: int | None = None
        self._threads: dict[str, concurrent.futures.ThreadPoolExecutor] = {}

    def array(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sharding: jax.sharding.NamedSharding,
        stacked: bool,
    ) -> DiskArray:
        """The array of this name, the same object each time."""
        if name not in self.arrays:
            self.arrays[name] = DiskArray(self, shape, dtype, sharding, stacked)
        return self.arrays[name]

    def arrange(self, group: Iterable[tuple[DiskArray, int]]) -> tuple[int, int]:
        """Gives a group, of arrays with a layer of each, the next bytes of the file: (begin,
        end)."""
        begin = self.size
        for array, layer in group:
            for shard in array.shards():
                block = array.block(shard, layer)
                array.offsets[block] = self.size
                self.size += array.size_in_file(block)
        return begin, self.size

    def open(self) -> None:
        """Makes the file and reserves its bytes, which are zeros. Raises StateFileError."""
        with self._told("cannot be reserved"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._fd = _unnamed(self.folder)
            if self.size:
                os.posix_fallocate(self._fd, 0, self.size)
            self.direct = _goes_direct(self._fd)
        for kind in ("read", "write"):
            self._threads[kind] = concurrent.futures.ThreadPoolExecutor(
                REQUESTS, thread_name_prefix=f"state_{kind}"
            )

    def describe(self) -> str:
        """A line about the open file."""
        way = "past" if self.direct else "through (this file system has no O_DIRECT)"
        return (
            f"optimizer state on disk: {self.size / 2**20:,.1f} MiB of this process in "
            f"{self.folder}, {way} the page cache"
        )

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def clear(self) -> None:
        """Makes all numbers zero. Raises StateFileError."""
        assert self._fd is not None
        self.interrupt()
        self.settle()
        with self._told("cannot be reserved"):
            os.ftruncate(self._fd, 0)
            os.posix_fallocate(self._fd, 0, self.size)

    def close(self) -> None:
        """Ends the threads and gives the disk its bytes back."""
        self.interrupt()
        concurrent.futures.wait(self.pending.values())
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def settle(self) -> None:
        """Returns when nothing is being written. Raises StateFileError of a write that failed."""
        for writing in self.pending.values():
            writing.result()

    def read(self, offset: int, size: int) -> np.ndarray:
        """`size` bytes from an offset, both aligned. Raises StateFileError."""
        buffer = empty_buffer(size)
        self.read_into(buffer, offset)
        return buffer

    def read_into(self, buffer: np.ndarray, offset: int) -> None:
        """Fills a buffer with the bytes from an offset on. Raises StateFileError."""
        with self._told("cannot be read"):
            self._request("read", os.preadv, buffer, offset)

    def write(self, offset: int, buffer: np.ndarray) -> None:
        """Writes a buffer at an offset. Raises StateFileError."""
        with self._told("cannot be written"):
            self._request("write", os.pwritev, buffer, offset)

    def _request(
        self,
        kind: str,
        transfer: Callable[[int, Sequence, int], int],
        buffer: np.ndarray,
        offset: int,
    ) -> None:
        """Transfers a buffer in requests, and returns when all are done."""
        fd = self._fd
        if fd is None:
            raise OSError(errno.EBADF, "the file is closed")

        def one(start: int) -> None:
            data = buffer.data[start : start + REQUEST_BYTES]
            done = 0
            while done < len(data):
                count = transfer(fd, [data[done:]], offset + start + done)
                # the rest of a short transfer begins at an aligned offset, too
                count -= count % ALIGNMENT
                if count <= 0:
                    raise OSError(errno.EIO, f"only {done:,} of {len(data):,} bytes")
                done += count

        starts = range(0, len(buffer), REQUEST_BYTES)
        requests = [self._threads[kind].submit(one, start) for start in starts]
        concurrent.futures.wait(requests)
        for request in requests:
            request.result()

    @contextlib.contextmanager
    def _told(self, why: str):
        """A context in which an OSError becomes a StateFileError that names the folder."""
        try:
            yield
        except OSError as error:
            raise StateFileError(
                f"parallel.offload_directory='{self.folder}': {self.size:,} bytes of the "
                f"optimizer's state {why} ({error.strerror or error}); checkpoints are as they were"
            ) from None


def _unnamed(folder: pathlib.Path) -> int:
    """A file in this folder that has no name, open for reading and writing."""
    with contextlib.suppress(OSError, AttributeError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # a file system without O_TMPFILE
    fd, name = tempfile.mkstemp(prefix=".jaxtrain-state-", dir=folder)
    os.unlink(name)
    return fd


def _goes_direct(fd: int) -> bool:
    """Turns O_DIRECT on for a file, if its file system can; whether it can."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if os.fstat(fd).st_size:
            os.preadv(fd, [empty_buffer(ALIGNMENT).data], 0)
    except (OSError, AttributeError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True
