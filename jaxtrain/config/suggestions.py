"""The nearest config that works: the fewest settings to change, and of those changes the nearest,
after which every check is passed.

    config ─ first broken rule ─► the settings that it reads ─► values for each
           ─► config with one change more ─ first broken rule ─► …

A search, best first: fewest changed settings before everything; then what the rule itself names and
its author's order; then nearness. Rules that are broken by settings of their own need a change
each, which says early how many it takes at least. What the rules are is config_checks's: here they
are functions. The search is cut by the number of configs that it looks at, never by time, so that
all processes say the same. Standard library only.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.rules import Broken, near

MOST_CONFIGS = 4_000  # looked at, some 100 µs each
MOST_FIXES = 48  # of a rule
FIELD = 16  # what a place further back in the order of settings costs, in steps to another value
# what it costs more to change a setting that a rule reads and does not name, and that a flag did
# ask for
UNNAMED = 2 * FIELD
SMALL = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# Settings that a rule reads and does not name come in this order: what is trained changes last.
GROUPS = (
    "mesh",
    "pipeline",
    "parallel",
    "precision",
    "train",
    "optimizer",
    "checkpoint",
    "metrics",
    "data",
    "model",
)
Changes = dict[str, Any]
# the settings that a rule reads; None: not known, and there its own fixes alone are tried
Reads = frozenset[str] | None


class Checks(Protocol):
    """A config to mend: what is broken after changes to it, and what might be tried."""

    config: Config

    def first(self, changes: Changes) -> Broken | None:
        """The first broken rule after these changes, None if all is well."""

    def every(self, changes: Changes) -> list[tuple[Broken, Reads]]:
        """All broken rules after these changes, in order, with the settings that each reads."""

    def values(self, path: str) -> Sequence[Any]:
        """Values of a setting that might be tried, whatever the rule."""

    def asked(self, path: str) -> bool:
        """Whether a flag gave the setting its value."""


class Recorder:
    """A config that remembers which settings were read, by their paths in `seen`."""

    def __init__(self, config: Config, seen: set[str]):
        self._config, self._seen = config, seen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return _Group(value, name, self._seen) if name in _GROUP_NAMES else value


class _Group:
    def __init__(self, group: Any, name: str, seen: set[str]):
        self._group, self._name, self._seen = group, name, seen

    def __getattr__(self, name: str) -> Any:
        self._seen.add(f"{self._name}.{name}")
        return getattr(self._group, name)


_GROUP_NAMES = frozenset(path.partition(".")[0] for path in cfg.fields())


def nearest(checks: Checks) -> Changes | None:
    """The settings to change and their values, or None if MOST_CONFIGS configs were not enough.

    Each changed setting is a step; what a rule wants changed together, and says no more about, is
    one.
    """
    order = itertools.count()
    # (steps that it takes at least, cost, number, steps, changes, whether they are known not to be
    # enough)
    heap: list[tuple[int, int, int, int, Changes, bool]] = [(0, 0, next(order), 0, {}, True)]
    seen: set[frozenset] = set()
    while heap and len(seen) < MOST_CONFIGS:
        least, cost, _, steps, changes, failed = heapq.heappop(heap)
        if not failed:
            key = frozenset(changes.items())
            if key in seen:
                continue
            seen.add(key)
            if checks.first(changes) is None:
                return changes
            heapq.heappush(heap, (steps + 1, cost, next(order), steps, changes, True))
            continue
        broken = checks.every(changes)
        needed = steps + _apart(broken)
        if needed > least:
            heapq.heappush(heap, (needed, cost, next(order), steps, changes, True))
            continue
        _, reads = broken[0]
        for extra_cost, change in _branches(checks, changes, *broken[0]):
            after = steps + (len(change) if reads is not None else 1)
            heapq.heappush(
                heap,
                (
                    max(needed, after),
                    cost + extra_cost,
                    next(order),
                    after,
                    changes | change,
                    False,
                ),
            )
    return None


def others(checks: Checks, path: str, used: Any, broken: Broken) -> list[Any]:
    """Further values of the setting that a rule is about after which every check is passed, as many
    as the rule shows beside the one that is used."""
    at = cfg.get(checks.config, path)
    offered = [fix[path] for fix in first_fixes(broken) if list(fix) == [path]]
    working: list[Any] = []
    for value in _different(offered or checks.values(path), (used, at, -1)):
        if len(working) + 1 >= broken.show:
            break
        if checks.first({path: value}) is None:
            working.append(value)
    return sorted(working) if all(type(value) is int for value in working) else working


def towards(checks: Checks, anchor: Config) -> Changes | None:
    """The settings in which a config has to become like one that works, no one of them without
    need; None if that does not work."""
    changes = {
        path: value
        for path in cfg.fields()
        if not _same(value := cfg.get(anchor, path), cfg.get(checks.config, path))
    }
    if checks.first(changes) is not None:
        return None
    while True:
        for path in sorted(changes, key=_place, reverse=True):
            fewer = {other: value for other, value in changes.items() if other != path}
            if checks.first(fewer) is None:
                changes = fewer
                break
        else:
            return changes


def first_fixes(broken: Broken) -> tuple[Changes, ...]:
    """What a rule offers, the nearest of it; its fixes may be an iterator, which this uses up."""
    return tuple(itertools.islice(broken.fixes, MOST_FIXES))


def offers(path: str, *settled: Any, sizes: Iterable[int] = (), at: Any = None) -> list[Any]:
    """Values of a setting to be tried, whatever the rule: its choices, or those `settled` elsewhere
    (a recipe's, the default) and, for a number of things, `sizes` and small ones, by how near they
    are to what is there. A number that may be 0 for a default has no others."""
    field = cfg.fields()[path]
    if field.type is bool:
        return [True, False]
    if field.metadata["choices"]:
        return list(_different([*field.metadata["choices"], *settled], ()))
    if field.type is not int:
        return list(_different([*settled, *([()] if cfg.item_type(field.type) else [])], ()))
    known = {
        value
        for value in (*settled, *sizes, *(SMALL if field.default else ()))
        if type(value) is int
    }
    return near(at, known) if type(at) is int else list(_different([*settled, *sorted(known)], ()))


def _apart(broken: list[tuple[Broken, frozenset[str] | None]]) -> int:
    """A number of settings that must change at least: of rules that read nothing in common, each
    needs its own."""
    taken: set[str] = set()
    count = 0
    for reads in sorted((reads for _, reads in broken if reads is not None), key=len):
        if not reads & taken:
            taken |= reads
            count += 1
    return max(count, 1)


def _branches(
    checks: Checks, changes: Changes, broken: Broken, reads: Reads
) -> Iterator[tuple[int, Changes]]:
    """(cost, change) of everything that may mend a broken rule: what it names first, then the other
    settings that it reads."""
    fixes = first_fixes(broken)
    named = list(dict.fromkeys([*(path for fix in fixes for path in fix), broken.field]))
    read = sorted((reads or frozenset()) - set(named), key=_place)
    costs = {}
    for place, path in enumerate([*named, *read]):
        costs[path] = FIELD * (place + (place > 0 and checks.asked(path))) + UNNAMED * (
            path in read
        ) * (1 + checks.asked(path))
        if path in changes or path not in cfg.fields():
            continue
        at = cfg.get(checks.config, path)
        offered = [fix[path] for fix in fixes if list(fix) == [path]]
        further = () if reads is None else checks.values(path)
        for step, value in enumerate(_different([*offered, *further], (at,))):
            yield costs[path] + min(step, FIELD - 1), {path: value}
    for step, fix in enumerate(fixes):
        if len(fix) > 1 and not changes.keys() & fix.keys():
            yield max(costs[path] for path in fix) + min(step, FIELD - 1), dict(fix)


def _place(path: str) -> tuple[int, int]:
    """A setting's place in the order of what to change."""
    return GROUPS.index(path.partition(".")[0]), list(cfg.fields()).index(path)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _different(values: Iterable[Any], but: Iterable[Any]) -> Iterator[Any]:
    """Values once each, without some."""
    seen = list(but)
    for value in values:
        if not any(_same(value, other) for other in seen):
            seen.append(value)
            yield value


def ordered(changes: Mapping[str, Any], first: str) -> Changes:
    """Changes with the setting that an error is about before the others, and these in the order of
    the settings."""
    return {
        path: changes[path]
        for path in sorted(
            changes, key=lambda path: (path != first, list(cfg.fields()).index(path))
        )
    }
