"""Checks of a config: each setting on its own, all rules between settings, and what surrounds a run; with the nearest flags that work.

`check(config)` for what can be known without devices, `check_devices` with their number, `check_run` with all that a run meets before
anything is compiled (devices, files, tables), `refuse_to_continue` before a checkpoint is resumed, and `changes` for what that
changes. What they suggest passes all the checks that are known by then (suggestions.py). A setting's own type, bounds and choices
stand at its field in config.py. No jax.
"""

import dataclasses
import difflib
import itertools
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, mesh_rules, rules, suggestions
from jaxtrain.config.mesh_rules import AXES, filled
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.config.rules import Broken, divisors, near, values_for
from jaxtrain.schedule.orders import CSV, SCHEDULES
from jaxtrain.schedule.search import Report, silent

FILES = (("data.source", "stdlib"), ("data.tokenizer", "bytes"))  # settings that are paths, and the word that they may be


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a config is checked against beside its own rules; what is not known is not checked.

    devices:    their number; platform: theirs, as jax names it
    recipe:     the config before the command's flags, whose values are worth a try
    files:      whether files that it names must be there
    tables:     whether its tables are made; a suggestion's are wherever files are looked for, if they can fail
    checkpoint: the config of the checkpoint that is continued
    report:     is told how far the search for a table has come
    """

    devices: int | None = None
    platform: str = ""
    recipe: Config = dataclasses.field(default_factory=Config)
    files: bool = False
    tables: bool = False
    checkpoint: Config | None = None
    report: Report = silent


NOTHING = Surroundings()


def check(config: Config, around: Surroundings = NOTHING) -> None:
    """Raises ConfigError for the first rule that is broken, of all that is known."""
    if error := refusal(config, around):
        raise error


def check_devices(config: Config, device_count: int, platform: str = "gpu") -> Config:
    """The config with the mesh's -1 filled in for this number of devices, and every rule checked with it.

    platform: of the devices, as jax names it. Raises ConfigError where the mesh does not use all the devices, the batch does not divide
    over them, or they have no such kernel.
    """
    check(config, Surroundings(device_count, platform))
    return filled(config, device_count)


def check_run(config: Config, device_count: int, platform: str, recipe: Config, report: Report = silent) -> Config:
    """As `check_devices`, with the files that the config names and the tables that it is to be trained by."""
    check(config, Surroundings(device_count, platform, recipe, files=True, tables=True, report=report))
    return filled(config, device_count)


def refuse_to_continue(old: Config, new: Config, around: Surroundings = NOTHING) -> None:
    """Raises ConfigError naming the first field in which a checkpoint's config and the one to resume it with may not differ."""
    if broken := _continues(filled(new, around.devices).resolve(), old.resolve()):
        raise _error(new, dataclasses.replace(around, checkpoint=old), broken)


def refusal(config: Config, around: Surroundings = NOTHING) -> ConfigError | None:
    """The error for the first rule that is broken; its first fix are the settings after which every rule is kept. None if none is."""
    broken = first_broken(config, around)
    return _error(config, around, broken) if broken else None


def _error(config: Config, around: Surroundings, broken: Broken) -> ConfigError:
    """The error for a broken rule, with what puts all of them right."""
    broken, value = dataclasses.replace(broken, fixes=suggestions.first_fixes(broken)), cfg.get(config, broken.field)
    changes, other = _suggestion(config, around, broken)
    text = cfg.suggestion(changes, other)
    if around.checkpoint and broken.rule.startswith(CANNOT):
        text += " (or another --workdir)"
    return ConfigError(broken.field, value, broken.rule, text, [changes])


