"""The torus of a TPU slice: its sides, which of them are rings, and what the devices of each mesh
axis have of its links.

A slice has two or three sides. Its links join the ends of a side, which so becomes a ring, where
optical switches or the pod do: on v4, v5p and 7x if every side is a multiple of 4, on v5e and v6e a
side of 16 (Google Cloud's documentation of each chip). A collective over several sides uses the
links of all of them at once (Austin et al. 2025, How to Scale Your Model, chapter on sharding).
"""

import functools
import itertools
import math
from collections.abc import Sequence

from jaxtrain.config.rules.rules import divisors

CUBE = 4  # chips along each side of the cubes that optical switches join: v4, v5p and 7x
POD_SIDE = 16  # chips along each side of a pod: v5e and v6e


def rings(sides: Sequence[int]) -> tuple[bool, ...]:
    """For each side of a slice True if it is a ring."""
    in_cubes = all(side % CUBE == 0 for side in sides)
    return tuple(in_cubes if len(sides) == 3 else side == POD_SIDE for side in sides)


@functools.cache
def shapes(chips: int, sides: int) -> list[tuple[int, ...]]:
    """All slices of so many chips with so many sides: those with rings along all sides first, then
    the closest to a cube, its short sides first."""
    factors = itertools.product(divisors(chips), repeat=sides - 1)
    slices = [(chips // math.prod(f), *f) for f in factors if chips % math.prod(f) == 0]
    return sorted(slices, key=lambda shape: (not all(rings(shape)), sum(shape), shape))


@functools.cache
def shares(
    chips: int, sides: int, cores: int, sizes: tuple[tuple[str, int], ...]
) -> dict[str, tuple[float, float]]:
    """For each mesh axis (the bandwidth that a collective over its devices has, over that of a
    ring; the bytes of an all-to-all on the busiest link, over those that a device has and a ring's
    two links), where axes lie on a slice as jax lays them (`mesh_utils`): the innermost chooses
    first and has as many whole sides as multiply to its size; where none do, a part of each.

    A side that is no ring has half of the bandwidth. Groups that lie between each other share it.

    cores: devices of a chip, which have its links together and are laid out as one more side
    sizes: axes and the devices along each, the innermost first; what no side is left for is across
           slices
    """
    shape = shapes(max(1, chips), sides)[0]
    # of each side: chips that are free, how far apart, and links to each one's neighbours
    free = [*((n, 1, 1 + ring) for n, ring in zip(shape, rings(shape), strict=True)), (cores, 1, 0)]
    every, by_axis = range(len(free)), {}
    subsets = [some for n in every for some in itertools.combinations(every, len(free) - n)]
    for axis, size in sizes:
        parts = [(0.0, 0.0)]
        whole = (some for some in subsets if math.prod(free[at][0] for at in some) == size)
        for at in next(whole, every):
            (n, apart, ways), part = free[at], math.gcd(size, free[at][0])
            if part > 1:
                ways = min(ways, 1 + (part == n))
                parts.append((ways / 2 / apart, ways and part * apart / ways / 2))
                size, free[at] = size // part, (n // part, apart * part, min(ways, 1))
        by_axis[axis] = sum(links for links, _ in parts), max(crossing for _, crossing in parts)
    return by_axis
