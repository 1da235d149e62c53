"""The files of a step: the manifest with their sizes and checksums, and the database of arrays that
some of them are. No array is read. No jax.

    200/manifest.json
      {"version": 1,
       "files": {"meta/metadata": {"size": 2154, "crc32": 873645211, "pieces": false},
                 "state/ocdbt.process_0/d/0471…": {"size": 107731, "crc32": 1127, "pieces": true},
                 …},
       "crc32": 99201}

The manifest is written last, so a step without one is not complete. Its last entry is the checksum
of all its other entries.

The state is an OCDBT database. The database's own manifest names a tree of keys, whose leaves have
the file, offset and length of each value. An array has a description, and its numbers in pieces:

    params.embed.table/zarr.json        shape, type, codecs
    params.embed.table/c/0/1            a piece with its checksum

Every byte of a step has a checksum in one place. A piece of an array has its checksum at its end,
which is compared when the array is read. The other bytes are few, and are compared with the
manifest when a step is chosen: entire files, and in a file with pieces the bytes between them (the
database's tree, and parts of it that are no longer in use).

Begin with `write` and `damages` for the manifest, and with `read_database` for the database.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorstore as ts
from etils import epath

from jaxtrain.checkpoint.stores import (
    as_os_error,
    files_below,
    kvstore,
    no_damage,
    read_within,
    remove,
    scheme_of,
    size_within,
)
from jaxtrain.run.files import MOST_BYTES, TRIAL_BYTES, parse_json

FILE, STATE, META = "manifest.json", "state", "meta"
FORMAT = 1
READERS = 16  # files that are read at a time, which a remote store answers slowly
READ_BYTES = 2**24
_DESCRIPTION = re.compile(r"(.*)/zarr\.json")
_PIECE = re.compile(r".*/c(?:/\d+)*")


class ManifestError(Exception):
    """The damage of a manifest, in words."""


class DatabaseError(Exception):
    """The damage of a state's database, in words that follow "its state"."""


# --- the manifest ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file's bytes, and the CRC-32 (zlib's) of those that are in no piece. pieces: whether some
    are."""

    size: int
    crc32: int
    pieces: bool


Files = Mapping[str, StoredFile]  # by path in the step's folder


def write(step: epath.Path) -> None:
    """Writes the manifest of a step, of which everything else is written. Raises OSError or
    DatabaseError where that cannot be read, or where an array lacks pieces: one of the processes
    has not written, or elsewhere."""
    # The bytes of pieces are left out: to read a large model back would take as long as the save,
    # and TensorStore checks them whenever it reads them.
    pieces = _pieces(read_database(step / STATE).values)

    def look(path: str) -> StoredFile:
        size = size_within(step, path)
        return StoredFile(size, _checksum(step / path, pieces.get(path, [])), path in pieces)

    # in an order that does not depend on the file system
    paths = sorted(path for path in files_below(step) if path != FILE)
    (step / FILE).write_bytes(_encode(dict(zip(paths, _at_once(look, paths), strict=True))))


def try_step(folder: epath.Path) -> None:
    """Writes a step without arrays at `folder`, a free name, renames it in a file system, and
    removes it: all that a save asks of a file system or a store. Raises the error of one that
    cannot do that, TensorStore's as OSError."""
    renamed, in_store = folder.with_name(f"{folder.name}.renamed"), bool(scheme_of(folder))
    try:
        if not in_store:  # which would make a bucket whose name is misspelt
            (folder / META).mkdir(parents=True)
        (folder / META / "metadata").write_text("{}")
        database = {"driver": "ocdbt", "base": kvstore(folder / STATE)}
        ts.KvStore.open(database).result().write("trial", bytes(TRIAL_BYTES)).result()
        write(folder)
        if not in_store:
            folder.rename(renamed)
    except ValueError as error:
        raise as_os_error(error) from error
    finally:
        for left in (folder, renamed):
            remove(left)


