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


class Matrices(NamedTuple):
    """The matrices of arrays that are alike, as a device has shards of them.

    shape: of a shard of one matrix
    split: for each of its dimensions, the mesh axes that split it; all of them: `shards`
    copies: mesh axes along which devices have the same shards
    rows:  of a matrix
    columns: of the matrices that stand side by side in it (Spec.columns)
    unit:  the number of small ones that are dealt out, and multiplied, together
    """

    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    shards: tuple[str, ...]
    copies: tuple[str, ...]
    rows: int
    columns: tuple[int, ...]
    unit: int

    @classmethod
    def of(cls, shape: tuple[int, ...], spec: Spec, layout: P, mesh: Mesh) -> "Matrices":
        """shape: of a device's array; layout: of the array on the mesh"""
        wide = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis != REPLICA}
        names = [tuple(axis for axis in mesh_axes(part) if axis in wide) for part in layout]
        lead, dims = len(names) - len(spec.shape) + spec.batch_dims, spec.shape[spec.batch_dims :]
        splitting, numbering = (sum(part, ()) for part in (names[lead:], names[:lead]))
        shards = tuple(axis for axis in wide if axis in splitting)
        copies = tuple(axis for axis in wide if axis not in splitting + numbering)
        rows = math.prod(dims[: spec.row_dims])
        columns = math.prod(dims) // rows
        # As many small matrices as leave a unit for each device.
        count, devices = math.prod(shape[:lead]), math.prod(wide[a] for a in shards + copies)
        most = max(1, min(count // devices, UNIT_NUMBERS // (rows * columns)))
        unit = max(n for n in range(1, most + 1) if count % n == 0)
        widths, split = spec.columns or (columns,), tuple(names[lead:])
        return cls(tuple(shape[lead:]), split, shards, copies, rows, widths, unit)

    @property
    def size(self) -> int:
        """Numbers of a unit that a device has."""
        return self.unit * math.prod(self.shape)


def deal(
    sizes: Sequence[int], units: Sequence[int], devices: int
) -> tuple[int, np.ndarray, list[tuple[np.ndarray, ...]]]:
    """Units dealt out over devices, about equally many numbers to each, and in each round.

    sizes, units: for each kind of matrices, a device's numbers of a unit, and the number of units

    Returns (numbers of a block, places, rounds). places: for each block of a device, its place in
    all messages of all rounds one after the other. rounds: for each, the blocks of the message to
    each device by their numbers among a device's blocks, [devices, K]; then for each kind of
    matrices and each device the first block of their units in that message, and the number of
    these units.
    """
    # Shards end where a block ends: else the table would have a place for each number.
    block = max(math.gcd(*sizes), math.ceil(np.dot(sizes, units) / MOST_BLOCKS))
    of = np.repeat(np.arange(len(sizes)), units)
    blocks = -(-np.array(sizes) // block)[of]
    device = _spread(blocks, devices)
    for number in ROUNDS:
        message = device.copy()  # of all rounds, one round after the other
        for d in range(devices):
            message[device == d] += devices * _spread(blocks[device == d], number)
        filled = np.bincount(message, blocks, number * devices).astype(int)
        lengths = filled.reshape(number, devices).max(1)
        if lengths.sum() <= MOST_PADDING * np.bincount(device, blocks).max():
            break
    # In a message the units of a kind follow each other.
    order, within = np.lexsort((of, message)), np.zeros_like(blocks)
    within[order] = np.cumsum(blocks[order]) - blocks[order]
    within -= (np.cumsum(filled) - filled)[message]
    begins = devices * (np.cumsum(lengths) - lengths)
    begins = begins[message // devices] + lengths[message // devices] * (message % devices)
    offsets = begins + within - (np.cumsum(blocks) - blocks)
    places = np.repeat(offsets, blocks) + np.arange(blocks.sum())
    table = np.zeros(devices * lengths.sum(), np.int32)
    table[places] = np.arange(len(places))
    numbers = np.zeros((len(sizes), len(filled)), np.int32)
    first = np.full_like(numbers, len(table))
    np.add.at(numbers, (of, message), 1)
    np.minimum.at(first, (of, message), within)
    tables = np.split(table, devices * np.cumsum(lengths)[:-1])
    rounds = zip(tables, *(np.split(a, number, 1) for a in (first, numbers)), strict=True)
    return block, places, [(a.reshape(devices, -1), *each) for a, *each in rounds if a.size]


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
        self, momenta: dict[int, jax.Array], specs: list[Spec], layouts: dict[int, P]
    ) -> dict[int, jax.Array]:
        """Inside jit: the directions of parameters, float32, from their momenta [leading dimensions
        of a stack, …], by their numbers among `specs`. layouts: of both on the mesh"""

        # All axes are manual: the partitioner would gather matrices in every iteration.
        @functools.partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=(layouts,),
            out_specs=layouts,
            axis_names=set(AXES),
            check_vma=False,
        )
        def region(parts: dict[int, jax.Array]) -> dict[int, jax.Array]:
            parts, kinds = dict(parts), dict[Matrices, list[int]]()
            for i, a in parts.items():
                if a.size:  # a local unit without layers has an empty stack
                    m = Matrices.of(a.shape, specs[i], layouts[i], self.mesh)
                    kinds.setdefault(m, []).append(i)
            for deck in dict.fromkeys((m.shards, m.copies) for m in kinds):
                alike = [m for m in kinds if (m.shards, m.copies) == deck]
                in_units = [[parts[i].reshape(-1, m.size) for i in kinds[m]] for m in alike]
                of_kinds = self._dealt(alike, list(map(jnp.concatenate, in_units)))
                for m, units, directions in zip(alike, in_units, of_kinds, strict=True):
                    ends = np.cumsum(list(map(len, units)))[:-1]
                    for i, a in zip(kinds[m], jnp.split(directions, ends), strict=True):
                        parts[i] = a.reshape(parts[i].shape)
            return parts

        narrow = {i: a.astype(self.dtype) for i, a in momenta.items()}
        return {i: a.astype(jnp.float32) for i, a in region(narrow).items()}

    def _dealt(self, kinds: list[Matrices], units: list[jax.Array]) -> list[jax.Array]:
        """In the manual region: the directions of matrices that are split alike, from their
        momenta. units: a device's shards of each kind, [units, numbers]"""
        shards, copies = kinds[0].shards, kinds[0].copies
        among, across = (math.prod(self.mesh.shape[a] for a in axes) for axes in (shards, copies))
        if among * across == 1:
            alone = lambda m: lambda unit: self._of_unit(m, unit[None])[0]
            return [lax.map(alone(m), a) for m, a in zip(kinds, units, strict=True)]
        block, places, rounds = deal([m.size for m in kinds], list(map(len, units)), among * across)
        padded = [jnp.pad(a, ((0, 0), (0, -a.shape[1] % block))) for a in units]
        held_NG = jnp.concatenate([a.reshape(-1, block) for a in padded])
        swap = lambda a: lax.all_to_all(a, shards, 0, 0, tiled=True) if shards else a
        copy, device = lax.axis_index(copies) if copies else 0, lax.axis_index(copies + shards)
        results = []
        for table, *of_kinds in rounds:
            blocks = jnp.asarray(table.reshape(across, among, -1))[copy]
            message_SKG = swap(held_NG.at[blocks].get(mode="promise_in_bounds"))
            for m, begin, number in zip(kinds, *of_kinds, strict=True):
                if number.any():
                    message_SKG = self._of_units(m, message_SKG, begin, number, device)
            message_SKG = swap(message_SKG)
            message_SKG = lax.all_gather(message_SKG, copies) if copies else message_SKG
            results.append(message_SKG.reshape(-1, block))
        directions_NG = jnp.concatenate(results).at[places].get(mode="promise_in_bounds")
        ends = np.cumsum([a.size // block for a in padded])[:-1]
        directions = zip(jnp.split(directions_NG, ends), units, strict=True)
        return [a.reshape(len(like), -1)[:, : like.shape[1]] for a, like in directions]

    def _of_units(
        self,
        m: Matrices,
        message_SKG: jax.Array,
        begin: np.ndarray,
        number: np.ndarray,
        device: jax.Array,
    ) -> jax.Array:
        """The message to this device with directions in the place of one kind's momenta. begin,
        number: of all devices, as `deal` has them"""
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
        side_by_side = whole.reshape(m.unit, m.rows, -1, sum(m.columns))
        parts = [
            self._direction(a.reshape(m.unit, m.rows, -1)).reshape(a.shape)
            for a in jnp.split(side_by_side, np.cumsum(m.columns)[:-1], -1)
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
