"""The kind of device that kernels are chosen for, from what jax says of a device."""

import types

import jax
import pytest

from jaxtrain.config.kernels import TargetDevice
from jaxtrain.devices.mesh import make_mesh, on_cpu, on_nvidia_gpu, on_tpu, traced_for
from jaxtrain.parallel import target_device


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", None, TargetDevice("cpu")),
        ("tpu", None, TargetDevice("tpu")),
        ("gpu", "9.0", TargetDevice("gpu", (9, 0), 91200)),
        ("gpu", "12", TargetDevice("gpu", (12, 0), 91200)),
        ("gpu", "gfx942", TargetDevice("rocm")),  # AMD's, which jax calls gpu, too
    ],
)
def test_the_kind_of_a_device(monkeypatch, platform, capability, expected):
    versions = types.SimpleNamespace(cudnn_get_version=lambda: 91200)
    monkeypatch.setattr(target_device, "cuda_versions", versions)
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    assert target_device.target_device_of(device) == expected


def test_a_gpu_without_cudnn(monkeypatch):
    """As where a program is compiled ahead of time: the version is not known."""

    def missing():
        raise RuntimeError("cuDNN is not there")

    versions = types.SimpleNamespace(cudnn_get_version=missing)
    monkeypatch.setattr(target_device, "cuda_versions", versions)
    device = types.SimpleNamespace(platform="gpu", compute_capability="8.0")
    assert target_device.target_device_of(device) == TargetDevice("gpu", (8, 0), None)


def test_the_device_that_a_program_is_traced_for():
    with traced_for(make_mesh((1,) * 6, jax.devices()[:1])):
        assert target_device.target_device() == TargetDevice("cpu")
        assert on_cpu() and not on_tpu() and not on_nvidia_gpu()