def read(step: epath.Path) -> Files:
    """The files of a step by its manifest. Raises ManifestError if it has none, or one that is
    damaged or of a later format."""
    try:
        content = read_within(step, FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"it has no {FILE}") from None
    except OSError as error:
        raise ManifestError(_unreadable(FILE, error)) from None
    try:
        values = parse_json(content)
        if values["version"] == FORMAT:
            files = {path: StoredFile(**file) for path, file in values["files"].items()}
            # Byte by byte: a manifest that reads well may still have keys twice or numbers in
            # another form. Unprintable paths would break the one-line errors that name them.
            if content == _encode(files) and all(
                path.isprintable() and type(file.size) is type(file.crc32) is int
                for path, file in files.items()
            ):
                return files
        later = values["crc32"] == _crc32_without(values) and values["version"] != FORMAT
    except (ValueError, KeyError, TypeError, AttributeError):
        later = False
    raise ManifestError(
        f"{FILE} has the format {values['version']!s:.20}, which this jaxtrain does not know"
        if later
        else f"{FILE} is damaged"
    )


def damages(step: epath.Path, files: Files) -> Iterator[str]:
    """The damage of files without pieces, and wrong sizes of all, file by file, in words."""

    def damage(path: str) -> str:
        file = files[path]
        try:
            size = size_within(step, path)
            if size != file.size:
                return f"{path} has {size:,} bytes of {file.size:,}"
            intact = file.pieces or _checksum(step / path, []) == file.crc32
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return _unreadable(path, error)
        return "" if intact else f"{path} is damaged"

    yield from filter(None, _at_once(damage, list(files)))


def damages_between_pieces(step: epath.Path, files: Files, database: "Database") -> Iterator[str]:
    """The damage between the pieces of files that have some, file by file, in words."""
    pieces = _pieces(database.values)

    def damage(path: str) -> str:
        try:
            # a wrong size is told by `damages`
            intact = (
                size_within(step, path) != files[path].size
                or _checksum(step / path, pieces.get(path, [])) == files[path].crc32
            )
        except OSError as error:
            return _unreadable(path, error)
        return "" if intact else f"{path} is damaged"

    yield from filter(None, _at_once(damage, [path for path in files if files[path].pieces]))


def _encode(files: Files) -> bytes:
    values = {
        "version": FORMAT,
        "files": {path: dataclasses.asdict(file) for path, file in files.items()},
    }
    return json.dumps(values | {"crc32": _crc32_without(values)}).encode()


def _crc32_without(values: dict) -> int:
    return zlib.crc32(
        json.dumps({key: value for key, value in values.items() if key != "crc32"}).encode()
    )


def _at_once(ask: Callable[[str], Any], paths: Sequence[str]) -> Iterator:
    """The answers for some paths, in their order."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        yield from readers.map(ask, paths)


def _unreadable(path: str, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}"


def _checksum(file: epath.Path, without: Sequence[tuple[int, int]]) -> int:
    """The CRC-32 of a file's bytes without these ranges, which are in order and may touch."""
    crc32 = 0
    starts, stops = [start for start, _ in without], [stop for _, stop in without]
    # The ranges between: from 0 or a piece's end to the next piece's begin or the file's end.
    with file.open("rb") as stream:
        for at, end in zip([0, *stops], [*starts, sys.maxsize], strict=True):
            stream.seek(at)
            while at < end and (part := stream.read(min(READ_BYTES, end - at))):
                crc32, at = zlib.crc32(part, crc32), at + len(part)
    return crc32


