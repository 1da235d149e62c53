"""Two ops of layers that do not wait for each other, so that messages of each go beside products of
the other (DualPipe's cell, DeepSeek-V3 2024, section 3.2.1).

An op's equations are cut at its messages, the all-to-alls of experts and of attention:

    first    part 0 │ messages 0 │ part 1     │ messages 1 │ part 2
    second          │ part 0     │ messages 0 │ part 1     │ messages 1 │ part 2

What stands in one column is tied: nothing that follows either of the two begins before both are
done. XLA chooses the order inside a column. It takes each small fusion for as long as a product, so
the column of a part ends at its last large product, and results wait until the last column before
they are saved: else XLA would fill a message's time with these.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.runtime.equations import (
    BLOCK_PRODUCTS,
    KERNELS,
    PRODUCTS,
    bind,
    inside,
    value_of,
    variables,
)

MESSAGES = frozenset({"all_to_all", "ragged_all_to_all"})
LARGE = 1 / 16  # of the largest product of a part: a router's product is smaller


class Evaluation:
    """An op of a layer, which is evaluated at once by `run`, or in parts.

    equations: in order; env: variable → array, of what they read; outputs: variables of the
    results; pack: their list → the op's result
    """

    def __init__(
        self,
        equations: Sequence,
        env: dict[Any, Any],
        outputs: Sequence,
        pack: Callable[[list], Any],
    ):
        self._equations, self._env, self._outputs, self._pack = equations, env, outputs, pack

    def run(self) -> Any:
        """The result, of all equations."""
        self.evaluate(self._equations)
        return self.result()

    def result(self) -> Any:
        return self._pack([value_of(a, self._env) for a in self._outputs])

    def evaluate(self, equations: Iterable) -> list:
        """Evaluates some of the equations; the variables of their results."""
        made = []
        for equation in equations:
            results = bind(equation, [value_of(a, self._env) for a in equation.invars])
            self._env.update(zip(equation.outvars, results, strict=True))
            made += equation.outvars
        return made

    def parts(self) -> list[list]:
        """The equations as [part, messages, part, messages, …, part]. Messages that do not wait
        for each other are together; a part is what they need, or what needs the last ones."""
        passed: dict[Any, int] = {}  # variable → the most messages on a way to it
        parts: dict[int, list] = {}
        for equation in self._equations:
            count = max((passed.get(a, 0) for a in variables(equation.invars)), default=0)
            sends = _sends(equation)
            parts.setdefault(2 * count + sends, []).append(equation)
            passed |= dict.fromkeys(equation.outvars, count + sends)
        return [parts.get(i, []) for i in range(max(parts, default=0) + 1)]

    def wait(self, values: Iterable, other: "Evaluation", others: Iterable) -> None:
        """Has the readers of some values wait for values of another evaluation."""
        firsts = [other._env[a] for a in _live(others)]
        if firsts:
            self._env.update((a, after(firsts, self._env[a])) for a in _live(values))


def after(firsts: Sequence[jax.Array], value: jax.Array) -> jax.Array:
    """`value`, not before all of `firsts` are there. XLA drops barriers before it makes its
    schedule, so this is a choice that it cannot make beforehand: by bits of their first numbers and
    1, which are not 0."""
    bits = jnp.int32(1)
    for first in firsts:
        number = jax.lax.slice(first, (0,) * first.ndim, (1,) * first.ndim).reshape(())
        bits |= jax.lax.bitcast_convert_type(number.astype(jnp.float32), jnp.int32)
    return jnp.where(bits != 0, value, jnp.zeros_like(value))


def side_by_side(first: Evaluation, second: Evaluation) -> tuple[Any, Any]:
    """The results of both, with messages of each beside products of the other."""
    turns, others = first.parts(), second.parts()
    small = turns.pop(0)
    first.evaluate(small)
    (sender, sent, small), (computing, parts, _) = (first, turns, small), (second, others, [])
    while sent or parts:
        messages = sent.pop(0) if sent else []
        # what is small comes before the messages, or XLA fills their time with it
        sender.wait(_largest_operands(messages), sender, _crossing(small, messages))
        arrived = sender.evaluate(messages)
        part = parts.pop(0) if parts else []
        end = _after_last_large(part)
        computing.evaluate(part[:end])
        product = part[end - 1].outvars if end else []
        sender.wait(arrived, computing, product)
        computing.wait(product, sender, arrived[:1])
        computing.evaluate(part[end:])
        (sender, sent, small), (computing, parts) = (computing, parts, part[end:]), (sender, sent)
    return jax.lax.optimization_barrier((first.result(), second.result()))


def _largest_operands(messages: Sequence) -> list:
    return [max(variables(m.invars), key=lambda a: a.aval.size) for m in messages]


def _crossing(equations: Sequence, messages: Sequence) -> list:
    """The last values of equations that neither these nor the messages read."""
    read = {a for equation in (*equations, *messages) for a in variables(equation.invars)}
    return [a for equation in equations for a in _live(equation.outvars) if a not in read]


def _after_last_large(equations: Sequence) -> int:
    """The number of equations up to the last kernel or large product; 0 if there is none."""
    work = [_work(equation) for equation in equations]
    largest = max((w for w in work if w < math.inf), default=0.0)
    return max((i for i, w in enumerate(work, 1) if w and w >= LARGE * largest), default=0)


def _work(equation) -> float:
    """Multiplications of an equation; those of a kernel, which are not known, as infinite."""
    name = equation.primitive.name
    if name in KERNELS | BLOCK_PRODUCTS:
        return math.inf
    if name in PRODUCTS:
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        depth = 1.0
        for dimension in contracted:
            depth *= shape[dimension]
        return depth * equation.outvars[0].aval.size
    return sum(_work(e) for jaxpr in inside(equation) for e in jaxpr.eqns)


def _sends(equation) -> bool:
    """True for messages, perhaps in the branches of platforms, without products beside them."""
    return _includes(equation, MESSAGES) and not _includes(equation, PRODUCTS | KERNELS)


def _includes(equation, names: frozenset) -> bool:
    branches = [branch.jaxpr for branch in equation.params.get("branches", ())]
    return equation.primitive.name in names or any(
        _includes(e, names) for jaxpr in (*inside(equation), *branches) for e in jaxpr.eqns
    )


def _live(variables: Iterable) -> list:
    """Without those of results that nothing reads."""
    return [a for a in variables if type(a).__name__ != "DropVar"]
