"""The rules that a config must keep, one function each, and the search for the nearest setting that keeps them all.

`check(config)` before jax is imported, `check_files` beside it, `check_devices` once the number of devices is known, and
`refuse_to_continue` before a checkpoint is resumed. A setting's own type, bounds and choices stand at its field in config.py.
Standard library only.
"""

import dataclasses
import difflib
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError

AXES = tuple(f.name for f in dataclasses.fields(cfg.MeshConfig))
BYTE_VOCABULARY = 257  # 256 bytes and the document separator
TRIES = 2000  # candidates looked at for a nearest setting: a check takes some 20 µs


@dataclasses.dataclass(frozen=True)
class Broken:
    """A broken rule: the setting at fault, the rule (read after "field=value"), and changes that may mend it, nearest first."""

    field: str
    rule: str
    fixes: Iterable[dict[str, Any]] = ()
    show: int = 1  # how many settings that work the message may list


def check(config: Config) -> None:
    """Raises ConfigError for the first rule that is broken, of all that can be known without devices and files."""
    _raise_first(config, None)


def check_devices(config: Config, device_count: int) -> Config:
    """The config with the mesh's -1 filled in for this number of devices, and every rule checked with it.

    Raises ConfigError where the mesh does not use all the devices, or the batch does not divide over them.
    """
    _raise_first(config, device_count)
    return _filled(config, device_count)


def check_files(config: Config) -> None:
    """Raises ConfigError if the corpus or the tokenizer is not there."""
    for path, word in (("data.source", "stdlib"), ("data.tokenizer", "bytes")):
        value = cfg.get(config, path)
        if value == word or (path, value) == ("data.tokenizer", "none") or (value and pathlib.Path(value).expanduser().exists()):
            continue
        folder = pathlib.Path(value).expanduser().parent
        names = {word: word} | ({p.name: str(p) for p in folder.iterdir()} if folder.is_dir() else {})
        near = difflib.get_close_matches(pathlib.Path(value).name, names, n=1) or [word]
        raise ConfigError(path, value, f"is neither {word!r} nor an existing path", repr(names[near[0]]))
    schedule = config.pipeline.schedule
    if schedule.startswith(cfg.CSV) and not pathlib.Path(schedule.removeprefix(cfg.CSV)).is_file():
        raise ConfigError("pipeline.schedule", schedule, "names no file", f"{cfg.CSV}FILE of python -m jaxtrain.schedule --csv=FILE")


# What must stay as it is for a checkpoint to be continued: the model's shape and function, the data's position, the optimizer's state.
_KEPT = ("optimizer.name", "precision.params", "train.seed")  # and all of model and data, but for:
_FREE = ("model.attention", "model.loss_chunk", "model.init_std", "data.cache", "data.prefetch")


def refuse_to_continue(old: Config, new: Config) -> None:
    """Raises ConfigError naming the first field in which a checkpoint's config and the one to resume it with may not differ."""
    old, new = old.resolve(), new.resolve()
    for path in sorted(cfg.fields(), key=lambda path: not path.startswith("data.")):  # model.max_positions follows data's
        if path == "model.max_positions" and new.model.positions == "rotary":
            continue
        kept = path in _KEPT or (path.startswith(("model.", "data.")) and path not in _FREE)
        if kept and cfg.get(old, path) != cfg.get(new, path):
            rule = f"cannot continue a checkpoint of {path}={cfg.get(old, path)!r}"
            raise ConfigError(path, cfg.get(new, path), rule, f"{cfg.get(old, path)!r} or another --workdir")


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
    for rank, early in enumerate(EARLY_RULES, 1000):
        broken = early(config, devices)
        if broken:
            return rank, broken
    resolved = _filled(config, devices).resolve()
    for rank, rule in enumerate(RULES, 2000):
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


def _near(value: int, candidates: Iterable[int]) -> list[int]:
    """Candidates by their distance from a value; of two as near, the smaller first."""
    return sorted(candidates, key=lambda c: (abs(c - value), c))


def _divisors(n: int) -> list[int]:
    """All divisors of n ≥ 1, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _set(path: str, values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Changes of one setting."""
    return ({path: v} for v in values)


# --- a setting on its own --------------------------------------------------------------------------------------------------------


