"""The values that cross from an op of a layer to a later one: residuals from F to B and W, the
weight stash from B to W.

Begin with `plan_crossing`. It works on a `FlatLayer`, the layer and its vjp as one flat list of
equations, and computes nothing on a device. A plan starts from the values that an op needs and
walks back to their operands. Each value on the way gets a `Fate`, and the walk goes on behind those
that the op computes. For y = tanh(x·A)·B, with everything saved, h = tanh(x·A), and g the gradient
of y:

    W needs            fate       because
    dB = h·g           COMPUTED   no other op has it
    h                  SAVED      F has left it, and B reads it, too
    g                  STASHED    only B gets it
    dA = x·da          COMPUTED
    x                  SAVED
    da = g·B·(1 - h²)  STASHED    B computes it for dx
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxtrain.runtime.layers.equations import (
    CHEAP,
    ELEMENTWISE,
    GATHERS,
    KERNELS,
    PRODUCTS,
    RECOMPUTED,
    KeepRule,
    has,
    is_fp8,
    is_on_rows,
    is_only,
    is_ring,
    is_view,
    size_in_bytes,
    variables,
)

# of a tensor, or of its blocks, to FP8
ROUNDING = CHEAP | frozenset(
    "abs reduce_max max min clamp shift_left shift_right_logical and".split()
)
SMALLER = 8  # times that a sum has fewer bytes than what it adds up


class Fate(enum.Enum):
    """How an op gets a value that it needs.

    SAVED: it is a residual, which the forward has saved
    STASHED: B has left it for W
    REMADE: cheap equations make it from values that are there
    COMPUTED: the op computes it from its operands, which it needs then
    MISSING: in none of these ways
    """

    SAVED = enum.auto()
    STASHED = enum.auto()
    REMADE = enum.auto()
    COMPUTED = enum.auto()
    MISSING = enum.auto()


@dataclasses.dataclass(frozen=True, eq=False)
class FlatLayer:
    """A layer and its vjp as one list of equations, (params, extra, x, g) → y, dx, dp. All fields
    but the equations and `consts` are variables of these.

    equations: in order; calls are inlined, scans unrolled
    consts: variable → array
    x, g: the layer's input, and the gradient of its output y
    dx, dp: the gradients of x, and of each array of the parameters
    """

    equations: Sequence
    consts: dict[Any, Any]
    params: Sequence
    extras: Sequence
    x: Any
    g: Any
    y: Any
    dx: Any
    dp: Sequence

    @functools.cached_property
    def maker(self) -> dict:
        """Variable → the equation that makes it."""
        return {out: equation for equation in self.equations for out in equation.outvars}

    @functools.cached_property
    def _order(self) -> dict[int, int]:
        return {id(equation): i for i, equation in enumerate(self.equations)}

    @functools.cached_property
    def late(self) -> set:
        """The variables that no forward has: they depend on g, or `jax.checkpoint` recomputes
        them."""
        late = {self.g}
        for equation in self.equations:
            is_recomputed = RECOMPUTED in str(equation.source_info.name_stack)
            if is_recomputed or not late.isdisjoint(variables(equation.invars)):
                late.update(equation.outvars)
        return late

    @functools.cached_property
    def free(self) -> set:
        """The variables that every op can make by itself: they depend on parameters, positions and
        constants alone."""
        free = {*self.params, *self.extras, *self.consts}
        for equation in self.equations:
            is_late = not self.late.isdisjoint(equation.outvars)
            if not is_late and free.issuperset(variables(equation.invars)):
                free.update(equation.outvars)
        return free

    @functools.cached_property
    def has_fp8(self) -> bool:
        return any(map(is_fp8, self.maker))

    @functools.cached_property
    def _positions(self) -> dict[Any, int]:
        return {out: i for i, out in enumerate(self.maker)}

    def position(self, value) -> int:
        """The number of the value among those that equations make, in order; −1 for an input."""
        # Results of one equation have numbers of their own. Values are kept in sets, whose order
        # differs between processes, and sorted by this number: all processes then save the same
        # arrays in the same order.
        return self._positions.get(value, -1)

    def needed(self, outputs: Iterable, available: Iterable) -> list:
        """The equations that make `outputs` from the inputs and the available values, in order."""
        available, seen, todo = set(available), {}, variables(outputs)
        while todo:
            value = todo.pop()
            equation = self.maker.get(value)
            if value in available or equation is None or id(equation) in seen:
                continue
            seen[id(equation)] = equation
            todo += variables(equation.invars)
        return sorted(seen.values(), key=lambda equation: self._order[id(equation)])

    def fates(self, values: Iterable, fate_of: Callable[[Any], Fate]) -> dict[Any, Fate]:
        """The fate of each of these values, of the operands of those that are COMPUTED, of the
        operands of these, and so on. Values that every op can make have none."""
        fates: dict[Any, Fate] = {}
        todo = list(values)
        while todo:
            value = todo.pop()
            if value not in fates and value not in self.free:
                fates[value] = fate_of(value)
                if fates[value] is Fate.COMPUTED:
                    todo += variables(self.maker[value].invars)
        return fates


@dataclasses.dataclass(frozen=True, eq=False)
class Crossing:
    """The variables that cross, in the order in which the ops compute them.

    for_b: residuals that only B reads
    for_w: residuals that W reads; B may read them, too
    stashed: what B leaves for W
    """

    for_b: Sequence
    for_w: Sequence
    stashed: Sequence

    @property
    def saved(self) -> list:
        return [*self.for_b, *self.for_w]


def plan_crossing(layer: FlatLayer, keep: KeepRule, cheap: frozenset[str]) -> Crossing:
    """The values that F saves, and those that B leaves for W.

    keep: what may cross from the forward to the backward; cheap: the primitives whose results an
    op makes once more from operands that have crossed"""
    # What the forward saves is decided first: all that the backward reads must come from it.
    saved = saved_values(layer, keep, cheap)
    fates = weight_fates(layer, saved, cheap)
    for_w = {value for value, fate in fates.items() if fate is Fate.SAVED}
    stashed = [value for value, fate in fates.items() if fate is Fate.STASHED]
    return Crossing(
        [value for value in saved if value not in for_w],
        [value for value in saved if value in for_w],
        sorted(stashed, key=layer.position),
    )


def saved_values(layer: FlatLayer, keep: KeepRule, cheap: frozenset[str]) -> list:
    """The values that the forward leaves, so that the backward can make all that it reads, in the
    order in which they are made."""

    def fate_of(value) -> Fate:
        maker = layer.maker.get(value)
        # A view's operand crosses in its place: it has no more bytes.
        crosses = value is layer.x or (keep(maker) and not is_view(maker))
        return Fate.SAVED if crosses else Fate.COMPUTED

    equations = layer.needed([layer.dx, *layer.dp], ())
    backward = [e for e in equations if not layer.late.isdisjoint(e.outvars)]
    reads = [a for e in backward for a in variables(e.invars)]
    # A parameter's gradient that does not depend on g, as a count of tokens, is needed as it is.
    needed = [a for a in (*reads, *variables(layer.dp)) if a not in layer.late]
    fates = layer.fates(needed, fate_of)
    saved = {value for value, fate in fates.items() if fate is Fate.SAVED}
    # From the last value to the first: a sum goes before its operands, from which it is remade.
    for value in sorted(saved, key=layer.position, reverse=True):
        if value is not layer.x and _sources(layer, value, saved - {value}, cheap) is not None:
            saved.remove(value)
    return sorted(saved, key=layer.position)


def weight_fates(layer: FlatLayer, saved: Sequence, cheap: frozenset[str]) -> dict[Any, Fate]:
    """The fate of each value that W needs: SAVED, STASHED, REMADE from the former, or COMPUTED.

    saved: the residuals
    """
    residuals = set(saved)
    # What B computes in any case costs W nothing but memory until it runs.
    in_b = {a for e in layer.needed([layer.dx], saved) for a in e.outvars}
    remade_from: dict[Any, set] = {}

    def fate_of(value) -> Fate:
        # The order of these questions matters: the first that is true decides.
        if value in residuals:
            return Fate.SAVED
        if value is layer.g:
            return Fate.STASHED
        maker = layer.maker[value]
        # A gradient that B has gathered is stashed, not gathered twice: it lives only from B to W.
        if value in in_b and value in layer.late and (has(maker, GATHERS) or is_ring(maker)):
            return Fate.STASHED
        # A barrier has several results, and W does not have the operands of all.
        if is_fp8(value) and len(maker.outvars) > 1:
            return Fate.STASHED
        if is_view(maker):
            return Fate.COMPUTED
        if (sources := _sources(layer, value, residuals, cheap)) is not None:
            remade_from[value] = sources
            return Fate.REMADE
        # Work on experts' rows is stashed, too, though B may not need it: otherwise the products
        # before an activation would wait until W.
        on_rows = is_on_rows(maker, ELEMENTWISE)
        if value in in_b or on_rows or _is_reduced_in_b(layer, value):
            return Fate.STASHED
        return Fate.COMPUTED

    fates = layer.fates(variables(layer.dp), fate_of)
    # Of a value to be remade and the residuals for that, those with fewer bytes stay until W. The
    # residuals may have a tenth more, since B need not make the value then. The largest values come
    # first: the residuals that stay for them cost the others nothing.
    for_w = {value for value, fate in fates.items() if fate is Fate.SAVED}
    for value in sorted(remade_from, key=lambda v: (-size_in_bytes([v]), layer.position(v))):
        if size_in_bytes(remade_from[value] - for_w) > 1.1 * size_in_bytes([value]):
            fates[value] = Fate.STASHED
        else:
            for_w |= remade_from[value]
    return fates | dict.fromkeys(for_w, Fate.SAVED)


def is_gathered(layer: FlatLayer, value) -> bool:
    """True for a value that is gathered over `model`, or is rounded to FP8 from such a one."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        maker = layer.maker.get(value)
        if maker is None or value in seen:
            continue
        if has(maker, GATHERS):
            return True
        # Only rounding to FP8 stands between such a value and its gather.
        seen.add(value)
        if is_only(maker, ROUNDING) and (len(seen) > 1 or is_fp8(value)):
            todo += variables(maker.invars)
    return False


def _sources(layer: FlatLayer, value, available: set, cheap: frozenset[str]) -> set | None:
    """The available values from which cheap equations make `value`; None if these do not
    suffice."""

    def fate_of(value) -> Fate:
        if value in available:
            return Fate.SAVED
        if value in layer.late or value is layer.x or not is_only(layer.maker[value], cheap):
            return Fate.MISSING
        return Fate.COMPUTED

    fates = layer.fates([value], fate_of)
    if Fate.MISSING in fates.values():
        return None
    return {value for value, fate in fates.items() if fate is Fate.SAVED}


def _is_reduced_in_b(layer: FlatLayer, value) -> bool:
    """True for a value that B makes for W alone, so that less waits in between, where products are
    of FP8: their operands, the scales of these, and sums over tokens of numbers that are not of
    FP8."""
    maker = layer.maker[value]
    if not layer.has_fp8 or has(maker, PRODUCTS | KERNELS):
        return False
    largest = max(size_in_bytes([a]) for a in variables(maker.invars))
    return is_fp8(value) or SMALLER * size_in_bytes([value]) <= largest
