"""The rules of `data.sources` and `data.validation`: the form of their items, the settings and
names that these have, and the rules of a corpus for each of theirs. Standard library only."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.config import DataConfig
from jaxtrain.config.errors import nearly
from jaxtrain.config.groups.mixture_settings import (
    EXHAUSTED,
    OF_SOURCE,
    PARTS,
    item_value,
    mixture_of,
    validation_sets,
)
from jaxtrain.config.groups.setting import entry_text, parse_item, with_entry, without_entries
from jaxtrain.config.rules.field_rules import value_fault
from jaxtrain.config.rules.rules import Violation, in_items, item_violations

SOURCES, SETS = "data.sources", "data.validation"
# Settings of a source in its mixture → whether a value is right, and the rule.
_IN_MIXTURE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "weight": (lambda value: isinstance(value, float) and 0 <= value < 1e9, "a number from 0 on"),
    "epochs": (lambda value: isinstance(value, float) and 0 <= value < 1e9, "a number from 0 on"),
    "exhausted": (EXHAUSTED.__contains__, f"one of {', '.join(EXHAUSTED)}"),
}


def items_are_known(data: DataConfig) -> Iterator[Violation]:
    """The items have settings that there are, each name has a path, and no two sets one name."""
    sources, sets = mixture_of(data), validation_sets(data)
    for path, items, corpora in ((SOURCES, data.sources, sources), (SETS, data.validation, sets)):
        yield from item_violations(path, items, functools.partial(_fault, path=path))
        for corpus in filter(lambda each: each.name, corpora):
            name, without = corpus.name, [{path: without_entries(items, corpus.name)}]
            if not corpus.data.source:
                yield Violation(path, f"has no path of {name}, {name}=PATH", without)
            if path == SETS and name in (source.name for source in sources):
                rule = f"has {name}, the name of a source, and of the part that it holds out"
                yield Violation(path, rule, without)
    if len(sources) > PARTS:
        yield Violation(SOURCES, f"has {len(sources):,} sources, more than {PARTS:,}")
    if not any(source.weight for source in sources):
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
        values = {f"data.{name}": getattr(corpus.data, name) for name in ("source", *OF_SOURCE)}
        put = functools.partial(_with_setting, name=corpus.name)
        for wrong in rule(corpus.data):
            where = f"{corpus.name} of {path}"
            yield in_items(wrong, path, items, where, values, put) if corpus.name else wrong


def _with_setting(items: tuple[str, ...], setting: str, value: Any, name: str) -> tuple[str, ...]:
    """The items with a setting of `data` for the corpus of a name."""
    suffix = "" if setting == "data.source" else f".{setting.removeprefix('data.')}"
    return with_entry(items, f"{name}{suffix}", entry_text(value))


def _fault(entry: str, path: str) -> tuple[str, str] | None:
    """What is wrong with an item of `path`, and what it may mean or ""; None for nothing."""
    item, name = parse_item(entry), entry.partition("=")[0]
    if not item or item.part or not (item.setting or item.text):
        return "which is not NAME=PATH or NAME.SETTING=VALUE", ""
    in_mixture, value = _IN_MIXTURE if path == SOURCES else {}, item_value(item)
    if item.setting in in_mixture:
        is_right, rule = in_mixture[item.setting]
        return None if is_right(value) else (f"which needs {rule}", "")
    known = (*in_mixture, *OF_SOURCE)
    if item.setting and item.setting not in known:
        near = nearly(item.setting, known, 0.6)
        rule = f"whose setting is none of {', '.join(known)}"
        return rule, near and f"{item.name}.{near}={item.text}"
    return value_fault(f"data.{item.setting or 'source'}", value, name)
