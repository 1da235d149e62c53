"""Notes about settings that differ from their defaults and have no effect. They are no errors.

A flag may leave a recipe's settings without effect: with `--config.mesh.stage=1` the recipe's
schedule has none. This must work, and a note says so. A setting that contradicts another one is an
error of a rule (all_rules.py). Standard library only.
"""

import math
import shlex
from collections.abc import Iterator, Sequence

from jaxtrain.config import (
    Config,
    MeshedConfig,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    ends_with_layers,
    fields,
    get,
    one_line,
    value_text,
    with_values,
)
from jaxtrain.config.groups.layer_kinds import kinds_of_layers, models_of_kinds, of_kind
from jaxtrain.config.groups.setting import parse_item
from jaxtrain.config.kernels import TPU
from jaxtrain.config.rules import mixture_rules, phase_rules
from jaxtrain.config.rules.uses import OFF_TPUS, USES
from jaxtrain.config.saved_values import MLP_OUT, ON_HOST, names_of, names_on_host
from jaxtrain.config.sizes import remat_of
from jaxtrain.schedule.orders import CSV, default_repeats
from jaxtrain.schedule.placement import cut


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
