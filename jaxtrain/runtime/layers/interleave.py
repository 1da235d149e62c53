"""Two ops of layers that do not wait for each other, so that messages of each go beside products of
the other (DualPipe's cell, DeepSeek-V3 2024, section 3.2.1).

Begin with `plan_pieces`: from the equations of both ops it makes a list of `OverlappedPiece`s,
without a value. `side_by_side` evaluates the list. An op's equations are cut at its messages, the
all-to-alls of experts and of attention, and each column below is a piece:

    first    part 0 │ messages 0 │ part 1     │ messages 1 │ part 2
    second          │ part 0     │ messages 0 │ part 1     │ messages 1 │ part 2

Messages in two steps, across nodes and inside them, are two columns, between which part 0 of the
second op is cut. So each step has products of its own beside it.

XLA decides where in the program a message starts and where it is done. It starts messages as early
as it can (devices/compiler_options.py), but ends them early, too, for it counts a small fusion for
more than a product of matrices. So a piece has three waits that the data alone does not ask for:

    start     the part begins when the message can be sent, or it would begin before it
    arrival   what has arrived is read after the large products beside the message
    hold      what follows these products is computed after the message has arrived
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.devices.mesh import MODEL, on_tpu
from jaxtrain.runtime.layers.equations import (
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


@dataclasses.dataclass(frozen=True, eq=False)
class TracedOp:
    """An op of a layer as equations, with the arrays that they read. `run` evaluates it.

    equations: in order
    inputs: variable → array, for all that the equations read
    entry: the variable among these that comes from another layer
    outputs: variables of the results
    pack: the list of their arrays → the op's result
    """

    equations: Sequence
    inputs: dict[Any, Any]
    entry: Any
    outputs: Sequence
    pack: Callable[[list], Any]

    def run(self) -> Any:
        evaluation = _Evaluation(self)
        evaluation.evaluate(self.equations)
        return evaluation.result()


# --- the plan -------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """Readers of the variables `waiting` of one op wait for the variables `awaited` of the
    other."""

    waiting: Sequence = ()
    awaited: Sequence = ()


@dataclasses.dataclass(frozen=True, eq=False)
class OverlappedPiece:
    """Messages of one op, and equations of the other one that are evaluated beside them.

    sender: 0: the first op sends, and the second one computes; 1: the other way round
    messages: the sender's equations; none, if it has nothing to send
    products: the other op's equations, up to its last large products
    rest: its equations after these
    start: of what the products begin with, for the rows that are sent
    arrival: of what the messages bring, for the large products
    hold: of the large products' results, for the largest array that the messages bring
    """

    sender: int
    messages: Sequence
    products: Sequence
    rest: Sequence = ()
    start: Wait = Wait()
    arrival: Wait = Wait()
    hold: Wait = Wait()

    def __str__(self) -> str:
        waits = {"start": self.start, "arrival": self.arrival, "hold": self.hold}
        names = [name for name, wait in waits.items() if wait.waiting and wait.awaited]
        return (
            f"op {self.sender}: {len(self.messages)} messages; op {1 - self.sender}: "
            f"{len(self.products)} + {len(self.rest)} equations; waits: {', '.join(names) or '-'}"
        )


def plan_pieces(first: TracedOp, second: TracedOp, holds_first: bool) -> list[OverlappedPiece]:
    """The pieces of two ops, in order: each equation once. holds_first: the first messages have a
    `hold`, as all others have"""
    ops = first, second
    left = [_parts(op.equations) for op in ops]  # parts and messages that are in no piece
    # the variables that an op's next part begins with
    entries: list[Sequence] = [[op.entry] for op in ops]
    # the variables that equations of each op read, or that are its results
    read = [
        {*variables(op.outputs), *(a for e in op.equations for a in variables(e.invars))}
        for op in ops
    ]
    take = lambda op: left[op].pop(0) if left[op] else []
    upcoming = lambda op: left[op][0] if left[op] else []

    def results(op: int, equations: Iterable) -> list:
        return [a for equation in equations for a in equation.outvars if a in read[op]]

    def piece(sender: int, part: Sequence, following: Sequence, holds: bool) -> OverlappedPiece:
        """The sender's next messages beside a part of the other op. following: the other op's
        equations that read the part's results next"""
        worker, messages, start = 1 - sender, take(sender), Wait()
        if messages:
            rows = max(variables(_largest(messages).invars), key=_size)
            start = Wait(entries[worker], [rows])
        arrived = entries[sender] = results(sender, messages)
        # The large products on which `following` waits without another one in between.
        large = _on_the_way(part, following, only_last=True)
        end = max((i for i, e in enumerate(part, 1) if e in large), default=len(part))
        products, rest, made = part[:end], part[end:], results(worker, large)
        hold = Wait(made, sorted(arrived, key=_size)[-1:]) if holds else Wait()
        return OverlappedPiece(sender, messages, products, rest, start, Wait(arrived, made), hold)

    pieces = [OverlappedPiece(1, (), take(0))]
    sender, holds = 0, holds_first
    while any(left):
        worker = 1 - sender
        part: Sequence = take(worker)
        far_first = _is_first_step_far(left[sender][:3:2])
        if far_first is not None:
            # Two steps of one way: the other op's part is cut for them. The second step can only be
            # sent after the sender's own part between the two.
            beside_first, part = _cut(part, upcoming(worker), far_first)
            following = part if _on_the_way(beside_first, part) else []
            pieces.append(piece(sender, beside_first, following, holds=False))
            pieces.append(OverlappedPiece(worker, (), take(sender)))
            entries[worker] = pieces[-2].arrival.awaited or entries[worker]
        pieces.append(piece(sender, part, upcoming(worker), holds))
        sender, holds = worker, True
    return pieces


