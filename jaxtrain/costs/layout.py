"""A layout: how a step is laid over devices, as numbers."""

import dataclasses
import math

from jaxtrain.schedule.orders import ONE_CHUNK

AXES = ("replica", "data", "stage", "context", "expert", "model")  # a mesh's, the innermost last


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of mesh axes, and how a step is cut; names as in a config.

    microbatch: sequences of a microbatch on a data shard; microbatches: of them in a step
    """

    data: int = 1
    stage: int = 1
    model: int = 1
    context: int = 1
    expert: int = 1
    replica: int = 1
    microbatch: int = 1
    microbatches: int = 1
    repeats: int = 1
    remat: str = "full"
    zero: int = 1
    schedule: str = ONE_CHUNK
    offload: str = "none"

    @property
    def devices(self) -> int:
        return self.data * self.stage * self.model * self.context * self.expert * self.replica

    @property
    def batch_shards(self) -> int:
        """Into how many parts the batch is cut."""
        return self.replica * self.data * self.expert

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.batch_shards * self.microbatch * self.microbatches

    def neighbours(self, axis: str) -> tuple[int, int]:
        """(devices along an axis, how far apart in the order of devices): `model` is innermost, `replica` outermost."""
        apart = math.prod(getattr(self, name) for name in AXES[AXES.index(axis) + 1 :])
        return getattr(self, axis), apart
