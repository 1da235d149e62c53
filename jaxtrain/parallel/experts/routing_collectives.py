"""The routing of a microbatch, on which devices agree before any row moves. The router calls it.

Each function sorts this device's choices, learns from the other devices how many rows they have,
and leaves all else to the index code of routing.py. `dropless` is the way with one device, in one
step, or in two (`_in_two_steps`); `by_capacity` the way with a fixed number of positions.

Shape suffixes: B batch, T tokens, K choices of a token.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.sizes import capacity_of, device_capacity
from jaxtrain.devices.mesh import CONTEXT, EXPERT, manual_size, over_model
from jaxtrain.parallel.attention.context import in_text_order, local_chunks
from jaxtrain.parallel.experts import expert_messages
from jaxtrain.parallel.experts.exchange_group import REPLICATED, DispatchSpec, ExchangeGroup
from jaxtrain.parallel.experts.routing import (
    Routing,
    TwoSteps,
    arrival_order,
    cut_groups,
    inverse,
    positions,
    positions_by_capacity,
    runs_of,
    sort_choices,
)


class Memory(NamedTuple):
    """The rows that a device has memory for.

    sends, receives: the most rows
    drops: more may be chosen than that
    """

    sends: int
    receives: int
    drops: bool = False


def dropless(
    chosen_BTK: jax.Array, experts: int, over_mean: float = 0.0, nodes: int = 1
) -> tuple[Routing | TwoSteps, jax.Array]:
    """Returns (routing, this device's dropped choices of each expert, float32 [experts]) for chosen
    int32 [B, T, K], of all experts.

    over_mean: the rows that a device has memory for, as a multiple of their mean number; 0: all
        that can arrive
    nodes: that the `expert` axis spans; 1: rows go in one step
    """
    b, t, k = chosen_BTK.shape
    devices = manual_size(EXPERT)
    if devices == 1:
        choices = sort_choices(chosen_BTK.reshape(-1), experts)
        return Routing(choices.order, inverse(choices.order), choices.sizes), jnp.zeros(experts)
    if nodes > 1:
        return _in_two_steps(chosen_BTK, DispatchSpec(experts, b, t, nodes=nodes), over_mean)
    rows = device_capacity(b * t, k, experts, devices, over_mean)
    drops = rows < device_capacity(b * t, k, experts, devices, 0.0)
    group, memory = ExchangeGroup(devices), Memory(b * t * k, rows, drops)
    return _agreed(chosen_BTK.reshape(-1), experts, group, memory)


def _in_two_steps(
    chosen_BTK: jax.Array, spec: DispatchSpec, over_mean: float
) -> tuple[TwoSteps, jax.Array]:
    """`dropless` for a `spec` of several nodes. Dropped choices are counted by the gateways, each
    those of the rows that it has received."""
    k, across, inside = chosen_BTK.shape[-1], spec.across_nodes, spec.inside_node
    tokens, node = spec.batch * spec.tokens, chosen_BTK // inside.experts
    # A token goes once to a node: of its choices there only the earliest is sent.
    earlier = jnp.tril(jnp.ones((k, k), bool), -1)
    is_repeated = ((node[..., None] == node[..., None, :]) & earlier).any(-1)
    node_or_none = jnp.where(is_repeated, spec.nodes, node).reshape(-1)
    memory = Memory(tokens * min(spec.nodes, k), spec.nodes * tokens)
    to_nodes, _ = _agreed(node_or_none, spec.nodes, across.group, memory, optional=True)

    def choices_at_gateway(routing: Routing, chosen_BTK: jax.Array) -> jax.Array:
        return expert_messages.run(
            expert_messages.DISPATCH, chosen_BTK, routing, across._replace(fills_empty=True)
        )

    # A row brings all choices of its token, plus 1: behind those that arrive are zeros, no choice.
    arrived = over_model(choices_at_gateway, (REPLICATED, REPLICATED), REPLICATED)(
        to_nodes, chosen_BTK + 1
    )
    my_node = across.group.me
    local = arrived.reshape(-1) - 1 - my_node * inside.experts
    local = jnp.where((local >= 0) & (local < inside.experts), local, inside.experts)
    # On average a gateway sends as many rows as a device receives. At most it sends all choices of
    # its senders, one device of each node: as if nodes were devices.
    capacity = functools.partial(device_capacity, tokens, k, spec.experts)
    devices = manual_size(EXPERT)
    sends, receives = capacity(spec.nodes, over_mean), capacity(devices, over_mean)
    drops = sends < capacity(spec.nodes, 0.0) or receives < capacity(devices, 0.0)
    memory = Memory(sends, receives, drops)
    in_node, dropped = _agreed(local, inside.experts, inside.group, memory, optional=True)
    dropped = jnp.where(jnp.arange(spec.nodes)[:, None] == my_node, dropped, 0.0).reshape(-1)
    return TwoSteps(to_nodes, in_node), dropped


def _agreed(
    chosen: jax.Array, experts: int, group: ExchangeGroup, memory: Memory, optional: bool = False
) -> tuple[Routing, jax.Array]:
    """The routing inside a group of devices, and the dropped choices of each expert.

    Args:
      chosen: int32 [choices], of the group's experts.
      optional: a choice may be `experts`, which is none.
    """
    choices = sort_choices(chosen, experts)
    sizes = admitted = choices.sizes
    if memory.drops and memory.sends < chosen.size:
        # Before the others hear of them, a device's own groups are cut to what it can send.
        admitted = cut_groups(sizes[:, None, None], memory.sends).reshape(-1)
    me, all_groups = group.me, group.all_groups
    # A few numbers a device. All devices get all of them, since a group that is cut for its
    # receiver is cut by its sender, which has to know what others send there.
    all_sizes = lax.all_gather(  # [from, to, expert]
        admitted.reshape(group.devices, -1), EXPERT, axis_index_groups=all_groups
    )
    dropped = jnp.zeros(experts)
    if memory.drops:
        all_sizes = cut_groups(all_sizes, memory.receives)
        admitted = all_sizes[me].reshape(-1)
        dropped = (sizes - admitted).astype(jnp.float32)
    if optional:
        admitted = jnp.append(admitted, 0)
    if memory.drops or optional:
        sent = positions(choices, admitted, memory.sends)
    else:  # all choices are sent, in sorted order
        sent = choices.order, inverse(choices.order)
    rows_from_to, arriving = all_sizes.sum(-1), all_sizes[:, me]
    order = arrival_order(arriving, memory.receives)
    return Routing(*sent, arriving.sum(0), rows_from_to, order, inverse(order)), dropped


def by_capacity(chosen_BTK: jax.Array, experts: int, factor: float) -> tuple[Routing, jax.Array]:
    """Returns (routing, dropped choices of each expert, float32 [experts]). A capacity is that of a
    sequence, also if `context` splits it."""
    _, t, k = chosen_BTK.shape
    parts = manual_size(CONTEXT)
    limit = capacity_of(t * parts, k, experts, factor)
    runs = runs_of(chosen_BTK, experts, halves=2 if parts > 1 else 1)
    before = jnp.zeros_like(runs.sizes)
    if parts > 1:
        # The numbers of all runs of a sequence, in the order of the text: an expert's positions go
        # to the earliest tokens, wherever they lie, as on one device.
        sizes = in_text_order(lax.all_gather(runs.sizes, CONTEXT, axis=1, tiled=True), parts)
        before = local_chunks(jnp.cumsum(sizes, 1) - sizes, parts)
    admitted = jnp.clip(limit - before, 0, runs.sizes)
    routing = positions_by_capacity(chosen_BTK, runs, admitted, min(limit, t))
    return routing, (runs.sizes - admitted).sum((0, 1)).astype(jnp.float32)
