"""The settings of a step's layout: the mesh, the use of its axes, and the pipeline. No jax."""

import dataclasses

from jaxtrain.config.groups.model_settings import ModelConfig, ends_with_layers
from jaxtrain.config.groups.setting import Choices, Range, setting
from jaxtrain.schedule.orders import CSV, SCHEDULES

# few enough to set up each of them in time and memory
MOST_MICROBATCHES = 2**16
MOST_STEPS_PER_PROGRAM = 64


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes, slowest network first. Their product is the number of devices; one of
    them may be -1, for the remaining devices."""

    replica: int = setting(
        1,
        "data parallel over slices or clusters: gradients are summed every step, or "
        "replicas train independently for train.diloco_inner_steps steps",
    )
    data: int = setting(-1, "data parallel; ZeRO shards over it")
    stage: int = setting(1, "pipeline stages")
    context: int = setting(1, "context parallel: splits the sequence")
    expert: int = setting(
        1, "expert parallel: splits the experts; for all other layers it is data parallel"
    )
    model: int = setting(1, "tensor and sequence parallel, inside a node")
    elastic: bool = setting(
        False,
        "adapt to the number of devices: replica and then data shrink or grow, and the "
        "batch stays the same",
    )

    def sizes(self) -> dict[str, int]:
        """Axis → size, slowest network first; one may be -1."""
        return {name: size for name, size in vars(self).items() if name != "elastic"}


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The use of the mesh axes."""

    zero: int = setting(
        1,
        "ZeRO stage, over mesh.data: 0 shards nothing, 1 the optimizer's state, 2 also "
        "gradients, 3 also parameters",
        Choices((0, 1, 2, 3)),
    )
    gather: str = setting(
        "layer",
        "all-gather of the parameters with zero=3: layer by layer, or once a step",
        Choices(("layer", "step")),
    )
    reduce: str = setting(
        "auto",
        "reduction of gradients over mesh.data: after a step, each microbatch, or (several"
        " stages) in the last one's W, a layer beside the next one's products; auto: step"
        " for zero 0, and for 1 with several microbatches or stages",
        Choices(("auto", "step", "microbatch", "last")),
    )
    ends: str = setting(
        "auto",
        "embedding, head, model.dense_layers and prediction modules: replicated, or as "
        "parallel.zero says; sharded as with zero=3, over all devices of a stage (mesh.data, "
        "context and expert), and gathered in their ops; auto: sharded with several stages and "
        "dense layers or prediction modules, of which every stage would have a copy",
        Choices(("auto", "replicated", "sharded")),
    )
    context: str = setting(
        "all_gather",
        "attention over mesh.context: all_gather of keys and values; ulysses, an all-to-all"
        " of heads; ring, a ring of keys and values",
        Choices(("all_gather", "ulysses", "ring")),
    )
    expert_nodes: int = setting(
        1,
        "nodes that mesh.expert spans: a token is sent to each node once and from there to its"
        " experts, for slow links between nodes; 1: directly to its experts' devices",
        Range(at_least=1),
    )
    collective_matmul: str = setting(
        "auto",
        "gathers and sums over mesh.model in parts, each sent beside a product of the part before; "
        "auto: with mesh.stage=1 on TPUs and NVIDIA GPUs, where a part has 4 MiB or more",
        Choices(("auto", "on", "off")),
    )
    offload: str = setting(
        "none",
        "what the host's memory holds: the optimizer's state; activations saved for the "
        "backward; both",
        Choices(("none", "optimizer", "activations", "both")),
    )
    offload_directory: str = setting(
        "",
        "folder on each machine's local disk (NVMe) that holds the optimizer's state in place of "
        "the host's memory; it is streamed a layer at a time in the update",
    )
    compiler_options: tuple[str, ...] = setting(
        (),
        "XLA options, each NAME=VALUE, which override or extend those of the platform "
        "(devices/compiler_options.py)",
    )

    def offload_to(self, what: str) -> str:
        """The place of the optimizer's state ("optimizer") or of what the forward saves
        ("activations"): "device", "host" or "disk"."""
        if self.offload not in (what, "both"):
            return "device"
        return "disk" if what == "optimizer" and self.offload_directory else "host"


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """The step's table. With mesh.stage=1 it is gradient accumulation."""

    schedule: str = setting(
        "1f1b",
        "order of ops; auto: the best one that a search finds; csv:FILE: your own table",
        Choices((*SCHEDULES, "auto"), prefix=CSV),
    )
    microbatches: int = setting(
        1, "microbatches of a step", Range(at_least=1, at_most=MOST_MICROBATCHES)
    )
    steps_per_program: int = setting(
        1,
        "training steps in one table: a stage begins its next step after its own update, while "
        "others are still in the step before; steps that are clipped or skipped run again one at "
        "a time",
        Range(at_least=1, at_most=MOST_STEPS_PER_PROGRAM),
    )
    repeats: int = setting(
        0,
        "chunks of layers on a stage; 0: the fewest that the schedule takes (auto: 1 or 2)",
        Range(at_least=0),
    )
    remat: str = setting(
        "full",
        "recomputation in the backward: full, of everything; selective, of everything but "
        "matmuls; none; full:K and selective:K, of K layers of each unit",
        Choices(("full", "selective", "none"), counted=("full", "selective")),
    )
    save: tuple[str, ...] = setting(
        (),
        "what a layer with remat=selective saves beside its input, by name, such as "
        "attention,mlp_in; the rest is recomputed. Empty: the results of matmuls. With stages and "
        "remat=full, layer_input: each layer's input, and not the chunk's alone; takes memory, and "
        "R makes no layer's output. A name with :host, such as qkv:host, is of a value that lies "
        "in the host's memory",
    )
    overlap: bool = setting(
        False,
        "in 1f1b, interleaved and dualpipe_v, and where a file of PyTorch's pipelining has "
        "OVERLAP_F_B: a forward and a "
        "backward of two microbatches run at once, layer by layer, so that messages of one travel "
        "while the other computes",
    )
    layers_per_op: int = setting(
        0, "layers that one op of a stage runs; 0: the complete chunk", Range(at_least=0)
    )
    chunk_layers: tuple[int, ...] = setting(
        (),
        "layers of each chunk, in model order, also 0 of the first and last; empty: as even as "
        "possible, or fewer on stages with model.dense_layers or mtp_depth",
        Range(at_least=0),
    )
    layer_costs: tuple[float, ...] = setting(
        (),
        "relative cost of each layer, by which the layers are cut into chunks; empty: all the same",
        Range(above=0),
    )
    vocabulary: str = setting(
        "auto",
        "embedding and head: parallel, over all stages; or on the end_stages; auto: "
        "parallel, unless that is 5 % slower or model.dense_layers or mtp_depth is set",
        Choices(("auto", "parallel", "end_stages")),
    )
    permute: str = setting(
        "auto",
        "when the ticks send messages between stages; auto: the fastest for the op times",
        Choices(("auto", "late", "aligned", "early", "spaced")),
    )
    times: tuple[float, ...] = setting(
        (),
        "times of F,B,W,message (and R, head; FB, an F and a B in an overlapped cell, 0: no gain; "
        "the optimizer's update; the embedding with model.dense_layers, forward, and as long for "
        "its gradient) for one microbatch on a stage; empty: planned",
        Range(at_least=0),
    )
    measure_times: bool = setting(
        False,
        "measure `times` before the first step; later starts read them from op_times.json in the "
        "run's folder",
    )
    memory: float = setting(
        0.0,
        "for schedule=auto: the most microbatches whose activations a stage holds at the same "
        "time; 0: as many as with 1f1b",
        Range(at_least=0),
    )


def shards_ends(model: ModelConfig, stages: int, pipeline: PipelineConfig) -> bool:
    """What `parallel.ends=auto` stands for with ZeRO on so many stages: True for sharded."""
    return stages > 1 and bool(ends_with_layers(model)) and pipeline.steps_per_program == 1
