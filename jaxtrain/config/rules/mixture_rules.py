"""The rules of `data.sources` and `data.validation`: the form of their items, the settings and
names that these have, and the rules of a corpus for each of theirs. Standard library only."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.config import DataConfig, fields, shown
from jaxtrain.config.errors import nearly
from jaxtrain.config.groups.mixture_settings import (
    EXHAUSTED,
    OF_SOURCE,
    PATH,
    entry_value,
    mixture_of,
    parse_source_entry,
    validation_sets,
)
from jaxtrain.config.groups.setting import entry_text, with_entry, without_entries
from jaxtrain.config.rules.field_rules import field_violation
from jaxtrain.config.rules.rules import Violation, item_violations

SOURCES, SETS = "data.sources", "data.validation"
# Settings of a source in its mixture → whether a value is right, and the rule.
_IN_MIXTURE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "weight": (lambda value: isinstance(value, float) and 0 <= value < 1e9, "a number from 0 on"),
    "epochs": (lambda value: isinstance(value, float) and 0 <= value < 1e9, "a number from 0 on"),
    "exhausted": (EXHAUSTED.__contains__, f"one of {', '.join(EXHAUSTED)}"),
}


def items_are_known(data: DataConfig) -> Iterator[Violation]:
    """The items have settings that there are, each name has a path, and no two sets one name."""
    for path, items in ((SOURCES, data.sources), (SETS, data.validation)):
        yield from item_violations(path, items, functools.partial(_fault, path=path))
        with_path = {item.partition("=")[0] for item in items}
        for name in dict.fromkeys(re.split("[.=]", item)[0] for item in items):
            if name not in with_path:
                fixes = [{path: without_entries(items, name)}]
                yield Violation(path, f"has no path of {name}, {name}=PATH", fixes)
            if path == SETS and any(source.name == name for source in mixture_of(data)):
                rule = f"has {name}, the name of a source, and of the part that it holds out"
                yield Violation(path, rule, [{path: without_entries(items, name)}])
    if not any(source.weight for source in mixture_of(data)):
        yield Violation(SOURCES, "has no source with a weight above 0", [{SOURCES: ()}])


def notes(data: DataConfig) -> list[str]:
    """Lines about settings of sources that have no use."""
    return [
        f"{SOURCES}: {source.name}.exhausted={source.exhausted} has no use with its epochs=0, "
        "without end"
        for source in mixture_of(data)
        if source.exhausted != "stop" and not source.epochs
    ]


def of_corpora(
    rule: Callable[[DataConfig], Iterator[Violation]], data: DataConfig
) -> Iterator[Violation]:
    """The violations of a rule by the corpora of a run: its sources, and its validation sets, whose
    settings are fixed in their items."""
    named = [(SOURCES, data.sources, each) for each in mixture_of(data)]
    named += [(SETS, data.validation, each) for each in validation_sets(data)]
    for path, items, corpus in named:
        for wrong in rule(corpus.data):
            if not corpus.name or not wrong.field.startswith("data."):
                yield wrong
                continue
            value = shown(getattr(corpus.data, wrong.field.removeprefix("data.")))
            fixes = [
                {path: with_entry(items, _item(corpus.name, setting), entry_text(fixed))}
                for changes in wrong.fixes
                for setting, fixed in changes.items()
            ]
            rule_of_item = f"has {corpus.name}, and its {wrong.field}={value} {wrong.rule}"
            yield Violation(path, rule_of_item, fixes, wrong.show)


def _item(name: str, setting: str) -> str:
    """The name of a corpus's item for a setting of `data`."""
    return f"{name}.{setting.removeprefix('data.')}".removesuffix(".source")


def _fault(item: str, path: str) -> tuple[str, str] | None:
    """What is wrong with an item of `path`, and what it may mean or ""; None for nothing."""
    one, in_mixture = parse_source_entry(item), _IN_MIXTURE if path == SOURCES else {}
    if one is None or not one.text and one.setting == PATH:
        return "which is not NAME=PATH or NAME.SETTING=VALUE", ""
    value, of_data = entry_value(one), f"data.{one.setting}".replace("data.path", "data.source")
    if one.setting in in_mixture:
        is_right, rule = in_mixture[one.setting]
        return None if is_right(value) else (f"which needs {rule}", "")
    if one.setting not in (PATH, *OF_SOURCE):
        known = (*in_mixture, *OF_SOURCE)
        near = nearly(one.setting, known, 0.6)
        rule = f"whose setting is none of {', '.join(known)}"
        return rule, near and f"{one.name}.{near}={one.text}"
    if wrong := field_violation(of_data, value, fields()[of_data].default):
        meant = [entry_text(fix[of_data]) for fix in wrong.fixes if of_data in fix][:1]
        instead = "".join(f"{_item(one.name, of_data)}={text}" for text in meant)
        return f"and {of_data}={shown(value)} {wrong.rule}", instead
    return None
