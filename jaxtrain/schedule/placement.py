"""The placement of layers: layers → chunks → units → stages.

A model of L layers is cut into consecutive chunks, each chunk into one or more units (the layers of
one op), and unit u is on stage `stage_of[u]`. In memory the u-th units of all stages are one
stacked array [stages, stack_size(u), ...]. A stage whose u-th unit has fewer layers, or that has
none, has unused entries, which are zero, have no gradient, and are in no count, norm or checkpoint.

      L = 7, stages = 2, chunks = 2          stage 0     stage 1
                                    unit 0   0 1         2 3
                                    unit 1   4 5         6 –

The functions go from left to right: `spread` or `balanced` cuts layers into chunks, `cut` chunks
into units, PLACEMENTS puts chunks on stages, and `Placement` answers questions about the result.
No JAX here.
"""

import dataclasses
import functools
import heapq
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.schedule.table import units_of

# --- layers into chunks, chunks into units --------------------------------------------------------

# The busiest stage's time with units of entire periods of a pattern, over that without, up to which
# they are entire periods. All stages then run the same kinds in the same order, so that stages with
# as many layers have loops of known numbers of trips, and stacks and slots have no entries that
# only another stage uses.
PERIODS_WORTH = 1.03


class _Cut(NamedTuple):
    """A cut of the lowest layers into chunks: the cost of the costliest chunk, and the layer at
    which the last chunk begins."""

    cost: float
    begin: int


def spread(layers: int, chunks: int, costs: Sequence[float] = ()) -> tuple[int, ...]:
    """The number of layers of each chunk, at least one each but where there are one or two chunks
    more than layers: then the last one has none, or the first and the last.

    Without `costs` the chunks are even; if the layers do not divide, the lowest chunks have one
    more. With a cost for every layer, it is the cut whose costliest chunk costs least; of several
    such cuts, the one whose later chunks are the largest.
    """
    if layers < chunks:
        return (*(0,) * (chunks - layers - 1), *(1,) * layers, 0)
    if not costs:
        size, longer = divmod(layers, chunks)
        return tuple(size + (chunk < longer) for chunk in range(chunks))
    # Dynamic programming over chunks: the best cut of the lowest `end` layers into `count` chunks
    # is the best of (`begin` layers into one chunk fewer, and the layers from `begin` to `end` as
    # the last chunk). Costs 1 1 1 3 in two chunks: if the last one begins at layer 1, 2 or 3, the
    # costlier chunk costs 5, 4 or 3. So it begins at 3, and the sizes are (3, 1). `_Cut`s compare
    # by cost and then by `begin`.
    total = np.concatenate([[0.0], np.cumsum(costs)])
    # for 0, 1, … chunks: the number of lowest layers that they hold → the best cut of these
    cuts = [{0: _Cut(0.0, 0)}]
    for count in range(1, chunks + 1):
        fewer = cuts[-1]
        best = {
            end: min(
                _Cut(max(fewer[begin].cost, float(total[end] - total[begin])), begin)
                for begin in range(count - 1, end)
                if begin in fewer
            )
            for end in range(count, layers - (chunks - count) + 1)
        }
        cuts.append(best)
    sizes, end = [], layers
    for count in range(chunks, 0, -1):
        begin = cuts[count][end].begin
        sizes.append(end - begin)
        end = begin
    return tuple(reversed(sizes))


class TimesToBalance(NamedTuple):
    """The time of the mean layer, and of what a stage runs with the lowest layer (`before`: dense
    layers) and with the highest one (`after`: prediction modules and head).

    costs: of each layer over the mean one's, where layers are of several kinds; () elsewhere
    period: layers after which their kinds are repeated
    """

    layer: float
    before: float
    after: float
    costs: tuple[float, ...] = ()
    period: int = 1


@functools.lru_cache(2**12)
def balanced(
    layers: int,
    stage_of: tuple[int, ...],
    least: tuple[int, ...],
    work: TimesToBalance,
) -> tuple[int, ...]:
    """The number of layers of each chunk, with which the busiest stage has the least to do.

    stage_of, least: the stage of each chunk, in model order, and the fewest layers it may have
    """
    if work.costs:
        return _balanced_kinds(stage_of, least, work)
    # Each layer beyond `least` goes to the stage that has the least to do so far, the lowest of
    # several. 8 layers of time 1, four stages of one chunk with at least one layer, and a head of
    # time 2 on the last stage: the sizes become (3, 2, 2, 1), and the stages work 3, 2, 2 and 3.
    sizes, busy = list(least), [0.0] * (max(stage_of) + 1)
    busy[stage_of[0]] += work.before
    busy[stage_of[-1]] += work.after
    for stage, size in zip(stage_of, sizes, strict=True):
        busy[stage] += work.layer * size
    idlest = [(time, stage) for stage, time in enumerate(busy)]
    heapq.heapify(idlest)
    chunks = units_of(tuple(stage_of), len(busy))
    for _ in range(layers - sum(sizes)):
        time, stage = idlest[0]
        sizes[min(chunks[stage], key=sizes.__getitem__)] += 1
        heapq.heapreplace(idlest, (time + work.layer, stage))
    return tuple(sizes)


