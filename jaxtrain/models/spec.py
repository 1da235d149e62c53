"""The specification of a parameter, from which its initial values, its sharding, its checkpoint and
the parameter count follow."""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.devices.mesh import MODEL
from jaxtrain.devices.sharding import RULES, Axes

Module = TypeVar("Module", bound=nnx.Module)
TABLES = ("vocab", "staged_vocab", "position")  # axes whose rows are looked up, or scored


@dataclasses.dataclass(frozen=True)
class Spec:
    """The shape, logical axes, initial values and use of one parameter.

    shape:    as stored and counted; a vocabulary dimension without its padding
    axes:     a logical axis name for each dimension (sharding.RULES)
    std:      standard deviation of its normal initial values; None with `constant`
    constant: initial value where it is not random
    init:     the module's own initial values, float32 of `shape` by a key, uint32 [2]: those of one
        module have one key. In the place of `std` and `constant`
    padded:   shape as held in memory; that of `shape` if not given
    exact:    a matrix that is used in float32, whatever the compute type
    product:  a matrix whose products may be of FP8 (parallel/fp8.py)
    counts:   its "gradient" is a number of tokens, by which the step moves it
        (training/update/balance.py)
    vectors:  each last dimension is a vector of its own, such as an expert's bias
    columns:  where several matrices stand side by side, the columns of each; they repeat to the end
        of the last dimension, as keys and values do in each head
    mup_rate: μP's factor on updates whose numbers are of the learning rate's size
        (models/mup.py)
    mup_size: μP's factor on the initial values, which `std` or `constant` has already

    Raises ValueError for axes that do not fit the shape, and for padding of any dimension but the
    first.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    std: float | None = None
    constant: float = 0.0
    init: Callable[[jax.Array], jax.Array] | None = dataclasses.field(default=None, compare=False)
    padded: tuple[int, ...] = ()
    exact: bool = False
    product: bool = False
    counts: bool = False
    vectors: bool = False
    columns: tuple[int, ...] = ()
    mup_rate: float = 1.0
    mup_size: float = 1.0

    def __post_init__(self):
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} axis names for a parameter of shape {self.shape}")
        object.__setattr__(self, "padded", self.padded or self.shape)
        if self.padded[1:] != self.shape[1:]:
            raise ValueError(
                f"only the first dimension of {self.shape} can be padded, not to {self.padded}"
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def split(self) -> tuple[bool, ...]:
        """For each dimension, whether `model` splits it."""
        return tuple(MODEL in RULES[axis] for axis in self.axes)

    def shards(self, model: int) -> tuple[int, ...]:
        """The parts into which so many devices of `model` split each dimension."""
        return tuple(model if split else 1 for split in self.split)

    @property
    def matrix(self) -> bool:
        """Matrices decay and are cast to the compute type; vectors (norm scales, biases) do
        neither."""
        return len(self.shape) > 1 and not self.vectors

    @property
    def cast(self) -> bool:
        """True for a parameter that is used in the compute type."""
        return self.matrix and not self.exact

    @property
    def orthogonalized(self) -> bool:
        """True for matrices between activations, the ones that Muon updates: not for tables of
        tokens and positions."""
        return self.matrix and self.axes[0] not in TABLES and len(self.shape) - self.batch_dims > 1

    @property
    def batch_dims(self) -> int:
        """The number of leading dimensions that number matrices: 1 for those of experts."""
        return int(self.axes[0] == "experts")

    @property
    def row_dims(self) -> int:
        """The number of dimensions after these that are a matrix's rows. Of more dimensions than
        two, such as [width, heads, head dimension], the width is on a side of its own."""
        dims = self.axes[self.batch_dims :]
        return 1 if dims[0] == "width" else len(dims) - 1

    def draw(self, key: jax.Array) -> jax.Array:
        """Float32 standard normal noise, [*padded]. Padding is zero, and the other values do not
        depend on it."""
        # A random value depends on its row-major index alone, so more rows leave the others as they
        # are, and every device can draw its own: cutting an unpadded array into uneven shards would
        # first make it on every device in full size.
        value = jax.random.normal(key, self.padded, jnp.float32)
        if self.padded == self.shape:
            return value
        return jnp.where(
            jax.lax.broadcasted_iota(jnp.int32, self.padded, 0) < self.shape[0], value, 0.0
        )


@dataclasses.dataclass(frozen=True)
class CacheArray:
    """An array of a layer's cache, which is zero before the first token: its shape [batch, …], its
    logical axes, "batch" first, and its type."""

    shape: tuple[int, ...]
    axes: Axes
    dtype: jnp.dtype


def is_spec(x: object) -> bool:
    """For `is_leaf`: a Spec is a leaf of a tree of specifications."""
    return isinstance(x, Spec)


class Parameter(nnx.Param):
    """A parameter that knows its specification; its value is abstract until real arrays are merged
    in."""


def parameter(spec: Spec) -> Parameter:
    """A module's parameter, not yet materialised."""
    return Parameter(jax.ShapeDtypeStruct(spec.padded, jnp.float32), spec=spec)


def specs(module: nnx.Module) -> dict:
    """The nested dict of Specs of a module's parameters."""
    state = nnx.state(module, Parameter)
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda p: p.get_metadata("spec"), state, is_leaf=lambda p: isinstance(p, Parameter)
        )
    )


def binder(module: Module) -> Callable[[dict], Module]:
    """Returns a function from a nested dict of arrays to the module with these as its parameters.

    The module is built once, outside of any mesh; inside a traced function it is only merged.
    """
    graph, template = nnx.split(module)

    def bind(params: dict) -> Module:
        state = jax.tree.map(lambda v: v, template)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    return bind
