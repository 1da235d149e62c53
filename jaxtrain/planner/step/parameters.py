"""What a device holds of a model: its parameters, the optimizer's state and masters."""

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtrain.config import OptimizerConfig
from jaxtrain.config.groups.layer_kinds import kinds_of_layers
from jaxtrain.config.optimizers import record_of
from jaxtrain.config.sizes import SHARD_AXES, padded_vocabulary, scattered
from jaxtrain.planner.layer.collective_time import Parameters
from jaxtrain.planner.layer.layer import EXPERT, MODEL, ParameterShape
from jaxtrain.planner.layer.layout import AXES
from jaxtrain.planner.layer.links import CONTEXT, DATA, REPLICA, STAGE
from jaxtrain.planner.layer.model import Model
from jaxtrain.planner.step.step_part import StepPart, once
from jaxtrain.planner.step.time_breakdown import COMMUNICATION_AXES

# numbers of a device beside an optimizer's state
MASTERS, PARAMETERS, AVERAGE = "masters", "parameters", "average"
Layers = tuple[int, ...]  # of each form, in the order of Model.forms


@dataclasses.dataclass(frozen=True)
class DeviceParameters:
    """Numbers of parameters on a device.

    layers:  in the stage's layers
    ends:    before and after them: tables, the last norm, dense first layers, multi-token
             prediction modules
    experts: the part of `layers` that experts have
    sharded_ends: `ends` where they are sharded as in ZeRO-3 (`parallel.ends`), otherwise None
    """

    layers: float
    ends: float
    experts: float
    sharded_ends: float | None = None


class HeldNumbers(NamedTuple):
    """Numbers of parameters, of an optimizer's state or of masters on a device: of a layer of each
    form in a stage's stacks, and the part that experts have; of a table of the vocabulary; and of
    all that is before and after a stage's layers."""

    layer: Sequence[float]
    experts: Sequence[float]
    table: float
    ends: float


