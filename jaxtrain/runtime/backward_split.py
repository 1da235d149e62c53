"""A layer cut into the ops of a schedule, by partitioning the trace of its vjp.

    output_and_residuals(params, x, extra)              → y, residuals                 F
    input_gradient(params, extra, residuals, g)         → gradient of x, weight stash  B
    weight_gradient(params, extra, for_w, weight_stash) → gradients of params          W
    gradients(params, extra, residuals, g)              → gradients of params, of x    B and W
                                                                       in one op, if W follows
                                                                       its B at once

Residuals are saved by the forward for the backward. They include no weights, no values that depend
only on weights, positions and constants, no masks, reshapes, broadcasts and transposes, and no sums
and products of other residuals. A `KeepRule` decides about the other values; those that it does not
keep are recomputed. The weight stash is saved by B for W: the gradients that W multiplies with, and
values that B has recomputed.

Calls are inlined and inner scans unrolled; an inner `while` or kernel stays one equation
(parallel/flash.py). What `jax.checkpoint` inside the layer recomputes stays in the backward.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxtrain.config.saved_values import ATTENTION
from jaxtrain.devices.mesh import DEVICE_PART
from jaxtrain.parallel import attention, fp8
from jaxtrain.parallel.fp8 import BITS, is_quantized

# Values that cost no arithmetic: their operands cross in their place.
VIEWS = frozenset(
    "broadcast_in_dim reshape transpose neg squeeze copy pvary pcast iota slice split "
    "concatenate sharding_constraint layout_constraint "
    "all_gather "  # costs no arithmetic either: a device saves its own part
    "eq ne ge gt le lt and or not optimization_barrier".split()
)
# Values that cost one pass over their operands, which fuses with what reads them: they do not
# cross if all of their operands do.
CHEAP = VIEWS | frozenset(
    "add sub mul div max min select_n integer_pow square one_minus_square "
    "convert_element_type bitcast_convert_type add_any name".split()
)
PRODUCTS = frozenset({"dot_general"})
GATHERS = frozenset({"all_gather"})
# Attention by parallel/blockwise.py, splash.py, cudnn.py and jax's function for cuDNN; products by
# groups.
KERNELS = frozenset(
    "while pallas_call dot_product_attention_fwd dot_product_attention_fwd_wrapper".split()
)
SUMS = frozenset("reduce_scatter add convert_element_type".split())
CALLS = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "remat2 checkpoint".split()
)
MAXIMA = frozenset({"reduce_max", "pmax"})
NAME = "name"  # the equation of a value that models/ has named (jax.ad_checkpoint)
SMALLER = 8  # times that a sum has fewer bytes than what it adds up
RECOMPUTED = "recomputed"  # name scope of what jax.checkpoint recomputes in the backward

# equation → True if its results may cross from the forward to the backward
KeepRule = Callable[..., bool]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """The values that the forward leaves for the backward, by their last reader: arrays of one
    layer and microbatch, or their shapes and dtypes.

    for_b: those that only B reads
    for_w: those that W reads; B may read them, too
    """

    for_b: list[Any]
    for_w: list[Any]


class LayerOp(enum.Enum):
    """A part of a layer that is run. WHOLE: the layer as it is written, not its trace; BACKWARD: B
    and W at once."""

    WHOLE = enum.auto()
    FORWARD = enum.auto()
    INPUT_GRADIENT = enum.auto()
    WEIGHT_GRADIENT = enum.auto()
    BACKWARD = enum.auto()


def keep_everything(equation) -> bool:
    """`remat` none: everything that the backward reads crosses."""
    return equation.primitive.name != NAME


def keep_products(equation) -> bool:
    """`remat` selective: results of products with weights cross, and those of a kernel or a loop,
    which is attention (its output and log-sum-exp, so that it attends once) or products by groups.
    The inside of other attention and elementwise work are recomputed (Korthikanti et al. 2022,
    section 5). A router's choices cross, too: the tokens sent to experts lie in their order, and
    recomputed choices could differ by a rounding. So do the scales of FP8, which are scalars."""
    name = equation.primitive.name
    if _has(equation, KERNELS):
        return True
    if _is_part(equation):  # a product on each device's part, perhaps with its sum over devices
        fp8 = any(map(_is_fp8, _variables(equation.invars)))
        # a product of FP8 is multiplied by scales
        sums = SUMS | {"mul", "bitcast_convert_type"} if fp8 else SUMS
        return _is(equation, VIEWS | PRODUCTS | sums) and not _is(equation, VIEWS | sums)
    return _decides(equation) or (
        name in PRODUCTS
        and not (name == "dot_general" and equation.params["dimension_numbers"][1][0])
    )


def keep_named(names: Sequence[str]) -> KeepRule:
    """`remat` selective with `save`: the values of these names cross. Attention crosses as its
    kernel's or loop's results, with the log-sum-exp, so that it attends once. A router's choices
    and scales of FP8 cross as by `keep_products`."""

    def keep(equation) -> bool:
        if equation.primitive.name == NAME:
            return equation.params["name"] in names
        if ATTENTION in names and _has(equation, KERNELS) and _in_attention(equation):
            return True
        return _decides(equation)

    return keep


def _decides(equation) -> bool:
    """True for a router's choices and for scales of FP8."""
    name = equation.primitive.name
    return name == "top_k" or (name in MAXIMA and equation.outvars[0].aval.ndim == 0)


