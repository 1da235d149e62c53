"""Muon's directions: each matrix's momentum, orthogonalized by Newton-Schulz iterations (Jordan
2024, https://kellerjordan.github.io/posts/muon), times rms · √(longer side) (Liu et al. 2025,
arXiv:2502.16982).

An iteration needs all numbers of a matrix. So whole matrices are dealt out over the devices that
have parts of them, which are those of a stage:

    shards ── all-to-all ──► whole matrices ── iterations, without a collective ──► shards

Begin with `Orthogonalizer`. Matrices that are split over the same mesh axes are dealt out together
(`deal`), so that devices have equally many numbers. Devices with copies have other matrices each:
they receive only the shards of their own, and all-gather the results. Messages go in several
rounds where that adds no padding: those of one round travel beside the products of another.

A unit is one matrix, or several small ones of an array. Shape suffixes: U matrices of a unit,
S devices that share a matrix, K blocks of a message, N blocks of a device, G numbers of a block.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxtrain.config import OptimizerConfig
from jaxtrain.devices.mesh import AXES, REPLICA
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.models.spec import Spec

UNIT_NUMBERS = 2**22  # of small matrices that are multiplied together
MOST_BLOCKS = 2**16  # of a device: their places are constants of the program
ROUNDS = 4, 2, 1
MOST_PADDING = 1.02  # by which rounds may lengthen messages


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The matrices of one array that a device has, or has shards of.

    shape: of a shard of one matrix
    split: for each of its dimensions, the mesh axes that split it; all of them: `shards`
    copies: mesh axes along which devices have the same shards
    units: each is `unit` matrices
    """

    spec: Spec
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    shards: tuple[str, ...]
    copies: tuple[str, ...]
    units: int
    unit: int

    @classmethod
    def of(cls, shape: tuple[int, ...], spec: Spec, layout: P, mesh: Mesh) -> "Matrices":
        """shape: of a device's array; layout: of the array on the mesh"""
        wide = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis != REPLICA}
        names = [tuple(axis for axis in mesh_axes(part) if axis in wide) for part in layout]
        lead = len(names) - len(spec.shape) + spec.batch_dims
        shards, numbering = (sum(part, ()) for part in (names[lead:], names[:lead]))
        ordered = tuple(axis for axis in wide if axis in shards)
        copies = tuple(axis for axis in wide if axis not in shards + numbering)
        # As many small matrices are a unit as leave one for each device.
        count = math.prod(shape[:lead])
        devices = math.prod(wide[axis] for axis in shards + copies)
        size = math.prod(spec.shape[spec.batch_dims :])
        most = max(1, min(count // devices, UNIT_NUMBERS // size))
        unit = max(n for n in range(1, most + 1) if count % n == 0)
        split = tuple(names[lead:])
        return cls(spec, shape[lead:], split, ordered, copies, count // unit, unit)

    @property
    def size(self) -> int:
        """Numbers of a unit that a device has."""
        return self.unit * math.prod(self.shape)


class Round(NamedTuple):
    """Units that are exchanged together.

    table:   for each device, the blocks of the message to it by their numbers among a device's
        blocks, [devices, K]
    begins:  for each array and device, the first block of the array's units in that message
    numbers: for each array and device, the number of these units
    """

    table: np.ndarray
    begins: np.ndarray
    numbers: np.ndarray


class Deal(NamedTuple):
    """Units dealt out over devices.

    block:  numbers of a block
    places: for each block of a device, its place in all messages of all rounds one after the other
    """

    block: int
    places: np.ndarray
    rounds: list[Round]


def deal(arrays: Sequence[Matrices], devices: int) -> Deal:
    """About equally many numbers for each device, and in each round."""
    sizes, units = np.array([[m.size, m.units] for m in arrays]).T
    # Shards end where a block ends: else the table would have a place for each number.
    block = max(math.gcd(*sizes.tolist()), math.ceil(sizes @ units / MOST_BLOCKS))
    of = np.repeat(np.arange(len(arrays)), units)
    blocks = -(-sizes // block)[of]
    device, numbers_of_rounds = _spread(blocks, devices), iter(ROUNDS)
    most, lengths = MOST_PADDING * np.bincount(device, blocks).max(), np.array([np.inf])
    while lengths.sum() > most:
        number = next(numbers_of_rounds)
        message = device.copy()  # of all rounds, one round after the other
        for d in range(devices):
            message[device == d] += devices * _spread(blocks[device == d], number)
        filled = np.bincount(message, blocks, number * devices).astype(int)
        lengths = filled.reshape(number, devices).max(1)
    # In a message the units of an array follow each other.
    order = np.lexsort((of, message))
    within = np.zeros_like(blocks)
    within[order] = np.cumsum(blocks[order]) - blocks[order]
    within -= (np.cumsum(filled) - filled)[message]
    begins = np.cumsum(np.repeat(lengths, devices)) - np.repeat(lengths, devices)
    offsets = begins[message] + within - (np.cumsum(blocks) - blocks)
    places = np.repeat(offsets, blocks) + np.arange(blocks.sum())
    table = np.zeros(devices * lengths.sum(), np.int32)
    table[places] = np.arange(len(places))
    numbers = np.zeros((len(arrays), len(filled)), np.int32)
    first = np.full_like(numbers, len(table))
    np.add.at(numbers, (of, message), 1)
    np.minimum.at(first, (of, message), within)
    cut = lambda a: np.split(a, len(lengths), 1)
    tables = np.split(table, devices * np.cumsum(lengths)[:-1])
    of_rounds = zip(tables, cut(first), cut(numbers), strict=True)
    rounds = [Round(a.reshape(devices, -1), *each) for a, *each in of_rounds if a.size]
    return Deal(block, places, rounds)


def _spread(sizes: np.ndarray, parts: int) -> np.ndarray:
    """For each size, the part that it belongs to: the largest first, each to the smallest part."""
    heap, part_of = [(0, part) for part in range(parts)], np.zeros_like(sizes)
    for i in np.argsort(-sizes, kind="stable"):
        load, part_of[i] = heap[0]
        heapq.heapreplace(heap, (load + sizes[i], part_of[i]))
    return part_of


@dataclasses.dataclass(frozen=True)
class Orthogonalizer:
    """Momenta → directions.

    dtype: of products, and of what devices exchange
    """

    settings: OptimizerConfig
    dtype: jnp.dtype
    mesh: Mesh

    def __call__(
        self, momenta: list[jax.Array], specs: list[Spec], layouts: list[P]
    ) -> list[jax.Array]:
        """Inside jit: the directions of parameters, float32, from their momenta [leading dimensions
        of a stack, …]. layouts: of both on the mesh"""

        def region(momenta: list[jax.Array]) -> list[jax.Array]:
            directions, decks = list(momenta), dict[tuple, dict[int, Matrices]]()
            for i, a in enumerate(momenta):
                if a.size:  # a local unit without layers has an empty stack
                    m = Matrices.of(a.shape, specs[i], layouts[i], self.mesh)
                    decks.setdefault((m.shards, m.copies), {})[i] = m
            for deck in decks.values():
                units = [momenta[i].reshape(m.units, m.size) for i, m in deck.items()]
                for i, a in zip(deck, self._dealt(list(deck.values()), units), strict=True):
                    directions[i] = a.reshape(momenta[i].shape)
            return directions

        # All axes are manual: the partitioner would gather matrices in every iteration.
        region = jax.shard_map(
            region,
            mesh=self.mesh,
            in_specs=(layouts,),
            out_specs=layouts,
            axis_names=set(AXES),
            check_vma=False,
        )
        return [a.astype(jnp.float32) for a in region([a.astype(self.dtype) for a in momenta])]

    def _dealt(self, arrays: list[Matrices], units: list[jax.Array]) -> list[jax.Array]:
        """In the manual region: the directions of matrices that lie alike, from their momenta.
        units: a device's shards of each array, [units, numbers]"""
        shards, copies = arrays[0].shards, arrays[0].copies
        among, across = (math.prod(self.mesh.shape[a] for a in axes) for axes in (shards, copies))
        if among * across == 1:
            alone = lambda m: lambda unit: self._of_unit(m, unit[None])[0]
            return [lax.map(alone(m), a) for m, a in zip(arrays, units, strict=True)]
        dealt = deal(arrays, among * across)
        padded = [jnp.pad(a, ((0, 0), (0, -a.shape[1] % dealt.block))) for a in units]
        held_NG = jnp.concatenate([a.reshape(-1, dealt.block) for a in padded])
        swap = lambda a: lax.all_to_all(a, shards, 0, 0, tiled=True) if shards else a
        copy, device = lax.axis_index(copies) if copies else 0, lax.axis_index(copies + shards)
        results = []
        for table, begins, numbers in dealt.rounds:
            blocks = jnp.asarray(table.reshape(across, among, -1))[copy]
            message_SKG = swap(held_NG.at[blocks].get(mode="promise_in_bounds"))
            for m, begin, number in zip(arrays, begins, numbers, strict=True):
                if number.any():
                    message_SKG = self._of_units(m, message_SKG, begin, number, device)
            message_SKG = swap(message_SKG)
            gathered = lax.all_gather(message_SKG, copies) if copies else message_SKG
            results.append(gathered.reshape(-1, dealt.block))
        found_NG = jnp.concatenate(results).at[dealt.places].get(mode="promise_in_bounds")
        ends = np.cumsum([a.size // dealt.block for a in padded])[:-1]
        found = zip(jnp.split(found_NG, ends), units, strict=True)
        return [a.reshape(len(like), -1)[:, : like.shape[1]] for a, like in found]

    def _of_units(
        self,
        m: Matrices,
        message_SKG: jax.Array,
        begin: np.ndarray,
        number: np.ndarray,
        device: jax.Array,
    ) -> jax.Array:
        """The message to this device with directions in the place of one array's momenta. begin,
        number: of all devices, as in Round"""
        among, _, block = message_SKG.shape
        blocks = -(-m.size // block)

        def update(i: jax.Array, message_SKG: jax.Array) -> jax.Array:
            at = 0, jnp.asarray(begin)[device] + i * blocks, 0
            unit = lax.dynamic_slice(message_SKG, at, (among, blocks, block)).reshape(among, -1)
            unit = unit.at[:, : m.size].set(self._of_unit(m, unit[:, : m.size]))
            return lax.dynamic_update_slice(message_SKG, unit.reshape(among, blocks, block), at)

        # Some devices have a unit more, and may: nothing in the loop is a collective.
        alike = (number == number[0]).all()
        trips = int(number[0]) if alike else jnp.asarray(number)[device]
        # The scope has the mean number of trips, for readers of the compiled program.
        with jax.named_scope(f"dealt_{number.sum()}_to_{len(number)}"):
            return lax.fori_loop(0, trips, update, message_SKG)

    def _of_unit(self, m: Matrices, shards_S: jax.Array) -> jax.Array:
        """The directions of a unit, from all devices' shards of its momenta, [S, numbers]."""
        # Each dimension has the axes that split it in front of its part.
        order = [len(m.shards)]
        for d, axes in enumerate(m.split):
            order += [*map(m.shards.index, axes), len(m.shards) + 1 + d]
        sizes = [self.mesh.shape[axis] for axis in m.shards]
        whole = shards_S.reshape(*sizes, m.unit, *m.shape).transpose(order)
        dims = m.spec.shape[m.spec.batch_dims :]
        rows, columns = math.prod(dims[: m.spec.row_dims]), math.prod(dims[m.spec.row_dims :])
        widths = m.spec.columns or (columns,)
        side_by_side = whole.reshape(m.unit, rows, -1, sum(widths))
        parts = [
            self._direction(a.reshape(m.unit, rows, -1)).reshape(a.shape)
            for a in jnp.split(side_by_side, np.cumsum(widths)[:-1], -1)
        ]
        directions = jnp.concatenate(parts, -1).reshape(whole.shape)
        return directions.transpose(np.argsort(order)).reshape(shards_S.shape)

    def _direction(self, momentum: jax.Array) -> jax.Array:
        """The directions of matrices [U, rows, columns]."""
        x = momentum.mT if momentum.shape[1] > momentum.shape[2] else momentum
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        product = functools.partial(jnp.matmul, precision=precision)
        wide = lambda a: a.astype(jnp.float32)

        def iterate(_: int, x: jax.Array) -> jax.Array:
            square = product(x, x.mT)
            both = -4.7750 * wide(square) + 2.0315 * wide(product(square, square))
            return (3.4445 * wide(x) + wide(product(both.astype(x.dtype), x))).astype(x.dtype)

        norm = jnp.sqrt(jnp.square(wide(x)).sum((1, 2), keepdims=True))
        x = (wide(x) / (norm + self.settings.epsilon)).astype(x.dtype)
        x = lax.fori_loop(0, self.settings.muon_iterations, iterate, x)
        x = (self.settings.muon_rms * math.sqrt(max(x.shape[1:])) * wide(x)).astype(x.dtype)
        return x.mT if momentum.shape[1] > momentum.shape[2] else x
