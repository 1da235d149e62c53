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
S devices that share a matrix, K blocks of a message, G numbers of a block.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.devices.mesh import AXES, REPLICA
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.models.spec import Spec

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of Jordan's polynomial
UNIT_NUMBERS = 2**22  # of small matrices that are multiplied together
MOST_BLOCKS = 2**16  # of a device: their places are constants of the program
ROUNDS = 4, 2, 1
MOST_PADDING = 1.02  # by which rounds may lengthen messages


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The matrices of one array that a device has, or has a shard of.

    shape: of a shard of one
    split: for each dimension, the mesh axes that split it
    count: of the matrices
    unit:  the number of them that are dealt out, and multiplied, together
    """

    spec: Spec
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    count: int
    unit: int

    @property
    def size(self) -> int:
        """Numbers of a device's shards of one unit."""
        return self.unit * math.prod(self.shape)

    def whole(self, shards_S: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
        """The matrices of a unit, [U, *dimensions], from all devices' shards of it, [S, …]. sizes:
        of the mesh axes that split matrices, the first one outermost in S"""
        parts = shards_S.reshape(*sizes.values(), self.unit, *self.shape)
        return parts.transpose(self._order(sizes)).reshape(self.unit, *self._dims)

    def shards(self, whole: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
        """The inverse of `whole`."""
        parts = [(*(sizes[axis] for axis in axes), n) for axes, n in self._pairs]
        cut = whole.reshape(self.unit, *(size for part in parts for size in part))
        return cut.transpose(np.argsort(self._order(sizes))).reshape(math.prod(sizes.values()), -1)

    @property
    def _dims(self) -> tuple[int, ...]:
        return self.spec.shape[self.spec.batch_dims :]

    @property
    def _pairs(self) -> list[tuple[tuple[str, ...], int]]:
        return list(zip(self.split, self.shape, strict=True))

    def _order(self, sizes: Mapping[str, int]) -> list[int]:
        """The dimensions of [*sizes, U, *shape] in the order of `whole`: each with the axes that
        split it."""
        axes, order = list(sizes), [len(sizes)]
        for d, names in enumerate(self.split):
            order += [*map(axes.index, names), len(axes) + 1 + d]
        return order


class Round(NamedTuple):
    """Matrices that are exchanged together.

    table: for each device and block of its message, its number among a device's blocks, int32
        [devices, K]
    kinds: for each array's matrices the first block of them in each device's message, and the
        number of its units, int32 [devices]
    """

    table: np.ndarray
    kinds: list[tuple[Matrices, np.ndarray, np.ndarray]]


class Deal(NamedTuple):
    """Matrices dealt out over so many devices.

    block:  numbers of a block
    places: for each block of a device, its place in all devices' messages of all rounds, one after
        the other, int32
    """

    rounds: list[Round]
    block: int
    places: np.ndarray


def deal(arrays: Sequence[Matrices], devices: int) -> Deal:
    """Whole units for each device, about equally many numbers."""
    total = sum(m.count // m.unit * m.size for m in arrays)
    # Shards end where a block ends: else the table would have a place for each number.
    block = max(math.gcd(*(m.size for m in arrays)), math.ceil(total / MOST_BLOCKS))
    blocks = [math.ceil(m.size / block) for m in arrays]
    units = [(a, u) for a, m in enumerate(arrays) for u in range(m.count // m.unit)]
    begins = np.cumsum([0, *(blocks[a] for a, _ in units)])
    first = dict(zip(units, begins, strict=False))  # a unit's first block

    def spread(units: list[tuple[int, int]], parts: int) -> list[list[tuple[int, int]]]:
        """The largest units first, each to the part with the fewest blocks."""
        heap, spread = [(0, part) for part in range(parts)], [[] for _ in range(parts)]  # type: ignore[var-annotated]
        for unit in sorted(units, key=lambda unit: -blocks[unit[0]]):
            load, part = heap[0]
            spread[part].append(unit)
            heapq.heapreplace(heap, (load + blocks[unit[0]], part))
        return [sorted(part) for part in spread]

    of_devices = spread(units, devices)
    length = lambda units: sum(blocks[a] for a, _ in units)
    lengths = lambda rounds: [max(map(length, each)) for each in zip(*rounds, strict=True)]
    choices = [[spread(units, rounds) for units in of_devices] for rounds in ROUNDS]
    most = MOST_PADDING * sum(lengths(choices[-1]))
    rounds = next(choice for choice in choices if sum(lengths(choice)) <= most)
    places, before, results = np.zeros(begins[-1], np.int32), 0, []
    for of_round, size in zip(zip(*rounds, strict=True), lengths(rounds), strict=True):
        table = np.zeros((devices, size), np.int32)
        begin, number = np.zeros((2, len(arrays), devices), np.int32)
        for device, units in enumerate(of_round):
            end = 0
            for a, u in units:
                begin[a, device] = begin[a, device] if number[a, device] else end
                number[a, device] += 1
                held = first[a, u] + np.arange(blocks[a])
                table[device, end : end + blocks[a]] = held
                places[held] = before + device * size + end + np.arange(blocks[a])
                end += blocks[a]
        kinds = zip(arrays, begin, number, strict=True)
        results.append(Round(table, [kind for kind in kinds if kind[2].any()]))
        before += table.size
    return Deal(results, block, places)


@dataclasses.dataclass(frozen=True)
class Orthogonalizer:
    """Momenta → directions.

    iterations, rms: of `optimizer`; epsilon: added to a norm
    dtype: of products, and of what devices exchange
    """

    iterations: int
    rms: float
    epsilon: float
    dtype: jnp.dtype

    def __call__(
        self, momenta: list[jax.Array], specs: list[Spec], shardings: list[NamedSharding]
    ) -> list[jax.Array]:
        """Inside jit: the directions of parameters, float32, from their momenta [leading dimensions
        of a stack, …]. shardings: of both; of one device or of one mesh"""
        if not momenta:
            return []
        mesh, layouts = shardings[0].mesh, [sharding.spec for sharding in shardings]
        sizes = {axis: n for axis, n in mesh.shape.items() if n > 1 and axis != REPLICA}

        def region(parts: list[jax.Array]) -> list[jax.Array]:
            decks: dict[Any, list[int]] = {}
            for i, part in enumerate(parts):
                if part.size:  # a local unit without layers has an empty stack
                    decks.setdefault(dealt_axes(specs[i], layouts[i], sizes), []).append(i)
            for (shard_axes, copy_axes), deck in decks.items():
                shards, copies = ({a: sizes[a] for a in axes} for axes in (shard_axes, copy_axes))
                devices = math.prod([*shards.values(), *copies.values()])
                arrays = [
                    _matrices(parts[i].shape, specs[i], layouts[i], shards, devices) for i in deck
                ]
                held = [
                    parts[i].reshape(m.count // m.unit, m.size)
                    for i, m in zip(deck, arrays, strict=True)
                ]
                for i, a in zip(deck, self._dealt(arrays, held, shards, copies), strict=True):
                    parts[i] = a.reshape(parts[i].shape)
            return parts

        # All axes are manual: the partitioner would gather matrices in every iteration.
        in_region = jax.shard_map(
            region,
            mesh=mesh,
            in_specs=(layouts,),
            out_specs=layouts,
            axis_names=set(AXES),
            check_vma=False,
        )
        return [a.astype(jnp.float32) for a in in_region([a.astype(self.dtype) for a in momenta])]

    def _dealt(
        self,
        arrays: list[Matrices],
        held: list[jax.Array],
        shards: Mapping[str, int],
        copies: Mapping[str, int],
    ) -> list[jax.Array]:
        """In the manual region: the directions of matrices that lie alike, from their momenta.

        held: this device's shards of each array, [units, numbers of a unit]
        shards, copies: sizes of the mesh axes that split matrices, and of those along which devices
            have copies
        """
        among, across = math.prod(shards.values()), math.prod(copies.values())
        if among * across == 1:
            of_unit = lambda m, a: self._of_unit(m, a[None], shards)[0]
            each = [functools.partial(of_unit, m) for m in arrays]
            return [lax.map(one, units) for one, units in zip(each, held, strict=True)]
        dealt = deal(arrays, among * across)
        shards_NG = jnp.concatenate([_in_blocks(units, dealt.block) for units in held])
        copy = lax.axis_index(tuple(copies)) if copies else 0
        device = lax.axis_index((*copies, *shards))
        swap = lambda a_SKG: lax.all_to_all(a_SKG, tuple(shards), 0, 0, tiled=True)
        results = []
        for one in dealt.rounds:
            table = jnp.asarray(one.table.reshape(across, among, -1))[copy]
            message_SKG = shards_NG.at[table].get(mode="promise_in_bounds")
            if shards:
                message_SKG = swap(message_SKG)
            for m, begin, number in one.kinds:
                message_SKG = self._of_kind(m, message_SKG, shards, begin, number, device)
            if shards:
                message_SKG = swap(message_SKG)
            if copies:
                message_SKG = lax.all_gather(message_SKG, tuple(copies))
            results.append(message_SKG.reshape(-1, dealt.block))
        found_NG = jnp.concatenate(results).at[dealt.places].get(mode="promise_in_bounds")
        ends = np.cumsum([_in_blocks(units, dealt.block).shape[0] for units in held])
        return [
            a.reshape(len(units), -1)[:, : units.shape[1]]
            for a, units in zip(jnp.split(found_NG, ends[:-1]), held, strict=True)
        ]

    def _of_kind(
        self,
        m: Matrices,
        message_SKG: jax.Array,
        shards: Mapping[str, int],
        begin: np.ndarray,
        number: np.ndarray,
        device: jax.Array,
    ) -> jax.Array:
        """The message with directions in the place of this array's momenta. begin, number: as in
        Round"""
        among, _, block = message_SKG.shape
        blocks = math.ceil(m.size / block)

        def update(i: jax.Array, message_SKG: jax.Array) -> jax.Array:
            at = 0, jnp.asarray(begin)[device] + i * blocks, 0
            unit = lax.dynamic_slice(message_SKG, at, (among, blocks, block)).reshape(among, -1)
            directions = self._of_unit(m, unit[:, : m.size], shards)
            padded = jnp.pad(directions, ((0, 0), (0, blocks * block - m.size)))
            return lax.dynamic_update_slice(message_SKG, padded.reshape(among, blocks, block), at)

        # Devices have other numbers of units, and may: nothing in the loop is a collective.
        alike = (number == number[0]).all()
        trips = int(number[0]) if alike else jnp.asarray(number)[device]
        # The scope has the mean number of trips, for readers of the compiled program.
        with jax.named_scope(f"dealt_{number.sum()}_to_{len(number)}"):
            return lax.fori_loop(0, trips, update, message_SKG)

    def _of_unit(self, m: Matrices, shards_S: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
        """The directions of one unit, from all devices' shards of its momenta, [S, numbers]."""
        whole = m.whole(shards_S, sizes)
        rows = math.prod(whole.shape[1 : 1 + m.spec.row_dims])
        widths = m.spec.columns or (whole[0].size // rows,)
        side_by_side = whole.reshape(m.unit, rows, -1, sum(widths))
        parts = [
            self.direction(a.reshape(m.unit, rows, -1)).reshape(a.shape)
            for a in jnp.split(side_by_side, np.cumsum(widths)[:-1], -1)
        ]
        return m.shards(jnp.concatenate(parts, -1).reshape(whole.shape), sizes)

    def direction(self, momentum: jax.Array) -> jax.Array:
        """The direction of matrices [U, rows, columns]."""
        x = momentum.mT if momentum.shape[1] > momentum.shape[2] else momentum
        wide = lambda a: a.astype(jnp.float32)
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        product = functools.partial(jnp.matmul, precision=precision)
        by_x, by_square, by_fourth = COEFFICIENTS

        def iterate(_: int, x: jax.Array) -> jax.Array:
            square = product(x, x.mT)
            both = by_square * wide(square) + by_fourth * wide(product(square, square))
            return (by_x * wide(x) + wide(product(both.astype(x.dtype), x))).astype(x.dtype)

        norm = jnp.sqrt(jnp.square(wide(x)).sum((1, 2), keepdims=True))
        x = (wide(x) / (norm + self.epsilon)).astype(x.dtype)
        x = lax.fori_loop(0, self.iterations, iterate, x)
        x = (self.rms * math.sqrt(max(x.shape[1:])) * wide(x)).astype(x.dtype)
        return x.mT if momentum.shape[1] > momentum.shape[2] else x


def dealt_axes(
    spec: Spec, layout: PartitionSpec, sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes of several devices that split an array's matrices, and those along which
    devices have copies of them."""
    of_dims = [mesh_axes(part) for part in layout]
    lead = len(of_dims) - len(spec.shape) + spec.batch_dims
    numbering, splitting = (
        {axis for axes in part for axis in axes} for part in (of_dims[:lead], of_dims[lead:])
    )
    shards = tuple(axis for axis in sizes if axis in splitting)
    return shards, tuple(axis for axis in sizes if axis not in splitting | numbering)


def _matrices(
    shape: tuple[int, ...],
    spec: Spec,
    layout: PartitionSpec,
    shards: Container[str],
    devices: int,
) -> Matrices:
    """The matrices of a device's array of this shape, which so many devices share."""
    dims = len(spec.shape) - spec.batch_dims
    count, size = math.prod(shape[:-dims]), math.prod(spec.shape[-dims:])
    # As many small matrices as leave a unit for each device.
    fits = lambda unit: unit == 1 or unit <= min(count // devices, UNIT_NUMBERS // size)
    unit = max(n for n in range(1, count + 1) if count % n == 0 and fits(n))
    split = tuple(
        tuple(axis for axis in mesh_axes(part) if axis in shards) for part in layout[-dims:]
    )
    return Matrices(spec, shape[-dims:], split, count, unit)


def _in_blocks(units: jax.Array, block: int) -> jax.Array:
    """Units [units, numbers], each padded to blocks, as [N, G]."""
    return jnp.pad(units, ((0, 0), (0, -units.shape[1] % block))).reshape(-1, block)
