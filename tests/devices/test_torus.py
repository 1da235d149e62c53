"""Where a reduce-scatter over TPUs needs two steps, by the coordinates of its chips."""

import itertools
import math
import types

import pytest

from jaxtrain.devices.torus import scatter_levels


def chips(sides):
    """Chips of a slice in row-major order, in three coordinates."""
    full = (*sides, 1) if len(sides) == 2 else sides
    return [types.SimpleNamespace(coords=c) for c in itertools.product(*map(range, full))]


@pytest.mark.parametrize(
    "sides, inner",
    [
        *[((4, 4, 4), 4), ((8, 8, 8), 8), ((4, 4, 8), 8), ((2, 2, 2), 2), ((6, 6, 6), 6)],
        *[((16, 16), 16), ((4, 4), 4)],
        *[((2, 2), 0), ((2, 4), 0), ((8, 16), 0), ((4, 1), 0)],
    ],
)
def test_a_whole_slice_has_two_steps(sides, inner):
    """As libtpu was seen to need them."""
    devices = chips(sides)
    assert scatter_levels(devices, math.prod(sides)) == inner


def test_a_part_of_a_slice_has_one():
    devices = chips((4, 4, 4))
    assert scatter_levels(devices[:32], 64) == scatter_levels(devices[::2], 64) == 0


def test_an_order_without_lines_has_one():
    """No groups of consecutive chips are lines of the torus: the first chips turn a corner."""
    devices = chips((4, 4, 4))
    devices[1], devices[4] = devices[4], devices[1]
    assert scatter_levels(devices, 64) == 0
