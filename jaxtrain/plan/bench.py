"""What programs on all devices at once take: products, attention, passes over memory, collectives, each by itself.

A figure is the seconds of one of N devices that all work at once, as in a training step; which of them are a device's where cores are
shared, plan/calibrate.py says.
"""

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.devices import mesh as meshes
from jaxtrain.parallel.attention import attend_whole
from jaxtrain.plan import fit

REPEATS = 3  # timings, of which the median counts
SMALL = 16  # rows and columns of a product that takes no time beside its launch
CHAIN = 64  # of them, one after the other
LOOPS = 8  # collectives of a program

# --- a device's seconds ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """Seconds of a device in a program on all devices.

    cores: that the devices share; 0 where each has its own, and seconds are those of the wall
    ahead: calls may be under way beside each other; not those of CPU devices, whose collectives would wait for each other for ever
    least: seconds of a timing
    """

    cores: int
    ahead: bool
    least: float

    def now(self) -> float:
        return time.process_time() / self.cores if self.cores else time.perf_counter()

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of a call, the median of REPEATS timings of several one after the other."""
        calls = 1
        jax.block_until_ready(call())
        once = self._timed(call, 1)
        if once < self.least:
            calls = min(1000, math.ceil(self.least / max(once, 1e-6)))
        return statistics.median(self._timed(call, calls) for _ in range(REPEATS)) / calls

    def _timed(self, call: Callable[[], Any], calls: int) -> float:
        began = self.now()
        for i in range(calls):
            result = call()
            if i == calls - 1 or not self.ahead:
                jax.block_until_ready(result)
        return self.now() - began


def stopwatch(devices: Sequence[jax.Device], least: float) -> Stopwatch:
    """The stopwatch for these devices: CPU time if several simulated devices share a core, wall time otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = devices[0].platform == "cpu"
    return Stopwatch(cores if cpu and len(devices) > cores else 0, not cpu, least)


# --- measurements ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """All devices, a part of the batch on each, and how long they take."""

    mesh: Mesh
    watch: Stopwatch

    @classmethod
    def of(cls, devices: Sequence[jax.Device], least: float) -> "Bench":
        sizes = tuple(len(devices) if axis == meshes.DATA else 1 for axis in meshes.AXES)
        return cls(meshes.make_mesh(sizes, devices), stopwatch(devices, least))

    @property
    def devices(self) -> int:
        return self.mesh.size

    def arrays(
        self, shape: Sequence[int], dtype: Any, count: int = 1, mesh: Mesh | None = None, axes: Any = meshes.DATA
    ) -> list[jax.Array]:
        """Random arrays [devices · first, …], of which each device has one of `shape`; small enough for products of products."""
        sharding = NamedSharding(mesh or self.mesh, P(axes))
        whole = (self.devices * shape[0], *shape[1:])
        part = (np.random.default_rng(0).standard_normal(shape) / math.sqrt(shape[-1])).astype(dtype)
        return [jax.make_array_from_callback(whole, sharding, lambda _: part) for _ in range(count)]

    def each(self, function: Callable, *arrays: jax.Array) -> float:
        """Seconds of function(a device's parts) → a device's parts, compiled."""
        local = jax.shard_map(function, mesh=self.mesh, in_specs=P(meshes.DATA), out_specs=P(meshes.DATA), check_vma=False)
        compiled = jax.jit(local).lower(*arrays).compile()
        return self.watch.seconds(lambda: compiled(*arrays))

    def call(self) -> float:
        """Seconds of a program that does nothing: what a call takes of the host."""
        return self.each(lambda x: x + 1, *self.arrays((1, 1), np.float32))

    def launch(self) -> float:
        """Seconds of an operation that does next to nothing, after another one."""

        def chain(length: int) -> Callable:
            return lambda x: functools.reduce(lambda product, _: product @ x, range(length), x)

        x = self.arrays((SMALL, SMALL), np.float32)
        return max(0.0, self.each(chain(CHAIN), *x) - self.each(chain(1), *x)) / (CHAIN - 1)

    def product(self, m: int, n: int, k: int, dtype: str, call: float) -> fit.Product:
        """Measures the product [m, k] · [k, n]; a program has several of them where one is short."""
        count = 4 if m * n * k < 1 << 26 else 1
        pairs = [*self.arrays((m, k), jnp.dtype(dtype), count), *self.arrays((k, n), jnp.dtype(dtype), count)]
        seconds = self.each(lambda *arrays: tuple(a @ b for a, b in zip(arrays[:count], arrays[count:], strict=True)), *pairs)
        return fit.Product(m, n, k, fit.without(seconds, call) / count)

    def attention(self, sequences: int, tokens: int, heads: int, size: int, dtype: str, call: float) -> tuple[float, float]:
        """(forward, backward) seconds, as the runtime attends: by the kernel of the table, in a region where all axes are manual."""
        qkv = self.arrays((sequences, tokens, heads, size), jnp.dtype(dtype), 3)
        attend = lambda q, k, v: attend_whole(q, k, v, None, "all_gather", "auto")

        def both(q, k, v):
            out, backward = jax.vjp(attend, q, k, v)
            return backward(out)

        with jax.set_mesh(self.mesh), meshes.traced_for(self.mesh):
            forward, whole = self.each(attend, *qkv), self.each(both, *qkv)
        return fit.without(forward, call), fit.without(whole, forward)

    def pass_over(self, size: int, call: float) -> tuple[float, float]:
        """(bytes read and written, seconds) of a pass over so many bytes, in place: fresh pages, which a host clears first, take longer."""
        (x,) = self.arrays((size // 4,), np.float32)
        compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
        last = [x]

        def again() -> jax.Array:
            last[0] = compiled(last[0])
            return last[0]

        return 2.0 * size, fit.without(self.watch.seconds(again), call)

    def collectives(self, group: int, size: int, call: float) -> list[fit.Collective]:
        """A gather with the scatter that undoes it, a sum and a message over groups of so many neighbours, all groups at once; one after
        the other inside a program, as in a step, whose arrays have their place in memory."""
        mesh = Mesh(self.mesh.devices.reshape(-1, group), ("groups", "group"))
        spec = P(("groups", "group"))
        around = [(i, (i + 1) % group) for i in range(group)]
        part = 1 / group  # or sums of sums would grow
        gathered = lambda x: jax.lax.all_gather(x, "group", tiled=True)
        kinds: list[tuple[Callable, int, int]] = [
            (lambda x: jax.lax.psum_scatter(jax.lax.optimization_barrier(gathered(x)), "group", tiled=True) * part, size // group, 2),
            (lambda x: jax.lax.psum(x, "group") * part, size, 2),
            (lambda x: jax.lax.ppermute(x, "group", around), size, 0),
        ]
        found = []
        for function, length, rounds in kinds:
            (x,) = self.arrays((length // 4,), np.float32, mesh=mesh, axes=("groups", "group"))
            chain = functools.partial(jax.lax.fori_loop, 0, LOOPS, lambda _, x, function=function: function(x))
            local = jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            compiled = jax.jit(local).lower(x).compile()
            seconds = self.watch.seconds(functools.partial(compiled, x))
            found.append(fit.Collective(group, float(size), rounds, fit.without(seconds, call) / LOOPS, bool(self.watch.cores)))
        return found


def groups_of(devices: int) -> list[int]:
    """The sizes of groups of neighbours in which all devices are: 2, 4, … and all."""
    return [size for size in range(2, devices + 1) if devices % size == 0 and (size == devices or size & (size - 1) == 0)]
