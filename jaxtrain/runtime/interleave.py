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
a column begins when the message can be sent; what has arrived waits for the large products beside
it, and what follows these products waits for what has arrived.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.devices.mesh import MODEL, on_tpu
from jaxtrain.runtime.equations import (
    BLOCK_PRODUCTS,
    KERNELS,
    MESSAGES,
    PRODUCTS,
    bind,
    has,
    inside,
    is_on_rows,
    value_of,
    variables,
)

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
        self._read_numbers: dict[Any, jax.Array] = {}  # variable → the first number of its array
        self._rest: Sequence = ()  # equations of the last part, after its last large products

    def run(self) -> Any:
        """The result, of all equations."""
        self._evaluate(self._equations)
        return self.result()

    def result(self) -> Any:
        return self._pack([value_of(a, self._env) for a in self._outputs])

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

    def send(self, other: "OpInParts", holds: bool) -> None:
        """Evaluates the next messages beside the next part of another op. Messages of a second step
        are sent, too, and then each step has a piece of the part beside it.

        holds: whether what follows the large products of the part waits for the messages
        """
        part: Sequence = other._next()
        far_first = _is_first_step_far(self._left[:3:2])
        if far_first is not None:
            piece, part = _pieces(part, other._peek(), far_first)
            products = self._send(other, piece, part if _on_the_way(piece, part) else [])
            other._arrived = products or other._arrived
            other._evaluate(other._rest)
            self.evaluate_part()
        products = self._send(other, part, other._peek())
        if holds:
            other._wait(products, self, sorted(self._arrived, key=_size)[-1:])
        other._evaluate(other._rest)

    def _send(self, other: "OpInParts", piece: Sequence, following: Sequence) -> list:
        """Evaluates the next messages beside equations of another op, up to their last large
        products. Returns the results of these. following: the other op's next equations"""
        messages = self._next()
        if messages:
            rows = max(variables(_largest(messages).invars), key=_size)
            other._wait(other._arrived, self, [rows])
        self._evaluate(messages)
        self._arrived = self._read_of(messages)
        products, other._rest = _last_products(piece, following)
        other._evaluate(piece[: len(piece) - len(other._rest)])
        results = other._read_of(products)
        self._wait(self._arrived, other, results)
        return results

    def _peek(self) -> list:
        return self._left[0] if self._left else []

    def _next(self) -> list:
        return self._left.pop(0) if self._left else []

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

    def _first_number(self, name) -> jax.Array:
        """The first number of a variable's array, read once: an array that is written in place
        while something else may read it would be copied."""
        if name not in self._read_numbers:
            array = self._env[name]
            number = jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
            self._read_numbers[name] = jax.lax.optimization_barrier(number)
        return self._read_numbers[name]

    def _wait(self, names: Iterable, other: "OpInParts", awaited: Sequence) -> None:
        """Has the readers of these variables wait for some of the other op's."""
        firsts = [other._first_number(a) for a in awaited]
        for name in names if firsts else ():
            read = [self._read_numbers[name]] if name in self._read_numbers else []
            self._env[name], number = after([*firsts, *read], self._env[name])
            self._read_numbers[name] = number


def side_by_side(first: OpInParts, second: OpInParts) -> tuple[Any, Any]:
    """The results of both, with messages of each beside products of the other.

    Nothing waits where `model` has several devices: the partitioner splits arrays over it, so a
    first number is not on all. For TPUs what follows the products beside the first messages does
    not wait for these: their compiler would send them before the products.
    """
    if jax.sharding.get_abstract_mesh().shape.get(MODEL, 1) > 1:
        return first.run(), second.run()
    first.evaluate_part()
    sender, other = first, second
    holds = not on_tpu()
    while not (first.is_done and second.is_done):
        sender.send(other, holds)
        sender, other, holds = other, sender, True
    return first.result(), second.result()


def after(firsts: Sequence[jax.Array], array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the array, which is there only when the arrays whose first numbers are `firsts` are;
    its own first number). An array of one number does not wait.

    XLA drops barriers before it makes its schedule, so the array's own first number is written
    anew, in place. It is read at an index that XLA cannot know beforehand: by bits of `firsts` and
    1, which are not 0. A barrier makes the read a kernel of its own. In one with the choice of the
    index XLA reads too early, and in one with the write it copies the array.
    """
    if array.size == 1:
        return array, array
    bits = jnp.int32(1)
    for first in firsts:
        bits |= jax.lax.bitcast_convert_type(first.reshape(()).astype(jnp.float32), jnp.int32)
    start = jnp.where(bits != 0, 0, 1)
    largest = array.shape.index(max(array.shape))
    starts = [start if axis == largest else 0 for axis in range(array.ndim)]
    number = jax.lax.dynamic_slice(array, starts, (1,) * array.ndim)
    number = jax.lax.optimization_barrier(number)
    return jax.lax.dynamic_update_slice(array, number, (0,) * array.ndim), number


def _size(variable) -> int:
    return int(variable.aval.size)


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
