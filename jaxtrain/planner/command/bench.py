"""Timed programs on all devices at once: products, attention, passes over memory, collectives.

A time is the seconds of one device while all devices work, as in a training step. Simulated devices
share cores: the seconds of one of them are the process's CPU-seconds over the number of cores.
"""

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxtrain.config.rules.rules import divisors
from jaxtrain.devices import mesh as meshes
from jaxtrain.parallel.attention.causal import attend_causal
from jaxtrain.planner.layer.links import DATA, GATHER, PERMUTE, SCATTER, SUM, Collective

REPEATS = 3  # timings, of which the median counts
SMALL = 16  # rows and columns of a product that takes no time beyond its launch
CHAIN = 64  # small products, one after the other
LOOPS = 8  # collectives of a program
FEW = 1 << 26  # multiplications of a product that is too short to be timed on its own
# The least fraction of a time that remains without its call, which is timed separately and may come
# out longer.
LEAST_PART = 0.1


class TimedCollectives(NamedTuple):
    """Seconds of collectives, one after the other, over groups of `devices` neighbours."""

    devices: int
    collectives: tuple[Collective, ...]
    seconds: float


def without(seconds: float, call: float) -> float:
    """A time without that of a call or a launch, which was measured separately."""
    return max(seconds - call, LEAST_PART * seconds)


def seconds_of(call: Callable[[], Any], cores: int, ahead: bool, least: float) -> float:
    """Seconds of a call on a device: the median of REPEATS timings, each of several calls.

    cores: the cores that the devices share, whose CPU-seconds count; 0 where each device has its
           own, and wall seconds count
    ahead: several calls may be dispatched at once; CPU devices would deadlock in their collectives
    least: the least seconds of a timing
    """
    now = time.process_time if cores else time.perf_counter

    def timed(calls: int) -> float:
        began = now()
        for i in range(calls):
            result = call()
            if i == calls - 1 or not ahead:
                jax.block_until_ready(result)
        return (now() - began) / (cores or 1)

    jax.block_until_ready(call())
    calls = min(1000, math.ceil(least / max(timed(1), 1e-6)))
    return statistics.median(timed(calls) for _ in range(REPEATS)) / calls


