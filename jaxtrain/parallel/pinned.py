"""A function whose every value has a layout over `model`: for code that knows nothing of meshes.

    pinned(fn, dims)(*args)    fn(*args), each value split along one dimension or on every device

The partitioner alone may move parts of arrays by permutes, where a sequence or a split dimension is
sliced, shifted or joined. In an op of a stage it must not: a permute waits for all devices, and
other stages run other ops (docs/traps.md). So a value is split where its operands are and the
equation works along other dimensions; an equation that works along the split one gets its operands
in full, by an all-gather over `model`. Gradients have the layouts of their values.

dims: for each array the dimension that `model` splits, or None; so in all of this module.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import MODEL, in_manual_region, partitioned
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.parallel.jaxprs import CALLS, bound, inner_jaxpr, scan_sizes, value_of

Dims = list[int | None]

# Equations whose results have the numbers of their operands, or a function of each number.
ELEMENTWISE = frozenset(
    "add add_any sub mul div max min rem neg sign abs exp exp2 log log1p expm1 tanh logistic sin "
    "cos tan sqrt rsqrt cbrt pow integer_pow square erf erf_inv floor ceil round clamp select_n "
    "convert_element_type reduce_precision is_finite stop_gradient copy name and or not xor eq ne "
    "lt le gt ge atan2 sinh cosh".split()
)
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod".split())
ALONG_ONE = frozenset(
    "cumsum cumprod cummax cummin cumlogsumexp concatenate split slice pad dynamic_slice rev "
    "tile".split()
)
# Calls whose equations get layouts one by one; the others have gradients or remat of their own.
ENTERED = frozenset("jit pjit closed_call core_call".split())


class AlongSplit(Exception):
    """An equation that works along the dimension that `model` splits, or that is not known."""


def pinned(fn: Callable[..., jax.Array], dims: Dims) -> Callable[..., jax.Array]:
    """fn with a layout for each of its values; fn itself outside of an op, or where the partitioner
    does not handle `model`.

    dims: of the arguments. A quantized tensor's dimension is that of each of its arrays.
    """
    if not (partitioned() and in_manual_region()):
        return fn

    def run(*args) -> jax.Array:
        arrays, tree = jax.tree.flatten(args)
        split = [
            dim if dim is None or dim < a.ndim else None
            for arg, dim in zip(args, dims, strict=True)
            for a in jax.tree.leaves(arg)
        ]
        closed = jax.make_jaxpr(lambda *arrays: fn(*jax.tree.unflatten(tree, arrays)))(*arrays)
        placed = [_placed(a, dim) for a, dim in zip(arrays, split, strict=True)]
        (result,), _ = _evaluated(closed.jaxpr, closed.consts, placed, split)
        return result  # type: ignore[no-any-return]

    return run


def _placed(x: Any, dim: int | None) -> Any:
    return lax.with_sharding_constraint(x, P(*(MODEL if i == dim else None for i in range(x.ndim))))


def _evaluated(jaxpr, consts, args, dims: Dims) -> tuple[list, Dims]:
    """(the results of a jaxpr, of which each value has its layout; their dims)."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    split = dict(zip(jaxpr.invars, dims, strict=True))
    value = lambda atom: value_of(atom, env)
    for equation in jaxpr.eqns:
        values, of_values = [*map(value, equation.invars)], _dims(equation.invars, split)
        if equation.primitive.name in ENTERED:
            inner, constants = inner_jaxpr(equation)
            out, of_out = _evaluated(inner, constants, values, of_values)
        else:
            try:
                of_out = _after(equation, of_values)
            except AlongSplit:
                of_out = [None] * len(equation.outvars)
                values = [
                    x if dim is None else _placed(x, None)
                    for x, dim in zip(values, of_values, strict=True)
                ]
            out = bound(equation, values)
            out = [_placed(x, dim) for x, dim in zip(out, of_out, strict=True)]
        env.update(zip(equation.outvars, out, strict=True))
        split.update(zip(equation.outvars, of_out, strict=True))
    return [*map(value, jaxpr.outvars)], _dims(jaxpr.outvars, split)


def _dims(atoms: Sequence, split: dict) -> Dims:
    return [None if isinstance(a, Literal) else split.get(a) for a in atoms]


