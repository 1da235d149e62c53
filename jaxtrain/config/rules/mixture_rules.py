"""The rules of `data.sources` and `data.validation`: the form of their items, the settings and
names that these have, and the rules of a corpus for each of theirs. Standard library only."""

from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.config import DataConfig, fields, shown
from jaxtrain.config.errors import nearly
from jaxtrain.config.groups.mixture_settings import (
    EXHAUSTED,
    OF_SOURCE,
    PATH,
    MixtureSource,
    entry_value,
    mixture_of,
    parse_source_entry,
    validation_sets,
)
from jaxtrain.config.groups.setting import entry_text, with_entry
from jaxtrain.config.rules.field_rules import field_violation
from jaxtrain.config.rules.rules import SettingChanges, Violation

SOURCES, SETS = "data.sources", "data.validation"
MOST = 1e9
_number: Callable[[Any], bool] = lambda value: isinstance(value, float) and 0 <= value <= MOST
# Settings of a source in its mixture → whether a value is right, and the rule.
_IN_MIXTURE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "weight": (_number, "a number from 0 on"),
    "epochs": (_number, "a number from 0 on"),
    "exhausted": (EXHAUSTED.__contains__, f"one of {', '.join(EXHAUSTED)}"),
}


def items_are_known(data: DataConfig) -> Iterator[Violation]:
    """The items have settings that there are, each name has a path, and no two sets one name."""
    for path, entries in ((SOURCES, data.sources), (SETS, data.validation)):
        for entry in entries:
            if fault := _fault(entry, path):
                rule, meant = fault
                fixed = (meant if each == entry else each for each in entries)
                fixes = [{path: tuple(filter(None, fixed))}]
                yield Violation(path, f"has {shown(entry)}, {rule}", fixes)
        by_name = {entry.partition("=")[0]: entry for entry in entries}
        if len(by_name) < len(entries):
            yield Violation(path, "names a setting twice", [{path: tuple(by_name.values())}])
        for name in {entry.partition(".")[0]: None for entry in by_name} if entries else ():
            if name not in by_name:
                rule = f"has no path of {name}, {name}=PATH"
                yield Violation(path, rule, [{path: _without(entries, name)}])
    if not any(source.weight for source in mixture_of(data)):
        yield Violation(SOURCES, "has no source with a weight above 0", [{SOURCES: ()}])
    for name in {source.name for source in mixture_of(data)}:
        if any(each.name == name for each in validation_sets(data)):
            rule = f"has {name}, which is the name of a source, and of the part that it holds out"
            yield Violation(SETS, rule, [{SETS: _without(data.validation, name)}])


def of_corpora(
    rule: Callable[[DataConfig], Iterator[Violation]], data: DataConfig
) -> Iterator[Violation]:
    """The violations of a rule by the corpora of a run: its sources, and its validation sets."""
    for path, corpora in ((SOURCES, mixture_of(data)), (SETS, validation_sets(data))):
        for each in corpora:
            for violation in rule(each.data):
                yield _in_items(violation, path, each, data) if each.name else violation


def _in_items(
    violation: Violation, path: str, source: MixtureSource, data: DataConfig
) -> Violation:
    """The violation by a source or set, whose settings are fixed in its items."""
    if not violation.field.startswith("data."):
        return violation
    setting = violation.field.removeprefix("data.")
    value, items = getattr(source.data, setting, ""), getattr(data, path.removeprefix("data."))

    def fix(changes: SettingChanges) -> SettingChanges:
        fixed, entries = dict(changes), items
        for of_data in [each for each in changes if each.startswith("data.")]:
            name = f"{source.name}{of_data.removeprefix('data')}".removesuffix(".source")
            entries = with_entry(entries, name, entry_text(fixed.pop(of_data)))
        return fixed | ({path: entries} if entries != items else {})

    rule = f"has {source.name}, and its {violation.field}={shown(value)} {violation.rule}"
    return Violation(path, rule, map(fix, violation.fixes), violation.show)


def _without(entries: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(each for each in entries if not each.startswith((f"{name}=", f"{name}.")))


def _fault(entry: str, path: str) -> tuple[str, str] | None:
    """What is wrong with an item of `path`, and what it may mean or ""; None for nothing."""
    one = parse_source_entry(entry)
    if one is None or not one.text and one.setting == PATH:
        return "which is not NAME=PATH or NAME.SETTING=VALUE", ""
    in_mixture, value = _IN_MIXTURE if path == SOURCES else {}, entry_value(one)
    if one.setting in in_mixture:
        is_right, rule = in_mixture[one.setting]
        return None if is_right(value) else (f"which needs {rule}", "")
    if one.setting != PATH and one.setting not in OF_SOURCE:
        known = (*in_mixture, *OF_SOURCE)
        near = nearly(one.setting, known, 0.6)
        rule = f"whose setting is none of {', '.join(known)}"
        return rule, near and f"{one.name}.{near}={one.text}"
    of_data = f"data.{'source' if one.setting == PATH else one.setting}"
    wrong = field_violation(of_data, value, fields()[of_data].default)
    if not wrong:
        return None
    meant = next((fix[of_data] for fix in wrong.fixes if of_data in fix), None)
    instead = "" if meant is None else f"{one.name}.{one.setting}={entry_text(meant)}"
    return f"and {of_data}={shown(value)} {wrong.rule}", instead
