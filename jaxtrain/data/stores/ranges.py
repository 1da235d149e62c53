"""Files of stores read in place, by ranges: as an array, through the cache of blocks, and as a
stream that reads ahead."""

import functools
import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from fsspec.spec import AbstractBufferedFile

from jaxtrain.config.sources import File
from jaxtrain.data.errors import StoreError
from jaxtrain.data.preparing import cache
from jaxtrain.data.stores.blocks import BLOCK, BlockCache
from jaxtrain.data.stores.filesystem import (
    filesystem,
    given_up,
    read_range,
    version_of,
    waited_out,
)

TOGETHER = 8  # blocks of a request at most
PART = 4 << 20  # bytes that a stream requests ahead
CHECK_S = 10.0  # seconds after which a file's version is looked at again
POLL_S = 0.002  # seconds between two looks for a block that another thread or process requests
# requests that somebody waits for, and those of what is read ahead
NEEDED, AHEAD = (
    ThreadPoolExecutor(8, thread_name_prefix=f"jaxtrain-store-{name}")
    for name in ("needed", "ahead")
)


class StoreFile:
    """A file of a store, of which blocks are cached.

    Raises StoreError, from `read`, if the file has changed since it was listed.
    """

    def __init__(self, file: File, cache: BlockCache):
        self.file, self._cache = file, cache
        digest = hashlib.sha256(json.dumps(file).encode()).digest()
        self._id = int.from_bytes(digest[:8], "little") | 1  # 0 is no file
        self._checked = time.monotonic()

    def read(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end), which must be in the file."""
        blocks, parts = _blocks(begin, end), dict[int, bytes | memoryview]()
        while True:
            for block in blocks:
                if block not in parts:
                    part = self._cache.read(self._id, block, *_inside(block, begin, end))
                    parts |= {} if part is None else {block: part}
            missing = [block for block in blocks if block not in parts]
            if not missing:
                return b"".join(parts[block] for block in blocks)
            requests = self._request(missing)
            for request in requests:
                for block, content in request.result().items():
                    parts[block] = content[slice(*_inside(block, begin, end))]
            if not requests:  # another thread or process has claimed all of them
                time.sleep(POLL_S)

    def prefetch(self, begin: int, end: int, is_needed: bool) -> None:
        """Requests the blocks of a range that are missing, and does not wait for them. is_needed:
        they will be read at once; of others a failure is left to `read`."""
        blocks = [block for block in _blocks(begin, end) if not self._cache.has(self._id, block)]
        if is_needed:
            self._request(blocks)
            return
        for at in range(0, len(blocks), TOGETHER):
            AHEAD.submit(self._read_ahead, blocks[at : at + TOGETHER])

    def _read_ahead(self, blocks: Sequence[int]) -> None:
        if given_up.is_set():
            return
        for together in self._claimed(blocks):  # now, so that a claim does not wait in a queue
            self._fetch(together, is_needed=False)

    def _request(self, blocks: Sequence[int]) -> list[Future[dict[int, memoryview]]]:
        """Requests for those of some ascending blocks that nobody has claimed."""
        return [NEEDED.submit(self._fetch, together) for together in self._claimed(blocks)]

    def _claimed(self, blocks: Sequence[int]) -> list[list[int]]:
        """The blocks that this process has claimed now, of some ascending ones: a list for each
        request, whose blocks are adjacent."""
        requests: list[list[int]] = []
        for block in self._cache.claim(self._id, blocks):
            if requests and requests[-1][-1] == block - 1 and len(requests[-1]) < TOGETHER:
                requests[-1].append(block)
            else:
                requests.append([block])
        return requests

    def _fetch(self, blocks: Sequence[int], is_needed: bool = True) -> dict[int, memoryview]:
        """The content of adjacent blocks that this process has claimed."""
        begin, end = blocks[0] * BLOCK, min((blocks[-1] + 1) * BLOCK, self.file.size)
        try:
            # a view, so that its parts are no copies
            content = memoryview(read_range(self.file.path, begin, end, is_needed))
            self._check(len(content) == end - begin)
        except BaseException:
            self._cache.give_up(self._id, blocks)
            raise
        parts = {block: content[(block - blocks[0]) * BLOCK :][:BLOCK] for block in blocks}
        for block, part in parts.items():
            self._cache.store(self._id, block, part)
        return parts

    def _check(self, is_complete: bool) -> None:
        """Raises StoreError if the file is another one than that which was listed."""
        if is_complete and time.monotonic() - self._checked < CHECK_S:
            return
        address, store = self.file.path, filesystem(self.file.path)
        info = waited_out(address, lambda: store.info(address))
        is_same = (info["size"], version_of(info)) == (self.file.size, self.file.modified)
        if not (is_same and is_complete):
            raise StoreError(
                f"{address} has changed since this run began: put it back as it was, and start "
                "again"
            )
        self._checked = time.monotonic()


class StoreArray:
    """An array in a file of a store, of which slices are read.

    Args:
      file: has it, from byte `offset` on.
      count: the number of its elements.
    """

    def __init__(self, file: StoreFile, dtype: np.dtype, offset: int, count: int):
        self._file, self._offset, self.dtype, self._count = file, offset, dtype, count
        self.filename, self.nbytes = file.file.path, count * dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> np.ndarray:
        begin, end = self._bytes(*where.indices(len(self))[:2])
        return np.frombuffer(self._file.read(begin, end), self.dtype)

    def prefetch(self, first: int, last: int, is_needed: bool = True) -> None:
        """Begins to read [first:last] ahead. is_needed: it will be read at once."""
        self._file.prefetch(*self._bytes(first, min(last, len(self))), is_needed)

    def _bytes(self, first: int, last: int) -> tuple[int, int]:
        size = self.dtype.itemsize
        return self._offset + first * size, self._offset + max(first, last) * size


def block_cache(data: Any) -> BlockCache:
    """The cache of blocks that a config's `data` names. Raises CacheError."""
    root = cache.folder_of(data.cache)
    try:
        return _block_cache(root / "blocks", data.store_cache_gb * 1e9)
    except OSError as error:
        raise cache.refusal(error, root) or error from error


_block_cache = functools.cache(BlockCache)


class StoreStream(AbstractBufferedFile):  # type: ignore[misc]
    """The bytes of a file of a store, from any place on. Waits an outage out.

    Args:
      ahead: bytes that a request has beyond those that are read.
    """

    def __init__(self, address: str, ahead: int = PART):
        store = filesystem(address)
        size = waited_out(address, functools.partial(store.size, address))
        super().__init__(store, address, block_size=ahead, size=size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return read_range(self.path, start, end)


def _blocks(begin: int, end: int) -> range:
    """The numbers of the blocks that have bytes [begin, end) of a file."""
    return range(begin // BLOCK, -(-end // BLOCK))


def _inside(block: int, begin: int, end: int) -> tuple[int, int]:
    """The places in a block of those of its bytes that are in [begin, end) of the file."""
    return max(0, begin - block * BLOCK), min(BLOCK, end - block * BLOCK)