def _suggestion(config: Config, around: Surroundings, broken: Broken) -> tuple[suggestions.Changes, list[Any]]:
    """(the changes after which every rule is kept, other values for the first where it is alone)."""
    checks = _Checks(config, dataclasses.replace(around, tables=around.files))
    changes = suggestions.nearest(checks)
    if changes is None:
        found = (suggestions.towards(checks, anchor) for anchor in _anchors(around))
        changes = min((change for change in found if change), key=len, default=None)
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
        rules = ((path, _own_rule(path, field, cfg.get(config, path), around.recipe)) for path, field in cfg.fields().items())
        self._wrong = {path for path, broken in rules if broken}  # on their own: of the others only those that change are looked at
        self._values: dict[str, list[Any]] = {}

    def first(self, changes: suggestions.Changes) -> Broken | None:
        return first_broken(cfg.replace(self.config, changes), self.around, self._changed(changes))

    def every(self, changes: suggestions.Changes) -> list[tuple[Broken, suggestions.Reads]]:
        return _every_broken(cfg.replace(self.config, changes), self.around, self._changed(changes))

    def _changed(self, changes: suggestions.Changes) -> list[str]:
        """Settings to look at on their own, in one order: a set's would be another in every process."""
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
        devices = around.devices if path.startswith("mesh.") else None
        keeps = lambda value: _own_rule(path, cfg.fields()[path], value, around.recipe) is None
        fits = lambda value: not devices or value == -1 or devices % value == 0
        sizes = divisors(devices) if devices else ()
        return [value for value in suggestions.offers(path, *settled, sizes=sizes, at=at) if keeps(value) and fits(value)]


