"""The loops over the layers of one unit, and the parameters that each layer gets.

Begin with `plan_loops`: it turns the layers of each stage, in the order in which they run, into a
list of `Loop`s. The plan computes nothing on a device and can be printed. `run_trips_of` runs any
plan; `run_loops` runs one of layers whose parameters are at hand, and `run_loops_gathering` one
(of `plan_unit`) where ZeRO-3 gathers them layer by layer. `UnitCollectives` has ZeRO's collectives.

A loop repeats stretches: layers of one range, one after the other. Ranges differ in what they save,
and in their kind. Nine layers of a pattern of three windows (w) and one full attention (f):

    all stages w w w f w w w f w     2 × (w 3, f 1); then w 1
    stage 0    w w w f w             2 × (w 3, f 1 | w 1, f 0) on stage 0,
    stage 1    w w f w                   (w 2, f 1 | w 1, f 0) on stage 1

Where stages have the same layers all counts are ints, and where they differ they are traced int32,
read from a table by the stage: a kind of which there is none has a loop of no trips.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.devices.mesh import on_nvidia_gpu
from jaxtrain.parallel.zero import Zero, gather, in_memory_order, in_order, reduce_in_op

LayerNumber = Any  # an int, or a traced int32
LayerBody = Callable  # (a layer's range, its LayerIndex, its parameters, carry) → carry
# A plan whose stretches have more bodies than this takes kinds from a table, and each has one body.
MOST_BODIES = 8


class LayerIndex(NamedTuple):
    """Where a layer is: its number in the unit, its row in the stack of its form, and its entry in
    a slot of its pools."""

    number: LayerNumber
    row: LayerNumber
    entry: LayerNumber


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRange:
    """Layers of every unit that are of one kind, and save the same for their backward.

    split: a RecomputedLayer, or a LayerSplit, whose residuals and weight stash say which arrays lie
        in the pools, in which order
    begin, end: of a unit's layers, those of other kinds counted; end None: the unit's. A unit of
        fewer layers has those that it has.
    recomputed: the op R makes the residuals, where the unit has one, and not F
    residual_b, residual_w, weight_stash: the names of the pools
    layer_input: the name of the pool in which F leaves each layer's input for R; "": R starts from
        the unit's input, and makes each layer's from the one before
    kind, form: of the layers (config/groups/layer_kinds.py)
    pool_kinds: the kinds whose layers leave arrays of the same shapes, so that they share pools
    """

    split: Any
    begin: int = 0
    end: int | None = None
    recomputed: bool = False
    residual_b: str = "residual_b"
    residual_w: str = "residual_w"
    weight_stash: str = "weight_stash"
    layer_input: str = ""
    kind: str = ""
    form: str = ""
    pool_kinds: tuple[str, ...] = ("",)

    @property
    def pools_of_forward(self) -> list[str]:
        """The names of the pools that F or R fills."""
        return [n for n in (self.residual_b, self.residual_w, self.layer_input) if n]

    @property
    def pool(self) -> str:
        """The key of its arrays in each of its pools."""
        return self.pool_kinds[0]

    @property
    def saved(self) -> tuple[str, str]:
        """Its key among what forward and backward at once save."""
        return self.residual_b, self.pool

    def has(self, kinds: Sequence[str], number: int) -> bool:
        """True if layer `number` of a unit is in it. kinds: of the unit's layers"""
        end = len(kinds) if self.end is None else self.end
        return self.begin <= number < end and kinds[number] == self.kind

    def leaves(self, kinds: Sequence[str]) -> list[bool]:
        """For each layer of a unit, True if it leaves arrays in its pools."""
        end = len(kinds) if self.end is None else self.end
        return [self.begin <= i < end and kinds[i] in self.pool_kinds for i in range(len(kinds))]

    def most_entries(self, units: Sequence[Sequence[str]]) -> int:
        """The most such layers in any unit. units: the kinds of the layers of each"""
        return max(sum(self.leaves(kinds)) for kinds in units)