def _own_rule(path: str, field: dataclasses.Field, value: Any) -> Broken | None:
    """A setting's type, choices and bounds."""
    try:
        cfg.convert(path, value)
    except ConfigError as error:
        return Broken(path, error.rule, _set(path, [cfg.retyped(path, value), field.default]))
    choices, prefix, bounds = (field.metadata[name] for name in ("choices", "prefix", "bounds"))
    if choices:
        return None if value in choices or (prefix and value.startswith(prefix)) else _bad_choice(path, value, choices)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _out_of_bounds(path, field, value, bounds)
    if cfg.item_type(field.type) in (int, float):
        if all(math.isfinite(v) and v >= 0 and (v or path == "pipeline.times") for v in value):
            return None
        return Broken(path, "has a number that is not above 0", _set(path, [field.default]))
    if isinstance(value, tuple) and (len(set(value)) < len(value) or "" in value):
        names = tuple(dict.fromkeys(v for v in value if v))
        return Broken(path, "has an empty or repeated name", _set(path, [names, field.default]))
    return None


def _bad_choice(path: str, value: Any, choices: tuple) -> Broken:
    if not isinstance(value, str):
        return Broken(path, f"is not built: the choices are {_listed(list(choices))}", _set(path, _near(value, choices)))
    near = difflib.get_close_matches(value, choices, n=len(choices), cutoff=0.5)
    return Broken(path, "is unknown", _set(path, near or choices), show=1 if near else len(choices))


def _out_of_bounds(path: str, field: dataclasses.Field, value: float, bounds: dict[str, float | None]) -> Broken | None:
    whole = field.type is int
    if whole and abs(value) > cfg.LARGEST_INT:
        return Broken(path, f"is larger than {cfg.LARGEST_INT}", _set(path, [cfg.LARGEST_INT, field.default]))
    if not math.isfinite(value):
        return Broken(path, "is not a finite number", _set(path, [field.default]))
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
    return Broken(path, rule, _set(path, [*ends, *more]))


# --- rules between settings: each takes a resolved config, the mesh's -1 filled in where devices are known -----------------------


def _kv_heads_divide_heads(c: Config) -> Broken | None:
    m = c.model
    if m.heads % m.kv_heads == 0:
        return None
    fixes = _set("model.kv_heads", _near(m.kv_heads, _divisors(m.heads)))
    return Broken("model.kv_heads", f"does not divide model.heads={m.heads}", fixes, show=5)


def _rotary_turns_pairs(c: Config) -> Broken | None:
    m = c.model
    if m.positions != "rotary" or (m.head_dim % 2 == 0 and m.head_dim > 0):
        return None
    fixes = itertools.chain(_set("model.head_dim", [m.head_dim + 1]), _set("model.positions", ["learned"]))
    return Broken("model.head_dim", f"gives heads of {m.head_dim}, and rotary positions turn pairs: it must be even", fixes)


def _positions_cover_sequence(c: Config) -> Broken | None:
    if c.model.positions != "learned" or c.model.max_positions >= c.data.sequence_length:
        return None
    rule = f"is a shorter table than data.sequence_length={c.data.sequence_length}"
    return Broken("model.max_positions", rule, _set("model.max_positions", [c.data.sequence_length]))


def _sample_fits_positions(c: Config) -> Broken | None:
    if c.model.positions != "learned" or c.train.sample_tokens < c.model.max_positions:
        return None
    rule = f"and a prompt are longer than the learned positions, model.max_positions={c.model.max_positions}"
    return Broken("train.sample_tokens", rule, _set("train.sample_tokens", [c.model.max_positions - 1]))


def _bytes_fit_vocabulary(c: Config) -> Broken | None:
    ready = c.data.source.endswith((".bin", ".npy"))
    if ready or c.data.tokenizer != "bytes" or c.model.vocab_size >= BYTE_VOCABULARY:
        return None
    rule = f"is too small for data.tokenizer='bytes', which has {BYTE_VOCABULARY} tokens"
    return Broken("model.vocab_size", rule, _set("model.vocab_size", [BYTE_VOCABULARY]))


def _masked_fields_are_read(c: Config) -> Broken | None:
    mask, read = c.data.loss_mask, c.data.text_fields
    if not read:
        return Broken("data.text_fields", "names no field to read", _set("data.text_fields", [("text",)]))
    unread = tuple(name for name in mask if name not in read)
    if unread:
        fixes = [{"data.text_fields": unread + read}]
        return Broken("data.loss_mask", f"names {unread[0]!r}, which is not in data.text_fields={read!r}", fixes)
    if set(mask) == set(read):
        return Broken("data.loss_mask", "names all of data.text_fields: no token would have a loss", _set("data.loss_mask", [mask[:-1]]))
    return None


