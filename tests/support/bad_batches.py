"""The training command with batches that spoil a run: `python -m support.bad_batches nan:5,6 wrong:9 -- FLAGS…`, by numbers of batches.

nan     a loss weight of the batch is not a number
wrong   every target is the same rare token
"""

import sys

import jax.numpy as jnp

from jaxtrain import train
from jaxtrain.data.loader import Batch, Loader

RARE = 1  # of bytes, a control character that no text has


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


if __name__ == "__main__":
    end = sys.argv.index("--")
    kinds = (word.split(":") for word in sys.argv[1:end])
    spoil({kind: set(map(int, numbers.split(","))) for kind, numbers in kinds})
    sys.exit(train.main(sys.argv[end + 1 :]))
