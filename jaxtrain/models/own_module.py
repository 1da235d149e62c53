"""A layer or a mixer of one's own (`model.block`, `model.mixer`): any Flax NNX module, as a part of
the model.

    constructor_of(cfg)   the class that a setting names, with its settings; no module yet
    OwnModule(cfg)        the module as ours are: Parameters with Specs, `(x, positions, segments)`

A module is constructed in the trace of each call, and its parameters are then set to those of the
model. So what a constructor computes beside parameters, such as tables of frequencies, is an
ordinary constant of the trace; the initial values that it draws there are not used.

Shape suffixes: B batch, T tokens, D width, I and O inputs and outputs of a product.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from jaxtrain.config import ResolvedModel
from jaxtrain.config.errors import cut, nearly, one_line
from jaxtrain.config.groups.layer_kinds import models_of_kinds
from jaxtrain.config.own_code import OwnCodeError, digest, line_in, load
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.layers import (
    GATHERED,
    SPLIT,
    column_products,
    gather_sequence,
    matmul,
    matrix,
    row_product,
)
from jaxtrain.models.spec import CacheArray, Spec, parameter
from jaxtrain.parallel.pinned import pinned
from jaxtrain.parallel.tensor import flat

# Names of a parameter's dimensions: those that every device has in full, or `model` splits. Others
# belong to the batch, the pipeline or experts, whose collectives a layer would have to write.
REPLICATED = "latent"
AXES = ("width", "heads", "kv_heads", "mlp", "latent", "position")
# flax's own metadata for the names of an array's dimensions, by version
NAMES_OF_AXES = ("axes", "out_sharding", "sharding_names", "sharding")

Path = tuple[str, ...]  # of a parameter in a module
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)  # of a module's initial values


@dataclasses.dataclass(frozen=True)
class Constructor:
    """A class of one's own with its arguments, `cls(width, rngs=…, **settings)`."""

    cls: type
    width: int
    settings: tuple[tuple[str, Any], ...]

    def __call__(self, key: jax.Array) -> nnx.Module:
        """The module with the initial values of a key, uint32 [2]."""
        rngs = nnx.Rngs(jax.random.wrap_key_data(key, impl="threefry2x32"))
        # flax would lay a parameter with names of axes onto mesh axes of these names.
        with nnx.use_eager_sharding(False), errors_of(self.cls, "cannot be constructed"):
            return self.cls(self.width, rngs=rngs, **dict(self.settings))

    def initial_value(self, path: Path, key: jax.Array) -> jax.Array:
        """The float32 initial value of one parameter, by the key of its module."""
        return parameters(self(key))[path].get_raw_value().astype(jnp.float32)

    @functools.cached_property
    def specs(self) -> dict[Path, Spec]:
        """The parameters' specifications. Raises OwnCodeError for one that cannot be trained."""
        params: dict[Path, nnx.Param] = {}

        def values(key: jax.Array) -> dict:
            params.update(parameters(self(key)))
            return {path: param.get_raw_value() for path, param in params.items()}

        shapes = jax.eval_shape(values, KEY)
        return {path: self._spec(path, shapes[path], params[path]) for path in shapes}

    def _spec(self, path: Path, array: jax.ShapeDtypeStruct, param: nnx.Param) -> Spec:
        metadata, name = param.get_metadata(), ".".join(path)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise OwnCodeError(
                f"has a parameter {name} of {array.dtype}, which no optimizer can train: make it "
                "an nnx.Variable"
            )
        named = next((metadata[key] for key in NAMES_OF_AXES if metadata.get(key)), None)
        # The rule for a parameter that names none: every device of `model` has all of it.
        usual = tuple("width" if size == self.width else REPLICATED for size in array.shape)
        axes = tuple(axis or REPLICATED for axis in named or usual)
        if len(axes) != len(array.shape):
            raise OwnCodeError(
                f"has a parameter {name} of shape {array.shape} with {len(axes)} axes, {axes}"
            )
        if unknown := [axis for axis in axes if axis not in AXES]:
            near = nearly(str(unknown[0]), AXES, 0.6)
            known = f"{near}?" if near else f"they are {', '.join(AXES)}"
            raise OwnCodeError(
                f"has a parameter {name} with the unknown axis {unknown[0]!r} ({known})"
            )
        spec = Spec(
            array.shape,
            axes,
            init=functools.partial(self.initial_value, path),
            exact=bool(metadata.get("exact")),
            product=bool(metadata.get("product")),
            vectors=bool(metadata.get("vectors")),
        )
        if sum(spec.split) > 1:
            raise OwnCodeError(
                f"has a parameter {name} with axes {axes}, and mesh.model can split one of them"
            )
        return spec


