"""The mesh: six axes, and devices in the network's order."""

import types

import jax
import numpy as np
import pytest

from jaxtrain import mesh as meshes


def test_all_six_axes_always_exist():
    mesh = meshes.make_mesh((1, 2, 2, 1, 1, 2))
    assert mesh.axis_names == meshes.AXES and dict(mesh.shape)["context"] == 1
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_sizes_that_are_not_the_devices_are_an_error():
    with pytest.raises(ValueError, match="needs 4 devices, not 8"):
        meshes.make_mesh((1, 2, 2, 1, 1, 1))


def test_model_is_inside_a_process_whatever_order_devices_come_in():
    devices = [types.SimpleNamespace(platform="gpu", process_index=i // 4, id=i) for i in (5, 2, 7, 0, 3, 6, 1, 4)]
    order = meshes._order((1, 2, 1, 1, 1, 4), devices)
    for row in order.reshape(2, 4):
        assert len({d.process_index for d in row}) == 1
        assert [d.id for d in row] == sorted(d.id for d in row)


def test_slices_that_do_not_fit_the_outer_axes_are_an_error():
    devices = [types.SimpleNamespace(platform="tpu", slice_index=i // 4, process_index=0, id=i) for i in range(12)]
    with pytest.raises(ValueError, match="3 slices"):
        meshes._order((1, 2, 2, 1, 1, 1), devices)


def test_description_says_what_each_axis_spans():
    lines = meshes.describe(meshes.make_mesh((1, 2, 2, 1, 1, 2)))
    assert lines[0].startswith("mesh: data 2 × stage 2 × model 2 (8 ×")
    assert any("model: inside a process, devices 0, 1" in line for line in lines)
    assert meshes.describe(meshes.make_mesh((1,) * 6, jax.devices()[:1]))[0].startswith("mesh: one device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_over_axes_of_one_or_more_devices(dtype):
    mesh = meshes.make_mesh((1, 4, 2, 1, 1, 1))
    P = jax.sharding.PartitionSpec

    def body(x):
        scattered = meshes.psum_scatter(x, ("data",), 1)
        return meshes.psum(x, ("replica", "expert")), meshes.psum(x, ("replica", "data")), scattered

    x = np.arange(32, dtype=np.float32).reshape(4, 8).astype(jax.numpy.dtype(dtype))
    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=(P("data"), P(), P(None, "data")),
        axis_names=set(meshes.MANUAL_AXES),
        check_vma=False,
    )
    alone, total, scattered = jax.jit(run)(x)
    np.testing.assert_array_equal(alone, x)
    np.testing.assert_array_equal(total, x.sum(0, keepdims=True))
    np.testing.assert_array_equal(scattered, x.sum(0, keepdims=True))