@dataclasses.dataclass(frozen=True, eq=False)
class UnitCollectives:
    """ZeRO's collectives inside the ops of one unit.

    zero: whether ops gather each layer's parameters before they use them, and reduce its gradients
        once they have them
    reductions: the `Reduction` of each parameter, in a pytree like one layer's parameters, {form:
        pytree} where layers are of several forms; it may be None where ops do neither
    """

    zero: Zero = Zero()
    reductions: Any = None

    def of_form(self, form: str) -> "UnitCollectives":
        """The collectives with the reductions of one form's layers; form: "" where there is one"""
        return dataclasses.replace(self, reductions=self.reductions[form]) if form else self

    @property
    def reduce_late(self) -> bool:
        """True where a layer's gradients are reduced one trip late, so that the collective overlaps
        with the products of the next layer."""
        # XLA's GPU compiler moves no collective into a loop's next trip by itself: a reduction
        # would stand alone behind its layer's last product. TPUs do not need it.
        return on_nvidia_gpu()

    def parameters(self, stack, i: LayerNumber, reads: Callable[[], Any]) -> Any:
        """Layer i's parameters, gathered where `reads()`, a tree of bools like them, says so."""
        one = lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False)
        params = jax.tree.map(one, stack)
        # Matrices of FP8 lie in one order in memory, or XLA transposes the stack in every tick.
        if on_nvidia_gpu() and self.reductions is not None:
            params = jax.tree.map(in_memory_order, self.reductions, params)
        if not self.zero.gathers_in_ops:
            return params
        with jax.named_scope("gather"):
            return jax.tree.map(
                lambda reduction, a, read: gather(a, reduction) if read else a,
                self.reductions,
                params,
                reads(),
            )

    def reduced(self, gradients) -> Any:
        """One layer's gradients, each summed over its `shard_axes`: this device's shards."""
        with jax.named_scope("reduce"):
            return jax.tree.map(
                lambda g, r: reduce_in_op(g, r, self.zero.dtype), gradients, self.reductions
            )

    def add(self, sums, gradients, i: LayerNumber, is_single: bool) -> Any:
        """The stack `sums` with layer i's gradients, which are reduced before if ops do that.
        is_single: layer i is the stack's only one"""
        if self.zero.reduces_in_ops:
            gradients = self.reduced(gradients)
        # The sum of two arrays, where no other layer's sums have to stay in place.
        if is_single:
            return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), sums, gradients)
        return jax.tree.map(lambda a, g: a.at[i].add(g.astype(a.dtype)), sums, gradients)

    def added(self, sums, gradients, i: LayerNumber) -> Any:
        """Layer i's gradients and its sums in the stack `sums`: one layer's arrays, in the type of
        the sums."""
        return jax.tree.map(
            lambda a, g, r: in_order(a[i], r) + g.astype(a.dtype), sums, gradients, self.reductions
        )


# --- the plan -------------------------------------------------------------------------------------


