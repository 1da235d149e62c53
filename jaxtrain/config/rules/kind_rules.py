"""The rules of layers of several kinds (groups/layer_kinds.py): `model.pattern` and `model.kinds`
have settings that there are, and all other rules of a model hold for the layers of each kind. No
jax."""

from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.config import FilledConfig, ModelConfig, fields, shown
from jaxtrain.config.errors import nearly
from jaxtrain.config.groups.layer_kinds import (
    BUILTIN,
    OF_MODEL,
    SETTINGS,
    changes_of_kind,
    models_of_kinds,
    of_kind,
    parse_entry,
)
from jaxtrain.config.groups.setting import entry_text, with_entry
from jaxtrain.config.rules.field_rules import field_violation
from jaxtrain.config.rules.rules import (
    SettingChanges,
    SettingsRule,
    Violation,
    groups_of,
    item_violations,
)

PATTERN, KINDS = "model.pattern", "model.kinds"


def kinds_are_known(model: ModelConfig) -> Iterator[Violation]:
    """The rule before layers of any kind are looked at."""
    yield from item_violations(KINDS, model.kinds, _fault)
    known = {*BUILTIN, *(entry.partition(".")[0] for entry in model.kinds)}
    for kind in [kind for kind in model.pattern if kind not in known]:
        near = nearly(kind, sorted(known), 0.6)
        fixed = (near if each == kind else each for each in model.pattern)
        rule = f"has kind {shown(kind)}, which is neither of {', '.join(BUILTIN)} nor of {KINDS}"
        yield Violation(PATTERN, rule, [{PATTERN: tuple(filter(None, fixed))}])
    layers = model.dense_layers + model.layers
    if len(model.pattern) > layers:
        rule = f"names {len(model.pattern)} layers, and the model has {layers}"
        more = {"model.layers": len(model.pattern) - model.dense_layers}
        yield Violation(PATTERN, rule, [{PATTERN: model.pattern[:layers]}, more])
    for kind in dict.fromkeys(model.pattern):
        of_layer = of_kind(model, kind)
        if kind in ("window", "block", "mixer") and not getattr(of_layer, kind):
            rule = f"is not set, and {PATTERN} has layers of kind {kind}"
            window = [{"model.window": 1024}] if kind == "window" else []
            others = tuple(each for each in model.pattern if each != kind)
            yield Violation(f"model.{kind}", rule, [*window, {PATTERN: others}])
        if of_layer.positions == "learned" != model.positions:
            rule = f"has layers of kind {kind} with learned positions, which are all layers'"
            yield Violation(PATTERN, rule, [{"model.positions": "learned"}])


def _fault(entry: str) -> tuple[str, str] | None:
    """What is wrong with an item of `model.kinds`, and what it may mean or ""; None for nothing."""
    one = parse_entry(entry)
    if one is None:
        return "which is not KIND.SETTING=VALUE or KIND.block_settings.NAME=VALUE", ""
    path = f"model.{one.setting}"
    if one.setting not in SETTINGS:
        near = nearly(one.setting, SETTINGS, 0.6)
        what = "a setting of the whole model" if one.setting in OF_MODEL else "an unknown setting"
        return f"and {path} is {what}", near and f"{one.kind}.{near}={one.text}"
    wrong = field_violation(path, one.value, fields()[path].default)
    if one.argument or not wrong:
        return None
    fix = next(iter(wrong.fixes), {})
    instead = f"{one.kind}.{one.setting}={entry_text(fix[path])}" if path in fix else ""
    return f"and {path}={shown(one.value)} {wrong.rule}", instead


def violations(rule: SettingsRule, config: FilledConfig) -> Iterator[Violation]:
    """The violations of a rule by a config; those of a rule that reads the model, by the layers of
    each kind."""
    groups: dict[str, Any] = {
        name: config if name == "config" else getattr(config, name) for name in groups_of(rule)
    }
    if "model" not in groups:
        return rule(**groups)
    return of_kinds(lambda model: rule(**groups | {"model": model}), config.model)


def of_kinds(rule: Callable[[Any], Iterator[Violation]], model: ModelConfig) -> Iterator[Violation]:
    """The violations of a rule of models by the layers of each kind."""
    if not model.pattern:
        yield from rule(model)
        return
    of_model = {(each.field, each.rule) for each in rule(model)}
    for kind, of_layers in models_of_kinds(model).items():
        for violation in rule(of_layers):
            is_of_model = (violation.field, violation.rule) in of_model
            yield violation if is_of_model else _in_kind(violation, model, kind)


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
        fixed, kinds = dict(changes), model.kinds
        for setting in changed:
            if (path := f"model.{setting}") not in changes:
                continue
            value, name = fixed.pop(path), f"{kind}.{setting}"
            if setting == "block_settings":  # an entry for each argument
                others = tuple(entry for entry in kinds if not entry.startswith(f"{name}."))
                kinds = (*others, *(f"{name}.{argument}" for argument in value))
            else:
                kinds = with_entry(kinds, name, entry_text(value))
        return fixed | ({KINDS: kinds} if kinds != model.kinds else {})

    return Violation(field, rule, map(fix, violation.fixes), violation.show)
