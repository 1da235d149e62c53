"""Checks of a config: each setting on its own, all rules between settings, and the search for the nearest setting that keeps them all.

`check(config)` before jax is imported, `check_files` beside it, `check_devices` once the number of devices is known. Before a checkpoint
is resumed, `refuse_to_continue`, and `changes` for what that changes. A setting's own type, bounds and choices stand in config.py.
Standard library only.
"""

import dataclasses
import difflib
import itertools
import math
import pathlib
from typing import Any

from jaxtrain import config as cfg
from jaxtrain import config_mesh_rules, config_rules
from jaxtrain.config import Config, ConfigError
from jaxtrain.config_mesh_rules import filled
from jaxtrain.config_rules import Broken, near, values_for

TRIES = 2000  # candidates looked at for a nearest setting: a check takes some 20 µs


def check(config: Config) -> None:
    """Raises ConfigError for the first rule that is broken, of all that can be known without devices and files."""
    _raise_first(config, None)


def check_devices(config: Config, device_count: int, platform: str = "gpu") -> Config:
    """The config with the mesh's -1 filled in for this number of devices, and every rule checked with it.

    platform: of the devices, as jax names it. Raises ConfigError where the mesh does not use all the devices, the batch does not divide
    over them, or they have no such kernel.
    """
    _raise_first(config, device_count)
    if config.model.attention_kernel == "cudnn" and platform != "gpu":
        raise ConfigError(
            "model.attention_kernel", "cudnn", f"is for NVIDIA GPUs, and the devices here are of platform {platform!r}", "'auto'"
        )
    return filled(config, device_count)


def check_files(config: Config) -> None:
    """Raises ConfigError if the corpus or the tokenizer is not there."""
    for path, word in (("data.source", "stdlib"), ("data.tokenizer", "bytes")):
        value = cfg.get(config, path)
        if value == word or (path, value) == ("data.tokenizer", "none") or (value and pathlib.Path(value).expanduser().exists()):
            continue
        folder = pathlib.Path(value).expanduser().parent
        names = {word: word} | ({p.name: str(p) for p in folder.iterdir()} if folder.is_dir() else {})
        close = difflib.get_close_matches(pathlib.Path(value).name, names, n=1) or [word]
        raise ConfigError(path, value, f"is neither {word!r} nor an existing path", repr(names[close[0]]))
    schedule = config.pipeline.schedule
    if schedule.startswith(cfg.CSV) and not pathlib.Path(schedule.removeprefix(cfg.CSV)).is_file():
        raise ConfigError("pipeline.schedule", schedule, "names no file", f"{cfg.CSV}FILE of python -m jaxtrain.schedule --csv=FILE")


# What must stay as it is for a checkpoint to be continued: the model's shape and function, the data's position, the optimizer's state.
_KEPT = ("optimizer.name", "precision.params", "train.seed")  # and all of model and data, but for:
_FREE = (
    *("model.attention_kernel", "model.loss_chunk", "model.init_std", "model.mtp_weight", "data.cache", "data.prefetch"),
    "data.bad_records",  # the corpus's checksum says whether it matters
    *("model.balance_rate", "model.balance_loss", "model.z_loss"),  # DeepSeek-V3 sets the first to 0 towards the end
)


def refuse_to_continue(old: Config, new: Config) -> None:
    """Raises ConfigError naming the first field in which a checkpoint's config and the one to resume it with may not differ."""
    old, new = old.resolve(), new.resolve()
    for path in sorted(cfg.fields(), key=lambda path: not path.startswith("data.")):  # model.max_positions follows data's
        if path == "model.max_positions" and new.model.positions == "rotary":
            continue
        kept = path in _KEPT or (path.startswith(("model.", "data.")) and path not in _FREE)
        if kept and cfg.get(old, path) != cfg.get(new, path):
            raise _cannot_continue(path, old, new)
    if bool(old.train.diloco_inner_steps) != bool(new.train.diloco_inner_steps):
        raise _cannot_continue("train.diloco_inner_steps", old, new)
    if new.train.diloco_inner_steps and old.mesh.replica != new.mesh.replica:  # each has parameters of its own
        raise _cannot_continue("mesh.replica", old, new)


def changes(old: Config, new: Config) -> list[str]:
    """What differs between a checkpoint's config and the one that continues it: lines such as "optimizer.learning_rate: 0.003 → 0.1".

    Both with their dependent defaults and the mesh's sizes filled in. A setting that the checkpoint does not know had its default.
    """
    old, new = old.resolve(), new.resolve()
    pairs = ((path, cfg.get(old, path), cfg.get(new, path)) for path in cfg.fields())
    return [f"{path}: {_as_flag(before)} → {_as_flag(after)}" for path, before, after in pairs if before != after]


