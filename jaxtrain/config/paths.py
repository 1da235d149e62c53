"""Settings by their paths, such as "mesh.stage": reading, replacing and converting values; a config
as JSON. No jax."""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import Any, cast, get_args

from jaxtrain.config.errors import TUPLE_MARKS, ConfigError, flag_text, nearly
from jaxtrain.config.groups.layer_kinds import pattern_of
from jaxtrain.config.groups.model_settings import ENTRIES, MOST_LAYERS
from jaxtrain.config.groups.setting import LARGEST_INT, as_entries, setting_of, with_values
from jaxtrain.config.states import Config

FORK = "fork"  # in a run's config.json: what it has inherited from another run, and no settings
EXPONENTS = {"k": "e3", "K": "e3", "M": "e6", "B": "e9", "T": "e12"}

# Settings whose items are NAME=VALUE. A flag may have one of them: --config.model.kinds.NAME=VALUE.
OF_ENTRIES = (
    *(f"model.{name}" for name in ENTRIES),
    *("data.sources", "data.validation", "train.phases"),
)


@functools.cache
def fields() -> Mapping[str, dataclasses.Field]:
    """Path → dataclass field of every setting, in order: "model.layers" first.

    >>> from jaxtrain import fields
    >>> fields()["train.steps"].default, fields()["train.steps"].metadata["setting"].doc
    (100, 'optimizer steps')
    """
    groups = ((g.name, cast(Any, g.type)) for g in dataclasses.fields(Config))
    return types.MappingProxyType(
        {
            f"{name}.{field.name}": field
            for name, group in groups
            for field in dataclasses.fields(group)
        }
    )


def get(config: Config, path: str) -> Any:
    """The value of a setting by its path.

    >>> from jaxtrain import Config, MeshConfig
    >>> get(Config(mesh=MeshConfig(stage=4)), "mesh.stage")
    4
    """
    group, name = path.split(".")
    return getattr(getattr(config, group), name)


def replace(config: Config, changes: dict[str, Any]) -> Config:
    """A plain config with the settings at some paths changed; values are not checked. Raises
    KeyError for an unknown path.

    >>> from jaxtrain import load_recipe, replace
    >>> config = replace(load_recipe("tiny"), {"train.steps": 300, "mesh.stage": 4})
    >>> config.train.steps, config.mesh.stage, config.model.layers
    (300, 4, 8)
    """
    groups: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        if path not in fields():
            raise KeyError(path)
        group, name = path.split(".")
        groups.setdefault(group, {})[name] = as_entries(value) if path in OF_ENTRIES else value
    config = config.as_read()
    return with_values(
        config,
        **{
            group: with_values(getattr(config, group), **values) for group, values in groups.items()
        },
    )


def entry_of(path: str) -> tuple[str, str] | None:
    """The setting and the name of an item of OF_ENTRIES; None for any other path.

    >>> entry_of("model.kinds.window.rotary_base")
    ('model.kinds', 'window.rotary_base')
    """
    group, _, name = path.partition(".")
    setting, _, entry = name.partition(".")
    setting = f"{group}.{setting}"
    return (setting, entry) if entry and setting in OF_ENTRIES else None


