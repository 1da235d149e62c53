"""A layer cut into the ops of a schedule, by partitioning the trace of its vjp.

    output_and_residuals(params, x, extra)              → y, residuals                 F
    recompute(params, x, extra)                         → residuals                    R
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
(parallel/attention/flash.py). What `jax.checkpoint` inside the layer recomputes stays in the
backward.
"""

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.config.saved_values import ATTENTION
from jaxtrain.parallel import fp8
from jaxtrain.parallel.attention.heads import KEPT_BY_HEADS, KEPT_BY_TOKENS
from jaxtrain.parallel.fp8 import BITS, is_quantized
from jaxtrain.runtime.equations import (
    BLOCK_PRODUCTS,
    ELEMENTWISE,
    KERNELS,
    NAME,
    PRODUCTS,
    RECOMPUTED,
    HostRule,
    KeepRule,
    has,
    in_attention,
    inline,
    is_on_rows,
    is_only,
    is_part,
    variables,
)
from jaxtrain.runtime.interleave import TracedOp, sends

# Values that cost no arithmetic: their operands cross in their place.
VIEWS = frozenset(
    "broadcast_in_dim reshape transpose neg squeeze copy pvary pcast iota slice split "
    "concatenate sharding_constraint layout_constraint "
    "all_gather "  # costs no arithmetic either: a device saves its own part
    "eq ne ge gt le lt and or not optimization_barrier "
    "one_minus_square".split()  # of tanh, which a GELU's gradient needs in any case
)
# Values that cost one pass over their operands, which fuses with what reads them: they do not
# cross if all of their operands do.
CHEAP = VIEWS | frozenset(
    "add sub mul div max min select_n integer_pow square one_minus_square "
    "convert_element_type bitcast_convert_type add_any name".split()
)
# functions of one number in an activation: silu's and gelu's
ACTIVATIONS = frozenset({"logistic", "tanh"})
# of a tensor, or of its blocks, to FP8
ROUNDING = CHEAP | frozenset(
    "abs reduce_max max min clamp shift_left shift_right_logical and".split()
)
GATHERS = frozenset({"all_gather"})
RINGS = frozenset({"ppermute"})
# what products beside messages compute of blocks' places (parallel/collective_matmul.py)
PLACES = RINGS | frozenset(
    "axis_index rem mul sub lt select_n empty dynamic_slice dynamic_update_slice".split()
)
SUMS = frozenset("reduce_scatter add convert_element_type".split())
KEPT = (KEPT_BY_HEADS, KEPT_BY_TOKENS)
MAXIMA = frozenset({"reduce_max", "pmax"})
SMALLER = 8  # times that a sum has fewer bytes than what it adds up


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
    """A part of a layer that is run. WHOLE: the layer as it is written, or its trace where it is
    cut at its messages (interleave.py); RECOMPUTE: FORWARD without the layer's output; BACKWARD: B
    and W at once."""

    WHOLE = enum.auto()
    FORWARD = enum.auto()
    RECOMPUTE = enum.auto()
    INPUT_GRADIENT = enum.auto()
    WEIGHT_GRADIENT = enum.auto()
    BACKWARD = enum.auto()


def keep_everything(equation) -> bool:
    """`remat` none: everything that the backward reads crosses."""
    return equation.primitive.name != NAME or equation.params["name"] in KEPT


def keep_products(equation) -> bool:
    """`remat` selective: results of products with weights cross, and those of a kernel or a loop,
    which is attention (its output and log-sum-exp, so that it attends once) or products by groups.
    The inside of other attention and elementwise work are recomputed (Korthikanti et al. 2022,
    section 5). A router's choices cross, too: the tokens sent to experts lie in their order, and
    recomputed choices could differ by a rounding. So do the scales of FP8, which are scalars."""
    name = equation.primitive.name
    if has(equation, KERNELS):
        return True
    if is_part(equation):  # a product on each device's part, perhaps with its sum over devices
        fp8 = any(map(_is_fp8, variables(equation.invars)))
        # a product of FP8 is multiplied by scales, or its operands by powers of two
        sums = SUMS | {"mul", "bitcast_convert_type", "shift_left"} if fp8 else SUMS
        if has(equation, RINGS | {"dynamic_update_slice"}):
            sums |= PLACES
        product = is_only(equation, VIEWS | PRODUCTS | sums) and has(equation, PRODUCTS)
        return product or has(equation, BLOCK_PRODUCTS)
    return _decides(equation) or (
        name in PRODUCTS
        and not (name == "dot_general" and equation.params["dimension_numbers"][1][0])
    )


