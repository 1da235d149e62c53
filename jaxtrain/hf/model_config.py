"""A config.json as the settings of a model, and a model's settings as a config.json."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.config import Config, ModelConfig
from jaxtrain.config.errors import shown
from jaxtrain.hf.block_scales import read_block
from jaxtrain.hf.families import FAMILIES
from jaxtrain.hf.families.family import Family
from jaxtrain.hf.fields import Fields, HfError

# Settings of the model that do not change what it computes: they are free in an import, and an
# export leaves them out.
FREE = frozenset(
    "attention_kernel balance_loss balance_rate capacity_factor expert_room init_std loss_chunk "
    "mtp_weight z_loss".split()
)


def family_of(values: Mapping[str, Any], place: str) -> Family:
    """The family of a config.json. Raises HfError for one that is not known, and for a model with
    another head than the next token's."""
    fields = Fields(values, place)
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise fields.refuse("model_type", f"is not supported: only {', '.join(FAMILIES)} are")
    family = FAMILIES[kind]
    architectures = values.get("architectures")
    base = family.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
    if architectures not in (None, [], [family.architecture], [base]):
        raise fields.refuse("architectures", f"is not supported: only {family.architecture} is")
    return family


def read_model(values: Mapping[str, Any], place: str) -> tuple[Family, ModelConfig, list[str]]:
    """The family, the model and notes for people, of a config.json. Raises HfError, which names the
    field, for whatever the model cannot be."""
    family = family_of(values, place)
    fields = Fields(values, place)
    model = ModelConfig(**family.read(fields))
    read_block(fields)
    fields.finish()
    return family, model, fields.notes


def write_model(model: ModelConfig, family: Family | None, length: int) -> dict[str, Any]:
    """The config.json of a resolved model, whose longest sequence has `length` tokens.

    family: None: the first one that can hold the model

    Raises HfError, which names the setting, for a model that the family cannot hold.
    """
    errors = []
    for candidate in [family] if family else FAMILIES.values():
        values = {
            "architectures": [candidate.architecture],
            "model_type": candidate.model_type,
        } | candidate.write(model, length)
        values = json.loads(json.dumps(values))
        try:
            _, again, _ = read_model(values, "config.json")
        except HfError as error:
            errors.append(str(error))
            continue
        setting = next(differing(again, model), "")
        if not setting:
            return values
        errors.append(
            f"model.{setting}={shown(getattr(model, setting))} has no counterpart in a config.json "
            f"of {candidate.model_type}"
        )
    # The family in whose terms the model was closest is not known: the first error of each.
    raise HfError("; ".join(dict.fromkeys(errors)))


def differing(a: ModelConfig, b: ModelConfig) -> Iterator[str]:
    """The settings in which two models compute different functions."""
    first, second = (Config(model=model).resolve().model for model in (a, b))
    names, free = [field.name for field in dataclasses.fields(ModelConfig)], set(FREE)
    if first.positions == second.positions == "rotary":
        free.add("max_positions")
    if first.experts and second.experts and not (first.dense_layers or second.dense_layers):
        free.add("mlp_width")
    if not (first.experts or second.experts):
        free |= {
            name for name in names if name.startswith(("router", "expert_", "experts_", "shared_"))
        }
    if first.attention == second.attention == "mla":
        free.add("kv_heads")
    elif first.attention == second.attention:
        free |= {"value_head_dim", "latent_norm_epsilon"}
    if first.positions == second.positions == "learned":
        free.add("rotary_base")
    if max(first.router_groups, second.router_groups) == 1:
        free |= {"router_group_limit", "router_group_best"}
    for name in names:
        if name not in free and getattr(first, name) != getattr(second, name):
            yield name
