"""Random configs that work: a model with its data, and layouts of it over a mesh. Drawn for
tests/by_hand/fuzz.py; nothing is run here.

What is drawn must be one training on every layout, in float32: DiLoCo, sums in 16 bits and cuDNN
are left out.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

from jaxtrain.config import Config, ConfigError, replace
from jaxtrain.config.groups.model_settings import BIASED
from jaxtrain.config.learning_rates import LEARNING_RATES
from jaxtrain.config.rules.checks import Environment, first_violation
from jaxtrain.config.rules.mesh_rules import AXES, on_mesh
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.schedule.orders import SCHEDULES

MOST_DEVICES = 14
TRIES = 2000
# What the run itself must have: two steps, every one logged, and nothing beside them.
RUN = {
    "train.steps": 2,
    "train.sample_tokens": 0,
    "train.eval_batches": 1,
    "train.eval_every": 0,
    "metrics.log_every": 1,
    "metrics.tensorboard": False,
    "precision.compute": "float32",
    "data.text_fields": ("prompt", "answer"),
}
# The layout of the run that all are compared with.
ONE_DEVICE = {
    **{f"mesh.{axis}": 1 for axis in AXES},
    "parallel.zero": 0,
    "pipeline.schedule": "1f1b",
    "pipeline.repeats": 1,
    "pipeline.microbatches": 1,
    "pipeline.remat": "none",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and how it is used: the settings over those of the model, and the devices that it
    needs."""

    settings: dict[str, Any]
    devices: int

    @property
    def stages(self) -> int:
        return self.settings["mesh.stage"]

    @property
    def odd(self) -> bool:
        """Whether the size of an axis is no power of two."""
        return any(size & (size - 1) for size in (self.settings[f"mesh.{axis}"] for axis in AXES))


def draw_model(chance: random.Random) -> dict[str, Any]:
    """Settings of a small model, its data and its optimizer."""
    heads = chance.choice((1, 2, 3, 4, 6, 8, 12))
    positions = chance.choice(("rotary", "rotary", "learned"))
    head_dim = (
        chance.choice((2, 4, 6, 8, 10)) if positions == "rotary" else chance.choice((3, 4, 5, 8))
    )
    settings = {
        "model.layers": chance.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12)),
        "model.width": chance.choice((12, 24, 30, 36, 48, 64)),
        "model.heads": heads,
        "model.head_dim": head_dim,
        "model.kv_heads": chance.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "model.mlp_width": chance.choice((24, 30, 36, 42, 60, 64, 72)),
        "model.vocab_size": chance.choice((257, 257, 259, 300, 4099)),
        "model.norm": chance.choice(("rmsnorm", "layernorm")),
        "model.activation": chance.choice(("swiglu", "gelu")),
        "model.positions": positions,
        "model.tied_embeddings": chance.random() < 0.5,
        "model.loss_chunk": chance.choice((7, 64, 2048)),
        "data.source": chance.choice(("corpus.jsonl", "corpus.jsonl", "long.jsonl")),
        "data.sequence_length": chance.choice((8, 12, 15, 16, 24, 30, 36, 40, 42, 48, 60, 64, 84)),
        "data.batch_size": chance.choice((6, 8, 10, 12, 12, 14, 15, 18, 20, 24, 24, 30, 36)),
        "data.attend_across_documents": chance.random() < 0.7,
        "data.loss_mask": chance.choice(((), (), ("prompt",))),
        "data.validation_fraction": chance.choice((0.0, 0.0, 0.2)),
        "data.seed": chance.randrange(1000),
        "optimizer.learning_rate": chance.choice((1e-3, 3e-3, 1e-2)),
        "optimizer.warmup_steps": chance.choice((0, 0, 1, 2)),
        "optimizer.clip_norm": chance.choice((0.0, 0.5, 1.0)),
        "optimizer.schedule": chance.choice(tuple(LEARNING_RATES)),
        "train.seed": chance.randrange(1000),
    }
    if chance.random() < 0.04:  # from 1024 keys on attention goes block by block
        settings |= {
            "data.sequence_length": chance.choice((1024, 1080, 1152)),
            "data.batch_size": chance.choice((4, 6)),
        }
    if chance.random() < 0.4:
        settings |= _draw_experts(chance)
    if chance.random() < 0.2:
        settings |= {
            "model.attention": "mla",
            "model.positions": "rotary",
            "model.kv_heads": 0,
            "model.kv_rank": chance.choice((5, 8, 12)),
            "model.query_rank": chance.choice((0, 6, 9)),
            "model.rope_head_dim": chance.choice((2, 4, 6)),
            "model.value_head_dim": chance.choice((0, 3, 8)),
        }
    if chance.random() < 0.15:
        settings |= {"model.mtp_depth": chance.choice((1, 2, 3))}
    lacking = ["mlp" if "model.experts" in settings else "router"]
    lacking += ["norm"] * (settings["model.norm"] == "rmsnorm")
    parts = [part for part in BIASED if part not in lacking]
    settings |= {"model.biases": tuple(part for part in parts if chance.random() < 0.2)}
    if settings["model.positions"] == "rotary":
        settings |= _draw_rotary(chance, settings)
    return settings


