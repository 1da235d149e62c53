"""What a layer has and computes, read from its module: parameters from its specifications; products
with matrices, attention's core and elementwise work from the trace of its forward.

The trace has one sequence of a few tokens on one device, where attention is plain products. A value
depends on parameters alone, or on tokens. A product is an equation that multiplies a value of
tokens with matrices; products of one value are one, as they share its all-gather.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config import ModelConfig
from jaxtrain.devices.mesh import AbsentDevice, traced_for
from jaxtrain.devices.sharding import RULES
from jaxtrain.models.spec import binder, is_spec, specs
from jaxtrain.models.transformer import Block, build
from jaxtrain.planner.layer.model import INPUTS, MODEL, OUTPUTS, Array, Layer, Product
from jaxtrain.runtime.backward_split import VIEWS
from jaxtrain.runtime.equations import KERNELS, NAME, PRODUCTS, has, in_attention, inline, variables

TOKENS = 16
SAME = VIEWS | {"convert_element_type", "bitcast_convert_type", NAME}  # the same numbers
# Equations whose gradient does not read the values that go through.
LINEAR = SAME | frozenset(
    "add sub add_any gather scatter scatter-add reduce_sum dynamic_slice dynamic_update_slice pad "
    "select_n".split()
)
NO_ENDS = ("embed.table", "head.table")


def _arrays(tree: Any) -> tuple[Array, ...]:
    """The parameters of a nested dict of specifications."""
    return tuple(
        Array(
            jax.tree_util.keystr(path, simple=True, separator="."),
            spec.shape,
            tuple("".join(RULES[axis][:1]) for axis in spec.axes),
            spec.cast,
            spec.product,
        )
        for path, spec in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec)
    )


def ends_of(cfg: ModelConfig) -> tuple[Array, ...]:
    """Model.ends."""
    tree = build(cfg).ends
    modules = {
        number: {name: part for name, part in module.items() if name != "block"}
        for number, module in tree.get("predictors", {}).items()
    }
    arrays = _arrays({"embed": tree["embed"], "head": tree["head"], "predictors": modules})
    return tuple(array for array in arrays if array.name not in NO_ENDS)


@functools.lru_cache(maxsize=64)
def layer_of(cfg: ModelConfig, dense: bool) -> Layer:
    """A layer of a resolved model. dense: one of those before the layers that have experts"""
    block = Block(dataclasses.replace(cfg, attention_kernel="xla"), dense=dense)
    tree, bind = specs(block), binder(block)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_spec)
    shapes = [jax.ShapeDtypeStruct(s.shape, jnp.bfloat16 if s.cast else "float32") for s in leaves]
    shapes.append(jax.ShapeDtypeStruct((1, TOKENS, cfg.width), jnp.bfloat16))
    shapes.append(jax.ShapeDtypeStruct((1, TOKENS), jnp.int32))
    forward = lambda *args: bind(jax.tree.unflatten(treedef, args[:-2]))(*args[-2:])
    with traced_for(AbsentDevice("cpu")):
        closed = jax.make_jaxpr(forward)(*shapes)
        flat = lambda *args: inline(closed.jaxpr, closed.consts, args, lambda equation: True)
        jaxpr = jax.make_jaxpr(flat)(*shapes).jaxpr
    arrays = _arrays(tree)
    return _Reading(jaxpr, arrays, cfg.experts_per_token, _calls(closed.jaxpr, arrays)).layer(
        arrays
    )


def _calls(jaxpr: Any, arrays: tuple[Array, ...]) -> dict[str, int]:
    """The number of the equation, such as `column_products`, that multiplies with a matrix, by the
    matrix's name."""
    names = {v: {array.name} for v, array in zip(jaxpr.invars, arrays, strict=False)}
    calls: dict[str, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        used = set().union(*(names.get(a, ()) for a in variables(equation.invars)))
        if has(equation, PRODUCTS | KERNELS):
            calls |= dict.fromkeys(used, number)
        else:
            names |= dict.fromkeys(equation.outvars, used)
    return calls


class _Reading:
    """What the equations of a layer's trace say. Its inputs are the layer's arrays, a sequence and
    positions.

    choices: experts that a token uses
    calls:   `_calls`
    """

    def __init__(self, jaxpr: Any, arrays: tuple[Array, ...], choices: int, calls: dict[str, int]):
        self._jaxpr, self._choices, self._calls = jaxpr, choices, calls
        # values that depend on parameters alone → the matrices among these
        self._fixed: dict[Any, tuple[Array, ...]] = dict.fromkeys(jaxpr.constvars, ())
        self._fixed |= dict.fromkeys(jaxpr.invars[len(arrays) + 1 :], ())
        for variable, array in zip(jaxpr.invars, arrays, strict=False):
            self._fixed[variable] = (array,) * (len(array.shape) > 1)
        self._stream = jaxpr.invars[len(arrays)].aval.shape
        self._root: dict[Any, Any] = {}  # a value → the one whose numbers it has
        self._maker: dict[Any, Any] = {}  # a value → its equation
        self._product_of: dict[Any, int] = {}  # a product's result → its number
        self._values: dict[Any, int] = {}  # what products multiply, by number
        self._products: list[Product] = []
        self._norms: set[Any] = set()  # what norms divide by
        self._scores = self._core = self._inner = 0.0
        self._norms_and_sums = 0
        needed = self._read_by_backward()
        for equation in jaxpr.eqns:
            self._read(equation, needed)

    def layer(self, arrays: tuple[Array, ...]) -> Layer:
        """The layer that has these arrays."""
        products: dict[Any, Product] = {}
        for product in self._products:  # matrices of one value and name as one
            key = product._replace(names=(), outputs=0, call=0)
            if key in products:
                before = products[key]
                names, columns = before.names + product.names, before.outputs + product.outputs
                product = before._replace(names=names, outputs=columns)
            products[key] = product
        cores = (self._scores, self._core, self._norms_and_sums, self._inner)
        return Layer(arrays, tuple(products.values()), *cores, self._choices)

    def _read_by_backward(self) -> set[Any]:
        needed: set[Any] = set()
        for equation in reversed(self._jaxpr.eqns):
            linear = equation.primitive.name in LINEAR
            if not linear or not needed.isdisjoint(equation.outvars):
                needed.update(variables(equation.invars))
        return needed

    def _read(self, equation: Any, needed: set[Any]) -> None:
        inputs, outputs = variables(equation.invars), equation.outvars
        tokens = [a for a in inputs if a not in self._fixed]
        matrices = tuple(dict.fromkeys(m for a in inputs for m in self._fixed.get(a, ())))
        name, shape = equation.primitive.name, outputs[0].aval.shape
        if not tokens:
            self._fixed.update(dict.fromkeys(outputs, matrices))
            return
        self._maker.update(dict.fromkeys(outputs, equation))
        if matrices and has(equation, PRODUCTS | KERNELS):
            self._add_product(tokens, matrices, outputs, not needed.isdisjoint(outputs))
        elif name in PRODUCTS and in_attention(equation):
            self._add_core(equation)
        elif name == NAME:
            self._name(equation)
        elif name == "rsqrt":
            self._norms.add(outputs[0])
        elif name in ("add", "mul") and len(tokens) == 2 and shape == self._stream:
            norms = self._norms.intersection(map(self._numbers_of, tokens))
            self._norms_and_sums += name == "add" or bool(norms)
        if name in SAME and len(tokens) == 1:
            self._root[outputs[0]] = self._numbers_of(tokens[0])

    def _numbers_of(self, value: Any) -> Any:
        return self._root.get(value, value)

    def _add_product(
        self, tokens: list[Any], matrices: tuple[Array, ...], results: list[Any], read: bool
    ) -> None:
        """Adds the product of a value with matrices that are used together."""
        first, columns = matrices[0], sum(m.shape[-1] for m in matrices)
        value = self._numbers_of(next(a for a in tokens if a.aval.shape[-1:] == first.shape[-2:-1]))
        experts = first.shape[0] if len(first.shape) > 2 else 0
        split = OUTPUTS if first.axes[-1] == MODEL else INPUTS if first.axes[-2] == MODEL else ""
        number = self._values.setdefault(value, len(self._values))
        names = tuple(m.name for m in matrices)
        self._product_of.update(dict.fromkeys(results, len(self._products)))
        call = self._calls[first.name]
        sizes = first.shape[-2], columns
        self._products.append(
            Product(names, *sizes, split, number, call, experts, "", read, first.product)
        )
        times = self._choices if experts else 1
        if split == INPUTS and not in_attention(self._maker[value]):
            self._inner += first.shape[-2] * times
        elif split == OUTPUTS:
            self._inner += columns * times

    def _add_core(self, equation: Any) -> None:
        """Adds a product of attention: of queries and keys, or of scores and values."""
        (contracted, _), _ = equation.params["dimension_numbers"]
        operands, result = equation.invars, equation.outvars[0]
        size = math.prod(operands[0].aval.shape[i] for i in contracted)
        self._core += math.prod(result.aval.shape) * size / TOKENS**2
        self._scores = self._scores or math.prod(result.aval.shape) / TOKENS**2
        for operand in map(self._numbers_of, operands):
            if not in_attention(self._maker[operand]):
                self._inner += math.prod(operand.aval.shape) / TOKENS

    def _name(self, equation: Any) -> None:
        """Gives the name of a value to the products that it is made of without another name in
        between."""
        todo, seen = [*variables(equation.invars)], set()
        while todo:
            value = todo.pop()
            number, maker = self._product_of.get(value), self._maker.get(value)
            if number is not None and not self._products[number].makes:
                name = equation.params["name"]
                self._products[number] = self._products[number]._replace(makes=name)
            elif number is None and maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                is_end = maker.primitive.name == NAME or in_attention(maker)
                todo += () if is_end else variables(maker.invars)
