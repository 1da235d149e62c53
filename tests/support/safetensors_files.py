"""Writes safetensors files by hand, right ones and broken ones."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
TYPES |= {"float8_e4m3fn": "F8_E4M3"}


def write(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray], **changes: Mapping[str, Any]
) -> None:
    """Writes tensors in their order. changes: tensor → fields of its description in the header, in
    place of the right ones"""
    header, position = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": TYPES.get(str(array.dtype), "I64"),
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        } | dict(changes.get(name, {}))
        position += array.nbytes
    text = json.dumps(header).encode()
    numbers = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)
