"""A step whose parts are timed once for all layouts that have them in common: a search compares
thousands that differ in schedule, chunks and ZeRO's stage alone. No jax."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxtrain.planner.step.step_time import StepModel, TimeBreakdown


@dataclasses.dataclass(frozen=True)
class SharedStep(StepModel):
    """A step; those that `dataclasses.replace` makes of it with other layouts share their parts.

    parts: what is known of each part, by its name and what it depends on; of one model, framework,
           kind and number of devices
    """

    parts: dict[tuple, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def layer(self, dense: bool = False) -> dict[str, TimeBreakdown]:
        return self._once(self._of_layer, super().layer, dense)

    def saved_in_layer(self) -> float:
        return self._once(self._of_layer, super().saved_in_layer)

    def dense_layers(self) -> TimeBreakdown:
        return self._once(self._of_ends, super().dense_layers)

    def head(self) -> TimeBreakdown:
        return self._once(self._of_ends, super().head)

    def _once(self, depends: tuple, part: Callable[..., Any], *arguments: Any) -> Any:
        key = part.__name__, *arguments, *depends
        if key not in self.parts:
            self.parts[key] = part(*arguments)
        return self.parts[key]

    @functools.cached_property
    def _of_layer(self) -> tuple:
        """What the times of a layer depend on. The layers of a unit and ZeRO-3's gathers change
        what recomputation of a layer leaves out."""
        layout, units = self.layout, len(self.layout.units(self.model.layers))
        unit: tuple = (units < self.model.layers,)
        if layout.remat not in ("none", "selective"):
            unit = units, layout.zero == 3, self.shards > 1
        sizes = layout.model, layout.context, layout.expert, layout.expert_nodes, layout.microbatch
        return *sizes, layout.stage > 1, layout.remat, layout.save, *unit

    @functools.cached_property
    def _of_ends(self) -> tuple:
        """What embedding and head depend on: where they are sharded, on the entire mesh, too."""
        layout = self.layout
        mesh = layout.replica, layout.data, layout.stage
        return *self._of_layer, *mesh * bool(self.axes_of_ends)
