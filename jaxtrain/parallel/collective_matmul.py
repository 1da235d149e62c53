"""Collective matmul: the all-gather over `model` before a product and the reduce-scatter after one,
as rings of permutes, each overlapped with the product of a block that has arrived (Wang et al.
2023, "Overlap communication with dependent computation via decomposition in large deep learning
models").

The devices of `model` are a ring, and messages go both ways round it, so that both directions of a
link are used:

    ring_gather   a device's tokens go on to the next device as soon as they arrive, and are
                  multiplied (`products`)
    ring_scatter  two sums for a device's tokens begin half-way round the ring and come towards it,
                  one on each way; each device adds its product

The functions are of a device's part (devices/mesh.py: over_model). Tokens are m blocks, one of each
device. XLA starts a permute as soon as its operand is computed and waits for it where its result is
read.

Shape suffixes: B sequences, T tokens, m devices of `model`, t tokens of a block, D, N columns.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.kernels import multiplies_while_sending
from jaxtrain.devices.mesh import MODEL, STAGE
from jaxtrain.parallel.target_device import target_device

_REQUESTED: contextvars.ContextVar[str] = contextvars.ContextVar("collective_matmul", default="off")

UP, DOWN = 1, -1  # ways round the ring: to the next device, to the one before


@contextlib.contextmanager
def requested(setting: str) -> Iterator[None]:
    """A context in which a program is traced with this `parallel.collective_matmul`."""
    token = _REQUESTED.set(setting)
    try:
        yield
    finally:
        _REQUESTED.reset(token)


def serves(part: int) -> bool:
    """True if products overlap with their messages, of `part` bytes each, in the program that is
    traced."""
    stages = jax.sharding.get_abstract_mesh().shape[STAGE]
    return multiplies_while_sending(_REQUESTED.get(), target_device().platform, stages, part)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrived:
    """All tokens of an array that was split along the sequence, as blocks [B, t, D]: the device's
    own, then those of the devices `DISTANCES` before it in the ring."""

    blocks: list


def distances(devices: int) -> list[int]:
    """How far before the device in the ring each block of `Arrived` comes from; negative on the way
    down. The farthest of an even number comes up."""
    return sorted(range(-((devices - 1) // 2), devices // 2 + 1), key=lambda d: (abs(d), -d))


def _sent(x: jax.Array, way: int) -> jax.Array:
    """The x of the device before this one, on this way round."""
    devices = lax.axis_size(MODEL)
    pairs = [(i, (i + way) % devices) for i in range(devices)]
    return lax.ppermute(x, MODEL, pairs)


def _owner(distance) -> jax.Array:
    """The index of the device that is `distance` before this one in the ring."""
    return (lax.axis_index(MODEL) - distance) % lax.axis_size(MODEL)


def _in_blocks(x_BTN: jax.Array) -> jax.Array:
    """[B, T, N] → [B, m, t, N]."""
    # Blocks have a dimension of their own: XLA then reads and writes one in place. As a slice along
    # T it would be copied.
    batch, tokens, *columns = x_BTN.shape
    devices = lax.axis_size(MODEL)
    return x_BTN.reshape(batch, devices, tokens // devices, *columns)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _block(x_BmtN: jax.Array, owner) -> jax.Array:
    """[B · t, N] of a device's tokens."""
    return _rows(lax.dynamic_index_in_dim(x_BmtN, owner, 1, keepdims=False))


def ring_gather(x_BtD: jax.Array) -> Arrived:
    """All tokens, from the device's own."""
    # Each device passes on the block that it has just received, so every message is one block
    # between neighbours. Both ways round are under way at the same time.
    at = {0: x_BtD}
    for distance in distances(lax.axis_size(MODEL))[1:]:
        way = UP if distance > 0 else DOWN
        at[distance] = _sent(at[distance - way], way)
    return Arrived(list(at.values()))


def products(arrived: Arrived, weight_DN: jax.Array) -> jax.Array:
    """x · weight [B, T, N] of a gathered x."""
    batch, tokens, _ = arrived.blocks[0].shape
    devices = lax.axis_size(MODEL)
    # All blocks are written, so the memory needs no zeros.
    y_BmtN = lax.empty((batch, devices, tokens, weight_DN.shape[1]), weight_DN.dtype)
    for distance, block in zip(distances(devices), arrived.blocks, strict=True):
        product = (_rows(block) @ weight_DN).reshape(batch, tokens, -1)
        y_BmtN = lax.dynamic_update_index_in_dim(y_BmtN, product, _owner(distance), 1)
    return y_BmtN.reshape(batch, devices * tokens, -1)


def contracted(a, b) -> jax.Array:
    """aᵀ b over all tokens, of a gathered array and one with all tokens [B, T, N], in either order;
    summed over blocks in float32."""
    arrived, local_BmtN = (a, _in_blocks(b)) if isinstance(a, Arrived) else (b, _in_blocks(a))
    total = None
    for distance, block in zip(distances(lax.axis_size(MODEL)), arrived.blocks, strict=True):
        pair = _rows(block), _block(local_BmtN, _owner(distance))
        left, right = pair if arrived is a else reversed(pair)
        term = lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        total = term if total is None else total + term
    assert total is not None, "a ring has devices"
    return total.astype(arrived.blocks[0].dtype)


def ring_scatter(term: Callable, xs_BTN: list[jax.Array], weights: list) -> jax.Array:
    """The sum over the ring of each device's `term(rows, weights)`, for this device's tokens,
    [B, t, D].

    term: from the rows of a block of each x, [B · t, N], to [B · t, D]
    """
    blocks = [_in_blocks(x) for x in xs_BTN]
    of = lambda owner, weights: term([_block(x, owner) for x in blocks], weights)
    sums: dict[int, jax.Array] = {}
    # A sum begins at the device farthest from its owner and moves one device a step. Each device on
    # the way adds its product for the owner's tokens.
    for distance in reversed(distances(lax.axis_size(MODEL))[1:]):
        # up the ring go sums for devices that are after this one
        way, owner = (UP if distance > 0 else DOWN), _owner(-distance)
        if way in sums:
            # The product waits for the message, or XLA would not add both in one pass; and for the
            # product before it, which overlaps with the message.
            arrived, late, _ = lax.optimization_barrier(
                (_sent(sums[way], way), weights, sums.get(-way))
            )
            sums[way] = of(owner, late) + arrived
        else:
            sums[way] = of(owner, weights)
    total = of(_owner(0), weights)
    for way, value in sums.items():
        total = total + _sent(value, way)
    return total.reshape(xs_BTN[0].shape[0], -1, total.shape[-1])
