"""The speed that is assumed of the links that a collective goes over.

    TPU  an axis of 4 chips is a ring along one dimension of the torus, with a link both ways, of
         which 0.9 is reached: 180 GB/s on v5p. Axes of 16 and 64 have two and three dimensions (360
         and 540 GB/s), one of 8 has one and a half (270), one of 2 a half. A permute to a neighbour
         goes over one link
    GPU  NVLink if all devices of the group are in one node, otherwise each GPU's network adapter

Speeds of links are in jaxtrain/planner/layer/hardware; nothing here was measured.
"""

import math
from collections.abc import Mapping

from jaxtrain.planner.layer.hardware import Hardware
from jaxtrain.planner.layer.links import PERMUTE
from jaxtrain.planner.programs.compiled_collectives import CompiledCollective

RING = 4  # chips along a dimension of the smallest torus
LEAST = 0.5  # of a ring: the link between two chips


def bytes_per_s(
    hardware: Hardware, mesh: Mapping[str, int], collective: CompiledCollective
) -> float:
    """Bytes a second that a device sends in a collective over axes of this mesh, whose last axis is
    the innermost."""
    near, far = hardware.tiers[0], hardware.tiers[-1]
    if hardware.clock_ghz:  # a TPU
        if collective.kind == PERMUTE:
            return near.bytes_per_s / 2
        return near.bytes_per_s * max(LEAST, math.log(collective.devices, RING))
    names = list(mesh)
    outermost = min((names.index(axis) for axis in collective.axes), default=len(names))
    inside = math.prod(size for name, size in mesh.items() if names.index(name) >= outermost)
    return 1e9 * (near if inside <= near.devices else far).gb_per_s
