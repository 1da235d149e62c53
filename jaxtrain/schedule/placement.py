"""Which layer lives where: layers → chunks → units → stages.

A model of L layers is cut into consecutive chunks, each chunk into one or more units (an op's layers), and unit g lies on stage
`stage_of[g]`. In memory the u-th units of all stages are one stacked array [stages, stack_size(u), ...]. A stage with fewer layers there,
or without such a unit, has unused rows, which are zero, have no gradient, and are in no count, norm or checkpoint.

      L = 7, stages = 2, chunks = 2          stage 0     stage 1
                                    unit 0   0 1         2 3
                                    unit 1   4 5         6 –
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


def spread(layers: int, chunks: int, costs: Sequence[float] = ()) -> tuple[int, ...]:
    """The number of layers of each chunk, at least one each.

    Without `costs` evenly, the first chunks one more where they do not divide. With a cost for every layer, so that the dearest chunk
    costs least; among those cuts, the later chunks are filled first.
    """
    if not costs:
        size, more = divmod(layers, chunks)
        return tuple(size + (c < more) for c in range(chunks))
    total = np.concatenate([[0.0], np.cumsum(costs)])
    # best[c][n]: the cost of the dearest of c chunks that hold the first n layers, and where the last one begins
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for c in range(1, chunks + 1):
        row = {}
        for n in range(c, layers - (chunks - c) + 1):
            options = [(max(best[c - 1][i][0], float(total[n] - total[i])), i) for i in range(c - 1, n) if i in best[c - 1]]
            row[n] = min(options)
        best.append(row)
    sizes, end = [], layers
    for c in range(chunks, 0, -1):
        start = best[c][end][1]
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))


def cut(chunks: Sequence[int], layers_per_op: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(into how many units each chunk is cut, the layers of every unit in model order); 0 layers per op: a chunk is one unit.

    A chunk whose layers do not divide has units as equal as can be.
    """
    groups = tuple(-(-n // layers_per_op) if layers_per_op else 1 for n in chunks)
    return groups, tuple(size for n, parts in zip(chunks, groups, strict=True) for size in spread(n, parts))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Layers over stages.

    units_per_stage: units on a stage, the most of all stages; the circular placement has exactly so many on each
    stage_of: the stage of each unit, in model order; left out: circular, unit g on stage g mod stages
    sizes:    the layers of each unit, in model order; left out: evenly

    Raises ValueError if there are more units than layers.
    """

    layers: int
    stages: int = 1
    units_per_stage: int = 1
    stage_of: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        stage_of = self.stage_of or tuple(g % self.stages for g in range(self.stages * self.units_per_stage))
        if len(stage_of) > self.layers:
            raise ValueError(
                f"{self.stages} stages of {self.units_per_stage} chunks need at least {len(stage_of)} layers, not {self.layers}"
            )
        sizes = self.sizes or spread(self.layers, len(stage_of))
        if len(sizes) != len(stage_of) or sum(sizes) != self.layers or min(sizes) < 1:
            raise ValueError(f"units of {sizes} layers on stages {stage_of} are not {self.layers} layers")
        object.__setattr__(self, "stage_of", stage_of)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "units_per_stage", max(stage_of.count(s) for s in range(self.stages)))
        units = [[g for g, there in enumerate(stage_of) if there == s] for s in range(self.stages)]
        object.__setattr__(self, "_units", units)

    def unit_at(self, local_unit: int, stage: int) -> int | None:
        """The unit, in model order, that is a stage's `local_unit`-th; None if the stage has fewer."""
        own = self._units[stage]  # type: ignore[attr-defined]
        return own[local_unit] if local_unit < len(own) else None

    def first_layer(self, local_unit: int, stage: int) -> int:
        """The first layer of a stage's unit; 0 where there is none."""
        g = self.unit_at(local_unit, stage)
        return 0 if g is None else sum(self.sizes[:g])

    def layer_count(self, local_unit: int, stage: int) -> int:
        """The number of layers in a stage's unit."""
        g = self.unit_at(local_unit, stage)
        return 0 if g is None else self.sizes[g]

    def stack_size(self, local_unit: int) -> int:
        """Rows of the stacked array of these units: the most layers that a stage has in it."""
        return max(self.layer_count(local_unit, s) for s in range(self.stages))

    def layer_index(self, local_unit: int) -> np.ndarray:
        """int32 [stages, stack_size(local_unit)]: the layer in each row of the stacked array, −1 in an unused row."""
        index = np.full((self.stages, self.stack_size(local_unit)), -1, np.int32)
        for s in range(self.stages):
            first, n = self.first_layer(local_unit, s), self.layer_count(local_unit, s)
            index[s, :n] = np.arange(first, first + n)
        return index

    def describe(self) -> str:
        """One line for people: the number of layers on each stage, unit by unit."""
        if self.stages == 1 and self.units_per_stage == 1:
            return f"{self.layers} layers on one stage"
        counts = [[self.layer_count(u, s) for u in range(self.units_per_stage)] for s in range(self.stages)]
        listed = ", ".join("+".join(str(n) for n in row if n) for row in counts)
        return f"{self.layers} layers over {self.stages} stages × {self.units_per_stage} chunk{'s'[: self.units_per_stage != 1]}: {listed}"
