"""Notes about settings that differ from their defaults and have no effect. They are no errors.

A flag may leave a recipe's settings without effect: with `--config.mesh.stage=1` the recipe's
schedule has none. This must work, and a note says so. A setting that contradicts another one is an
error of rules.py or mesh_rules.py. Standard library only.
"""

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterable

from jaxtrain import config as cfg
from jaxtrain.config import Config, ends_with_layers, sources
from jaxtrain.config.kernels import QUANTIZED
from jaxtrain.config.optimizers import OPTIMIZERS, READS
from jaxtrain.config.rules import OF_EXPERTS
from jaxtrain.config.sizes import remat_of
from jaxtrain.schedule.order_csv import is_order_file
from jaxtrain.schedule.orders import CSV, default_repeats
from jaxtrain.schedule.placement import cut


def _under(group: str, names: str | Iterable[str]) -> list[str]:
    return [f"{group}.{name}" for name in (names.split() if isinstance(names, str) else names)]


@dataclasses.dataclass(frozen=True)
class Use:
    """Settings that have a use under the same condition.

    used: True if they have one in a config none of whose mesh sizes is -1
    reason: why they have none: the words after "has no use"
    """

    settings: list[str]
    used: Callable[[Config], object]
    reason: Callable[[Config], str]


# Settings of rotary scalings → the scalings that read them.
OF_SCALINGS = {
    "rope_factor": ("linear", "llama3", "yarn"),
    "rope_original_length": ("llama3", "yarn"),
    "rope_low_freq_factor": ("llama3",),
    "rope_high_freq_factor": ("llama3",),
    "rope_beta_fast": ("yarn",),
    "rope_beta_slow": ("yarn",),
    "rope_truncate": ("yarn",),
    "rope_attention_factor": ("yarn",),
    "rope_mscale": ("yarn",),
    "rope_mscale_all_dim": ("yarn",),
}