def parameters(module: nnx.Module) -> dict[Path, nnx.Param]:
    """The parameters of a module by their paths; one that is shared, once."""
    return {
        tuple(map(str, path)): node
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Param)
    }


class OwnModule(nnx.Module):
    """A module of one's own in the place of a block, or of its attention. It gets all tokens, and
    what it returns is split along the sequence, where `model` splits that."""

    def __init__(self, cfg: ResolvedModel):
        self.construct = constructor_of(cfg)
        of_paths = {path: parameter(spec) for path, spec in self.construct.specs.items()}
        self.own = _as_modules(traverse_util.unflatten_dict(of_paths))

    def __call__(self, x_BTD, positions_BT, segments_BT=None, noise_BT=None) -> jax.Array:
        """[B, T, D] → [B, T, D]. noise_BT is not read: the module has no dropout of ours."""

        def run(x_BTD, positions_BT, segments_BT, *values) -> jax.Array:
            return self.module(values)(x_BTD, positions_BT, segments_BT)

        run = pinned(run, [None, None, None, *map(_split_dim, self.construct.specs.values())])
        y_BTD = run(gather_sequence(x_BTD), positions_BT, segments_BT, *self._values)
        return constrain(constrain(y_BTD, GATHERED), SPLIT)

    def cache_arrays(self, batch: int, slots: int, dtype: jnp.dtype) -> Any:
        """The arrays of the module's own cache, with which devices of `model` have copies."""
        of_module: Any = lambda key: self.construct(key)
        shapes = jax.eval_shape(lambda key: of_module(key).cache_arrays(batch, slots, dtype), KEY)
        axes = lambda a: ("batch", *(None,) * (a.ndim - 1))
        return jax.tree.map(lambda a: CacheArray(a.shape, axes(a), a.dtype), shapes)

    def cached(self, x_BTD, positions_BT, cache, start, count):
        """Returns (the output [B, T, D], the cache with these tokens), as a block's `cached`."""
        module: Any = self.module(self._values)
        y_BTD, cache = module.cached(gather_sequence(x_BTD), positions_BT, cache, start, count)
        return constrain(y_BTD, SPLIT), cache

    @property
    def _values(self) -> list:
        """The model's values of the parameters, in the order of specs."""
        of_model = parameters(self.own)
        return [of_model[path].get_raw_value() for path in self.construct.specs]

    def module(self, values: Sequence) -> nnx.Module:
        """The module of one's own, with these values of its parameters, in the order of specs."""
        module = self.construct(jnp.zeros(2, jnp.uint32))
        of_module = parameters(module)
        for (path, spec), value in zip(self.construct.specs.items(), values, strict=True):
            of_module[path].set_raw_value(value)
            of_module[path].set_metadata("spec", spec)  # for `product`
        return module


def _split_dim(spec: Spec) -> int | None:
    """The dimension of a parameter that `model` splits, if any."""
    return spec.split.index(True) if any(spec.split) else None


def _as_modules(tree: dict[str, Any]) -> nnx.Dict:
    return nnx.Dict({k: _as_modules(v) if isinstance(v, dict) else v for k, v in tree.items()})


def product(x_BTI: jax.Array, weight_IO: nnx.Param) -> jax.Array:
    """x @ weight, [B, T, O], of FP8 where `precision.matmul` says so and the weight is marked:
    `nnx.Param(…, product=True)`. Unmarked ones are multiplied in the type of x, as by `@`."""
    spec, weight = weight_IO.get_metadata().get("spec"), matrix(weight_IO, x_BTI)
    split = spec.split if spec else ()
    if split == (False, True):
        return column_products(x_BTI, (weight,))[0]
    if split == (True, False):
        return row_product(x_BTI, weight)
    return matmul(flat(x_BTI), weight).reshape(*x_BTI.shape[:-1], -1)


# --- classes and their settings -------------------------------------------------------------------


class SettingsError(OwnCodeError):
    """A fault of `model.block_settings`, to be read after it and its value.

    nearest: the settings with the nearest name that is known; () where there is none
    """

    def __init__(self, fault: str, nearest: tuple[str, ...] = ()):
        self.nearest = nearest
        super().__init__(fault)


def constructor_of(cfg: ResolvedModel) -> Constructor:
    """The constructor of `model.block` or `model.mixer`. Raises OwnCodeError for what is no module,
    and SettingsError."""
    cls = load(cfg.block or cfg.mixer)
    if not (inspect.isclass(cls) and issubclass(cls, nnx.Module)):
        raise OwnCodeError(f"names {cut(repr(cls))}, which is no class of flax.nnx.Module")
    return _constructor(cls, cfg.width, cfg.block_settings)


