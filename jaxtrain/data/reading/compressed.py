"""Files as streams of bytes, which are decompressed if they are gzip, bzip2, zstd or xz.

The first bytes of a file decide, not its name: a compressed file that lost its suffix is
decompressed, and a file with a suffix that was decompressed on its way is read as it is. A file may
be several compressed streams one after the other, as parallel compressors and `cat` make them. The
readers of the standard library, and of fsspec, which uses them, take a damaged second stream of
bzip2 or xz for the end of the file; here it is an error. No file is ever in memory entirely.
"""

import bz2
import contextlib
import io
import lzma
import os
import pathlib
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from jaxtrain.config import addresses
from jaxtrain.config.groups.formats import COMPRESSIONS
from jaxtrain.data.reading.bad_records import DamagedFile
from jaxtrain.data.stores.ranges import PART, StoreStream

BLOCK = 1 << 20  # bytes read, and at most decompressed, at a time
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    # a skippable frame goes before, as pzstd writes it
    **{bytes([0x50 + n]) + b"\x2a\x4d\x18": "zstd" for n in range(16)},
    b"\xfd7zXZ\x00": "xz",
    # The level, then the first block, or the end of an empty file.
    **{
        f"BZh{level}".encode() + block: "bzip2"
        for level in range(1, 10)
        for block in (b"1AY&SY", b"\x17rE8P\x90")
    },
}
HEAD = 512  # bytes by which a kind of file is recognized
# kind of archive → where its mark stands, and the mark
ARCHIVES = {"a tar archive": (257, b"ustar"), "a zip archive": (0, b"PK\x03\x04")}


def open_input(path: str, ahead: int = PART) -> BinaryIO:
    """A file of a source, open for reading and seeking, without a buffer: all readers but those
    that take a path (`plain_file`) open files here. ahead: as in StoreStream"""
    if addresses.is_address(path):
        return StoreStream(path, ahead)  # type: ignore[return-value]
    return open(path, "rb", buffering=0)  # type: ignore[return-value]


class Reader(io.BufferedReader):
    """The bytes of a file, decompressed; read it by blocks or by lines. Of a file that is not
    compressed, the bytes from `first` to `last` (0: the end).

    Raises DamagedFile where compressed content is damaged or cut short, after the text before that
    place was read, and for archives of files.
    """

    def __init__(self, path: str, first: int = 0, last: int = 0):
        self._source = _Bytes(path, first, last)
        self._taken = 0
        super().__init__(self._source, BLOCK)
        head = self.peek(HEAD)[:HEAD]
        for archive, (place, mark) in ARCHIVES.items():
            if not first and head.startswith(mark, place):
                self.close()
                raise DamagedFile(
                    path,
                    f"{archive}, not a text",
                    "unpack it into a folder, or let its name begin with _ or .",
                )

    def taken(self) -> int:
        """Bytes of the file on the disk that were read since the last call."""
        taken, self._taken = self._source.position - self._taken, self._source.position
        return taken


def is_compressed(path: str) -> bool:
    """True if a file begins as compressed files do."""
    with open_input(path, ahead=0) as file:
        return bool(_compression(path, file.read(HEAD)))


@contextlib.contextmanager
def plain_file(path: str, scratch: pathlib.Path) -> Iterator[pathlib.Path]:
    """The path of a file's content, for libraries that read by a path: the file itself, or one in
    the folder `scratch` while the context lasts, if it is compressed or lies in a store."""
    if not addresses.is_address(path) and not is_compressed(path):
        yield pathlib.Path(path)
        return
    with tempfile.NamedTemporaryFile(dir=scratch) as plain:
        unpack(path, pathlib.Path(plain.name))
        yield pathlib.Path(plain.name)


def unpack(path: str, target: pathlib.Path) -> None:
    """Writes the decompressed content of a file to `target`."""
    with Reader(path) as stream, target.open("wb") as file:
        shutil.copyfileobj(stream, file, BLOCK)


