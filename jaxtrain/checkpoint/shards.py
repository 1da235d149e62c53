"""The distinct shards of a state: which process needs which, and who gives one to whom it is lost.

A checkpoint in a machine's own folder (local.py) keeps shards as they lie on its devices, so it
fits this layout alone. A shard that several processes have, as they have parameters over `data`
without ZeRO, survives the loss of all but one of them:

      leaf 3 over stage, copies over data          process 0: (3, stage 0)   process 1: (3, stage 1)
                                                   process 2: (3, stage 0)   process 3: (3, stage 1)

Nothing here touches a file or a device.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from jaxtrain.checkpoint.layout import Bounds, Part, StoredArray, holders
from jaxtrain.schedule.placement import Placement


@dataclasses.dataclass(frozen=True, order=True)
class Shard:
    """A distinct shard: the leaf's place in the flattened state, and the block of the leaf."""

    leaf: int
    bounds: Bounds

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)


def _process_of(device: jax.Device) -> int:
    return device.process_index


class Shards:
    """All distinct shards of a state, with their devices; the same on every process.

    Args:
      arrays: the state's, as of `layout.stored_arrays`.
      placement: which layer lies in which row of them.
      process_of: a device's process; tests have others than jax.
    """

    def __init__(
        self,
        arrays: Iterable[StoredArray],
        placement: Placement,
        process_of: Callable[[jax.Device], int] = _process_of,
    ):
        arrays = list(arrays)
        named = [(part, array) for array in arrays for part in array.parts]
        self.parts: dict[int, Part] = {part.leaf: part for part, _ in named}
        self._array = {part.leaf: array for part, array in named}
        self.devices = {
            Shard(leaf, bounds): devices
            for leaf, part in self.parts.items()
            for bounds, devices in sorted(holders(part).items())
        }
        self.processes = {
            shard: frozenset(map(process_of, devices)) for shard, devices in self.devices.items()
        }
        self._process_of = process_of
        self._placement = placement

    def dtype(self, shard: Shard) -> np.dtype:
        return self.dtype_of(shard.leaf)

    def dtype_of(self, leaf: int) -> np.dtype:
        return self._array[leaf].dtype

    def name(self, shard: Shard) -> str:
        """The stored array that a shard is a part of, such as "params/embed/w"."""
        return self._array[shard.leaf].name

    def needed_by(self, process: int) -> list[Shard]:
        """The shards that a process's devices hold, in an order that all processes know."""
        return [shard for shard, processes in self.processes.items() if process in processes]

    def givers(self, lost: Mapping[int, Iterable[Shard]]) -> dict[Shard, jax.Device | None]:
        """Lost shard → the first device that still has it, or None: nobody has. lost: process →
        what it needs and does not have."""
        losers: dict[Shard, set[int]] = {}
        for process, shards in lost.items():
            for shard in shards:
                losers.setdefault(shard, set()).add(process)
        return {
            shard: next(
                (
                    device
                    for device in self.devices[shard]
                    if self._process_of(device) not in without
                ),
                None,
            )
            for shard, without in losers.items()
        }

    def fingerprint(self) -> str:
        """What two states have in common exactly if the shards of one are those of the other:
        names, shapes, types, blocks, placement."""
        leaves = [
            (
                self._array[leaf].name,
                part.unit,
                part.shape,
                part.lead,
                self._array[leaf].shape,
                str(self._array[leaf].dtype),
            )
            for leaf, part in sorted(self.parts.items())
        ]
        blocks = [(shard.leaf, shard.bounds) for shard in sorted(self.devices)]
        rows = [
            self._placement.layer_index(unit).tolist()
            for unit in range(self._placement.units_per_stage)
        ]
        return hashlib.sha256(json.dumps([leaves, blocks, rows]).encode()).hexdigest()
