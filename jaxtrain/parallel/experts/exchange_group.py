"""The devices that have an expert, those between which rows travel, and tokens over `model`.

Experts lie in order along the `expert` axis: of 8 experts on 4 devices, device 1 has 2 and 3. All
of this is known when a program is traced, except a device's own index.

Shape suffixes: M parts over model, B batch, T tokens, D width.
"""

from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import EXPERT, MODEL, manual_size, over_model, psum_scatter
from jaxtrain.devices.sharding import constrain, is_split

PART, REPLICATED = P(MODEL), P()  # of arrays [M, …], and of those that are the same over `model`
SPLIT, GATHERED = ("batch", "sequence", None), ("batch", "token", None)  # logical axes of tokens


class ExchangeGroup(NamedTuple):
    """Devices that exchange rows: so many of the `expert` axis, each `stride` after the one
    before.

    With 8 devices on 2 nodes, ExchangeGroup(2, stride=4) is devices with the same position in their
    nodes, [0, 4] [1, 5] [2, 6] [3, 7], and ExchangeGroup(4) is the devices of a node.
    """

    devices: int
    stride: int = 1

    @property
    def all_groups(self) -> list[list[int]] | None:
        """The groups of this kind, as indices along the axis; None if there is only one."""
        axis, span = manual_size(EXPERT), self.devices * self.stride
        if self.devices == axis:
            return None
        lowest = [start + i for start in range(0, axis, span) for i in range(self.stride)]
        return [list(range(device, device + span, self.stride)) for device in lowest]

    @property
    def me(self) -> jax.Array:
        """The index of this device in its group."""
        # The index along the axis counts nodes first: with 2 nodes of 4, device 5 is [1, 1].
        index = lax.axis_index(EXPERT)
        if self.devices == manual_size(EXPERT):
            return index
        return index // self.stride % self.devices


class DispatchSpec(NamedTuple):
    """A dispatch of tokens to experts, as far as it is known when a program is traced.

    experts: the number of all experts that rows can go to
    batch, tokens: sequences of a microbatch on a device, and tokens of a sequence
    fills_empty: rows of this device's experts that no device has sent are zeros; else they may hold
        anything. Products of groups do not read them, but a scale of FP8 is the largest number of
        all rows.
    nodes: that the `expert` axis spans, for rows that go in two steps
    between: of one of two steps, the devices between which rows go; None: all along the axis
    mean_rows: the mean number of rows of this device's experts, if only filled ones are worked on;
        0: all
    """

    experts: int
    batch: int
    tokens: int
    fills_empty: bool = True
    nodes: int = 1
    between: ExchangeGroup | None = None
    mean_rows: int = 0

    @property
    def group(self) -> ExchangeGroup:
        """The devices between which rows go."""
        return self.between or ExchangeGroup(manual_size(EXPERT))

    @property
    def local_experts(self) -> int:
        """The experts of one device of the group."""
        return self.experts // self.group.devices

    @property
    def across_nodes(self) -> "DispatchSpec":
        """The first of two steps, in which each node is treated as an expert."""
        group = ExchangeGroup(self.nodes, manual_size(EXPERT) // self.nodes)
        # A gateway only passes rows on and multiplies none, so empty ones need no zeros.
        return DispatchSpec(self.nodes, self.batch, self.tokens, False, between=group)

    @property
    def inside_node(self) -> "DispatchSpec":
        """The second of two steps, in which the rows that a gateway has capacity for are treated as
        tokens: those of one device of each node."""
        group = ExchangeGroup(manual_size(EXPERT) // self.nodes)
        return self._replace(
            experts=self.experts // self.nodes,
            batch=self.nodes * self.batch,
            nodes=1,
            between=group,
        )


# --- tokens over `model` --------------------------------------------------------------------------

# `spread` and `collect` are each other's transposes. Both have a gradient of their own, since the
# partitioner would all-reduce the gradients of routed and of shared experts separately; so they add
# up on each device before one reduce-scatter.


@jax.custom_vjp
def spread(x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x, split along the sequence → (x gathered; the same with a leading M, [M, B, T, D], whose
    gradients of all parts add up)."""
    gathered = constrain(x_BTD, GATHERED)
    return gathered, over_model(lambda x: x[None], (REPLICATED,), PART)(gathered)


@jax.custom_vjp
def collect(x_MBTD: jax.Array) -> jax.Array:
    """The sum of the parts, split along the sequence."""
    if not is_split("sequence"):
        return x_MBTD[0]
    return over_model(lambda x: psum_scatter(x[0], MODEL, 1), (PART,), P(None, MODEL))(x_MBTD)


spread.defvjp(lambda x: (spread(x), None), lambda _, g: (constrain(g[0], SPLIT) + collect(g[1]),))
collect.defvjp(lambda x: (collect(x), None), lambda _, g: (spread(g)[1],))
