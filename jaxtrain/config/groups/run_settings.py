"""The settings of a run: its corpus, optimizer, number formats, steps, checkpoints and records. No
jax."""

import dataclasses

from jaxtrain.config.groups.formats import HELP, RECORDS, STDLIB
from jaxtrain.config.groups.setting import Choices, Range, as_entries, setting
from jaxtrain.config.learning_rates import LEARNING_RATES
from jaxtrain.config.optimizers import OPTIMIZERS, meaning


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus and the batch."""

    source: str = setting(STDLIB, HELP)
    sources: tuple[str, ...] = setting(
        (),
        "sources of a mixture, in the place of `source`: NAME=PATH and NAME.SETTING=VALUE, such as "
        "--config.data.sources.web.weight=0.7; settings: weight, epochs (0: without end), "
        "exhausted (stop, leave, repeat) and those of `data` that prepare a corpus",
    )
    validation: tuple[str, ...] = setting(
        (),
        "validation sets, NAME=PATH and NAME.SETTING=VALUE, beside the parts that sources hold out",
    )
    tokenizer: str = setting(
        "bytes",
        "bytes; the path of a Hugging Face tokenizers JSON file; org/name[@revision] of a hub's "
        "model; or none: the ids of a token file are used unchanged",
    )
    sequence_length: int = setting(
        128, "tokens in a sequence, as the model sees it", Range(at_least=1)
    )
    batch_size: int = setting(
        16, "sequences in a step, over all devices and microbatches", Range(at_least=1)
    )
    seed: int = setting(0, "seed of the order of sequences", Range(at_least=0))
    attend_across_documents: bool = setting(
        True, "whether tokens attend to earlier documents that are packed into the same sequence"
    )
    loss_mask: tuple[str, ...] = setting(
        (), f"fields ({RECORDS}) that are prompts: their tokens have no loss"
    )
    text_fields: tuple[str, ...] = setting(
        ("text",),
        f"fields ({RECORDS}) that are read, joined in this order; a path such as doc.text "
        "works too",
    )
    packing: str = setting(
        "stream",
        "documents in sequences; stream: one after the other, cut where a sequence ends; best_fit: "
        "no document that fits is cut, and the rest of a sequence is padding",
        Choices(("stream", "best_fit")),
    )
    filter: str = setting(
        "", "a function of one's own, FILE.py:NAME or MODULE:NAME, text → whether it is kept"
    )
    duplicates: str = setting(
        "keep",
        "documents that were read before in this source; exact: those of equal text are left out; "
        "near: also those that share about 80 % of all runs of five words",
        Choices(("keep", "exact", "near")),
    )
    bad_records: str = setting(
        "stop",
        "a record that cannot be read: stop ends the run, skip leaves it out and counts it",
        Choices(("stop", "skip")),
    )
    validation_fraction: float = setting(
        0.05, "fraction of the corpus that is held out for evaluation", Range(at_least=0, below=1)
    )
    token_dtype: str = setting(
        "uint16",
        "integers of a raw token file (.bin)",
        Choices(("uint8", "uint16", "int32", "uint32", "int64", "uint64")),
    )
    cache: str = setting(
        "", "folder of prepared corpora; empty: $JAXTRAIN_CACHE or ~/.cache/jaxtrain"
    )
    store_cache_gb: float = setting(
        20.0, "most gigabytes of files in stores that `cache` has a copy of", Range(above=0)
    )
    prefetch: int = setting(2, "batches prepared ahead of the step", Range(at_least=0))

    def __post_init__(self) -> None:
        for name in ("sources", "validation"):
            object.__setattr__(self, name, as_entries(getattr(self, name)))


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: str = setting(
        "adamw",
        "; ".join(f"{o.name}: {o.text}" for o in OPTIMIZERS.values())
        + "; or FILE.py:RECORD, one's own (docs/extending.md)",
        Choices(tuple(OPTIMIZERS), own_code=True),
    )
    learning_rate: float = setting(3e-4, "peak learning rate", Range(above=0))
    warmup_steps: int = setting(0, "steps of linear warm-up from 0", Range(at_least=0))
    schedule: str = setting(
        "cosine",
        "learning rate after the warm-up; "
        + "; ".join(f"{record.name}: {record.text}" for record in LEARNING_RATES.values()),
        Choices(tuple(LEARNING_RATES)),
    )
    decay_steps: int = setting(
        0,
        "steps of the decay at the end of a schedule that is constant before; 0: none",
        Range(at_least=0),
    )
    final_fraction: float = setting(
        0.1, "final learning rate over its peak", Range(at_least=0, at_most=1)
    )
    weight_decay: float = setting(
        0.1, "decoupled weight decay of matrices (not of norms and biases)", Range(at_least=0)
    )
    clip_norm: float = setting(
        1.0, "largest global gradient norm; 0: no clipping", Range(at_least=0)
    )
    ema_decay: float = setting(
        0.0,
        "decay of the exponential moving average of the parameters, such as 0.999; 0: no average",
        Range(at_least=0, below=1),
    )
    b1: float = setting(0.9, meaning("b1"), Range(at_least=0, below=1))
    b2: float = setting(0.95, meaning("b2"), Range(at_least=0, below=1))
    epsilon: float = setting(1e-8, meaning("epsilon"), Range(above=0))
    decay_exponent: float = setting(0.8, meaning("decay_exponent"), Range(above=0))
    factored_size: int = setting(128, meaning("factored_size"), Range(at_least=1))
    update_clip: float = setting(1.0, meaning("update_clip"), Range(at_least=0))
    parameter_scale: bool = setting(True, meaning("parameter_scale"))
    momentum: float = setting(0.95, meaning("momentum"), Range(at_least=0, below=1))
    muon_iterations: int = setting(5, meaning("muon_iterations"), Range(at_least=1))
    muon_rms: float = setting(0.2, meaning("muon_rms"), Range(above=0))
    adamw_learning_rate: float = setting(0.0, meaning("adamw_learning_rate"), Range(at_least=0))
    outer_learning_rate: float = setting(
        0.7, "DiLoCo: learning rate of the outer step, which joins the replicas", Range(above=0)
    )
    outer_momentum: float = setting(
        0.9, "DiLoCo: Nesterov momentum of the outer step", Range(at_least=0, below=1)
    )


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Number formats."""

    params: str = setting(
        "float32",
        "type of the matrices that ops read; norms, biases and routers stay float32",
        Choices(("float32", "bfloat16")),
    )
    masters: str = setting(
        "float32",
        "16-bit params: float32 masters beside the optimizer's state, which updates change and "
        "checkpoints have; none: the params themselves, rounded up or down at random",
        Choices(("float32", "none")),
    )
    moments: str = setting(
        "float32",
        "type of the optimizer's moments; bfloat16: rounded up or down at random",
        Choices(("float32", "bfloat16")),
    )
    compute: str = setting(
        "bfloat16", "type of activations and matmuls", Choices(("bfloat16", "float32"))
    )
    matmul: str = setting(
        "compute",
        "type of products with the matrices of layers: compute, fp8 with a scale for each tensor, "
        "or mxfp8 with one for each 32 numbers; embedding, head, router and attention's own "
        "products stay. nvfp4 and int8 are for plans of other frameworks (plan --assume)",
        Choices(("compute", "fp8", "mxfp8", "nvfp4", "int8")),
    )
    fp8_gradients: str = setting(
        "e5m2",
        "8-bit format of gradients in products; e4m3 has more digits and less range",
        Choices(("e5m2", "e4m3")),
    )
    fp8_weight_gradients: str = setting(
        "fp8",
        "type of the products that make weights' gradients; with compute what waits for W is not "
        "of 8 bits",
        Choices(("fp8", "compute")),
    )
    reduce: str = setting(
        "float32",
        "type in which gradients are reduced over mesh.data",
        Choices(("float32", "bfloat16")),
    )
    outer: str = setting(
        "float32",
        "DiLoCo: type in which replicas exchange their changes; int8: with a scale for each block",
        Choices(("float32", "int8")),
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run."""

    steps: int = setting(100, "optimizer steps", Range(at_least=1))
    stop_at: int = setting(
        0,
        "step after which the run stops, saved and evaluated, with the learning rates of all its "
        "`steps`: a later start goes on from there; 0: the last one",
        Range(at_least=0),
    )
    loss: str = setting(
        "", "a loss of one's own, FILE.py:FUNCTION or MODULE:FUNCTION; empty: cross-entropy"
    )
    z_loss: float = setting(
        0.0,
        "weight of the squared logarithm of the softmax's denominator in the loss, against large "
        "logits (PaLM: 1e-4)",
        Range(at_least=0),
    )
    diloco_inner_steps: int = setting(
        0,
        "DiLoCo: steps that replicas train independently between outer steps; 0: they sum "
        "every gradient",
        Range(at_least=0),
    )
    seed: int = setting(0, "seed of the initial weights", Range(at_least=0))
    init_from: str = setting(
        "",
        "folder of a published model (config.json and safetensors), or org/name[@revision] of the "
        "Hugging Face hub: its model's settings, and its weights as the initial ones of a new run; "
        "empty: random weights",
    )
    fork_from: str = setting(
        "",
        "another run that a new run begins with, RUN or RUN@STEP: its folder, or the place of its "
        "checkpoints; empty: none",
    )
    fork_inherits: str = setting(
        "position",
        "what a fork takes; weights; moments: these too; position: both, and the run goes on with "
        "the step and the batch after RUN's",
        Choices(("position", "moments", "weights")),
    )
    phases: tuple[str, ...] = setting(
        (),
        "changes from a step or a number of tokens on, NAME.SETTING=VALUE, such as "
        "--config.train.phases.long.step=1000; settings: step, tokens, sequence_length, "
        "batch_size, ramp_steps, weight.SOURCE, learning_rate_end (docs/use.md)",
    )
    eval_every: int = setting(0, "steps between evaluations; 0: only at the end", Range(at_least=0))
    eval_batches: int = setting(8, "batches in an evaluation", Range(at_least=1))
    evaluate: str = setting(
        "",
        "an evaluation of one's own, FILE.py:FUNCTION or MODULE:FUNCTION, called when validation "
        "losses are computed (docs/experiments.md); empty: none",
    )
    evaluate_seconds: float = setting(
        600.0, "seconds that `evaluate` may take; its numbers are dropped beyond", Range(above=0)
    )
    eval_ema: bool = setting(
        False, "evaluate and sample with the average of optimizer.ema_decay, not the parameters"
    )
    on_nonfinite: str = setting(
        "stop",
        "what follows a loss or gradient that is not finite: stop; skip the update; "
        "rollback: skip it, and go back to a checkpoint after nonfinite_limit in a row",
        Choices(("stop", "skip", "rollback")),
    )
    nonfinite_limit: int = setting(
        10,
        "consecutive skipped updates after which the run ends (skip) or goes back (rollback)",
        Range(at_least=1),
    )
    spike_threshold: float = setting(
        0.0,
        "rollback: a loss more than this many robust deviations above the median of earlier "
        "losses is a spike; 0: off",
        Range(at_least=0),
    )
    spike_steps: int = setting(
        3, "consecutive spikes after which the run goes back to a checkpoint", Range(at_least=1)
    )
    hash_every: int = setting(
        100,
        "steps between comparisons of the copies of parameters on different devices, by "
        "sums of their bits; 0: never",
        Range(at_least=0),
    )
    rollbacks: int = setting(
        3, "times that a run may go back to a checkpoint before it ends", Range(at_least=1)
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
        Range(at_least=0),
    )
    profile_steps: int = setting(
        0, "steps traced by jax.profiler, from the third of the run", Range(at_least=0)
    )
    sample_prompt: str = setting("", "start of the sample printed at the end")
    sample_tokens: int = setting(
        0, "tokens of the sample printed at the end; 0: no sample", Range(at_least=0)
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", as_entries(self.phases))

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.steps, self.stop_at or self.steps)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: when they are written, where, and which are kept."""

    every: int = setting(
        0, "steps between checkpoints; 0: by time alone, and at the end", Range(at_least=0)
    )
    minutes: float = setting(
        10.0,
        "minutes between checkpoints, whatever `every` is; 0: never by time",
        Range(at_least=0),
    )
    grace: float = setting(
        0.0,
        "seconds between SIGTERM and the loss of the machine, in which the last checkpoint "
        "must be written; 0: unknown",
        Range(at_least=0),
    )
    keep: int = setting(3, "newest checkpoints that are kept", Range(at_least=1))
    keep_every: int = setting(
        0, "steps whose multiples keep their checkpoints for ever; 0: none", Range(at_least=0)
    )
    keep_best: int = setting(
        0,
        "checkpoints with the lowest validation losses that are kept; 0: none",
        Range(at_least=0),
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
        0, "steps between checkpoints in `local`, which keeps the newest two", Range(at_least=0)
    )


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Metrics, and other records of the training."""

    log_every: int = setting(
        10,
        "steps between lines of metrics.jsonl, which begins with the first step",
        Range(at_least=1),
    )
    tensorboard: bool = setting(True, "whether to write TensorBoard files as well")
    rows: bool = setting(
        False,
        "write the sequences that each process reads in every step into the folder rows/; "
        "together they are the same for any number of processes",
    )
    trackers: tuple[str, ...] = setting(
        (),
        "trackers that get the records, each once a checkpoint has its step; or FILE.py:CLASS, "
        "one's own",
        Choices(("wandb", "trackio", "mlflow"), own_code=True),
    )
    project: str = setting(
        "",
        "the run's project (wandb, trackio) or experiment (mlflow); empty: what the tracker's own "
        "environment variable says, else jaxtrain",
    )