def flags_of(config: Config, recipe: Config) -> str:
    """The flags of `train` that make this config from its recipe.

    >>> from jaxtrain import load_recipe, replace
    >>> tiny = load_recipe("tiny")
    >>> flags_of(replace(tiny, {"mesh.stage": 4, "train.steps": 300}), tiny)
    '--config.mesh.stage=4 --config.train.steps=300'
    """
    return " ".join(
        flag_text(f"config.{path}", get(config, path))
        for path in fields()
        if get(config, path) != get(recipe, path)
    )


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Group → field → value; JSON turns tuples into arrays."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """The config of `to_dict`'s result, also after JSON. A missing setting has its default.

    Raises ConfigError for an unknown group or field and for a value of a wrong type (an integer
    passes for a float).
    """
    groups = {group.name: cast(Any, group.type) for group in dataclasses.fields(Config)}
    given = {}
    for group, settings in _migrated(values).items():
        if group == FORK:
            continue
        if group not in groups:
            near = nearly(str(group), groups, 0.7)
            raise ConfigError(str(group), settings, "is an unknown group of settings", near)
        if not isinstance(settings, dict):
            raise ConfigError(group, settings, "is a group of settings, not a value")
        for name, value in settings.items():
            if f"{group}.{name}" not in fields():
                raise unknown_field(f"{group}.{name}", value)
        given[group] = groups[group](
            **{name: convert(f"{group}.{name}", value) for name, value in settings.items()}
        )
    return Config(**given)


def _migrated(values: dict[str, Any]) -> dict[str, Any]:
    """The settings, in today's form, of a config that an older version may have stored: kinds of
    layers in the place of `model.nope_layers`, the numbers of those without rotary positions."""
    model = values.get("model")
    if not isinstance(model, dict) or not isinstance(without := model.get("nope_layers"), list):
        return values
    others = {name: value for name, value in model.items() if name != "nope_layers"}
    numbers = [
        model.get(name, fields()[f"model.{name}"].default) for name in ("layers", "dense_layers")
    ]
    # Other numbers are refused later, by their types and bounds.
    are_numbers = all(type(number) is int and number <= MOST_LAYERS for number in numbers)
    if not without or not are_numbers:
        return values | {"model": others}
    kinds = tuple("nope" if layer in without else "full" for layer in range(sum(numbers)))
    return values | {"model": others | {"pattern": pattern_of(kinds)}}


def convert(path: str, value: Any) -> Any:
    """A value as its setting's type: int → float and list → tuple, nothing else. Raises ConfigError
    for any other type."""
    field = fields()[path]
    kind, value = field.type, as_entries(value) if path in OF_ENTRIES else value
    if kind is float and type(value) is int:
        return float(value)
    if (item := item_type(kind)) and isinstance(value, list | tuple):
        values = tuple(float(v) if item is float and type(v) is int else v for v in value)
        if all(type(v) is item for v in values):
            return values
    if type(value) is kind:
        return value
    nearest = retyped(path, value)
    fixes = [] if nearest is None else [{path: nearest}]
    raise ConfigError(path, value, f"is not {kind_name(kind)}", fixes=fixes)


def is_choice(path: str, value: Any) -> bool:
    """True if a setting with choices may have this value, of its type."""
    choices = setting_of(fields()[path]).choices
    if not isinstance(value, str) or value in choices.names:
        return value in choices.names
    if (choices.own_code and ":" in value) or (choices.prefix and value.startswith(choices.prefix)):
        return True
    name, _, count = value.partition(":")
    is_number = count.isascii() and count.isdecimal() and len(count) <= len(str(LARGEST_INT))
    return name in choices.counted and is_number and int(count) <= LARGEST_INT


def retyped(path: str, value: Any) -> Any:
    """The value of the setting's type that is closest to a value of another type; None where there
    is none."""
    field = fields()[path]
    item = item_type(field.type)
    if item is str and isinstance(value, str):
        names = tuple(filter(None, (part.strip(TUPLE_MARKS + " ") for part in value.split(","))))
        return names or None
    if item and isinstance(value, str):
        numbers = [number(part) for part in value.strip("()[] ,").split(",")]
        return tuple(item(n) for n in numbers if n is not None) if None not in numbers else None
    if isinstance(value, str) and field.type in (int, float):
        value = number(value)
    if field.type is int and isinstance(value, float) and abs(value) <= LARGEST_INT:
        return round(value)
    if field.type is float and isinstance(value, float):
        return value
    if field.type is bool and type(value) is int:
        return value != 0
    return (value,) if item and type(value) is item else None


def number(text: str) -> float | None:
    """The finite number of a text, such as "0.5", "300k", "1.5B" or "$2"; None for any other
    text."""
    text = text.strip().removeprefix("$")
    exponent = EXPONENTS.get(text[-1:], "")
    try:
        number = float(text[:-1] + exponent if exponent else text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def item_type(kind: Any) -> Any:
    """The type of a tuple's items; None if the type is no tuple."""
    return get_args(kind)[0] if isinstance(kind, types.GenericAlias) else None


def kind_name(kind: Any) -> str:
    """A setting's type in words, with its article."""
    names = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "a boolean (true or false)",
    }
    return names.get(kind) or f"a tuple of {names[item_type(kind)].split(' ')[1]}s"


def meant(path: str) -> str:
    """The setting that an unknown path is meant for: the only one of that name if no other group is
    named, or the name says enough (batch_size, not steps); else one of nearly that path. "" if
    there is none."""
    _, dot, name = path.rpartition(".")
    tells = "_" in name or not dot
    elsewhere = [known for known in fields() if tells and known.endswith(f".{name}")]
    return elsewhere[0] if len(elsewhere) == 1 else nearly(path, fields(), 0.85)


def unknown_field(path: str, value: Any) -> ConfigError:
    """The error for a setting that does not exist, with the closest one that does."""
    near, fixes = meant(path), []
    if near:
        try:
            fixes = [{near: convert(near, value)}]
        except ConfigError as error:
            fixes = list(error.fixes)
    return ConfigError(path, value, "is an unknown setting", fixes=fixes)


def plain_type(kind: Any) -> str:
    """A setting's type as help prints it: int, float, str, bool, tuple."""
    return "tuple" if isinstance(kind, types.GenericAlias) else kind.__name__
