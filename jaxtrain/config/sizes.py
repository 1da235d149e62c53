"""Sizes and shards of arrays that follow from settings: the code that makes the arrays (models/,
parallel/) and the planner, which counts them (costs/), have to agree. Standard library only."""

import math
from collections.abc import Mapping, Sequence

TILE = 128  # matrix units want the vocabulary in multiples of this
OUTER_BLOCK = 1024  # numbers that share a scale where replicas exchange int8


def padded_vocabulary(vocab_size: int, shards: int) -> int:
    """Rows of a table held in memory: divisible by the shards, and for a large vocabulary by entire
    tiles on each of them."""
    unit = shards if vocab_size < 32 * TILE else shards * TILE
    return -(-vocab_size // unit) * unit


def device_capacity(tokens: int, choices: int, experts: int, devices: int, over_mean: float) -> int:
    """Routed tokens that each of `devices` can receive, where each sends `tokens` of `choices`.

    The worst case, or `over_mean` times the mean if that is less and not 0, rounded up so that
    large buffers are cut into equal tiles.
    """
    worst = devices * tokens * min(choices, experts // devices)
    bound = math.ceil(over_mean * tokens * choices)
    step = 1 << max(bound.bit_length() - 7, 0)
    return min(worst, -(-bound // step) * step) if over_mean else worst


def capacity_of(tokens: int, choices: int, experts: int, factor: float) -> int:
    """An expert's positions for a sequence of so many tokens: `factor` times its share of the
    choices, at most one for each token."""
    return min(tokens, math.ceil(factor * tokens * choices / experts))


def scattered(
    shape: Sequence[int], unsplit: Sequence[bool], over_stage: bool, sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
    """(axes, dimension): where ZeRO scatters the sum of a parameter's gradient and its optimizer's
    state; no axes if no dimension divides.

    unsplit: whether no axis splits a dimension; over_stage: all stages hold the parameter, and may
    share its state; sizes: of the mesh's axes
    """
    for names in [("data", "stage"), ("data",), ("stage",)] if over_stage else [("data",)]:
        axes = tuple(name for name in names if sizes[name] > 1)
        devices = math.prod(sizes[axis] for axis in axes)
        for dim, size in enumerate(shape):
            if axes and unsplit[dim] and size % devices == 0:
                return axes, dim
    return (), 0
