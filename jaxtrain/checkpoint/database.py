"""What a state's database holds: array names, shapes, and where in which file each value lies. No
array is read. No jax.

A state is an OCDBT database: a manifest names a tree of keys, whose leaves say in which file, where
and how long each value is. Each array has a description, and its numbers in pieces:

    params.embed.table/zarr.json        shape, type, codecs; .zarray in zarr 2, which was written
                                        before
    params.embed.table/c/0/1            a piece with its checksum; 0.1 in zarr 2, without

What is missing or cut off is known from the tree and the sizes of files. OCDBT has checksums of its
manifest and of its tree, and compares them whenever it reads these.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorstore as ts
from etils import epath

from jaxtrain.checkpoint.stores import kvstore, no_damage

STATE = "state"
_DESCRIPTION = re.compile(r"(.*)/(?:zarr\.json|\.zarray)")
_CHECKED_PIECE = re.compile(r".*/c(?:/\d+)*")


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the database: its key, and its bytes, if they stand in the tree itself, or else
    file[start:stop], where they are."""

    key: str
    inline: bytes | None
    file: str = ""
    start: int = 0
    stop: int = 0

    @property
    def is_checked_piece(self) -> bool:
        """Whether it is numbers with their checksum behind them."""
        return self.inline is None and _CHECKED_PIECE.fullmatch(self.key) is not None


class DatabaseError(Exception):
    """What is wrong with a state, in words that follow "its state"."""


def read(folder: epath.Path) -> list[Value]:
    """All values of the newest version of the database in a state's folder.

    Raises DatabaseError where something of it is missing, cut off or damaged. The numbers are not
    looked at.
    """
    sizes: dict[str, int] = {}
    values = []
    try:
        for value in _values(folder):
            values.append(value)
            if value.inline is None:
                if value.file not in sizes:
                    sizes[value.file] = (folder / value.file).stat().length
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
    return values


def shapes(values: Sequence[Value]) -> dict[str, tuple[int, ...]]:
    """Array → shape; names as in memory, "params/embed/table". DatabaseError for a description that
    is none."""
    found = {}
    for value in values:
        if value.inline is not None and (match := _DESCRIPTION.fullmatch(value.key)):
            try:
                found[match[1].replace(".", "/")] = tuple(json.loads(value.inline)["shape"])
            except (ValueError, KeyError, TypeError):
                raise DatabaseError(f"has an array {match[1]} without a shape") from None
    return found


def _values(folder: epath.Path) -> Iterator[Value]:
    """All values. OSError or ValueError where the tree cannot be read."""
    # FileNotFoundError: TensorStore takes a database without one for an empty one
    (folder / "manifest.ocdbt").stat()
    base = ts.KvStore.open(kvstore(folder)).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    nodes = [("", root["location"])] if "location" in root else []
    while nodes:
        prefix, location = nodes.pop()
        file, _, stop = _place(location)
        if (folder / file).stat().length < stop:
            raise ValueError(f"{file} is cut off")
        node: dict[str, Any] = ts.ocdbt.dump(base, node=location).result()
        for entry in node["entries"]:
            if "location" in entry:
                nodes.append((prefix + entry["subtree_common_prefix"].decode(), entry["location"]))
            elif "inline_value" in entry:
                yield Value(prefix + entry["key"].decode(), entry["inline_value"])
            else:
                yield Value(prefix + entry["key"].decode(), None, *_place(entry["indirect_value"]))


def _place(location: str) -> tuple[str, int, int]:
    """(file, start, stop) of "value:ocdbt.process_0/:d/0123:512:16", where the last two are offset
    and length."""
    path, offset, length = location.partition(":")[2].rsplit(":", 2)
    base, _, file = path.partition(":")
    return base + file, int(offset), int(offset) + int(length)
