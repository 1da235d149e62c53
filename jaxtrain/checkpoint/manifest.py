"""The manifest of a step: its files with sizes and checksums, written last, so that a step without
one is not whole. No jax.

    200/manifest.json
      {"version": 1,
       "files": {"meta/metadata": {"size": 2154, "crc32": 873645211, "pieces": false},
                 "state/ocdbt.process_0/d/0471…": {"size": 107731, "crc32": 1127, "pieces": true},
                 …},
       "crc32": 99201}

Every byte of a step has a checksum in one place. Pieces of arrays have theirs behind them
(database.py), and whoever restores an array compares them as it reads. All other bytes are few, and
whoever chooses a step compares them with the manifest: whole files, and of a file with pieces what
lies between these (the database's tree, and what of it is no longer in use). The manifest's last
entry is the checksum of the manifest without it.
"""

import concurrent.futures
import dataclasses
import json
import zlib
from collections.abc import Iterator, Sequence

from etils import epath

from jaxtrain.checkpoint import database
from jaxtrain.checkpoint.database import STATE, Value

FILE = "manifest.json"
FORMAT = 1
READERS = 16  # files that are read at a time, which a remote store answers slowly
READ_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file's bytes, and the CRC-32 (zlib's) of those that are in no piece. pieces: whether some
    are."""

    size: int
    crc32: int
    pieces: bool


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The files of a step by their paths in its folder."""

    files: dict[str, StoredFile]

    def damage(self, step: epath.Path) -> str:
        """What is wrong with files that have no pieces, and with the sizes of all, in words; "" if
        nothing is."""
        return next(self.damages(step), "")

    def damages(self, step: epath.Path) -> Iterator[str]:
        """All that is wrong with files that have no pieces, and with the sizes of all, file by
        file."""
        yield from filter(
            None, _at_once(lambda path: _damage(step, path, self.files[path]), list(self.files))
        )

    def damage_beside(self, step: epath.Path, values: Sequence[Value]) -> str:
        """What is wrong beside the pieces in the files that have some, in words; "" if nothing is.
        values: of the step's database."""
        return next(self.damages_beside(step, values), "")

    def damages_beside(self, step: epath.Path, values: Sequence[Value]) -> Iterator[str]:
        """All that is wrong beside the pieces, file by file."""
        pieces = _pieces(values)

        def damage(path: str) -> str:
            try:
                found = _checksum(step / path, pieces.get(path, []))
            except OSError as error:
                return _unreadable(path, error)
            return "" if found == self.files[path].crc32 else f"{path} is damaged"

        yield from filter(
            None, _at_once(damage, [path for path, file in self.files.items() if file.pieces])
        )


class ManifestError(Exception):
    """What is wrong with a manifest, in words."""


def write(step: epath.Path) -> None:
    """Writes the manifest of a step, of which everything else is written. OSError or DatabaseError
    where that cannot be read."""
    pieces = _pieces(database.read(step / STATE))

    def look(path: str) -> StoredFile:
        size = (step / path).stat().length
        return StoredFile(size, _checksum(step / path, pieces.get(path, [])), path in pieces)

    paths = sorted(path for path in _files(step) if path != FILE)
    (step / FILE).write_bytes(
        _encode(Manifest(dict(zip(paths, _at_once(look, paths), strict=True))))
    )


def read(step: epath.Path) -> Manifest | None:
    """A step's manifest; None if it has none. ManifestError for one that is damaged or of a later
    format."""
    try:
        content = (step / FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ManifestError(_unreadable(FILE, error)) from None
    try:
        values = json.loads(content)
        if values["version"] == FORMAT:
            manifest = Manifest(
                {path: StoredFile(**file) for path, file in values["files"].items()}
            )
            if content == _encode(manifest):
                return manifest
        later = values["crc32"] == _crc32_without(values) and values["version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        later = None
    raise ManifestError(
        f"{FILE} has the format {later}, which this jaxtrain does not know"
        if later
        else f"{FILE} is damaged"
    )


def _encode(manifest: Manifest) -> bytes:
    values = {
        "version": FORMAT,
        "files": {path: dataclasses.asdict(file) for path, file in manifest.files.items()},
    }
    return json.dumps(values | {"crc32": _crc32_without(values)}).encode()


def _crc32_without(values: dict) -> int:
    return zlib.crc32(
        json.dumps({key: value for key, value in values.items() if key != "crc32"}).encode()
    )


def _at_once(ask, paths: Sequence[str]) -> Iterator:
    """The answers for some paths, in their order."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        yield from readers.map(ask, paths)


def _damage(step: epath.Path, path: str, file: StoredFile) -> str:
    try:
        size = (step / path).stat().length
        if size != file.size:
            return f"{path} has {size:,} bytes of {file.size:,}"
        return (
            "" if file.pieces or _checksum(step / path, []) == file.crc32 else f"{path} is damaged"
        )
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return _unreadable(path, error)


def _unreadable(path: str, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}"


def _checksum(file: epath.Path, without: Sequence[tuple[int, int]]) -> int:
    """The CRC-32 of a file's bytes without these ranges, which are in order and may touch."""
    crc32, at = 0, 0
    with file.open("rb") as stream:
        for start, stop in [*without, (None, None)]:
            if start is None or start > at:
                stream.seek(at)
                while part := stream.read(
                    READ_BYTES if start is None else min(READ_BYTES, start - at)
                ):
                    crc32, at = zlib.crc32(part, crc32), at + len(part)
            at = max(at, stop or 0)
    return crc32


def _pieces(values: Sequence[Value]) -> dict[str, list[tuple[int, int]]]:
    """Path in the step's folder → where pieces lie in it, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for value in values:
        if value.is_checked_piece:
            found.setdefault(f"{STATE}/{value.file}", []).append((value.start, value.stop))
    return {path: sorted(ranges) for path, ranges in found.items()}


def _files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    """The paths of all files below a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name
