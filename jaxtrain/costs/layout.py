"""A layout: how a step is laid over devices, as numbers; and for how many rows of experts a device
has room."""

import dataclasses
import math

from jaxtrain.costs.transformer import Transformer
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
        """The number of shards of the batch."""
        return self.replica * self.data * self.expert

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.batch_shards * self.microbatch * self.microbatches

    def neighbours(self, axis: str) -> tuple[int, int]:
        """(devices along an axis, how far apart in the order of devices): `model` is innermost,
        `replica` outermost."""
        apart = math.prod(getattr(self, name) for name in AXES[AXES.index(axis) + 1 :])
        return getattr(self, axis), apart


def room_of(tokens: int, choices: int, experts: int, devices: int, room: float) -> int:
    """Rows of experts that one of `devices` can receive, each of which has so many tokens of so
    many choices: all rows in the worst case, or `room` times the mean if that is fewer and not 0,
    and a little more, so that large rooms are cut into equal tiles. A row is a token's choice of an
    expert (parallel/experts.py)."""
    worst = devices * tokens * min(choices, experts // devices)
    bound = math.ceil(room * tokens * choices)
    step = 1 << max(bound.bit_length() - 7, 0)
    return min(worst, -(-bound // step) * step) if room else worst


def capacity_of(tokens: int, choices: int, experts: int, factor: float) -> int:
    """An expert's positions for a sequence of so many tokens: `factor` times its share of the
    choices, at most one for each token."""
    return min(tokens, math.ceil(factor * tokens * choices / experts))


def expert_rows(model: Transformer, layout: Layout) -> int:
    """A microbatch's rows of experts for which a device has room: by capacity if there is one, else
    by `expert_room`; 0 without experts."""
    if not model.experts:
        return 0
    tokens = model.sequence // layout.context
    if model.capacity_factor:
        most = capacity_of(
            model.sequence, model.experts_per_token, model.experts, model.capacity_factor
        )
        return model.experts * layout.microbatch * min(most, tokens)
    return room_of(
        layout.microbatch * tokens,
        model.experts_per_token,
        model.experts,
        layout.expert,
        model.expert_room,
    )