def _as_flag(value: Any) -> str:
    """A value as it is written in a flag."""
    if isinstance(value, tuple):
        return ",".join(map(_as_flag, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def _cannot_continue(path: str, old: Config, new: Config) -> ConfigError:
    rule = f"cannot continue a checkpoint of {path}={cfg.get(old, path)!r}"
    return ConfigError(path, cfg.get(new, path), rule, f"{cfg.get(old, path)!r} or another --workdir")


# --- the search ------------------------------------------------------------------------------------------------------------------


def _raise_first(config: Config, devices: int | None) -> None:
    broken = _first_broken(config, devices)
    if broken:
        rank, found = broken
        raise ConfigError(found.field, cfg.get(config, found.field), found.rule, _nearest(config, devices, rank, found))


def _first_broken(config: Config, devices: int | None) -> tuple[int, Broken] | None:
    """The first broken rule and its rank; settings on their own come before rules between them."""
    for rank, (path, field) in enumerate(cfg.fields().items()):
        broken = _own_rule(path, field, cfg.get(config, path))
        if broken:
            return rank, broken
    for rank, early in enumerate((*config_mesh_rules.EARLY_RULES, *config_rules.EARLY_RULES), 1000):
        broken = early(config, devices)
        if broken:
            return rank, broken
    resolved = filled(config, devices).resolve()
    for rank, rule in enumerate((*config_rules.RULES, *config_mesh_rules.RULES), 2000):
        broken = rule(resolved)
        if broken:
            return rank, broken
    return None


def _nearest(config: Config, devices: int | None, rank: int, broken: Broken) -> str:
    """What to use instead, as text: values of the field itself if any works, or several settings; tried, not guessed."""
    works, change = _mend(config, devices, rank, broken)
    own = [c[broken.field] for c in works if list(c) == [broken.field]]
    if own:
        return _listed(sorted(own) if isinstance(own[0], int) else own)
    return " ".join(f"{path}={value!r}" for path, value in change.items())


def _mend(config: Config, devices: int | None, rank: int, broken: Broken) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the nearest fixes after which every rule is kept, one change that mends all).

    Where no fix of this rule is enough, the change is its nearest fix together with what mends the next broken rule, and so on.
    """
    works: list[dict[str, Any]] = []
    best: tuple[float, dict[str, Any]] = (rank, {})
    for change in itertools.islice(broken.fixes, TRIES):
        first = _first_broken(cfg.replace(config, change), devices)
        if first is None:
            works.append(change)
        elif first[0] > best[0]:
            best = first[0], change
        if len(works) == broken.show:
            break
    if works or not best[1]:
        return works, works[0] if works else {}
    config = cfg.replace(config, best[1])
    following = _first_broken(config, devices)
    assert following is not None
    return [], best[1] | _mend(config, devices, *following)[1]


def _listed(values: list) -> str:
    """[1, 2, 4] → "1, 2 or 4"."""
    words = [repr(v) for v in values]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# --- a setting on its own --------------------------------------------------------------------------------------------------------


def _own_rule(path: str, field: dataclasses.Field, value: Any) -> Broken | None:
    """A setting's type, choices and bounds."""
    try:
        cfg.convert(path, value)
    except ConfigError as error:
        return Broken(path, error.rule, values_for(path, [cfg.retyped(path, value), field.default]))
    choices, prefix, bounds = (field.metadata[name] for name in ("choices", "prefix", "bounds"))
    if choices:
        return None if value in choices or (prefix and value.startswith(prefix)) else _bad_choice(path, value, choices)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _out_of_bounds(path, field, value, bounds)
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


def _out_of_bounds(path: str, field: dataclasses.Field, value: float, bounds: dict[str, float | None]) -> Broken | None:
    whole = field.type is int
    if whole and abs(value) > cfg.LARGEST_INT:
        return Broken(path, f"is larger than {cfg.LARGEST_INT}", values_for(path, [cfg.LARGEST_INT, field.default]))
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
    limits: list[Any] = [limit for limit in (low, high, field.default) if limit is not None]
    ends = sorted((int(limit) if whole else float(limit) for limit in limits), key=lambda limit: abs(limit - value))
    more = range(int(low or 0), int(low or 0) + 1024) if whole else ()
    return Broken(path, rule, values_for(path, [*ends, *more]))
