"""Equations of a traced layer: their evaluation, the kinds of them, and one flat list of them.

`inline` makes the flat list. `has` and `is_only` ask which primitives an equation consists of, and
the sets of names below are the kinds that the cut of a layer tells apart.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxtrain.devices.mesh import DEVICE_PART
from jaxtrain.parallel.attention import causal
from jaxtrain.parallel.attention.context import NEIGHBOURS_TOKENS
from jaxtrain.parallel.experts.filled_rows import FILLED_ROWS, ROWS_IN_ORDER
from jaxtrain.parallel.fp8 import BITS
from jaxtrain.parallel.jaxprs import CALLS, bound, inner_jaxpr, scan_sizes, value_of

ELEMENTWISE = frozenset({FILLED_ROWS})  # work on filled rows
ON_ROWS = ELEMENTWISE | {ROWS_IN_ORDER}
BLOCK_PRODUCTS = frozenset({"scaled_matmul_wrapper"})  # jax.nn.scaled_matmul
PRODUCTS = frozenset({"dot_general"}) | BLOCK_PRODUCTS
MESSAGES = frozenset({"all_to_all", "ragged_all_to_all"})
# Attention by parallel/attention/blockwise.py, splash.py, cudnn.py and jax's function for cuDNN;
# products by groups.
KERNELS = frozenset(
    "while pallas_call dot_product_attention_fwd dot_product_attention_fwd_wrapper".split()
)
# Values that cost no arithmetic: their operands are saved in their place.
VIEWS = frozenset(
    "broadcast_in_dim reshape transpose neg squeeze copy pvary pcast iota slice split "
    "concatenate sharding_constraint layout_constraint "
    "all_gather "  # costs no arithmetic either: a device saves its own shard
    "eq ne ge gt le lt and or not optimization_barrier "
    "one_minus_square".split()  # of tanh, which a GELU's gradient needs in any case
)
# Values that cost one pass over their operands, which XLA fuses with what reads them: they are not
# saved if all of their operands are.
CHEAP = VIEWS | frozenset(
    "add sub mul div max min select_n integer_pow square one_minus_square "
    "convert_element_type bitcast_convert_type add_any name".split()
)
GATHERS = frozenset({"all_gather"})
RINGS = frozenset({"ppermute"})
MOST_UNROLLED = 16  # iterations of a scan that become equations by themselves
NAME = "name"  # the equation of a value that models/ has named (jax.ad_checkpoint)
RECOMPUTED = "recomputed"  # name scope of what jax.checkpoint recomputes in the backward

# equation → True if its results may cross from the forward to the backward
KeepRule = Callable[..., bool]
# equation, or None for a layer's input → True if its results, saved, lie in the host's memory
HostRule = Callable[..., bool]


def in_attention(equation) -> bool:
    """True inside the name scope of attention's core."""
    return causal.SCOPE in str(equation.source_info.name_stack)


def bind(equation, values):
    """Evaluates one equation, inside attention's name scope if it has that."""
    scope = jax.named_scope(causal.SCOPE) if in_attention(equation) else None
    with scope or contextlib.nullcontext():
        return bound(equation, values)