def keep_named(names: Sequence[str]) -> KeepRule:
    """`remat` selective with `save`: the values of these names cross. Attention crosses as its
    kernel's or loop's results, with the log-sum-exp, so that it attends once. A router's choices
    and scales of FP8 cross as by `keep_products`."""

    return lambda equation: makes_named(names, equation) or _decides(equation)


def makes_named(names: Sequence[str], equation) -> bool:
    """True for the equation of a value of these names, or of attention's results if that is one."""
    if equation.primitive.name == NAME:
        return equation.params["name"] in names
    return ATTENTION in names and has(equation, KERNELS) and in_attention(equation)


def _decides(equation) -> bool:
    """True for a router's choices, for scales of FP8, and for a gradient in W's order in memory."""
    name = equation.primitive.name
    if name == NAME:
        return equation.params["name"] == KEPT_BY_TOKENS
    return name == "top_k" or (name in MAXIMA and equation.outvars[0].aval.ndim == 0)


def _is_view(equation) -> bool:
    if equation.primitive.name == "convert_element_type":  # the narrower of the two crosses
        return equation.invars[0].aval.dtype.itemsize <= equation.outvars[0].aval.dtype.itemsize
    if equation.primitive.name == "bitcast_convert_type":
        return _is_fp8(equation.invars[0])
    return is_only(equation, VIEWS) or _is_ring(equation)


def _is_ring(equation) -> bool:
    """True for an all-gather by permutes (parallel/collective_matmul.py: ring_gather)."""
    return is_part(equation) and has(equation, RINGS) and is_only(equation, VIEWS | RINGS)


