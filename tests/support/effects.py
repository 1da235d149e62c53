"""All that a run does by its settings, as texts and numbers that can be compared: what a setting
changes must show in one of them.

Settings that no figure shows stand in UNSEEN, with the reason.
"""

import functools
import hashlib
import json
import math
import pathlib
import random
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxtrain import config as cfg
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.config import Config, ConfigError
from jaxtrain.config.phases import rate_lines, spans
from jaxtrain.config.rules.checks import Environment, first_violation
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.data.corpora import prepare_all
from jaxtrain.data.loader import make_loaders
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.devices.sharding import BATCH_SPEC
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.run.intervals import Intervals
from jaxtrain.training.step import make_step

# Groups and settings that the program of a step does not read.
BESIDE_THE_PROGRAM = (
    "checkpoint.",
    "metrics.",
    "train.eval_",
    "train.hash_every",
    "data.seed",
    "data.source",
    "data.loss_mask",
    "data.text_fields",
    "data.packing",
    "data.token_dtype",
    "data.validation_fraction",
    "data.duplicates",
)

# Settings → why their effect is not looked at here.
UNSEEN = {
    "a path": "data.source data.tokenizer data.cache checkpoint.directory checkpoint.local "
    "parallel.offload_directory train.init_from train.fork_from",
    "the machine's time": "checkpoint.minutes checkpoint.grace checkpoint.keep train.hang_after "
    "data.prefetch pipeline.measure_times",
    "an output of its own": "metrics.tensorboard metrics.rows metrics.trackers "
    "metrics.project train.profile_steps train.sample_tokens train.sample_prompt",
    "what bad numbers lead to": "train.nonfinite_limit train.rollbacks train.spike_threshold "
    "train.spike_steps data.bad_records",
    "another number of devices": " ".join(p for p in cfg.fields() if p.startswith("mesh.")),
    "the hardware that is planned for": "train.hardware",
    "one value on CPUs": "model.attention_kernel parallel.collective_matmul",
    "code of one's own": "model.block model.mixer model.block_settings train.loss train.evaluate "
    "data.filter",
    "read as text": "parallel.compiler_options pipeline.times pipeline.layer_costs",
}


SMALL = {
    "model.layers": 2,
    "model.width": 8,
    "model.heads": 2,
    "model.mlp_width": 16,
    "data.sequence_length": 8,
    "data.batch_size": 8,
    "data.text_fields": ("prompt", "text"),
    "mesh.data": 1,
    "train.steps": 12,
    "checkpoint.every": 4,
    "metrics.log_every": 3,
}
# What a setting is drawn over: between them they have all features.
BASES = (
    {},
    {"train.eval_every": 3, "checkpoint.keep_best": 1, "checkpoint.keep_every": 6},
    {"data.validation_fraction": 0.0, "checkpoint.every": 20, "data.loss_mask": ("prompt",)},
    {
        "mesh.stage": 2,
        "pipeline.microbatches": 2,
        "pipeline.schedule": "zb_h1",
        "mesh.data": 2,
        "parallel.zero": 2,
    },
    {
        "model.experts": 4,
        "mesh.expert": 2,
        "pipeline.microbatches": 2,
        "model.router_groups": 2,
        "model.dense_layers": 1,
    },
    {
        "model.attention": "mla",
        "model.kv_rank": 4,
        "model.rope_head_dim": 2,
        "model.mtp_depth": 1,
        "optimizer.name": "adafactor",
        "mesh.data": 2,
    },
    {
        "mesh.replica": 2,
        "train.diloco_inner_steps": 2,
        "optimizer.name": "lion",
        "model.rope_scaling": "yarn",
        "model.rope_factor": 2.0,
        "model.rope_original_length": 64,
        "model.head_dim": 32,
        "precision.params": "bfloat16",
    },
    {
        "mesh.model": 2,
        "mesh.context": 2,
        "pipeline.microbatches": 2,
        "precision.matmul": "fp8",
        "model.positions": "learned",
        "model.norm": "layernorm",
    },
    {
        "mesh.stage": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.microbatches": 4,
        "parallel.zero": 3,
        "mesh.data": 2,
        "model.layers": 4,
        "model.experts": 3,
        "pipeline.remat": "selective",
        "train.on_nonfinite": "skip",
        "optimizer.name": "muon",
    },
    {"parallel.offload": "optimizer", "optimizer.schedule": "constant", "optimizer.clip_norm": 0.0},
)


TUPLES = {
    "model.pattern": [("nope", "full"), ("nope",)],
    "model.kinds": [("full.rotary_base=100",), ("full.norm_epsilon=0.1",)],
    "train.phases": [("a.step=4", "a.batch_size=16"), ("a.step=6", "a.learning_rate_end=0")],
}