def own_layers(model: ResolvedModel) -> dict[str, Constructor]:
    """The settings of layers of one's own in a model, each with its value, and the constructors.
    Raises OwnCodeError."""
    constructors = {}
    for of_layer in models_of_kinds(model).values():
        name = "block" if of_layer.block else "mixer"
        if text := getattr(of_layer, name):
            constructors[f"model.{name}={text}"] = constructor_of(of_layer)
    return constructors


def describe(model: ResolvedModel) -> list[str]:
    """A line for each layer of one's own: its file, and its matrices that `model` does not
    split."""
    lines = []
    for setting, construct in own_layers(model).items():
        file, code = inspect.getfile(construct.cls), digest(setting.partition("=")[2])
        specs = construct.specs.items()
        unsplit = [".".join(path) for path, s in specs if s.matrix and _split_dim(s) is None]
        copies = f"; mesh.model splits all matrices but {', '.join(unsplit)}" if unsplit else ""
        lines.append(f"{setting}: {file}{f' (sha256 {code}…)' if code else ''}{copies}")
    return lines


def without_cache(model: ResolvedModel) -> str:
    """The first setting of a layer of one's own that has no cache for generation; "" if there is
    none. Raises OwnCodeError."""
    has = lambda cls: hasattr(cls, "cached") and hasattr(cls, "cache_arrays")
    layers = own_layers(model).items()
    return next((setting for setting, construct in layers if not has(construct.cls)), "")


@functools.lru_cache(2**6)
def _constructor(cls: type, width: int, texts: tuple[str, ...]) -> Constructor:
    return Constructor(cls, width, tuple(_settings(cls, texts).items()))


def _settings(cls: type, texts: Sequence[str]) -> dict[str, Any]:
    """The settings of these texts, NAME=VALUE, by the class's dataclass `Settings`, with those that
    have defaults; without one, by the arguments of its constructor."""
    record: Any = getattr(cls, "Settings", None)
    constructor: Any = record or inspect.getattr_static(cls, "__init__")
    with errors_of(cls, "has annotations that cannot be read"):
        hints = typing.get_type_hints(constructor)
    known = dict(inspect.signature(constructor).parameters)
    if not record:  # (self, width, …)
        known = {name: each for name, each in [*known.items()][2:] if name != "rngs"}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"has {text!r}, which is not NAME=VALUE")
        setting = f"model.block_settings.{name}={value!r}"
        if name not in known and not takes_any:
            near = nearly(name, known, 0.6)
            others = f"{near}?" if near else f"it has {', '.join(known) or 'none'}"
            fault = f"has {setting}, which {cls.__name__} does not know ({others})"
            instead = (f"{near}={value}" if each == text else each for each in texts)
            raise SettingsError(fault, tuple(instead) if near else ())
        try:
            default = known[name].default if name in known else inspect.Parameter.empty
            values[name] = _value(value, hints.get(name, type(default)))
        except ValueError as error:
            raise SettingsError(f"has {setting}, which is {error}") from None
    for name, each in known.items():
        needed = each.default is each.empty and each.kind is not each.VAR_KEYWORD
        if needed and name not in values:
            raise SettingsError(f"lacks model.block_settings.{name}, which has no default")
    if not record:
        return values
    try:
        checked = record(**values)
    except Exception as error:
        rule = one_line(str(error)) or type(error).__name__
        raise SettingsError(f"is refused by {cls.__name__}: {rule}") from None
    return {each.name: getattr(checked, each.name) for each in dataclasses.fields(checked)}


def _value(text: str, kind: Any) -> Any:
    """The value of a text by the type of its setting, which of a union is the first one. Raises
    ValueError("no int")."""
    inner = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    outer = typing.get_origin(kind) or kind
    if outer in (typing.Union, types.UnionType):
        return _value(text, inner[0])
    if outer in (tuple, list):
        item = inner[0] if inner else str
        return outer(_value(part, item) for part in re.split("[+,]", text) if part)
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text) if kind in (int, float) else text
    except (KeyError, ValueError):
        raise ValueError(f"no {kind.__name__}") from None


@contextlib.contextmanager
def errors_of(cls: type, fails: str) -> Iterator[None]:
    """Turns any error of the class's code into one line, with the last line of its file."""
    try:
        yield
    except OwnCodeError:
        raise
    except Exception as error:
        file = inspect.getfile(cls)
        line = line_in(file, error)
        where = f"{os.path.basename(file)}{line} raises " if line else ""
        text = str(error).strip().partition("\n")[0]
        raise OwnCodeError(f"{fails}: {where}{type(error).__name__}: {cut(text)}") from None