def _model_axis_divides(c: Config) -> Broken | None:
    """Heads and the MLP are cut over `model`, and so is the sequence between the blocks."""
    size, m = c.mesh.model, c.model
    cut = {
        "model.heads": m.heads,
        "model.kv_heads": m.kv_heads,
        "model.mlp_width": m.mlp_width,
        "data.sequence_length": c.data.sequence_length,
    }
    for path, whole in cut.items():
        if size > 0 and whole % size:
            fixes = _set("mesh.model", _near(size, _divisors(math.gcd(*cut.values()))))
            return Broken("mesh.model", f"does not divide {path}={whole}", fixes, show=4)
    return None


def _context_axis_divides(c: Config) -> Broken | None:
    """The sequence is cut into two chunks for each device of `context`, and those over `model`; ulysses cuts heads over both."""
    size, model, m = c.mesh.context, max(c.mesh.model, 1), c.model
    if size <= 1:
        return None
    tokens = c.data.sequence_length
    parts = 2 * size * model
    if tokens % parts:
        over = f", each cut by mesh.model={model}" if model > 1 else ""
        longer = [parts * n for n in (tokens // parts, tokens // parts + 1) if n]
        fits = (n for n in _near(size, _divisors(tokens)) if tokens % (2 * n * model) == 0 or n == 1)
        fixes = itertools.chain(_set("mesh.context", fits), _set("data.sequence_length", longer))
        return Broken(
            "mesh.context", f"makes two chunks a device{over}: {parts} parts, which do not divide data.sequence_length={tokens}", fixes
        )
    heads = math.gcd(m.heads, m.kv_heads)
    if c.parallel.context == "ulysses" and heads % (size * model):
        path, number = ("model.kv_heads", m.kv_heads) if m.heads % (size * model) == 0 else ("model.heads", m.heads)
        over = f"mesh.context={size}" + (f" · mesh.model={model}" if model > 1 else "")
        fits = (n for n in _near(size, _divisors(heads)) if heads % (n * model) == 0 and tokens % (2 * n * model) == 0)
        fixes = itertools.chain([{"parallel.context": "all_gather"}], _set("mesh.context", fits))
        return Broken("parallel.context", f"cuts heads, and {over} does not divide {path}={number}", fixes)
    return None


def _zero_settings_have_a_use(c: Config) -> Broken | None:
    p = c.parallel
    if p.reduce == "microbatch" and p.zero == 0:
        fixes: list[dict[str, Any]] = [{"parallel.reduce": "step"}, {"parallel.zero": 2}]
        return Broken("parallel.reduce", "leaves gradients sharded, and parallel.zero=0 shards nothing", fixes)
    if p.gather == "step" and p.zero != 3:
        fixes = [{"parallel.gather": "layer"}, {"parallel.zero": 3}]
        return Broken("parallel.gather", f"is for parallel.zero=3 alone, not {p.zero}", fixes)
    return None


def _schedule_has_its_repeats(c: Config) -> Broken | None:
    p = c.pipeline
    least, most = cfg.SCHEDULES.get(p.schedule, (0, 0))
    if c.mesh.stage == 1 or cfg.fits_repeats(p.schedule, p.repeats):
        return None
    number = f"exactly {least} chunk{'s'[: least != 1]}" if least == most else f"at least {least} chunks"
    fixes: list[dict[str, Any]] = [{"pipeline.repeats": least}]
    fixes += _set("pipeline.schedule", (name for name in cfg.SCHEDULES if cfg.fits_repeats(name, p.repeats)))
    return Broken("pipeline.repeats", f"does not fit pipeline.schedule={p.schedule!r}, which has {number} on a stage", fixes)


def _table_settings_have_a_use(c: Config) -> Broken | None:
    p = c.pipeline
    if p.memory and p.schedule != "auto":
        fixes: list[dict[str, Any]] = [{"pipeline.memory": 0.0}, {"pipeline.schedule": "auto"}]
        return Broken("pipeline.memory", f"is for pipeline.schedule='auto' alone, not {p.schedule!r}", fixes)
    if p.times and len(p.times) not in (3, 4, 5, 6):
        fixed = (*p.times, 1.0, 1.0, 1.0)[:3] if len(p.times) < 3 else p.times[:6]
        return Broken("pipeline.times", "has to be the times of F, B, W, then message, R, head", _set("pipeline.times", [fixed, ()]))
    if p.times and not all(p.times[:3]):
        return Broken("pipeline.times", "has no time for F, B or W", _set("pipeline.times", [()]))
    return None


def _layers_fill_chunks(c: Config) -> Broken | None:
    p, layers = c.pipeline, c.model.layers
    if p.layer_costs and len(p.layer_costs) != layers:
        return Broken("pipeline.layer_costs", f"has to have a number for each of model.layers={layers}", _set("pipeline.layer_costs", [()]))
    if not p.chunk_layers:
        return None
    if p.layer_costs:
        return Broken("pipeline.chunk_layers", "and pipeline.layer_costs both cut the layers", [{"pipeline.layer_costs": ()}])
    if sum(p.chunk_layers) != layers:
        return Broken("pipeline.chunk_layers", f"is not model.layers={layers} in all", _set("pipeline.chunk_layers", [()]))
    chunks = c.mesh.stage * p.repeats
    if p.repeats and c.mesh.stage > 1 and len(p.chunk_layers) != chunks:
        rule = f"has to have mesh.stage={c.mesh.stage} · pipeline.repeats={p.repeats} = {chunks} numbers"
        return Broken("pipeline.chunk_layers", rule, _set("pipeline.chunk_layers", [()]))
    return None


def _chunks_have_layers(c: Config) -> Broken | None:
    stages, repeats, layers = c.mesh.stage, max(c.pipeline.repeats, 1), c.model.layers
    if stages * repeats <= layers or stages == 1:
        return None
    rule = f"makes more chunks (mesh.stage={stages} · pipeline.repeats={repeats}) than model.layers={layers}"
    least = max(cfg.SCHEDULES.get(c.pipeline.schedule, (1, 0))[0], 1)
    blame, other = ("mesh.stage", "pipeline.repeats") if stages * least > layers else ("pipeline.repeats", "mesh.stage")
    small = {"mesh.stage": layers // repeats, "pipeline.repeats": layers // max(stages, 1)}
    fixes = [change for path in (blame, other) for change in _set(path, range(small[path], 0, -1))]
    return Broken(blame, rule, [*fixes, {"model.layers": stages * repeats}])


def _batch_divides(c: Config) -> Broken | None:
    batch, micro = c.data.batch_size, c.pipeline.microbatches
    axes = {axis: getattr(c.mesh, axis) for axis in ("replica", "data", "expert")}
    shards = math.prod(max(size, 1) for size in axes.values())
    if batch % (shards * micro) == 0:
        return None
    over = "".join(f" × mesh.{axis}={size}" for axis, size in axes.items() if size > 1)
    unit = shards * micro
    multiples = [unit * n for n in (batch // unit, batch // unit + 1) if n > 0]
    whole = _set("data.batch_size", multiples)
    if batch % shards == 0:
        rule = f"{over} does not divide data.batch_size={batch}"
        micros = _set("pipeline.microbatches", _near(micro, _divisors(batch // shards)))
        return Broken("pipeline.microbatches", rule, itertools.chain(micros, whole), show=4)
    micro_text = f" × pipeline.microbatches={micro}" if micro > 1 else ""
    return Broken("data.batch_size", f"is no multiple of {(over + micro_text).removeprefix(' × ')}, that is {unit}", whole, show=2)


def _schedule_fits_steps(c: Config) -> Broken | None:
    o, steps = c.optimizer, c.train.steps
    # A warm-up may outlast a short run, such as a trial of another's recipe; a decay may not begin before it.
    if o.decay_steps and o.schedule != "constant":
        fixes = _set("optimizer.decay_steps", [0])
        return Broken("optimizer.decay_steps", f"is for optimizer.schedule='constant' alone, not {o.schedule!r}", fixes)
    if o.decay_steps and o.warmup_steps + o.decay_steps > steps:
        rule = f"and optimizer.warmup_steps={o.warmup_steps} are more than train.steps={steps}"
        return Broken("optimizer.decay_steps", rule, _set("optimizer.decay_steps", [max(steps - o.warmup_steps, 0)]))
    return None


def _profile_fits_steps(c: Config) -> Broken | None:
    n, steps = c.train.profile_steps, c.train.steps
    if n == 0 or n + 2 <= steps:
        return None
    rule = f"from the third step on are more than train.steps={steps}"
    return Broken("train.profile_steps", rule, _set("train.profile_steps", [max(steps - 2, 0)]))


def _evaluation_has_data(c: Config) -> Broken | None:
    if c.train.eval_every == 0 or c.data.validation_fraction > 0:
        return None
    return Broken("train.eval_every", "needs held-out data, and data.validation_fraction=0", _set("train.eval_every", [0]))


RULES: tuple[Callable[[Config], Broken | None], ...] = (
    _kv_heads_divide_heads,
    _rotary_turns_pairs,
    _positions_cover_sequence,
    _sample_fits_positions,
    _bytes_fit_vocabulary,
    _masked_fields_are_read,
    _context_axis_divides,
    _zero_settings_have_a_use,
    _schedule_has_its_repeats,
    _table_settings_have_a_use,
    _layers_fill_chunks,
    _model_axis_divides,
    _chunks_have_layers,
    _batch_divides,
    _schedule_fits_steps,
    _profile_fits_steps,
    _evaluation_has_data,
)


# --- rules before anything is filled in: the mesh and the devices, if known ------------------------------------------------------


def _filled(config: Config, devices: int | None) -> Config:
    """The config with the mesh's -1 replaced, where the number of devices is known and the others divide it."""
    left = [axis for axis in AXES if getattr(config.mesh, axis) == -1]
    fixed = math.prod(getattr(config.mesh, axis) for axis in AXES if axis not in left)
    if devices is None or len(left) != 1 or fixed < 1 or devices % fixed:
        return config
    return cfg.replace(config, {f"mesh.{left[0]}": devices // fixed})


def _axes_are_sizes(c: Config, devices: int | None) -> Broken | None:
    for axis in AXES:
        if getattr(c.mesh, axis) < 1 and getattr(c.mesh, axis) != -1:
            return Broken(f"mesh.{axis}", "must be at least 1, or -1 for what is left", _set(f"mesh.{axis}", [1, -1]))
    left = [axis for axis in AXES if getattr(c.mesh, axis) == -1]
    if len(left) > 1:
        path = f"mesh.{left[-1]}"
        return Broken(path, f"is the second -1 beside mesh.{left[0]}: one axis may be", _set(path, [1]))
    return None


def _axes_are_built(c: Config, devices: int | None) -> Broken | None:
    if c.mesh.expert == 1:
        return None
    return Broken("mesh.expert", "asks for expert parallelism, which is not built yet", _set("mesh.expert", [1]))


def _head_size_is_whole(c: Config, devices: int | None) -> Broken | None:
    m = c.model
    if m.head_dim or m.width % m.heads == 0:
        return None
    wider = _set("model.width", _near(m.width, range(m.heads, m.width + 8 * m.heads, m.heads)))
    fixes = itertools.chain(_set("model.heads", _near(m.heads, _divisors(m.width))), wider)
    return Broken("model.heads", f"does not divide model.width={m.width}, and model.head_dim=0 means width/heads", fixes, show=4)


def _mesh_uses_devices(config: Config, devices: int | None) -> Broken | None:
    if devices is None:
        return None
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    product = math.prod(fixed.values())
    open_axis = len(fixed) < len(AXES)
    if product == devices or (open_axis and devices % product == 0):
        return None
    big = {axis: size for axis, size in fixed.items() if size > 1} or {"data": fixed.get("data", 1)}
    blame = sorted(big, key=lambda axis: devices % big[axis] == 0)  # those that do not divide by themselves come first
    text = " × ".join(f"mesh.{axis}={size}" for axis, size in big.items())
    what = "does not divide" if open_axis else "is not"
    rule = f"does not fit: {text}{f' = {product}' if len(big) > 1 else ''} {what} the {devices} device{'s'[: devices != 1]}"
    return Broken(f"mesh.{blame[0]}", rule, _mesh_fixes(blame, fixed, devices), show=4)


def _mesh_fixes(blame: list[str], fixed: dict[str, int], devices: int) -> Iterator[dict[str, Any]]:
    """Other sizes for one axis, then for two, …, by how far they are from what was asked for."""
    more = [axis for axis in ("data", "stage", "model") if axis in fixed and axis not in blame]
    for number in range(1, len(blame) + 1):
        for axes in itertools.combinations([*blame, *(more if number == 1 else ())], number):
            choices = itertools.product(*(_near(fixed[axis], _divisors(devices)) for axis in axes))
            for sizes in choices:
                if devices % math.prod(sizes) == 0:
                    yield {f"mesh.{axis}": size for axis, size in zip(axes, sizes, strict=True)}


EARLY_RULES: tuple[Callable[[Config, int | None], Broken | None], ...] = (
    _axes_are_sizes,
    _axes_are_built,
    _head_size_is_whole,
    _mesh_uses_devices,
)