class Trip(NamedTuple):
    """What a stage does in one trip of a loop.

    label: what runs: a LayerRange, or two at once. Trips of one label have one body.
    values: ints, the same number for each label. From a trip to the next one of the same label they
        change by the same steps.
    """

    label: Any
    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Trips of one label that follow each other.

    first: ints [values, stages, repeats], the values of the first trip
    count: ints [stages, repeats], the number of trips
    step: by how much the values change from a trip to the next one
    """

    label: Any
    first: np.ndarray
    count: np.ndarray
    step: tuple[int, ...]

    @property
    def is_known(self) -> bool:
        """True if it has as many trips on all stages and in all repeats."""
        return bool((self.count == self.count.flat[0]).all())

    @property
    def has_layers(self) -> bool:
        """True if each stage has a trip in each repeat."""
        return bool(self.count.all())

    def values(self, stage, repeat: LayerNumber) -> list[LayerNumber]:
        """The values of the first trip."""
        return [_entry(table, stage, repeat) for table in self.first]

    def run(self, stage, repeat: LayerNumber, trip: Callable, carry, peeled: int = 0):
        """carry = trip(number, carry) in each trip but the last ones, `peeled`. Returns (the number
        of the trip after that, the carry)."""
        trips = _entry(self.count, stage, repeat) - peeled
        counts = (self.count - peeled).sum(1).tolist()
        # XLA's text has no number of trips that differs between stages. The planner reads it here
        # (planner/programs/loops.py).
        with jax.named_scope(f"trips_{'_'.join(map(str, counts))}_of_{self.count.shape[1]}"):
            return trips, run_trips(0, trips, trip, carry)

    def after(self, values: Sequence[LayerNumber], trips: LayerNumber) -> list[LayerNumber]:
        """The values so many trips after those with `values`."""
        return [_after(a, trips, step) for a, step in zip(values, self.step, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """Stretches one after the other, all of them `repeats` times."""

    stretches: list[Stretch]
    repeats: int = 1


def _after(value: LayerNumber, trips: LayerNumber, step: int) -> LayerNumber:
    """A value after so many trips in which it has changed by `step`."""
    if step in (1, -1):
        return value + trips if step > 0 else value - trips
    return value + trips * step


def _entry(table: np.ndarray, stage, repeat: LayerNumber) -> LayerNumber:
    """The entry of a table [stages, repeats]: an int where it is known while tracing."""
    if (table != table[0]).any():
        of_stage = jnp.asarray(table)[stage]
        return of_stage[repeat]
    if isinstance(repeat, int):
        return int(table[0, repeat])
    steps = set(np.diff(table[0]).tolist())
    if len(steps) > 1:
        return jnp.asarray(table[0])[repeat]
    # An index that grows by the same step needs no table.
    (step,) = steps
    return _after(int(table[0, 0]), repeat, step) if step else int(table[0, 0])


def layers_in_order(ranges: Sequence[LayerRange], kinds: Sequence[str]) -> list[Trip]:
    """A trip for each layer of a unit. kinds: of its layers; the values are a LayerIndex"""
    trips: list[Trip] = []
    rows = collections.Counter[str]()  # by form
    before = {id(each): [0, *itertools.accumulate(each.leaves(kinds))] for each in ranges}
    for number in range(len(kinds)):
        layers = next(each for each in ranges if each.has(kinds, number))
        index = LayerIndex(number, rows[layers.form], before[id(layers)][number])
        rows[layers.form] += 1
        trips.append(Trip(layers, index))
    return trips


def plan_loops(stages: Sequence[list[Trip]], peel_first: bool = False) -> list[Loop]:
    """The loops that run each trip of each stage once, in order.

    stages: the trips of each stage
    peel_first: the trip that runs first stands outside of other loops; every stage has it, with the
        same label
    """
    if not any(stages):
        return []
    steps: dict[Any, tuple[int, ...]] = {}
    for a, b in itertools.chain(*map(itertools.pairwise, stages)):
        if a.label == b.label:
            steps[a.label] = tuple(np.subtract(b.values, a.values).tolist())
    parts = _parts([trips[peel_first:] for trips in stages])
    if peel_first:
        parts.insert(0, [[[trips[:1]]] for trips in stages])
    return [_loop(part, steps) for part in parts]


class UnitLoops(NamedTuple):
    """The loops over layers of one unit, and the rows of these in the stacks of their forms.

    first_rows: for each stage the row of the layer that runs first
    way: 1, or −1 where rows go down
    """

    loops: list[Loop]
    first_rows: list[int]
    way: int


def plan_unit(
    stages: Sequence[list[Trip]], reverse: bool = False, peel_first: bool = False
) -> UnitLoops:
    """The loops over layers of a unit, in their order or in `reverse`.

    stages: the layers of each stage in their order (`layers_in_order`)
    peel_first: as for `plan_loops`
    """
    if reverse:
        stages = [of_stage[::-1] for of_stage in stages]
    rows = [LayerIndex(*of_stage[0].values).row if of_stage else 0 for of_stage in stages]
    return UnitLoops(plan_loops(stages, peel_first), rows, -1 if reverse else 1)


# Trips as a loop runs them, by stage, by repeat and by stretch.
_Part = list[list[list[list[Trip]]]]


def _parts(stages: Sequence[Sequence[Trip]]) -> list[_Part]:
    """The trips of each stage, cut into the loops that run them: whole periods, and what is before
    and after them; or one loop over all, where stages differ."""
    stretches = [
        [list(alike) for _, alike in itertools.groupby(trips, lambda trip: trip.label)]
        for trips in stages
    ]
    shapes = [[(trips[0].label, len(trips)) for trips in of_stage] for of_stage in stretches]
    if all(shape == shapes[0] for shape in shapes):
        before, period, repeats = _period(shapes[0])
        after = before + period * repeats
        if before + period + len(shapes[0]) - after <= MOST_BODIES:
            cuts = [(0, before, 1), (before, period, repeats), (after, len(shapes[0]) - after, 1)]
            return [
                [[of_stage[at + size * i :][:size] for i in range(count)] for of_stage in stretches]
                for at, size, count in cuts
                if size
            ]
    # Each repeat has a stretch of each label, in one order; the best one needs the fewest repeats.
    labels = list(dict.fromkeys(label for shape in shapes for label, _ in shape))
    orders = [labels[i:] + labels[:i] for i in range(len(labels))]
    options = [[_in_order(of_stage, order) for of_stage in stretches] for order in orders]
    part = min(options, key=lambda option: max(map(len, option)))
    none: list[list[Trip]] = [[] for _ in labels]
    most = max(map(len, part))
    return [[of_stage + [none] * (most - len(of_stage)) for of_stage in part]]


def _period(shape: list) -> tuple[int, int, int]:
    """Returns (the stretches before the period, those of a period, its repeats), with the fewest
    bodies. shape: the label and length of each stretch"""
    cuts = [(0, len(shape), 1)]
    for before, period in itertools.product(range(len(shape)), range(1, len(shape) // 2 + 1)):
        block, repeats = shape[before : before + period], 1
        while shape[before + period * repeats :][:period] == block:
            repeats += 1
        cuts.append((before, period, repeats))
    # a stretch of each body; those beyond the first repeat have none of their own
    return max(cuts, key=lambda cut: cut[1] * (cut[2] - 1))


def _in_order(stretches: list[list[Trip]], labels: Sequence) -> list[list[list[Trip]]]:
    """A stage's stretches as repeats that have one of each label, in this order; many are empty."""
    repeats: list[list[list[Trip]]] = []
    last = len(labels)
    for trips in stretches:
        number = labels.index(trips[0].label)
        if number <= last:
            repeats.append([[] for _ in labels])
        repeats[-1][number], last = trips, number
    return repeats


