"""The cases of peer_ahead.py: settings of a step for 64 TPU v5p chips, ours and MaxText's.

Both sides have the same model, mesh, sequences, optimizer, types (float32 parameters, bfloat16
products) and XLA options, and both keep documents apart. MaxText has its settings twice: at the
values that are fastest for it, and at its defaults. Its pipelines keep the optimizer's state whole
on each device of `data`, where ours scatter it: that saves it a gather.

In a case NAME both recompute everything. In NAME_kept each side keeps what makes it fastest and
fits into the chips' memory: MaxText the most of its `remat_policy`s that fits.
"""

import dataclasses

from ahead import DENSE, FLAT, LAYOUTS, SEPARATE, STAGES

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.planner.programs.topology import Topology, fitting

PLATFORM, CHIPS = "v5p", 64
# MaxText's name of the topology: cores, of which a chip has two.
COMMON = (
    "compile_topology=v5p-128",
    "compile_topology_num_slices=1",
    "override_model_config=True",
    "allow_split_physical_axes=True",  # an axis of 8 on a torus of 4 × 4 × 4
    "dataset_type=synthetic",
    "enable_checkpointing=False",
    "log_config=False",
    "run_name=peer",
)
# The backward in one kernel writes a partial sum of the queries' gradient for each block of keys:
# large blocks make few of them. Blocks of queries and of one product are as large as vector memory
# allows.
FASTEST = (
    "sa_use_fused_bwd_kernel=True",
    "sa_block_q=2048",
    "sa_block_kv=2048",
    "sa_block_kv_compute=512",
    "sa_block_q_dkv=1024",
    "sa_block_kv_dkv=2048",
    "sa_block_kv_dkv_compute=512",
)
FULL = ("remat_policy=full",)
# MaxText's mesh axes in their order.
AXES = (
    "diloco",
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "expert",
    "autoregressive",
)
LLAMA_70B = {
    "model.layers": 80,
    "model.width": 8192,
    "model.heads": 64,
    "model.kv_heads": 8,
    "model.mlp_width": 28672,
}


@dataclasses.dataclass(frozen=True)
class PeerCase:
    """A step that both sides compile.

    text:     what is printed
    recipe:   ours, with these settings
    model:    MaxText's name of the model
    mesh:     MaxText's mesh axes of more than one device
    settings: MaxText's other settings, of the case
    aim:      the most that ours may take over MaxText's fastest; 0: none
    policy:   MaxText's settings of recomputation where it is fastest
    """

    name: str
    text: str
    recipe: str
    ours: dict[str, object]
    model: str
    mesh: dict[str, int]
    settings: dict[str, object]
    aim: float = 0.0
    policy: tuple[str, ...] = FULL

    @property
    def topology(self) -> Topology:
        return fitting(PLATFORM, CHIPS)

    @property
    def config(self) -> Config:
        """Our config, checked for the devices and resolved."""
        hardware = {"train.hardware": self.topology.platform.hardware}
        recipe = load_recipe(find_recipe(self.recipe))
        config = configs.replace(recipe, {**hardware, **SEPARATE, **self.ours})
        backend = self.topology.platform.backend
        return checks.check_devices(config, CHIPS, backend).resolve()

    @property
    def maxtext_mesh(self) -> dict[str, int]:
        """Axis → size of MaxText's mesh, in its order."""
        return {axis: self.mesh.get(axis, 1) for axis in AXES}

    def maxtext_settings(self, fastest: bool, options: str) -> list[str]:
        """name=value of each of MaxText's settings. options: XLA's, as flags; not with defaults."""
        sizes = {"fsdp": 1} | self.mesh
        names = {"stage": "pipeline"}
        meshed = [f"ici_{names.get(axis, axis)}_parallelism={n}" for axis, n in sizes.items()]
        own = [f"{name}={value}" for name, value in self.settings.items()]
        chosen = [*self.policy, *FASTEST, f"compile_xla_flags={options}"] if fastest else FULL
        return [f"model_name={self.model}", *COMMON, *meshed, *own, *chosen]


def _pipeline(sequences: int, layers: int) -> dict[str, object]:
    """MaxText's settings of a pipeline of 2 repeats with 16 microbatches.

    sequences: of a device; layers: of a stage, in each repeat
    """
    return {
        "per_device_batch_size": sequences,
        "max_target_length": 8192,
        "num_layers_per_pipeline_stage": layers,
        "num_pipeline_repeats": 2,
        "num_pipeline_microbatches": 16,
    }


