"""Damage to a checkpoint's arrays."""

import pathlib

from etils import epath

from jaxtrain.checkpoint import database


def damage_numbers(step: pathlib.Path, piece: str) -> None:
    """Changes a byte of an array's piece, such as "params.embed.table/c/0/0": of the first whose key begins so."""
    state = step / "state"
    value = next(v for v in sorted(database.read(epath.Path(state)), key=lambda v: v.key) if v.key.startswith(piece) and v.inline is None)
    file = state / value.file
    content = bytearray(file.read_bytes())
    content[(value.start + value.stop) // 2] ^= 16
    file.write_bytes(content)