def _loop(part: _Part, steps: dict[Any, tuple[int, ...]]) -> Loop:
    stretches = []
    for number in range(len(part[0][0])):
        table = [[repeat[number] for repeat in of_stage] for of_stage in part]
        label, values = next(trips[0] for trips in itertools.chain(*table) if trips)
        # Where a stretch is empty nothing reads its first trip. With another stage's there more of
        # the table is known while tracing.
        others = [
            next((trips[0].values for trips in of_repeat if trips), values)
            for of_repeat in zip(*table, strict=True)
        ]
        first = [
            [trips[0].values if trips else a for trips, a in zip(of_stage, others, strict=True)]
            for of_stage in table
        ]
        count = np.array([[len(trips) for trips in of_stage] for of_stage in table])
        # Where none follows another one, any step will do but 0: values that no trip changes would
        # make all of a W's products invariant, and XLA would compute them before a loop of no trip.
        step = steps.get(label, (1,) * len(values))
        stretches.append(Stretch(label, np.moveaxis(np.array(first), -1, 0), count, step))
    return Loop(stretches, len(part[0]))


# --- three ways to run it -------------------------------------------------------------------------


def run_trips_of(loops: Sequence[Loop], stage, step: Callable, carry):
    """carry = step(label, values, carry) in each trip. stage: this device's, a traced int32"""

    def repeat(loop: Loop, number: LayerNumber, carry):
        for each in loop.stretches:
            first = each.values(stage, number)
            trip = lambda number, carry, each=each, first=first: step(
                each.label, each.after(first, number), carry
            )
            _, carry = each.run(stage, number, trip, carry)
        return carry

    for loop in loops:
        carry = run_trips(0, loop.repeats, functools.partial(repeat, loop), carry)
    return carry


