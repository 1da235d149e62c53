"""Damage to a checkpoint: to an array's numbers, or of any kind to any file."""

import os
import pathlib
import random
from collections.abc import Callable

from etils import epath

from jaxtrain.checkpoint.manifest import read_database

LONG = 4000  # bytes that are overwritten together


def overwritten(file: pathlib.Path, start: int, length: int, chance: random.Random) -> None:
    """All of these bytes change, as far as there are any."""
    content = bytearray(file.read_bytes())
    for at in range(max(start, 0), min(max(start, 0) + length, len(content))):
        content[at] ^= chance.randrange(1, 256)
    file.write_bytes(content)


def flipped(file: pathlib.Path, chance: random.Random) -> None:
    overwritten(file, chance.randrange(file.stat().st_size), 1, chance)


DAMAGE: dict[str, Callable[[pathlib.Path, random.Random], None]] = {
    "one byte": flipped,
    "at the beginning": lambda file, chance: overwritten(file, 0, LONG, chance),
    "in the middle": lambda file, chance: overwritten(
        file, (file.stat().st_size - LONG) // 2, LONG, chance
    ),
    "at the end": lambda file, chance: overwritten(file, file.stat().st_size - LONG, LONG, chance),
    "cut": lambda file, chance: os.truncate(file, chance.randrange(file.stat().st_size)),
    "gone": lambda file, chance: file.unlink(),
    "empty": lambda file, chance: os.truncate(file, 0),
}


def files_of(step: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


def damage_numbers(step: pathlib.Path, piece: str) -> None:
    """Changes a byte of an array's piece, such as "params.embed.table/c/0/0": of the first whose
    key begins so."""
    state = step / "state"
    value = next(
        v
        for v in sorted(read_database(epath.Path(state)).values, key=lambda v: v.key)
        if v.key.startswith(piece) and v.inline is None
    )
    file = state / value.file
    content = bytearray(file.read_bytes())
    content[(value.start + value.stop) // 2] ^= 16
    file.write_bytes(content)
