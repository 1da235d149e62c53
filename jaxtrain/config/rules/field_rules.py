"""The rule of a setting on its own, whatever the others are: its type, choices and bounds, which
stand at its field (groups/). No jax."""

import difflib
import math
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config.groups.setting import Choices, entry_text
from jaxtrain.config.rules.rules import Violation, near, values_for

# Settings that decide what is trained.
TRAINED = ("model.", "data.", "optimizer.", "precision.", "train.steps", "train.diloco_inner_steps")


def field_violation(path: str, value: Any, of_recipe: Any) -> Violation | None:
    """The first fault of a value whatever the other settings are: its type, choices and bounds,
    which stand at its field. of_recipe: the recipe's value, tried as a fix."""
    field = cfg.fields()[path]
    usual = [of_recipe, field.default]
    try:
        cfg.convert(path, value)
    except cfg.ConfigError as error:
        others = [] if path.startswith(TRAINED) else values_for(path, usual)
        return Violation(path, error.rule, [*error.fixes, *others])
    if isinstance(value, str) and "\0" in value:  # recipes may have one, and no path can
        return Violation(path, "holds a NUL character", values_for(path, usual))
    setting = cfg.setting_of(field)
    names = setting.choices.names
    if names and isinstance(value, tuple):
        for name in value:
            if name not in names and not (setting.choices.own_code and ":" in name):
                return _unknown_name(path, value, name, names)
    elif names:
        return None if cfg.is_choice(path, value) else _wrong_choice(path, value, setting.choices)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _out_of_bounds(path, value, usual)
    if cfg.item_type(field.type) in (int, float):
        if all(v <= cfg.LARGEST_INT and setting.bounds.admit(v) for v in value):
            return None
        least = "that is not above 0" if setting.bounds.above == 0 else "below 0"
        rule = f"has a number {least} or above {cfg.LARGEST_INT}"
        return Violation(path, rule, [{path: field.default}])
    if isinstance(value, tuple):
        # layers of a pattern may be of one kind
        distinct = tuple(filter(None, value if path == "model.pattern" else dict.fromkeys(value)))
        if len(distinct) < len(value):
            rule = "has an empty or repeated name"
            return Violation(path, rule, values_for(path, [distinct, field.default]))
    return None


def value_fault(path: str, value: Any, name: str) -> tuple[str, str] | None:
    """What is wrong with the value of a setting in an item, whatever the others are, and the item
    that it may mean or ""; None for nothing. name: of the item"""
    wrong = field_violation(path, value, cfg.fields()[path].default)
    if not wrong:
        return None
    fix = next(iter(wrong.fixes), {})
    meant = f"{name}={entry_text(fix[path])}" if path in fix else ""
    return f"and {path}={cfg.shown(value)} {wrong.rule}", meant


def _wrong_choice(path: str, value: Any, choices: Choices) -> Violation:
    if not isinstance(value, str):
        words = [repr(choice) for choice in choices.names]
        rule = f"is not built: the choices are {', '.join(words[:-1])} or {words[-1]}"
        return Violation(path, rule, values_for(path, near(value, choices.names)))
    name, colon, _ = value.partition(":")
    if colon and name in choices.counted:
        rule = f"needs a whole number from 0 to {cfg.LARGEST_INT} behind its colon"
        return Violation(path, rule, values_for(path, [f"{name}:1", name]))
    names = choices.names
    if reason := choices.refused.get(value):
        return Violation(path, reason, values_for(path, names), len(names))
    close = difflib.get_close_matches(value, names, n=len(names), cutoff=0.75)
    show = 1 if close else len(names)
    return Violation(path, "is unknown", values_for(path, close or names), show)


def _unknown_name(path: str, value: tuple, name: str, choices: tuple) -> Violation:
    """A tuple's item that is none of the choices. The fixes: the closest choice in its place, or
    the tuple without it."""
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.65)
    fixed = (other for item in value for other in (close if item == name else [item]))
    rule = f"names {cfg.shown(name)}, which is none of {', '.join(choices)}"
    return Violation(path, rule, [{path: tuple(dict.fromkeys(fixed))}])


def _out_of_bounds(path: str, value: float, usual: list[Any]) -> Violation | None:
    field = cfg.fields()[path]
    kind: Any = field.type
    bounds = cfg.setting_of(field).bounds
    if kind is int and abs(value) > cfg.LARGEST_INT:
        values = [*usual, cfg.LARGEST_INT]
        if not path.startswith(("model.", "data.", "mesh.", "pipeline.")):
            values.reverse()  # nobody wants the largest size, but perhaps as many steps
        return Violation(path, f"is larger than {cfg.LARGEST_INT}", values_for(path, values))
    if not math.isfinite(value):
        return Violation(path, "is not a finite number", [{path: field.default}])
    if bounds.admit(value):
        return None
    known = [bounds.at_least, bounds.at_most, *usual]
    ends = [kind(end) for end in known if isinstance(end, int | float)]
    ends.sort(key=lambda end: abs(end - value))
    return Violation(path, f"must be {bounds}", values_for(path, ends))
