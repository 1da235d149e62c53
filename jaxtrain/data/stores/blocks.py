"""The local cache of blocks of files in stores: two files, which all processes of a host share.

    index    a record for each slot: the file and the block in it, the time of its last use, size
             and checksum
    blocks   slot after slot, BLOCK bytes each

The number of slots is the bound: nothing is counted, so nothing counts wrongly, whoever is killed
when. A block that is needed takes the slot that was used least recently. A slot is claimed before
its block is requested, so that no other process requests it, too; it holds the block when the
record has a size, which is written last. A block is compared with its checksum when a process reads
it first, and the record is looked at again after each read.

Hosts do not see each other's memory maps, so each has a folder of its own.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
import threading
import time
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

BLOCK = 1 << 20  # bytes
# seconds after which a claim is void: its process was killed, or waits for the store
CLAIM_S = 30.0
RECORD = np.dtype(
    [("file", "<u8"), ("block", "<u8"), ("used", "<f8"), ("size", "<u4"), ("crc", "<u4")]
)


class BlockCache:
    """Blocks of files in a folder of a host.

    Args:
      folder: of all hosts; made if need be.
      most_bytes: the most that index and blocks may have together.

    Raises OSError if the folder cannot be written.
    """

    def __init__(self, folder: pathlib.Path, most_bytes: float):
        self.slots = int(most_bytes // (BLOCK + RECORD.itemsize))
        of_host = folder / socket.gethostname()
        of_host.mkdir(parents=True, exist_ok=True)
        self._index_file, self._blocks = (
            os.open(of_host / name, os.O_RDWR | os.O_CREAT, 0o644) for name in ("index", "blocks")
        )
        self._lock = threading.Lock()
        self._checked: dict[tuple[int, int], int] = {}  # slots of blocks with the right checksum
        with self._alone():
            size = self.slots * RECORD.itemsize
            # never cut short, for another process may have mapped more
            os.ftruncate(self._index_file, max(size, os.fstat(self._index_file).st_size))
            if os.fstat(self._blocks).st_size > self.slots * BLOCK:  # of a larger bound
                os.ftruncate(self._blocks, self.slots * BLOCK)
        self._index = (
            np.memmap(of_host / "index", RECORD, "r+", shape=(self.slots,))
            if self.slots
            else np.zeros(0, RECORD)
        )

    def has(self, file: int, block: int) -> bool:
        """True if a block is here, or claimed."""
        return (file, block) in self._checked or self._slot(file, block) is not None

    def read(self, file: int, block: int, begin: int, end: int) -> bytes | None:
        """Bytes [begin, end) of a block; None if it is not here."""
        slot = self._checked.get((file, block))
        if slot is None:
            slot = self._slot(file, block)
            if slot is None or not (size := int(self._index["size"][slot])):
                return None
            content = os.pread(self._blocks, size, slot * BLOCK)
            is_good = zlib.crc32(content) == self._index["crc"][slot]
            content = content[begin:end] if is_good else b""
        else:
            content = os.pread(self._blocks, end - begin, slot * BLOCK + begin)
        record = self._index[slot]
        if (record["file"], record["block"]) != (file, block) or not record["size"]:
            self._checked.pop((file, block), None)
            return None  # another block took its slot meanwhile
        if len(content) < end - begin:
            self.give_up(file, [block])  # damaged
            return None
        if len(self._checked) > self.slots:  # most are of blocks that are gone
            self._checked.clear()
        self._checked[file, block] = slot
        self._index["used"][slot] = time.time()
        return content

    def claim(self, file: int, blocks: Iterable[int]) -> list[int]:
        """Claims the blocks that the cache lacks and nobody has claimed, and returns their numbers.
        The caller requests them, and then calls `store` or `give_up`."""
        claimed = []
        with self._alone():
            for block in blocks:
                slot, now = self._slot(file, block), time.time()
                if slot is not None and (
                    self._index["size"][slot] or now - self._index["used"][slot] < CLAIM_S
                ):
                    continue
                claimed.append(block)
                if self.slots:
                    slot = int(self._index["used"].argmin()) if slot is None else slot
                    self._index[slot] = (file, block, now, 0, 0)
        return claimed

    def store(self, file: int, block: int, content: bytes | memoryview) -> None:
        """Stores a claimed block, unless its slot was taken meanwhile or the disk is full."""
        with self._alone():
            slot = self._slot(file, block)
            if slot is None:
                return
            with contextlib.suppress(OSError):
                if os.pwrite(self._blocks, content, slot * BLOCK) == len(content):
                    self._index[slot] = (file, block, time.time(), 0, zlib.crc32(content))
                    self._index["size"][slot] = len(content)

    def give_up(self, file: int, blocks: Iterable[int]) -> None:
        """Frees the slots of blocks that were claimed, or are damaged."""
        with self._alone():
            for block in blocks:
                self._checked.pop((file, block), None)
                if (slot := self._slot(file, block)) is not None:
                    self._index[slot] = 0

    def _slot(self, file: int, block: int) -> int | None:
        matches = np.flatnonzero((self._index["block"] == block) & (self._index["file"] == file))
        return int(matches[0]) if len(matches) else None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other thread or process of this host is."""
        with self._lock:
            # a file system without locks has one process here
            with contextlib.suppress(OSError):
                fcntl.flock(self._index_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._index_file, fcntl.LOCK_UN)