def run_loops(loops: Sequence[Loop], stage, body: LayerBody, parameters: Callable[..., Any], carry):
    """carry = body(range, i, parameters(range, i's row), carry) for each layer i. stage: this
    device's, a traced int32"""

    def step(layers: LayerRange, values: Sequence[LayerNumber], carry):
        i = LayerIndex(*values)
        return body(layers, i, parameters(layers, i.row), carry)

    return run_trips_of(loops, stage, step, carry)


def run_loops_gathering(
    plan: UnitLoops,
    stage,
    body: LayerBody,
    gathered: Callable[[LayerRange, LayerNumber], Any],
    carry,
):
    """carry = body(range, i, gathered(range, i's row), carry) for each layer i. `gathered` has
    collectives: each layer's trip begins with those of the next layer, so that they overlap with
    this layer's products. If layers are of several forms, stages have the same ones."""

    def repeat(loop: Loop, number: LayerNumber, following: _Following, state):
        """One repeat of a loop, before the layer `following`, if any."""
        others = [_first_layer(each, stage, number) for each in loop.stretches[1:]]
        for each, after in zip(loop.stretches, [*others, following], strict=True):
            first = each.values(stage, number)

            def trip(number: LayerNumber, state, each=each, first=first, last=False, after=after):
                parameters, carry = state
                i = LayerIndex(*each.after(first, number))
                # Before the body, which does not depend on it: so XLA may start the gather first.
                after = after if last else (each.label, i.row + plan.way)
                ahead = gathered(*after) if after else None
                return ahead, body(each.label, i, parameters, carry)

            # The last trip has nothing to gather, or arrays of other shapes than a loop carries. A
            # stage may have no layer in the stretch: then it is in the loop, and may gather a layer
            # that nobody reads; its row is clamped.
            peels = each.has_layers and not _same_form(each, after)
            last, state = each.run(stage, number, trip, state, peeled=peels)
            if peels:
                state = trip(last, state, last=True)
        return state

    # The first layer's parameters are gathered before all loops; nothing overlaps with that.
    row = _entry(np.array(plan.first_rows)[:, None], stage, 0)
    state = gathered(plan.loops[0].stretches[0].label, row), carry
    for loop, after in zip(plan.loops, [*plan.loops[1:], None], strict=True):
        following = _first_layer(after.stretches[0], stage, 0) if after else None
        head, peels = loop.stretches[0], loop.stretches[-1].has_layers
        peels = loop.repeats == 1 or (peels and not _same_form(head, following))

        def in_loop(number: LayerNumber, state, loop=loop):
            return repeat(loop, number, _first_layer(loop.stretches[0], stage, number + 1), state)

        state = run_trips(0, loop.repeats - peels, in_loop, state)
        if peels:
            state = repeat(loop, loop.repeats - 1, following, state)
    return state[1]


# The range and the row of the layer that runs next; None: there is none.
_Following = tuple[LayerRange, LayerNumber] | None


def _first_layer(layers: Stretch, stage, repeat: LayerNumber) -> _Following:
    return layers.label, LayerIndex(*layers.values(stage, repeat)).row


def _same_form(layers: Stretch, following: _Following) -> bool:
    return following is not None and following[0].form == layers.label.form


def run_trips(start: LayerNumber, stop: LayerNumber, step: Callable, carry):
    """`lax.fori_loop`, without a loop for a number of trips that is known to be 0 or 1."""
    # XLA fuses and reorders nothing across a loop's border, so one known trip stands outside.
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 1:
        return step(start, carry) if stop > start else carry
    return lax.fori_loop(start, stop, step, carry)