def _anchors(around: Surroundings) -> Iterator[Config]:
    """Configs that work, or nearly always do: the recipe, the checkpoint's, and each on a mesh that is data parallel alone."""
    known = [around.recipe, *filter(None, [around.checkpoint]), Config()]
    yield from known
    for config in known:
        plain = dataclasses.replace(
            config, mesh=cfg.MeshConfig(), parallel=cfg.ParallelConfig(), pipeline=cfg.PipelineConfig(), optimizer=cfg.OptimizerConfig()
        )
        shards = around.devices or 1
        batch = max(1, config.data.batch_size // shards) * shards if isinstance(config.data.batch_size, int) else shards
        yield cfg.replace(plain, {"data.batch_size": batch, "train.diloco_inner_steps": 0})


# --- the rules, in order ---------------------------------------------------------------------------------------------------------


def first_broken(config: Config, around: Surroundings, paths: Iterable[str] = cfg.fields()) -> Broken | None:
    """Settings on their own, of these paths, come before rules between them, and these before what surrounds the run."""
    return next(_all_broken(config, around, None, paths), None)


def _every_broken(config: Config, around: Surroundings, paths: Iterable[str]) -> list[tuple[Broken, suggestions.Reads]]:
    """Every broken rule with the settings that it reads, in the order of `first_broken`."""
    found = []
    seen: set[str] = set()
    for broken in _all_broken(config, around, seen, paths):
        found.append((broken, _raw(config, seen) if seen else None))
        seen.clear()
    return found


def _raw(config: Config, seen: set[str]) -> frozenset[str]:
    """The settings that decide about resolved ones: what a default follows, and the whole mesh for the axis that has what is left."""
    reads = set(seen)
    waiting = list(reads)
    while waiting:
        path = waiting.pop()
        follows = () if path not in cfg.fields() else cfg.FOLLOWS.get(path, ())
        if path.startswith("mesh.") and cfg.get(config, path) == -1:
            follows = tuple(f"mesh.{axis}" for axis in AXES)
        waiting += [other for other in follows if other not in reads]
        reads |= set(follows)
    return frozenset(reads)


def _all_broken(config: Config, around: Surroundings, seen: set[str] | None, paths: Iterable[str]) -> Iterator[Broken]:
    """Broken rules in order. `seen`: gets the settings that each reads, empty where that is not known. What needs other rules to be kept
    comes only where they are."""
    watch = lambda config: config if seen is None else cast(Config, suggestions.Recorder(config, seen))
    count = 0

    def broken_of(rules: Iterator[Broken | None]) -> Iterator[Broken]:
        nonlocal count
        for broken in rules:
            if broken:
                count += 1
                yield broken
            if seen is not None:
                seen.clear()

    def own() -> Iterator[Broken | None]:
        for path in paths:
            if seen is not None:
                seen.add(path)
            yield _own_rule(path, cfg.fields()[path], cfg.get(config, path), around.recipe)

    yield from broken_of(own())
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
    yield from broken_of(rule(watch(config)) for rule in _of_surroundings(around))
    if around.checkpoint:
        yield from broken_of(iter([_continues(watch(resolved), around.checkpoint.resolve())]))
    if around.tables and not count and (broken := _tables_are_made(resolved, around.report)):
        yield broken


def _of_surroundings(around: Surroundings) -> Iterator[Any]:
    if around.platform not in ("", "gpu"):
        yield lambda config: _kernel_is_there(config, around.platform)
    if around.files:
        yield from (lambda config, path=path, word=word: _file_is_there(config, path, word) for path, word in FILES)
        yield _schedule_is_there


def _kernel_is_there(config: Config, platform: str) -> Broken | None:
    path = "model.attention_kernel"
    if config.model.attention_kernel != "cudnn":
        return None
    return Broken(path, f"is for NVIDIA GPUs, and the devices here are of platform {platform!r}", values_for(path, ["auto"]))


def _file_is_there(config: Config, path: str, word: str) -> Broken | None:
    value = cfg.get(config, path)
    if value == word or (path, value) == ("data.tokenizer", "none") or (value and pathlib.Path(value).expanduser().exists()):
        return None
    close = itertools.chain(_files_like(pathlib.Path(value).expanduser()), [word])
    return Broken(path, f"is neither {word!r} nor an existing path", values_for(path, close))


def _schedule_is_there(config: Config) -> Broken | None:
    schedule = config.pipeline.schedule
    path = pathlib.Path(schedule.removeprefix(CSV))
    if not schedule.startswith(CSV) or path.is_file():
        return None
    close = itertools.chain((CSV + name for name in _files_like(path)), SCHEDULES)
    rule = "names no file (python -m jaxtrain.schedule --csv=FILE writes one)"
    return Broken("pipeline.schedule", rule, values_for("pipeline.schedule", close))


def _files_like(path: pathlib.Path) -> Iterator[str]:
    """The path of the file beside one that is not there whose name is most like its name, if one is."""
    names = {other.name: str(other) for other in path.parent.iterdir()} if path.parent.is_dir() else {}
    yield from (names[name] for name in difflib.get_close_matches(path.name, names, n=1))


def _tables_are_made(resolved: Config, report: Report) -> Broken | None:
    """What the making of the tables refuses. Only files, and a bound on memory, can be refused (config/pipeline_setup.py)."""
    p = resolved.pipeline
    if resolved.mesh.stage < 1 or not (p.schedule.startswith(CSV) or p.memory):
        return None
    try:
        make_setup(resolved, report)
    except ConfigError as error:
        return Broken(error.field, error.rule, error.fixes, show=2)
    return None


# --- continuing ------------------------------------------------------------------------------------------------------------------


# What must stay as it is for a checkpoint to be continued: the model's shape and function, the data's position, the optimizer's state.
_KEPT = ("optimizer.name", "precision.params", "train.seed")  # and all of model and data, but for:
_FREE = (
    *("model.attention_kernel", "model.loss_chunk", "model.init_std", "model.mtp_weight", "data.cache", "data.prefetch"),
    "data.bad_records",  # the corpus's checksum says whether it matters
    *("model.balance_rate", "model.balance_loss", "model.z_loss"),  # DeepSeek-V3 sets the first to 0 towards the end
)
CANNOT = "cannot continue a checkpoint"


def _continues(new: Config, old: Config) -> Broken | None:
    """The first field, of resolved configs, in which they may not differ."""
    for path in sorted(cfg.fields(), key=lambda path: not path.startswith("data.")):  # model.max_positions follows data's
        if path == "model.max_positions" and new.model.positions == "rotary":
            continue
        kept = path in _KEPT or (path.startswith(("model.", "data.")) and path not in _FREE)
        if kept and cfg.get(old, path) != cfg.get(new, path):
            return _cannot_continue(path, old)
    if bool(old.train.diloco_inner_steps) != bool(new.train.diloco_inner_steps):
        return _cannot_continue("train.diloco_inner_steps", old)
    if new.train.diloco_inner_steps and old.mesh.replica != new.mesh.replica:  # each has parameters of its own
        return _cannot_continue("mesh.replica", old)
    return None


def changes(old: Config, new: Config) -> list[str]:
    """What differs between a checkpoint's config and the one that continues it: lines such as "optimizer.learning_rate: 0.003 → 0.1".

    Both with their dependent defaults and the mesh's sizes filled in. A setting that the checkpoint does not know had its default.
    """
    old, new = old.resolve(), new.resolve()
    pairs = ((path, cfg.get(old, path), cfg.get(new, path)) for path in cfg.fields())
    shown = lambda value: cfg.value_text(value) or ("none" if isinstance(value, tuple) else "''")
    return [f"{path}: {shown(before)} → {shown(after)}" for path, before, after in pairs if before != after]


def _cannot_continue(path: str, old: Config) -> Broken:
    value = cfg.get(old, path)
    return Broken(path, f"{CANNOT} of {path}={value!r}", values_for(path, [value]))


# --- a setting on its own --------------------------------------------------------------------------------------------------------


def _listed(values: list) -> str:
    """[1, 2, 4] → "1, 2 or 4"."""
    words = [repr(v) for v in values]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _own_rule(path: str, field: dataclasses.Field, value: Any, recipe: Config) -> Broken | None:
    """A setting's type, choices and bounds."""
    try:
        cfg.convert(path, value)
    except ConfigError as error:
        nearest = cfg.retyped(path, value, cfg.get(recipe, path))
        return Broken(path, error.rule, values_for(path, [nearest, cfg.get(recipe, path), field.default]))
    choices, prefix = field.metadata["choices"], field.metadata["prefix"]
    if choices:
        return None if value in choices or (prefix and value.startswith(prefix)) else _bad_choice(path, value, choices)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _out_of_bounds(path, field, value, recipe)
    if cfg.item_type(field.type) in (int, float):
        if all(math.isfinite(v) and v >= 0 and (v or path == "pipeline.times") for v in value):
            return None
        return Broken(path, "has a number that is not above 0", values_for(path, [field.default]))
    if isinstance(value, tuple) and (len(set(value)) < len(value) or "" in value):
        names = tuple(dict.fromkeys(v for v in value if v))
        return Broken(path, "has an empty or repeated name", values_for(path, [names, field.default]))
    return None


def _bad_choice(path: str, value: Any, choices: tuple) -> Broken:
    if not isinstance(value, str):
        return Broken(path, f"is not built: the choices are {_listed(list(choices))}", values_for(path, near(value, choices)))
    close = difflib.get_close_matches(value, choices, n=len(choices), cutoff=0.5)
    return Broken(path, "is unknown", values_for(path, close or choices), show=1 if close else len(choices))


def _out_of_bounds(path: str, field: dataclasses.Field, value: float, recipe: Config) -> Broken | None:
    whole, bounds = field.type is int, field.metadata["bounds"]
    if whole and abs(value) > cfg.LARGEST_INT:
        values = [cfg.get(recipe, path), field.default, cfg.LARGEST_INT]  # nobody wants the largest size, but perhaps as many steps
        order = values if path.startswith(("model.", "data.", "mesh.", "pipeline.")) else values[::-1]
        return Broken(path, f"is larger than {cfg.LARGEST_INT}", values_for(path, order))
    if not math.isfinite(value):
        return Broken(path, "is not a finite number", values_for(path, [field.default]))
    low, above, high, below = (bounds[name] for name in ("at_least", "above", "at_most", "below"))
    words = {"at least": low, "above": above, "at most": high, "below": below}
    fits = (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
    )
    if fits:
        return None
    rule = "must be " + " and ".join(f"{word} {limit}" for word, limit in words.items() if limit is not None)
    limits: list[Any] = [limit for limit in (low, high, cfg.get(recipe, path), field.default) if isinstance(limit, int | float)]
    ends = sorted((int(limit) if whole else float(limit) for limit in limits), key=lambda limit: abs(limit - value))
    return Broken(path, rule, values_for(path, ends))
