"""The rules of a run: its sequences and corpus, its steps, number formats and places. Standard
library only."""

import re
from collections.abc import Iterator

from jaxtrain.config import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ResolvedModel,
    TrainConfig,
    addresses,
    kernels,
    own_code,
    sources,
)
from jaxtrain.config.groups.mixture_settings import is_evaluated
from jaxtrain.config.learning_rates import LEARNING_RATES
from jaxtrain.config.optimizers import OPTIMIZERS, record_of
from jaxtrain.config.own_code import OwnCodeError
from jaxtrain.config.rules.mixture_rules import of_corpora
from jaxtrain.config.rules.rules import SettingChanges, Violation, item_violations, values_for

BYTE_VOCABULARY = 257  # 256 bytes and the document separator


def own_code_exists(train: TrainConfig, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """The optimizer's record, which later rules read, and the files of a loss and an evaluation."""
    try:
        record_of(optimizer.name)
    except OwnCodeError as error:
        yield Violation("optimizer.name", str(error), values_for("optimizer.name", OPTIMIZERS))
    for path, text in (("train.loss", train.loss), ("train.evaluate", train.evaluate)):
        try:
            if text:
                own_code.digest(text)
        except OwnCodeError as error:
            yield Violation(path, str(error), [{path: ""}])


def own_loss_fits(
    train: TrainConfig, pipeline: PipelineConfig, mesh: MeshConfig
) -> Iterator[Violation]:
    if train.loss and train.z_loss:
        yield Violation(
            "train.z_loss",
            f"is a term of cross-entropy, in whose place is train.loss={train.loss!r}",
            [{"train.z_loss": 0.0}, {"train.loss": ""}],
        )
    if train.loss and mesh.stage > 1 and pipeline.vocabulary == "parallel":
        yield Violation(
            "pipeline.vocabulary",
            f"splits a token's logits over the stages, and train.loss={train.loss!r} reads them on "
            "one",
            [{"pipeline.vocabulary": "auto"}, {"train.loss": ""}],
        )


def sequence_fits(
    model: ResolvedModel, data: DataConfig, train: TrainConfig
) -> Iterator[Violation]:
    tokens = data.sequence_length
    if model.mtp_depth >= tokens:
        yield Violation(
            "model.mtp_depth",
            f"predicts tokens beyond data.sequence_length={tokens}",
            [{"model.mtp_depth": tokens - 1}],
        )
    if model.positions == "learned" and model.max_positions < tokens:
        yield Violation(
            "model.max_positions",
            f"is a shorter table than data.sequence_length={tokens}",
            [{"model.max_positions": tokens}],
        )
    if model.positions == "learned" and model.max_positions <= train.sample_tokens:
        yield Violation(
            "train.sample_tokens",
            "and a prompt are longer than the learned positions, "
            f"model.max_positions={model.max_positions}",
            [{"train.sample_tokens": model.max_positions - 1}],
        )


def data_has_fields(
    data: DataConfig, model: ResolvedModel, train: TrainConfig
) -> Iterator[Violation]:
    yield from of_corpora(lambda each: _corpus_fits(each, model), data)
    if train.eval_every and not (is_evaluated(data) or train.evaluate):
        yield Violation(
            "train.eval_every",
            "needs held-out data, and data.validation_fraction=0",
            [{"train.eval_every": 0}],
        )


def _corpus_fits(data: DataConfig, model: ResolvedModel) -> Iterator[Violation]:
    """The rules of a corpus. data: of a source or a validation set"""
    mask, read = data.loss_mask, data.text_fields
    too_small = data.tokenizer == "bytes" and model.vocab_size < BYTE_VOCABULARY
    if too_small and not sources.holds_tokens(data.source):
        yield Violation(
            "model.vocab_size",
            f"is too small for data.tokenizer='bytes', which has {BYTE_VOCABULARY} tokens",
            [{"model.vocab_size": BYTE_VOCABULARY}],
        )
    if not read:
        yield Violation(
            "data.text_fields", "names no field to read", [{"data.text_fields": ("text",)}]
        )
    if unread := tuple(name for name in mask if name not in read):
        yield Violation(
            "data.loss_mask",
            f"names {unread[0]!r}, which is not in data.text_fields={read!r}",
            [{"data.text_fields": unread + read}],
        )
    if set(mask) == set(read):
        yield Violation(
            "data.loss_mask",
            "names all of data.text_fields: no token would have a loss",
            [{"data.loss_mask": mask[:-1]}],
        )


def weights_have_one_origin(train: TrainConfig) -> Iterator[Violation]:
    if wrong := addresses.fault(train.fork_from):
        yield Violation("train.fork_from", wrong.rule, [{"train.fork_from": ""}])
    if train.fork_from and train.init_from:
        yield Violation(
            "train.fork_from",
            f"has weights for a new run, and so has train.init_from={train.init_from!r}",
            [{"train.init_from": ""}, {"train.fork_from": ""}],
        )


def steps_suffice(train: TrainConfig, optimizer: OptimizerConfig) -> Iterator[Violation]:
    # A warm-up may outlast a short run, such as a trial of another's recipe; a decay may not begin
    # before it.
    scheduled = optimizer.warmup_steps + optimizer.decay_steps
    decays_at_the_end = LEARNING_RATES[optimizer.schedule].decays_at_the_end
    if optimizer.decay_steps and decays_at_the_end and scheduled > train.steps:
        yield Violation(
            "optimizer.decay_steps",
            f"and optimizer.warmup_steps={optimizer.warmup_steps} are more than "
            f"train.steps={train.steps}",
            [{"optimizer.decay_steps": max(train.steps - optimizer.warmup_steps, 0)}],
        )
    if train.profile_steps and train.profile_steps + 2 > train.steps:
        yield Violation(
            "train.profile_steps",
            f"from the third step on are more than train.steps={train.steps}",
            [{"train.profile_steps": max(train.steps - 2, 0)}],
        )
    if train.spike_threshold and train.on_nonfinite != "rollback":
        yield Violation(
            "train.spike_threshold",
            f"is for train.on_nonfinite='rollback' alone, not {train.on_nonfinite!r}",
            [{"train.on_nonfinite": "rollback"}, {"train.spike_threshold": 0.0}],
        )


def average_fits(
    optimizer: OptimizerConfig, train: TrainConfig, parallel: ParallelConfig
) -> Iterator[Violation]:
    path = "optimizer.ema_decay"
    without = {path: 0.0} | ({"train.eval_ema": False} if train.eval_ema else {})
    if train.eval_ema and not optimizer.ema_decay:
        yield Violation(
            "train.eval_ema",
            f"needs an average, and {path}=0",
            [{path: 0.999}, {"train.eval_ema": False}],
        )
    if optimizer.ema_decay and train.diloco_inner_steps:
        yield Violation(
            path,
            "is for one set of parameters, and replicas have their own with "
            f"train.diloco_inner_steps={train.diloco_inner_steps}",
            [without, {"train.diloco_inner_steps": 0}],
        )
    if optimizer.ema_decay and parallel.offload_to("optimizer") == "disk":
        yield Violation(
            path,
            "has no average on disk, where "
            f"parallel.offload_directory={parallel.offload_directory!r} keeps the optimizer's "
            "state",
            [without, {"parallel.offload_directory": ""}],
        )


def products_are_built(precision: PrecisionConfig, model: ResolvedModel) -> Iterator[Violation]:
    if precision.matmul not in ("compute", *kernels.QUANTIZED):
        yield Violation(
            "precision.matmul",
            "has no products in this trainer, only in plans of other frameworks (plan --assume)",
            values_for("precision.matmul", ["fp8", "mxfp8", "compute"]),
            show=3,
        )
    missing = {
        f"model.experts={model.experts}": model.experts,
        "model.attention='mla'": model.attention == "mla",
        f"model.mtp_depth={model.mtp_depth}": model.mtp_depth,
    }
    for setting, has in missing.items():
        if precision.matmul == "mxfp8" and has:
            yield Violation(
                "precision.matmul",
                f"has no products for {setting} yet, only for dense layers",
                values_for("precision.matmul", ["fp8", "compute"]),
                show=2,
            )


def compiler_options_have_names(parallel: ParallelConfig) -> Iterator[Violation]:
    """Each option is NAME=VALUE, with a name that begins as all of XLA's do, and none stands
    twice."""
    rule = "which is not an XLA option such as xla_gpu_enable_latency_hiding_scheduler=true"
    fault = lambda option: None if re.fullmatch(r"xla_\w+=\S+", option) else (rule, "")
    yield from item_violations("parallel.compiler_options", parallel.compiler_options, fault)


def places_are_folders(checkpoint: CheckpointConfig, data: DataConfig) -> Iterator[Violation]:
    directory, local = checkpoint.directory, checkpoint.local
    every = checkpoint.local_every
    if wrong := addresses.fault(directory) or addresses.not_utf8(directory):
        yield Violation(
            "checkpoint.directory",
            wrong.rule,
            values_for("checkpoint.directory", wrong.meant or [""]),
            show=2,
        )
    if addresses.is_address(data.cache) or addresses.fault(data.cache):
        yield Violation("data.cache", "is no folder of this machine", [{"data.cache": ""}])
    if local and not every:
        yield Violation(
            "checkpoint.local_every",
            f"leaves checkpoint.local={local!r} without a step at which to save",
            [{"checkpoint.local_every": 10}],
        )
    if every and not local:
        yield Violation(
            "checkpoint.local_every",
            "needs a folder, and checkpoint.local is empty",
            [{"checkpoint.local": "/dev/shm/jaxtrain"}, {"checkpoint.local_every": 0}],
        )
    if local and not local.startswith("/"):
        folder = f"/dev/shm/{local.partition('://')[2] or local}"
        yield Violation(
            "checkpoint.local",
            "is not an absolute path, which every machine needs",
            [{"checkpoint.local": folder}],
        )


def offload_directory_is_local(
    parallel: ParallelConfig, checkpoint: CheckpointConfig
) -> Iterator[Violation]:
    """The folder of the optimizer's state on disk."""
    path, folder = "parallel.offload_directory", parallel.offload_directory
    if not folder:
        return
    without: SettingChanges = {path: ""}
    if parallel.offload_to("optimizer") == "device":
        offload = "both" if parallel.offload == "activations" else "optimizer"
        yield Violation(
            path,
            "is for the optimizer's state, which parallel.offload="
            f"{parallel.offload!r} leaves on the devices",
            [{"parallel.offload": offload}, without],
        )
    if addresses.is_address(folder) or addresses.fault(folder):
        yield Violation(path, "is no folder of a local disk", [without])
    elif wrong := addresses.not_utf8(folder):
        yield Violation(path, wrong.rule, values_for(path, wrong.meant))
    if checkpoint.local:
        yield Violation(
            "checkpoint.local",
            f"copies the state to memory, and {path}={folder!r} keeps it on disk because memory "
            "has no space for it",
            [{"checkpoint.local": "", "checkpoint.local_every": 0}, without],
        )