USES = (
    Use(
        _under(
            "pipeline",
            "schedule steps_per_program repeats overlap layers_per_op chunk_layers layer_costs "
            "vocabulary permute times measure_times memory",
        ),
        lambda c: c.mesh.stage > 1,
        lambda c: "with mesh.stage=1",
    ),
    Use(
        _under("pipeline", "overlap layers_per_op permute"),
        lambda c: (
            not c.pipeline.schedule.startswith(CSV)
            or is_order_file(c.pipeline.schedule.removeprefix(CSV))
        ),
        lambda c: f"with the table of pipeline.schedule={c.pipeline.schedule!r}",
    ),
    Use(
        ["pipeline.measure_times"],
        lambda c: not c.pipeline.times,
        lambda c: "with pipeline.times, which are used instead",
    ),
    Use(
        ["precision.fp8_gradients", "precision.fp8_weight_gradients"],
        lambda c: c.precision.matmul in QUANTIZED,
        lambda c: f"with precision.matmul={c.precision.matmul!r}",
    ),
    Use(
        ["precision.masters"],
        lambda c: c.precision.params != "float32",
        lambda c: f"with precision.params={c.precision.params!r}, which need no masters",
    ),
    Use(["parallel.context"], lambda c: c.mesh.context > 1, lambda c: "with mesh.context=1"),
    Use(["parallel.expert_nodes"], lambda c: c.mesh.expert > 1, lambda c: "with mesh.expert=1"),
    Use(["parallel.collective_matmul"], lambda c: c.mesh.model > 1, lambda c: "with mesh.model=1"),
    Use(
        ["parallel.gather"],
        lambda c: c.parallel.zero == 3,
        lambda c: f"with parallel.zero={c.parallel.zero}",
    ),
    Use(
        ["parallel.gather", "parallel.reduce"],
        lambda c: c.mesh.data > 1,
        lambda c: "with mesh.data=1",
    ),
    Use(
        ["parallel.ends"],
        lambda c: c.mesh.data * c.mesh.context * c.mesh.expert > 1 or c.parallel.ends != "sharded",
        lambda c: "with one device in a stage and replica",
    ),
    Use(
        ["parallel.zero"],
        lambda c: c.mesh.data > 1 or c.parallel.zero < 2,
        lambda c: "with mesh.data=1 that 1 has not",
    ),
    Use(
        ["optimizer.outer_learning_rate", "optimizer.outer_momentum", "precision.outer"],
        lambda c: c.train.diloco_inner_steps,
        lambda c: "with train.diloco_inner_steps=0, where replicas are not independent",
    ),
    Use(
        ["optimizer.decay_steps"],
        lambda c: c.optimizer.schedule == "constant",
        lambda c: f"with optimizer.schedule={c.optimizer.schedule!r}",
    ),
    Use(
        ["optimizer.final_fraction"],
        lambda c: c.optimizer.schedule != "constant" or c.optimizer.decay_steps,
        lambda c: "with optimizer.schedule='constant' and optimizer.decay_steps=0",
    ),
    *(
        Use(
            _under("optimizer", [setting for setting in READS if setting not in optimizer.reads]),
            lambda c, name=name: c.optimizer.name != name,  # type: ignore[misc]
            lambda c: f"with optimizer.name={c.optimizer.name!r}",
        )
        for name, optimizer in OPTIMIZERS.items()
    ),
    Use(_under("model", OF_EXPERTS), lambda c: c.model.experts, lambda c: "with model.experts=0"),
    Use(
        ["model.router_group_limit", "model.router_group_best"],
        lambda c: c.model.router_groups > 1,
        lambda c: "with model.router_groups=1",
    ),
    Use(
        ["model.qk_norm"],
        lambda c: c.model.attention == "gqa",
        lambda c: f"with model.attention={c.model.attention!r}",
    ),
    Use(
        ["model.expert_room"],
        lambda c: not c.model.capacity_factor,
        lambda c: f"with model.capacity_factor={c.model.capacity_factor}",
    ),
    Use(
        ["model.expert_room"],
        lambda c: c.mesh.expert > 1,
        lambda c: "with mesh.expert=1, where each device has memory for all of its tokens",
    ),
    Use(
        ["model.balance_rate"],
        lambda c: c.model.router_bias or not c.model.balance_rate,
        lambda c: "with model.router_bias=False",
    ),
    Use(
        ["model.mlp_width"],
        lambda c: not c.model.experts or not c.model.expert_width or c.model.dense_layers,
        lambda c: "with model.expert_width, where every layer has experts",
    ),
    Use(
        _under("model", "query_rank kv_rank rope_head_dim value_head_dim latent_norm_epsilon"),
        lambda c: c.model.attention == "mla",
        lambda c: f"with model.attention={c.model.attention!r}",
    ),
    Use(
        _under("model", ("rotary_base", "rotary_dim", "nope_layers", "rope_scaling", *OF_SCALINGS)),
        lambda c: c.model.positions == "rotary",
        lambda c: f"with model.positions={c.model.positions!r}",
    ),
    Use(
        ["model.rotary_dim"],
        lambda c: c.model.attention == "gqa",
        lambda c: f"with model.attention={c.model.attention!r}",
    ),
    *(
        Use(
            [f"model.{name}"],
            lambda c, scalings=scalings: c.model.rope_scaling in scalings,  # type: ignore[misc]
            lambda c: f"with model.rope_scaling={c.model.rope_scaling!r}",
        )
        for name, scalings in OF_SCALINGS.items()
    ),
    Use(
        ["model.rope_mscale"],
        lambda c: c.model.rope_mscale_all_dim and not c.model.rope_attention_factor,
        lambda c: (
            f"with model.rope_mscale_all_dim={c.model.rope_mscale_all_dim} and "
            f"model.rope_attention_factor={c.model.rope_attention_factor}"
        ),
    ),
    Use(
        ["model.max_positions"],
        lambda c: c.model.positions == "learned",
        lambda c: f"with model.positions={c.model.positions!r}",
    ),
    Use(["model.mtp_weight"], lambda c: c.model.mtp_depth, lambda c: "with model.mtp_depth=0"),
    Use(
        ["data.loss_mask", "data.text_fields"],
        lambda c: c.data.source != sources.STDLIB and not sources.holds_tokens(c.data.source),
        lambda c: f"with data.source={c.data.source!r}",
    ),
    Use(
        ["data.token_dtype"],
        lambda c: sources.format_of(c.data.source) == "bin",
        lambda c: f"with data.source={c.data.source!r}",
    ),
    Use(
        ["model.attention_backward"],
        lambda c: c.model.attention_kernel in ("auto", "splash"),
        lambda c: f"with model.attention_kernel={c.model.attention_kernel!r}",
    ),
    Use(
        ["train.eval_batches"],
        lambda c: c.data.validation_fraction,
        lambda c: "with data.validation_fraction=0",
    ),
    Use(
        ["train.nonfinite_limit"],
        lambda c: c.train.on_nonfinite != "stop",
        lambda c: "with train.on_nonfinite='stop'",
    ),
    Use(
        ["train.rollbacks"],
        lambda c: c.train.on_nonfinite == "rollback",
        lambda c: f"with train.on_nonfinite={c.train.on_nonfinite!r}",
    ),
    Use(
        ["train.spike_steps"],
        lambda c: c.train.spike_threshold,
        lambda c: "with train.spike_threshold=0",
    ),
    Use(
        ["train.sample_prompt"],
        lambda c: c.train.sample_tokens,
        lambda c: "with train.sample_tokens=0",
    ),
)


