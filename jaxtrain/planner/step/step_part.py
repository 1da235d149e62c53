"""What every part of a step's time reads, and how steps share parts.

A part depends on the model, the framework, the hardware and a few settings of the layout, its
`reads`. Steps of one model whose layouts agree in these have one object for it, which computes
once what is asked of it: a search tries thousands of layouts that differ in a schedule alone.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar, cast

from jaxtrain.config import OptimizerConfig
from jaxtrain.planner.step.collectives import StepCollectives
from jaxtrain.planner.step.frameworks import Framework
from jaxtrain.planner.step.hardware import Hardware
from jaxtrain.planner.step.layout import AXES, Layout
from jaxtrain.planner.step.links import Links
from jaxtrain.planner.step.model import Model
from jaxtrain.planner.step.settings import bytes_of

Part = TypeVar("Part", bound="StepPart")
Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """The method of a part that computes its result once for the same arguments."""

    @functools.wraps(method)
    def remembered(self: "StepPart", *arguments: Any) -> Any:
        key = method, *arguments
        if key not in self._results:
            self._results[key] = method(self, *arguments)
        return self._results[key]

    return cast(Method, remembered)


@dataclasses.dataclass(frozen=True)
class StepPart:
    """A part of the step that is planned: a model with a layout, trained by a framework, on devices
    of one kind.

    by_sequence: what layers save of a microbatch is taken to be that of one sequence times their
        number, for searches, which have many sizes of microbatches (saved.py)
    reads: the fields of the layout that the part depends on; it sees the defaults of the others
    """

    model: Model
    layout: Layout
    framework: Framework
    hardware: Hardware
    dtype: str = "bfloat16"
    optimizer: OptimizerConfig = OptimizerConfig()
    by_sequence: bool = False
    _parts: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _results: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    reads: ClassVar[tuple[str, ...]] = tuple(Layout.__dataclass_fields__)

    def on(self, layout: Layout) -> Self:
        """The same with another layout; parts that both have are computed once."""
        other = dataclasses.replace(self, layout=layout)
        object.__setattr__(other, "_parts", self._parts)
        return other

    def part(self, kind: type[Part]) -> Part:
        """The part of this kind, whose `reads` have to be among this one's."""
        values = operator.attrgetter(*kind.reads)(self.layout)
        key = kind, values
        if key not in self._parts:
            layout = Layout(**dict(zip(kind.reads, values, strict=True)))
            step = self.model, layout, self.framework, self.hardware, self.dtype, self.optimizer
            part = kind(*step)
            object.__setattr__(part, "_parts", self._parts)
            self._parts[key] = part
        return self._parts[key]

    @functools.cached_property
    def item(self) -> int:
        """Bytes of an activation's number."""
        return bytes_of(self.dtype)

    @functools.cached_property
    def links(self) -> Links:
        """The links between the devices."""
        key = Links, *(getattr(self.layout, axis) for axis in AXES)
        return self._parts.setdefault(key, Links(self.layout, self.hardware))

    @functools.cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on one group of `model` devices."""
        return self.layout.microbatch * self.model.sequence / self.layout.context

    @property
    def reduces_in_ops(self) -> bool:
        """True if each microbatch's gradients are reduced: from ZeRO-2 on, and by jaxtrain with
        ZeRO-1 where a step is one microbatch on one stage (`Config.resolve`)."""
        layout = self.layout
        is_one = self.framework.slots and layout.stage == layout.microbatches == 1
        return layout.zero > 1 or (layout.zero == 1 and is_one)

    @functools.cached_property
    def recomputed_fraction(self) -> float:
        """The fraction of the layers that the layout's recomputation concerns."""
        return self.layout.recomputed_fraction(self.model.layers)

    @property
    def shards(self) -> int:
        """ZeRO's shard count over `data`; 1 if it does not divide the model's dimensions."""
        undivided = self.framework.by_dimension and self.model.width % self.layout.data
        return 1 if undivided else self.layout.data

    @functools.cached_property
    def collectives(self) -> StepCollectives:
        """The collectives of the step."""
        layout, framework = self.layout, self.framework
        return StepCollectives(
            self.model,
            layout,
            item=self.item,
            read=self.item if framework.slots else framework.sent_weight,
            reduced=framework.sent_gradient,
            updated=framework.sent_weight,
            context=framework.context_by,
            explicit=framework.slots,
            shares_vocabulary=framework.vocabulary_parallel and layout.stage > 1,
            gathers_in_ops=layout.zero == 3 and not framework.gathers_once,
            reduces_in_ops=self.reduces_in_ops,
            imbalance=framework.imbalance,
            outer_int8=framework.sent_outer < framework.sent_weight,
            fp8=framework.fp8,
            fp8_weight_gradients=framework.fp8_weight_gradients,
            fp8_blocks=framework.fp8_blocks,
        )

    def layer_parameters(self, dense: bool = False) -> float:
        """Parameters of one layer on a device."""
        return self.model.layer(dense).on_device(self.layout.model, self.layout.expert)
