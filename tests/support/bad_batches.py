"""The training command with what spoils a run: `python -m support.bad_batches nan:5,6 wrong:9 -- FLAGS…`.

nan     a loss weight of the batches with these numbers is not a number
wrong   every target of these batches is the same rare token
flip    a bit of one device's copy of a parameter is another one in these comparisons of copies, counted from 1
"""

import dataclasses
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import train
from jaxtrain.data.loader import Batch, Loader
from jaxtrain.training.parameter_checks import Comparison, Copies
from jaxtrain.training.state import TrainState

RARE = 1  # of bytes, a control character that no text has
DEVICE = 2  # whose copy is another one


def spoil(numbers: dict[str, set[int]]) -> None:
    """Every Loader of this process gives spoiled train batches where these numbers say so."""
    whole = Loader.batch

    def batch(loader: Loader, number: int) -> Batch:
        made = whole(loader, number)
        if loader.batches is None and number in numbers.get("nan", ()):
            made["weights"] = made["weights"].at[..., 0].set(jnp.nan)
        if loader.batches is None and number in numbers.get("wrong", ()):
            made["targets"] = jnp.full_like(made["targets"], RARE)
        return made

    Loader.batch = batch


def flip(numbers: set[int]) -> None:
    """Every Copies of this process compares a spoiled copy where these numbers say so. What trains is not changed."""
    right, count = Copies.compare, itertools.count(1)

    def compare(copies: Copies, state: TrainState) -> Comparison:
        if next(count) in numbers:
            leaves, tree = jax.tree.flatten(state.params)
            state = dataclasses.replace(state, params=jax.tree.unflatten(tree, [flipped(leaves[0], DEVICE), *leaves[1:]]))
        return right(copies, state)

    Copies.compare = compare


def flipped(array: jax.Array, device: int, bit: int = 0) -> jax.Array:
    """The same, but for one bit of one number in a device's copy."""
    shards = []
    for shard in array.addressable_shards:
        numbers = np.array(shard.data)
        if shard.device.id == device:
            numbers.reshape(-1).view(np.uint32)[numbers.size // 2] ^= np.uint32(1 << bit)
        shards.append(jax.device_put(numbers, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


if __name__ == "__main__":
    end = sys.argv.index("--")
    kinds = (word.split(":") for word in sys.argv[1:end])
    chosen = {kind: set(map(int, numbers.split(","))) for kind, numbers in kinds}
    spoil(chosen)
    flip(chosen.get("flip", set()))
    sys.exit(train.main(sys.argv[end + 1 :]))
