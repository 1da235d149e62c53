"""Reduce-scatters on the torus of a TPU slice: where they need two steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def scatter_levels(devices: Sequence[Any], slice_size: int) -> int:
    """The number of consecutive devices inside whose groups a reduce-scatter over TPUs has its
    second step, those along one side of their slice; the first step is between these groups. 0: one
    step serves.

    libtpu turns a reduce-scatter over all chips of a slice into an all-reduce and a slice, which
    sends twice as much, if the slice has three sides or two equal ones longer than 2 (0.0.50.1: v5p
    of 2x2x2 to 8x8x8, v5e and v6e of 4x4 to 16x16; not 2x4 and 8x16). Over the chips along some of
    the sides it stays a reduce-scatter.

    devices: in the order of the shards
    slice_size: the number of chips of a slice
    """
    coordinates = np.array([device.coords for device in devices])
    lengths = [len(set(c)) for c in coordinates.T.tolist()]
    sides = [length for length in lengths if length > 1]
    is_cut = len(sides) == 3 or (len(sides) == 2 and sides[0] == sides[1] > 2)
    if len(devices) != slice_size or int(np.prod(sides)) != slice_size or not is_cut:
        return 0

    def are_lines(side: int) -> bool:
        """True if each group of consecutive devices is a line of the torus along this side."""
        groups = coordinates.reshape(-1, lengths[side], len(lengths))
        changes = (groups != groups[:, :1]).any((0, 1))
        return bool(changes[side]) and int(changes.sum()) == 1

    return next((n for side, n in enumerate(lengths) if n > 1 and are_lines(side)), 0)