def _balanced_kinds(
    stage_of: tuple[int, ...], least: tuple[int, ...], work: TimesToBalance
) -> tuple[int, ...]:
    """`balanced` for layers of several kinds. With neither `before` nor `after`, chunks are as even
    as can be. Chunks are entire periods where the busiest stage so works at most PERIODS_WORTH as
    long."""
    layers, chunks, work_alike = len(work.costs), len(stage_of), work._replace(costs=())
    ends = work.before / work.layer, work.after / work.layer

    def sizes(layers: int, each: int = 1) -> tuple[int, ...]:
        """The sizes in multiples of `each` layers, taken to be alike."""
        if not any(ends):
            return spread(layers, chunks)
        return balanced(layers, stage_of, least, work_alike._replace(layer=work.layer * each))

    def busiest(sizes: Sequence[int]) -> float:
        """The time of the busiest stage, over that of the mean layer."""
        until = np.cumsum((0.0, *work.costs))[[0, *itertools.accumulate(sizes)]]
        stages = *stage_of, stage_of[0], stage_of[-1]
        return float(np.bincount(stages, (*np.diff(until), *ends)).max())

    best = sizes(layers)
    if any(ends):  # which are in the first and last chunk, as layers of their own
        first, *between, last = spread(layers + 2, chunks, (ends[0], *work.costs, ends[1]))
        by_costs = first - 1, *between, last - 1
        if all(map(operator.ge, by_costs, least)):
            best = min(best, by_costs, key=busiest)
    periods, rest = divmod(layers, work.period)
    if periods < sum(least):
        return best
    *lower, last = (work.period * n for n in sizes(periods, work.period))
    in_periods = *lower, last + rest
    return in_periods if busiest(in_periods) <= PERIODS_WORTH * busiest(best) else best


