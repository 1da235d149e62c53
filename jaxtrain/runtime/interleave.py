"""Two ops of layers that do not wait for each other, so that messages of each go beside products of
the other (DualPipe's cell, DeepSeek-V3 2024, section 3.2.1).

An op's equations are cut at its messages, the all-to-alls of experts and of attention:

    first    part 0 │ messages 0 │ part 1     │ messages 1 │ part 2
    second          │ part 0     │ messages 0 │ part 1     │ messages 1 │ part 2

Messages in two steps, across nodes and inside them, are one column, whose part is cut in two: each
step has products of its own beside it.

XLA decides where in the program a message starts and where it is done. It starts messages as early
as it can (devices/compiler_options.py), but ends them early, too, for it counts a small fusion for
more than a product of matrices. So values wait for each other where their readers alone would not:
a column begins when the message can be sent; the message's readers wait for the large products
beside it, and what follows these products waits for the message.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxtrain.devices.mesh import MODEL, on_cpu, on_nvidia_gpu
from jaxtrain.runtime.equations import (
    BLOCK_PRODUCTS,
    KERNELS,
    MESSAGES,
    NAME,
    PRODUCTS,
    bind,
    has,
    inside,
    is_on_rows,
    value_of,
    variables,
)

VIEWS = frozenset({"reshape", "squeeze", "optimization_barrier", NAME})  # as what they read
LARGE = 1 / 16  # of the largest product of a part: a router's product is smaller


class OpInParts:
    """An op of a layer, which is evaluated at once by `run`, or in parts.

    equations: in order; env: variable → array, of what they read; entry: the variable among these
    that comes from another layer; outputs: variables of the results; pack: their list → the op's
    result
    """

    def __init__(
        self,
        equations: Sequence,
        env: dict[Any, Any],
        entry: Any,
        outputs: Sequence,
        pack: Callable[[list], Any],
    ):
        self._equations, self._env, self._outputs, self._pack = equations, env, outputs, pack
        self._arrived = [entry]  # what the next part begins with
        self._rest: Sequence = ()  # equations of the last part, after its last large products
        self._firsts: dict[Any, list[jax.Array]] = {}  # of outputs: what they wait for

    def run(self) -> Any:
        """The result, of all equations."""
        self._evaluate(self._equations)
        return self.result()

    def result(self) -> Any:
        values = (value_of(a, self._env) for a in self._outputs)
        firsts = ([] if isinstance(a, Literal) else self._firsts.get(a, []) for a in self._outputs)
        return self._pack([after(f, a) if f else a for f, a in zip(firsts, values, strict=True)])

    @functools.cached_property
    def _left(self) -> list[list]:
        """The parts and messages that are not evaluated."""
        return _parts(self._equations)

    @property
    def is_done(self) -> bool:
        return not self._left

    def evaluate_part(self) -> None:
        """Evaluates the next part by itself."""
        self._rest = self._next()
        self._evaluate(self._rest)

    def send(self, other: "OpInParts") -> None:
        """Evaluates the next messages beside the next part of another op. Messages of a second step
        are sent, too, and then each step has a piece of the part beside it."""
        part: Sequence = other._next()
        far_first = _is_first_step_far(self._left[:3:2])
        if far_first is not None:
            piece, part = _pieces(part, other._peek(), far_first)
            products = self._send(other, piece, part if _on_the_way(piece, part) else [])
            other._arrived = products or other._arrived
            other._evaluate(other._rest)
            self.evaluate_part()
        products = self._send(other, part, other._peek())
        largest = sorted(self._values(self._arrived), key=jnp.size)[-1:]
        other._wait(other._waiting(products, other._rest), largest)
        other._evaluate(other._rest)

    def _send(self, other: "OpInParts", piece: Sequence, following: Sequence) -> list:
        """Evaluates the next messages beside equations of another op, up to their last large
        products. Returns the results of these. following: the other op's next equations"""
        messages = self._next()
        other._wait(other._arrived, self._values(self._last_operands(messages)))
        self._evaluate(messages)
        self._arrived = self._read_of(messages)
        products, other._rest = _last_products(piece, following)
        other._evaluate(piece[: len(piece) - len(other._rest)])
        results = other._read_of(products)
        next_equations = itertools.chain.from_iterable(self._left[:2])
        views, readers = _readers(self._arrived, next_equations)
        firsts = other._values(results)
        self._wait(self._smallest_operands(readers), firsts)
        self._firsts |= dict.fromkeys(views, firsts)
        return results

    def _peek(self) -> list:
        return self._left[0] if self._left else []

    def _next(self) -> list:
        return self._left.pop(0) if self._left else []

    def _smallest_operands(self, equations: Iterable) -> list:
        """The smallest operand of each, of those that are evaluated: it costs least to wait for. An
        equation that reads nothing but views of what has arrived has that."""
        of_each = ([a for a in _operands(e) if a in self._env] or self._arrived for e in equations)
        return list(dict.fromkeys(min(operands, key=_size) for operands in of_each))

    def _last_operands(self, messages: Sequence) -> list:
        """The operands of the largest message that were made since the last large products, or the
        last one. Others are not waited for: XLA fuses choices that read the same."""
        read = _operands(_largest(messages)) if messages else []
        operands = [a for a in self._env if a in read]
        after_products = {a for equation in self._rest for a in equation.outvars}
        return [a for a in operands if a in after_products] or operands[-1:]

    def _waiting(self, results: Sequence, readers: Sequence) -> list:
        """The variables that wait in place of `results`, so that their readers do. Work on filled
        rows waits by its smallest operand of numbers, the rows' weights: a result that waits is
        another pass over all of it. The rows' sizes are read by products, too, and as XLA fuses
        the choices for both, the products would wait for what this work waits for."""
        alias = {a: a for a in results}  # variable → the result that it is
        directly, by_weights, weights = set(), set(), []
        for equation in readers:
            read = [alias[a] for a in variables(equation.invars) if a in alias]
            if read and equation.primitive.name == NAME:
                alias[equation.outvars[0]] = read[0]
            elif read and is_on_rows(equation):
                by_weights.update(read)
                operands = [a for a in variables(equation.invars) if a in self._env]
                numbers = [a for a in operands if jnp.issubdtype(a.aval.dtype, jnp.floating)]
                weights.append(min(numbers, key=_size))
            else:
                directly.update(read)
        direct = [a for a in results if a in directly or a not in by_weights]
        return list(dict.fromkeys([*direct, *weights]))

    def _evaluate(self, equations: Iterable) -> None:
        for equation in equations:
            results = bind(equation, [value_of(a, self._env) for a in equation.invars])
            self._env.update(zip(equation.outvars, results, strict=True))

    @functools.cached_property
    def _read(self) -> set:
        read = {a for equation in self._equations for a in variables(equation.invars)}
        return read.union(variables(self._outputs))

    def _read_of(self, equations: Iterable) -> list:
        """The variables that equations make and something reads."""
        return [a for equation in equations for a in equation.outvars if a in self._read]

    def _values(self, names: Iterable) -> list[jax.Array]:
        return [self._env[a] for a in names if a in self._read]

    def _wait(self, names: Iterable, firsts: Sequence[jax.Array]) -> None:
        """Has the readers of these variables wait for some values."""
        if firsts:
            self._env.update((a, after(firsts, self._env[a])) for a in names)


