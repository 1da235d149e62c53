"""The rules of layers of several kinds (groups/layer_kinds.py): `model.pattern` and `model.kinds`
have settings that there are, and all other rules of a model hold for the layers of each kind. No
jax."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxtrain.config import FilledConfig, ModelConfig, fields, shown
from jaxtrain.config.errors import nearly
from jaxtrain.config.groups.layer_kinds import (
    BUILTIN,
    OF_MODEL,
    changes_of_kind,
    kinds_of_layers,
    kinds_with_settings,
    of_kind,
    parse_entry,
)
from jaxtrain.config.groups.setting import entry_text, with_entry
from jaxtrain.config.rules.field_rules import field_violation
from jaxtrain.config.rules.rules import SettingChanges, SettingsRule, Violation, groups_of

PATTERN, KINDS, SETTINGS = "model.pattern", "model.kinds", "block_settings"


def kinds_are_known(model: ModelConfig) -> Iterator[Violation]:
    """The rule before layers of any kind are looked at."""
    for entry in model.kinds:
        others = tuple(other for other in model.kinds if other != entry)
        for rule, instead in _faults(entry):
            fixed = (*others, instead) if instead else others
            yield Violation(KINDS, f"has {shown(entry)}, {rule}", [{KINDS: fixed}])
    known = {*BUILTIN, *kinds_with_settings(model)}
    for kind in model.pattern:
        if kind not in known:
            near = nearly(kind, sorted(known), 0.6)
            fixed = tuple(near if each == kind else each for each in model.pattern)
            builtin = ", ".join(BUILTIN)
            rule = f"has kind {shown(kind)}, which is neither of {builtin} nor of {KINDS}"
            yield Violation(PATTERN, rule, [{PATTERN: tuple(filter(None, fixed))}])
    layers = model.dense_layers + model.layers
    if len(model.pattern) > layers:
        rule = f"names {len(model.pattern)} layers, and the model has {layers}"
        more = {"model.layers": len(model.pattern) - model.dense_layers}
        yield Violation(PATTERN, rule, [{PATTERN: model.pattern[:layers]}, more])
    if "window" in model.pattern and not of_kind(model, "window").window:
        rule = "is no window, and model.pattern has layers with one"
        yield Violation("model.window", rule, [{"model.window": 1024}, {PATTERN: ()}])


def _faults(entry: str) -> Iterator[tuple[str, str]]:
    """What is wrong with an item of `model.kinds`, and a nearby one that is right; "" for none."""
    one = parse_entry(entry)
    if one is None or not one.kind.isidentifier():
        yield "which is not KIND.SETTING=VALUE", ""
        return
    names = [f.name for f in dataclasses.fields(ModelConfig)]
    if one.setting not in names or one.setting in OF_MODEL:
        known = [name for name in names if name not in OF_MODEL]
        near = nearly(one.setting, known, 0.6)
        rule = f"and model.{one.setting} is a setting of the whole model"
        if one.setting not in names:
            rule = f"and model.{one.setting} is an unknown setting"
        yield rule, near and f"{one.kind}.{near}={one.text}"
        return
    path = f"model.{one.setting}"
    if one.setting == SETTINGS:
        if not one.argument:
            yield f"which is not KIND.{SETTINGS}.NAME=VALUE", ""
        return
    if one.argument:
        yield f"and {path} has no settings", ""
        return
    try:
        value = one.value
    except ValueError:
        value = one.text
    if wrong := field_violation(path, value, fields()[path].default):
        fix = next(iter(wrong.fixes), {})
        instead = f"{one.kind}.{one.setting}={entry_text(fix[path])}" if path in fix else ""
        yield f"and {path}={shown(value)} {wrong.rule}", instead


def violations(rule: SettingsRule, config: FilledConfig) -> Iterator[Violation]:
    """The violations of a rule by a config; those of a rule that reads the model, by the layers of
    each kind."""
    groups: dict[str, Any] = {
        name: config if name == "config" else getattr(config, name) for name in groups_of(rule)
    }
    if "model" not in groups or not config.model.pattern:
        yield from rule(**groups)
        return
    of_model = {(each.field, each.rule) for each in rule(**groups)}
    for kind in dict.fromkeys(kinds_of_layers(config.model)):
        for violation in rule(**{**groups, "model": of_kind(config.model, kind)}):
            is_of_model = (violation.field, violation.rule) in of_model
            yield violation if is_of_model else _in_kind(violation, config.model, kind)


def _in_kind(violation: Violation, model: ModelConfig, kind: str) -> Violation:
    """The violation by layers of one kind. A setting that the kind changes is at fault, and fixed,
    in `model.kinds`."""
    changed = changes_of_kind(model, kind)
    _, _, name = violation.field.partition("model.")
    field, rule = violation.field, f"{violation.rule} (in layers of kind {kind})"
    if name in changed:
        field = KINDS
        rule = f"makes {violation.field}={changed[name]!r}, which {rule}"

    def fix(changes: SettingChanges) -> SettingChanges:
        fixed: SettingChanges = {}
        for path, value in changes.items():
            _, _, setting = path.partition("model.")
            if setting in changed:
                before = fixed.get(KINDS, model.kinds)
                fixed[KINDS] = with_entry(before, f"{kind}.{setting}", entry_text(value))
            else:
                fixed[path] = value
        return fixed

    return Violation(field, rule, map(fix, violation.fixes), violation.show)
