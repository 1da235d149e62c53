"""Devices that are not there, as the compilers know them, and a config's step compiled for them.

A text names them: a TPU slice by its sizes, GPUs by nodes. `v5p:8x8x8`, `v5e:16x16`, `h100:128x8`. A TPU's links
go round where the whole dimension is behind optical switches or the pod ends: on v4 and v5p if every dimension is
a multiple of 4, on v5e and v6e along a dimension of 16. (Google Cloud's documentation of each chip; libtpu has to
be told.)

The compilers come with jax's own packages and need neither a device nor a driver; nothing here installs them.
They would look for devices in a process that has them, so they have a process of their own,
`python -m jaxtrain.hlo.topology FOLDER`. Nothing is run, and nothing written but the program's text.
"""

import dataclasses
import difflib
import functools
import importlib.metadata
import importlib.util
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
REQUIREMENTS = "requirements-compilers.txt"
INSTALL_COMMAND = f"python -m pip install --no-deps --target .venv-compilers -r {REQUIREMENTS}"
CUBE = 4  # chips along each side of what optical switches join: v4 and v5p
POD_SIDE = 16  # of v5e and v6e
NODE = 8  # GPUs
HOPPER = 9.0  # an H100's compute capability
CUDNN = 91400  # 9.14, as jax counts
SOURCES = pathlib.Path(__file__).parents[2]  # the folder of the package
MEMORY = ("argument", "temp", "output", "alias", "host_argument", "host_temp")  # of XLA's account
LONGEST = 3600  # seconds that a compiler may take


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


class Refused(RuntimeError):
    """A step that the compiler does not take; the text has its words."""

    @property
    def line(self) -> str:
        """The first line of the error itself."""
        lines = str(self).splitlines()
        errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
        return (errors or lines[-1:] or ["no words"])[-1]


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program.

    tracing, compiling: seconds
    memory:  XLA's account, bytes on a device: MEMORY
    kinds:   bytes on a device that the program is known to need: parameters, moments, accumulators, slots (`training.step.state_memory`)
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
        return self.memory["argument"] + self.memory["temp"] + self.memory.get("output", 0) - self.memory.get("alias", 0)


def compile_config(devices: Topology, config: Config, options: Mapping[str, Any] | None = None, program: str = "train") -> Compiled:
    """A program of a resolved config's step: all of `train`, or loss and `gradients`. `options`: XLA's, over those of the step. Raises
    Refused."""
    paths = os.pathsep.join([str(SOURCES), str(compilers()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "TPU_LOG_DIR": "disabled"}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    request = {"topology": devices.text, "config": configs.to_dict(config), "options": dict(options or {}), "program": program}
    with tempfile.TemporaryDirectory() as folder:
        # A file, for a command line has a limit.
        pathlib.Path(folder, "request.json").write_text(json.dumps(request))
        words = [sys.executable, "-m", "jaxtrain.hlo.topology", folder]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LONGEST)
        if done.returncode:
            raise Refused(f"{devices.text} {program}\n{done.stderr[-6000:]}")
        figures = json.loads(pathlib.Path(folder, "figures.json").read_text())
        return Compiled(pathlib.Path(folder, "program.txt").read_text(), **figures)


def stand_in_for_cudnn() -> None:
    """What jax asks of this machine's cuDNN and GPU before it lowers attention is answered as a machine of H100s would."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    cudnn.check_cudnn_version = lambda: CUDNN
    cudnn.check_compute_capability = lambda least: float(least) <= HOPPER
    cudnn.is_cuda_compute_capability_equal = lambda wanted: float(wanted) == HOPPER


def main(folder: str) -> None:
    """Compiles what request.json in a folder asks for: program.txt and figures.json, the fields of `Compiled`, come beside it."""
    import jax
    from jax.experimental import topologies

    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.training.step import abstract_batch, make_step, slot_pools, state_memory

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
        lowered = getattr(step, program).lower(state if program == "train" else state.params, abstract_batch(config, step))
        traced = time.time()
        compiled = lowered.compile(compiler_options=request["options"])
        done = time.time()
    account = compiled.memory_analysis()
    figures = {
        "tracing": round(traced - begin, 1),
        "compiling": round(done - traced, 1),
        "memory": {name: getattr(account, f"{name}_size_in_bytes") for name in MEMORY},
        "kinds": state_memory(config, step),
        "pools": slot_pools(step),
    }
    pathlib.Path(folder, "program.txt").write_text(compiled.as_text())
    pathlib.Path(folder, "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