def side_by_side(first: OpInParts, second: OpInParts) -> tuple[Any, Any]:
    """The results of both, with messages of each beside products of the other.

    For TPUs nothing is tied: their compiler knows what a product takes, and its kernels would read
    arrays that wait in one more pass (KB of Mixtral 19 % longer by its cycles). Nor where `model`
    has several devices: the partitioner splits arrays over it, so a first number is not on all.
    """
    splits = jax.sharding.get_abstract_mesh().shape.get(MODEL, 1) > 1
    if splits or not (on_nvidia_gpu() or on_cpu()):
        return first.run(), second.run()
    first.evaluate_part()
    sender, other = first, second
    while not (first.is_done and second.is_done):
        sender.send(other)
        sender, other = other, sender
    # or XLA writes what is saved into the pools as soon as it is there, in the time of messages
    return jax.lax.optimization_barrier((first.result(), second.result()))


def after(firsts: Sequence[jax.Array], value: jax.Array) -> jax.Array:
    """`value`, not before all of `firsts` are there. XLA drops barriers before it makes its
    schedule, so this is a choice that it cannot make beforehand: by bits of their first numbers and
    1, which are not 0."""
    bits = jnp.int32(1)
    for first in firsts:
        number = jax.lax.slice(first, (0,) * first.ndim, (1,) * first.ndim).reshape(())
        bits |= jax.lax.bitcast_convert_type(number.astype(jnp.float32), jnp.int32)
    return jnp.where(bits != 0, value, jnp.zeros_like(value))


def _size(variable) -> int:
    return int(variable.aval.size)


def _operands(equation) -> list:
    """The variables that an equation reads; of a call those that are read in it."""
    jaxprs = list(inside(equation))
    if len(jaxprs) != 1 or len(jaxprs[0].invars) != len(equation.invars):
        return variables(equation.invars)
    read = {a for e in jaxprs[0].eqns for a in _operands(e)}
    read.update(variables(jaxprs[0].outvars))
    pairs = zip(equation.invars, jaxprs[0].invars, strict=True)
    return variables(outer for outer, inner in pairs if inner in read)