def _pieces(values: Sequence["DatabaseValue"]) -> dict[str, list[tuple[int, int]]]:
    """Path in the step's folder → the ranges of the pieces in it, in order."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for value in values:
        if value.inline is None and _PIECE.fullmatch(value.key):
            ranges.setdefault(f"{STATE}/{value.file}", []).append((value.start, value.stop))
    return {path: sorted(of_file) for path, of_file in ranges.items()}


# --- the database ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DatabaseValue:
    """A value of the database: its key, and its bytes if they stand in the tree itself, or else
    file[start:stop], where they are."""

    key: str
    inline: bytes | None
    file: str = ""
    start: int = 0
    stop: int = 0


@dataclasses.dataclass(frozen=True)
class Database:
    """The newest version of a state's database. shapes: array → shape, by the names in memory,
    "params/embed/table"."""

    values: list[DatabaseValue]
    shapes: Mapping[str, tuple[int, ...]]


def read_database(folder: epath.Path) -> Database:
    """The database in a state's folder.

    Raises DatabaseError if something of it is missing, cut off or damaged, or if an array lacks
    pieces. The numbers are not looked at.
    """
    sizes: dict[str, int] = {}
    values = []
    try:
        for value in _values(folder):
            values.append(value)
            # A file is asked for its size once, however many pieces lie in it: in a store each
            # question is a request.
            if value.inline is None:
                if value.file not in sizes:
                    sizes[value.file] = size_within(folder.parent, f"{folder.name}/{value.file}")
                if sizes[value.file] < value.stop:
                    raise DatabaseError(
                        f"is cut off: {STATE}/{value.file} has {sizes[value.file]:,} bytes of "
                        f"at least {value.stop:,}"
                    )
    except FileNotFoundError as error:
        # stores' errors name no file
        missing = (
            epath.Path(error.filename).relative_to(folder) if error.filename else "manifest.ocdbt"
        )
        raise DatabaseError(f"has no {missing}") from None
    except OSError as error:
        raise DatabaseError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # TensorStore's, for whatever it cannot make sense of
        raise DatabaseError(no_damage(error) or "is damaged") from None
    return Database(values, shapes_of(values))


def shapes_of(values: Sequence[DatabaseValue]) -> dict[str, tuple[int, ...]]:
    """Array → shape, by the names in memory, "params/embed/table". Raises DatabaseError for a
    description without a shape, and for an array that lacks pieces: zeros are stored, too."""
    sizes = {v.key: v.stop - v.start if v.inline is None else len(v.inline) for v in values}
    by_name = {}
    for value in values:
        if value.inline is not None and (match := _DESCRIPTION.fullmatch(value.key)):
            try:
                description = parse_json(value.inline)
                shape = by_name[match[1].replace(".", "/")] = tuple(description["shape"])
                piece = description["chunk_grid"]["configuration"]["chunk_shape"]
                grid = [-(-size // part) for size, part in zip(shape, piece, strict=True)]
            except (ValueError, KeyError, TypeError, ZeroDivisionError):
                raise DatabaseError(f"has an array {match[1]} without a shape") from None
            # Bounds of a piece's stored bytes: a number has 1 to 16, and the checksum 4 more. The
            # number of pieces is compared first, since a damaged shape may ask for 10¹⁵ of them.
            least, most = math.prod(piece), 16 * math.prod(piece) + 16
            if math.prod(grid) > len(sizes) or not all(
                least < sizes.get("/".join([f"{match[1]}/c", *map(str, index)]), 0) <= most
                for index in itertools.product(*map(range, grid))
            ):
                raise DatabaseError(f"lacks pieces of {match[1]}")
    return by_name


def _values(folder: epath.Path) -> Iterator[DatabaseValue]:
    """All values. Raises OSError or ValueError where the tree cannot be read."""
    # FileNotFoundError: TensorStore takes a database without one for an empty one
    # TensorStore reads it entirely, and ends the process where memory does not suffice
    read_within(folder.parent, f"{folder.name}/manifest.ocdbt")
    base = ts.KvStore.open(kvstore(folder)).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    nodes = [("", root["location"])] if "location" in root else []
    while nodes:
        prefix, location = nodes.pop()
        # For the same reason a node's size is checked before TensorStore reads it.
        file, start, stop = _place(location)
        if stop > min(size_within(folder.parent, f"{folder.name}/{file}"), start + MOST_BYTES):
            raise ValueError(f"{file} is cut off")
        node: dict[str, Any] = ts.ocdbt.dump(base, node=location).result()
        for entry in node["entries"]:
            if "location" in entry:
                nodes.append((prefix + entry["subtree_common_prefix"].decode(), entry["location"]))
            elif "inline_value" in entry:
                yield DatabaseValue(prefix + entry["key"].decode(), entry["inline_value"])
            else:
                yield DatabaseValue(
                    prefix + entry["key"].decode(), None, *_place(entry["indirect_value"])
                )


def _place(location: str) -> tuple[str, int, int]:
    """(file, start, stop) of "value:ocdbt.process_0/:d/0123:512:16", where the last two are offset
    and length."""
    path, offset, length = location.partition(":")[2].rsplit(":", 2)
    base, _, file = path.partition(":")
    return base + file, int(offset), int(offset) + int(length)
