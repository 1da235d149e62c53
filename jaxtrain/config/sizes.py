"""Sizes and shards of arrays that follow from settings: the code that makes the arrays (models/,
parallel/) and the planner, which counts them, have to agree. Standard library only."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TILE = 128  # matrix units want the vocabulary in multiples of this
SELECTIVE = "selective"  # the mode of remat that saves products, or the values of `pipeline.save`
MX_BLOCK = 32  # numbers that share a scale in products of MXFP8
OUTER_BLOCK = 1024  # numbers that share a scale where replicas exchange int8
# Fraction of a GPU's memory that arrays may take. Plans count with it, and every start has jax's
# allocator take as much and XLA compile for as much (devices/startup.py); the rest is for the
# driver, NCCL and kernels' code.
GPU_MEMORY = 0.94
# variables with the fraction of a GPU's memory that jax's allocator takes; jax refuses both at once
MEMORY_FRACTION = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


def gpu_memory(environment: Mapping[str, str]) -> float:
    """The fraction of a GPU's memory that arrays may take: what the user has set for jax's
    allocator, else GPU_MEMORY. More than 1 is memory of the host, which does not count."""
    texts = filter(None, map(environment.get, MEMORY_FRACTION))
    try:
        fraction = float(next(texts, GPU_MEMORY))
    except ValueError:  # jax says so where it starts
        return GPU_MEMORY
    return min(fraction, 1.0) if fraction > 0 else GPU_MEMORY


class Remat(NamedTuple):
    """The value of `pipeline.remat`: the lowest `layers` layers of each unit are recomputed as
    `mode` says, and the others save all that their backward reads. None: all layers are."""

    mode: str
    layers: int | None = None

    def recomputed(self, layers: int) -> int:
        """The number of recomputed layers of a unit of so many."""
        if self.mode == "none":
            return 0
        return layers if self.layers is None else min(self.layers, layers)


@functools.lru_cache(256)
def remat_of(text: str) -> Remat:
    """The record of a checked `pipeline.remat`, such as full and full:2."""
    mode, colon, layers = text.partition(":")
    if not colon:
        return Remat(mode)
    return Remat(mode, int(layers)) if int(layers) else Remat("none")


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


# rows of memory for which leaving out empty ones is not worth a loop
FEW_ROWS = 4096


def is_large(rows: int) -> bool:
    """True if it matters whether memory for so many rows is worked on where it is empty."""
    return rows >= FEW_ROWS


def exceeds_mean(rows: int, mean: int) -> bool:
    """True if work on single rows of experts leaves out empty ones
    (parallel/experts/filled_rows.py), where there is memory for `rows`. mean: the mean number of
    rows; 0 if all are worked on."""
    return 0 < mean < rows and is_large(rows)


def capacity_of(tokens: int, choices: int, experts: int, factor: float) -> int:
    """An expert's positions for a sequence of so many tokens: `factor` times its share of the
    choices, at most one for each token."""
    return min(tokens, math.ceil(factor * tokens * choices / experts))


# the axes of a stage's devices inside a replica, over which its parameters may have copies
SHARD_AXES = ("data", "context", "expert")


def scattered(
    shape: Sequence[int],
    unsplit: Sequence[bool],
    inside: Sequence[str],
    over_stage: bool,
    sizes: Mapping[str, int],
) -> tuple[tuple[str, ...], int]:
    """(axes, dimension): where ZeRO scatters the sum of a parameter's gradient and its optimizer's
    state; no axes if no dimension divides.

    unsplit: whether no axis splits a dimension; inside: axes over which devices of one stage hold
    copies; over_stage: all stages hold the parameter, and may share its state; sizes: of the mesh's
    axes

    Of the axes inside a stage the first ones are used that divide a dimension, and `stage` with
    them where that divides as well.
    """
    inside = [name for name in inside if sizes[name] > 1]
    stage_options = [("stage",), ()] if over_stage and sizes["stage"] > 1 else [()]
    for count in range(len(inside), -1, -1):
        for stage in stage_options:
            axes = (*inside[:count], *stage)
            devices = math.prod(sizes[axis] for axis in axes)
            for dim, size in enumerate(shape):
                if axes and unsplit[dim] and size % devices == 0:
                    return axes, dim
    return (), 0
