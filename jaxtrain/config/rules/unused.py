"""Notes about settings that differ from their defaults and have no effect. They are no errors.

A flag may leave a recipe's settings without effect: with `--config.mesh.stage=1` the recipe's
schedule has none. This must work, and a note says so. A setting that contradicts another one is an
error of a rule (all_rules.py). Standard library only.
"""

import dataclasses
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxtrain.config import (
    Config,
    MeshedConfig,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    addresses,
    ends_with_layers,
    fields,
    get,
    one_line,
    sources,
    value_text,
    with_values,
)
from jaxtrain.config.groups.layer_kinds import kinds_of_layers, models_of_kinds, of_kind
from jaxtrain.config.groups.mixture_settings import is_evaluated, mixture_of
from jaxtrain.config.groups.setting import parse_item
from jaxtrain.config.kernels import QUANTIZED, TPU
from jaxtrain.config.learning_rates import LEARNING_RATES, READS as LEARNING_RATES_READ
from jaxtrain.config.optimizers import READS, record_of
from jaxtrain.config.rules import mixture_rules, phase_rules
from jaxtrain.config.rules.mesh_rules import AXES
from jaxtrain.config.rules.model_rules import OF_EXPERTS, OF_SCALINGS
from jaxtrain.config.saved_values import MLP_OUT, ON_HOST, names_of, names_on_host
from jaxtrain.config.sizes import remat_of
from jaxtrain.schedule.files.order_csv import is_order_file
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
            not c.train.init_from
            or c.precision.moments != "float32"
            or (c.precision.params != "float32" and c.precision.masters == "none")
        ),
        lambda c: f"with train.init_from={c.train.init_from!r}, where the weights are",
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
# One more on devices that are no TPUs.
OFF_TPUS = Use(
    ["model.attention_backward"],
    lambda c: False,
    lambda c: "on these devices: splash is a kernel for TPUs",
)


def without_use(config: Config) -> set[str]:
    """The settings that have no use in a config with no mesh size of -1."""
    kinds = _of_kinds(config)
    return {path for use in USES if not any(map(use.used, kinds)) for path in use.settings}


def _of_kinds(config: Config) -> list[Config]:
    """The config with the model of each kind of layers. A setting needs a use in one of them."""
    return [with_values(config, model=each) for each in models_of_kinds(config.model).values()]


def unused_settings(config: MeshedConfig, platform: str = "") -> list[str]:
    """A line for every reason why settings that are not at their defaults have no use, such as
    "pipeline.schedule=interleaved and pipeline.repeats=2 have no use with mesh.stage=1".

    platform: of the devices, by jax's name; "": not known
    """
    named: dict[str, list[str]] = {}  # by reason
    known, kinds = set[str](), _of_kinds(config)
    for use in USES if platform in ("", TPU) else (*USES, OFF_TPUS):
        changed = [
            path
            for path in use.settings
            if path not in known and get(config, path) != fields()[path].default
        ]
        if changed and not any(map(use.used, kinds)):
            known |= set(changed)
            named.setdefault(use.reason(config), []).extend(
                f"{path}={shlex.quote(value_text(get(config, path)))}" for path in changed
            )
    notes = []
    for reason, names in named.items():
        subject = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        verb = "have" if len(names) > 1 else "has"
        notes.append(one_line(f"{subject} {verb} no use {reason}"))
    return [
        *notes,
        *_more_layers_than_there_are(config.pipeline, config.model, config.mesh.stage),
        *_names_without_use(config.pipeline, config.parallel, config.model),
        *_kinds_without_use(config),
        *phase_rules.notes(config),
        *mixture_rules.notes(config.data),
    ]


def _kinds_without_use(config: MeshedConfig) -> Iterator[str]:
    """Lines about kinds that no layer has, and their settings that have no use in it."""
    model = config.model
    kinds = kinds_of_layers(model)
    for entry in model.kinds:
        kind, setting, *_ = parse_item(entry) or ("", "")
        if kind not in kinds:
            yield f"model.kinds={entry} has no use: no layer is of kind {kind}"
            continue
        path, alone = f"model.{setting}", with_values(config, model=of_kind(model, kind))
        unused = (use for use in USES if path in use.settings and not use.used(alone))
        if get(alone, path) != fields()[path].default and (use := next(unused, None)):
            yield f"model.kinds={entry} has no use {use.reason(alone)}"
    if "nope" in kinds and model.positions != "rotary":
        pattern = value_text(model.pattern)
        yield f"nope in model.pattern={pattern} has no use with model.positions={model.positions!r}"


def _names_without_use(
    pipeline: PipelineConfig, parallel: ParallelConfig, model: ModelConfig
) -> Iterator[str]:
    """Lines about names in `pipeline.save`."""
    save = pipeline.save
    is_read = any(kind.norm_place != "before" for kind in models_of_kinds(model).values())
    if MLP_OUT in names_of(save) and not is_read:
        yield f"pipeline.save={MLP_OUT} saves nothing: no backward reads it"
    if names_on_host(save) and parallel.offload_to("activations") == "host":
        yield f"{ON_HOST} in pipeline.save has no use with parallel.offload={parallel.offload}"


def _more_layers_than_there_are(
    pipeline: PipelineConfig, model: ModelConfig, stages: int
) -> list[str]:
    """Lines about `pipeline.remat` that counts more layers than any unit has, and
    `pipeline.layers_per_op` that cuts no chunk."""
    chunks = _chunk_layers(pipeline, model, stages)
    if chunks is None:
        return []
    several = stages > 1
    remat, most = remat_of(pipeline.remat), max(chunks)
    unit = max(cut(chunks, pipeline.layers_per_op)[1]) if several else most
    notes = []
    if remat.layers is not None and remat.layers > unit:
        notes.append(
            f"pipeline.remat={pipeline.remat} recomputes all layers: a unit has {unit} at most"
        )
    if several and pipeline.layers_per_op >= most:
        notes.append(
            f"pipeline.layers_per_op={pipeline.layers_per_op} has no use where a chunk has {most} "
            "layers at most"
        )
    return notes


def _chunk_layers(
    pipeline: PipelineConfig, model: ModelConfig, stages: int
) -> Sequence[int] | None:
    """The layers of chunks, the largest among them; None where times decide."""
    layers = model.layers
    if stages == 1:
        return (layers,)
    is_balanced = ends_with_layers(model) and not pipeline.chunk_layers
    if is_balanced or pipeline.layer_costs or pipeline.schedule.startswith(CSV):
        return None
    repeats = pipeline.repeats or max(default_repeats(pipeline.schedule), 1)
    return pipeline.chunk_layers or (math.ceil(layers / (stages * repeats)),)
