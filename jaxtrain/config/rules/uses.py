"""When a setting has a use, for the notes of unused.py. Standard library only."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable

from jaxtrain.config import (
    Config,
    addresses,
    get,
    sources,
)
from jaxtrain.config.groups.mixture_settings import is_evaluated, mixture_of
from jaxtrain.config.kernels import QUANTIZED
from jaxtrain.config.learning_rates import LEARNING_RATES, READS as LEARNING_RATES_READ
from jaxtrain.config.optimizers import READS, record_of
from jaxtrain.config.rules.mesh_rules import AXES
from jaxtrain.config.rules.model_rules import OF_EXPERTS, OF_SCALINGS
from jaxtrain.schedule.files.order_csv import is_order_file
from jaxtrain.schedule.orders import CSV


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


def _coincide(steps: int, *intervals: int) -> bool:
    """True if a step before the last is a multiple of all of these intervals, none of them 0."""
    return 0 < math.lcm(*intervals) < steps


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
        ["parallel.ends"],
        lambda c: (
            c.parallel.zero < 3
            or c.mesh.context * c.mesh.expert > 1
            or c.parallel.gather != "layer"
            or c.parallel.reduce not in ("auto", "microbatch")
        ),
        lambda c: "with parallel.zero=3, which shards all parameters over mesh.data",
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
    *(
        Use(
            [f"optimizer.{setting}"],
            lambda c, setting=setting: setting in LEARNING_RATES[c.optimizer.schedule].reads,  # type: ignore[misc]
            lambda c: f"with optimizer.schedule={c.optimizer.schedule!r}",
        )
        for setting in LEARNING_RATES_READ
    ),
    Use(
        ["optimizer.final_fraction"],
        lambda c: (
            c.optimizer.decay_steps or not LEARNING_RATES[c.optimizer.schedule].decays_at_the_end
        ),
        lambda c: f"with optimizer.schedule={c.optimizer.schedule!r} and optimizer.decay_steps=0",
    ),
    Use(
        ["optimizer.schedule"],
        lambda c: (
            c.optimizer.decay_steps
            or c.optimizer.schedule == "constant"
            or not LEARNING_RATES[c.optimizer.schedule].decays_at_the_end
        ),
        lambda c: "with optimizer.decay_steps=0, where the learning rate is constant",
    ),
    *(
        Use(
            [f"optimizer.{setting}"],
            lambda c, setting=setting: setting in record_of(c.optimizer.name).reads,  # type: ignore[misc]
            lambda c: f"with optimizer.name={c.optimizer.name!r}",
        )
        for setting in READS
    ),
    Use(_under("model", OF_EXPERTS), lambda c: c.model.experts, lambda c: "with model.experts=0"),
    Use(
        ["model.block_settings"],
        lambda c: c.model.block or c.model.mixer or c.model.kinds,
        lambda c: "without model.block and model.mixer",
    ),
    Use(
        ["model.router_group_limit", "model.router_group_best"],
        lambda c: c.model.router_groups > 1,
        lambda c: "with model.router_groups=1",
    ),
    Use(
        _under("model", "qk_norm qk_norm_over attention_gate sinks"),
        lambda c: c.model.attention == "gqa",
        lambda c: f"with model.attention={c.model.attention!r}",
    ),
    Use(["model.qk_norm_over"], lambda c: c.model.qk_norm, lambda c: "with model.qk_norm=False"),
    Use(
        ["model.shared_gate"],
        lambda c: c.model.shared_experts,
        lambda c: "with model.shared_experts=0",
    ),
    Use(
        ["model.activation_alpha", "model.activation_limit"],
        lambda c: c.model.activation == "clamped_swiglu",
        lambda c: f"with model.activation={c.model.activation!r}",
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
        _under("model", ("rotary_base", "rotary_dim", "rope_scaling", *OF_SCALINGS)),
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
        ["model.rope_mscale_all_dim"],
        lambda c: (
            c.model.attention == "mla" or c.model.rope_mscale and not c.model.rope_attention_factor
        ),
        lambda c: (
            f"with model.attention={c.model.attention!r}, "
            f"model.rope_mscale={c.model.rope_mscale} and "
            f"model.rope_attention_factor={c.model.rope_attention_factor}"
        ),
    ),
    Use(
        ["model.max_positions"],
        lambda c: c.model.positions == "learned",
        lambda c: f"with model.positions={c.model.positions!r}",
    ),
    Use(
        ["model.mup_base_head_dim"],
        lambda c: c.model.mup_base_width and not c.model.attention_scale,
        lambda c: (
            f"with model.mup_base_width={c.model.mup_base_width} and "
            f"model.attention_scale={c.model.attention_scale}"
        ),
    ),
    Use(["model.mtp_weight"], lambda c: c.model.mtp_depth, lambda c: "with model.mtp_depth=0"),
    Use(
        ["model.window"],
        lambda c: c.model.window,
        lambda c: "with the kinds of model.pattern, none of which has a window",
    ),
    Use(["data.source"], lambda c: not c.data.sources, lambda c: "with data.sources"),
    Use(
        ["data.store_cache_gb"],
        lambda c: any(
            map(addresses.is_address, (c.data.source, *c.data.sources, *c.data.validation))
        ),
        lambda c: "with sources that lie in no store",
    ),
    *(
        Use(
            settings,
            lambda c, test=test: any(test(one.data.source) for one in mixture_of(c.data)),  # type: ignore[misc]
            lambda c, more=more: (  # type: ignore[misc]
                f"with {'data.sources' if c.data.sources else f'data.source={c.data.source!r}'}"
                f"{more}"
            ),
        )
        for settings, test, more in (
            (["data.loss_mask", "data.text_fields"], sources.may_have_fields, ""),
            (["data.bad_records"], lambda path: path != sources.STDLIB, ""),
            (["data.filter"], lambda path: not sources.holds_tokens(path), ""),
            (
                ["data.duplicates"],
                lambda path: sources.may_have_fields(path) or not os.path.isfile(path),
                ", which has no two texts",
            ),
            (["data.token_dtype"], lambda path: "bin" in sources.formats(path), ""),
        )
    ),
    Use(
        ["model.attention_backward"],
        lambda c: c.model.attention_kernel in ("auto", "splash"),
        lambda c: f"with model.attention_kernel={c.model.attention_kernel!r}",
    ),
    Use(
        ["train.eval_batches", "checkpoint.keep_best"],
        lambda c: is_evaluated(c.data),
        lambda c: "with data.validation_fraction=0",
    ),
    *(
        Use(
            [path],
            lambda c, path=path: get(c, path) < c.train.steps,  # type: ignore[misc]
            lambda c: f"with train.steps={c.train.steps}",
        )
        for path in (
            "train.stop_at",
            "train.eval_every",
            "checkpoint.every",
            "checkpoint.keep_every",
            "checkpoint.local_every",
            "metrics.log_every",
        )
    ),
    Use(
        ["train.hash_every"],
        lambda c: c.train.hash_every <= c.train.steps,
        lambda c: f"with train.steps={c.train.steps}",
    ),
    Use(
        ["train.hash_every"],
        lambda c: math.prod(getattr(c.mesh, axis) for axis in AXES) > 1,
        lambda c: "with one device, which has the only copy of each parameter",
    ),
    Use(
        ["checkpoint.keep_every"],
        lambda c: (
            _coincide(c.train.steps, c.checkpoint.every, c.checkpoint.keep_every)
            or (c.checkpoint.minutes and not c.checkpoint.every)
        ),
        lambda c: (
            f"with checkpoint.every={c.checkpoint.every}: no step before the last is a multiple of "
            "both"
        ),
    ),
    Use(
        ["checkpoint.keep_best"],
        lambda c: _coincide(c.train.steps, c.checkpoint.every, c.train.eval_every),
        lambda c: (
            f"with checkpoint.every={c.checkpoint.every} and train.eval_every={c.train.eval_every}:"
            " no step before the last is saved and evaluated"
        ),
    ),
    Use(
        ["train.seed"],
        lambda c: (
            not (c.train.init_from or c.train.fork_from)
            or c.precision.moments != "float32"
            or (c.precision.params != "float32" and c.precision.masters == "none")
        ),
        lambda c: f"with the weights of {c.train.init_from or c.train.fork_from!r}",
    ),
    Use(["train.evaluate_seconds"], lambda c: c.train.evaluate, lambda c: "with train.evaluate=''"),
    Use(["train.fork_inherits"], lambda c: c.train.fork_from, lambda c: "with train.fork_from=''"),
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
    Use(["metrics.project"], lambda c: c.metrics.trackers, lambda c: "without metrics.trackers"),
)
# One more on devices that are no TPUs.
OFF_TPUS = Use(
    ["model.attention_backward"],
    lambda c: False,
    lambda c: "on these devices: splash is a kernel for TPUs",
)