def without_use(config: Config) -> set[str]:
    """The settings that have no use in a config with no mesh size of -1."""
    return {path for use in USES if not use.used(config) for path in use.settings}


def unused_settings(config: Config) -> list[str]:
    """A line for every reason why settings that are not at their defaults have no use, such as
    "pipeline.schedule=interleaved and pipeline.repeats=2 have no use with mesh.stage=1". config:
    not resolved, with the mesh's -1 filled in."""
    notes, known = [], set[str]()
    for use in USES:
        changed = [
            path
            for path in use.settings
            if path not in known and cfg.get(config, path) != cfg.fields()[path].default
        ]
        if changed and not use.used(config):
            known |= set(changed)
            named = [
                f"{path}={shlex.quote(cfg.value_text(cfg.get(config, path)))}" for path in changed
            ]
            subject = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
            notes.append(
                cfg.one_line(
                    f"{subject} {'have' if len(changed) > 1 else 'has'} no use {use.reason(config)}"
                )
            )
    return [*notes, *_more_layers_than_a_unit(config)]


def _more_layers_than_a_unit(config: Config) -> list[str]:
    """A line if `pipeline.remat` counts more layers than any unit has."""
    remat, most = remat_of(config.pipeline.remat), _largest_unit(config)
    if remat.layers is None or most is None or remat.layers <= most:
        return []
    text = f"pipeline.remat={config.pipeline.remat}"
    return [f"{text} recomputes all layers: a unit has {most} at most"]


def _largest_unit(config: Config) -> int | None:
    """The most layers of a unit; None where times decide."""
    pipeline, stages, layers = config.pipeline, config.mesh.stage, config.model.layers
    if stages == 1:
        return layers
    is_balanced = ends_with_layers(config.model) and not pipeline.chunk_layers
    if is_balanced or pipeline.layer_costs or pipeline.schedule.startswith(CSV):
        return None
    repeats = pipeline.repeats or max(default_repeats(pipeline.schedule), 1)
    chunks = pipeline.chunk_layers or (math.ceil(layers / (stages * repeats)),)
    return max(cut(chunks, pipeline.layers_per_op)[1])
