"""Every setting of a run: frozen dataclasses, their meaning, units and bounds.

A recipe (configs/*.py) returns a `Config`; a field's path in it (`mesh.stage`) is its name in
flags, errors and logs (paths.py). In some fields, as their docs say, 0 or "" means a default that
depends on other fields; `Config.resolve()` fills it in. rules.py and mesh_rules.py have the rules
between fields, checks.py checks them, and flags.py has the flags. No jax.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from jaxtrain.config import sources
from jaxtrain.config.learning_rates import LEARNING_RATES
from jaxtrain.config.optimizers import OPTIMIZERS, meaning
from jaxtrain.schedule.orders import CSV, SCHEDULES, default_repeats

BIASED = ("qkv", "out", "mlp", "router", "norm")  # parts of a model that may have biases
LARGEST_INT = 2**31 - 1  # steps and token counts live in int32 on the devices
# far more than any model has, but few enough to set up each of them in time and memory
MOST_LAYERS = MOST_MICROBATCHES = 2**16
MOST_STEPS_PER_PROGRAM = 64


def setting(
    default: Any,
    doc: str,
    *,
    choices: tuple = (),
    prefix: str = "",
    counted: tuple[str, ...] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its doc and the values that it may have, as metadata. checks.py checks
    them; --help prints the doc and the choices.

    doc: one line, with the unit
    choices: the values that are allowed, or a tuple's items; (): all of the annotated type
    prefix: texts that begin with this are allowed besides `choices`; "": none
    counted: the choices that a colon and a whole number may follow, such as full:2
    refused: further names that a user may know, each with the reason why it is no choice
    at_least, above, at_most, below: bounds of a number; None: none
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    return dataclasses.field(
        default=default,
        metadata={
            "doc": doc,
            "choices": choices,
            "prefix": prefix,
            "counted": counted,
            "refused": refused,
            "bounds": bounds,
        },
    )


Record = TypeVar("Record")


def as_type(kind: type[Record], record: object, **values: object) -> Record:
    """A record of the given type with the fields of another one, some of them changed. Nothing is
    checked, and all fields are copied at once, because the search for a setting that works makes
    thousands of configs."""
    copy = object.__new__(kind)
    copy.__dict__.update(vars(record))
    copy.__dict__.update(values)
    return copy


def with_values(record: Record, **values: object) -> Record:
    """A record with some fields changed: dataclasses.replace without checks."""
    return as_type(type(record), record, **values)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The transformer. These settings alone describe a model; none is known by name."""

    layers: int = setting(4, "transformer layers", at_least=1, at_most=MOST_LAYERS)
    width: int = setting(128, "size of the residual stream", at_least=1)
    heads: int = setting(4, "query heads", at_least=1)
    kv_heads: int = setting(
        0,
        "key/value heads, each shared by heads/kv_heads query heads; 0: as many as heads",
        at_least=0,
    )
    head_dim: int = setting(
        0, "size of one head (mla: of the part that is not rotated); 0: width/heads", at_least=0
    )
    attention: str = setting(
        "gqa",
        "gqa: grouped-query attention; mla: multi-head latent attention",
        choices=("gqa", "mla"),
    )
    query_rank: int = setting(
        0,
        "mla: size of the latent of queries; 0: queries come straight from the residual stream",
        at_least=0,
    )
    kv_rank: int = setting(0, "mla: size of the latent of keys and values", at_least=0)
    rope_head_dim: int = setting(
        0, "mla: size of the rotated part of a head; all heads share its key", at_least=0
    )
    value_head_dim: int = setting(0, "mla: size of one head's values; 0: head_dim", at_least=0)
    mlp_width: int = setting(0, "size of the MLP's hidden layer; 0: 4·width", at_least=0)
    experts: int = setting(
        0,
        "experts in a layer, in place of its MLP; each token uses some of them; 0: no experts",
        at_least=0,
    )
    dense_layers: int = setting(
        0,
        "layers with one MLP for all tokens, before those with experts; not counted in `layers`",
        at_least=0,
        at_most=MOST_LAYERS,
    )
    experts_per_token: int = setting(2, "experts that each token uses", at_least=1)
    shared_experts: int = setting(0, "additional experts that every token uses", at_least=0)
    expert_width: int = setting(0, "size of an expert's hidden layer; 0: mlp_width", at_least=0)
    router: str = setting(
        "softmax",
        "weight of an expert: softmax over all experts, or sigmoid of its own score",
        choices=("softmax", "sigmoid"),
    )
    router_normalize: str = setting(
        "auto",
        "whether the weights of a token's experts are divided by their sum; auto: if it "
        "uses several",
        choices=("auto", "always", "never"),
    )
    router_scale: float = setting(
        1.0, "factor on the weights of a token's experts, normalized or not", above=0
    )
    router_bias: bool = setting(
        True,
        "a bias for each expert, added to its score for the choice of experts, not for "
        "their weights",
    )
    router_groups: int = setting(
        1,
        "groups (nodes) into which the experts are divided; a token uses experts of at most "
        "router_group_limit of them",
        at_least=1,
    )
    router_group_limit: int = setting(
        1, "groups whose experts a token may use, those with the highest scores", at_least=1
    )
    router_group_best: int = setting(
        2,
        "number of best experts in a group whose scores sum to the group's score "
        "(DeepSeek-V3: 2, V2: 1)",
        at_least=1,
    )
    capacity_factor: float = setting(
        0.0,
        "capacity of an expert, as a multiple of an even share of a sequence's tokens; tokens "
        "beyond it are dropped; 0: no limit, none are dropped",
        at_least=0,
    )
    expert_room: float = setting(
        0.0,
        "capacity of a device for tokens of its experts, as a multiple of their mean number; "
        "tokens beyond it are dropped; 0: memory for the worst case, none are dropped",
        at_least=0,
    )
    balance_rate: float = setting(
        0.001,
        "update of router_bias after each step, which balances the experts' load without a "
        "loss; 0: no update",
        at_least=0,
    )
    balance_loss: float = setting(
        0.0001, "weight of the loss that balances the experts in each sequence", at_least=0
    )
    z_loss: float = setting(0.0, "weight of the router's z-loss, against large logits", at_least=0)
    vocab_size: int = setting(
        257, "token ids that the model knows (257: bytes and the document separator)", at_least=2
    )
    norm: str = setting("rmsnorm", "normalisation", choices=("rmsnorm", "layernorm"))
    qk_norm: bool = setting(
        False, "gqa: a norm of each head's queries and one of its keys, before the rotation (Qwen3)"
    )
    norm_epsilon: float = setting(1e-5, "added to the variance in a normalisation", above=0)
    latent_norm_epsilon: float = setting(
        0.0, "mla: norm_epsilon of the latents' norms; 0: norm_epsilon", at_least=0
    )
    activation: str = setting(
        "swiglu", "MLP: gated SiLU (three matrices) or GELU (two)", choices=("swiglu", "gelu")
    )
    positions: str = setting(
        "rotary",
        "rotary embedding of queries and keys, or a learned position table",
        choices=("rotary", "learned"),
    )
    rotary_base: float = setting(10000.0, "base of the rotary wavelengths (theta)", above=1)
    rotary_dim: int = setting(
        0,
        "gqa: dimensions of a head that are rotated, its first ones; 0: head_dim, all of them",
        at_least=0,
    )
    nope_layers: tuple[int, ...] = setting(
        (),
        "layers without rotary positions (NoPE), by number from 0, model.dense_layers counted "
        "first; empty: none",
    )
    rope_scaling: str = setting(
        "none",
        "rotary frequencies for sequences longer than rope_original_length: linear, all divided by "
        "rope_factor; llama3 (Llama 3.1) and yarn, the slow ones",
        choices=("none", "linear", "llama3", "yarn"),
        refused={
            "dynamic": "changes the frequencies with a sequence's length, and keys in a cache "
            "would keep those of a shorter one",
            "longrope": "has a factor for each dimension, which is not built",
        },
    )
    rope_factor: float = setting(
        0.0, "rope_scaling: divisor of the rotary frequencies, such as 8", at_least=0
    )
    rope_original_length: int = setting(
        0, "llama3, yarn: length of the sequences before scaling, in tokens", at_least=0
    )
    rope_low_freq_factor: float = setting(
        1.0, "llama3: turns in the original length up to which a frequency is divided", above=0
    )
    rope_high_freq_factor: float = setting(
        4.0, "llama3: turns in the original length from which a frequency stays", above=0
    )
    rope_beta_fast: float = setting(
        32.0, "yarn: turns in the original length from which a frequency stays", above=0
    )
    rope_beta_slow: float = setting(
        1.0, "yarn: turns in the original length up to which a frequency is divided", above=0
    )
    rope_truncate: bool = setting(
        True, "yarn: whether the range between beta_fast and beta_slow ends at whole dimensions"
    )
    rope_attention_factor: float = setting(
        0.0,
        "yarn: factor on rotated queries and keys; 0: mscale over mscale_all_dim if both are set, "
        "else 0.1 ln(rope_factor) + 1",
        at_least=0,
    )
    rope_mscale: float = setting(
        0.0, "yarn: weight of ln(rope_factor) in the attention factor (DeepSeek)", at_least=0
    )
    rope_mscale_all_dim: float = setting(
        0.0,
        "yarn: weight of ln(rope_factor) by which the attention factor is divided, and mla's "
        "scores are multiplied squared (DeepSeek-V3: 1)",
        at_least=0,
    )
    max_positions: int = setting(
        0, "length of the learned position table, in tokens; 0: data.sequence_length", at_least=0
    )
    tied_embeddings: bool = setting(False, "whether the output matrix is the embedding table")
    mtp_depth: int = setting(
        0,
        "tokens beyond the next one that training predicts, each by a module of one layer; 0: none",
        at_least=0,
    )
    mtp_weight: float = setting(0.3, "weight of the mean loss of these predictions", above=0)
    biases: tuple[str, ...] = setting(
        (),
        "parts with biases: qkv, query, key and value matrices (mla: only those that compress); "
        "out, attention's output matrix; mlp, an MLP's matrices; router, the router's logits "
        "(router_bias is another); norm, layernorm; empty: none",
        choices=BIASED,
    )
    init_std: float = setting(0.02, "standard deviation of the initial weights", above=0)
    attention_kernel: str = setting(
        "auto",
        "kernel of attention; auto: the best one that the devices have",
        choices=("auto", "xla", "cudnn", "splash"),
    )
    attention_backward: str = setting(
        "auto",
        "backward of splash: one fused kernel of 5 products, or jax's two kernels of 7; auto: "
        "fused where its sums fit in vector memory",
        choices=("auto", "fused", "two_kernels"),
    )
    loss_chunk: int = setting(
        2048, "tokens per device whose logits are in memory at the same time", at_least=1
    )

    def resolve(self, sequence_length: int) -> "ResolvedModel":
        """This model with its dependent defaults filled in, and biases in the order of BIASED. The
        sizes of latents become 0 without latent attention, rotary_dim with it.

        sequence_length: of the training, in tokens
        """
        latent = self.attention == "mla"
        head_dim = self.head_dim or self.width // self.heads
        mlp_width = self.mlp_width or 4 * self.width
        normalizes = self.router_normalize
        if self.experts and normalizes == "auto":
            normalizes = "always" if self.experts_per_token > 1 else "never"
        return as_type(
            ResolvedModel,
            self,
            kv_heads=self.kv_heads or self.heads,
            head_dim=head_dim,
            query_rank=self.query_rank * latent,
            kv_rank=self.kv_rank * latent,
            rope_head_dim=self.rope_head_dim * latent,
            rotary_dim=(self.rotary_dim or head_dim) * (not latent),
            value_head_dim=(self.value_head_dim or head_dim) * latent,
            mlp_width=mlp_width,
            expert_width=self.expert_width or mlp_width * (self.experts > 0),
            router_normalize=normalizes,
            max_positions=self.max_positions or sequence_length,
            latent_norm_epsilon=(self.latent_norm_epsilon or self.norm_epsilon) * latent,
            biases=tuple(part for part in BIASED if part in self.biases),
        )


