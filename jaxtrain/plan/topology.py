"""Devices that are not there, as the compilers know them: a TPU slice by its sizes, GPUs by nodes. `v5p:8x8x8`, `v5e:16x16`, `h100:128x8`.

A TPU's links go round where the whole dimension is behind optical switches or the pod ends: on v4 and v5p if every dimension is a multiple
of 4, on v5e and v6e along a dimension of 16. (Google Cloud's documentation of each chip; libtpu has to be told.)
The compilers come with jax's own packages and need neither a device nor a driver; nothing here installs them.
"""

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.errors import UsageError
from jaxtrain.costs import hardware

HERE = pathlib.Path(__file__).parent
REQUIREMENTS = "requirements-compilers.txt"
INSTALL_COMMAND = f"python -m pip install --no-deps --target .venv-compilers -r {REQUIREMENTS}"
CUBE = 4  # chips along each side of what optical switches join: v4 and v5p
POD_SIDE = 16  # of v5e and v6e
NODE = 8  # GPUs


class TopologyError(UsageError):
    """Devices that no compiler here knows, or that the mesh does not fit; one line."""


def compilers() -> pathlib.Path:
    """The folder of the compilers: $JAXTRAIN_COMPILERS, or .venv-compilers of the repository, or else of the current folder."""
    repository = HERE.parents[1]
    base = repository if (repository / REQUIREMENTS).exists() else pathlib.Path()
    return pathlib.Path(os.environ.get("JAXTRAIN_COMPILERS") or base / ".venv-compilers").absolute()


@dataclasses.dataclass(frozen=True)
class Platform:
    """A kind of device with a compiler.

    package:     the distribution that is the compiler
    module:      what of it must be importable
    backend:     jax's name of it
    device_kind: as jax calls a device
    hardware:    its name in costs/hardware
    sizes:       how many numbers a topology has
    """

    name: str
    package: str
    module: str
    backend: str
    device_kind: str
    hardware: str
    sizes: int

    @property
    def missing(self) -> bool:
        """Whether neither the environment nor the compilers' folder has it."""
        if compilers().joinpath(*self.module.split(".")).is_dir():
            return False
        try:
            return importlib.util.find_spec(self.module) is None
        except ModuleNotFoundError:  # nor is the package around it
            return True

    @property
    def version(self) -> str:
        """Version of the installed compiler; "none" if there is none."""
        folders = importlib.metadata.distributions(name=self.package, path=[str(compilers())])
        try:
            return next((found.version for found in folders), None) or importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    @property
    def form(self) -> str:
        """How its topologies are written."""
        return f"{self.name}:{'NODESx8' if self.backend == 'gpu' else 'x'.join('ABC'[: self.sizes])}"


TPU, GPU = ("libtpu", "libtpu", "tpu"), ("jax-cuda13-pjrt", "jax_plugins.xla_cuda13", "gpu")
PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("v4", *TPU, "TPU v4", "tpu-v4", 3),
        Platform("v5p", *TPU, "TPU v5p", "tpu-v5p", 3),
        Platform("v5e", *TPU, "TPU v5 lite", "tpu-v5e", 2),
        Platform("v6e", *TPU, "TPU v6 lite", "tpu-v6e", 2),
        Platform("h100", *GPU, "NVIDIA H100 80GB HBM3", "h100", 2),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of a platform: chips along each dimension of a slice, or nodes and the GPUs of each."""

    platform: Platform
    sizes: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{self.platform.name}:{'x'.join(map(str, self.sizes))}"

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def wrap(self) -> tuple[bool, bool, bool]:
        """Along which dimensions a slice's links go round."""
        if self.platform.backend == "gpu":
            return (False, False, False)
        if self.platform.sizes == 3:
            return (all(size % CUBE == 0 for size in self.sizes),) * 3
        first, second = (size == POD_SIDE for size in self.sizes)
        return (first, second, False)

    def arguments(self) -> Mapping[str, Any]:
        """What describes the devices to `jax.experimental.topologies.get_topology_desc`."""
        if self.platform.backend == "gpu":
            slices_hosts_gpus = f"1x{self.text.partition(':')[2]}"
            return {"platform": "cuda", "topology": slices_hosts_gpus, "target_config": (HERE / f"{self.platform.name}.txtpb").read_text()}
        # libtpu's own name of a v5p is v5.
        name = {"v5p": "v5"}.get(self.platform.name, self.platform.name) + self.text[len(self.platform.name) :]
        arguments = {"platform": "tpu", "topology_name": name, "wrap": self.wrap, "num_slices": 1, "chips_per_host_bounds": (2, 2, 1)}
        return arguments | ({"chip_config_name": "megacore"} if self.platform.sizes == 3 else {})


