"""Topologies of devices that need not be there, and a step compiled for them; nothing is run.

A topology is written as the sizes of a TPU slice (`v5p:8x8x8`, `v5e:16x16`) or as GPU nodes
(`h100:128x8`). libtpu has to be told along which dimensions a slice's links form rings
(planner/layer/torus_links.py).

The compilers come with jax's own packages and need neither a device nor a driver. They would look
for devices in a process that has some, so they run in a separate one,
`python -m jaxtrain.planner.programs.topology FOLDER`.
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
from jaxtrain.config import ResolvedConfig, UsageError
from jaxtrain.devices.startup import set_xla_flags
from jaxtrain.planner.layer import hardware, torus_links
from jaxtrain.planner.programs.program import Program

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parents[2]  # or where the package is installed
REQUIREMENTS = "requirements/compilers.txt"
INSTALL_COMMAND = f"python -m pip install --no-deps --target .venv-compilers -r {REQUIREMENTS}"
NODE = 8  # GPUs
EXAMPLE = 64  # devices of a topology that an error suggests
MEMORY = ("argument", "temp", "output", "alias", "host_argument", "host_temp")  # XLA's analysis
COST = ("flops", "bytes accessed")  # of XLA's analysis
# The part of a GPU's memory that XLA compiles for where it has no allocator's limit.
WITHOUT_ALLOCATOR = 0.8
# The environment of a process that compiles: libtpu looks for no chips and writes no logs.
QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_LOG_DIR": "disabled",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
LONGEST = 3600  # seconds that a compiler may take


class Refused(RuntimeError):
    """A step that the compiler rejects; the text is the compiler's output."""

    @property
    def line(self) -> str:
        """The first line of the error itself."""
        lines = str(self).splitlines()
        errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
        return (errors or lines[-1:] or ["no words"])[-1]


def compilers() -> pathlib.Path:
    """The absolute path of the compilers' folder: $JAXTRAIN_COMPILERS, or .venv-compilers.

    The latter lies in the repository, or in the current folder where the package is installed.
    """
    base = REPOSITORY if (REPOSITORY / REQUIREMENTS).exists() else pathlib.Path()
    return pathlib.Path(os.environ.get("JAXTRAIN_COMPILERS") or base / ".venv-compilers").absolute()


