"""A config.json as the settings of a model, and a model's settings as a config.json."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config.groups.layer_kinds import OF_MODEL
from jaxtrain.config.rules import checks, unused
from jaxtrain.hf.families import FAMILIES
from jaxtrain.hf.families.family import Family
from jaxtrain.hf.fields import WITHOUT_EFFECT, Fields, HfError
from jaxtrain.hf.layer_types import models_of_layers
from jaxtrain.hf.quantization import read_quantization

# Settings of the model that do not change what it computes: they are free in an import, and an
# export leaves them out.
FREE = frozenset(
    "attention_backward attention_kernel balance_loss balance_rate capacity_factor "
    "dropout_attention dropout_embedding dropout_residual expert_room init_std loss_chunk "
    "mtp_weight mup_base_head_dim mup_base_width z_loss".split()
)


def family_of(values: Mapping[str, Any], place: str) -> Family:
    """The family of a config.json. Raises HfError for one that is not known, and for a model with
    another head than the next token's."""
    fields = Fields(values, place)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise fields.refuse("model_type", f"is not supported: only {', '.join(FAMILIES)} are")
    family = FAMILIES[kind]
    architectures = values.get("architectures")
    base = family.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
    if architectures not in (None, [], [family.architecture], [base]):
        raise fields.refuse("architectures", f"is not supported: only {family.architecture} is")
    return family


def read_model(values: Mapping[str, Any], place: str) -> tuple[Family, cfg.ModelConfig, list[str]]:
    """The family, the model and notes for people, of a config.json. Raises HfError, which names the
    field, for whatever the model cannot be."""
    family = family_of(values, place)
    fields = Fields(values, place, family.aliases)
    model = cfg.ModelConfig(**family.read(fields))
    if quantization := read_quantization(fields):
        fields.notes.append(
            f"quantization_config is left out: {quantization.words} are multiplied by their "
            "scales, and training goes on without quantization"
        )
    fields.finish(family.model_type, WITHOUT_EFFECT)
    tokens = {"data.sequence_length": model.max_positions} if model.max_positions else {}
    if violation := checks.model_violation(cfg.replace(cfg.Config(model=model), tokens)):
        name = violation.field.removeprefix("model.")
        field, older = family.source(name), "rope_scaling"
        if field == "rope_parameters" and fields.values.get(older):
            field = older
        rule = f"gives {violation.field}={getattr(model, name)}, which {violation.rule}"
        raise fields.refuse(
            field, rule, *map(family.source, re.findall(r"model\.(\w+)", violation.rule))
        )
    return family, model, fields.notes


def write_model(model: cfg.ResolvedModel, family: Family | None, length: int) -> dict[str, Any]:
    """The config.json of a model, whose longest sequence has `length` tokens.

    family: None: the first one that can hold the model

    Raises HfError, which names the settings, for a model that no family can hold: those in which it
    differs from the closest one's.
    """
    differences = {}
    refusal = None
    for candidate in [family] if family else FAMILIES.values():
        values = {
            "architectures": [candidate.architecture],
            "model_type": candidate.model_type,
        } | candidate.write(model, length)
        values = json.loads(json.dumps(values))
        try:
            _, again, _ = read_model(values, "config.json")
        except HfError as error:
            refusal = refusal or error
            continue
        settings = list(differing(again, model))
        if not settings:
            return values
        differences[candidate.model_type] = settings
    if not differences:
        assert refusal
        raise refusal
    closest = min(differences, key=lambda kind: len(differences[kind]))
    settings = [f"model.{name}={cfg.shown(getattr(model, name))}" for name in differences[closest]]
    have = "has" if len(settings) == 1 else "have"
    raise HfError(f"{', '.join(settings)} {have} no counterpart in a config.json of {closest}")


def differing(a: cfg.ModelConfig, b: cfg.ModelConfig) -> Iterator[str]:
    """The settings in which two models compute different functions, whatever their kinds of layers
    are called."""
    configs = [cfg.Config(model=model).fill() for model in (a, b)]
    unused_in_both = set.intersection(*map(unused.without_use, configs))
    models = [config.model for config in configs]
    pairs = list(zip(*map(models_of_layers, models)))
    for name in (field.name for field in dataclasses.fields(cfg.ModelConfig)):
        if name in FREE or name in ("pattern", "kinds") or f"model.{name}" in unused_in_both:
            continue
        compared = [models] if name in OF_MODEL else pairs
        if any(getattr(first, name) != getattr(second, name) for first, second in compared):
            yield name
