"""A layout: the numbers that describe how a step is laid out over devices; and the capacity of a
device's experts.

A routed token is one token's choice of one expert (parallel/experts/routing.py).
"""

import dataclasses
import functools
import math

from jaxtrain.config.saved_values import (
    PRODUCTS,
    names_of,
    names_on_host,
    saves_layer_inputs,
)
from jaxtrain.config.sizes import (
    SELECTIVE,
    Remat,
    capacity_of,
    device_capacity,
    remat_of,
)
from jaxtrain.planner.layer.model import Model
from jaxtrain.schedule.orders import ONE_CHUNK
from jaxtrain.schedule.placement import cut, spread

AXES = ("replica", "data", "stage", "context", "expert", "model")  # a mesh's, the innermost last


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of mesh axes, and how a step is cut; names as in a config.

    microbatch: sequences of a microbatch on a data shard; microbatches: of them in a step
    shards_ends: what stands before and after the layers is sharded (`parallel.ends`)
    expert_nodes: that `expert` spans, where tokens go to experts in two steps; 1: in one
    disk: the optimizer's state that is offloaded is on the local disk, not in the host's memory
    steps: of a program (`pipeline.steps_per_program`)
    overlap: F and B of two microbatches share cells (`pipeline.overlap`)
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
    layers_per_op: int = 0
    remat: str = "full"
    save: tuple[str, ...] = ()
    zero: int = 1
    shards_ends: bool = False
    expert_nodes: int = 1
    schedule: str = ONE_CHUNK
    offload: str = "none"
    disk: bool = False
    steps: int = 1
    overlap: bool = False

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

    @property
    def recomputation(self) -> Remat:
        """The record of `remat`."""
        return remat_of(self.remat)

    def units(self, layers: int) -> tuple[int, ...]:
        """The layers of each unit of a model of so many, cut as evenly as can be."""
        if self.stage == 1:
            return (layers,)
        return _units(layers, min(layers, self.stage * self.repeats), self.layers_per_op)

    @property
    def saves_inputs(self) -> bool:
        """True if F leaves the inputs of all layers that R recomputes, and not the unit's alone."""
        return self.stage > 1 and saves_layer_inputs(self.recomputation.mode, self.save)

    def makes_again(self, value: str) -> bool:
        """True if B, and no R, recomputes the value of this name in a layer that is recomputed."""
        saved = names_of(self.save) or (*PRODUCTS, "")
        return self.recomputation.mode == SELECTIVE and value not in saved

    def recomputed_fraction(self, layers: int) -> float:
        """The fraction of a model's layers, so many, on which `remat` has an effect."""
        if self.recomputation.layers is None:
            return 1.0
        return sum(map(self.recomputation.recomputed, self.units(layers))) / layers

    def with_remat(self, mode: str) -> "Layout":
        """The layout with a mode of remat for all layers."""
        return dataclasses.replace(self, remat=mode)

    def offloads(self, what: str) -> bool:
        """True where the optimizer's state ("optimizer") or what layers save ("activations") is in
        the host's memory, or the optimizer's state on the local disk (`disk`)."""
        return self.offload in (what, "both")

    @property
    def saves_on_host(self) -> bool:
        """True if layers save values in the host's memory; with full recomputation, the inputs that
        it starts from."""
        return self.offloads("activations") or bool(names_on_host(self.save))

    def neighbours(self, axis: str) -> tuple[int, int]:
        """Returns (devices along an axis, their stride in the order of devices): `model` is
        innermost, `replica` outermost."""
        inner = AXES[AXES.index(axis) + 1 :]
        return getattr(self, axis), math.prod(getattr(self, name) for name in inner)


@functools.lru_cache(4096)
def _units(layers: int, chunks: int, layers_per_op: int) -> tuple[int, ...]:
    return cut(spread(layers, chunks), layers_per_op)[1]


def routed_capacity(model: Model, layout: Layout) -> int:
    """Routed tokens of a microbatch that a device's experts can receive: by `capacity_factor` if
    there is one, else by `expert_room`; 0 without experts."""
    if not model.experts:
        return 0
    if model.capacity_factor:
        choices, factor = model.experts_per_token, model.capacity_factor
        most = capacity_of(model.sequence, choices, model.experts, factor)
        return model.experts * layout.microbatch * min(most, model.sequence // layout.context)
    return _capacity(model, layout, layout.expert)


def sent_by_gateway(model: Model, layout: Layout) -> int:
    """Routed tokens of a microbatch that a device can send on to the experts of its node, where
    tokens go to experts in two steps."""
    return _capacity(model, layout, layout.expert_nodes)


def _capacity(model: Model, layout: Layout, parts: int) -> int:
    sent = layout.microbatch * (model.sequence // layout.context)
    choices, room = model.experts_per_token, model.expert_room
    return device_capacity(sent, choices, model.experts, parts, room)


def nodes_of_token(model: Model, nodes: int) -> float:
    """The mean number of nodes, of so many that split the experts, in which a token has a choice.

    All choices that the router allows are taken to be equally likely. With `usable` experts a token
    has none of a node's `local` ones in C(usable − local, choices) of C(usable, choices) cases.
    Node-limited routing (DeepSeek-V3, arXiv:2412.19437, section 2.1.2) makes those of
    `router_group_limit` groups usable: where groups are nodes, a token goes to that many at most.
    Groups that lie across nodes' borders are taken as no limit.
    """
    groups, limit, choices = model.router_groups, model.router_group_limit, model.experts_per_token
    if groups % nodes and nodes % groups:
        groups = limit = 1
    of_node = max(1, groups // nodes)  # groups in a node
    local, usable = model.experts // max(groups, nodes), model.experts // groups * limit
    none = sum(
        math.comb(of_node, n)
        * math.comb(groups - of_node, limit - n)
        / math.comb(groups, limit)
        * math.comb(usable - n * local, choices)
        / math.comb(usable, choices)
        for n in range(min(of_node, limit) + 1)
    )
    return nodes * (1 - none)
