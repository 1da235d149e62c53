"""Checks of a config: each setting on its own, all rules between settings, and what surrounds a
run; with the nearest flags that work.

`check(config)` for what can be known without devices, `check_devices` with their number,
`check_run` with all that a run meets before anything is compiled (devices, files, tables), and
`refuse_to_continue` before a checkpoint is resumed (continuing.py has what that changes). What they
suggest passes all the checks that are known by then (suggestions.py). A setting's own type, bounds
and choices stand at its field in settings.py. No jax.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, cast

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, mesh_rules, rules, suggestions
from jaxtrain.config.continuing import CANNOT, broken_continuation
from jaxtrain.config.field_rules import broken_field
from jaxtrain.config.mesh_rules import AXES, filled
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.config.rules import Broken, divisors
from jaxtrain.config.surroundings import NOTHING, Surroundings, rules_of
from jaxtrain.schedule.orders import CSV
from jaxtrain.schedule.search import Report, silent

MESH_SIZES = tuple(f"mesh.{axis}" for axis in AXES)


def check(config: Config, around: Surroundings = NOTHING) -> None:
    """Raises ConfigError for the first rule that is broken, of all that is known."""
    if error := refusal(config, around):
        raise error


def check_devices(config: Config, device_count: int, platform: str = "gpu") -> Config:
    """The config with the mesh's -1 filled in for this number of devices, and every rule checked
    with it.

    platform: of the devices, as jax names it. Raises ConfigError where the mesh does not use all
    the devices, the batch does not divide over them, or they have no such kernel.
    """
    check(config, Surroundings(device_count, platform))
    return filled(config, device_count)


def check_run(
    config: Config, device_count: int, platform: str, recipe: Config, report: Report = silent
) -> Config:
    """As `check_devices`, with the files that the config names and the tables that it is to be
    trained by."""
    check(
        config, Surroundings(device_count, platform, recipe, files=True, tables=True, report=report)
    )
    return filled(config, device_count)


def refuse_to_continue(old: Config, config: Config, around: Surroundings = NOTHING) -> None:
    """Raises ConfigError naming the first field in which a checkpoint's config and the one to
    resume it with may not differ."""
    if broken := broken_continuation(filled(config, around.devices).resolve(), old.resolve()):
        raise _error(config, dataclasses.replace(around, checkpoint=old), broken)


def refusal(config: Config, around: Surroundings = NOTHING) -> ConfigError | None:
    """The error for the first rule that is broken; its first fix are the settings after which every
    rule is kept. None if none is."""
    broken = first_broken(config, around)
    return _error(config, around, broken) if broken else None


def _error(config: Config, around: Surroundings, broken: Broken) -> ConfigError:
    """The error for a broken rule, with what puts all of them right."""
    broken, value = (
        dataclasses.replace(broken, fixes=suggestions.first_fixes(broken)),
        cfg.get(config, broken.field),
    )
    changes, other = _suggestion(config, around, broken)
    text = cfg.suggestion(changes, other)
    if around.checkpoint and broken.rule.startswith(CANNOT):
        text = (
            f"{text} (or another --workdir)"
            if changes
            else f"another --workdir, or other than {around.devices} devices"
        )
    return ConfigError(broken.field, value, broken.rule, text, [changes])


def _suggestion(
    config: Config, around: Surroundings, broken: Broken
) -> tuple[suggestions.Changes, list[Any]]:
    """(the changes after which every rule is kept, other values for the first where it is
    alone)."""
    checks = _Checks(config, dataclasses.replace(around, tables=around.files))
    changes = suggestions.nearest(checks)
    if changes is None:
        candidates = (suggestions.towards(checks, anchor) for anchor in _anchors(around))
        changes = min((change for change in candidates if change), key=len, default=None)
    if not changes:
        return {}, []
    changes = suggestions.ordered(changes, broken.field)
    path, value = next(iter(changes.items()))
    if len(changes) > 1 or path != broken.field or isinstance(value, tuple):
        return changes, []
    return changes, suggestions.others(checks, path, value, broken)


class _Checks:
    """config_search.Checks of a config in its surroundings."""

    def __init__(self, config: Config, around: Surroundings):
        self.config, self.around = config, around
        rules = (
            (path, broken_field(path, field, cfg.get(config, path), around.recipe))
            for path, field in cfg.fields().items()
        )
        # on their own: of the others only those that change are looked at
        self._wrong = {path for path, broken in rules if broken}
        self._values: dict[str, list[Any]] = {}

    def first(self, changes: suggestions.Changes) -> Broken | None:
        return first_broken(cfg.replace(self.config, changes), self.around, self._changed(changes))

    def every(self, changes: suggestions.Changes) -> list[tuple[Broken, suggestions.Reads]]:
        return _every_broken(cfg.replace(self.config, changes), self.around, self._changed(changes))

    def _changed(self, changes: suggestions.Changes) -> list[str]:
        """Settings to look at on their own, in one order: a set's would be another in every
        process."""
        return [path for path in cfg.fields() if path in changes or path in self._wrong]

    def asked(self, path: str) -> bool:
        return cfg.get(self.config, path) != cfg.get(self.around.recipe, path)

    def values(self, path: str) -> list[Any]:
        if path not in self._values:
            self._values[path] = self._offers(path)
        return self._values[path]

    def _offers(self, path: str) -> list[Any]:
        around, at = self.around, cfg.get(self.config, path)
        settled = [cfg.get(around.recipe, path), cfg.fields()[path].default]
        if around.checkpoint:
            settled.insert(0, cfg.get(around.checkpoint, path))
        devices = around.devices if path in MESH_SIZES else None
        keeps = lambda value: broken_field(path, cfg.fields()[path], value, around.recipe) is None
        fits = lambda value: not devices or value == -1 or devices % value == 0
        sizes = divisors(devices) if devices else ()
        return [
            value
            for value in suggestions.offers(path, *settled, sizes=sizes, at=at)
            if keeps(value) and fits(value)
        ]


def _anchors(around: Surroundings) -> Iterator[Config]:
    """Configs that work, or nearly always do: the recipe, the checkpoint's, and each on a mesh that
    is data parallel alone."""
    known = [around.recipe, *filter(None, [around.checkpoint]), Config()]
    yield from known
    for config in known:
        plain = dataclasses.replace(
            config,
            mesh=cfg.MeshConfig(),
            parallel=cfg.ParallelConfig(),
            pipeline=cfg.PipelineConfig(),
            optimizer=cfg.OptimizerConfig(),
        )
        shards = around.devices or 1
        batch = (
            max(1, config.data.batch_size // shards) * shards
            if isinstance(config.data.batch_size, int)
            else shards
        )
        yield cfg.replace(plain, {"data.batch_size": batch, "train.diloco_inner_steps": 0})


# --- the rules, in order --------------------------------------------------------------------------


def first_broken(
    config: Config, around: Surroundings, paths: Iterable[str] = cfg.fields()
) -> Broken | None:
    """Settings on their own, of these paths, come before rules between them, and these before what
    surrounds the run."""
    return next(_all_broken(config, around, None, paths), None)


def _every_broken(
    config: Config, around: Surroundings, paths: Iterable[str]
) -> list[tuple[Broken, suggestions.Reads]]:
    """Every broken rule with the settings that it reads, in the order of `first_broken`."""
    every_broken = []
    seen: set[str] = set()
    for broken in _all_broken(config, around, seen, paths):
        every_broken.append((broken, _raw(config, seen) if seen else None))
        seen.clear()
    return every_broken


def _raw(config: Config, seen: set[str]) -> frozenset[str]:
    """The settings that decide about resolved ones: what a default follows, and the whole mesh for
    the axis that has what is left."""
    reads = set(seen)
    waiting = list(reads)
    while waiting:
        path = waiting.pop()
        follows = () if path not in cfg.fields() else cfg.FOLLOWS.get(path, ())
        if path in MESH_SIZES and (config.mesh.elastic or cfg.get(config, path) == -1):
            follows = MESH_SIZES
        waiting += [other for other in follows if other not in reads]
        reads |= set(follows)
    return frozenset(reads)


def _all_broken(
    config: Config, around: Surroundings, seen: set[str] | None, paths: Iterable[str]
) -> Iterator[Broken]:
    """Broken rules in order. `seen`: gets the settings that each reads, empty where that is not
    known. What needs other rules to be kept comes only where they are."""
    watch = lambda config: (
        config if seen is None else cast(Config, suggestions.Recorder(config, seen))
    )
    count = 0

    def broken_of(rules: Iterator[Broken | None]) -> Iterator[Broken]:
        nonlocal count
        for broken in rules:
            if broken:
                count += 1
                yield broken
            if seen is not None:
                seen.clear()

    def on_their_own() -> Iterator[Broken | None]:
        for path in paths:
            if seen is not None:
                seen.add(path)
            yield broken_field(path, cfg.fields()[path], cfg.get(config, path), around.recipe)

    yield from broken_of(on_their_own())
    if count:
        return
    early = (*mesh_rules.EARLY_RULES, *rules.EARLY_RULES)
    yield from broken_of(rule(watch(config), None) for rule in early)
    if count:
        return
    on_mesh = filled(config, around.devices)
    resolved = on_mesh.resolve()
    yield from broken_of(rule(watch(resolved)) for rule in (*rules.RULES, *mesh_rules.RULES))
    yield from broken_of(rule(watch(config), around.devices) for rule in early)
    yield from broken_of(rule(watch(config)) for rule in rules_of(around))
    if around.checkpoint:
        yield from broken_of(
            iter([broken_continuation(watch(resolved), around.checkpoint.resolve())])
        )
    if around.tables and not count and (broken := _tables_are_made(resolved, around.report)):
        yield broken


def _tables_are_made(resolved: Config, report: Report) -> Broken | None:
    """What the making of the tables refuses. Only files, and a bound on memory, can be refused
    (config/pipeline_setup.py)."""
    p = resolved.pipeline
    if resolved.mesh.stage < 1 or not (p.schedule.startswith(CSV) or p.memory):
        return None
    try:
        make_setup(resolved, report)
    except ConfigError as error:
        return Broken(error.field, error.rule, error.fixes, show=2)
    return None