def _in_attention(equation) -> bool:
    """True inside the name scope of attention's core."""
    return attention.SCOPE in str(equation.source_info.name_stack)


# --- flattening -----------------------------------------------------------------------------------


def _bind(equation, values):
    """Evaluates one equation, inside attention's name scope if it has that."""
    scope = jax.named_scope(attention.SCOPE) if _in_attention(equation) else None
    with scope or contextlib.nullcontext():
        params = equation.primitive.get_bind_params(equation.params)
        out = equation.primitive.bind(*values, **params)
    return out if equation.primitive.multiple_results else [out]


def _value(atom, env: dict):
    """A jaxpr's literal, or the value of its variable."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def _inline(jaxpr, consts, args, keep: KeepRule):
    """Evaluates a jaxpr, going into calls and scans: traced again, it is flat. Values that `keep`
    does not keep lose their names."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(
        zip(jaxpr.invars, args, strict=True)
    )
    for equation in jaxpr.eqns:
        values = [_value(a, env) for a in equation.invars]
        params, name = equation.params, equation.primitive.name
        inner = next((params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params), None)
        if name == "scan":
            out = _unrolled(params, values, keep)
        elif name == NAME and not keep(equation):
            out = values
        elif name in CALLS and inner is not None and not _is_part(equation):
            body, constants = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            scope = (
                jax.named_scope(RECOMPUTED)
                if params.get("differentiated")
                else contextlib.nullcontext()
            )
            with scope:
                out = _inline(body, constants, values, keep)
        else:
            out = _bind(equation, values)
        env.update(zip(equation.outvars, out, strict=True))
    return [_value(a, env) for a in jaxpr.outvars]


def _unrolled(params, values, keep: KeepRule) -> list:
    """The results of a scan, with its iterations as separate equations."""
    if "ft_in" in params:  # jax 0.12
        fixed, carried, _ = map(len, params["ft_in"].unpack())
    else:
        fixed, carried = params["num_consts"], params["num_carry"]
    consts, rest = values[:fixed], values[fixed:]
    carry, stacked = list(rest[:carried]), rest[carried:]
    body, results = params["jaxpr"], []
    order = range(params["length"])
    for i in reversed(order) if params["reverse"] else order:
        slices = [jax.lax.index_in_dim(x, i, keepdims=False) for x in stacked]
        out = _inline(body.jaxpr, body.consts, [*consts, *carry, *slices], keep)
        carry = out[:carried]
        results.append(out[carried:])
    if params["reverse"]:
        results.reverse()
    return [*carry, *(jnp.stack(column) for column in zip(*results, strict=True))]


def _is(equation, names: frozenset) -> bool:
    """True for an equation that is one of these, or nothing but these on each device (such as a
    layout in memory)."""
    name = equation.primitive.name
    return name in names or (
        _is_part(equation) and all(_is(e, names) for inner in _inner(equation) for e in inner.eqns)
    )