@dataclasses.dataclass(frozen=True)
class Platform:
    """A kind of device that has a compiler.

    package:     the distribution that contains the compiler
    backend:     "tpu" or "gpu"
    device_kind: jax's name of a device
    hardware:    its file in planner/layer/hardware
    sizes:       the number of a topology's dimensions
    """

    name: str
    package: str
    backend: str
    device_kind: str
    hardware: str
    sizes: int

    @property
    def missing(self) -> bool:
        """True if neither the environment nor the compilers' folder has the compiler."""
        return not self.version

    @property
    def version(self) -> str:
        """The version of the installed compiler; "" if it is missing."""
        packages = importlib.metadata.distributions(
            name=self.package, path=[str(compilers()), *sys.path]
        )
        return next((package.version for package in packages), "")

    @property
    def compiler(self) -> str:
        """The compiler's package and version."""
        return f"{self.package} {self.version}"

    @property
    def form(self) -> str:
        """The form in which a topology is written."""
        sizes = "NODESx8" if self.backend == "gpu" else "x".join("ABC"[: self.sizes])
        return f"{self.name}:{sizes}"

    @property
    def largest_slice(self) -> int:
        """The number of chips in a TPU's largest slice."""
        return hardware.load(self.hardware).tiers[0].devices

    @property
    def rule(self) -> str:
        """The rule that its topologies keep, as errors state it."""
        if self.backend == "gpu":
            return "1, 2, 4 or 8 GPUs in a node, 8 in each of several"
        most = (
            f"of at most {torus_links.POD_SIDE} chips"
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
FORMS = ", ".join(platform.form for platform in PLATFORMS.values())


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of a platform. sizes: chips along a slice's dimensions, or nodes and GPUs of each."""

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
        """The dimensions, of three, along which a slice's links form a ring."""
        if self.platform.backend == "gpu":
            return (False,) * 3
        return (*torus_links.rings(self.sizes), False)[:3]

    @property
    def nearest(self) -> "Topology":
        """The topology itself if the platform has it, else a similar one that it has."""
        if self.platform.backend == "gpu":
            nodes = max(1, self.sizes[0])
            gpus = next((n for n in (1, 2, 4) if nodes == 1 and n >= self.sizes[1] >= 1), NODE)
            return Topology(self.platform, (nodes, gpus))
        sizes = [max(2, 2 * round(size / 2)) for size in self.sizes[:2]]
        sizes += [max(1, size) for size in self.sizes[2:]]
        if self.platform.sizes == 2:
            sizes = [min(torus_links.POD_SIDE, size) for size in sizes]
        while math.prod(sizes) > self.platform.largest_slice:
            longest = sizes.index(max(sizes))
            sizes[longest] = max(2, sizes[longest] // 4 * 2)
        return Topology(self.platform, tuple(sizes))

    def arguments(self) -> Mapping[str, Any]:
        """The arguments of `jax.experimental.topologies.get_topology_desc` for the devices."""
        name, _, sizes = self.text.partition(":")
        if self.platform.backend == "gpu":
            limit = hardware.load(self.platform.hardware).memory / WITHOUT_ALLOCATOR
            return {
                "platform": "cuda",
                "topology": f"1x{sizes}",  # slices, hosts, GPUs
                "target_config": (HERE / f"{name}.txtpb")
                .read_text()
                .replace("MEMORY", f"{limit:.0f}"),
            }
        cores = {"chip_config_name": "megacore"} if self.platform.sizes == 3 else {}
        return {
            "platform": "tpu",
            "topology_name": f"{'v5' if name == 'v5p' else name}:{sizes}",  # libtpu's name
            "wrap": self.wrap,
            "num_slices": 1,
            "chips_per_host_bounds": (2, 2, 1),
            **cores,
        }


def parse(text: str) -> Topology:
    """The topology of a text like `v5p:8x8x8`. Raises UsageError, which names the nearest."""
    name, _, sizes = text.lower().strip().partition(":")
    if name not in PLATFORMS:
        near = (difflib.get_close_matches(name, PLATFORMS, 1, 0.5) or ["v5p"])[0]
        raise UsageError(
            f"--topology={text!r} is none of {FORMS}", {"topology": fitting(near, EXAMPLE).text}
        )
    platform = PLATFORMS[name]
    if not re.fullmatch(r"\d{1,6}(x\d{1,6})*", sizes) or sizes.count("x") != platform.sizes - 1:
        raise UsageError(
            f"--topology={text!r} is not written as {platform.form}",
            {"topology": fitting(name, EXAMPLE).text},
        )
    topology = Topology(platform, tuple(map(int, sizes.split("x"))))
    if topology != topology.nearest:
        raise UsageError(
            f"--topology={text!r} is no {name} topology ({platform.rule})",
            {"topology": topology.nearest.text},
        )
    return topology


def fitting(name: str, devices: int) -> Topology:
    """A platform's topology with this number of devices, the closest to a cube.

    Raises UsageError if the platform has none.
    """
    platform = PLATFORMS[name]
    topologies = (
        Topology(platform, sizes) for sizes in torus_links.shapes(devices, platform.sizes)
    )
    possible = [topology for topology in topologies if topology == topology.nearest]
    if not possible:
        raise UsageError(f"no {name} topology has {devices} devices ({platform.rule})")
    return possible[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program.

    tracing, compiling: seconds
    memory:  bytes on a device by XLA's analysis, with the keys MEMORY
    kinds:   bytes on a device by what they hold (`Step.state_memory`)
    pools:   kind of slot → its number, and the bytes of one
    cost:    XLA's cost analysis: "flops", "bytes accessed"; loops count as if of one trip
    """

    text: str
    tracing: float = 0.0
    compiling: float = 0.0
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pools: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    cost: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def program(self) -> Program:
        return Program(self.text)

    @property
    def total(self) -> int:
        """Bytes on a device: arguments, temporary memory, and results in memory of their own."""
        results = self.memory.get("output", 0) - self.memory.get("alias", 0)
        return self.memory["argument"] + self.memory["temp"] + results


def compile_config(
    devices: Topology,
    config: ResolvedConfig,
    options: Mapping[str, Any] | None = None,
    program: str = "train",
) -> Compiled:
    """Compiles a program of a config's step. Raises Refused.

    options: XLA's options, which override those of the step
    program: "train", or "gradients" for gradients and loss without the update
    """
    paths = [str(REPOSITORY), str(compilers()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **QUIET,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    set_xla_flags(environment)  # as a run has them
    request = {
        "topology": devices.text,
        "config": configs.to_dict(config),
        "options": dict(options or {}),
        "program": program,
    }
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "request.json").write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, "-m", "jaxtrain.planner.programs.topology", folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        if done.returncode:
            raise Refused(f"{devices.text} {program}\n{done.stderr[-6000:]}")
        return Compiled(
            pathlib.Path(folder, "program.txt").read_text(),
            **json.loads(pathlib.Path(folder, "figures.json").read_text()),
        )


def main(folder: str) -> None:
    """Compiles what request.json in a folder asks for.

    Writes program.txt, and figures.json with the other fields of `Compiled`, into the folder.
    """
    import jax
    from jax.experimental import topologies

    from jaxtrain.devices.mesh import make_mesh, sizes_of
    from jaxtrain.parallel.attention import cudnn
    from jaxtrain.training.step import make_step

    jax.config.update("jax_enable_compilation_cache", False)
    request = json.loads(pathlib.Path(folder, "request.json").read_text())
    topology, program = parse(request["topology"]), request["program"]
    config = configs.from_dict(request["config"]).resolve()
    devices = topologies.get_topology_desc(**topology.arguments()).devices
    mesh = make_mesh(sizes_of(config.mesh), devices)
    step = make_step(config, mesh)
    with jax.set_mesh(mesh), jax.default_device(devices[0]), cudnn.stand_in():
        begin = time.time()
        if program == "train":
            lowered = step.lower()
        else:
            lowered = getattr(step, program).lower(step.abstract_state().read, step.abstract_batch)
        traced = time.time()
        compiled = lowered.compile(compiler_options=request["options"])
        done = time.time()
    analysis, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    figures = {
        "tracing": round(traced - begin, 1),
        "compiling": round(done - traced, 1),
        "memory": {name: getattr(analysis, f"{name}_size_in_bytes") for name in MEMORY},
        "kinds": step.state_memory(config.parallel.reduce == "microbatch"),
        "pools": step.slot_pools(),
        "cost": {name: cost[name] for name in COST if name in cost},
    }
    pathlib.Path(folder, "program.txt").write_text(compiled.as_text() or "")
    pathlib.Path(folder, "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
