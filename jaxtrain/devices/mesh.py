"""The device mesh: axis names, and an order of the devices that follows the network.

Six axes, slowest network first; all always exist, with size 1 where they are not used.

    replica   copies of the model across slices or clusters: plain data parallelism, or DiLoCo
    data      the batch; ZeRO shards the optimizer's state over it
    stage     pipeline stages
    context   the sequence, in zigzag order
    expert    experts; the batch outside of them
    model     tensor and sequence parallelism, inside a node
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxtrain.devices.torus import scatter_levels

REPLICA, DATA, STAGE, CONTEXT, EXPERT, MODEL = AXES = (
    "replica",
    "data",
    "stage",
    "context",
    "expert",
    "model",
)
BATCH_AXES = (REPLICA, DATA, EXPERT)
# axes whose devices have different tokens: losses and gradients are summed over them
SUM_AXES = (*BATCH_AXES, CONTEXT)
# axes that the runtime handles; the partitioner handles `model`
MANUAL_AXES = (REPLICA, DATA, STAGE, CONTEXT, EXPERT)

LARGEST_BY_LEVELS = 2**30  # bytes
LANES = 128  # numbers in a line of a TPU's memory

DEVICE_PART = "device_part"  # the name of a call that is a function of a device's part over `model`


def batch_shards(axis_sizes: Mapping[str, int]) -> int:
    """The number of parts that the sequences of a batch are split into, by the sizes of the
    axes."""
    return math.prod(axis_sizes[axis] for axis in BATCH_AXES)


def sizes_of(mesh: Any) -> tuple[int, ...]:
    """The sizes of a config's `mesh` group, in AXES' order."""
    return tuple(getattr(mesh, axis) for axis in AXES)


def make_mesh(sizes: Sequence[int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the six axes in AXES' order over `devices` (default: all), `model` innermost.

    TPUs are ordered by their torus, several slices with `replica` (then `data`) across them; all
    others by process and device id, so that neighbours on the innermost axes share a node. Raises
    ValueError if the sizes do not multiply to the number of devices.

    >>> mesh = make_mesh((1, 2, 2, 1, 1, 2))  # of 8 devices
    >>> mesh.axis_names[1:3], mesh.devices.shape
    (('data', 'stage'), (1, 2, 2, 1, 1, 2))
    """
    devices = list(jax.devices() if devices is None else devices)
    if int(np.prod(sizes)) != len(devices):
        raise ValueError(
            f"a mesh of {'×'.join(map(str, sizes))} needs {int(np.prod(sizes))} devices, not "
            f"{len(devices)}"
        )
    return Mesh(_order(tuple(sizes), devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _order(sizes: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    if devices[0].platform != "tpu":
        return np.array(sorted(devices, key=lambda d: (d.process_index, d.id))).reshape(sizes)
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    across, remaining = [1] * len(sizes), slices
    for i in range(len(sizes)):  # the outermost axes span the slices
        across[i] = int(np.gcd(sizes[i], remaining))
        remaining //= across[i]
    if remaining > 1:
        raise ValueError(
            f"{slices} slices cannot be laid over a mesh of {'×'.join(map(str, sizes))}: make "
            f"mesh.replica a multiple of {slices}"
        )
    inside = tuple(n // a for n, a in zip(sizes, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        inside, tuple(across), devices, allow_split_physical_axes=True
    )


def describe(mesh: Mesh) -> list[str]:
    """Lines of text: the mesh, and in a run of several processes for each axis of several devices
    whether a collective over it leaves the process."""
    shape = (
        " × ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
        or "one device"
    )
    device = mesh.devices.flat[0]
    processes = len({d.process_index for d in mesh.devices.flat})
    lines = [
        f"mesh: {shape} ({mesh.size} × {device.device_kind}, {processes} "
        f"process{'es'[: 2 * (processes > 1)]})"
    ]
    for i, name in enumerate(AXES):
        if mesh.shape[name] > 1 and processes > 1:
            along = np.moveaxis(mesh.devices, i, 0).reshape(mesh.shape[name], -1)[:, 0]
            spanned = len({d.process_index for d in along})
            where = f"across {spanned} processes" if spanned > 1 else "inside each process"
            lines.append(f"  {name}: {where}")
    return lines


def manual_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """The axes that the runtime handles: all of them if `model` has one device. The partitioner
    then has nothing to decide, and jax writes no sharding constraint after every operation (a third
    of a step's program)."""
    return set(AXES if mesh.shape[MODEL] == 1 else MANUAL_AXES)


def manual_size(axis: str) -> int:
    """The number of devices along an axis inside its manual region; 1 outside, or without a
    mesh."""
    return (
        jax.sharding.get_abstract_mesh().shape[axis] if _axis_type(axis) == AxisType.Manual else 1
    )


def _axis_type(axis: str) -> AxisType | None:
    """The type of an axis at this point of the trace; None without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis]


def in_manual_region() -> bool:
    """True inside the runtime's manual region, where it handles all axes but perhaps `model`."""
    return _axis_type(STAGE) == AxisType.Manual


def partitioned() -> bool:
    """True if the partitioner handles `model` at this point of the trace."""
    return _axis_type(MODEL) == AxisType.Auto


def over_model(fn: Callable, in_specs, out_specs) -> Callable:
    """fn on each device's part over `model`; the other axes stay as they are. With the partitioner
    alone a collective over another axis would gather the array over `model` before, whatever its
    constraints. Where the partitioner does not handle `model`, the result is fn itself: in the
    manual region as a call, so that it stays one equation when a layer is cut into ops
    (runtime/layers/backward_split.py)."""
    if partitioned():
        return jax.shard_map(
            fn, in_specs=in_specs, out_specs=out_specs, axis_names={MODEL}, check_vma=False
        )
    if _axis_type(MODEL) != AxisType.Manual:
        return fn

    def device_part(*args):
        return fn(*args)

    assert device_part.__name__ == DEVICE_PART
    return jax.jit(device_part)


def psum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Inside a manual region: the sum over those of the mesh axes that have more than one device
    (the partitioner refuses a collective over none)."""
    wide = tuple(a for a in axes if jax.lax.axis_size(a) > 1)
    return _summed(x, lambda x: jax.lax.psum(x, wide)) if wide else x


def psum_scatter(
    x: jax.Array, axes: str | Sequence[str], dim: int, groups: Sequence[Sequence[int]] | None = None
) -> jax.Array:
    """Inside a manual region: the reduce-scatter over the mesh axes along `dim`; in `groups` of
    their devices if given."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if groups is None and _is_cut_well(x, dim) and (inner := _levels(names)):
        return scatter_by_levels(x, names, dim, inner)
    return _psum_scatter(x, axes, dim, groups)


def scatter_by_levels(x: jax.Array, axes: Sequence[str], dim: int, inner: int) -> jax.Array:
    """Inside a manual region: the reduce-scatter over the mesh axes along `dim`, in two steps:
    between groups of `inner` consecutive devices, then inside them. Each device has the same
    numbers of `x` as after one step."""
    devices = jax.lax.axis_size(tuple(axes))
    numbers = np.arange(devices).reshape(-1, inner)
    between = _psum_scatter(x, axes, dim, numbers.T.tolist())
    return _psum_scatter(between, axes, dim, numbers.tolist())


def _is_cut_well(x: jax.Array, dim: int) -> bool:
    """True if libtpu makes reduce-scatters of the two steps along `dim`. Of the rows of a
    vocabulary (2 GB, 128,256 rows) it makes an all-reduce in any case, and in a loop over parts of
    them, whose rows are no multiple of 128, it aborts."""
    others = [size for d, size in enumerate(x.shape) if d != dim and size > 1]
    return (
        bool(others) and others[-1] % LANES == 0 and x.size * x.dtype.itemsize <= LARGEST_BY_LEVELS
    )


def _levels(axes: Sequence[str]) -> int:
    """`torus.scatter_levels` of the shards over the mesh axes, in the program that is traced; 0
    where it is for other devices than TPUs, or for absent ones."""
    mesh = _TRACED_FOR.get()
    if not isinstance(mesh, Mesh) or not on_tpu():
        return 0
    others = [axis for axis in AXES if axis not in axes]
    order = [AXES.index(axis) for axis in (*axes, *others)]
    shards = np.transpose(mesh.devices, order).reshape(-1, math.prod(mesh.shape[a] for a in others))
    slice_of = lambda device: getattr(device, "slice_index", 0)
    slice_index = slice_of(shards[0, 0])
    devices_of_slice = sum(slice_of(d) == slice_index for d in mesh.devices.flat)
    return scatter_levels(list(shards[:, 0]), devices_of_slice)


def _psum_scatter(
    x: jax.Array, axes: str | Sequence[str], dim: int, groups: Sequence[Sequence[int]] | None
) -> jax.Array:
    # Of [1, T, D] along T XLA's TPU compiler makes an all-reduce and a slice, of [T, D] a
    # reduce-scatter.
    wide = [d for d, size in enumerate(x.shape) if size != 1 or d == dim]
    along = wide.index(dim)

    def scatter(x: jax.Array) -> jax.Array:
        if not _by_gloo():
            return jax.lax.psum_scatter(
                x, axes, scatter_dimension=along, tiled=True, axis_index_groups=groups
            )
        parts = len(groups[0]) if groups else jax.lax.axis_size(axes)
        every = jax.lax.all_to_all(x, axes, along, along, tiled=True, axis_index_groups=groups)
        return every.reshape(*x.shape[:along], parts, -1, *x.shape[along + 1 :]).sum(along)

    part = _summed(x.reshape([x.shape[d] for d in wide]), scatter)
    return part.reshape(*x.shape[:dim], part.shape[along], *x.shape[dim + 1 :])


def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Inside a manual region: the all-gather over a mesh axis along `dim`. It may be
    differentiated."""
    return (_all_gather if _by_gloo() else _all_gather.fun)(x, axis, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


_all_gather.defvjp(
    lambda x, axis, dim: (_all_gather(x, axis, dim), None),
    lambda axis, dim, _, g: (psum_scatter(g, axis, dim),),
)


def _by_gloo() -> bool:
    """True if XLA's CPU backend gives collectives to gloo, whose reduce-scatter is wrong at times,
    without an error: it may send what has been overwritten
    (https://github.com/jax-ml/jax/issues/40830)."""
    return on_cpu() and jax.distributed.is_initialized()


class AbsentDevice(NamedTuple):
    """A kind of device that a program is traced for, and of which none need be there; attributes as
    of a `jax.Device`. compute_capability: of an NVIDIA GPU"""

    platform: str
    compute_capability: str = "9.0"


_TRACED_FOR: contextvars.ContextVar[Mesh | AbsentDevice | None] = contextvars.ContextVar(
    "traced_for", default=None
)


@contextlib.contextmanager
def traced_for(target: Mesh | AbsentDevice) -> Iterator[None]:
    """A context in which a program for a mesh, or for a kind of device, is traced:
    `traced_device()` is then one of its devices, or the kind. This machine need not have them: a
    program may be compiled ahead of time."""
    token = _TRACED_FOR.set(target)
    try:
        yield
    finally:
        _TRACED_FOR.reset(token)


def traced_device() -> jax.Device | AbsentDevice:
    """The device that a program is traced for: of `traced_for`, or else jax's default one."""
    target = _TRACED_FOR.get()
    if target is not None:
        return target if isinstance(target, AbsentDevice) else target.devices.flat[0]
    device: Any = jax.config.jax_default_device or jax.devices()[0]  # type: ignore[attr-defined]
    return device


def platform_of(device: jax.Device | AbsentDevice) -> str:
    """A device's platform as jax names it, but "rocm" for AMD's GPUs, so that "gpu" is NVIDIA's."""
    if device.platform != "gpu":
        return device.platform
    is_nvidia = str(device.compute_capability).partition(".")[0].isdigit()
    return "gpu" if is_nvidia else "rocm"


def on_cpu() -> bool:
    """True if a program is traced for CPU devices."""
    return platform_of(traced_device()) == "cpu"


def on_tpu() -> bool:
    """True if a program is traced for TPUs."""
    return platform_of(traced_device()) == "tpu"


def on_nvidia_gpu() -> bool:
    """True if a program is traced for NVIDIA GPUs."""
    return platform_of(traced_device()) == "gpu"


def _summed(x: jax.Array, collective) -> jax.Array:
    """The result of a collective that sums. In float32 on CPU for 16-bit arrays: XLA's CPU backend
    aborts on an explicit 16-bit sum over devices."""
    if on_cpu() and x.dtype in (jax.numpy.bfloat16, jax.numpy.float16):
        return collective(x.astype(jax.numpy.float32)).astype(x.dtype)
    return collective(x)
