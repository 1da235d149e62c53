"""Compiles the step for hardware that is not there, and reads what XLA made of a tick.

The compilers for TPU and GPU come with jax's own packages and need neither a device nor a driver. They are loaded by a process of their
own, `python tests/support/ahead.py PLATFORM DEVICES CONFIG OPTIONS PROGRAM FILE`: the simulated devices of the tests' process stay what
they are.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain import config as configs
from jaxtrain.config import Config
from support import ROOT, hlo

HERE = pathlib.Path(__file__).parent
# Where `scripts/test.sh --full` puts them (requirements-compilers.txt), or another folder, as for another Python
COMPILERS = pathlib.Path(os.environ.get("JAXTRAIN_COMPILERS") or ROOT / ".venv-compilers")

# A payload is smaller than an op's other activations, those than a device's part of any matrix; what a tick carries, and a device's part
# of the vocabulary, do not fit into a TPU's vector memory, where XLA would keep smaller arrays and copy them in and out.
MODEL = {
    "model.layers": 16,
    "model.width": 4096,
    "model.heads": 32,
    "model.vocab_size": 131072,
    "data.sequence_length": 1024,
    "data.batch_size": 16,
    "mesh.data": 2,
    "mesh.stage": 4,
    "mesh.model": 2,
    "pipeline.microbatches": 8,
    "pipeline.permute": "early",
}


@dataclasses.dataclass(frozen=True)
class Platform:
    """module: what must be importable; backend: jax's name of it; device_kind: as jax calls a device of it; topology: number of devices →
    the arguments that describe them."""

    module: str
    backend: str
    device_kind: str
    topology: Callable[[int], Mapping[str, Any]]

    @property
    def missing(self) -> bool:
        """Whether neither the environment nor COMPILERS has it."""
        if COMPILERS.joinpath(*self.module.split(".")).is_dir():
            return False
        try:
            return importlib.util.find_spec(self.module) is None
        except ModuleNotFoundError:  # nor is the package around it
            return True


HOPPER = 9.0  # an H100's compute capability
CUDNN = 91400  # 9.14, as jax counts
TORI = {64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16"}


def v5p(devices: int) -> dict[str, Any]:
    """Chips of a TPU v5p slice. From 64 on their links go round, which a topology's name alone does not say."""
    if devices in TORI:
        links = {"num_slices": 1, "wrap": (True, True, True)}
        chips = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
        return {"platform": "tpu", "topology_name": f"v5:{TORI[devices]}", **chips, **links}
    return {"platform": "tpu", "topology_name": f"v5p:2x2x{devices // 4}"}


def h100s(devices: int) -> dict[str, Any]:
    """H100s, 8 in a host."""
    topology = f"1x{max(1, devices // 8)}x{min(devices, 8)}"  # slices × hosts × GPUs
    return {"platform": "cuda", "topology": topology, "target_config": (HERE / "h100.txtpb").read_text()}


PLATFORMS = {
    "tpu_v5p": Platform("libtpu", "tpu", "TPU v5p", v5p),
    "h100": Platform("jax_plugins.xla_cuda13", "gpu", "NVIDIA H100 80GB HBM3", h100s),
}


# Installs the compilers of all platforms, as `scripts/test.sh --full` does; no device and no driver is needed.
INSTALL_COMMAND = "python -m pip install --no-deps --target .venv-compilers -r requirements-compilers.txt"


# --- the program -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled step. `payload` and `smallest_matrix` are elements on a device: what goes to another stage, and a layer's matrix.
    `memory` is XLA's account, bytes on a device; `on_host` those of slots that are to lie in the host's memory; `seconds`: what tracing
    and compiling took."""

    text: str
    payload: int
    smallest_matrix: int
    seconds: float = 0.0
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    on_host: int = 0

    @functools.cached_property
    def program(self) -> hlo.Program:
        return hlo.Program(self.text)

    @functools.cached_property
    def tick(self) -> str:
        """The body of the scan over the table's rows: of the loops around everything, the one with permutes in it."""
        loops = [i for i in self.program.inline(self.program.entry) if i.opcode == "while"]
        found = [i for i in loops if any(j.collective == "collective-permute" for j in self.program.below(i.calls["body"]))]
        if len(found) != 1:
            raise ValueError(f"permutes are in {len(found)} of the loops {[i.name for i in loops]}")
        return found[0].calls["body"]

    @functools.cached_property
    def holders(self) -> set[str]:
        """The names of the tick's loops that are around ops."""
        return self.program.holders(self.tick)

    @property
    def ops(self) -> list[hlo.Instruction]:
        return [i for i in self.program.inline(self.tick, self.holders) if i.opcode == "while" and self.program.is_op(i)]