# The fastest of our own by the planner: every layer's input saved, as MaxText does.
PIPELINE = STAGES | {"pipeline.schedule": "gpipe", "pipeline.save": ("layer_input",)}
FLAT_SETTINGS: dict[str, object] = {"per_device_batch_size": 1, "max_target_length": 8192}
LLAMA = ("llama3_8b", "llama3-8b")
EQUAL = {
    case.name: case
    for case in (
        PeerCase(
            "fsdp",
            "Llama 3 8B, FSDP 64, T = 8192",
            LLAMA[0],
            DENSE["zero3"].settings,
            LLAMA[1],
            {"fsdp": 64},
            FLAT_SETTINGS,
            0.95,
        ),
        PeerCase(
            "fsdp_bf16",  # in which MaxText sums in any case
            "Llama 3 8B, FSDP 64, T = 8192, gradients summed in bfloat16",
            LLAMA[0],
            DENSE["zero3"].settings | {"precision.reduce": "bfloat16"},
            LLAMA[1],
            {"fsdp": 64},
            FLAT_SETTINGS,
            0.95,
        ),
        PeerCase(
            "long",
            "Llama 3 8B, FSDP 64, T = 32768",
            LLAMA[0],
            DENSE["zero3"].settings | {"data.sequence_length": 32768},
            LLAMA[1],
            {"fsdp": 64},
            FLAT_SETTINGS | {"max_target_length": 32768},
            1.0,
        ),
        PeerCase(
            "model8",
            "Llama 3 8B, data 8 · model 8, T = 8192",
            LLAMA[0],
            DENSE["zero3"].settings | {"mesh.data": 8, "mesh.model": 8},
            LLAMA[1],
            {"fsdp": 8, "tensor": 8},
            FLAT_SETTINGS,
            0.78,
        ),
        PeerCase(
            "stage4",
            "Llama 3 8B, data 16 · stage 4 · 2 repeats, 16 microbatches",
            LLAMA[0],
            PIPELINE,
            LLAMA[1],
            {"data": 16, "stage": 4},
            _pipeline(4, 4),
            0.82,
        ),
        PeerCase(
            "stage8",
            "Llama 3 8B, data 8 · stage 8 · 2 repeats, 16 microbatches",
            LLAMA[0],
            PIPELINE
            | {"pipeline.schedule": "zb_v"}
            | {"mesh.data": 8, "mesh.stage": 8, "data.batch_size": 128},
            LLAMA[1],
            {"data": 8, "stage": 8},
            _pipeline(2, 2),
            0.90,
        ),
        PeerCase(
            "llama70b",
            "Llama 3 70B, data 16 · model 4, T = 8192",
            LLAMA[0],
            FLAT
            | LLAMA_70B
            | {"mesh.data": 16, "mesh.model": 4, "parallel.zero": 3, "data.batch_size": 64},
            "llama3-70b",
            {"fsdp": 16, "tensor": 4},
            FLAT_SETTINGS,
            1.0,
        ),
        PeerCase(
            "mixtral",
            "Mixtral 8x7B, data 8 · expert 8, T = 8192",
            "mixtral_8x7b",
            LAYOUTS["mixtral_8x7b"]["experts"].settings,
            "mixtral-8x7b",
            {"fsdp": 8, "expert": 8},
            FLAT_SETTINGS,
            1.0,
        ),
    )
}


def _saving(*names: str) -> tuple[str, ...]:
    """MaxText's settings with which it keeps what has these names."""
    return ("remat_policy=custom", *(f"{name}=device" for name in names))


def _kept(name: str, policy: tuple[str, ...], **ours: object) -> PeerCase:
    """The case with what fits kept. ours: settings of `pipeline`"""
    case = EQUAL[name]
    return dataclasses.replace(
        case,
        name=f"{name}_kept",
        text=f"{case.text}, each side keeps what fits",
        ours=case.ours | {"pipeline.save": ()} | {f"pipeline.{k}": v for k, v in ours.items()},
        policy=policy,
    )


PRODUCTS = ("remat_policy=minimal_with_context",)
QKV = ("query_proj", "key_proj", "value_proj")
# MaxText's next larger choices: T = 32768 with all of the MLP's products, and 4 stages with queries
# too, do not fit into 95 GiB; 8 stages with the output projection is no faster.
CASES = EQUAL | {
    case.name: case
    for case in (
        _kept("fsdp", PRODUCTS, remat="none"),
        _kept("fsdp_bf16", PRODUCTS, remat="none"),
        _kept(
            "long",
            _saving(*QKV, "context", "mlpwi_0"),
            remat="selective",
            save=("attention", "mlp_in"),
        ),
        _kept("model8", PRODUCTS, remat="none"),
        _kept("stage4", _saving("context"), remat="none", schedule="zb_v"),
        _kept("stage8", _saving(*QKV, "context", "mlpwi_0"), remat="none"),
    )
}
