"""What a layer has and computes, read from its module: parameters from its specifications; products
with matrices, attention's core and elementwise work from the trace of its forward.

The trace has one sequence on one device, where attention is plain products without a window: of a
few tokens, or all of them where the layer has code of the user's own, whose work may grow with the
tokens in any way. A value depends on parameters alone, or on tokens. A product is an equation that
multiplies a value of tokens with matrices; products of one value are one, as they share its
all-gather. What is in a scan counts once for each trip.
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxtrain.config import ResolvedModel
from jaxtrain.devices.mesh import AbsentDevice, traced_for
from jaxtrain.devices.sharding import RULES
from jaxtrain.models.spec import Spec, binder, is_spec, specs
from jaxtrain.models.transformer import block_of, build
from jaxtrain.planner.layer.layer import (
    BATCH,
    EXPERT,
    INPUTS,
    MODEL,
    OUTPUTS,
    Layer,
    ParameterShape,
    Product,
)
from jaxtrain.runtime.layers.equations import (
    KERNELS,
    NAME,
    PRODUCTS,
    VIEWS,
    has,
    in_attention,
    inline,
    variables,
)

TOKENS = 16
SAME = VIEWS | {"convert_element_type", "bitcast_convert_type", NAME}  # the same numbers
# Equations whose gradient does not read the values that go through.
LINEAR = SAME | frozenset(
    "add sub add_any gather scatter scatter-add reduce_sum dynamic_slice dynamic_update_slice pad "
    "select_n".split()
)
CONVOLUTION = "conv_general_dilated"
PLAIN = ("dot_general", CONVOLUTION)  # products of two arrays
NO_ENDS = ("embed.table", "head.table")


def _arrays(tree: Any) -> tuple[ParameterShape, ...]:
    """The parameters of a nested dict of specifications."""
    return tuple(
        ParameterShape(
            jax.tree_util.keystr(path, simple=True, separator="."),
            spec.shape,
            tuple("".join(RULES[axis][:1]) for axis in spec.axes),
            spec.cast,
            spec.product,
            _matrices(spec),
        )
        for path, spec in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec)
    )


def _matrices(spec: Spec) -> tuple[tuple[int, int, int], ...]:
    """ParameterShape.matrices."""
    if not spec.orthogonalized:
        return ()
    lead, dims = spec.shape[: spec.batch_dims], spec.shape[spec.batch_dims :]
    number, rows, side_by_side = map(
        math.prod, (lead, dims[: spec.row_dims], dims[spec.row_dims :])
    )
    widths = spec.columns or (1,)
    return tuple((number, rows, side_by_side * n // sum(widths)) for n in widths)


def ends_of(cfg: ResolvedModel) -> tuple[ParameterShape, ...]:
    """Model.ends."""
    tree = build(cfg).ends
    modules = {
        number: {name: part for name, part in module.items() if name != "block"}
        for number, module in tree.get("predictors", {}).items()
    }
    arrays = _arrays({"embed": tree["embed"], "head": tree["head"], "predictors": modules})
    return tuple(array for array in arrays if array.name not in NO_ENDS)


@functools.lru_cache(maxsize=64)
def layer_of(cfg: ResolvedModel, dense: bool, tokens: int = TOKENS) -> Layer:
    """A layer of a model. dense: one of those before the layers that have experts; tokens: of the
    sequence that is traced"""
    block = block_of(dataclasses.replace(cfg, attention_kernel="xla", window=0), dense=dense)
    tree, bind = specs(block), binder(block)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_spec)
    # code of the user's own may add float32 arrays to those that it gets
    compute = jnp.float32 if cfg.block or cfg.mixer else jnp.bfloat16
    shapes = [jax.ShapeDtypeStruct(s.shape, compute if s.cast else "float32") for s in leaves]
    shapes += [
        jax.ShapeDtypeStruct((1, tokens, cfg.width), compute),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    ]
    forward = lambda *args: bind(jax.tree.unflatten(treedef, args[:-2]))(*args[-2:])
    with traced_for(AbsentDevice("cpu")):
        closed = jax.make_jaxpr(forward)(*shapes)
        jaxpr = _flat(closed)
    arrays = _arrays(tree)
    return _Reading(
        jaxpr, arrays, cfg.experts_per_token, _multiplying_equations(closed.jaxpr, arrays)
    ).layer(arrays)


def _flat(closed: Any) -> Any:
    """A jaxpr without calls and short scans."""
    flat = lambda *args: inline(closed.jaxpr, closed.consts, args, lambda _: True)
    return jax.make_jaxpr(flat)(*closed.in_avals).jaxpr


def _multiplying_equations(jaxpr: Any, arrays: tuple[ParameterShape, ...]) -> dict[str, list[int]]:
    """A parameter's name → the positions in `jaxpr.eqns` of the equations that multiply with it.

    jaxpr: of the layer before calls such as `column_products` are inlined. Several matrices of one
    call share the position, and so the sum of the gradient of the activation that they multiply.
    """
    # A value → the parameters that it is computed from, without a product in between.
    names = {v: {array.name} for v, array in zip(jaxpr.invars, arrays, strict=False)}
    calls: dict[str, list[int]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        used = set().union(*(names.get(a, ()) for a in variables(equation.invars)))
        if has(equation, PRODUCTS | KERNELS | {CONVOLUTION}):
            for name in used:
                calls.setdefault(name, []).append(number)
        else:
            names |= dict.fromkeys(equation.outvars, used)
    return calls


def _multiplications(equation: Any) -> int:
    """The multiplications of a plain product."""
    operand, numbers = equation.invars[0], equation.params["dimension_numbers"]
    contracted = numbers[0][0]
    if equation.primitive.name == CONVOLUTION:
        operand, contracted = equation.invars[1], numbers.rhs_spec[1:]
    size = math.prod(operand.aval.shape[i] for i in contracted)
    return math.prod(equation.outvars[0].aval.shape) * size


def _is_linear(equation: Any) -> bool:
    """True if the gradient of an equation does not read its operands."""
    by_constant = equation.primitive.name == "mul" and len(variables(equation.invars)) == 1
    return by_constant or equation.primitive.name in LINEAR


class _Reading:
    """What the equations of a layer's trace say. Its inputs are the layer's arrays, a sequence and
    positions.

    choices: experts that a token uses
    calls:   `_multiplying_equations`
    """

    def __init__(
        self,
        jaxpr: Any,
        arrays: tuple[ParameterShape, ...],
        choices: int,
        calls: dict[str, list[int]],
    ):
        self._choices, self._calls = choices, calls
        self._axes: dict[Any, tuple[str, ...]] = {}  # such a value → what splits its dimensions
        # values that depend on parameters alone → these
        self._fixed: dict[Any, tuple[ParameterShape, ...]] = dict.fromkeys(jaxpr.constvars, ())
        self._fixed |= dict.fromkeys(jaxpr.invars[len(arrays) + 1 :], ())
        for variable, array in zip(jaxpr.invars, arrays, strict=False):
            self._fixed[variable], self._axes[variable] = (array,), array.axes
        # modules that have experts
        self._routed = {a.name.partition(".")[0] for a in arrays if EXPERT in a.axes}
        self._stream = jaxpr.invars[len(arrays)].aval.shape
        self._tokens = self._stream[1]
        self._trips = 1  # of the scans around an equation, together
        self._root: dict[Any, Any] = {}  # a value → the one whose numbers it has
        self._maker: dict[Any, Any] = {}  # a value → its equation
        self._product_of: dict[Any, int] = {}  # a product's result → its number
        self._values: dict[Any, int] = {}  # what products multiply, by number
        self._products: list[Product] = []
        self._sums: dict[Any, Any] = {}  # a value → the sum that it is a part of, and no more
        self._norms: set[Any] = set()  # what norms divide by
        self._scores = self._core = self._inner = self._mixing = 0.0
        self._norms_and_sums = 0
        needed: set[Any] = set()  # values that the backward reads
        uses = collections.Counter(a for e in jaxpr.eqns for a in variables(e.invars))
        for equation in reversed(jaxpr.eqns):
            inputs, result = variables(equation.invars), equation.outvars[0]
            if not _is_linear(equation) or not needed.isdisjoint(equation.outvars):
                needed.update(inputs)
            if equation.primitive.name in SAME | {"add"}:
                self._sums |= {a: self._sums.get(result, result) for a in inputs if uses[a] == 1}
        for equation in jaxpr.eqns:
            self._read(equation, needed)

    def layer(self, arrays: tuple[ParameterShape, ...]) -> Layer:
        """The layer that has these arrays."""
        products: dict[Any, Product] = {}
        for product in self._products:  # matrices of one value, call and name as one
            key = product._replace(names=(), outputs=0, gradient=0)
            others = products.get(key, key)
            names, columns = others.names + product.names, others.outputs + product.outputs
            products[key] = product._replace(names=names, outputs=columns)
        return Layer(
            arrays,
            tuple(products.values()),
            self._scores,
            self._core,
            self._norms_and_sums,
            self._inner,
            self._choices,
            self._mixing,
        )

    def _read(self, equation: Any, needed: set[Any]) -> None:
        inputs, outputs = variables(equation.invars), equation.outvars
        tokens = [a for a in inputs if a not in self._fixed]
        parameters = tuple(dict.fromkeys(m for a in inputs for m in self._fixed.get(a, ())))
        matrices = tuple(parameter for parameter in parameters if len(parameter.shape) > 1)
        name, shape = equation.primitive.name, outputs[0].aval.shape
        if not tokens:
            self._fixed.update(dict.fromkeys(outputs, parameters))
            if parameters:
                self._axes.update(dict.fromkeys(outputs, self._axes_of_result(equation)))
            return
        self._maker.update(dict.fromkeys(outputs, equation))
        if name == "scan":
            self._read_scan(equation, needed)
        elif matrices and has(equation, PRODUCTS | KERNELS) or parameters and name in PLAIN:
            self._add_product(equation, matrices or parameters, not needed.isdisjoint(outputs))
        elif name in PRODUCTS and in_attention(equation):
            self._add_core(equation)
        elif name in PLAIN:
            self._add_mixing(equation)
        elif name == NAME:
            self._name_products(equation)
        elif name == "rsqrt":
            self._norms.add(outputs[0])
        elif name in ("add", "mul") and len(tokens) == 2 and shape == self._stream:
            norms = self._norms.intersection(map(self._numbers_of, tokens))
            self._norms_and_sums += name == "add" or bool(norms)
        if name in SAME and len(tokens) == 1:
            self._root[outputs[0]] = self._numbers_of(tokens[0])

    def _read_scan(self, equation: Any, needed: set[Any]) -> None:
        """Reads the equations of a scan's trip, once for all trips. The backward is taken to read
        all that is made in them."""
        body, trips = _flat(equation.params["jaxpr"]), equation.params["length"]
        for inner, outer in zip(body.invars, equation.invars, strict=True):
            if isinstance(outer, Literal):
                self._fixed[inner] = ()
            elif outer not in self._fixed:
                self._root[inner] = self._numbers_of(outer)
            elif self._fixed[outer]:  # a parameter, or a slice of one for each trip
                dropped = len(outer.aval.shape) - len(inner.aval.shape)
                self._fixed[inner] = self._fixed[outer]
                self._axes[inner] = self._axes[outer][dropped:]
        self._trips *= trips
        for inside in body.eqns:
            self._read(inside, needed.union(inside.outvars))
        self._trips //= trips

    def _numbers_of(self, value: Any) -> Any:
        return self._root.get(value, value)

    def _axes_of_result(self, equation: Any) -> tuple[str, ...]:
        """What splits each dimension of an array that is made of parameters. Of a dimension that is
        reshaped to several the first is split."""
        operand = next(a for a in variables(equation.invars) if a in self._axes)
        axes, before, after = (
            self._axes[operand],
            operand.aval.shape,
            equation.outvars[0].aval.shape,
        )
        if equation.primitive.name == "transpose":
            return tuple(axes[i] for i in equation.params["permutation"])
        begins = lambda shape: itertools.accumulate((1, *shape[:-1]), operator.mul)
        split = {
            n: axis for n, size, axis in zip(begins(before), before, axes, strict=False) if size > 1
        }
        return tuple(
            split.get(n, "") * (size > 1) for n, size in zip(begins(after), after, strict=False)
        )

    def _add_product(
        self, equation: Any, parameters: tuple[ParameterShape, ...], read: bool
    ) -> None:
        """Adds the product of a value with parameters that are used together: of the last
        dimensions, or in a plain product of any."""
        first, operands = parameters[0], variables(equation.invars)
        experts, names = first.shape[0] * (EXPERT in first.axes), tuple(a.name for a in parameters)
        tokens = [a for a in operands if a not in self._fixed]
        array = max((a for a in operands if a in self._axes), key=lambda a: a.aval.size)
        axes, shape = self._axes[array], array.aval.shape
        numbers, contracted, batch = equation.params.get("dimension_numbers"), [-2], []
        if equation.primitive.name == CONVOLUTION:
            contracted = numbers.rhs_spec[1:]
        elif numbers:
            contracted, batch = (dims[operands.index(array)] for dims in numbers)
        inputs = math.prod(shape[i] for i in contracted)
        columns = math.prod(shape) // inputs // max(1, experts)
        split = BATCH if MODEL in [axes[i] for i in batch] else OUTPUTS * (MODEL in axes)
        split = INPUTS if MODEL in [axes[i] for i in contracted] else split
        value = next((a for a in tokens if a.aval.shape[-1:] == (inputs,)), tokens[0])
        value = self._numbers_of(value)
        number = self._values.setdefault(value, len(self._values))
        self._product_of.update(dict.fromkeys(equation.outvars, len(self._products)))
        routed = first.name.partition(".")[0] in self._routed
        calls = [0] if routed else self._calls.get(first.name, [0])
        call = calls.pop(0) if len(calls) > 1 else calls[0]  # of a parameter that is used again
        result = equation.outvars[0]
        rows = math.prod(result.aval.shape) * self._trips / columns
        part = rows / self._tokens if equation.primitive.name in PLAIN and not experts else 1
        gradient = self._values.setdefault(self._sums.get(result, result), len(self._values))
        self._products.append(
            Product(
                names,
                inputs,
                columns,
                split,
                value=number,
                call=call,
                experts=experts,
                read=read,
                fp8=first.product,
                gradient=gradient,
                part=part,
            )
        )
        times = self._choices if experts else part
        if split == INPUTS and not self._in_attention(value):
            self._inner += inputs * times
        elif split in (OUTPUTS, BATCH):
            self._inner += columns * times

    def _in_attention(self, value: Any) -> bool:
        return value in self._maker and in_attention(self._maker[value])

    def _add_core(self, equation: Any) -> None:
        """Adds a product of attention: of queries and keys, or of scores and values."""
        result = equation.outvars[0]
        self._core += _multiplications(equation) / self._tokens**2
        self._scores = self._scores or math.prod(result.aval.shape) / self._tokens**2
        for operand in map(self._numbers_of, equation.invars):
            if not self._in_attention(operand):
                self._inner += math.prod(operand.aval.shape) / self._tokens

    def _add_mixing(self, equation: Any) -> None:
        """Adds a product of tokens with tokens outside of attention, as a recurrence has in each of
        its blocks."""
        self._mixing += _multiplications(equation) * self._trips / self._tokens
        for operand in variables(equation.invars):
            self._inner += math.prod(operand.aval.shape) * self._trips / self._tokens

    def _name_products(self, equation: Any) -> None:
        """For an equation that names a value: gives this name to the products whose sum the value
        is. The way back to them has linear equations alone and ends at another name. A product
        keeps the first name that it gets."""
        todo, seen = [*variables(equation.invars)], set()
        while todo:
            value = todo.pop()
            number, maker = self._product_of.get(value), self._maker.get(value)
            if number is not None and not self._products[number].makes:
                makes = equation.params["name"]
                self._products[number] = self._products[number]._replace(makes=makes)
            elif number is None and maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                is_end = maker.primitive.name == NAME or not _is_linear(maker)
                todo += () if is_end else variables(maker.invars)