def _has(equation, names: frozenset) -> bool:
    """True for an equation that is one of these, or has one of these inside."""
    name = equation.primitive.name
    return name in names or (
        name in CALLS | {"shard_map"}
        and any(_has(e, names) for inner in _inner(equation) for e in inner.eqns)
    )


def _is_part(equation) -> bool:
    """True for a function of each device's part over `model` (devices/mesh.py: over_model), which
    stays one equation."""
    name = equation.primitive.name
    return name == "shard_map" or (name in CALLS and equation.params.get("name") == DEVICE_PART)


def _inner(equation) -> Iterator:
    """The jaxprs inside an equation."""
    for value in equation.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr


def _is_view(equation) -> bool:
    if equation.primitive.name == "convert_element_type":  # the narrower of the two crosses
        return equation.invars[0].aval.dtype.itemsize <= equation.outvars[0].aval.dtype.itemsize
    if equation.primitive.name == "bitcast_convert_type":
        return _is_fp8(equation.invars[0])
    return _is(equation, VIEWS)


def _is_fp8(atom) -> bool:
    """True for numbers of FP8 in the form in which they cross."""
    return bool(atom.aval.dtype == BITS)


def _variables(atoms: Iterable) -> list:
    return [a for a in atoms if not isinstance(a, Literal)]


def _bytes(atoms: Iterable) -> int:
    return sum(int(np.prod(a.aval.shape)) * a.aval.dtype.itemsize for a in atoms)


def _shapes(values: Iterable) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in values]


# --- the partition --------------------------------------------------------------------------------


