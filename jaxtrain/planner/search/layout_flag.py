"""`--layout=data=8,stage=16,…`: a layout in one flag, which replaces the recipe's. No jax.

Axes that the flag does not name are 1; all other settings that it does not name are the recipe's.
`pipeline.save` keeps what goes with the layout's remat, and `pipeline.overlap` is false with a
schedule that has no overlapped cells.
`microbatch` is the number of sequences of a microbatch on a data shard; the number of microbatches
follows from it and the batch.
"""

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, MeshedConfig, UsageError
from jaxtrain.config.flags import setting_value
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.mesh_rules import AXES, on_mesh
from jaxtrain.config.rules.rules import divisors, near
from jaxtrain.config.saved_values import saved_with
from jaxtrain.schedule.orders import default_repeats, fits_repeats, may_overlap

MICROBATCH = "microbatch"
SETTINGS = {
    "data": "mesh.data",
    "stage": "mesh.stage",
    "model": "mesh.model",
    "context": "mesh.context",
    "expert": "mesh.expert",
    "replica": "mesh.replica",
    MICROBATCH: "pipeline.microbatches",  # their number, where the flag has their size
    "repeats": "pipeline.repeats",
    "remat": "pipeline.remat",
    "zero": "parallel.zero",
    "schedule": "pipeline.schedule",
    "offload": "parallel.offload",
    "vocabulary": "pipeline.vocabulary",
    "overlap": "pipeline.overlap",
}
KEYS = tuple(SETTINGS)
# Key of a layout → the value that is not worth a column
USUAL = {
    **dict.fromkeys(("context", "expert", "replica"), 1),
    "offload": "none",
    "vocabulary": "auto",
    "overlap": False,
}
BATCH_AXES = ("replica", "data", "expert")
OTHER_NAMES = {
    "dp": "data",
    "fsdp": "data",
    "pp": "stage",
    "pipeline": "stage",
    "tp": "model",
    "tensor": "model",
    "ep": "expert",
}
MOST_TRIED = 16  # layouts near one whose batch does not divide
Values = dict[str, Any]  # by key


def read(text: str) -> Values:
    """The values that `--layout` names, by key. Raises UsageError for any other text."""
    values: Values = {}
    words = list(filter(None, (word.strip() for word in text.split(","))))
    for at, word in enumerate(words):
        key, equals, value = (part.strip() for part in word.partition("="))
        if key in KEYS and key not in values and equals and value:
            values[key], rule = _converted(key, value)
            if not rule:
                continue
            rule, instead = f"has {key}={cfg.shown(value)}, {rule}", [text_of({key: values[key]})]
        elif key not in KEYS:
            meant = OTHER_NAMES.get(key) or difflib.get_close_matches(key, KEYS, 1, 0.0)[0]
            taken, wrong = _converted(meant, value)
            rule = f"names {cfg.shown(key)}, and its keys are {', '.join(KEYS)}"
            instead = [text_of({meant: _example(meant) if wrong else taken})]
        elif key in values:
            rule, instead = f"names {key} twice", []
        else:
            rule, instead = f"has no value for {key}", [text_of({key: _example(key)})]
        raise UsageError(
            f"--layout {rule}", {"layout": ",".join([*words[:at], *instead, *words[at + 1 :]])}
        )
    return values


def choices(key: str) -> tuple[Any, ...]:
    """The values that the key's setting can have; () where it has bounds instead."""
    return tuple(cfg.setting_of(cfg.fields()[SETTINGS[key]]).choices.names)


def _example(key: str) -> Any:
    return 1 if key == MICROBATCH or key in AXES else cfg.fields()[SETTINGS[key]].default


def _converted(key: str, text: str) -> tuple[Any, str]:
    """Returns (the value as its setting's type, ""), or, outside of the setting's bounds and
    choices, (one to use, the rule that is broken)."""
    path, value = SETTINGS[key], setting_value(SETTINGS[key], text)
    if names := [str(choice) for choice in choices(key)]:
        if cfg.is_choice(path, value):
            return value, ""
        nearest = difflib.get_close_matches(text, names, 1, 0.0)[0]
        return nearest, f"and the choices are {', '.join(names)}"
    if isinstance(default := cfg.fields()[path].default, bool):
        is_bool = isinstance(value, bool)
        return (value, "") if is_bool else (default, "and the choices are true, false")
    least = int(key != "repeats")  # repeats=0: as many as the schedule chooses
    if type(value) is int and least <= value <= cfg.LARGEST_INT:
        return value, ""
    return max(1, _example(key)), f"which must be a whole number from {least} on"


def of(config: MeshedConfig) -> Values:
    """The layout of a config whose batch divides: every key."""
    values = {key: cfg.get(config, path) for key, path in SETTINGS.items()}
    return values | {
        MICROBATCH: config.data.batch_size // (shards(values) * config.pipeline.microbatches)
    }


def text_of(values: Mapping[str, Any]) -> str:
    """The layout as the flag's value."""
    return ",".join(f"{key}={cfg.value_text(value)}" for key, value in values.items())


def shards(values: Mapping[str, Any]) -> int:
    """The number of shards into which a layout cuts the batch."""
    return math.prod(values.get(axis, 1) for axis in BATCH_AXES)