def _is_fp8(atom) -> bool:
    """True for numbers of FP8 in the form in which they cross."""
    return bool(atom.aval.dtype == BITS)


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
      recomputed: primitives whose results do not cross either if their operands do, though they
        cost more than the pass.
      hosted: which residuals lie in the host's memory.

    x: shape and dtype of the layer's input
    residuals: Residuals of the shapes and dtypes of what the forward leaves
    on_host: Residuals that say of each whether it lies in the host's memory
    weight_stash: shapes and dtypes of what B leaves for W; `gathered` says of each whether B has
        gathered it, so that the devices of `model` hold the same
    """

    def __init__(
        self,
        layer: Callable,
        params,
        x,
        extra,
        keep: KeepRule = keep_everything,
        recomputed: frozenset[str] = frozenset(),
        hosted: HostRule = lambda maker: False,
    ):
        self._cheap = CHEAP | recomputed
        self.layer, self.x = layer, jax.ShapeDtypeStruct(x.shape, x.dtype)
        self._trace(layer, params, x, extra)
        self._cut(keep, hosted)

    def recut(self, keep: KeepRule, hosted: HostRule) -> "LayerSplit":
        """The layer cut by other rules, without tracing it once more; at the same point of an
        enclosing trace."""
        other = copy.copy(self)
        other._cut(keep, hosted)
        return other

    def _cut(self, keep: KeepRule, hosted: HostRule) -> None:
        """Decides what crosses, in one flat jaxpr, and has the equations of each op."""
        self._flatten(keep)
        saved = self._saved_values(keep)
        self._stashed, for_weights = self._crossing_to_weights(saved)
        self._for_b = [a for a in saved if a not in for_weights]
        self._for_w = [a for a in saved if a in for_weights]
        self.residuals = Residuals(_shapes(self._for_b), _shapes(self._for_w))
        places = lambda values: [hosted(self._maker.get(value)) for value in values]
        self.on_host = Residuals(places(self._for_b), places(self._for_w))
        self.weight_stash = _shapes(self._stashed)
        self.gathered = list(map(self._is_gathered, self._stashed))
        self._equations = {
            LayerOp.WHOLE: self._needed([self._y], ()),
            LayerOp.FORWARD: self._needed([self._y, *saved], ()),
            LayerOp.RECOMPUTE: self._needed(saved, ()),
            LayerOp.INPUT_GRADIENT: self._needed([self._dx, *self._stashed], saved),
            LayerOp.WEIGHT_GRADIENT: self._needed(self._dp, {*for_weights, *self._stashed}),
            LayerOp.BACKWARD: self._needed([self._dx, *self._dp], saved),
        }

    def _trace(self, fn: Callable, params, x, extra) -> None:
        """Traces the layer and its vjp."""
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

        self._examples = [*leaves, *extras, x, x]
        self._parameter_arrays = [len(jax.tree.leaves(a)) for a in arrays]
        self._traced = jax.make_jaxpr(output_and_gradients)(*self._examples)

    def _flatten(self, keep: KeepRule) -> None:
        """Makes one flat jaxpr of the trace, and finds the values that every op can make, and those
        of the backward."""
        traced, n = self._traced, sum(self._parameter_arrays)
        inlined = lambda *args: inline(traced.jaxpr, traced.consts, args, keep)
        closed = jax.make_jaxpr(inlined)(*self._examples)
        jaxpr = closed.jaxpr
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._params, self._extras = jaxpr.invars[:n], jaxpr.invars[n:-2]
        arrays_of = iter(self._params)
        self._arrays = [[next(arrays_of) for _ in range(k)] for k in self._parameter_arrays]
        self._x, self._g = jaxpr.invars[-2:]
        self._maker = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
        self._order = {id(equation): i for i, equation in enumerate(jaxpr.eqns)}
        self._has_fp8 = any(map(_is_fp8, self._maker))
        self._y, self._dx, *self._dp = jaxpr.outvars
        # values that every op can make by itself
        self._free = {*self._params, *self._extras, *jaxpr.constvars}
        self._late = {self._g}  # values that depend on the incoming gradient, or are recomputed
        for equation in jaxpr.eqns:
            inputs = variables(equation.invars)
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
                todo += variables(self._maker[value].invars) if goes_on(value) else ()

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

        reads = [a for eq in backward for a in variables(eq.invars)]
        self._back([a for a in (*reads, *variables(self._dp)) if a not in self._late], goes_on)
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
            cheap = not (value in self._late or value is self._x) and is_only(
                self._maker[value], self._cheap
            )
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
                value in in_b
                and value in self._late
                and (has(self._maker[value], GATHERS) or _is_ring(self._maker[value]))
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
            elif (
                value in in_b
                or self._is_reduced_in_b(value)
                # so that the products before an activation do not wait until W
                or is_on_rows(self._maker[value], ELEMENTWISE)
            ):
                stash.add(value)
            else:
                return True
            return False

        self._back(variables(self._dp), goes_on)
        for value in sorted(sources_of, key=lambda v: (-_bytes([v]), self._position(v))):
            if _bytes(sources_of[value] - residuals) > 1.1 * _bytes([value]):
                stash.add(value)
            else:
                residuals |= sources_of[value]
        return sorted(stash, key=self._position), residuals

    def _is_gathered(self, value) -> bool:
        """True for a value that is gathered over `model`, or is rounded to FP8 from such a one."""
        todo, seen = [value], set()
        while todo:
            value = todo.pop()
            maker = self._maker.get(value)
            if maker is None or value in seen:
                continue
            if has(maker, GATHERS):
                return True
            seen.add(value)
            if is_only(maker, ROUNDING) and (len(seen) > 1 or _is_fp8(value)):
                todo += variables(maker.invars)
        return False

    def _is_reduced_in_b(self, value) -> bool:
        """True for a value that B makes for W alone, so that less waits in between, where products
        are of FP8: their operands, the scales of these, and sums over tokens of numbers that are
        not of FP8."""
        maker = self._maker[value]
        if not self._has_fp8 or has(maker, PRODUCTS | KERNELS):
            return False
        largest = max(_bytes([a]) for a in variables(maker.invars))
        return _is_fp8(value) or SMALLER * _bytes([value]) <= largest

    def _needed(self, outputs, available) -> list:
        """The equations that make `outputs` from the inputs and the available values, in order."""
        available, seen, todo = set(available), {}, variables(outputs)
        while todo:
            value = todo.pop()
            equation = self._maker.get(value)
            if value in available or equation is None or id(equation) in seen:
                continue
            seen[id(equation)] = equation
            todo += variables(equation.invars)
        return sorted(seen.values(), key=lambda equation: self._order[id(equation)])

    # ------------------------------------------------------------------ the ops

    def _op(
        self, op: LayerOp, params, extra, values: dict, outputs: Sequence, pack: Callable
    ) -> TracedOp:
        """An op, not yet evaluated. values: variable → array, first what another layer has made;
        pack: the outputs' arrays → the op's result"""
        env = self._consts | dict(zip(self._params, jax.tree.leaves(params), strict=True))
        env |= dict(zip(self._extras, jax.tree.leaves(extra), strict=True)) | values
        return TracedOp(self._equations[op], env, next(iter(values)), outputs, pack)

    def reads(self, op: LayerOp) -> Any:
        """A tree of bools like the parameters, a quantized one as one: whether an op reads each."""
        used = {a for equation in self._equations.get(op, ()) for a in variables(equation.invars)}
        reads = [op is LayerOp.WHOLE or not used.isdisjoint(arrays) for arrays in self._arrays]
        return jax.tree.unflatten(self._tree, reads)

    def _by_variable(self, residuals: Residuals) -> dict:
        return dict(zip(self._for_b, residuals.for_b, strict=True)) | dict(
            zip(self._for_w, residuals.for_w, strict=True)
        )

    def forward(self, op: LayerOp, params, x: jax.Array, extra) -> TracedOp:
        """FORWARD, or WHOLE by its trace. Its result: (y, which has the shape of x; what the
        backward reads, None for WHOLE)."""
        saved = [*self._for_b, *self._for_w] if op is LayerOp.FORWARD else []
        n = len(self._for_b)

        def pack(values: list) -> tuple[jax.Array, Residuals | None]:
            y, *residuals = values
            return y, Residuals(residuals[:n], residuals[n:]) if saved else None

        return self._op(op, params, extra, {self._x: x}, [self._y, *saved], pack)

    def output_and_residuals(self, params, x: jax.Array, extra) -> tuple[jax.Array, Residuals]:
        """Returns (y, which has the shape of x; what the backward reads)."""
        return self.forward(LayerOp.FORWARD, params, x, extra).run()

    def recompute(self, params, x: jax.Array, extra) -> TracedOp:
        """RECOMPUTE. Its result: what the backward reads, without y and what y alone needs."""
        n, saved = len(self._for_b), [*self._for_b, *self._for_w]
        pack = lambda values: Residuals(values[:n], values[n:])
        return self._op(LayerOp.RECOMPUTE, params, extra, {self._x: x}, saved, pack)

    @property
    def has_messages(self) -> bool:
        """True if the layer sends tokens to devices that have their experts, or heads."""
        return any(map(sends, self._equations[LayerOp.RECOMPUTE]))

    def backward(self, params, extra, residuals: Residuals, g: jax.Array) -> TracedOp:
        """INPUT_GRADIENT, from the gradient g of y. Its result: (the gradient of x, the weight
        stash)."""
        values = {self._g: g, **self._by_variable(residuals)}
        outputs = [self._dx, *self._stashed]
        pack = lambda values: (values[0], values[1:])
        return self._op(LayerOp.INPUT_GRADIENT, params, extra, values, outputs, pack)

    def input_gradient(
        self, params, extra, residuals: Residuals, g: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns (the gradient of x, the weight stash), from the gradient g of y."""
        return self.backward(params, extra, residuals, g).run()

    def weight_gradient(
        self, params, extra, for_w: Sequence[jax.Array], weight_stash: Sequence[jax.Array]
    ):
        """The gradients of params, from the residuals' `for_w` and what B has left."""
        values = dict(zip(self._for_w, for_w, strict=True)) | dict(
            zip(self._stashed, weight_stash, strict=True)
        )
        op = LayerOp.WEIGHT_GRADIENT
        pack = lambda values: jax.tree.unflatten(self._tree, values)
        return self._op(op, params, extra, values, self._dp, pack).run()

    def gradients(self, params, extra, residuals: Residuals, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (the gradients of params, the gradient of x), from the gradient g of y."""
        values = {self._g: g, **self._by_variable(residuals)}
        pack = lambda values: (jax.tree.unflatten(self._tree, values[1:]), values[0])
        outputs = [self._dx, *self._dp]
        return self._op(LayerOp.BACKWARD, params, extra, values, outputs, pack).run()


class RecomputedLayer:
    """A layer whose backward runs it once more from its input, the one residual: full remat on one
    stage. It has the methods of a LayerSplit that forward and backward at once need.

    on_host: the input lies in the host's memory
    """

    def __init__(self, layer: Callable, params, x: jax.ShapeDtypeStruct, on_host: bool = False):
        self.layer, self.residuals, self.on_host = layer, x, on_host
        self._reads = jax.tree.map(lambda _: True, params)

    def reads(self, op: LayerOp) -> Any:
        return self._reads

    def output_and_residuals(self, params, x: jax.Array, extra) -> tuple[jax.Array, jax.Array]:
        return self.layer(params, x, extra), x

    def gradients(self, params, extra, x: jax.Array, g: jax.Array) -> tuple[Any, jax.Array]:
        return fp8.vjp(lambda p, x: self.layer(p, x, extra), params, x)[1](g)
