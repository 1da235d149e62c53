"""The training command with what spoils a run:
`python -m support.bad_batches nan:5,6 wrong:9 -- FLAGS…`.

nan     no loss weight of the batches with these numbers is a number
half    nor of the first half of their rows: of the first of two replicas
wrong   every target of these batches is the same rare token
slow    a fifth of a second passes before each batch from this number on
flip    a bit of one device's copy of a parameter is another one in these comparisons of copies,
        counted from 1
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxtrain import train_command as train
from jaxtrain.data.loader import Batch, Loader
from jaxtrain.data.order import Draw
from jaxtrain.training.parameter_checks import Comparison, Copies
from jaxtrain.training.state import TrainState

RARE = 1  # of bytes, a control character that no text has
DEVICE = 2  # whose copy is another one


def spoil(numbers: dict[str, set[int]]) -> None:
    """Every Loader of this process reads spoiled train batches where these numbers say so."""
    whole = Loader.read

    def no_weight(values: np.ndarray, shard: jax.Shard) -> None:
        values[:] = np.nan

    def rare_targets(values: np.ndarray, shard: jax.Shard) -> None:
        values[:] = RARE

    def read(loader: Loader, number: int) -> tuple[dict[int, Draw | None], Batch]:
        def no_weight_in_first_half(values: np.ndarray, shard: jax.Shard) -> None:
            values[:, : max(0, loader.shape()[1] // 2 - (shard.index[1].start or 0))] = np.nan

        if number >= min(numbers.get("slow", {number + 1})):
            time.sleep(0.2)
        rows, batch = whole(loader, number)
        for kind, name, change in (
            ("nan", "weights", no_weight),
            ("half", "weights", no_weight_in_first_half),
            ("wrong", "targets", rare_targets),
        ):
            if loader.content.batches is None and number in numbers.get(kind, ()):
                batch[name] = changed(batch[name], change)
        return rows, batch

    Loader.read = read


def flip(numbers: set[int]) -> None:
    """Every Copies of this process compares a spoiled copy where these numbers say so. What trains
    is not changed."""
    right, count = Copies.compare, itertools.count(1)

    def compare(copies: Copies, state: TrainState) -> Comparison:
        if next(count) in numbers:
            leaves, tree = jax.tree.flatten(state.params)
            state = dataclasses.replace(
                state, params=jax.tree.unflatten(tree, [flipped(leaves[0], DEVICE), *leaves[1:]])
            )
        return right(copies, state)

    Copies.compare = compare


def flipped(array: jax.Array, device: int, bit: int = 0) -> jax.Array:
    """The same, but for one bit of one number in a device's copy."""

    def flip_bit(values: np.ndarray, shard: jax.Shard) -> None:
        if shard.device.id == device:
            values.reshape(-1).view(np.uint32)[values.size // 2] ^= np.uint32(1 << bit)

    return changed(array, flip_bit)


def changed(array: jax.Array, change: Callable[[np.ndarray, jax.Shard], None]) -> jax.Array:
    """The array after `change(values, shard)` of each of this process's shards."""
    shards = []
    for shard in array.addressable_shards:
        values = np.array(shard.data)
        change(values, shard)
        shards.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


if __name__ == "__main__":
    end = sys.argv.index("--")
    kinds = (word.split(":") for word in sys.argv[1:end])
    chosen = {kind: set(map(int, numbers.split(","))) for kind, numbers in kinds}
    spoil(chosen)
    flip(chosen.get("flip", set()))
    sys.exit(train.main(sys.argv[end + 1 :]))