def devices(values: Mapping[str, Any]) -> int:
    """The number of devices of a layout."""
    return math.prod(values.get(axis, 1) for axis in AXES)


def apply(config: Config, values: Values) -> Config:
    """The config with this layout. Raises UsageError if the batch does not divide."""
    batch, microbatches = config.data.batch_size, config.pipeline.microbatches
    if isinstance(batch, int) and batch > 0:  # otherwise `check` refuses the config's batch
        microbatches = _microbatches(batch, microbatches, values)
        if not microbatches:
            raise _undivided(config, values)
    settings = {
        **{SETTINGS[axis]: 1 for axis in AXES},
        **{SETTINGS[key]: value for key, value in values.items()},
        "mesh.elastic": False,
        SETTINGS[MICROBATCH]: microbatches,
    }
    schedule = str(settings.get("pipeline.schedule", config.pipeline.schedule))
    if "remat" in values:
        settings["pipeline.save"] = saved_with(config.pipeline, values["remat"])
    if "overlap" not in values and not may_overlap(schedule):
        settings["pipeline.overlap"] = False
    if "repeats" not in values and not fits_repeats(schedule, config.pipeline.repeats):
        settings["pipeline.repeats"] = default_repeats(schedule)
    if settings.get("pipeline.repeats") == values.get("stage", 1) == 1:
        settings["pipeline.repeats"] = 0  # the default, which is one chunk
    return cfg.replace(config, settings)


def _microbatches(batch: int, count: int, values: Values) -> int:
    """The number of microbatches that the batch makes; 0 where it does not divide. count: the
    recipe's."""
    each, rest = divmod(batch, shards(values))
    if MICROBATCH in values:
        count = each // values[MICROBATCH]
    return count if count > 0 and not rest and each % values.get(MICROBATCH, count) == 0 else 0


def _undivided(config: Config, values: Values) -> UsageError:
    """The error for a batch that does not divide, with the nearest layout with which it does."""
    batch, parts, count = config.data.batch_size, shards(values), config.pipeline.microbatches
    split = [f"{axis}={values[axis]}" for axis in BATCH_AXES if values.get(axis, 1) > 1]
    over = " · ".join(split) or "data=1"
    if batch % parts:
        rule = f" cuts data.batch_size={batch} by {over}, that is {parts}, which does not divide it"
    elif MICROBATCH in values:
        rule = (
            f": microbatch={values[MICROBATCH]} does not divide the {batch // parts} sequences "
            f"of a shard, data.batch_size={batch} over {over}"
        )
    else:
        rule = (
            f": the recipe's pipeline.microbatches={count} do not divide the {batch // parts} "
            "sequences of a shard"
        )
    tried = list(itertools.islice(_dividing(batch, count, values), MOST_TRIED))
    working = [layout for layout in tried if _keeps_rules(config, layout)] or tried
    if working:
        return UsageError(f"--layout{rule}", {"layout": text_of(working[0])})
    multiple = parts * values.get(MICROBATCH, max(1, count))
    return UsageError(
        f"--layout{rule}", {"config.data.batch_size": -(-batch // multiple) * multiple}
    )


def _dividing(batch: int, count: int, values: Values) -> Iterator[Values]:
    """Layouts with other data shards, the nearest first, each with the nearest microbatch. count:
    the recipe's microbatches."""
    data = values.get("data", 1)
    rest = shards(values) // data
    for size in near(data, [size for size in divisors(batch) if batch % (size * rest) == 0]):
        each = batch // (size * rest)
        layout = values | ({"data": size} if size > 1 or "data" in values else {})
        if MICROBATCH in values:
            layout |= {MICROBATCH: near(values[MICROBATCH], divisors(each))[0]}
        elif count < 1 or each % count:
            layout |= {MICROBATCH: each // near(count, divisors(each))[0]}
        yield layout


def _keeps_rules(
    config: Config, values: Values, environment: checks.Environment = checks.UNKNOWN
) -> bool:
    """True if the batch divides, and no rule of training is broken."""
    if not _microbatches(config.data.batch_size, config.pipeline.microbatches, values):
        return False
    return checks.first_violation(apply(config, values), environment) is None


def laid_out(config: Config, values: Values, environment: checks.Environment) -> MeshedConfig:
    """The config with this layout. Raises UsageError or ConfigError for the first rule of training
    that it breaks, with the nearest settings that keep all rules: in --layout where it has them,
    with its microbatch if that works."""
    config = apply(config, values)
    if not (error := checks.error_of(config, environment)):
        return config.on_own_mesh()
    changes = error.fixes[0] if error.fixes else {}
    others = {path: value for path, value in changes.items() if path not in SETTINGS.values()}
    if len(others) == len(changes):
        raise error
    fixed = of(on_mesh(cfg.replace(config, changes), devices(values)).resolve())
    named = {
        key: fixed[key]
        for key in KEYS
        if (SETTINGS[key] in changes or key in values) and key != MICROBATCH
    }
    use = named | {key: value for key, value in values.items() if key == MICROBATCH}
    if not _keeps_rules(cfg.replace(config, others), use, environment):
        use = named | {MICROBATCH: fixed[MICROBATCH]}
    flags = {"layout": text_of(use)} | {f"config.{path}": value for path, value in others.items()}
    raise UsageError(str(error).rpartition(": use ")[0], flags)
