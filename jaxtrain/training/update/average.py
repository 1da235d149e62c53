"""The average of the parameters, which moves after each update (`optimizer.ema_decay`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.host_memory import is_on_host, read, write

LARGEST = float(jnp.finfo(jnp.float32).max)


def moved_average(
    decay: float, average: Any, params: Any, finite: jax.Array | None = None
) -> dict | None:
    """Inside jit: the exponential moving average of the parameters after an update; None if there
    is none. It is average + (1 - decay) · (params - average), in float32.

    average, params: float32, laid out as gradients; the average may be in the host's memory
    finite: as in Optimizer.update
    """
    if average is None:
        return None

    def move(before: jax.Array, value: jax.Array) -> jax.Array:
        # XLA rounds a product and a sum at once in one program, and one after the other in another.
        # The clamp changes no finite number, and keeps them apart.
        after = before + lax.clamp(-LARGEST, (1 - decay) * (value - before), LARGEST)
        return after if finite is None else jnp.where(finite, after, before)

    def of_parameter(path: tuple, before: jax.Array, value: jax.Array) -> jax.Array:
        if not is_on_host(before):
            return move(before, value)
        layers = value.shape[1] if path[0].key == "layers" else 0
        sizes = (value.shape[0], 1, *value.shape[2:]) if layers else value.shape

        def move_layer(layer: jax.Array, average: jax.Array) -> jax.Array:
            start = (0, layer if layers else 0, *[0] * value.ndim)[: value.ndim]
            after = move(read(average, start, sizes), read(value, start, sizes))
            return write(average, after, start)

        # As in _layer_by_layer, one layer at a time is in the device's memory.
        return lax.fori_loop(0, lax.optimization_barrier(layers or 1), move_layer, before)

    return jax.tree_util.tree_map_with_path(of_parameter, average, params)
