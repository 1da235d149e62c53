"""One specification per parameter: it feeds initialisation, sharding, checkpoints and parameter
counts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a parameter is.

    shape:  as stored and counted; a vocabulary dimension without its padding
    padded: as held in memory
    axes:   a logical axis name for each dimension (sharding.RULES)
    std:    standard deviation of its normal initial values; None with `constant`
    constant: initial value where it is not random
    exact:  a matrix that is used in float32, whatever the compute type
    counts: what is taken for its gradient is a count, by which the step moves it
        (training/balance.py)
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    std: float | None = None
    constant: float = 0.0
    padded: tuple[int, ...] = ()
    exact: bool = False
    counts: bool = False

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
    def matrix(self) -> bool:
        """Matrices decay and are cast to the compute type; vectors (norm scales, biases) do
        neither."""
        return len(self.shape) > 1

    @property
    def cast(self) -> bool:
        """Whether it is used in the compute type."""
        return self.matrix and not self.exact

    def draw(self, key: jax.Array) -> jax.Array:
        """Float32 standard normal noise, [*padded]; padding is zero, and what the rest is does not
        depend on it."""
        # A random value depends on its row-major index alone, so more rows leave the others as they
        # are, and every device can make its own: cutting an unpadded array into uneven shards would
        # make it whole everywhere first.
        value = jax.random.normal(key, self.padded, jnp.float32)
        if self.padded == self.shape:
            return value
        return jnp.where(
            jax.lax.broadcasted_iota(jnp.int32, self.padded, 0) < self.shape[0], value, 0.0
        )


class Parameter(nnx.Param):
    """A parameter that knows its specification; its value is abstract until real arrays are merged
    in."""


def parameter(
    shape, axes, std=None, constant=0.0, padded=(), exact=False, counts=False
) -> Parameter:
    """A module's parameter, not yet materialised."""
    s = Spec(tuple(shape), tuple(axes), std, constant, tuple(padded), exact, counts)
    return Parameter(jax.ShapeDtypeStruct(s.padded, jnp.float32), spec=s)


def specs(module: nnx.Module) -> dict:
    """The nested dict of Specs of a module's parameters."""
    state = nnx.state(module, Parameter)
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda p: p.get_metadata("spec"), state, is_leaf=lambda p: isinstance(p, Parameter)
        )
    )


def functional(module: nnx.Module):
    """module → f(params, *args, method="__call__"): the module's code applied to a nested dict of
    arrays.

    Modules are built here, outside of any mesh; inside a traced function they are only merged.
    """
    graph, template = nnx.split(module)

    def apply(params: dict, *args, method: str = "__call__", **kwargs):
        state = jax.tree.map(lambda v: v, template)
        nnx.replace_by_pure_dict(state, params)
        return getattr(nnx.merge(graph, state), method)(*args, **kwargs)

    return apply
