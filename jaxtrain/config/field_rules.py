"""A setting on its own: its type, choices and bounds, which stand at its field in settings.py. No
jax."""

import dataclasses
import difflib
import math
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError
from jaxtrain.config.rules import Broken, near, values_for


def _listed(values: list) -> str:
    """[1, 2, 4] → "1, 2 or 4"."""
    words = [repr(v) for v in values]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def broken_field(path: str, field: dataclasses.Field, value: Any, recipe: Config) -> Broken | None:
    """What is wrong with a value of a setting, whatever the others are; None if nothing is. recipe:
    whose value is worth a try."""
    try:
        cfg.convert(path, value)
    except ConfigError as error:
        nearest = cfg.retyped(path, value, cfg.get(recipe, path))
        return Broken(
            path, error.rule, values_for(path, [nearest, cfg.get(recipe, path), field.default])
        )
    choices, prefix = field.metadata["choices"], field.metadata["prefix"]
    if choices:
        return (
            None
            if value in choices or (prefix and value.startswith(prefix))
            else _bad_choice(path, value, choices)
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _out_of_bounds(path, field, value, recipe)
    if cfg.item_type(field.type) in (int, float):
        if all(math.isfinite(v) and v >= 0 and (v or path == "pipeline.times") for v in value):
            return None
        return Broken(path, "has a number that is not above 0", values_for(path, [field.default]))
    if isinstance(value, tuple) and (len(set(value)) < len(value) or "" in value):
        names = tuple(dict.fromkeys(v for v in value if v))
        return Broken(
            path, "has an empty or repeated name", values_for(path, [names, field.default])
        )
    return None


def _bad_choice(path: str, value: Any, choices: tuple) -> Broken:
    if not isinstance(value, str):
        return Broken(
            path,
            f"is not built: the choices are {_listed(list(choices))}",
            values_for(path, near(value, choices)),
        )
    close = difflib.get_close_matches(value, choices, n=len(choices), cutoff=0.5)
    return Broken(
        path, "is unknown", values_for(path, close or choices), show=1 if close else len(choices)
    )


def _out_of_bounds(
    path: str, field: dataclasses.Field, value: float, recipe: Config
) -> Broken | None:
    whole, bounds = field.type is int, field.metadata["bounds"]
    if whole and abs(value) > cfg.LARGEST_INT:
        # nobody wants the largest size, but perhaps as many steps
        values = [cfg.get(recipe, path), field.default, cfg.LARGEST_INT]
        order = (
            values if path.startswith(("model.", "data.", "mesh.", "pipeline.")) else values[::-1]
        )
        return Broken(path, f"is larger than {cfg.LARGEST_INT}", values_for(path, order))
    if not math.isfinite(value):
        return Broken(path, "is not a finite number", values_for(path, [field.default]))
    low, above, high, below = (bounds[name] for name in ("at_least", "above", "at_most", "below"))
    words = {"at least": low, "above": above, "at most": high, "below": below}
    fits = (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
    )
    if fits:
        return None
    rule = "must be " + " and ".join(
        f"{word} {limit}" for word, limit in words.items() if limit is not None
    )
    limits: list[Any] = [
        limit
        for limit in (low, high, cfg.get(recipe, path), field.default)
        if isinstance(limit, int | float)
    ]
    ends = sorted(
        (int(limit) if whole else float(limit) for limit in limits),
        key=lambda limit: abs(limit - value),
    )
    return Broken(path, rule, values_for(path, ends))
