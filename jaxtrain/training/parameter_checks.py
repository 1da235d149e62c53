"""Whether parameters are what they should be, asked on the devices that hold them: finite.

The programs are small, and read each parameter once. They are compiled when they are asked for first.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxtrain.devices import cluster


class Finiteness:
    """Says whether all numbers of a pytree of arrays are finite.

    mesh: the devices that hold them, all of which get the answer.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._compiled: Compiled | None = None

    def __call__(self, arrays: Any) -> bool:
        """Waits for the devices. Every process must call this, at the same point of the program."""
        if self._compiled is None:
            self._compiled = cluster.compile_everywhere("finite parameters", jax.jit(_finite, out_shardings=self._sharding).lower(arrays))
        return bool(self._compiled(arrays))


def _finite(arrays: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(arrays)]).all()
