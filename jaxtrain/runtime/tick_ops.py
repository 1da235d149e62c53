"""The ops of a tick: which fields of the state each uses, and what it computes.

Begin with `tick_ops`, which lists all ops. An op is a `TickOp`: its name, masks (tick_state.py),
and a function from the masked fields of the state to the same fields, changed. tick.py has the
order of the ops and runs them. This file has, in this order:

    the plan        `tick_ops`; the ops with their masks: `copy_op`, `unit_ops`, `overlapped_op`,
                    `update_ops` (`EndOps.ops` is further down)
    what ops do     `copy`; the cells of a unit, `forward` to `last_weight_gradient`; `EndOps`: the
                    embedding and the head

A mask names exactly what the op uses. With a field too many the op's loop carries an array for
nothing; a field too few is None in the op.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.host_memory import read_at, write_at
from jaxtrain.runtime.batch import extra_inputs
from jaxtrain.runtime.embedding_and_head import EmbeddingAndHead
from jaxtrain.runtime.layers import overlapped
from jaxtrain.runtime.layers.layer_stack import LayerStack
from jaxtrain.runtime.tick_state import Constants, ModelTree, Pools, TickState, merged
from jaxtrain.runtime.updates import Updates
from jaxtrain.schedule.columns import (
    CHECK_STEP,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    LAST_WEIGHTS,
    UPDATE_ENDS,
    UPDATE_LAYERS,
    Copy,
    TickColumns,
    TickTable,
    cell_op,
)
from jaxtrain.schedule.slots import TickSlots
from jaxtrain.schedule.table import Op, Table

Run = Callable[[TickState, Constants, TickColumns], TickState]


@dataclasses.dataclass(frozen=True)
class TickOp:
    """An op of a tick.

    name: its column in `TickColumns.runs`, and its scope in a profile
    state, constants: masks of the fields that the op reads or writes
    run: (these fields of the state, these of the constants, the tick's columns) → the same fields
        of the state, changed
    last: True for a unit's last W of a step, False for its other W; None for an op of all cells
    """

    name: str
    state: TickState
    constants: Constants
    run: Run
    last: bool | None = None


# ---------------------------------------------------------------------- the plan


def tick_ops(
    ends: EmbeddingAndHead,
    stacks: list[LayerStack],
    ticks: TickTable,
    stage: jax.Array,
    updates: Updates | None,
) -> dict[str, list[TickOp]]:
    """Name → the op. W has two ops where a unit's last one is another function; a tick runs one of
    them.

    stacks: by local unit; stage: this device's, a traced int32; updates: of a table of several
    steps
    """
    copies, end_ops = ticks.copies, EndOps(ends, ticks.slotted.table, stage)
    # The order in this list means nothing: a tick has the order of tick.py, by name.
    ops = [copy_op(each) for each in (*copies.takes, *copies.sends, *copies.stays)]
    ops += [op for stack in stacks for op in unit_ops(stack, ticks)]
    for name, (kind, unit, b_unit) in ticks.overlapped.items():
        ops.append(overlapped_op(name, kind, (stacks[unit], stacks[b_unit]), ops, ticks))
    ops += end_ops.ops()
    # The masks of the updates name the parameters in the state already.
    if updates:
        ops = [_reading_state(op) for op in ops] + update_ops(updates)
    by_name: dict[str, list[TickOp]] = {}
    for op in ops:
        by_name.setdefault(op.name, []).append(op)
    return by_name


def copy_op(moved: Copy) -> TickOp:
    """Moves a message from a buffer to another one, or to a slot of a pool."""
    is_input, slotted = moved.target == "activation", bool(moved.slot)
    pools = Pools(activation=slotted and is_input, gradient=slotted and not is_input)
    buffers = dict.fromkeys((moved.source,) if slotted else (moved.source, moved.target), True)
    run = functools.partial(copy, moved)
    return TickOp(moved.op, TickState(pools=pools, buffers=buffers), Constants(), run)


def unit_ops(stack: LayerStack, ticks: TickTable) -> list[TickOp]:
    """F, K, R, B and W of a local unit."""
    unit, one_unit = int(stack.unit), ModelTree(layers={stack.unit: True})
    f_output, b_output = ({ticks.result_buffers[kind, unit]: True} for kind in (Op.F, Op.B))

    def op(kind: str, compute: Callable, last: bool | None = None, **state) -> TickOp:
        def run(state: TickState, constants: Constants, columns: TickColumns) -> TickState:
            # The microbatch differs from tick to tick, so its positions are read inside the op.
            extra = extra_inputs(constants.batch, columns.microbatch)
            params = constants.params.layers[stack.unit]
            return compute(CellInputs(stack, params, extra, columns.slots), state)

        constants = Constants(one_unit, batch=True)
        return TickOp(cell_op(kind, unit), TickState(**state), constants, run, last)

    saving = lambda kind: functools.partial(forward_saving, kind)
    # Layers that R recomputes have the pools residual_…, those that save everything in F saved_….
    residuals = Pools(residual_b=True, residual_w=True)
    saved = Pools(saved_b=True, saved_w=True)
    both, inputs = merged(residuals, saved), Pools(activation=True)
    stashes = Pools(gradient=True, weight_stash=True, saved_stash=True)
    weights = Pools(residual_w=True, weight_stash=True, saved_w=True, saved_stash=True)
    # F leaves nothing where R makes all residuals again. It leaves inputs of layers where R starts
    # from each, and residuals of the layers that R does not recompute.
    if stack.saves_in_f and not ticks.slotted.table.forward_only:
        layer_inputs = Pools(activation=True, layer_input=stack.saves_inputs or None)
        f = op("F", saving("F"), pools=merged(saved, layer_inputs), buffers=f_output)
    else:
        f = op("F", forward, pools=inputs, buffers=f_output)
    # K is the F of a unit that no R follows, such as the last one, whose B comes next.
    k = op("K", saving("K"), pools=merged(both, inputs), buffers=f_output)
    if stack.saves_inputs:
        r = op("R", recompute, pools=merged(residuals, Pools(layer_input=True)))
    else:
        r = op("R", saving("R"), pools=merged(residuals, inputs))
    # B is the last reader of residual_b and saved_b. The stashes have the arrays that W needs of B,
    # for W may be many ticks later.
    b = op("B", input_gradient, pools=merged(both, stashes), buffers=b_output)
    w = op("W", weight_gradient, gradients=one_unit, pools=weights)
    if not stack.reduces_in_last:
        return [f, k, r, b, w]
    # A step's last W also writes the shards of the reduced sums. It is an op of its own, so that
    # the loop of the others does not carry the shards.
    changed = {"gradients": one_unit, "reduced": one_unit}
    last_w = op("W", last_weight_gradient, last=True, pools=weights, **changed)
    return [f, k, r, b, dataclasses.replace(w, last=False), last_w]


def overlapped_op(
    name: str,
    kind: str,
    stacks: tuple[LayerStack, LayerStack],
    ops: list[TickOp],
    ticks: TickTable,
) -> TickOp:
    """FB or KB: the op `kind` of the first stack's unit and B of the second one's at once. ops:
    those of each unit"""
    unit, b_unit = (int(stack.unit) for stack in stacks)
    # One op uses the fields of both. Neither reads a field that the other writes, except pools, in
    # which F and B have different slots.
    by_name = {op.name: op for op in ops}
    f, b = by_name[cell_op(kind, unit)], by_name[cell_op("B", b_unit)]
    buffers = ticks.result_buffers[Op.F, unit], ticks.result_buffers[Op.B, b_unit]
    run = functools.partial(forward_and_input_gradient, kind, stacks, buffers)
    return TickOp(name, merged(f.state, b.state), merged(f.constants, b.constants), run)


def update_ops(updates: Updates) -> list[TickOp]:
    """The optimizer's updates and the check of a step."""
    # An update changes the parameters of its group, and its sums, which begin again at zero.
    layers = ModelTree(layers=True)
    ends = ModelTree(**dict.fromkeys(updates.ends.names, True))
    return [
        TickOp(
            UPDATE_LAYERS,
            TickState(gradients=layers, params=layers, layers=True),
            Constants(),
            lambda state, _, columns: updates.layers.run(state, columns.update_step),
        ),
        TickOp(
            UPDATE_ENDS,
            TickState(gradients=ends, params=ends, ends=True),
            Constants(),
            lambda state, _, columns: updates.ends.run(state, columns.update_ends_step),
        ),
        TickOp(
            CHECK_STEP,
            TickState(loss=True, further=True, layers=True, ends=True, checks=True),
            Constants(),
            lambda state, _, columns: updates.check(state, columns.checked_step),
        ),
    ]


def _reading_state(op: TickOp) -> TickOp:
    """The op with its parameters from the state, where updates change them."""
    # The op's loop carries them, though it only reads them: else nothing orders it before the
    # update that overwrites them, and XLA copies them.
    read = op.constants.params

    def run(state: TickState, constants: Constants, columns: TickColumns) -> TickState:
        params = state.params
        constants = dataclasses.replace(constants, params=params)
        changed = op.run(dataclasses.replace(state, params=ModelTree()), constants, columns)
        return dataclasses.replace(changed, params=params)

    state = dataclasses.replace(op.state, params=read)
    return TickOp(op.name, state, dataclasses.replace(op.constants, params=ModelTree()), run)


# ---------------------------------------------------------------------- messages


def copy(moved: Copy, state: TickState, constants: Constants, columns: TickColumns) -> TickState:
    """The state with a message of a buffer in another buffer, or in its slot."""
    message = state.buffers[moved.source]
    if not moved.slot:
        return merged(state, TickState(buffers={moved.target: message}))
    slot = getattr(columns.slots, moved.slot)
    pools = jax.tree.map(lambda pool: write_at(pool, message, slot), state.pools)
    return dataclasses.replace(state, pools=pools)


# ---------------------------------------------------------------------- the cells of a unit


@dataclasses.dataclass(frozen=True, eq=False)
class CellInputs:
    """What an F, K, R, B or W of a unit has beside the state: the unit's layers and their
    parameters, the positions and segments of its tokens, and the slots that it reads and fills."""

    stack: LayerStack
    params: Any
    extra: Any
    slots: TickSlots


def forward(cell: CellInputs, state: TickState) -> TickState:
    """F that leaves nothing: R recomputes all layers from the unit's input, or it is an
    evaluation."""
    x = read_at(state.pools.activation, cell.slots.activation)
    y = cell.stack.output(cell.params, x, cell.extra)
    return dataclasses.replace(state, buffers=dict.fromkeys(state.buffers, y))


def forward_saving(kind: str, cell: CellInputs, state: TickState) -> TickState:
    """F, K or R: the state with the unit's residuals that the op leaves, and with its output where
    the op (not R) has a buffer for it."""
    x = read_at(state.pools.activation, cell.slots.activation)
    # R has no buffer for y, so XLA leaves out the products that only y needs.
    y, pools = cell.stack.output_and_residuals(
        cell.params, x, cell.extra, state.pools, cell.slots, kind
    )
    return dataclasses.replace(state, pools=pools, buffers=dict.fromkeys(state.buffers, y))


def recompute(cell: CellInputs, state: TickState) -> TickState:
    """R: the state with the unit's residuals, each layer's from its own input."""
    pools = cell.stack.rebuilt(cell.params, cell.extra, state.pools, cell.slots)
    return dataclasses.replace(state, pools=pools)


def input_gradient(cell: CellInputs, state: TickState) -> TickState:
    """B: the gradient of the unit's input in its buffer, and the arrays that W needs of B."""
    g = read_at(state.pools.gradient, cell.slots.gradient)
    g, pools = cell.stack.input_gradient(cell.params, cell.extra, state.pools, cell.slots, g)
    return dataclasses.replace(state, pools=pools, buffers=dict.fromkeys(state.buffers, g))


def weight_gradient(cell: CellInputs, state: TickState) -> TickState:
    """W: the state with the gradients of the unit's parameters added to their sums."""
    unit = cell.stack.unit
    sums = cell.stack.weight_gradient(
        cell.params, state.gradients.layers[unit], cell.extra, state.pools, cell.slots
    )
    return dataclasses.replace(state, gradients=ModelTree(layers={unit: sums}))


def last_weight_gradient(cell: CellInputs, state: TickState) -> TickState:
    """The last W of a step: the state with the unit's reduced gradients; its sums stay."""
    unit = cell.stack.unit
    sums, shards = (tree.layers[unit] for tree in (state.gradients, state.reduced))
    # A layer's sum is reduced as soon as it is complete, overlapped with the next layer's products.
    with jax.named_scope(LAST_WEIGHTS):
        shards = cell.stack.reduced_gradient(
            cell.params, sums, shards, cell.extra, state.pools, cell.slots
        )
    return dataclasses.replace(state, reduced=ModelTree(layers={unit: shards}))


def forward_and_input_gradient(
    kind: str,
    stacks: tuple[LayerStack, LayerStack],
    buffers: tuple[str, str],
    state: TickState,
    constants: Constants,
    columns: TickColumns,
) -> TickState:
    """FB or KB: F (or K) of the first stack's unit and B of the second one's, of two microbatches.
    buffers: of their results"""
    stack, b_stack = stacks
    forward = overlapped.Forward(
        stack,
        kind,
        constants.params.layers[stack.unit],
        read_at(state.pools.activation, columns.slots.activation),
        extra_inputs(constants.batch, columns.microbatch),
        columns.slots,
    )
    backward = overlapped.Backward(
        b_stack,
        constants.params.layers[b_stack.unit],
        extra_inputs(constants.batch, columns.b_microbatch),
        columns.slots.of_overlapped_b(),
        read_at(state.pools.gradient, columns.slots.gradient),
    )
    y, g, pools = overlapped.forward_and_input_gradient(forward, backward, state.pools)
    results = dict(zip(buffers, (y, g), strict=True))
    return dataclasses.replace(state, pools=pools, buffers=results)


# ---------------------------------------------------------------------- before and after all units


@dataclasses.dataclass(frozen=True, eq=False)
class EndOps:
    """The embedding, the head, and the embedding's gradient; in evaluation the embedding and the
    loss."""

    ends: EmbeddingAndHead
    table: Table
    stage: jax.Array

    def ops(self) -> list[TickOp]:
        cfg, evaluates = self.ends.parts.cfg, self.table.forward_only
        dense, predicts = cfg.dense_layers > 0, cfg.mtp_depth > 0 and not evaluates
        inputs, gradients = Pools(activation=True), Pools(gradient=True)
        of_embed = Constants(ModelTree(embed=True, first=dense), batch=True)
        of_head = Constants(ModelTree(embed=True, head=True, predictors=predicts), batch=True)
        embed = TickOp(EMBED, TickState(pools=inputs), of_embed, self.embed)
        if evaluates:
            return [embed, TickOp(HEAD, TickState(loss=True, pools=inputs), of_head, self.loss)]
        # The head's op adds to the embedding table's sums, too, where it uses that table.
        uses_table = cfg.tied_embeddings or predicts
        head = TickState(
            loss=True,
            further=True,
            gradients=ModelTree(uses_table, head=True, predictors=predicts),
            pools=merged(inputs, gradients),
        )
        embed_gradient = TickState(gradients=ModelTree(embed=True, first=dense), pools=gradients)
        # A lookup's gradient needs no table; dense layers are recomputed from the embeddings.
        recomputed = Constants(ModelTree(embed=dense, first=dense), batch=True)
        return [
            embed,
            TickOp(HEAD, head, of_head, self.loss_and_gradients),
            TickOp(EMBED_GRADIENT, embed_gradient, recomputed, self.embed_gradient),
        ]

    def _on_stage(self, result: jax.Array, before: jax.Array, stage: int) -> jax.Array:
        """The result of an op that all stages share on `stage`; on the others `before`, the value
        that is in its slot."""
        # All stages of a shared vocabulary run the op with the same slot. On all but the end stage
        # this slot may have another value, which must stay.
        if not self.ends.shared:
            return result
        return jnp.where(self.stage == stage, result.astype(before.dtype), before)

    def embed(self, state: TickState, constants: Constants, columns: TickColumns) -> TickState:
        """The first unit's input, in its slot."""
        slot, pool = columns.slots.embed_activation, state.pools.activation
        x = self.ends.embed(constants, columns.embed_microbatch)
        x = self._on_stage(x, read_at(pool, slot), self.ends.first_stage)
        return dataclasses.replace(state, pools=Pools(activation=write_at(pool, x, slot)))

    def embed_gradient(
        self, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        """The gradient sums of the embedding and of the dense layers, with a microbatch's."""
        g = read_at(state.pools.gradient, columns.slots.embedding_gradient)
        microbatch = columns.embed_gradient_microbatch
        sums = self.ends.embed_gradient(state.gradients, constants, microbatch, g)
        return dataclasses.replace(state, gradients=sums)

    def loss(self, state: TickState, constants: Constants, columns: TickColumns) -> TickState:
        """The loss with a microbatch's."""
        y = read_at(state.pools.activation, columns.slots.head_activation)
        loss = self.ends.loss(constants, columns.head_microbatch, y)
        return dataclasses.replace(state, loss=state.loss + loss)

    def loss_and_gradients(
        self, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        """The losses and the head's gradient sums with a microbatch's, and the gradient of the last
        unit's output in its slot."""
        slot, pools = columns.slots.head_gradient, state.pools
        y = read_at(pools.activation, columns.slots.head_activation)
        of_all, microbatch = (state.loss, state.further), columns.head_microbatch
        if self.table.steps > 1:
            # The table has the losses of each step: [steps]. A microbatch adds to its step's.
            step = microbatch // self.table.microbatches_per_step
            of_step = lambda a: lax.dynamic_index_in_dim(a, step, keepdims=False)
            loss, further = jax.tree.map(of_step, of_all)
            state = dataclasses.replace(state, loss=loss, further=further)
        state, g = self.ends.loss_and_gradients(state, constants, microbatch, y)
        if self.table.steps > 1:
            put_back = lambda of_steps, a: lax.dynamic_update_index_in_dim(of_steps, a, step, 0)
            loss, further = jax.tree.map(put_back, of_all, (state.loss, state.further))
            state = dataclasses.replace(state, loss=loss, further=further)
        g = self._on_stage(g, read_at(pools.gradient, slot), self.ends.last_stage)
        pools = dataclasses.replace(pools, gradient=write_at(pools.gradient, g, slot))
        return dataclasses.replace(state, pools=pools)