def _results(jaxpr, dims: Dims) -> Dims:
    """The dims of a jaxpr's results. Raises AlongSplit for one that has such an equation."""
    split = dict(zip(jaxpr.invars, dims, strict=True))
    for equation in jaxpr.eqns:
        of_out = _after(equation, _dims(equation.invars, split))
        split.update(zip(equation.outvars, of_out, strict=True))
    return _dims(jaxpr.outvars, split)


def _after(equation, dims: Dims) -> Dims:
    """The dims of an equation's results. Raises AlongSplit."""
    name, params, outs = equation.primitive.name, equation.params, equation.outvars
    if name == "sharding_constraint":
        return [_split_of(params["sharding"].spec)]
    if name == "shard_map":  # over `model`, of parallel/
        return [_split_of(spec) for spec in params["out_specs"]]
    if all(dim is None for dim in dims):
        return [None] * len(outs)
    if name in CALLS:
        return _results(inner_jaxpr(equation)[0], dims)
    if name == "scan":
        return _after_scan(params, dims)
    if name == "dot_general":
        return [_after_product(params["dimension_numbers"], equation.invars, dims)]
    known = {dim for dim in dims if dim is not None}
    if len(known) > 1:
        raise AlongSplit
    (dim,) = known
    return [_moved(equation, equation.invars[dims.index(dim)].aval.shape, dim)] * len(outs)


def _moved(equation, shape: tuple[int, ...], dim: int) -> int | None:
    """The dimension of the results that dimension `dim` of an operand of this shape becomes; None
    where it is summed up. Raises AlongSplit."""
    name, params = equation.primitive.name, equation.params
    result = equation.outvars[0].aval.shape
    if name in ELEMENTWISE and shape == result:
        return dim
    if name == "transpose":
        return int(params["permutation"].index(dim))
    if name == "broadcast_in_dim" and result[params["broadcast_dimensions"][dim]] == shape[dim]:
        return int(params["broadcast_dimensions"][dim])
    if name in REDUCTIONS:
        axes = params["axes"]
        return None if dim in axes else dim - sum(axis < dim for axis in axes)
    if name in ("reshape", "squeeze"):
        devices = jax.sharding.get_abstract_mesh().shape[MODEL]
        for i, size in enumerate(result):
            begins_there = math.prod(result[:i]) == math.prod(shape[:dim])
            whole = shape[dim] % size == 0 or size % shape[dim] == 0
            if begins_there and whole and size % devices == 0:
                return i
    if name == "stack":
        return dim + (params["axis"] <= dim)
    # the others that keep a dimension which they do not work along
    along = params.get("axis", params.get("dimension", params.get("dimensions", ())))
    along = along if isinstance(along, tuple) else (along,)
    if name in ALONG_ONE and dim not in along and shape[dim] == result[dim]:
        return dim
    raise AlongSplit


def _after_product(numbers: Any, operands: Sequence, dims: Dims) -> int | None:
    """The split dimension of a product: one of the batch, then of the first operand, then of the
    second; None where `model` splits what is summed."""
    results: set[int | None] = set()
    free = 0
    for operand, dim, contracted, batch in zip(operands, dims, *numbers, strict=True):
        rest = [i for i in range(operand.aval.ndim) if i not in (*contracted, *batch)]
        if dim in rest:
            results.add(len(batch) + free + rest.index(dim))
        elif dim is not None:
            results.add(batch.index(dim) if dim in batch else None)
        free += len(rest)
    if len(results) > 1:
        raise AlongSplit
    return results.pop()


def _after_scan(params: dict, dims: Dims) -> Dims:
    """The dims of a scan's results: its carry is split as its body leaves it."""
    fixed, carried = scan_sizes(params)
    consts, carry, stacked = dims[:fixed], dims[fixed : fixed + carried], dims[fixed + carried :]
    if 0 in stacked:
        raise AlongSplit
    slices = [None if dim is None else dim - 1 for dim in stacked]
    for _ in range(carried + 1):
        results = _results(params["jaxpr"].jaxpr, [*consts, *carry, *slices])
        if results[:carried] == carry:
            return [*carry, *(None if dim is None else dim + 1 for dim in results[carried:])]
        carry = results[:carried]
    raise AlongSplit


def _split_of(spec: P) -> int | None:
    return next((i for i, part in enumerate(spec) if MODEL in mesh_axes(part)), None)
