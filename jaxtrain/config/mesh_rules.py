"""Rules about the mesh: the sizes of its axes, what they cut, and how they are used. Standard
library only."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, ModelConfig
from jaxtrain.config.elastic import fitted
from jaxtrain.config.rules import Broken, EarlyRule, Rule, divisors, near, values_for

AXES = tuple(f.name for f in dataclasses.fields(cfg.MeshConfig) if f.type is int)


def filled(config: Config, devices: int | None) -> Config:
    """The config with the mesh's -1 replaced, and with the sizes of an elastic mesh that fit, where
    the number of devices is known."""
    if config.mesh.elastic and devices:
        config = fitted(config, devices)
    left = [axis for axis in AXES if getattr(config.mesh, axis) == -1]
    fixed = math.prod(getattr(config.mesh, axis) for axis in AXES if axis not in left)
    if devices is None or len(left) != 1 or fixed < 1 or devices % fixed:
        return config
    return cfg.replace(config, {f"mesh.{left[0]}": devices // fixed})


def _axes_are_sizes(c: Config, devices: int | None) -> Broken | None:
    for axis in AXES:
        if getattr(c.mesh, axis) < 1 and getattr(c.mesh, axis) != -1:
            return Broken(
                f"mesh.{axis}",
                "must be at least 1, or -1 for what is left",
                values_for(f"mesh.{axis}", [1, -1]),
            )
    left = [axis for axis in AXES if getattr(c.mesh, axis) == -1]
    if len(left) > 1:
        path = f"mesh.{left[-1]}"
        return Broken(
            path, f"is the second -1 beside mesh.{left[0]}: one axis may be", values_for(path, [1])
        )
    return None


def _mesh_uses_devices(config: Config, devices: int | None) -> Broken | None:
    if devices is None:
        return None
    config = filled(config, devices)
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    product = math.prod(fixed.values())
    open_axis = len(fixed) < len(AXES)
    if product == devices or (open_axis and devices % product == 0):
        return None
    big = {axis: size for axis, size in fixed.items() if size > 1} or {"data": fixed.get("data", 1)}
    # those that do not divide by themselves come first
    blame = sorted(big, key=lambda axis: devices % big[axis] == 0)
    text = " × ".join(f"mesh.{axis}={size}" for axis, size in big.items())
    what = "does not divide" if open_axis else "is not"
    rule = (
        f"does not fit: {text}{f' = {product}' if len(big) > 1 else ''} {what} the {devices} "
        f"device{'s'[: devices != 1]}"
    )
    return Broken(f"mesh.{blame[0]}", rule, _mesh_fixes(blame, fixed, devices), show=4)


def _mesh_fixes(blame: list[str], fixed: dict[str, int], devices: int) -> Iterator[dict[str, Any]]:
    """Other sizes for one axis, then for two, …, by how far they are from what was asked for."""
    other_axes = [
        axis for axis in ("data", "stage", "model") if axis in fixed and axis not in blame
    ]
    for number in range(1, len(blame) + 1):
        for axes in itertools.combinations([*blame, *(other_axes if number == 1 else ())], number):
            choices = itertools.product(*(near(fixed[axis], divisors(devices)) for axis in axes))
            for sizes in choices:
                if devices % math.prod(sizes) == 0:
                    yield {f"mesh.{axis}": size for axis, size in zip(axes, sizes, strict=True)}


def _context_axis_divides(c: Config) -> Broken | None:
    """The sequence is cut into two chunks for each device of `context`, and those over `model`;
    ulysses cuts heads over both."""
    size, model, m = c.mesh.context, max(c.mesh.model, 1), c.model
    if size <= 1:
        return None
    tokens = c.data.sequence_length
    parts = 2 * size * model
    if tokens % parts:
        over = f", each cut by mesh.model={model}" if model > 1 else ""
        longer = [parts * n for n in (tokens // parts, tokens // parts + 1) if n]
        fits = (n for n in near(size, divisors(tokens)) if tokens % (2 * n * model) == 0 or n == 1)
        fixes = itertools.chain(
            values_for("mesh.context", fits), values_for("data.sequence_length", longer)
        )
        return Broken(
            "mesh.context",
            f"makes two chunks a device{over}: {parts} parts, which do not divide "
            f"data.sequence_length={tokens}",
            fixes,
        )
    heads = math.gcd(m.heads, m.kv_heads)
    if c.parallel.context == "ulysses" and heads % (size * model):
        path, number = (
            ("model.kv_heads", m.kv_heads)
            if m.heads % (size * model) == 0
            else ("model.heads", m.heads)
        )
        over = f"mesh.context={size}" + (f" · mesh.model={model}" if model > 1 else "")
        fits = (
            n
            for n in near(size, divisors(heads))
            if heads % (n * model) == 0 and tokens % (2 * n * model) == 0
        )
        fixes = itertools.chain(
            [{"parallel.context": "all_gather"}], values_for("mesh.context", fits)
        )
        return Broken(
            "parallel.context", f"cuts heads, and {over} does not divide {path}={number}", fixes
        )
    return None


def kv_heads_fit(m: ModelConfig, size: int) -> bool:
    """Whether `size` devices of the model axis split the key/value heads of a resolved model, or
    share each of them evenly."""
    return m.kv_heads % size == 0 or (
        size % m.kv_heads == 0 and m.head_dim % (size // m.kv_heads) == 0
    )


def mlp_widths(m: cfg.ModelConfig) -> dict[str, int]:
    """Field of a model → the columns of its MLPs that the model axis cuts."""
    names = ["expert_width"] * bool(m.experts) + ["mlp_width"] * (
        not m.experts or m.dense_layers > 0
    )
    return {name: getattr(m, name) for name in names}


def _ring_is_all_there(c: Config) -> Broken | None:
    """Keys go round by permutes, which all devices have to run together."""
    if c.parallel.context != "ring" or c.mesh.context in (1, -1):
        return None
    if c.mesh.stage > 1:
        rule = f"is for mesh.stage=1, not {c.mesh.stage}: stages do not attend together"
        return Broken(
            "parallel.context",
            rule,
            values_for("parallel.context", ["all_gather", "ulysses"]),
            show=2,
        )
    return None


def _model_axis_divides(c: Config) -> Broken | None:
    """Heads and the MLP are cut over `model`, and so is the sequence between the blocks."""
    size, m = c.mesh.model, c.model
    cut = {"model.heads": m.heads, **{f"model.{name}": n for name, n in mlp_widths(m).items()}}
    cut["data.sequence_length"] = c.data.sequence_length
    fixes = values_for(
        "mesh.model",
        (n for n in near(size, divisors(math.gcd(*cut.values()))) if kv_heads_fit(m, n)),
    )
    for path, whole in cut.items():
        if size > 0 and whole % size:
            return Broken("mesh.model", f"does not divide {path}={whole}", fixes, show=4)
    if size > 0 and not kv_heads_fit(m, size):
        rule = f"neither divides model.kv_heads={m.kv_heads} nor is a multiple of it"
        if size % m.kv_heads == 0:
            rule = (
                f"makes {size // m.kv_heads} devices share a head, which does not divide "
                f"model.head_dim={m.head_dim}"
            )
        return Broken("mesh.model", rule, fixes, show=4)
    return None


def _expert_axis_divides(c: Config) -> Broken | None:
    size, experts = c.mesh.expert, c.model.experts
    if size <= 1 or (experts and experts % size == 0):
        return None
    if not experts:
        return Broken(
            "mesh.expert",
            "splits experts, and model.experts=0",
            [{"mesh.expert": 1}, {"model.experts": size}],
        )
    fixes = itertools.chain(
        values_for("mesh.expert", near(size, divisors(experts))), [{"model.experts": size}]
    )
    return Broken("mesh.expert", f"does not divide model.experts={experts}", fixes, show=4)


def _gradients_can_be_reduced(c: Config) -> Broken | None:
    p = c.parallel
    if p.reduce == "microbatch" and p.zero == 0:
        fixes: list[dict[str, Any]] = [{"parallel.reduce": "step"}, {"parallel.zero": 2}]
        return Broken(
            "parallel.reduce", "leaves gradients sharded, and parallel.zero=0 shards nothing", fixes
        )
    return None


def _replicas_keep_their_state(c: Config) -> Broken | None:
    steps, offload = c.train.diloco_inner_steps, c.parallel.offload
    if not steps or offload not in ("optimizer", "both"):
        return None
    fixes: list[dict[str, Any]] = [
        {"parallel.offload": "activations" if offload == "both" else "none"},
        {"train.diloco_inner_steps": 0},
    ]
    rule = (
        "moves the optimizer's state of replicas that train apart, "
        f"train.diloco_inner_steps={steps}, which stays on the devices"
    )
    return Broken("parallel.offload", rule, fixes)


def _replicas_exchange(c: Config) -> Broken | None:
    path, steps = "train.diloco_inner_steps", c.train.diloco_inner_steps
    if steps and c.mesh.replica == 1:
        fixes: list[dict[str, Any]] = [{path: 0}, {"mesh.replica": 2}]
        return Broken(path, "is for replicas that train apart, and mesh.replica=1", fixes)
    return None


def _batch_divides(c: Config) -> Broken | None:
    batch, micro = c.data.batch_size, c.pipeline.microbatches
    axes = {axis: getattr(c.mesh, axis) for axis in ("replica", "data", "expert")}
    shards = math.prod(max(size, 1) for size in axes.values())
    if batch % (shards * micro) == 0:
        return None
    over = "".join(f" × mesh.{axis}={size}" for axis, size in axes.items() if size > 1)
    unit = shards * micro
    multiples = [unit * n for n in (batch // unit, batch // unit + 1) if n > 0]
    whole = values_for("data.batch_size", multiples)
    if batch % shards == 0:
        rule = f"{over} does not divide data.batch_size={batch}"
        micros = values_for("pipeline.microbatches", near(micro, divisors(batch // shards)))
        return Broken("pipeline.microbatches", rule, itertools.chain(micros, whole), show=4)
    micro_text = f" × pipeline.microbatches={micro}" if micro > 1 else ""
    return Broken(
        "data.batch_size",
        f"is no multiple of {(over + micro_text).removeprefix(' × ')}, that is {unit}",
        whole,
        show=2,
    )


EARLY_RULES: tuple[EarlyRule, ...] = (_axes_are_sizes, _mesh_uses_devices)
RULES: tuple[Rule, ...] = (
    _context_axis_divides,
    _ring_is_all_there,
    _expert_axis_divides,
    _model_axis_divides,
    _gradients_can_be_reduced,
    _replicas_exchange,
    _replicas_keep_their_state,
    _batch_divides,
)