@functools.lru_cache(maxsize=4096)
def _held_numbers(
    model: Model,
    of: OptimizerConfig | str,
    sizes: tuple[int, ...],
    zero: bool,
    shared: bool,
    shards_ends: bool,
    tables: int,
) -> HeldNumbers:
    """The numbers where ZeRO shards a dimension of each array.

    of: an optimizer's state; MASTERS, which are those of the matrices that products read; AVERAGE,
    of all parameters; or PARAMETERS, which stages do not share
    sizes: of the axes in COMMUNICATION_AXES; zero: ZeRO's stage is at least 1; shared: each table
    is split over the stages; shards_ends: what stands before and after the layers has axes of its
    own; tables: of the vocabulary
    """
    by_axis = dict(zip(COMMUNICATION_AXES, sizes, strict=True))
    optimizer = None if isinstance(of, str) else of
    record = record_of(optimizer.name) if optimizer else None

    def numbers(
        array: ParameterShape,
        at_end: bool = True,
        over_stage: bool = True,
        padded: tuple[int, ...] = (),
    ) -> int:
        padded = padded or array.shape
        splits = [by_axis.get(axis, 1) for axis in array.axes]
        if zero:
            shard_axes = SHARD_AXES if at_end and shards_ends else (DATA,)
            inside = [axis for axis in shard_axes if axis not in array.axes]
            unsplit = [not axis for axis in array.axes]
            axes, dim = scattered(padded, unsplit, inside, over_stage and of != PARAMETERS, by_axis)
            splits[dim] *= math.prod(by_axis[axis] for axis in axes)
        of_array = record and record.of(bool(array.matrices))
        # Without padding a dimension may not divide; each device has all of it.
        held = padded if of_array is None or of_array.elementwise else array.shape
        parts = [n if n % split else n // split for n, split in zip(held, splits, strict=True)]
        if of_array is None or optimizer is None:
            return math.prod(parts) if array.cast or of != MASTERS else 0
        state = of_array.state(array.shape, optimizer)
        return sum(math.prod(parts[dim] for dim in dims) for dims in state)

    in_stacks = [
        {a: numbers(a, at_end=False, over_stage=False) for a in model.of_kind(form).layer().arrays}
        for form in model.forms
    ]
    by_axis["vocabulary"] = shards = by_axis[MODEL] * (by_axis[STAGE] if shared else 1)
    table = ParameterShape(
        "table", (model.vocab_size, model.width), ("vocabulary", ""), True, False
    )
    padded = padded_vocabulary(model.vocab_size, shards), model.width
    of_table = numbers(table, over_stage=not shared, padded=padded)
    ends = sum(map(numbers, _arrays_of_ends(model))) + tables * of_table
    experts = [sum(n for array, n in of.items() if EXPERT in array.axes) for of in in_stacks]
    return HeldNumbers([sum(of.values()) for of in in_stacks], experts, of_table, ends)


def _arrays_of_ends(model: Model) -> list[ParameterShape]:
    """The parameters before and after the layers, but for the vocabulary's tables."""
    layers = [(kind, True) for kind in kinds_of_layers(model)[: model.dense_layers]]
    layers += [(model.stack[-1], False)] * model.mtp_depth
    arrays = [model.of_kind(kind).layer(dense).arrays for kind, dense in layers]
    return [*model.ends, *itertools.chain(*arrays)]


class ParameterGroups(NamedTuple):
    """A device's parameters as collectives see them.

    layers: all of them but experts, with the dense layers unless these are sharded with the ends
    ends:   the output matrix with the prediction modules
    table:  the input's table
    """

    experts: Parameters
    layers: Parameters
    ends: Parameters
    table: Parameters


class DeviceState(StepPart):
    """What a device holds: numbers of parameters, of an optimizer's state and of masters.

    Where a method asks for them:
    layers: of each form, that a device has memory for; those of the busiest stage if ()
    shared: all stages share the tables at both ends; as the settings have it if None. Where they do
            not, each stage has both tables.
    """

    reads = (*AXES, "zero", "shards_ends")

    @functools.cached_property
    def axes_of_ends(self) -> tuple[str, ...]:
        """The axes inside a stage over which what stands before and after the layers is sharded as
        in ZeRO-3, experts but for their own axis; () where it is not."""
        if not self.layout.shards_ends:
            return ()
        sizes = {axis: getattr(self.layout, axis) for axis in SHARD_AXES}
        return scattered((self.model.width,), [True], SHARD_AXES, False, sizes)[0]

    @once
    def parameters(self, layers: Layers = (), shared: bool | None = None) -> DeviceParameters:
        """The parameters of a device on the stage with most of them."""
        layers, shared = self._defaults(layers, shared)
        held = self._held(PARAMETERS, shared, zero=False)
        sharded = self._held(PARAMETERS, shared).ends if self.axes_of_ends else None
        in_layers = lambda numbers: sum(map(operator.mul, layers, numbers))
        return DeviceParameters(in_layers(held.layer), held.ends, in_layers(held.experts), sharded)

    def _defaults(self, layers: Layers, shared: bool | None) -> tuple[Layers, bool]:
        """`layers` and `shared` where they are not given."""
        shared = self.settings.vocabulary_parallel if shared is None else shared
        stages = self.layout.stage
        return layers or tuple(math.ceil(n / stages) for n in self.model.forms.values()), shared

    def tables(self, shared: bool) -> int:
        """Tables of the vocabulary on the stage with most of them."""
        return 2 - self.model.tied_embeddings

    def sharded(self, held: DeviceParameters, shards: int) -> float:
        """The number of parameters on a device where ZeRO cuts layers into so many shards, and with
        them what stands before and after them, unless that has axes of its own."""
        if held.sharded_ends is None:
            return (held.layers + held.ends) / shards
        return held.layers / shards + held.sharded_ends

    def updated(self, layers: Layers = (), shared: bool | None = None) -> float:
        """The number of parameters that a device updates."""
        held, zero = self.parameters(layers, shared), self.layout.zero
        ends = held.ends / self.parts_of_ends(zero, shared)
        shards = self.shards if zero or self.axes_of_ends else 1
        return self.sharded(dataclasses.replace(held, ends=ends), shards)

    @once
    def numbers(
        self, of: OptimizerConfig | str, layers: Layers = (), shared: bool | None = None
    ) -> float:
        """Numbers of an optimizer's state without counts of updates, of MASTERS or of AVERAGE, on a
        device of the stage with most of them."""
        layers, shared = self._defaults(layers, shared)
        held = self._held(of, shared)
        return sum(map(operator.mul, layers, held.layer)) + held.ends

    @functools.cached_property
    def matrices(self) -> Mapping[tuple[int, int], float]:
        """(rows, columns), the fewer ones first → the number of such matrices that Muon deals out
        over the devices of a stage and replica with the most layers: those of experts on a device
        of their axis times its size. None with an optimizer that orthogonalizes none."""
        counts: dict[tuple[int, int], float] = collections.defaultdict(float)
        if record_of(self.settings.optimizer.name).rest is None:
            return counts
        layers, _ = self._defaults((), None)
        model, of_forms = self.model, zip(layers, self.model.forms, strict=True)
        in_layers = ((n, a) for n, form in of_forms for a in model.of_kind(form).layer().arrays)
        # Those of both ends are on all stages, which share them out.
        at_ends = ((1 / self.layout.stage, a) for a in _arrays_of_ends(model))
        for times, array in itertools.chain(in_layers, at_ends):
            for number, rows, columns in array.matrices:
                counts[min(rows, columns), max(rows, columns)] += number * times
        return counts

    def _held(
        self, of: OptimizerConfig | str, shared: bool, zero: bool | None = None
    ) -> HeldNumbers:
        sizes = tuple(getattr(self.layout, a) for a in COMMUNICATION_AXES)
        zero = self.layout.zero > 0 if zero is None else zero
        shards_ends = bool(self.axes_of_ends)
        return _held_numbers(self.model, of, sizes, zero, shared, shards_ends, self.tables(shared))

    def parts_of_ends(self, zero: int, shared: bool | None = None) -> int:
        """The number of shards into which stages cut the state of embedding and head; each stage
        updates its own shard. zero: ZeRO's stage"""
        _, shared = self._defaults((), shared)
        divides = self.model.width % (self.shards * self.layout.stage) == 0
        return self.layout.stage if not shared and zero and divides else 1

    @functools.cached_property
    def groups(self) -> ParameterGroups:
        """The parameters of the device by group."""
        model, layout, held, axes = self.model, self.layout, self.parameters(), self.axes_of_ends
        dense = 0.0 if axes else model.dense_layers * self.layer_parameters(True)
        data = (DATA,) if self.shards > 1 else ()
        scatter = data if layout.zero else ()
        replicas = () if self.settings.inner_steps else (REPLICA,)
        sums = tuple(a for a in (*replicas, DATA, CONTEXT) if a not in scatter)
        experts = Parameters(
            held.experts, scatter, sums, (STAGE, EXPERT, MODEL), scatter, data, product=True
        )
        size, ends = held.layers + dense - held.experts, held.ends - dense
        copies = tuple(a for a in sums if a != REPLICA)
        layers = experts._replace(
            size=size,
            sums=(*sums, EXPERT),
            split=(STAGE, MODEL),
            dealt=((*scatter, MODEL), (*copies, EXPERT)),
        )
        # Without an axis of their own it is whole experts that are scattered.
        splitting = scatter if layout.expert > 1 else ()
        experts = experts._replace(dealt=((*splitting, MODEL), copies))
        shared = self.settings.vocabulary_parallel
        stages = layout.stage if shared else 1
        table = self._held(PARAMETERS, shared, zero=False).table * (not model.tied_embeddings)
        at_ends = layers._replace(product=False, dealt=None)
        if axes:
            sums = tuple(a for a in (*replicas, *SHARD_AXES, STAGE) if a not in axes)
            at_ends = Parameters(0, axes, sums, (MODEL,), axes, axes, as_zero3=True)
        elif layout.stage > stages and self.parts_of_ends(layout.zero) > 1:
            all_sums = (*sums, EXPERT)
            at_ends = Parameters(0, (*scatter, STAGE), all_sums, (MODEL,), scatter, (*data, STAGE))
        elif layout.stage > stages:
            at_ends = Parameters(0, scatter, (*sums, STAGE, EXPERT), (MODEL,), scatter, data)
        return ParameterGroups(
            experts, layers, at_ends._replace(size=ends - table), at_ends._replace(size=table)
        )
