"""The order of devices, and what is refused. Devices of other machines are stand-ins with the
attributes that order them."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxtrain.devices import mesh as meshes
from jaxtrain.devices.mesh import (
    AXES,
    describe,
    make_mesh,
    psum,
    psum_scatter,
    scatter_by_levels,
)


@dataclasses.dataclass(frozen=True)
class Device:
    """A stand-in for a device of another machine."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "H100"
    slice_index: int = 0


def ids(mesh_or_array) -> np.ndarray:
    return np.vectorize(lambda d: d.id)(getattr(mesh_or_array, "devices", mesh_or_array))


def test_axes_always_exist_and_are_left_to_the_partitioner():
    mesh = make_mesh((1, 2, 2, 1, 1, 2))
    assert mesh.axis_names == AXES == ("replica", "data", "stage", "context", "expert", "model")
    assert dict(mesh.shape) == {
        "replica": 1,
        "data": 2,
        "stage": 2,
        "context": 1,
        "expert": 1,
        "model": 2,
    }
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert make_mesh((1,) * 6, jax.devices()[:1]).size == 1
    assert ids(mesh).ravel().tolist() == list(range(8))


def test_wrong_number_of_devices():
    with pytest.raises(ValueError, match="a mesh of 1×3×1×1×1×2 needs 6 devices, not 8"):
        make_mesh((1, 3, 1, 1, 1, 2))


def test_model_lies_inside_a_node():
    # 4 nodes of 4, listed in disorder: neighbours along `model`, then along `stage`, share a node
    # as far as they can.
    devices = [Device(i, process_index=i // 4) for i in np.random.default_rng(0).permutation(16)]
    order = meshes._order((1, 2, 2, 1, 1, 4), devices)
    nodes = np.vectorize(lambda d: d.process_index)(order)
    assert (nodes == nodes[..., :1]).all()
    assert ids(order).ravel().tolist() == list(range(16))


def test_one_process_a_device():
    order = meshes._order((1, 2, 1, 1, 1, 2), [Device(i, process_index=3 - i) for i in range(4)])
    assert np.vectorize(lambda d: d.process_index)(order).ravel().tolist() == [0, 1, 2, 3]


def tpu_slices(monkeypatch, sizes, slices):
    """The (inside, across) sizes that a hybrid mesh is asked for."""
    asked = []
    monkeypatch.setattr(
        meshes.mesh_utils,
        "create_hybrid_device_mesh",
        lambda inside, across, devices, **_: asked.append((inside, across)),
    )
    devices = [
        Device(i, platform="tpu", slice_index=i * slices // int(np.prod(sizes)))
        for i in range(int(np.prod(sizes)))
    ]
    meshes._order(sizes, devices)
    return asked[0]


def test_slices_lie_along_the_outermost_axes(monkeypatch):
    assert tpu_slices(monkeypatch, (2, 4, 1, 1, 1, 2), 2) == (
        (1, 4, 1, 1, 1, 2),
        (2, 1, 1, 1, 1, 1),
    )
    assert tpu_slices(monkeypatch, (2, 4, 1, 1, 1, 2), 4) == (
        (1, 2, 1, 1, 1, 2),
        (2, 2, 1, 1, 1, 1),
    )
    with pytest.raises(
        ValueError,
        match="3 slices cannot be laid over a mesh of 2×2×1×1×1×1: "
        "make mesh.replica a multiple of 3",
    ):
        tpu_slices(monkeypatch, (2, 2, 1, 1, 1, 1), 3)


def test_description():
    assert describe(make_mesh((1, 2, 2, 1, 1, 2))) == [
        "mesh: data 2 × stage 2 × model 2 (8 × cpu, 1 process)",
    ]
    assert describe(make_mesh((1,) * 6, jax.devices()[:1])) == [
        "mesh: one device (1 × cpu, 1 process)"
    ]


def test_description_of_axes_across_processes():
    class Mesh:
        devices = np.array([Device(i, process_index=i // 2) for i in range(32)]).reshape(
            1, 16, 1, 1, 1, 2
        )
        shape = dict(zip(AXES, devices.shape, strict=True))
        size = 32

    assert describe(Mesh) == [
        "mesh: data 16 × model 2 (32 × H100, 16 processes)",
        "  data: across 16 processes",
        "  model: inside each process",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_over_devices(dtype):
    """In bfloat16 too, on which XLA's CPU backend aborts by itself; and over axes of one device."""
    mesh = make_mesh((1, 2, 4, 1, 1, 1))
    x = np.arange(32, dtype=np.float32).reshape(8, 4).astype(dtype)

    def local(x):
        return (
            psum(x, ("replica", "data", "stage")),
            psum(x, ("replica",)),
            psum_scatter(x, "stage", dim=1),
        )

    rows = P(("data", "stage"))
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            local,
            in_specs=rows,
            out_specs=(P(), rows, P("data", "stage")),
            axis_names=set(meshes.MANUAL_AXES),
            check_vma=False,
        )
        whole, same, scattered = jax.jit(run)(x)
    np.testing.assert_array_equal(whole, x.astype(np.float32).sum(0, keepdims=True))
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(scattered, x.astype(np.float32).reshape(2, 4, 4).sum(1))
    assert whole.dtype == same.dtype == scattered.dtype == dtype


@pytest.mark.parametrize("axes", [("data",), ("data", "stage"), ("stage",)])
@pytest.mark.parametrize("inner", [2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_two_steps_of_a_reduce_scatter_leave_numbers_where_one_does(axes, inner, dim):
    """On 8, 2 · 4 and 4 devices; sums of small whole numbers are exact."""
    mesh = make_mesh((1, *((8, 1) if axes == ("data",) else (2, 4)), 1, 1, 1))
    if axes == ("stage",) and inner == 4:
        inner = 1
    x = np.arange(8 * 16 * 24, dtype=np.float32).reshape(8, 16, 24) % 101

    def local(x):
        both = scatter_by_levels(x[0], axes, dim, inner), psum_scatter(x[0], axes, dim)
        return tuple(a[None] for a in both)

    out = P(("data", "stage"))
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            local, in_specs=out, out_specs=(out, out), axis_names={"data", "stage"}, check_vma=False
        )
        by_levels, at_once = jax.jit(run)(x)
    np.testing.assert_array_equal(by_levels, at_once)
    assert at_once.shape[1 + dim] * math.prod(mesh.shape[a] for a in axes) == x.shape[1 + dim]