class _Gzip:
    """The decompressor of one gzip member, with the attributes of those of bz2 and lzma."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self.needs_input, self.eof, self.unused_data = True, False, b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        output = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        self.needs_input = len(output) < max_length and not self._member.unconsumed_tail
        self.eof, self.unused_data = self._member.eof, self._member.unused_data
        return output


# A decompressor of one stream: `eof` says that it has ended, `unused_data` what stands behind it.
DECOMPRESSORS: dict[str, Callable[[], _Gzip | bz2.BZ2Decompressor | lzma.LZMADecompressor]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
}


class _Bytes(io.RawIOBase):
    """The decompressed bytes of a file, and the position in the file itself."""

    _file: Any = None  # `close` also runs where the file could not be opened

    def __init__(self, path: str, first: int, last: int):
        self._path, self._file = path, open_input(path)
        head = self._file.read(HEAD)
        self._file.seek(first)
        self._left = last - first if last else sys.maxsize  # bytes, if it is not compressed
        self._kind = _compression(path, head)
        self.position = self._delivered = 0
        self._stream: Any = None
        if self._kind == "zstd":
            import pyarrow  # half a second, and needed by few: not at the top

            self._stream = pyarrow.CompressedInputStream(
                pyarrow.PythonFile(self._file, "r"), "zstd"
            )
        elif self._kind:
            self._stream = DECOMPRESSORS[self._kind]()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._kind:
            count = self._file.readinto(memoryview(buffer)[: self._left]) or 0
            self._left -= count
            self.position += count
            return count
        try:
            data = (
                self._stream.read(len(buffer))
                if self._kind == "zstd"
                else self._members(len(buffer))
            )
            self.position = self._file.tell()
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # an error of the disk, not of the content
            reason = (str(error).strip().splitlines() or ["it ends too early"])[0]
            if "requires too much memory" in reason:  # zstd does not take such a window unasked
                raise DamagedFile(
                    self._path,
                    "its zstd content needs more than 128 MiB of memory to be decompressed (a "
                    "window of --long=28 or more)",
                    "compress it again with --long=27 or less",
                ) from error
            raise DamagedFile(
                self._path,
                f"damaged or cut short: its {self._kind} content ends after "
                f"{self._delivered:,} bytes of text, "
                f"at byte {self._file.tell():,} of {self._file.seek(0, os.SEEK_END):,} "
                f"({reason})",
                "get the file again",
            ) from error
        buffer[: len(data)] = data
        self._delivered += len(data)
        return len(data)

    def _members(self, most: int) -> bytes:
        """Up to `most` bytes of the compressed streams, one after the other; b"" at the end of the
        last one."""
        while True:
            if self._stream.eof:
                rest = self._stream.unused_data or self._file.read(BLOCK)
                while rest and not rest.strip(b"\0"):  # padding, as tapes have it
                    rest = self._file.read(BLOCK)
                if not rest:
                    return b""
                self._stream, rest = DECOMPRESSORS[str(self._kind)](), rest.lstrip(b"\0")
            elif self._stream.needs_input:
                rest = self._file.read(BLOCK)
                if not rest:
                    raise EOFError("it ends too early")
            else:
                rest = b""
            if data := self._stream.decompress(rest, most):
                return data

    def close(self) -> None:
        if self._file:
            self._file.close()
        super().close()


def _compression(path: str, head: bytes) -> str | None:
    """The compression of a file that begins with `head`, or None.

    Raises DamagedFile for content that is neither text nor what the suffix of its name promises.
    """
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return kind
    claimed = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
    if head and any(kind == claimed and magic.startswith(head) for magic, kind in MAGIC.items()):
        raise DamagedFile(
            path,
            f"cut short: it ends within the first bytes of a {claimed} file",
            "get the file again",
        )
    if claimed and b"\0" in head:
        raise DamagedFile(
            path,
            f"does not begin as a {claimed} file does, and is no text",
            "get it again, or rename it",
        )
    return None
