"""Arrays in the part of the host's memory that devices read and write by themselves
(`pinned_host`).

Inside jit an array's type has its memory. Only arrays in the device's memory are computed with;
those on the host are moved, entirely or in parts (`jax.lax.dynamic_slice` and its update).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxtrain.devices.mesh import on_tpu, partitioned

KIND = "pinned_host"


def missing(mesh: Mesh) -> str:
    """The memories of this mesh's devices, as text, if the host's is not among them; else "".
    Devices that are only described, for compiling ahead of time, may name none: XLA decides for
    them."""
    kinds = [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
    return ", ".join(kinds) if kinds and KIND not in kinds else ""


def on_host(sharding: NamedSharding) -> NamedSharding:
    """This sharding in the host's memory."""
    return sharding.with_memory_kind(KIND)


def is_host(sharding: jax.sharding.Sharding) -> bool:
    return sharding.memory_kind == KIND


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Outside jit: zeros of this shape and sharding, made by the host; each device's process makes
    its own parts."""
    shape = like.sharding.shard_shape(like.shape)
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda _: np.zeros(shape, like.dtype)
    )


def to_host(tree):
    """Inside jit: the arrays, moved to the host's memory."""
    return jax.device_put(tree, jax.memory.Space.Host)


def empty_pool(shape: tuple[int, ...], dtype, on_host: bool) -> jax.Array:
    """Inside jit: an array of which nothing is read before it is written. It is not filled, except
    on CPUs and GPUs where XLA partitions over `model`: there it is zeros."""
    if on_host:
        # A scalar on the host is broadcast there; zeros moved there would fill the device's memory
        # before.
        return lax.broadcast(to_host(jnp.zeros((), dtype)), shape)
    # The partitioner has no rule for an array without values: each device would allocate the whole
    # and cut its part. libtpu has one, and counts 0.12 s of a step to fill 30 GB.
    return (jnp.zeros if partitioned() and not on_tpu() else lax.empty)(shape, dtype)


def is_on_host(a: jax.Array) -> bool:
    """Inside jit: whether an array lies in the host's memory."""
    return jax.typeof(a).memory_space == jax.memory.Space.Host


def on_device(a: jax.Array) -> jax.Array:
    """Inside jit: all of `a` on the device, wherever that lies."""
    return jax.device_put(a, jax.memory.Space.Device) if is_on_host(a) else a


def read(a: jax.Array, start, sizes: tuple[int, ...]) -> jax.Array:
    """Inside jit: a part of `a` on the device, wherever that lies."""
    return on_device(lax.dynamic_slice(a, start, sizes))


def write(a: jax.Array, part: jax.Array, start) -> jax.Array:
    """Inside jit: `a`, wherever it lies, with a part replaced by one on the device."""
    return lax.dynamic_update_slice(a, to_host(part) if is_on_host(a) else part, start)


def read_at(a: jax.Array, i) -> jax.Array:
    """Inside jit: a[i] on the device, wherever `a` lies; i is a traced int32."""
    return read(a, (i, *[0] * (a.ndim - 1)), (1, *a.shape[1:])).reshape(a.shape[1:])


def write_at(a: jax.Array, value: jax.Array, i) -> jax.Array:
    """Inside jit: `a`, wherever it lies, with a[i] replaced by a value on the device, cast to its
    dtype."""
    return write(a, value[None].astype(a.dtype), (i, *[0] * (a.ndim - 1)))
