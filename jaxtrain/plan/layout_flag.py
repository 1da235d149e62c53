"""`--layout=data=8,stage=16,…`: how a step is laid over devices, in one flag, in the place of what a recipe says of it. No jax.

Axes that it does not name are 1. What else it does not name is the recipe's. `microbatch` is sequences of a microbatch on a data shard, so
that the number of microbatches follows from the batch.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, checks
from jaxtrain.config.mesh_rules import AXES, filled
from jaxtrain.config.rules import divisors, near
from jaxtrain.config.surroundings import Surroundings
from jaxtrain.schedule.orders import default_repeats, fits_repeats

MICROBATCH = "microbatch"
SETTINGS = {
    "data": "mesh.data",
    "stage": "mesh.stage",
    "model": "mesh.model",
    "context": "mesh.context",
    "expert": "mesh.expert",
    "replica": "mesh.replica",
    "microbatches": "pipeline.microbatches",
    "repeats": "pipeline.repeats",
    "remat": "pipeline.remat",
    "zero": "parallel.zero",
    "schedule": "pipeline.schedule",
    "offload": "parallel.offload",
    "vocabulary": "pipeline.vocabulary",
}
KEYS = tuple(MICROBATCH if key == "microbatches" else key for key in SETTINGS)
BATCH_AXES = ("replica", "data", "expert")
OTHER_NAMES = {"dp": "data", "fsdp": "data", "pp": "stage", "pipeline": "stage", "tp": "model", "tensor": "model", "ep": "expert"}
Values = dict[str, Any]  # by key


class LayoutError(ValueError):
    """A layout that cannot be; the text is one line and ends with one that can."""


def read(text: str) -> Values:
    """What `--layout` names. Raises LayoutError for what is no such text."""
    values: Values = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in KEYS:
            meant = OTHER_NAMES.get(key) or difflib.get_close_matches(key, KEYS, 1, 0.0)[0]
            raise LayoutError(f"--layout names {key!r}, and its keys are {', '.join(KEYS)}: use {meant}={_example(meant)}")
        if not equals or not value:
            raise LayoutError(f"--layout has no value for {key}: use {key}={_example(key)}")
        if key in values:
            raise LayoutError(f"--layout names {key} twice: use {key}={value} once")
        values[key] = _converted(key, value)
    return values


def _example(key: str) -> Any:
    return 1 if key == MICROBATCH or key in AXES else cfg.fields()[SETTINGS[key]].default


def _converted(key: str, text: str) -> Any:
    """A value as its setting's type, within the setting's own bounds and choices."""
    if key not in AXES and key != MICROBATCH:
        field = cfg.fields()[SETTINGS[key]]
        choices = field.metadata["choices"]
        if choices:
            value: Any = int(text) if isinstance(choices[0], int) and text.isdigit() else text
            prefix = field.metadata["prefix"]
            if value in choices or (prefix and text.startswith(prefix)):
                return value
            close = difflib.get_close_matches(text, [str(choice) for choice in choices], 1, 0.0)
            raise LayoutError(f"--layout has {key}={text}, and the choices are {', '.join(map(str, choices))}: use {key}={close[0]}")
    if text.isdigit() and 0 < int(text) <= cfg.LARGEST_INT:
        return int(text)
    raise LayoutError(f"--layout has {key}={text}, which must be a whole number from 1 on: use {key}={max(1, _example(key))}")


def of(config: Config) -> Values:
    """The layout of a resolved config whose mesh is known and whose batch divides: every key."""
    values = {key: cfg.get(config, path) for key, path in SETTINGS.items()}
    values[MICROBATCH] = config.data.batch_size // (shards(values) * values.pop("microbatches"))
    return {key: values[key] for key in KEYS}


def text_of(values: Mapping[str, Any]) -> str:
    """As the flag's value."""
    return ",".join(f"{key}={value}" for key, value in values.items())


def shards(values: Mapping[str, Any]) -> int:
    """Into how many parts a layout cuts the batch."""
    return math.prod(values.get(axis, 1) for axis in BATCH_AXES)


def devices(values: Mapping[str, Any]) -> int:
    """How many devices a layout takes."""
    return math.prod(values.get(axis, 1) for axis in AXES)


def apply(config: Config, values: Values) -> Config:
    """The config with the layout in the place of its own. Raises LayoutError where the batch does not divide."""
    changes: Values = {SETTINGS[axis]: values.get(axis, 1) for axis in AXES} | {"mesh.elastic": False}
    changes |= {SETTINGS[key]: value for key, value in values.items() if key not in AXES and key != MICROBATCH}
    schedule = changes.get("pipeline.schedule", config.pipeline.schedule)
    if "repeats" not in values and not fits_repeats(schedule, config.pipeline.repeats):
        changes["pipeline.repeats"] = default_repeats(schedule)
    batch, parts = config.data.batch_size, shards(values)
    if isinstance(batch, int) and batch > 0:
        changes["pipeline.microbatches"] = _microbatches(config, values, batch, parts)
    return cfg.replace(config, changes)


def _microbatches(config: Config, values: Values, batch: int, parts: int) -> int:
    """How many microbatches the batch makes."""
    over = " · ".join(f"{axis}={values[axis]}" for axis in BATCH_AXES if values.get(axis, 1) > 1) or "data=1"
    if batch % parts:
        data = values.get("data", 1)
        rest = parts // data
        sizes = [n for n in divisors(batch) if batch % (n * rest) == 0]
        use = f"data={near(data, sizes)[0]}" if sizes else f"--config.data.batch_size={-(-batch // parts) * parts}"
        raise LayoutError(f"--layout cuts data.batch_size={batch} by {over}, that is {parts}, which does not divide it: use {use}")
    each = batch // parts
    if MICROBATCH in values:
        size = values[MICROBATCH]
        if each % size:
            nearest = near(size, divisors(each))[0]
            rule = f"microbatch={size} does not divide the {each} sequences of a shard, data.batch_size={batch} over {over}"
            raise LayoutError(f"--layout: {rule}: use microbatch={nearest}")
        return each // size
    asked = config.pipeline.microbatches
    if asked < 1 or each % asked:
        rule = f"the recipe's pipeline.microbatches={asked} do not divide the {each} sequences of a shard"
        raise LayoutError(f"--layout: {rule}: use microbatch={each // near(asked, divisors(each))[0]}")
    return asked


def check(config: Config, values: Values, platform: str, recipe: Config) -> None:
    """Raises LayoutError for the first rule of training that a config with this layout breaks, with what keeps all of them."""
    if error := checks.refusal(config, Surroundings(None, platform, recipe)):
        raise LayoutError(_in_layout(error, config, values))


def _in_layout(error: ConfigError, config: Config, values: Values) -> str:
    """An error's line, in which settings that --layout has are in --layout."""
    changes = error.fixes[0] if error.fixes else {}
    others = {path: value for path, value in changes.items() if path not in SETTINGS.values()}
    if len(others) == len(changes):
        return str(error)
    fixed = of(filled(cfg.replace(config, changes), devices(values)).resolve())
    changed = {key for key, path in SETTINGS.items() if path in changes} | set(values)
    named = {key: value for key, value in fixed.items() if key in changed or (key == MICROBATCH and "microbatches" in changed)}
    flags = [f"--layout={text_of(named)}", *(cfg.flag_text(f"config.{path}", value) for path, value in others.items())]
    return f"{str(error).partition(': use ')[0]}: use {' '.join(flags)}"