def write_corpora(folder: pathlib.Path) -> list[str]:
    """The paths of a file of records, a text and a token file, with more than a batch each."""
    lines = [{"prompt": f"{i}? ", "text": f"number {i * i} of some"} for i in range(400)]
    lines = [*lines[:20], *lines]  # duplicates
    paths = [folder / name for name in ("a.jsonl", "a.txt", "a.bin")]
    paths[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths[1].write_text("".join(line["text"] + "\n" for line in lines))
    np.arange(9000, dtype="<u4").__mod__(250).tofile(paths[2])
    return [str(path) for path in paths]


def others_of(path: str, settings: dict[str, Any]) -> list[Any]:
    """Values that a setting may have in place of its own, three at most. They leave a config that
    works and, resolved, is another one."""
    now, default = values_of(path, settings)
    if names := cfg.setting_of(cfg.fields()[path]).choices.names:
        single = not isinstance(default, tuple)
        values = [name if single else (name,) for name in names]
    elif isinstance(default, bool):
        values = [False, True]
    elif isinstance(default, int):
        values = [1, 2, 3, 4, 5, 8, default + 1, 2 * default]
    elif isinstance(default, float):
        values = [0.25, 0.5, 1.0, 2.0, default / 2, default * 2]
    else:
        values = TUPLES.get(path, [("text",), ("prompt",)] if path.startswith("data.") else [(1,)])
    resolved = config_of(settings).resolve()
    working = [
        value
        for value in dict.fromkeys((default, *values))
        if value != now
        and _works(config := config_of(settings | {path: value}))
        and config.resolve() != resolved
    ]
    return random.Random(path).sample(working, min(len(working), 3))


def values_of(path: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """A setting's value and its default."""
    default = cfg.fields()[path].default
    return settings.get(path, default), default


def config_of(settings: dict[str, Any]) -> Config:
    return cfg.replace(cfg.Config(), settings)


def _works(config: Config) -> bool:
    devices = math.prod(sizes_of(config.mesh))
    if first_violation(config, Environment(devices, "cpu")):
        return False
    try:
        make_setup(config.resolve())
    except ConfigError:
        return False
    return True


def effects(config: Config) -> dict[str, Any]:
    """What a run does: the program of its step, its first weights, its batches, what is due
    after each step, and the checkpoints that stay. config: with the mesh's sizes."""
    resolved = config.resolve()
    same_program = {
        path: field.default
        for path, field in cfg.fields().items()
        if path.startswith(BESIDE_THE_PROGRAM)
    }
    return {
        "program": _program(cfg.replace(resolved, same_program)),
        "weights": (config.train.seed, config.model.init_std),
        "batches": _batches(config),
        "spans": (spans(config), rate_lines(config)),
        "due": (due := _due(config)),
        "kept": _kept(config, due),
    }


@functools.cache
def _program(resolved: Config) -> str:
    """A digest of the texts of a step's programs."""
    sizes = sizes_of(resolved.mesh)
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes)])
    with jax.set_mesh(mesh):
        step = make_step(resolved, mesh, make_setup(resolved))
        texts = [step.lower().as_text()]
        if step.exchange:
            texts.append(step.exchange.lower(step.abstract_state()).as_text())
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _batches(config: Config) -> tuple[bytes, ...]:
    """The content of two batches, and of those that are evaluated."""
    corpora = prepare_all(config.data, config.model.vocab_size, progress=False)
    one = NamedSharding(make_mesh((1,) * 6, jax.devices()[:1]), BATCH_SPEC)
    data, like = config.data, jax.ShapeDtypeStruct((1, 1, 1), np.int32, sharding=one)
    train, held_out = make_loaders(
        TrainingBatches(corpora, spans(config)), data, like, 1, config.train.eval_batches
    )
    batches = [train.batch(0), train.batch(1)]
    for loader in held_out.values():
        batches += loader.iterate()
    for loader in (train, *held_out.values()):
        loader.close()
    return tuple(np.asarray(array).tobytes() for batch in batches for array in batch.values())


def _due(config: Config) -> list[tuple[str, int]]:
    """What is due after each step: (what, step)."""
    intervals = Intervals.of(config.train, config.checkpoint, config.metrics.log_every)
    due = {
        "saves": intervals.saves,
        "saves locally": intervals.saves_locally,
        "evaluates": lambda at: config.data.validation_fraction and intervals.evaluates(at),
        "exchanges": intervals.exchanges,
        "logs": intervals.logs,
        "compares copies": lambda at: (
            math.prod(sizes_of(config.mesh)) > 1 and intervals.compares(at)
        ),
    }
    steps = range(1, config.train.steps + 1)
    return [(what, step) for what, is_due in due.items() for step in steps if is_due(step)]


def _kept(config: Config, due: list[tuple[str, int]]) -> set[int]:
    """The steps whose checkpoints are left. The losses fall and rise again, so that the best one is
    none of the newest."""
    checkpoint, retained, losses = config.checkpoint, set[int](), {}
    retention = Retention(1, checkpoint.keep_every, checkpoint.keep_best)
    for step in range(1, config.train.steps + 1):
        if ("saves", step) in due:
            retained.add(step)
            if ("evaluates", step) in due:
                losses[step] = abs(step - config.train.steps / 4)
            retained = retention.retained(retained, losses)
    return retained
