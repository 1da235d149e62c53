"""Token files that tests write by hand."""

import itertools
import struct

import numpy as np


def write_pair(path, sequences, bounds=None, dtype="<u2", code=8, **header):
    """Writes a Megatron file by hand: the sequences, of which each is a document."""
    ids = [np.array(ids, dtype) for ids in sequences]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in ids))
    bounds = range(len(ids) + 1) if bounds is None else bounds
    sizes = [part.nbytes for part in ids]
    head = {"magic": b"MMIDIDX\0\0", "version": 1, "n": len(ids), "d": len(bounds)} | header
    path.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", head["magic"], head["version"], code, head["n"], head["d"])
        + np.array([len(part) for part in ids], "<i4").tobytes()
        + np.array([0, *itertools.accumulate(sizes)], "<i8")[:-1].tobytes()
        + np.array(bounds, "<i8").tobytes()
    )
    return path.with_suffix(".bin")