def inline(jaxpr, consts, args, keep: KeepRule):
    """Evaluates a jaxpr, going into calls and short scans: traced again, it is flat. Values that
    `keep` does not keep lose their names."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(
        zip(jaxpr.invars, args, strict=True)
    )
    for equation in jaxpr.eqns:
        values = [value_of(a, env) for a in equation.invars]
        params, name = equation.params, equation.primitive.name
        inner = inner_jaxpr(equation)
        # An unrolled scan is cut like other equations. A long one, over tokens perhaps, would be
        # more of these than can be compiled. A loop that must stay whole is a `while`.
        if name == "scan" and params["length"] <= MOST_UNROLLED:
            out = _unrolled(params, values, keep)
        # A name is an equation by itself. Without it the value may be recomputed like any other.
        elif name == NAME and not keep(equation):
            out = values
        elif name in CALLS and inner is not None and not is_part(equation):
            # `differentiated` marks the second run of jax.checkpoint, in the backward. The scope's
            # name survives the second trace and tells it from the forward's own equations.
            scope = (
                jax.named_scope(RECOMPUTED)
                if params.get("differentiated")
                else contextlib.nullcontext()
            )
            with scope:
                out = inline(inner[0], inner[1], values, keep)
        else:
            out = bind(equation, values)
        env.update(zip(equation.outvars, out, strict=True))
    return [value_of(a, env) for a in jaxpr.outvars]


def _unrolled(params, values, keep: KeepRule) -> list:
    """The results of a scan, with its iterations as separate equations."""
    fixed, carried = scan_sizes(params)
    consts, rest = values[:fixed], values[fixed:]
    carry, stacked = list(rest[:carried]), rest[carried:]
    body, results = params["jaxpr"], []
    order = range(params["length"])
    for i in reversed(order) if params["reverse"] else order:
        slices = [jax.lax.index_in_dim(x, i, keepdims=False) for x in stacked]
        out = inline(body.jaxpr, body.consts, [*consts, *carry, *slices], keep)
        carry = out[:carried]
        results.append(out[carried:])
    if params["reverse"]:
        results.reverse()
    return [*carry, *(jnp.stack(column) for column in zip(*results, strict=True))]


def is_only(equation, names: frozenset) -> bool:
    """True for an equation that is one of these, or nothing but these on each device (such as a
    layout in memory)."""
    name = equation.primitive.name
    return name in names or (
        name in CALLS | {"shard_map"}
        and all(is_only(e, names) for inner in inside(equation) for e in inner.eqns)
    )


def has(equation, names: frozenset) -> bool:
    """True for an equation that is one of these, or has one of these inside, perhaps in a branch of
    several platforms'. A loop over filled rows is none of them."""
    name = equation.primitive.name
    return name in names or (
        name in CALLS | {"shard_map", "cond"}
        and not _is_filled_rows_call(equation)
        and any(has(e, names) for inner in inside(equation) for e in inner.eqns)
    )


def is_part(equation) -> bool:
    """True for a function of each device's part over `model` (devices/mesh.py: over_model), which
    stays one equation; so does work on filled rows."""
    name = equation.primitive.name
    return (
        name == "shard_map"
        or (name in CALLS and equation.params.get("name") == DEVICE_PART)
        or _is_filled_rows_call(equation)
    )


def _is_filled_rows_call(equation, names: frozenset = ON_ROWS) -> bool:
    return equation.primitive.name in CALLS and equation.params.get("name") in names


def is_on_rows(equation, names: frozenset = ON_ROWS) -> bool:
    """True for work on filled rows (parallel/experts/filled_rows.py), on each device's part. names:
    of its call"""
    return _is_filled_rows_call(equation, names) or (
        is_part(equation)
        and any(_is_filled_rows_call(e, names) for inner in inside(equation) for e in inner.eqns)
        and not has(equation, MESSAGES | PRODUCTS | KERNELS)
    )


def is_view(equation) -> bool:
    """True if the results have no more bytes of information than the operands, and cost no
    arithmetic."""
    if equation.primitive.name == "convert_element_type":  # the narrower of the two crosses
        return equation.invars[0].aval.dtype.itemsize <= equation.outvars[0].aval.dtype.itemsize
    if equation.primitive.name == "bitcast_convert_type":
        return is_fp8(equation.invars[0])
    return is_only(equation, VIEWS) or is_ring(equation)


def is_ring(equation) -> bool:
    """True for an all-gather by permutes (parallel/collective_matmul.py: ring_gather), and for the
    addition of neighbours' tokens (parallel/attention/context.py)."""
    return is_part(equation) and (
        any(
            e.params.get("name") == NEIGHBOURS_TOKENS
            for jaxpr in inside(equation)
            for e in jaxpr.eqns
        )
        or (has(equation, RINGS) and is_only(equation, VIEWS | RINGS))
    )


def is_fp8(atom) -> bool:
    """True for numbers of FP8 in the form in which they are saved: bits."""
    return bool(atom.aval.dtype == BITS)


def size_in_bytes(atoms: Iterable) -> int:
    return sum(math.prod(a.aval.shape) * a.aval.dtype.itemsize for a in atoms)


def inside(equation) -> Iterator:
    """The jaxprs inside an equation."""
    for value in (*equation.params.values(), *equation.params.get("branches", ())):
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr


def variables(atoms: Iterable) -> list:
    return [a for a in atoms if not isinstance(a, Literal)]
