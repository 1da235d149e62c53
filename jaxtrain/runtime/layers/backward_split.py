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

Begin with `LayerSplit._cut`; crossing.py decides what crosses. Before the class are the rules of
`remat`, which say what may cross.

Calls are inlined and inner scans unrolled; an inner `while` or kernel stays one equation
(parallel/attention/flash.py). What `jax.checkpoint` inside the layer recomputes stays in the
backward.
"""

import copy
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxtrain.config.saved_values import ATTENTION
from jaxtrain.parallel import fp8
from jaxtrain.parallel.attention.heads import KEPT_BY_HEADS, KEPT_BY_TOKENS
from jaxtrain.parallel.fp8 import is_quantized
from jaxtrain.runtime.layers.crossing import FlatLayer, is_gathered, plan_crossing
from jaxtrain.runtime.layers.equations import (
    BLOCK_PRODUCTS,
    CHEAP,
    KERNELS,
    NAME,
    PRODUCTS,
    RINGS,
    VIEWS,
    HostRule,
    KeepRule,
    has,
    in_attention,
    inline,
    is_fp8,
    is_only,
    is_part,
    variables,
)
from jaxtrain.runtime.layers.interleave import TracedOp, sends

# functions of one number in an activation: silu's and gelu's
ACTIVATIONS = frozenset({"logistic", "tanh"})
# what products beside messages compute of blocks' places (parallel/collective_matmul.py)
PLACES = RINGS | frozenset(
    "axis_index rem mul sub lt select_n empty dynamic_slice dynamic_update_slice".split()
)
SUMS = frozenset("reduce_scatter add convert_element_type".split())
KEPT = (KEPT_BY_HEADS, KEPT_BY_TOKENS)
MAXIMA = frozenset({"reduce_max", "pmax"})


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
        fp8 = any(map(is_fp8, variables(equation.invars)))
        # a product of FP8 is multiplied by scales, or its operands by powers of two
        sums = SUMS | {"mul", "bitcast_convert_type", "shift_left"} if fp8 else SUMS
        if has(equation, RINGS | {"dynamic_update_slice"}):
            sums |= PLACES
        product = is_only(equation, VIEWS | PRODUCTS | sums) and has(equation, PRODUCTS)
        return product or has(equation, BLOCK_PRODUCTS)
    # A product with a batch dimension is attention's own, of queries and keys: it is recomputed.
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
    # top_k is a router's; a maximum of all of a tensor's numbers gives the scale of its FP8.
    return name == "top_k" or (name in MAXIMA and equation.outvars[0].aval.ndim == 0)


def _shapes(values: Iterable) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in values]


# --- the layer ------------------------------------------------------------------------------------


class LayerSplit:
    """A layer, a function (params, x, extra) → y, cut into ops.

    Args:
      layer: y has the shape and dtype of x.
      params, x, extra: examples, pytrees of arrays or ShapeDtypeStructs; only shapes and dtypes
        matter.
      keep: what may cross from the forward to the backward.
      recomputed: primitives whose results do not cross either if their operands do, though they
        cost more than one pass over them.

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
    ):
        self.layer, self.x = layer, jax.ShapeDtypeStruct(x.shape, x.dtype)
        self._cheap = CHEAP | recomputed
        self._flat_by = _traced(layer, params, x, extra)
        # A quantized parameter is one leaf of `_tree`, of several arrays
        arrays, self._tree = jax.tree.flatten(params, is_leaf=is_quantized)
        self._array_counts = [len(jax.tree.leaves(a)) for a in arrays]
        self._cut(keep)

    def recut(self, keep: KeepRule) -> "LayerSplit":
        """The layer cut by another rule, without tracing it once more; at the same point of an
        enclosing trace."""
        other = copy.copy(self)
        other._cut(keep)
        return other

    def placed(self, hosted: HostRule) -> "LayerSplit":
        """The layer with the same cut, whose residuals lie in the host's memory where `hosted` is
        true for the equations that make them."""
        other = copy.copy(self)
        places = lambda values: [hosted(self._flat.maker.get(value)) for value in values]
        other.on_host = Residuals(places(self._crossing.for_b), places(self._crossing.for_w))
        return other

    def _cut(self, keep: KeepRule) -> None:
        """Decides what crosses, and which equations each op has."""
        self._flat = flat = self._flat_by(keep)
        self._crossing = crossing = plan_crossing(flat, keep, self._cheap)
        saved, for_w, stashed = crossing.saved, crossing.for_w, crossing.stashed
        self.residuals = Residuals(_shapes(crossing.for_b), _shapes(for_w))
        self.on_host = Residuals([False] * len(crossing.for_b), [False] * len(for_w))
        self.weight_stash = _shapes(stashed)
        self.gathered = [is_gathered(flat, value) for value in stashed]
        # Each op has the equations that its results need, from what has crossed by then. One may be
        # in several ops: what is cheap is computed again and not saved. BACKWARD has B's and W's
        # together, so nothing is stashed.
        self._equations = {
            LayerOp.WHOLE: flat.needed([flat.y], ()),
            LayerOp.FORWARD: flat.needed([flat.y, *saved], ()),
            LayerOp.RECOMPUTE: flat.needed(saved, ()),
            LayerOp.INPUT_GRADIENT: flat.needed([flat.dx, *stashed], saved),
            LayerOp.WEIGHT_GRADIENT: flat.needed(flat.dp, {*for_w, *stashed}),
            LayerOp.BACKWARD: flat.needed([flat.dx, *flat.dp], saved),
        }

    def _op(
        self, op: LayerOp, params, extra, values: dict, outputs: Sequence, pack: Callable
    ) -> TracedOp:
        """An op, not yet evaluated. values: variable → array, first what another layer has made;
        pack: the outputs' arrays → the op's result"""
        flat = self._flat
        inputs = flat.consts | dict(zip(flat.params, jax.tree.leaves(params), strict=True))
        inputs |= dict(zip(flat.extras, jax.tree.leaves(extra), strict=True)) | values
        # W of a layer whose output no parameter changes has nothing from another op.
        return TracedOp(self._equations[op], inputs, next(iter(values), None), outputs, pack)

    def reads(self, op: LayerOp) -> Any:
        """A tree of bools like the parameters, a quantized one as one: whether an op reads each."""
        used = {a for equation in self._equations.get(op, ()) for a in variables(equation.invars)}
        arrays = iter(self._flat.params)
        # WHOLE runs the layer as it is written, which may read each parameter.
        reads = [
            op is LayerOp.WHOLE or not used.isdisjoint(list(itertools.islice(arrays, count)))
            for count in self._array_counts
        ]
        return jax.tree.unflatten(self._tree, reads)

    @property
    def has_messages(self) -> bool:
        """True if the layer sends tokens to devices that have their experts, or heads."""
        return any(map(sends, self._equations[LayerOp.RECOMPUTE]))

    # ------------------------------------------------------------------ the ops

    def forward(self, op: LayerOp, params, x: jax.Array, extra) -> TracedOp:
        """FORWARD, or WHOLE by its trace. Its result: (y, which has the shape of x; what the
        backward reads, None for WHOLE)."""
        saved = self._crossing.saved if op is LayerOp.FORWARD else []

        def pack(values: list) -> tuple[jax.Array, Residuals | None]:
            y, *residuals = values
            return y, self._residuals(residuals) if saved else None

        outputs = [self._flat.y, *saved]
        return self._op(op, params, extra, {self._flat.x: x}, outputs, pack)

    def output_and_residuals(self, params, x: jax.Array, extra) -> tuple[jax.Array, Residuals]:
        """Returns (y, which has the shape of x; what the backward reads)."""
        return self.forward(LayerOp.FORWARD, params, x, extra).run()

    def recompute(self, params, x: jax.Array, extra) -> TracedOp:
        """RECOMPUTE. Its result: what the backward reads, without y and what y alone needs."""
        values, outputs = {self._flat.x: x}, self._crossing.saved
        return self._op(LayerOp.RECOMPUTE, params, extra, values, outputs, self._residuals)

    def backward(self, params, extra, residuals: Residuals, g: jax.Array) -> TracedOp:
        """INPUT_GRADIENT, from the gradient g of y. Its result: (the gradient of x, the weight
        stash)."""
        values = self._values(residuals, g)
        outputs = [self._flat.dx, *self._crossing.stashed]
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
        # Residuals that only B reads are gone by now: their slots may have other values.
        values = dict(zip(self._crossing.for_w, for_w, strict=True)) | dict(
            zip(self._crossing.stashed, weight_stash, strict=True)
        )
        op, outputs = LayerOp.WEIGHT_GRADIENT, self._flat.dp
        pack = lambda values: jax.tree.unflatten(self._tree, values)
        return self._op(op, params, extra, values, outputs, pack).run()

    def gradients(self, params, extra, residuals: Residuals, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (the gradients of params, the gradient of x), from the gradient g of y."""
        values = self._values(residuals, g)
        pack = lambda values: (jax.tree.unflatten(self._tree, values[1:]), values[0])
        outputs = [self._flat.dx, *self._flat.dp]
        return self._op(LayerOp.BACKWARD, params, extra, values, outputs, pack).run()

    def _residuals(self, values: list) -> Residuals:
        n = len(self._crossing.for_b)
        return Residuals(values[:n], values[n:])

    def _values(self, residuals: Residuals, g: jax.Array) -> dict:
        """Variable → array, of the gradient of y and the residuals."""
        arrays = [g, *residuals.for_b, *residuals.for_w]
        return dict(zip([self._flat.g, *self._crossing.saved], arrays, strict=True))


def _traced(layer: Callable, params, x, extra) -> Callable[[KeepRule], FlatLayer]:
    """Traces a layer and its vjp, (params, extra, x, g) → (y, dx, dp). Returns a function from a
    KeepRule, as for `inline`, to the trace without calls."""
    leaves, tree = jax.tree.flatten(params)
    extras, extra_tree = jax.tree.flatten(extra)
    n, e = len(leaves), len(extras)

    def output_and_gradients(*args):
        extra = jax.tree.unflatten(extra_tree, args[n : n + e])
        params = jax.tree.unflatten(tree, args[:n])
        y, vjp = fp8.vjp(lambda p, x: layer(p, x, extra), params, args[n + e])
        gradients, dx = vjp(args[-1])
        return [y, dx, *jax.tree.leaves(gradients)]

    # The gradient of y has the shape and dtype of y, and so of x.
    examples = [*leaves, *extras, x, x]
    with_calls = jax.make_jaxpr(output_and_gradients)(*examples)

    def flat(keep: KeepRule) -> FlatLayer:
        # `inline` evaluates the equations inside of calls one by one, so the second trace is flat.
        inlined = lambda *args: inline(with_calls.jaxpr, with_calls.consts, args, keep)
        closed = jax.make_jaxpr(inlined)(*examples)
        jaxpr = closed.jaxpr
        y, dx, *dp = jaxpr.outvars
        params, extras, (x, g) = jaxpr.invars[:n], jaxpr.invars[n:-2], jaxpr.invars[-2:]
        consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        return FlatLayer(jaxpr.eqns, consts, params, extras, x, g, y, dx, dp)

    return flat


class RecomputedLayer:
    """A layer whose backward runs it once more from its input, the one residual: full remat on one
    stage. It has the methods of a LayerSplit that forward and backward at once need.

    on_host: the input lies in the host's memory
    """

    def __init__(self, layer: Callable, params, x: jax.ShapeDtypeStruct, on_host: bool = False):
        self.layer, self.residuals, self.on_host = layer, x, on_host
        # Forward and backward both run the layer, so both read all parameters.
        self._reads = jax.tree.map(lambda _: True, params)

    def reads(self, op: LayerOp) -> Any:
        return self._reads

    def output_and_residuals(self, params, x: jax.Array, extra) -> tuple[jax.Array, jax.Array]:
        return self.layer(params, x, extra), x

    def gradients(self, params, extra, x: jax.Array, g: jax.Array) -> tuple[Any, jax.Array]:
        return fp8.vjp(lambda p, x: self.layer(p, x, extra), params, x)[1](g)
