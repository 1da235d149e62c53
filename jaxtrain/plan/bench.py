"""What programs on all devices at once take: products, attention, passes over memory, collectives,
each by itself.

A figure is the seconds of one of N devices that all work at once, as in a training step. Simulated
devices share cores: the seconds of one of them are the process's CPU-seconds over the cores.
"""

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.costs.collectives import DATA, GATHER, PERMUTE, SCATTER, SUM, Collective
from jaxtrain.devices import mesh as meshes
from jaxtrain.parallel.attention import attend_whole

REPEATS = 3  # timings, of which the median counts
SMALL = 16  # rows and columns of a product that takes no time beside its launch
CHAIN = 64  # small products, one after the other
LOOPS = 8  # collectives of a program
# of a time from which its call is taken off: the call was timed apart, and may come out longer
LEAST_PART = 0.1


class Product(NamedTuple):
    """Seconds of [m, k] · [k, n] on a device."""

    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


class Exchange(NamedTuple):
    """Seconds of collectives over groups of so many neighbours, one after the other."""

    devices: int
    collectives: tuple[Collective, ...]
    seconds: float


def without(seconds: float, call: float) -> float:
    """A time without that of a call or a launch, which was measured apart."""
    return max(seconds - call, LEAST_PART * seconds)


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """Seconds of a device in a program on all devices.

    cores: cores that the devices share; 0 where each has its own, and seconds are those of the wall
    ahead: calls may be under way beside each other; not those of CPU devices, whose collectives
           would wait for each other for ever
    least: seconds of a timing
    """

    cores: int
    ahead: bool
    least: float

    def now(self) -> float:
        return time.process_time() / self.cores if self.cores else time.perf_counter()

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of a call, the median of REPEATS timings of several one after the other."""
        jax.block_until_ready(call())
        calls = min(1000, math.ceil(self.least / max(self._timed(call, 1), 1e-6)))
        return statistics.median(self._timed(call, calls) for _ in range(REPEATS)) / calls

    def _timed(self, call: Callable[[], Any], calls: int) -> float:
        began = self.now()
        for i in range(calls):
            result = call()
            if i == calls - 1 or not self.ahead:
                jax.block_until_ready(result)
        return self.now() - began


class Bench:
    """All devices, a part of the batch on each, and how long they take. least: seconds of a
    timing."""

    def __init__(self, devices: Sequence[jax.Device], least: float):
        self.mesh = meshes.make_mesh(
            tuple(len(devices) if axis == DATA else 1 for axis in meshes.AXES), devices
        )
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        cpu = devices[0].platform == "cpu"
        self.watch = Stopwatch(cores if cpu and len(devices) > cores else 0, not cpu, least)

    def _arrays(
        self,
        shape: Sequence[int],
        dtype: Any,
        count: int = 1,
        mesh: Mesh | None = None,
        axes: Any = DATA,
    ) -> list[jax.Array]:
        """Random arrays [devices · first, …], of which each device has one of `shape`; small enough
        for products of products."""
        sharding = NamedSharding(mesh or self.mesh, P(axes))
        part = (np.random.default_rng(0).standard_normal(shape) / math.sqrt(shape[-1])).astype(
            dtype
        )
        size = (self.mesh.size * shape[0], *shape[1:])
        return [jax.make_array_from_callback(size, sharding, lambda _: part) for _ in range(count)]

    def _seconds(self, function: Callable, *arrays: jax.Array) -> float:
        """Seconds of function(a device's parts) → a device's parts, compiled."""
        sharding: Any = arrays[0].sharding
        local = jax.shard_map(
            function,
            mesh=sharding.mesh,
            in_specs=sharding.spec,
            out_specs=sharding.spec,
            check_vma=False,
        )
        compiled = jax.jit(local).lower(*arrays).compile()
        return self.watch.seconds(lambda: compiled(*arrays))

    def call(self) -> float:
        """Seconds of a program that does nothing: what a call takes of the host."""
        return self._seconds(lambda x: x + 1, *self._arrays((1, 1), np.float32))

    def launch(self) -> float:
        """Seconds of an operation that does next to nothing, after another one."""
        chain = lambda length: (
            lambda x: functools.reduce(lambda product, _: product @ x, range(length), x)
        )
        x = self._arrays((SMALL, SMALL), np.float32)
        return max(0.0, self._seconds(chain(CHAIN), *x) - self._seconds(chain(1), *x)) / (CHAIN - 1)

    def product(self, m: int, n: int, k: int, dtype: str, call: float) -> Product:
        """Measures the product [m, k] · [k, n]; a program has several of them where one is
        short."""
        count = 4 if m * n * k < 1 << 26 else 1
        pairs = [
            *self._arrays((m, k), jnp.dtype(dtype), count),
            *self._arrays((k, n), jnp.dtype(dtype), count),
        ]
        seconds = self._seconds(
            lambda *arrays: tuple(
                a @ b for a, b in zip(arrays[:count], arrays[count:], strict=True)
            ),
            *pairs,
        )
        return Product(m, n, k, without(seconds, call) / count)

    def attention(
        self, sequences: int, tokens: int, heads: int, size: int, dtype: str, call: float
    ) -> tuple[float, float]:
        """(forward, backward) seconds, as the runtime attends: by the kernel of the table, in a
        region where all axes are manual."""
        qkv = self._arrays((sequences, tokens, heads, size), jnp.dtype(dtype), 3)
        attend = lambda q, k, v: attend_whole(q, k, v, None, "all_gather", "auto")

        def both(q, k, v):
            out, backward = jax.vjp(attend, q, k, v)
            return backward(out)

        with jax.set_mesh(self.mesh), meshes.traced_for(self.mesh):
            forward, both_ways = self._seconds(attend, *qkv), self._seconds(both, *qkv)
        return without(forward, call), without(both_ways, forward)

    def streaming(self, size: int, call: float) -> tuple[float, float]:
        """(bytes read and written, seconds) of a pass over so many bytes, in place: fresh pages,
        which a host clears first, take longer."""
        arrays = self._arrays((size // 4,), np.float32)
        compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(*arrays).compile()

        def again() -> jax.Array:
            arrays[0] = compiled(arrays[0])
            return arrays[0]

        return 2.0 * size, without(self.watch.seconds(again), call)

    def exchanges(self, group: int, size: int, call: float) -> list[Exchange]:
        """A gather of `size` bytes with the scatter that undoes it, a sum and a message, over all
        groups of so many neighbours at once. They follow each other inside a program, as in a step,
        whose arrays have their place in memory."""
        mesh, axes = (
            Mesh(self.mesh.devices.reshape(-1, group), ("groups", "group")),
            ("groups", "group"),
        )
        ring = [(i, (i + 1) % group) for i in range(group)]
        part = 1 / group  # or sums of sums would grow
        gathered = lambda x: jax.lax.optimization_barrier(
            jax.lax.all_gather(x, "group", tiled=True)
        )
        functions: dict[tuple[str, ...], tuple[Callable, int]] = {
            (GATHER, SCATTER): (
                lambda x: jax.lax.psum_scatter(gathered(x), "group", tiled=True) * part,
                size // group,
            ),
            (SUM,): (lambda x: jax.lax.psum(x, "group") * part, size),
            (PERMUTE,): (lambda x: jax.lax.ppermute(x, "group", ring), size),
        }
        timed = []
        for kinds, (function, length) in functions.items():
            chain = functools.partial(
                jax.lax.fori_loop, 0, LOOPS, lambda _, x, function=function: function(x)
            )
            seconds = self._seconds(
                chain, *self._arrays((length // 4,), np.float32, mesh=mesh, axes=axes)
            )
            collectives = tuple(Collective(kind, (DATA,), float(size)) for kind in kinds)
            timed.append(Exchange(group, collectives, without(seconds, call) / LOOPS))
        return timed


def groups_of(devices: int) -> list[int]:
    """The sizes of groups of neighbours in which all devices are: 2, 4, … and all."""
    return [
        size
        for size in range(2, devices + 1)
        if devices % size == 0 and (size == devices or size & (size - 1) == 0)
    ]