def _draw_rotary(chance: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    drawn: dict[str, Any] = {"model.qk_norm": chance.random() < 0.2}
    if chance.random() < 0.3:
        drawn |= {
            "model.rope_scaling": chance.choice(("linear", "llama3", "yarn")),
            "model.rope_factor": chance.choice((2.0, 8.0)),
            "model.rope_original_length": chance.choice((4, 8, 64)),
            "model.rope_mscale_all_dim": chance.choice((0.0, 1.0)),
        }
    if chance.random() < 0.2:
        pattern = ("full",) * (settings["model.layers"] - 1) + ("nope",)
        drawn |= {"model.pattern": pattern}
    if chance.random() < 0.2:
        drawn |= {"model.rotary_dim": 2}
    return drawn


def _draw_experts(chance: random.Random) -> dict[str, Any]:
    experts = chance.choice((3, 4, 6, 8, 9, 10, 12))
    settings = {
        "model.experts": experts,
        "model.expert_width": chance.choice((12, 18, 24, 30)),
        "model.experts_per_token": chance.choice((1, 2, 3)),
        "model.shared_experts": chance.choice((0, 0, 1, 2)),
        "model.dense_layers": chance.choice((0, 0, 1, 2)),
        "model.router": chance.choice(("softmax", "sigmoid")),
        "model.capacity_factor": chance.choice((0.0, 0.0, 1.25, 0.7)),
        "model.balance_rate": chance.choice((0.0, 0.001)),
        "model.balance_loss": chance.choice((0.0, 0.01)),
        "model.z_loss": chance.choice((0.0, 0.001)),
    }
    if chance.random() < 0.3:
        groups = chance.choice([n for n in range(1, experts + 1) if experts % n == 0])
        settings |= {
            "model.router_groups": groups,
            "model.router_group_limit": chance.randint(1, groups),
        }
    return settings


def _draw_mesh(chance: random.Random, staged: bool, odd: bool) -> dict[str, int]:
    """Axis → size, of at most MOST_DEVICES devices."""
    while True:
        sizes = dict.fromkeys(AXES, 1)
        for axis in chance.sample(AXES, chance.choice((1, 2, 2, 3, 3, 4))):
            sizes[axis] = chance.choice((2, 2, 3, 3, 4, 5, 6, 7))
        fits = 2 <= math.prod(sizes.values()) <= MOST_DEVICES and (sizes["stage"] > 1) == staged
        if fits and any(size & (size - 1) for size in sizes.values()) == odd:
            return sizes


def _draw_layout(chance: random.Random, sizes: dict[str, int], layers: int) -> dict[str, Any]:
    """A proposal for a mesh and a number of layers, which need not work."""
    schedule = chance.choice((*SCHEDULES, "auto"))
    least, most = (
        (SCHEDULES[schedule].least_repeats, SCHEDULES[schedule].most_repeats)
        if schedule in SCHEDULES
        else (0, 2)
    )
    settings = {
        **{f"mesh.{axis}": size for axis, size in sizes.items()},
        "parallel.zero": chance.choice((0, 1, 2, 3)),
        "parallel.reduce": chance.choice(("auto", "auto", "step", "microbatch")),
        "parallel.gather": chance.choice(("layer", "layer", "step")),
        "parallel.context": chance.choice(("all_gather", "ulysses", "ring")),
        "parallel.offload": chance.choice(
            ("none", "none", "none", "optimizer", "activations", "both")
        ),
        "parallel.offload_directory": chance.choice(("", "", "", "/tmp/jaxtrain_offload")),
        "pipeline.schedule": schedule,
        "pipeline.repeats": chance.choice((0, least, most or least + chance.choice((0, 1, 2)))),
        "pipeline.microbatches": chance.choice((1, 2, 3, 4, 5, 6, 7, 8, 10, 12)),
        "pipeline.remat": chance.choice(("full", "selective", "none", "full:1", "selective:1")),
        "pipeline.layers_per_op": chance.choice((0, 0, 1, 2)),
        "pipeline.vocabulary": chance.choice(("auto", "parallel", "end_stages")),
        "pipeline.permute": chance.choice(("auto", "late", "aligned", "early", "spaced")),
        "pipeline.times": chance.choice(((), (), (1.0, 1.0, 1.0), (2.0, 2.5, 1.0, 0.3))),
    }
    if schedule == "auto":
        settings["pipeline.memory"] = chance.choice((0.0, 0.0, 1.5, 3.0))
    cut = chance.random()
    if cut < 0.15:
        settings["pipeline.layer_costs"] = tuple(
            float(chance.choice((1, 1, 2, 5))) for _ in range(layers)
        )
    elif cut < 0.3 and layers >= (
        chunks := sizes["stage"] * max(settings["pipeline.repeats"], least, 1)
    ):
        ends = sorted(chance.sample(range(1, layers), chunks - 1))
        settings["pipeline.chunk_layers"] = tuple(
            stop - start for start, stop in zip([0, *ends], [*ends, layers])
        )
    return settings


def works(settings: dict[str, Any], devices: int) -> bool:
    """Whether a run with these settings, over the defaults, is one that the trainer begins."""
    config = replace(Config(), settings)
    if first_violation(config, Environment(devices, "cpu")):  # without a search for what would do
        return False
    try:
        make_setup(on_mesh(config, devices).resolve())
    except ConfigError:
        return False
    return True


def draw_layouts(
    chance: random.Random, model: dict[str, Any], wanted: Sequence[tuple[bool, bool]]
) -> list[Layout] | None:
    """A layout for each (several stages?, a size that is no power of two?); None if this model
    hardly has one."""
    layouts = []
    for staged, odd in wanted:
        for attempt in range(TRIES):
            if attempt % 50 == 0:
                sizes = _draw_mesh(chance, staged, odd)
            settings = _draw_layout(chance, sizes, model["model.layers"])
            if works(RUN | model | settings, math.prod(sizes.values())):
                layouts.append(Layout(settings, math.prod(sizes.values())))
                break
        else:
            return None
    return layouts


def draw_group(seed: int, group: int, size: int) -> tuple[dict[str, Any], list[Layout]]:
    """A model and `size` layouts of it. Of all, some two thirds have several stages, and half a
    size that is no power of two."""
    chance = random.Random(f"{seed}/{group}")
    while True:
        model = draw_model(chance)
        wanted = [(chance.random() < 0.67, chance.random() < 0.55) for _ in range(size)]
        if works(RUN | model | ONE_DEVICE, 1) and (layouts := draw_layouts(chance, model, wanted)):
            return model, layouts