def parse(text: str) -> Topology:
    """The devices of `v5p:8x8x8` and the like. Raises TopologyError, with the nearest that works."""
    name, _, sizes = text.lower().strip().partition(":")
    if name not in PLATFORMS:
        near = PLATFORMS[(difflib.get_close_matches(name, PLATFORMS, 1, 0.5) or ["v5p"])[0]]
        forms = ", ".join(platform.form for platform in PLATFORMS.values())
        raise TopologyError(f"--topology={text!r} is none of {forms}", {"topology": _example(near).text})
    platform = PLATFORMS[name]
    if not re.fullmatch(r"\d{1,6}(x\d{1,6})*", sizes) or sizes.count("x") != platform.sizes - 1:
        raise TopologyError(f"--topology={text!r} is not written as {platform.form}", {"topology": _example(platform).text})
    found = Topology(platform, tuple(map(int, sizes.split("x"))))
    if found != (nearest := _nearest(found)):
        raise TopologyError(f"--topology={text!r} is no {platform.name} topology ({_rule(platform)})", {"topology": nearest.text})
    return found


def fitting(name: str, devices: int) -> Topology:
    """A topology of a platform with so many devices, as close to a cube or square as there is. Raises TopologyError where there is none."""
    platform = PLATFORMS[name]
    if platform.backend == "gpu":
        found = [Topology(platform, (max(1, devices // NODE), min(devices, NODE)))]
    else:
        found = [Topology(platform, sizes) for sizes in _factors(devices, platform.sizes)]
    works = [topology for topology in found if topology.devices == devices and topology == _nearest(topology)]
    if not works:
        raise TopologyError(f"no {name} topology has {devices} devices ({_rule(platform)})")
    # Links that go round come first, then what is closest to a cube, its short sides first.
    return min(works, key=lambda t: (not all(t.wrap), sum(t.sizes), t.sizes))


def _factors(devices: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(devices,)]
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    return [(n, *rest) for n in divisors for rest in _factors(devices // n, count - 1)]


def _most(platform: Platform) -> int:
    """The number of chips in the largest slice of a TPU."""
    return hardware.load(platform.hardware).tiers[0].devices


def _rule(platform: Platform) -> str:
    """What its topologies have in common."""
    if platform.backend == "gpu":
        return "1, 2, 4 or 8 GPUs in a node, 8 in each of several"
    most = f"of at most {POD_SIDE} chips" if platform.sizes == 2 else f"with at most {_most(platform)} chips in all"
    return f"the first two dimensions are even, for a host has 2 × 2 chips; {most}"


def _nearest(topology: Topology) -> Topology:
    """The topology itself if there is such a one, else one close to it."""
    platform = topology.platform
    if platform.backend == "gpu":
        nodes = max(1, topology.sizes[0])
        gpus = next((n for n in (1, 2, 4, NODE) if n >= topology.sizes[1] >= 1), NODE) if nodes == 1 else NODE
        return Topology(platform, (nodes, gpus))
    sizes = [max(2, 2 * round(size / 2)) if i < 2 else max(1, size) for i, size in enumerate(topology.sizes)]
    if platform.sizes == 2:
        sizes = [min(POD_SIDE, size) for size in sizes]
    while math.prod(sizes) > _most(platform):
        longest = sizes.index(max(sizes))
        sizes[longest] = max(2, sizes[longest] // 4 * 2)
    return Topology(platform, tuple(sizes))


def _example(platform: Platform) -> Topology:
    return fitting(platform.name, 64)