# --- its evaluation -------------------------------------------------------------------------------


class _Evaluation:
    """The values of an op's variables so far, and the equations and waits that change them."""

    def __init__(self, op: TracedOp):
        self._op, self._env = op, dict(op.inputs)
        self._first_numbers: dict[Any, jax.Array] = {}  # variable → the first number of its array

    def evaluate(self, equations: Iterable) -> None:
        for equation in equations:
            results = bind(equation, [value_of(a, self._env) for a in equation.invars])
            self._env.update(zip(equation.outvars, results, strict=True))

    def result(self) -> Any:
        return self._op.pack([value_of(a, self._env) for a in self._op.outputs])

    def wait(self, wait: Wait, other: "_Evaluation") -> None:
        firsts = [other._first_number(a) for a in wait.awaited]
        for variable in wait.waiting if firsts else ():
            # A number that was read earlier is awaited, too: its read comes before the write of
            # this wait, which changes the array in place.
            known = self._first_numbers.get(variable)
            read = [] if known is None else [known]
            self._env[variable], number = after([*firsts, *read], self._env[variable])
            self._first_numbers[variable] = number

    def _first_number(self, variable) -> jax.Array:
        # It is read once: XLA would copy an array that is written in place while something else may
        # still read it.
        if variable not in self._first_numbers:
            array = self._env[variable]
            number = jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
            self._first_numbers[variable] = jax.lax.optimization_barrier(number)
        return self._first_numbers[variable]


def side_by_side(first: TracedOp, second: TracedOp) -> tuple[Any, Any]:
    """The results of both ops, with messages of each beside products of the other."""
    # The partitioner splits arrays over `model`: an array's first number is then on one device
    # alone, and nothing can wait for it without a collective.
    if jax.sharding.get_abstract_mesh().shape.get(MODEL, 1) > 1:
        return first.run(), second.run()
    # For TPUs what follows the products beside the first messages does not wait for these: their
    # compiler would send them before the products.
    pieces = plan_pieces(first, second, holds_first=not on_tpu())
    evaluations = _Evaluation(first), _Evaluation(second)
    for piece in pieces:
        sender, worker = evaluations[piece.sender], evaluations[1 - piece.sender]
        worker.wait(piece.start, sender)
        sender.evaluate(piece.messages)
        worker.evaluate(piece.products)
        sender.wait(piece.arrival, worker)
        worker.wait(piece.hold, sender)
        worker.evaluate(piece.rest)
    return evaluations[0].result(), evaluations[1].result()


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


# --- parts, messages and large products -----------------------------------------------------------


def _cut(part: Sequence, messages: Sequence, far_first: bool) -> tuple[Sequence, Sequence]:
    """A part cut in two, after one of the large products on which the messages behind it wait: the
    equations beside the first step, and those beside the second one.

    One of these products is beside the step inside nodes. The others are beside the step across
    nodes, which takes longer.
    """
    products = _on_the_way(part, messages)
    # Each side of the cut keeps at least one of these products.
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
    # Part n is at index 2·n, the messages after it at 2·n + 1.
    passed: dict[Any, int] = {}  # variable → the most messages on a way to it
    parts: dict[int, list] = {}
    for equation in equations:
        count = max((passed.get(a, 0) for a in variables(equation.invars)), default=0)
        is_message = sends(equation)
        parts.setdefault(2 * count + is_message, []).append(equation)
        passed |= dict.fromkeys(equation.outvars, count + is_message)
    return [parts.get(i, []) for i in range(max(parts, default=0) + 1)]


def _on_the_way(part: Sequence, messages: Sequence, only_last: bool = False) -> list:
    """The kernels and large products of a part on which messages wait, or without messages its
    results. only_last: those without another one in between"""
    work = {id(equation): _work(equation) for equation in part}
    # Kernels count as large whatever the products are, and do not make these small.
    largest = max((w for w in work.values() if w < math.inf), default=0.0)
    large = {key for key, w in work.items() if w and w >= LARGE * largest}
    maker = {out: equation for equation in part for out in equation.outvars}
    read = {a for equation in part for a in variables(equation.invars)}
    # Back from what the messages read, or without messages from the part's own results.
    todo = [a for m in messages for a in variables(m.invars)]
    todo = todo or [a for a in maker if a not in read]
    seen: set[int] = set()
    while todo:
        equation = maker.get(todo.pop())
        if equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            todo += variables(equation.invars) if not (only_last and id(equation) in large) else ()
    return [e for e in part if id(e) in large and id(e) in seen]


def _work(equation) -> float:
    """Multiplications of an equation; infinite for a kernel, whose work is not known."""
    name = equation.primitive.name
    if name in KERNELS | BLOCK_PRODUCTS:
        return math.inf
    if name in PRODUCTS:
        (contracted, _), _ = equation.params["dimension_numbers"]
        depth = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
        return float(depth * equation.outvars[0].aval.size)
    # Elementwise work on experts' rows is a call with loops inside, but no product.
    if is_on_rows(equation):
        return 0.0
    return sum(_work(e) for jaxpr in inside(equation) for e in jaxpr.eqns)


def sends(equation) -> bool:
    """True for messages without products beside them. Numbers of choices, for which the messages of
    tokens wait, are few bytes and no message of their own."""
    numbers = all(a.aval.dtype == jnp.int32 for a in equation.outvars)
    return has(equation, MESSAGES) and not numbers and not has(equation, PRODUCTS | KERNELS)
