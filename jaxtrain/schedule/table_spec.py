"""What a table is wanted for: the one record that goes from whoever asks for a table to what packs
it. No JAX here."""

import dataclasses
from collections.abc import Sequence

from jaxtrain.schedule.clock import Times
from jaxtrain.schedule.packing import PACKINGS


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """What a training table is wanted for.

    schedule:   a name of orders.SCHEDULES, `auto` or `csv:FILE`
    repeats:    chunks on each stage
    times:      what `permute="auto"` and `schedule="auto"` make the table for
    permute:    how ticks send messages, one of packing.PACKINGS; auto: the packing of least coupled
                time
    remat_full: whether F keeps a unit's input alone and R rebuilds what B needs, but for the last
        unit
    groups:     the number of units that each chunk, in model order, is cut into (`layers_per_op`);
                None: one
    shares:     of each unit, its part of a stage's work; None: stages / units
    vocabulary: one of table.VOCABULARIES
    memory:     for `auto`, the most residuals at once on a stage, with what B leaves for W, in
                those of a whole stage for one microbatch: a chunk's count 1 / repeats. None: no
                bound
    """

    schedule: str
    stages: int
    repeats: int
    microbatches: int
    _: dataclasses.KW_ONLY
    times: Times = Times()
    permute: str = "auto"
    remat_full: bool = False
    groups: Sequence[int] | None = None
    shares: Sequence[float] | None = None
    vocabulary: str = "parallel"
    memory: float | None = None

    @property
    def packings(self) -> Sequence[str]:
        """The packings to compare. One stage has no permutes, and one packing."""
        if self.stages == 1:
            return ("late",)
        return PACKINGS if self.permute == "auto" else (self.permute,)