def compile_step(
    platform: str, changes: Mapping[str, Any], options: Mapping[str, Any] | None = None, program: str = "gradients"
) -> Compiled:
    """A program of the step of MODEL with changes for 16 devices: as `compile_config`."""
    return compile_config(platform, configs.replace(Config(), MODEL | dict(changes)).resolve(), 16, options, program)


def compile_config(
    platform: str, config: Config, devices: int, options: Mapping[str, Any] | None = None, program: str = "gradients"
) -> Compiled:
    """A program of a resolved config's step for a platform: loss and `gradients`, or all of `train`. `options`: XLA's, over
    those of the step. Raises RuntimeError with the compiler's words where it refuses."""
    paths = os.pathsep.join([str(ROOT), str(HERE.parent), str(COMPILERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "TPU_LOG_DIR": "disabled"}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "program.txt")
        words = [platform, str(devices), json.dumps(configs.to_dict(config)), json.dumps(dict(options or {})), program, str(file)]
        done = subprocess.run([sys.executable, __file__, *words], env=environment, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-3000:]}")
        print("\n".join(done.stdout.splitlines()[:-1]))
        return Compiled(file.read_text(), **json.loads(done.stdout.splitlines()[-1]))


def stand_in_for_cudnn() -> None:
    """What jax asks of this machine's cuDNN and GPU before it lowers attention is answered as a machine of PLATFORMS' H100s would."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    cudnn.check_cudnn_version = lambda: CUDNN
    cudnn.check_compute_capability = lambda least: float(least) <= HOPPER
    cudnn.is_cuda_compute_capability_equal = lambda wanted: float(wanted) == HOPPER


def main(platform: str, device_count: str, values: str, options: str, program: str, file: str) -> None:
    """Compiles, writes the program's text, and prints how long it took and then the sizes of `Compiled` as JSON."""
    import jax
    from jax.experimental import topologies

    from jaxtrain.devices.mesh import batch_shards, make_mesh, sizes_of
    from jaxtrain.training.step import abstract_batch, make_step

    jax.config.update("jax_enable_compilation_cache", False)
    if PLATFORMS[platform].backend == "gpu":
        stand_in_for_cudnn()
    config = configs.from_dict(json.loads(values))
    m, model = config.mesh, config.model
    devices = topologies.get_topology_desc(**PLATFORMS[platform].topology(int(device_count))).devices
    mesh = make_mesh(sizes_of(m), devices)
    step = make_step(config, mesh)
    state = step.abstract_state()
    with jax.set_mesh(mesh), jax.default_device(devices[0]):
        begin = time.time()
        lowered = getattr(step, program).lower(state if program == "train" else state.params, abstract_batch(config, step))
        traced = time.time()
        compiled = lowered.compile(compiler_options=json.loads(options))
    seconds = time.time() - begin
    pathlib.Path(file).write_text(compiled.as_text())
    account = compiled.memory_analysis()
    memory = {name: getattr(account, f"{name}_size_in_bytes") for name in ("argument", "temp", "host_argument", "host_temp")}
    shown = ", ".join(f"{size / 1e9:.2f} GB {name}" for name, size in memory.items())
    print(f"{platform}: traced in {traced - begin:.0f} s, compiled in {begin + seconds - traced:.0f} s; {shown}")
    rows = config.sequences_per_microbatch // batch_shards(mesh.shape)
    narrowest = min(filter(None, (model.heads * model.head_dim, model.kv_heads * model.head_dim, model.mlp_width)))
    sizes = {"payload": rows * config.data.sequence_length * model.width, "smallest_matrix": narrowest * model.width}
    size = step.slot_bytes() if step.setup.train else {}
    on_host = sum(step.setup.train.pool_sizes[pool] * size[pool] for pool in step.host_pools) if step.setup.train else 0
    parts = {name: size // m.model for name, size in sizes.items()}
    print(json.dumps(parts | {"memory": memory, "on_host": on_host, "seconds": round(seconds, 1)}))


# --- the checks: each returns what it finds wrong ---------------------------------------------------------------------------------


def _permutes(c: Compiled) -> list[hlo.Instruction]:
    """The tick's own."""
    return [i for i in c.program.inline(c.tick) if i.collective == "collective-permute"]


def blocking_permutes(c: Compiled) -> list[str]:
    """Permutes of the tick that are not in two halves, or that XLA marked as waiting all the same; or another number than one each way."""
    found = _permutes(c)
    dones = [i.operands[0] for i in c.program.inline(c.tick) if i.opcode == "collective-permute-done"]
    blocking = [i.text for i in found if not i.starts or dones.count(i.name) != 1 or '"is_sync":true' in i.text]
    return blocking + [f"{len(found)} permutes in the tick"] * (len(found) != 2)


def late_permutes(c: Compiled) -> list[str]:
    """Permutes of the tick that do not start before its first op, or are done before its last."""
    here = list(c.program.inline(c.tick))
    ops = [n for n, i in enumerate(here) if i.opcode == "while" and (i.name in c.holders or c.program.is_op(i))]
    if not ops:
        return ["no ops"]
    late = [f"{i.name} after an op" for n, i in enumerate(here) if i.collective == "collective-permute" and n > ops[0]]
    return late + [f"{i.name} before an op" for n, i in enumerate(here) if i.opcode == "collective-permute-done" and n < ops[-1]]


def permutes_in_ops(c: Compiled) -> list[str]:
    """Permutes in a loop of the tick."""
    own = {i.name for i in _permutes(c)}
    return [i.text for i in c.program.below(c.tick) if i.collective == "collective-permute" and i.name not in own]


def wide_collectives(c: Compiled) -> list[str]:
    """Collectives anywhere in the scan that are as large as a device's part of a matrix."""
    return [i.text for i in c.program.below(c.tick) if i.collective and max(i.sizes) >= c.smallest_matrix]


def large_moves(c: Compiled) -> list:
    """What is larger than a payload in the tick outside the ops; or too many payloads: two that leave and two that arrive, with a copy
    or two of each."""
    moved = c.program.moved(c.tick, c.holders)
    total = sum(size * times for (_, size), times in moved.items())
    return [key for key in moved if key[1] > c.payload] + [f"{total} elements in all"] * (total > 10 * c.payload)


def products_beside(c: Compiled, kind: str) -> dict[str, list[str]]:
    """The products that stand between the halves of each large collective of a kind, in the ops: its name → their names. Large is a
    payload or more."""
    beside: dict[str, list[str]] = {}
    for computation in {i.computation for i in c.program.below(c.tick)}:
        begun: set[str] = set()
        for i in c.program.computations[computation]:
            if i.collective == kind and i.starts and max(i.sizes) >= c.payload:
                begun.add(i.name)
                beside[i.name] = []
            elif i.opcode == f"{kind}-done":
                begun.discard(i.operands[0])
            elif i.opcode in ("fusion", "custom-call", "dot") and i.op_name.endswith("/dot_general"):
                for name in begun:
                    beside[name].append(i.name)
    return beside


CHECKS: tuple[Callable[[Compiled], list], ...] = (blocking_permutes, late_permutes, permutes_in_ops, wide_collectives, large_moves)


def faults(c: Compiled) -> dict[str, list]:
    """What is wrong, by check."""
    return {check.__name__: found for check in CHECKS if (found := check(c))}


if __name__ == "__main__":
    main(*sys.argv[1:])