class ResolvedModel(ModelConfig):
    """A model each of whose sizes is a number, and not a default that depends on others."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus and the batch."""

    source: str = setting(sources.STDLIB, sources.HELP)
    tokenizer: str = setting(
        "bytes",
        "bytes; the path of a Hugging Face tokenizers JSON file; or none: the ids of a "
        "token file are used unchanged",
    )
    sequence_length: int = setting(128, "tokens in a sequence, as the model sees it", at_least=1)
    batch_size: int = setting(
        16, "sequences in a step, over all devices and microbatches", at_least=1
    )
    seed: int = setting(0, "seed of the order of sequences", at_least=0)
    attend_across_documents: bool = setting(
        True, "whether tokens attend to earlier documents that are packed into the same sequence"
    )
    loss_mask: tuple[str, ...] = setting(
        (), f"fields ({sources.RECORDS}) that are prompts: their tokens have no loss"
    )
    text_fields: tuple[str, ...] = setting(
        ("text",),
        f"fields ({sources.RECORDS}) that are read, joined in this order; a path such as doc.text "
        "works too",
    )
    bad_records: str = setting(
        "stop",
        "a record that cannot be read: stop ends the run, skip leaves it out and counts it",
        choices=("stop", "skip"),
    )
    validation_fraction: float = setting(
        0.05, "fraction of the corpus that is held out for evaluation", at_least=0, below=1
    )
    token_dtype: str = setting(
        "uint16",
        "integers of a raw token file (.bin)",
        choices=("uint8", "uint16", "int32", "uint32", "int64", "uint64"),
    )
    cache: str = setting(
        "", "folder of prepared corpora; empty: $JAXTRAIN_CACHE or ~/.cache/jaxtrain"
    )
    prefetch: int = setting(2, "batches prepared ahead of the step", at_least=0)


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
        choices=(0, 1, 2, 3),
    )
    gather: str = setting(
        "layer",
        "all-gather of the parameters with zero=3: layer by layer, or once a step",
        choices=("layer", "step"),
    )
    reduce: str = setting(
        "auto",
        "reduction of gradients over mesh.data: after a step, each microbatch, or (several"
        " stages) in the last one's W, a layer beside the next one's products; auto: step"
        " for zero 0, and for 1 with several microbatches or stages",
        choices=("auto", "step", "microbatch", "last"),
    )
    ends: str = setting(
        "auto",
        "embedding, head, model.dense_layers and prediction modules: replicated, or as "
        "parallel.zero says; sharded as with zero=3, over all devices of a stage (mesh.data, "
        "context and expert), and gathered in their ops; auto: sharded with several stages and "
        "dense layers or prediction modules, of which every stage would have a copy",
        choices=("auto", "replicated", "sharded"),
    )
    context: str = setting(
        "all_gather",
        "attention over mesh.context: all_gather of keys and values; ulysses, an all-to-all"
        " of heads; ring, a ring of keys and values",
        choices=("all_gather", "ulysses", "ring"),
    )
    expert_nodes: int = setting(
        1,
        "nodes that mesh.expert spans: a token is sent to each node once and from there to its"
        " experts, for slow links between nodes; 1: directly to its experts' devices",
        at_least=1,
    )
    collective_matmul: str = setting(
        "auto",
        "gathers and sums over mesh.model in parts, each sent beside a product of the part before; "
        "auto: with mesh.stage=1 on TPUs and NVIDIA GPUs, where a part has 4 MiB or more",
        choices=("auto", "on", "off"),
    )
    offload: str = setting(
        "none",
        "what the host's memory holds: the optimizer's state; activations saved for the "
        "backward; both",
        choices=("none", "optimizer", "activations", "both"),
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
        choices=(*SCHEDULES, "auto"),
        prefix=CSV,
    )
    microbatches: int = setting(1, "microbatches of a step", at_least=1, at_most=MOST_MICROBATCHES)
    steps_per_program: int = setting(
        1,
        "training steps in one table: a stage begins its next step after its own update, while "
        "others are still in the step before; steps that are clipped or skipped run again one at "
        "a time",
        at_least=1,
        at_most=MOST_STEPS_PER_PROGRAM,
    )
    repeats: int = setting(
        0,
        "chunks of layers on a stage; 0: the fewest that the schedule takes (auto: 1 or 2)",
        at_least=0,
    )
    remat: str = setting(
        "full",
        "recomputation in the backward: full, of everything; selective, of everything but "
        "matmuls; none; full:K and selective:K, of K layers of each unit",
        choices=("full", "selective", "none"),
        counted=("full", "selective"),
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
        0, "layers that one op of a stage runs; 0: the complete chunk", at_least=0
    )
    chunk_layers: tuple[int, ...] = setting(
        (),
        "layers of each chunk, in model order, also 0 of the first and last; empty: as even as "
        "possible, or fewer on stages with model.dense_layers or mtp_depth",
    )
    layer_costs: tuple[float, ...] = setting(
        (),
        "relative cost of each layer, by which the layers are cut into chunks; empty: all the same",
    )
    vocabulary: str = setting(
        "auto",
        "embedding and head: parallel, over all stages; or on the end_stages; auto: "
        "parallel, unless that is 5 % slower or model.dense_layers or mtp_depth is set",
        choices=("auto", "parallel", "end_stages"),
    )
    permute: str = setting(
        "auto",
        "when the ticks send messages between stages; auto: the fastest for the op times",
        choices=("auto", "late", "aligned", "early", "spaced"),
    )
    times: tuple[float, ...] = setting(
        (),
        "times of F,B,W,message (and R, head; FB, an F and a B in an overlapped cell, 0: no gain; "
        "the optimizer's update; the embedding with model.dense_layers, forward, and as long for "
        "its gradient) for one microbatch on a stage; empty: planned",
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
        at_least=0,
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: str = setting(
        "adamw",
        "; ".join(f"{o.name}: {o.text}" for o in OPTIMIZERS.values()),
        choices=tuple(OPTIMIZERS),
    )
    learning_rate: float = setting(3e-4, "peak learning rate", above=0)
    warmup_steps: int = setting(0, "steps of linear warm-up from 0", at_least=0)
    schedule: str = setting(
        "cosine",
        "learning rate after the warm-up; "
        + "; ".join(f"{record.name}: {record.text}" for record in LEARNING_RATES.values()),
        choices=tuple(LEARNING_RATES),
    )
    decay_steps: int = setting(
        0,
        "steps of the decay at the end of a schedule that is constant before; 0: none",
        at_least=0,
    )
    final_fraction: float = setting(0.1, "final learning rate over its peak", at_least=0, at_most=1)
    weight_decay: float = setting(
        0.1, "decoupled weight decay of matrices (not of norms and biases)", at_least=0
    )
    clip_norm: float = setting(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    b1: float = setting(0.9, meaning("b1"), at_least=0, below=1)
    b2: float = setting(0.95, meaning("b2"), at_least=0, below=1)
    epsilon: float = setting(1e-8, meaning("epsilon"), above=0)
    decay_exponent: float = setting(0.8, meaning("decay_exponent"), above=0)
    factored_size: int = setting(128, meaning("factored_size"), at_least=1)
    update_clip: float = setting(1.0, meaning("update_clip"), at_least=0)
    parameter_scale: bool = setting(True, meaning("parameter_scale"))
    outer_learning_rate: float = setting(
        0.7, "DiLoCo: learning rate of the outer step, which joins the replicas", above=0
    )
    outer_momentum: float = setting(
        0.9, "DiLoCo: Nesterov momentum of the outer step", at_least=0, below=1
    )


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Number formats."""

    params: str = setting(
        "float32",
        "type of the matrices that ops read; norms, biases and routers stay float32",
        choices=("float32", "bfloat16"),
    )
    masters: str = setting(
        "float32",
        "16-bit params: float32 masters beside the optimizer's state, which updates change and "
        "checkpoints have; none: the params themselves, rounded up or down at random",
        choices=("float32", "none"),
    )
    moments: str = setting(
        "float32",
        "type of the optimizer's moments; bfloat16: rounded up or down at random",
        choices=("float32", "bfloat16"),
    )
    compute: str = setting(
        "bfloat16", "type of activations and matmuls", choices=("bfloat16", "float32")
    )
    matmul: str = setting(
        "compute",
        "type of products with the matrices of layers: compute, fp8 with a scale for each tensor, "
        "or mxfp8 with one for each 32 numbers; embedding, head, router and attention's own "
        "products stay. nvfp4 and int8 are for plans of other frameworks (plan --assume)",
        choices=("compute", "fp8", "mxfp8", "nvfp4", "int8"),
    )
    fp8_gradients: str = setting(
        "e5m2",
        "8-bit format of gradients in products; e4m3 has more digits and less range",
        choices=("e5m2", "e4m3"),
    )
    fp8_weight_gradients: str = setting(
        "fp8",
        "type of the products that make weights' gradients; with compute what waits for W is not "
        "of 8 bits",
        choices=("fp8", "compute"),
    )
    reduce: str = setting(
        "float32",
        "type in which gradients are reduced over mesh.data",
        choices=("float32", "bfloat16"),
    )
    outer: str = setting(
        "float32",
        "DiLoCo: type in which replicas exchange their changes; int8: with a scale for each block",
        choices=("float32", "int8"),
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run."""

    steps: int = setting(100, "optimizer steps", at_least=1)
    diloco_inner_steps: int = setting(
        0,
        "DiLoCo: steps that replicas train independently between outer steps; 0: they sum "
        "every gradient",
        at_least=0,
    )
    seed: int = setting(0, "seed of the initial weights", at_least=0)
    init_from: str = setting(
        "",
        "folder of a published model (config.json and safetensors): its model's settings, and "
        "its weights as the initial ones of a new run; empty: random weights",
    )
    eval_every: int = setting(0, "steps between evaluations; 0: only at the end", at_least=0)
    eval_batches: int = setting(8, "batches in an evaluation", at_least=1)
    on_nonfinite: str = setting(
        "stop",
        "what follows a loss or gradient that is not finite: stop; skip the update; "
        "rollback: skip it, and go back to a checkpoint after nonfinite_limit in a row",
        choices=("stop", "skip", "rollback"),
    )
    nonfinite_limit: int = setting(
        10,
        "consecutive skipped updates after which the run ends (skip) or goes back (rollback)",
        at_least=1,
    )
    spike_threshold: float = setting(
        0.0,
        "rollback: a loss more than this many robust deviations above the median of earlier "
        "losses is a spike; 0: off",
        at_least=0,
    )
    spike_steps: int = setting(
        3, "consecutive spikes after which the run goes back to a checkpoint", at_least=1
    )
    hash_every: int = setting(
        100,
        "steps between comparisons of the copies of parameters on different devices, by "
        "sums of their bits; 0: never",
        at_least=0,
    )
    rollbacks: int = setting(
        3, "times that a run may go back to a checkpoint before it ends", at_least=1
    )
    hardware: str = setting(
        "",
        "hardware for which op times and the step are planned, as in plan --hardware; "
        "empty: the devices at hand",
    )
    hang_after: float = setting(
        30.0,
        "seconds without a finished step (or three times the longest step) after which a "
        "hung run ends; 0: never",
        at_least=0,
    )
    profile_steps: int = setting(
        0, "steps traced by jax.profiler, from the third of the run", at_least=0
    )
    sample_prompt: str = setting("", "start of the sample printed at the end")
    sample_tokens: int = setting(
        0, "tokens of the sample printed at the end; 0: no sample", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: when they are written, where, and which are kept."""

    every: int = setting(
        0, "steps between checkpoints; 0: by time alone, and at the end", at_least=0
    )
    minutes: float = setting(
        10.0,
        "minutes between checkpoints, whatever `every` is; 0: never by time",
        at_least=0,
    )
    grace: float = setting(
        0.0,
        "seconds between SIGTERM and the loss of the machine, in which the last checkpoint "
        "must be written; 0: unknown",
        at_least=0,
    )
    keep: int = setting(3, "newest checkpoints that are kept", at_least=1)
    keep_every: int = setting(
        0, "steps whose multiples keep their checkpoints for ever; 0: none", at_least=0
    )
    keep_best: int = setting(
        0, "checkpoints with the lowest validation losses that are kept; 0: none", at_least=0
    )
    directory: str = setting(
        "",
        "place of the checkpoints: a folder, gs://BUCKET/PATH or s3://BUCKET/PATH; empty: "
        "WORKDIR/checkpoints",
    )
    local: str = setting(
        "",
        "folder on each machine, on a RAM disk or local disk, for a checkpoint every "
        "local_every steps; empty: none",
    )
    local_every: int = setting(
        0, "steps between checkpoints in `local`, which keeps the newest two", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Metrics, and other records of the training."""

    log_every: int = setting(
        10, "steps between lines of metrics.jsonl, which begins with the first step", at_least=1
    )
    tensorboard: bool = setting(True, "whether to write TensorBoard files as well")
    rows: bool = setting(
        False,
        "write the sequences that each process reads in every step into the folder rows/; "
        "together they are the same for any number of processes",
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """A run: what a recipe's `get_config()` returns. Its construction checks nothing;
    `checks.check(config)` does.

    >>> from jaxtrain import Config, ModelConfig, TrainConfig
    >>> config = Config(model=ModelConfig(layers=2), train=TrainConfig(steps=10))
    >>> config.model.layers, config.mesh.data, config.data.sequence_length
    (2, -1, 128)
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __post_init__(self) -> None:
        # dataclasses.replace comes here, too: it would keep a state that changed settings lack.
        if type(self) is not Config:
            raise TypeError(
                f"a {type(self).__name__} is made by methods of Config; jaxtrain.config.replace "
                "changes its settings and returns a Config"
            )

    @property
    def sequences_per_microbatch(self) -> int:
        """Sequences of a microbatch, over all devices."""
        return self.data.batch_size // self.pipeline.microbatches

    @property
    def has_one_microbatch(self) -> bool:
        """True if data shards have one stage and one microbatch, whose gradients are the step's."""
        return self.mesh.data != 1 and self.mesh.stage == self.pipeline.microbatches == 1

    def as_read(self) -> "Config":
        """A plain config with the same settings."""
        if type(self) is Config:
            return self
        return as_type(Config, self, model=as_type(ModelConfig, self.model))

    def fill(self) -> "FilledConfig":
        """This config with its dependent defaults filled in, as far as they are known while a mesh
        axis may be -1."""
        return _filled(FilledConfig, self)

    def to_store(self) -> "StoredConfig":
        """This config as a checkpoint keeps it."""
        return _filled(StoredConfig, self)

    def on_own_mesh(self) -> "MeshedConfig":
        """This config, whose mesh has a size for each axis. Raises ValueError if it has not."""
        for axis, size in self.mesh.sizes().items():
            if size < 1:
                raise ValueError(f"mesh.{axis}={size} is no number of devices")
        return as_type(MeshedConfig, self.as_read())

    def resolve(self) -> "ResolvedConfig":
        """This config, whose mesh has a size for each axis, with its dependent defaults filled in
        (kv_heads and the sizes of heads, rotary_dim, mlp_width, expert_width, max_positions,
        latent_norm_epsilon, router_normalize; reduce, ends; repeats). Raises ValueError as
        `on_own_mesh`.

        >>> from jaxtrain import Config, MeshConfig, ModelConfig
        >>> config = Config(model=ModelConfig(width=64, heads=4), mesh=MeshConfig(data=2))
        >>> config.model.mlp_width, config.resolve().model.mlp_width, config.resolve().model.head_dim
        (0, 256, 16)
        """
        return _filled(ResolvedConfig, self.on_own_mesh())


class MeshedConfig(Config):
    """A config whose mesh has a size for each axis. Its other settings are as read."""


class FilledConfig(Config):
    """A config with its dependent defaults filled in. A mesh axis may still be -1."""

    model: ResolvedModel


class ResolvedConfig(MeshedConfig, FilledConfig):
    """A config of which nothing is open: each mesh axis has a size, and every dependent default is
    filled in. Steps and plans are made from it."""

    def with_times(self, times: tuple[float, ...]) -> "ResolvedConfig":
        """This config with other op times (`pipeline.times`), on which no default depends."""
        return with_values(self, pipeline=with_values(self.pipeline, times=times))


class StoredConfig(FilledConfig):
    """The config of a checkpoint. A setting that its version of jaxtrain did not know has its
    default. The mesh is that of the run which wrote it; an axis may be -1 where no run did, but
    `convert from_hf`."""


Filled = TypeVar("Filled", bound=FilledConfig)


def _filled(kind: type[Filled], config: Config) -> Filled:
    """The config in the given state, with its dependent defaults filled in."""
    pipeline = with_values(
        config.pipeline,
        repeats=config.pipeline.repeats or default_repeats(config.pipeline.schedule),
    )
    parallel = config.parallel
    if parallel.reduce == "auto":
        in_ops = parallel.zero > 1 or (parallel.zero == 1 and config.has_one_microbatch)
        parallel = with_values(parallel, reduce="microbatch" if in_ops else "step")
    if parallel.ends == "auto":
        sharded = parallel.zero and shards_ends(config.model, config.mesh.stage, config.pipeline)
        parallel = with_values(parallel, ends="sharded" if sharded else "replicated")
    model = config.model.resolve(config.data.sequence_length)
    return as_type(kind, config, model=model, parallel=parallel, pipeline=pipeline)


def shards_ends(model: ModelConfig, stages: int, pipeline: PipelineConfig) -> bool:
    """What `parallel.ends=auto` stands for with ZeRO on so many stages: True for sharded."""
    return stages > 1 and bool(ends_with_layers(model)) and pipeline.steps_per_program == 1


def ends_with_layers(model: ModelConfig) -> str:
    """The model's setting that puts layers on the stage of the embedding or of the head, whose
    table can then not be split over the stages; "" if none does."""
    return next((name for name in ("mtp_depth", "dense_layers") if getattr(model, name)), "")