def cut(chunks: Sequence[int], layers_per_op: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (the number of units of each chunk, the layers of every unit in model order); 0
    layers per op: a chunk is one unit.

    A chunk whose layers do not divide has units as equal as can be.
    """
    # chunks of 4 and 3 layers, 2 layers an op: units of (2, 2) and (2, 1) layers
    units_per_chunk = tuple(
        max(1, -(-size // layers_per_op)) if layers_per_op else 1 for size in chunks
    )
    return units_per_chunk, tuple(
        size
        for chunk, units in zip(chunks, units_per_chunk, strict=True)
        for size in spread(chunk, units)
    )


# --- chunks on stages -----------------------------------------------------------------------------


def circular(stages: int, chunks: int) -> tuple[int, ...]:
    """Chunk c on stage c mod p (Narayanan et al. 2021)."""
    return tuple(c % stages for c in range(stages * chunks))


def v_shape(stages: int, chunks: int) -> tuple[int, ...]:
    """Down the stages and back up (Qi et al. 2024): 0 … p − 1, p − 1 … 0, and so on for every two
    chunks."""
    down = list(range(stages))
    return tuple(s for c in range(chunks) for s in (down if c % 2 == 0 else down[::-1]))


PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"circular": circular, "v": v_shape}


# --- the result -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Placement:
    """The layers of each stage.

    units_per_stage: the most units on a stage; the circular placement has this number on each
    stage_of: the stage of each unit, in model order; (): circular, unit u on stage u mod stages
    sizes:    the number of layers of each unit, in model order; (): as equal as can be
    forms:    the form of each layer (config/groups/layer_kinds.py); (): all are of one, "". Layers
        of each form in a unit are a stack of their own

    Raises ValueError if there are more units than layers, but for a first and a last unit that
    `sizes` leave without one.
    """

    layers: int
    stages: int = 1
    units_per_stage: int = 1
    stage_of: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    forms: tuple[str, ...] = ()

    def __post_init__(self):
        stages, units_per_stage = self.stages, self.units_per_stage
        stage_of = self.stage_of or tuple(unit % stages for unit in range(stages * units_per_stage))
        if len(stage_of) > self.layers and not self.sizes:
            raise ValueError(
                f"{stages} stages of {units_per_stage} units need at least {len(stage_of)} "
                f"layers, not {self.layers}"
            )
        sizes = self.sizes or spread(self.layers, len(stage_of))
        fits = len(sizes) == len(stage_of) and sum(sizes) == self.layers
        if not fits or min(sizes) < 0 or not all(sizes[1:-1]):
            raise ValueError(
                f"units of {sizes} layers on stages {stage_of} are not {self.layers} layers"
            )
        # The defaults are filled in, so that every reader finds a stage and a size for each unit.
        object.__setattr__(self, "stage_of", stage_of)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(
            self, "units_per_stage", max(stage_of.count(stage) for stage in range(stages))
        )

    def unit_at(self, local_unit: int, stage: int) -> int | None:
        """The unit, in model order, of a stage's local unit; None if the stage has fewer."""
        units = units_of(self.stage_of, self.stages)[stage]
        return units[local_unit] if local_unit < len(units) else None

    def layers_of(self, local_unit: int, stage: int) -> range:
        """The layers of a stage's unit; empty without such a unit."""
        unit = self.unit_at(local_unit, stage)
        if unit is None:
            return range(0)
        begin = sum(self.sizes[:unit])
        return range(begin, begin + self.sizes[unit])

    def layer_count(self, local_unit: int, stage: int) -> int:
        """The number of layers in a stage's unit; 0 without such a unit."""
        return len(self.layers_of(local_unit, stage))

    def kinds_of_units(self, kinds: Sequence[str]) -> list[tuple[str, ...]]:
        """The kinds of the layers of each unit. kinds: of each layer"""
        ends = itertools.accumulate(self.sizes)
        units = zip(ends, self.sizes, strict=True)
        return [tuple(kinds[end - size : end]) for end, size in units]

    def stack(self, local_unit: int, stage: int, form: str = "") -> list[int]:
        """The layers of a form in a stage's unit, in the order of its stacked array."""
        layers = self.layers_of(local_unit, stage)
        return [i for i in layers if not form or self.forms[i] == form]

    def held(self, local_unit: int, stage: int, form: str = "") -> range:
        """The layers of `stack`, by their numbers among all layers of the form."""
        layers = self.layers_of(local_unit, stage)
        if not form:
            return layers
        before = self.forms[: layers.start].count(form)
        return range(before, before + len(self.stack(local_unit, stage, form)))

    def forms_of_unit(self, local_unit: int) -> tuple[str, ...]:
        """The forms of which some stage has a layer in the unit, in the model's order; ("",) where
        all layers are of one form."""
        if not self.forms:
            return ("",)
        forms = dict.fromkeys(self.forms)
        return tuple(form for form in forms if self.stack_size(local_unit, form))

    def of_units(self, layer: dict) -> dict[str, dict]:
        """Local unit → the part of `layer` for its stacks, {form: part}; `layer` itself where all
        layers are of one form."""
        of_forms = lambda unit: {form: layer[form] for form in self.forms_of_unit(unit)}
        units = range(self.units_per_stage)
        return {str(unit): of_forms(unit) if self.forms else layer for unit in units}

    def stack_size(self, local_unit: int, form: str = "") -> int:
        """The layers in the stacked array of these units: the most that a stage has."""
        return max(len(self.stack(local_unit, stage, form)) for stage in range(self.stages))

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """The layers of each form whose parameters a device has memory for, the same on all
        stages."""
        units = range(self.units_per_stage)
        return tuple(
            sum(self.stack_size(unit, form) for unit in units)
            for form in dict.fromkeys(self.forms or [""])
        )

    def layer_index(self, local_unit: int, form: str = "") -> np.ndarray:
        """int32 [stages, stack_size]: the layer of each entry of the stacked array, −1 of an unused
        one."""
        index = np.full((self.stages, self.stack_size(local_unit, form)), -1, np.int32)
        for stage in range(self.stages):
            layers = self.stack(local_unit, stage, form)
            index[stage, : len(layers)] = layers
        return index

    def describe(self) -> str:
        """A text with the number of layers on each stage: "7 layers on 2 pipeline stages: 4, 3"."""
        if self.stages == 1:
            return f"{self.layers} layers on one stage"
        counts = [
            sum(self.layer_count(unit, stage) for unit in range(self.units_per_stage))
            for stage in range(self.stages)
        ]
        listed = f"{counts[0]} on each" if len({*counts}) == 1 else ", ".join(map(str, counts))
        return f"{self.layers} layers on {self.stages} pipeline stages: {listed}"
