"""The device that kernels are chosen for (config/kernels.py): the one that a program is traced
for, with the properties of an NVIDIA GPU that decide about them."""

import jax
from jax._src.lib import cuda_versions

from jaxtrain.config.kernels import GPU, TargetDevice
from jaxtrain.devices.mesh import AbsentDevice, platform_of, traced_device


def target_device() -> TargetDevice:
    """The kind of device that a program is traced for."""
    return target_device_of(traced_device())


def target_device_of(device: jax.Device | AbsentDevice) -> TargetDevice:
    """The kind of a device."""
    platform = platform_of(device)
    if platform != GPU:
        return TargetDevice(platform)
    major, _, minor = str(device.compute_capability).partition(".")
    try:
        cudnn = cuda_versions.cudnn_get_version() if cuda_versions else None
    except RuntimeError:  # compiled ahead of time without cuDNN
        cudnn = None
    return TargetDevice(GPU, (int(major), int(minor or 0)), cudnn)
