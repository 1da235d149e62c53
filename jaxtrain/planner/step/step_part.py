"""What every part of a step's time reads, and how steps share parts.

A part depends on the model, the settings, the hardware and a few fields of the layout, its `reads`.
Steps whose layouts agree in these have one object for it, which computes once what it is asked for:
a search tries thousands of layouts that differ in their schedules alone.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar, cast

from jaxtrain.config import kernels
from jaxtrain.planner.layer.collective_time import StepCollectives
from jaxtrain.planner.layer.hardware import Hardware
from jaxtrain.planner.layer.layout import AXES, Layout
from jaxtrain.planner.layer.links import EXPERT, Links
from jaxtrain.planner.layer.model import Model
from jaxtrain.planner.layer.settings import StepSizes

AnyPart = TypeVar("AnyPart", bound="StepPart")
Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """The method of a part, computed once for the same arguments, which are positional."""
    name = method.__qualname__

    @functools.wraps(method)
    def remembered(self: "StepPart", *arguments: Any) -> Any:
        results = vars(self).setdefault(name, {})
        if arguments not in results:
            results[arguments] = method(self, *arguments)
        return results[arguments]

    return cast(Method, remembered)


def part(kind: type[AnyPart]) -> functools.cached_property[AnyPart]:
    """The property of a step, or of a part, that is its part of this kind."""
    return functools.cached_property(lambda step: step.part(kind))


@dataclasses.dataclass(frozen=True, eq=False)
class StepPart(StepSizes):
    """A part of the step of a model with a layout on devices of one kind. It equals itself alone,
    and so may be an argument of what is computed once.

    reads: the fields of the layout that the part depends on; it sees the defaults of the others
    """

    hardware: Hardware
    _parts: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    reads: ClassVar[tuple[str, ...]] = tuple(Layout.__dataclass_fields__)

    def on(self, layout: Layout) -> Self:
        """This step, or part, with another layout. It shares the parts of this one."""
        return self.as_part(type(self), layout)

    def as_part(self, part: type[AnyPart], layout: Layout, model: Model | None = None) -> AnyPart:
        """A step, or part, which shares the parts of this one. model: in the place of this one's"""
        other = part(model or self.model, layout, self.settings, self.hardware)
        parts = self._parts.setdefault(model, {}) if model else self._parts
        object.__setattr__(other, "_parts", parts)
        return other

    @once
    def of_kind(self, kind: str) -> Self:
        """This step, or part, of the model all of whose layers are of one kind."""
        model = self.model.of_kind(kind)
        return self if model is self.model else self.as_part(type(self), self.layout, model)

    def kinds(self, dense: bool = False) -> list[tuple[Self, float]]:
        """(This step, or part, with layers of one kind; the kind's fraction of the layers). dense:
        of those before the layers with experts"""
        counts = self.model.counts[dense]
        return [(self.of_kind(kind), n / counts.total()) for kind, n in counts.items()]

    def mean_of_kinds(self, number: Callable[[Self], float], dense: bool = False) -> float:
        """The mean over the layers of a number that steps, or parts, of one kind have. dense: over
        the layers before those with experts"""
        return sum(part * number(kind) for kind, part in self.kinds(dense))

    def part(self, part: type[AnyPart]) -> AnyPart:
        """The step's part of this class, whose `reads` are among this one's."""
        part = self.settings.changed.get(part, part)
        key = part, operator.attrgetter(*part.reads)(self.layout)
        if key not in self._parts:
            layout = Layout(**dict(zip(part.reads, key[1], strict=True)))
            self._parts[key] = self.as_part(part, layout)
        return self._parts[key]

    @functools.cached_property
    def links(self) -> Links:
        """The links between the devices."""
        key = Links, operator.attrgetter(*AXES)(self.layout)
        return self._parts.setdefault(key, Links(self.layout, self.hardware))

    @functools.cached_property
    def collectives(self) -> StepCollectives:
        """The collectives of the step."""
        layout, settings = self.layout, self.settings
        shares = settings.vocabulary_parallel and layout.stage > 1
        in_ops = settings.reduces_in_ops(layout)
        if settings.sends_once and layout.expert_nodes == 1:
            layout = dataclasses.replace(layout, expert_nodes=self.links.islands(EXPERT))
        return StepCollectives(self.model, layout, settings, shares, in_ops)

    @functools.cached_property
    def multiplies_while_sending(self) -> bool:
        """`model`'s collectives overlap with the products whose operands they gather or whose
        results they sum, and with nothing else (parallel/collective_matmul.py)."""
        layout, requested = self.layout, self.settings.parallel.collective_matmul
        part = int(self.tokens) * self.model.width * self.item // layout.model
        return layout.model > 1 and kernels.multiplies_while_sending(
            requested, self.hardware.platform, layout.stage, part
        )

    @property
    def shards(self) -> int:
        """ZeRO's shard count over `data`."""
        return self.settings.shards(self.layout, self.model.width)

    @property
    def recomputed_fraction(self) -> float:
        """The fraction of the layers that the layout's recomputation concerns."""
        return self.layout.recomputed_fraction(self.model.layers)

    @once
    def layer_parameters(self, dense: bool = False) -> float:
        """Parameters of the mean layer on a device."""
        sizes = self.layout.model, self.layout.expert
        return self.model.mean(lambda kind: kind.layer(dense).on_device(*sizes), dense)