class Bench:
    """Programs on all devices, each device with a shard of the batch, and their times.

    least: the least seconds of a timing
    cores: the cores that simulated devices share; 0 for devices of their own
    call:  seconds of the host for a program that does nothing, which no time includes
    """

    def __init__(self, devices: Sequence[jax.Device], least: float):
        sizes = tuple(len(devices) if axis == DATA else 1 for axis in meshes.AXES)
        self.mesh, self.least = meshes.make_mesh(sizes, devices), least
        self.cpu, cores = devices[0].platform == "cpu", len(os.sched_getaffinity(0))
        self.cores = cores if self.cpu and len(devices) > cores else 0
        self.call = self._seconds(lambda x: x + 1, *self._arrays((1, 1), np.float32))

    def _arrays(
        self,
        shape: Sequence[int],
        dtype: Any,
        count: int = 1,
        mesh: Mesh | None = None,
        axes: Any = DATA,
    ) -> list[jax.Array]:
        """`count` arrays [devices · shape[0], …], of which each device has a shard of `shape`.

        All shards of all arrays have the same random numbers, drawn once: only their sizes matter
        for a time. The numbers are so small that products of products stay finite.
        """
        sharding = NamedSharding(mesh or self.mesh, P(axes))
        numbers = np.random.default_rng(0).standard_normal(shape) / math.sqrt(shape[-1])
        shard = numbers.astype(dtype)
        size = (self.mesh.size * shape[0], *shape[1:])
        return [jax.make_array_from_callback(size, sharding, lambda _: shard) for _ in range(count)]

    def _seconds(self, function: Callable, *arrays: jax.Array) -> float:
        """Seconds of a compiled function of a device's shards, whose results are shards."""
        sharding: Any = arrays[0].sharding
        local = jax.shard_map(
            function,
            mesh=sharding.mesh,
            in_specs=sharding.spec,
            out_specs=sharding.spec,
            check_vma=False,
        )
        compiled = jax.jit(local).lower(*arrays).compile()
        return seconds_of(lambda: compiled(*arrays), self.cores, not self.cpu, self.least)

    def launch(self) -> float:
        """Seconds of an operation that computes next to nothing, after another one."""
        power = lambda x, exponent: functools.reduce(lambda y, _: y @ x, range(exponent), x)
        x = self._arrays((SMALL, SMALL), np.float32)
        short, long = (
            self._seconds(functools.partial(power, exponent=exponent), *x)
            for exponent in (1, CHAIN)
        )
        return max(0.0, long - short) / (CHAIN - 1)

    def product(self, m: int, n: int, k: int, dtype: str) -> float:
        """Seconds of the product [m, k] · [k, n]; a program has several of a short one."""
        count = 4 if m * n * k < FEW else 1
        lhs = self._arrays((m, k), jnp.dtype(dtype), count)
        rhs = self._arrays((k, n), jnp.dtype(dtype), count)
        products = lambda *arrays: tuple(
            a @ b for a, b in zip(arrays[:count], arrays[count:], strict=True)
        )
        return without(self._seconds(products, *lhs, *rhs), self.call) / count

    def attention(
        self, sequences: int, tokens: int, heads: int, size: int, dtype: str
    ) -> tuple[float, float]:
        """Seconds forward and backward, by the kernel that the runtime takes, in a region where all
        axes are manual."""
        qkv = self._arrays((sequences, tokens, heads, size), jnp.dtype(dtype), 3)
        attend = lambda q, k, v: attend_causal(q, k, v, None)

        def both(q, k, v):
            out, backward = jax.vjp(attend, q, k, v)
            return backward(out)

        with jax.set_mesh(self.mesh), meshes.traced_for(self.mesh):
            forward, both_ways = self._seconds(attend, *qkv), self._seconds(both, *qkv)
        return without(forward, self.call), without(both_ways, forward)

    def streaming(self, size: int) -> tuple[float, float]:
        """Bytes read and written, and seconds, of a pass over an array of `size` bytes.

        The pass is in place, since a host would first clear fresh pages.
        """
        arrays = self._arrays((size // 4,), np.float32)
        compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(*arrays).compile()

        def update() -> jax.Array:
            arrays[0] = compiled(arrays[0])
            return arrays[0]

        seconds = seconds_of(update, self.cores, not self.cpu, self.least)
        return 2.0 * size, without(seconds, self.call)

    def collectives(self, group: int, size: int) -> Iterator[TimedCollectives]:
        """Times of an all-gather with the reduce-scatter that undoes it, of an all-reduce and of a
        permute of `size` bytes, over all groups of `group` neighbours at once.

        LOOPS of them follow each other in a program, as in a step, so arrays keep their memory.
        """
        mesh = Mesh(self.mesh.devices.reshape(-1, group), ("groups", "group"))
        ring = [(i, (i + 1) % group) for i in range(group)]
        mean = 1 / group  # sums of sums would grow
        gathered = lambda x: jax.lax.optimization_barrier(
            jax.lax.all_gather(x, "group", tiled=True)
        )
        cases: tuple[tuple[tuple[str, ...], int, Callable], ...] = (
            (
                (GATHER, SCATTER),
                size // group,
                lambda x: jax.lax.psum_scatter(gathered(x), "group", tiled=True) * mean,
            ),
            ((SUM,), size, lambda x: jax.lax.psum(x, "group") * mean),
            ((PERMUTE,), size, lambda x: jax.lax.ppermute(x, "group", ring)),
        )
        for kinds, shard, function in cases:
            loop = functools.partial(
                jax.lax.fori_loop, 0, LOOPS, lambda _, x, function=function: function(x)
            )
            arrays = self._arrays((shard // 4,), np.float32, mesh=mesh, axes=mesh.axis_names)
            seconds = without(self._seconds(loop, *arrays), self.call) / LOOPS
            collectives = tuple(Collective(kind, (DATA,), float(size)) for kind in kinds)
            yield TimedCollectives(group, collectives, seconds)


def groups_of(devices: int) -> list[int]:
    """The sizes of groups of neighbours that all devices divide into: 2, 4, … and all of them."""
    return [n for n in divisors(devices)[1:] if n == devices or n.bit_count() == 1]
