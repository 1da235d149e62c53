"""The config of a run that starts from a published model. No jax.

    a setting of the model      config.json's; where flags or the recipe say something else, it is
                                refused by name
    data.tokenizer              the folder's tokenizer.json, or none for a vocabulary without one
                                that has no room for bytes, unless flags or the recipe name one
    data.sequence_length        at most what a learned position table has, unless they name one
    all others                  those of flags and recipe

A recipe says what differs from the defaults of config/settings.py; a default is nobody's choice.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, ModelConfig
from jaxtrain.config.checks import field_violation
from jaxtrain.config.flags import apply
from jaxtrain.config.rules import BYTE_VOCABULARY
from jaxtrain.hf.block_scales import Block, read_block
from jaxtrain.hf.families.family import Family
from jaxtrain.hf.fields import Fields, read_json
from jaxtrain.hf.files import CONFIG, TOKENIZER
from jaxtrain.hf.model_config import FREE, differing, read_model


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
    """A published model by its config.json.

    values: of config.json; model: not resolved; notes: lines for people
    block: the rows and columns of a block of quantised weights; None if there are none
    """

    folder: pathlib.Path
    values: dict[str, Any]
    family: Family
    model: ModelConfig
    notes: tuple[str, ...]
    block: Block | None


def read_published(folder: pathlib.Path) -> Published:
    """The published model of a folder. Raises HfError for what cannot be honoured."""
    values, place = read_json(folder / CONFIG), str(folder / CONFIG)
    family, model, notes = read_model(values, place)
    return Published(folder, values, family, model, tuple(notes), read_block(Fields(values, place)))


def started_from(
    published: Published, recipe: Config, overrides: Sequence[tuple[str, str]]
) -> tuple[Config, Config]:
    """(the config of a run that starts from a published model, the same before its flags).

    overrides: (setting, text) of flags

    Raises ConfigError, which names the setting, if recipe or flags contradict config.json.
    """
    model, folder = published.model, published.folder
    unsaid = {path for path in cfg.fields() if cfg.get(recipe, path) == cfg.get(Config(), path)}
    changes = {
        f"model.{name}": value for name, value in vars(model).items() if f"model.{name}" in unsaid
    }
    if "data.tokenizer" in unsaid and (folder / TOKENIZER).is_file():
        changes["data.tokenizer"] = str((folder / TOKENIZER).resolve())
    elif "data.tokenizer" in unsaid and model.vocab_size < BYTE_VOCABULARY:
        changes["data.tokenizer"] = "none"
    longest = model.max_positions if model.positions == "learned" else 0
    if "data.sequence_length" in unsaid and 0 < longest < recipe.data.sequence_length:
        changes["data.sequence_length"] = longest
    before = cfg.replace(recipe, changes)
    config = apply(before, overrides)
    if setting := _contradiction(config.model, model):
        name, value = f"model.{setting}", getattr(Config(model=model).resolve().model, setting)
        rule = f"contradicts {folder / CONFIG}, which says {value}"
        raise ConfigError(name, getattr(config.model, setting), rule, fixes=[{name: value}])
    return config, before


def _contradiction(model: ModelConfig, published: ModelConfig) -> str:
    """The first setting in which a model is another one than the published one; "" if none is. A
    value that no model can have is another one."""
    for name, value in vars(published).items():
        path, other = f"model.{name}", getattr(model, name)
        if name not in FREE and other != value and field_violation(path, other, value):
            return name
    return next(differing(model, published), "")
