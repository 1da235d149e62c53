"""Devices that need not be there, as compilers know them, and a step compiled for them.

A text names them: a TPU slice by its sizes, GPUs by nodes. `v5p:8x8x8`, `v5e:16x16`, `h100:128x8`.
A TPU's links form a ring where optical switches join a dimension's ends or the pod does: on v4 and
v5p if every dimension is a multiple of 4, on v5e and v6e along a dimension of 16. (Google Cloud's
documentation of each chip; libtpu has to be told.)

The compilers come with jax's own packages and need neither a device nor a driver; nothing here
installs them. They would look for devices in a process that has some, so they run in a separate
one, `python -m jaxtrain.hlo.topology FOLDER`. Nothing is run, and nothing written but the program's
text.
"""

import dataclasses
import difflib
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.config.errors import UsageError
from jaxtrain.costs import hardware
from jaxtrain.hlo.program import Program

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parents[1]  # or where the package is installed
REQUIREMENTS = "requirements-compilers.txt"
INSTALL_COMMAND = f"python -m pip install --no-deps --target .venv-compilers -r {REQUIREMENTS}"
CUBE = 4  # chips along each side of what optical switches join: v4 and v5p
POD_SIDE = 16  # of v5e and v6e
NODE = 8  # GPUs
EXAMPLE = 64  # devices of a topology that an error suggests
HOPPER = 9.0  # an H100's compute capability
CUDNN = 91400  # 9.14, as jax counts
# Of XLA's memory analysis.
MEMORY = ("argument", "temp", "output", "alias", "host_argument", "host_temp")
NONE = "none"  # version of a compiler that is not installed
LONGEST = 3600  # seconds that a compiler may take


class TopologyError(UsageError):
    """Devices that no compiler here knows, or that the mesh does not fit; one line."""


class Refused(RuntimeError):
    """A step that the compiler does not take; the text has its words."""

    @property
    def line(self) -> str:
        """The first line of the error itself."""
        lines = str(self).splitlines()
        errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
        return (errors or lines[-1:] or ["no words"])[-1]


def compilers() -> pathlib.Path:
    """The folder of the compilers: $JAXTRAIN_COMPILERS, or .venv-compilers.

    That is the repository's, or the current folder's where the package is installed.
    """
    base = REPOSITORY if (REPOSITORY / REQUIREMENTS).exists() else pathlib.Path()
    return pathlib.Path(os.environ.get("JAXTRAIN_COMPILERS") or base / ".venv-compilers").absolute()


@dataclasses.dataclass(frozen=True)
class Platform:
    """A kind of device with a compiler.

    package:     the distribution that is the compiler
    backend:     jax's name of it
    device_kind: as jax calls a device
    hardware:    its name in costs/hardware
    sizes:       how many numbers a topology has
    """

    name: str
    package: str
    backend: str
    device_kind: str
    hardware: str
    sizes: int

    @property
    def missing(self) -> bool:
        """Whether neither the environment nor the compilers' folder has the compiler."""
        return self.version == NONE

    @property
    def version(self) -> str:
        """Version of the installed compiler; NONE if there is none."""
        packages = importlib.metadata.distributions(
            name=self.package,
            path=[str(compilers()), *sys.path],
        )
        return next((package.version for package in packages), NONE)

    @property
    def form(self) -> str:
        """How its topologies are written."""
        return (
            f"{self.name}:{'NODESx8' if self.backend == 'gpu' else 'x'.join('ABC'[: self.sizes])}"
        )

    @property
    def largest_slice(self) -> int:
        """The number of chips in a TPU's largest slice."""
        return hardware.load(self.hardware).tiers[0].devices

    @property
    def rule(self) -> str:
        """What its topologies have in common."""
        if self.backend == "gpu":
            return "1, 2, 4 or 8 GPUs in a node, 8 in each of several"
        most = (
            f"of at most {POD_SIDE} chips"
            if self.sizes == 2
            else f"with at most {self.largest_slice} chips in all"
        )
        return f"the first two dimensions are even, for a host has 2 × 2 chips; {most}"


