"""The rules of layers of several kinds (groups/layer_kinds.py): `model.pattern` and `model.kinds`
have settings that there are, and all other rules of a model hold for the layers of each kind. No
jax."""

from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.config import FilledConfig, ModelConfig, shown
from jaxtrain.config.errors import nearly
from jaxtrain.config.groups.layer_kinds import (
    BUILTIN,
    OF_MODEL,
    SETTINGS,
    changes_of_kind,
    models_of_kinds,
    of_kind,
)
from jaxtrain.config.groups.setting import (
    entry_text,
    parse_item,
    text_value,
    with_entry,
    without_entries,
)
from jaxtrain.config.rules.field_rules import value_fault
from jaxtrain.config.rules.rules import (
    SettingsRule,
    Violation,
    groups_of,
    in_items,
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
    item, name = parse_item(entry), entry.partition("=")[0]
    if not item or not item.setting or bool(item.part) != (item.setting == "block_settings"):
        return "which is not KIND.SETTING=VALUE or KIND.block_settings.NAME=VALUE", ""
    path = f"model.{item.setting}"
    if item.setting not in SETTINGS:
        near = nearly(item.setting, SETTINGS, 0.6)
        what = "a setting of the whole model" if item.setting in OF_MODEL else "an unknown setting"
        return f"and {path} is {what}", near and f"{item.name}.{near}={item.text}"
    if item.part:
        return None
    return value_fault(path, text_value(item.text, SETTINGS[item.setting]), name)


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
    """The violation by layers of one kind."""

    def put(kinds: tuple[str, ...], setting: str, value: Any) -> tuple[str, ...]:
        name = f"{kind}.{setting.removeprefix('model.')}"
        if setting != "model.block_settings":
            return with_entry(kinds, name, entry_text(value))
        arguments = (f"{name}.{argument}" for argument in value)
        return (*without_entries(kinds, name), *arguments)

    values = {f"model.{name}": value for name, value in changes_of_kind(model, kind).items()}
    return in_items(violation, KINDS, model.kinds, f"in layers of kind {kind}", values, put)
