"""NCCL, by which GPUs communicate: its version, and what is known to hang. No jax, no driver."""

import contextlib
import ctypes
import importlib.metadata
import platform
import re

from jaxtrain.devices.cluster_environment import ClusterError

# Older ones lose places for messages on ARM until all ranks wait:
# https://github.com/NVIDIA/nccl/issues/2353
LEAST_ON_ARM = (2, 29, 3)


def version() -> tuple[int, ...]:
    """NCCL's version, such as (2, 29, 3): that of the wheel, else of the library that the linker
    finds; () without one."""
    for wheel in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers = re.findall(r"\d+", importlib.metadata.version(wheel))
            return tuple(int(number) for number in numbers[:3])
    number = ctypes.c_int()  # 22903 for 2.29.3
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    value = number.value
    return (value // 10_000, value // 100 % 100, value % 100) if value else ()


def describe(
    installed: tuple[int, ...], gpus: int, processes: int, old_nccl: bool = False, machine: str = ""
) -> list[str]:
    """Lines about the version and the GPUs of a process, for `gpus` in all processes together.
    Raises ClusterError for a version that hangs on this machine, unless `old_nccl` insists."""
    name = ".".join(map(str, installed)) or "of an unknown version"
    if (
        (machine or platform.machine()) == "aarch64"
        and () < installed < LEAST_ON_ARM
        and not old_nccl
    ):
        raise ClusterError(
            f"NCCL {name} hangs on aarch64, in all processes and without an error (NVIDIA/nccl "
            "issue 2353): python -m pip install 'nvidia-nccl-cu13>=2.29.3'; --old_nccl=true trains "
            "with it"
        )
    note = (
        "note: in a process of several GPUs the order of NCCL's collectives can differ between "
        "them, and the run then hangs: start a process a GPU (on one machine: python -m "
        f"jaxtrain.launch --processes={gpus} -- and the flags), or set NCCL_LAUNCH_MODE=GROUP"
    )
    line = f"NCCL {name}; {gpus // processes} of {gpus} GPUs in a process"
    return [line, note] if gpus > processes else [line]