TPU, GPU = ("libtpu", "tpu"), ("jax-cuda13-pjrt", "gpu")
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
    """Devices of a platform: chips along each dimension of a slice, or nodes and GPUs of each."""

    platform: Platform
    sizes: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{self.platform.name}:{'x'.join(map(str, self.sizes))}"

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Whether a slice's links form a ring, by dimension, of three."""
        if self.platform.backend == "gpu":
            return (False,) * 3
        if self.platform.sizes == 3:
            return (all(size % CUBE == 0 for size in self.sizes),) * 3
        return (*(size == POD_SIDE for size in self.sizes), False)

    @property
    def nearest(self) -> "Topology":
        """The topology itself if there is such a one, else one close to it."""
        if self.platform.backend == "gpu":
            nodes = max(1, self.sizes[0])
            gpus = next((n for n in (1, 2, 4) if nodes == 1 and n >= self.sizes[1] >= 1), NODE)
            return Topology(self.platform, (nodes, gpus))
        sizes = [max(2, 2 * round(size / 2)) for size in self.sizes[:2]]
        sizes += [max(1, size) for size in self.sizes[2:]]
        if self.platform.sizes == 2:
            sizes = [min(POD_SIDE, size) for size in sizes]
        while math.prod(sizes) > self.platform.largest_slice:
            longest = sizes.index(max(sizes))
            sizes[longest] = max(2, sizes[longest] // 4 * 2)
        return Topology(self.platform, tuple(sizes))

    def arguments(self) -> Mapping[str, Any]:
        """What describes the devices to `jax.experimental.topologies.get_topology_desc`."""
        name, _, sizes = self.text.partition(":")
        if self.platform.backend == "gpu":
            target = (HERE / f"{name}.txtpb").read_text()
            return {
                "platform": "cuda",
                "topology": f"1x{sizes}",
                "target_config": target,
            }  # slices, hosts, GPUs
        name = {"v5p": "v5"}.get(name, name)  # as libtpu calls it
        arguments = {
            "platform": "tpu",
            "topology_name": f"{name}:{sizes}",
            "wrap": self.wrap,
            "num_slices": 1,
        }
        cores = {"chip_config_name": "megacore"} if self.platform.sizes == 3 else {}
        return arguments | {"chips_per_host_bounds": (2, 2, 1)} | cores


def parse(text: str) -> Topology:
    """The devices of a text like `v5p:8x8x8`. Raises TopologyError, with the nearest that works."""
    name, _, sizes = text.lower().strip().partition(":")
    if name not in PLATFORMS:
        near = (difflib.get_close_matches(name, PLATFORMS, 1, 0.5) or ["v5p"])[0]
        forms = ", ".join(platform.form for platform in PLATFORMS.values())
        raise TopologyError(
            f"--topology={text!r} is none of {forms}", {"topology": fitting(near, EXAMPLE).text}
        )
    platform = PLATFORMS[name]
    if not re.fullmatch(r"\d{1,6}(x\d{1,6})*", sizes) or sizes.count("x") != platform.sizes - 1:
        rule = f"--topology={text!r} is not written as {platform.form}"
        raise TopologyError(rule, {"topology": fitting(name, EXAMPLE).text})
    devices = Topology(platform, tuple(map(int, sizes.split("x"))))
    if devices != devices.nearest:
        rule = f"--topology={text!r} is no {name} topology ({platform.rule})"
        raise TopologyError(rule, {"topology": devices.nearest.text})
    return devices


def fitting(name: str, devices: int) -> Topology:
    """A platform's topology of so many devices, the closest to a cube. Raises TopologyError."""
    platform = PLATFORMS[name]
    topologies = (Topology(platform, sizes) for sizes in _factors(devices, platform.sizes))
    possible = [topology for topology in topologies if topology == topology.nearest]
    if not possible:
        raise TopologyError(f"no {name} topology has {devices} devices ({platform.rule})")
    # Rings along all dimensions come first, then the closest to a cube, its short sides first.
    return min(possible, key=lambda t: (not all(t.wrap), sum(t.sizes), t.sizes))


def _factors(number: int, count: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of `count` factors."""
    if count == 1:
        return [(number,)]
    divisors = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors += [number // n for n in divisors]
    return [(n, *rest) for n in divisors for rest in _factors(number // n, count - 1)]


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program.

    tracing, compiling: seconds
    memory:  XLA's analysis, bytes on a device: MEMORY
    kinds:   bytes on a device that the program is known to need, by `training.sizes.state_memory`
    pools:   kind of slot → how many, bytes of each
    """

    text: str
    tracing: float = 0.0
    compiling: float = 0.0
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pools: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def program(self) -> Program:
        return Program(self.text)

    @property
    def seconds(self) -> float:
        return self.tracing + self.compiling

    @property
    def total(self) -> int:
        """Bytes on a device: arguments, temporary, and results that take no argument's place."""
        results = self.memory.get("output", 0) - self.memory.get("alias", 0)
        return self.memory["argument"] + self.memory["temp"] + results


def compile_config(
    devices: Topology,
    config: Config,
    options: Mapping[str, Any] | None = None,
    program: str = "train",
) -> Compiled:
    """A program of a resolved config's step, compiled. Raises Refused.

    options: XLA's, over those of the step
    program: "train", or "gradients" for these and the loss alone
    """
    paths = [str(REPOSITORY), str(compilers()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(paths),
        "TPU_LOG_DIR": "disabled",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    request = {
        "topology": devices.text,
        "config": configs.to_dict(config),
        "options": dict(options or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        # A file, for a command line has a limit.
        pathlib.Path(folder, "request.json").write_text(json.dumps(request | {"program": program}))
        words = [sys.executable, "-m", "jaxtrain.hlo.topology", folder]
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=LONGEST
        )
        if done.returncode:
            raise Refused(f"{devices.text} {program}\n{done.stderr[-6000:]}")
        figures = json.loads(pathlib.Path(folder, "figures.json").read_text())
        return Compiled(pathlib.Path(folder, "program.txt").read_text(), **figures)


def stand_in_for_cudnn() -> None:
    """Has jax find a cuDNN and an H100 when it asks for these, before it lowers attention."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    cudnn.check_cudnn_version = lambda: CUDNN
    cudnn.check_compute_capability = lambda least: float(least) <= HOPPER
    cudnn.is_cuda_compute_capability_equal = lambda wanted: float(wanted) == HOPPER


def main(folder: str) -> None:
    """Compiles what a folder's request.json asks for.

    Writes program.txt, and figures.json with the other fields of `Compiled`.
    """
    import jax
    from jax.experimental import topologies

    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.training.sizes import slot_pools, state_memory
    from jaxtrain.training.step import make_step

    jax.config.update("jax_enable_compilation_cache", False)
    request = json.loads(pathlib.Path(folder, "request.json").read_text())
    described, program = parse(request["topology"]), request["program"]
    if described.platform.backend == "gpu":
        stand_in_for_cudnn()
    config = configs.from_dict(request["config"])
    devices = topologies.get_topology_desc(**described.arguments()).devices
    mesh = make_mesh(sizes_of(config.mesh), devices)
    step = make_step(config, mesh)
    state = step.abstract_state()
    with jax.set_mesh(mesh), jax.default_device(devices[0]):
        begin = time.time()
        lowered = getattr(step, program).lower(
            state if program == "train" else state.params, step.abstract_batch
        )
        traced = time.time()
        compiled = lowered.compile(compiler_options=request["options"])
        done = time.time()
    analysis = compiled.memory_analysis()
    figures = {
        "tracing": round(traced - begin, 1),
        "compiling": round(done - traced, 1),
        "memory": {name: getattr(analysis, f"{name}_size_in_bytes") for name in MEMORY},
        "kinds": state_memory(step, config.parallel.reduce == "microbatch"),
        "pools": slot_pools(step),
    }
    pathlib.Path(folder, "program.txt").write_text(compiled.as_text())
    pathlib.Path(folder, "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
