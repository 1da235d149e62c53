"""Compiles a config's step for devices that are not there, in a process of its own: `python -m jaxtrain.plan.ahead REQUEST FOLDER`.

The compilers would look for devices in a process that has them, and a process's own devices stay what they are. topology.py says for which
devices; nothing is run, and nothing written but the program's text.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.plan import hlo, topology
from jaxtrain.plan.topology import Topology

HOPPER = 9.0  # an H100's compute capability
CUDNN = 91400  # 9.14, as jax counts
SOURCES = pathlib.Path(__file__).parents[2]  # the folder of the package
MEMORY = ("argument", "temp", "output", "alias", "host_argument", "host_temp")  # of XLA's account
LONGEST = 3600  # seconds that a compiler may take


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
    kinds:   bytes on a device that the program is known to need: parameters, moments, accumulators, slots (`plan.report.state_memory`)
    pools:   kind of slot → how many, bytes of each
    """

    text: str
    tracing: float = 0.0
    compiling: float = 0.0
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pools: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def program(self) -> hlo.Program:
        return hlo.Program(self.text)

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
    paths = os.pathsep.join([str(SOURCES), str(topology.compilers()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "TPU_LOG_DIR": "disabled"}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    request = {"topology": devices.text, "config": configs.to_dict(config), "options": dict(options or {}), "program": program}
    with tempfile.TemporaryDirectory() as folder:
        # A file, for a command line has a limit.
        pathlib.Path(folder, "request.json").write_text(json.dumps(request))
        words = [sys.executable, "-m", "jaxtrain.plan.ahead", folder]
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
    from jaxtrain.plan.report import slot_pools, state_memory
    from jaxtrain.training.step import abstract_batch, make_step

    jax.config.update("jax_enable_compilation_cache", False)
    request = json.loads(pathlib.Path(folder, "request.json").read_text())
    described, program = topology.parse(request["topology"]), request["program"]
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
