"""A layout: the numbers that describe how a step is laid out over devices; and the capacity of a
device's experts.

A routed token is one token's choice of one expert (parallel/experts.py).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

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

    def offloads(self, what: str) -> bool:
        """True where the optimizer's state ("optimizer") or what layers save ("activations") is in
        the host's memory."""
        return self.offload in (what, "both")

    def neighbours(self, axis: str) -> tuple[int, int]:
        """Returns (devices along an axis, their stride in the order of devices): `model` is
        innermost, `replica` outermost."""
        inner = AXES[AXES.index(axis) + 1 :]
        return getattr(self, axis), math.prod(getattr(self, name) for name in inner)


def scattered(
    shape: Sequence[int], unsplit: Sequence[bool], over_stage: bool, sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
    """(axes, dimension): where ZeRO scatters the sum of a parameter's gradient and its optimizer's
    state; no axes if no dimension divides.

    unsplit: whether no axis splits a dimension; over_stage: all stages hold the parameter, and may
    share its state; sizes: of the mesh's axes
    """
    for names in [("data", "stage"), ("data",), ("stage",)] if over_stage else [("data",)]:
        axes = tuple(name for name in names if sizes[name] > 1)
        devices = math.prod(sizes[axis] for axis in axes)
        for dim, size in enumerate(shape):
            if axes and unsplit[dim] and size % devices == 0:
                return axes, dim
    return (), 0


def device_capacity(tokens: int, choices: int, experts: int, devices: int, over_mean: float) -> int:
    """Routed tokens that each of `devices` can receive, where each sends `tokens` of `choices`.

    The worst case, or `over_mean` times the mean if that is less and not 0, rounded up so that
    large buffers are cut into equal tiles.
    """
    worst = devices * tokens * min(choices, experts // devices)
    bound = math.ceil(over_mean * tokens * choices)
    step = 1 << max(bound.bit_length() - 7, 0)
    return min(worst, -(-bound // step) * step) if over_mean else worst


def capacity_of(tokens: int, choices: int, experts: int, factor: float) -> int:
    """An expert's positions for a sequence of so many tokens: `factor` times its share of the
    choices, at most one for each token."""
    return min(tokens, math.ceil(factor * tokens * choices / experts))


def routed_capacity(model: Transformer, layout: Layout) -> int:
    """Routed tokens of a microbatch that a device's experts can receive: by `capacity_factor` if
    there is one, else by `expert_room`; 0 without experts."""
    if not model.experts:
        return 0
    tokens, choices = model.sequence // layout.context, model.experts_per_token
    if model.capacity_factor:
        most = capacity_of(model.sequence, choices, model.experts, model.capacity_factor)
        return model.experts * layout.microbatch * min(most, tokens)
    sent = layout.microbatch * tokens
    return device_capacity(sent, choices, model.experts, layout.expert, model.expert_room)