def _readers(values: Iterable, equations: Iterable) -> tuple[set, list]:
    """Returns (values and their views, the equations that read one of these)."""
    views, readers = set(values), []
    for equation in equations:
        read = [
            i for i, a in enumerate(equation.invars) if not isinstance(a, Literal) and a in views
        ]
        if read and equation.primitive.name in VIEWS:
            views.update(equation.outvars[i] for i in read)
        elif read:
            readers.append(equation)
    return views, readers


def _pieces(part: Sequence, messages: Sequence, far_first: bool) -> tuple[Sequence, Sequence]:
    """A part cut in two, after one of the large products on which the messages behind it wait.
    Beside messages inside a node is one of these products, beside those across nodes, which take
    longer, are the others."""
    products = _on_the_way(part, messages)
    ends = [i for i, equation in enumerate(part, 1) if equation in products]
    if len(ends) < 2:
        return (part, []) if far_first else ([], part)
    end = ends[-2] if far_first else ends[0]
    return part[:end], part[end:]


def _largest(messages: Sequence) -> Any:
    return max(messages, key=lambda equation: max(map(_size, equation.outvars)))


def _is_first_step_far(messages: Sequence[Sequence]) -> bool | None:
    """Whether the first messages go between devices that are not neighbours and the next ones
    between neighbours (True), or the other way round (False), along the same axis; None otherwise:
    they are not two steps of one way."""
    if len(messages) < 2:
        return None
    (axis, first), (next_axis, second) = map(_way, messages)
    return first if axis == next_axis and first != second else None


def _way(messages: Sequence) -> tuple[Any, bool]:
    """The axis along which the largest message goes, and whether it does so between devices that
    are not neighbours."""
    equation = _largest(messages)
    while equation.primitive.name not in MESSAGES:
        equation = next(e for jaxpr in inside(equation) for e in jaxpr.eqns if has(e, MESSAGES))
    group = (equation.params["axis_index_groups"] or ((0, 1),))[0]
    return equation.params["axis_name"], len(group) > 1 and group[1] - group[0] > 1


def _parts(equations: Iterable) -> list[list]:
    """Equations as [part, messages, part, messages, …, part]. Messages that do not wait for each
    other are together; a part is what they need, or what needs the last ones."""
    passed: dict[Any, int] = {}  # variable → the most messages on a way to it
    parts: dict[int, list] = {}
    for equation in equations:
        count = max((passed.get(a, 0) for a in variables(equation.invars)), default=0)
        is_message = sends(equation)
        parts.setdefault(2 * count + is_message, []).append(equation)
        passed |= dict.fromkeys(equation.outvars, count + is_message)
    return [parts.get(i, []) for i in range(max(parts, default=0) + 1)]


def _last_products(part: Sequence, messages: Sequence) -> tuple[list, Sequence]:
    """Returns (the large products on which the messages wait without another one in between, the
    equations of the part that follow the last of these). Without messages, the products on which
    results of the part wait."""
    last = _on_the_way(part, messages, only_last=True)
    end = max((i for i, e in enumerate(part, 1) if e in last), default=len(part))
    return last, part[end:]


def _on_the_way(part: Sequence, messages: Sequence, only_last: bool = False) -> list:
    """The large products of a part on which messages wait, or without messages its results.
    only_last: those without another one in between"""
    large = _large(part)
    maker = {out: equation for equation in part for out in equation.outvars}
    read = {a for equation in part for a in variables(equation.invars)}
    todo = [a for m in messages for a in variables(m.invars)]
    todo = todo or [a for a in maker if a not in read]
    seen: set[int] = set()
    while todo:
        equation = maker.get(todo.pop())
        if equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            todo += variables(equation.invars) if not (only_last and id(equation) in large) else ()
    return [e for e in part if id(e) in large and id(e) in seen]


def _large(equations: Sequence) -> set[int]:
    """The ids of kernels and large products."""
    work = {id(equation): _work(equation) for equation in equations}
    largest = max((w for w in work.values() if w < math.inf), default=0.0)
    return {key for key, w in work.items() if w and w >= LARGE * largest}


def _work(equation) -> float:
    """Multiplications of an equation; infinite for a kernel, whose work is not known."""
    name = equation.primitive.name
    if name in KERNELS | BLOCK_PRODUCTS:
        return math.inf
    if name in PRODUCTS:
        (contracted, _), _ = equation.params["dimension_numbers"]
        depth = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
        return float(depth * equation.outvars[0].aval.size)
    if is_on_rows(equation):
        return 0.0
    return sum(_work(e) for jaxpr in inside(equation) for e in jaxpr.eqns)


def sends(equation) -> bool:
    """True for messages without products beside them. Numbers of choices, for which the messages of
    tokens wait, are few bytes and no message of their own."""
    numbers = all(a.aval.dtype == jnp.int32 for a in equation.outvars)
    return has(equation, MESSAGES) and not numbers and not has(equation, PRODUCTS | KERNELS)