class LayerSplit:
    """A layer, a function (params, x, extra) → y, cut into ops.

    Args:
      layer: y has the shape and dtype of x.
      params, x, extra: examples, pytrees of arrays or ShapeDtypeStructs; only shapes and dtypes
        matter.
      keep: what may cross from the forward to the backward.

    residuals: Residuals of the shapes and dtypes of what the forward leaves
    weight_stash: shapes and dtypes of what B leaves for W; `gathered` says of each whether B has
        gathered it, so that the devices of `model` hold the same
    """

    def __init__(self, layer: Callable, params, x, extra, keep: KeepRule = keep_everything):
        self.layer = layer
        self._trace(layer, params, x, extra, keep)
        saved = self._saved_values(keep)
        self._stashed, for_weights = self._crossing_to_weights(saved)
        self._for_b = [a for a in saved if a not in for_weights]
        self._for_w = [a for a in saved if a in for_weights]
        self.residuals = Residuals(_shapes(self._for_b), _shapes(self._for_w))
        self.weight_stash = _shapes(self._stashed)
        self.gathered = [a in self._maker and _has(self._maker[a], GATHERS) for a in self._stashed]
        self._equations = {
            LayerOp.FORWARD: self._needed([self._y, *saved], ()),
            LayerOp.INPUT_GRADIENT: self._needed([self._dx, *self._stashed], saved),
            LayerOp.WEIGHT_GRADIENT: self._needed(self._dp, {*for_weights, *self._stashed}),
            LayerOp.BACKWARD: self._needed([self._dx, *self._dp], saved),
        }

    def _trace(self, fn: Callable, params, x, extra, keep: KeepRule) -> None:
        """Traces the layer and its vjp to one flat jaxpr, and finds the values that every op can
        make, and those of the backward."""
        leaves, tree = jax.tree.flatten(params)
        arrays, self._tree = jax.tree.flatten(params, is_leaf=is_quantized)
        extras, extra_tree = jax.tree.flatten(extra)
        n, e = len(leaves), len(extras)

        def output_and_gradients(*args):
            extra = jax.tree.unflatten(extra_tree, args[n : n + e])
            params = jax.tree.unflatten(tree, args[:n])
            y, vjp = fp8.vjp(lambda p, x: fn(p, x, extra), params, args[n + e])
            gradients, dx = vjp(args[-1])
            return [y, dx, *jax.tree.leaves(gradients)]

        examples = [*leaves, *extras, x, x]
        traced = jax.make_jaxpr(output_and_gradients)(*examples)
        inlined = lambda *args: _inline(traced.jaxpr, traced.consts, args, keep)
        closed = jax.make_jaxpr(inlined)(*examples)
        jaxpr = closed.jaxpr
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._params, self._extras = jaxpr.invars[:n], jaxpr.invars[n : n + e]
        arrays_of = iter(self._params)
        self._arrays = [[next(arrays_of) for _ in jax.tree.leaves(a)] for a in arrays]
        self._x, self._g = jaxpr.invars[n + e :]
        self._maker = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
        self._order = {id(equation): i for i, equation in enumerate(jaxpr.eqns)}
        self._has_fp8 = any(map(_is_fp8, self._maker))
        self._y, self._dx, *self._dp = jaxpr.outvars
        # values that every op can make by itself
        self._free = {*self._params, *self._extras, *jaxpr.constvars}
        self._late = {self._g}  # values that depend on the incoming gradient, or are recomputed
        for equation in jaxpr.eqns:
            inputs = _variables(equation.invars)
            if RECOMPUTED in str(equation.source_info.name_stack) or any(
                a in self._late for a in inputs
            ):
                self._late.update(equation.outvars)
            elif all(a in self._free for a in inputs):
                self._free.update(equation.outvars)

    # ------------------------------------------------------------------ what crosses

    def _position(self, value) -> int:
        return self._order[id(self._maker[value])] if value in self._maker else -1

    def _back(self, values: Iterable, goes_on: Callable) -> None:
        """Walks back from values to their operands, past each value for which `goes_on(value)` is
        true; never to values that every op can make."""
        todo, seen = list(values), set()
        while todo:
            value = todo.pop()
            if value not in seen and value not in self._free:
                seen.add(value)
                todo += _variables(self._maker[value].invars) if goes_on(value) else ()

    def _saved_values(self, keep: KeepRule) -> list:
        """The values that the forward leaves, so that the backward can make all that it reads, in
        the order in which they are made."""
        equations = self._needed([self._dx, *self._dp], ())
        backward = [eq for eq in equations if any(o in self._late for o in eq.outvars)]
        saved = set()

        def goes_on(value) -> bool:
            maker = self._maker.get(value)
            crosses = value is self._x or (keep(maker) and not _is_view(maker))
            if crosses:
                saved.add(value)
            return not crosses

        reads = [a for eq in backward for a in _variables(eq.invars)]
        self._back([a for a in (*reads, *_variables(self._dp)) if a not in self._late], goes_on)
        # A value that a pass over other saved ones makes need not be saved.
        for value in sorted(saved, key=self._position, reverse=True):
            if value is not self._x and self._sources(value, saved - {value}) is not None:
                saved.remove(value)
        return sorted(saved, key=self._position)

    def _sources(self, value, available: set) -> set | None:
        """The available values from which cheap equations make `value`; None if these do not
        suffice."""
        sources, others = set(), set()

        def goes_on(value) -> bool:
            cheap = not (value in self._late or value is self._x) and _is(self._maker[value], CHEAP)
            if value in available:
                sources.add(value)
            elif not cheap:
                others.add(value)
            return cheap and value not in available

        self._back([value], goes_on)
        return None if others else sources

    def _crossing_to_weights(self, saved: list) -> tuple[list, set]:
        """Returns (the values that B leaves for W, the residuals that W reads).

        Where cheap equations make a value that W reads from residuals, whichever has fewer bytes
        stays until W: the value, or the residuals. These may have a tenth more, since B need not
        make the value then.
        """
        crossing = set(saved)
        in_b = {o for eq in self._needed([self._dx], saved) for o in eq.outvars}
        stash, residuals, sources_of = set(), set(), {}

        def goes_on(value) -> bool:
            if value in crossing:
                residuals.add(value)
            elif value is self._g or (
                value in in_b and value in self._late and _has(self._maker[value], GATHERS)
            ):
                # A gradient that B has gathered is stashed, not gathered twice: it lives only from
                # B to W.
                stash.add(value)
            elif _is_fp8(value) and len(self._maker[value].outvars) > 1:
                stash.add(value)  # a barrier's operands are not all W's
            elif _is_view(self._maker[value]):
                return True
            elif (sources := self._sources(value, crossing)) is not None:
                sources_of[value] = sources
            elif value in in_b or self._is_reduced_in_b(value):
                stash.add(value)
            else:
                return True
            return False

        self._back(_variables(self._dp), goes_on)
        for value in sorted(sources_of, key=lambda v: (-_bytes([v]), self._position(v))):
            if _bytes(sources_of[value] - residuals) > 1.1 * _bytes([value]):
                stash.add(value)
            else:
                residuals |= sources_of[value]
        return sorted(stash, key=self._position), residuals

    def _is_reduced_in_b(self, value) -> bool:
        """True for a value that B makes for W alone, so that less waits in between, where products
        are of FP8: their operands, the scales of these, and sums over tokens of numbers that are
        not of FP8."""
        maker = self._maker[value]
        if not self._has_fp8 or _has(maker, PRODUCTS | KERNELS):
            return False
        largest = max(_bytes([a]) for a in _variables(maker.invars))
        return _is_fp8(value) or SMALLER * _bytes([value]) <= largest

    def _needed(self, outputs, available) -> list:
        """The equations that make `outputs` from the inputs and the available values, in order."""
        available, seen, todo = set(available), {}, _variables(outputs)
        while todo:
            value = todo.pop()
            equation = self._maker.get(value)
            if value in available or equation is None or id(equation) in seen:
                continue
            seen[id(equation)] = equation
            todo += _variables(equation.invars)
        return sorted(seen.values(), key=lambda equation: self._order[id(equation)])

    # ------------------------------------------------------------------ the ops

    def _run(self, op: LayerOp, params, extra, values: dict, outputs) -> list:
        env = self._consts | dict(zip(self._params, jax.tree.leaves(params), strict=True))
        env |= dict(zip(self._extras, jax.tree.leaves(extra), strict=True)) | values
        for equation in self._equations[op]:
            env.update(
                zip(
                    equation.outvars,
                    _bind(equation, [_value(a, env) for a in equation.invars]),
                    strict=True,
                )
            )
        return [_value(a, env) for a in outputs]

    def reads(self, op: LayerOp) -> Any:
        """A tree of bools like the parameters, a quantized one as one: whether an op reads each."""
        used = {a for equation in self._equations.get(op, ()) for a in _variables(equation.invars)}
        reads = [op is LayerOp.WHOLE or not used.isdisjoint(arrays) for arrays in self._arrays]
        return jax.tree.unflatten(self._tree, reads)

    def _by_variable(self, residuals: Residuals) -> dict:
        return dict(zip(self._for_b, residuals.for_b, strict=True)) | dict(
            zip(self._for_w, residuals.for_w, strict=True)
        )

    def output_and_residuals(self, params, x: jax.Array, extra) -> tuple[jax.Array, Residuals]:
        """Returns (y, which has the shape of x; what the backward reads)."""
        outputs, n = [self._y, *self._for_b, *self._for_w], len(self._for_b)
        y, *residuals = self._run(LayerOp.FORWARD, params, extra, {self._x: x}, outputs)
        return y, Residuals(residuals[:n], residuals[n:])

    def input_gradient(
        self, params, extra, residuals: Residuals, g: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns (the gradient of x, the weight stash), from the gradient g of y."""
        values = {self._g: g, **self._by_variable(residuals)}
        dx, *stash = self._run(
            LayerOp.INPUT_GRADIENT, params, extra, values, [self._dx, *self._stashed]
        )
        return dx, stash

    def weight_gradient(
        self, params, extra, for_w: Sequence[jax.Array], weight_stash: Sequence[jax.Array]
    ):
        """The gradients of params, from the residuals' `for_w` and what B has left."""
        values = dict(zip(self._for_w, for_w, strict=True)) | dict(
            zip(self._stashed, weight_stash, strict=True)
        )
        return jax.tree.unflatten(
            self._tree, self._run(LayerOp.WEIGHT_GRADIENT, params, extra, values, self._dp)
        )

    def gradients(self, params, extra, residuals: Residuals, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (the gradients of params, the gradient of x), from the gradient g of y."""
        values = {self._g: g, **self._by_variable(residuals)}
        dx, *gradients = self._run(LayerOp.BACKWARD, params, extra, values, [self._dx, *self._dp])
        return jax.tree.unflatten(self._tree, gradients), dx
