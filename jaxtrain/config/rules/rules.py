"""A rule between settings, and what rules are made of.

A rule is a generator whose parameters are groups of a FilledConfig. It yields a `Violation` for
each fault, with the fixes to try, the best first. model_rules.py, pipeline_rules.py, run_rules.py
and mesh_rules.py have the rules, all_rules.py their order, and checks.py tries the fixes. Standard
library only.
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxtrain.config.errors import shown
from jaxtrain.config.groups.setting import without_entries

SettingChanges = dict[str, Any]  # setting → value


@dataclasses.dataclass(frozen=True)
class Violation:
    """A broken rule: the setting at fault, the rule (read after "field=value"), the changes that
    may fix it, the best first, and how many values that work the message may list."""

    field: str
    rule: str
    fixes: Iterable[SettingChanges] = ()
    show: int = 1


# Its parameters are named after the groups of settings that it reads, such as `data: DataConfig`;
# `config` is all of them.
SettingsRule = Callable[..., Iterator[Violation]]


@functools.cache
def groups_of(rule: SettingsRule) -> tuple[str, ...]:
    """The names of the groups of settings that a rule reads."""
    return tuple(inspect.signature(rule).parameters)


def near(value: int, candidates: Iterable[int]) -> list[int]:
    """Candidates by their distance from a value; of two at the same distance, the smaller one
    first."""
    return sorted(candidates, key=lambda c: (abs(c - value), c))


@functools.lru_cache(1024)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n ≥ 1, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def values_for(path: str, values: Iterable[Any]) -> list[SettingChanges]:
    """Changes of one setting, to each of these values."""
    return [{path: value} for value in values]


def in_items(
    violation: Violation,
    path: str,
    items: tuple[str, ...],
    where: str,
    values: Mapping[str, Any],
    put: Callable[[tuple[str, ...], str, Any], tuple[str, ...]],
) -> Violation:
    """The violation by a part of a config, such as the layers of one kind. A setting that the part
    may have for itself is at fault, and fixed, in the items.

    path, items: the setting that has the part's settings
    where: the part in words; values: setting → its value in the part
    put: (items, setting, value) → the items with this value
    """

    def fix(changes: SettingChanges) -> SettingChanges:
        fixed, mended = dict(changes), items
        for setting in values:
            if setting in changes:
                mended = put(mended, setting, fixed.pop(setting))
        return fixed | ({path: mended} if mended != items else {})

    field, rule = violation.field, f"{violation.rule} ({where})"
    if field in values:
        field, rule = path, f"makes {field}={shown(values[field])}, which {rule}"
    return Violation(field, rule, map(fix, violation.fixes), violation.show)


def item_violations(
    path: str, items: tuple[str, ...], fault: Callable[[str], tuple[str, str] | None]
) -> Iterator[Violation]:
    """The violations of a setting's items NAME.SETTING=TEXT, each by itself, and of those that
    stand twice.

    fault: item → what is wrong with it, and the item that it may mean or ""; None if nothing is
    """
    for item in items:
        if found := fault(item):
            rule, meant = found
            mended = (meant if each == item else each for each in items)
            without = without_entries(items, re.split("[.=]", item)[0])
            fixes = values_for(path, [tuple(filter(None, mended)), without])
            yield Violation(path, f"has {shown(item)}, {rule}", fixes)
    by_name = {item.partition("=")[0]: item for item in items}
    if len(by_name) < len(items):
        yield Violation(path, "names a setting twice", [{path: tuple(by_name.values())}])
