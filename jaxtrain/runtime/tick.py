"""One tick of the table: an ordered list of ops (schedule/columns.py), each a loop of zero trips or
one.

So an op costs nothing on a stage that does not run it, and it updates arrays in place. Three rules
keep XLA from undoing that (tests check them in the compiled program):

  · an op's body begins with an optimization barrier, or loop-invariant code motion lifts its
    matmuls into every tick;
  · state that an op only reads is carried through its loop as well, or nothing orders the reader
    before the next writer and entire pools are copied;
  · no permute stands inside an op: stages run different ops in one tick, and XLA's CPU backend
    waits for all devices.

The state and the constants are in tick_state.py.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.host_memory import read_at, write_at
from jaxtrain.devices.mesh import STAGE, on_tpu
from jaxtrain.runtime.embedding_and_head import EmbeddingAndHead, positions_and_segments
from jaxtrain.runtime.layer_stack import Forward, LayerStack
from jaxtrain.runtime.tick_state import Constants, ModelTree, Pools, TickState, merged, only
from jaxtrain.runtime.updates import Updates
from jaxtrain.schedule.columns import (
    ARRIVED,
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
    permute_op,
)
from jaxtrain.schedule.slots import TickSlots
from jaxtrain.schedule.table import Op, Permute, wraps

# They are registered here, as schedule/ does without JAX.
for record in (TickColumns, TickSlots):
    names = sorted(field.name for field in dataclasses.fields(record))
    jax.tree_util.register_dataclass(record, data_fields=names, meta_fields=[])

Run = Callable[[TickState, Constants, TickColumns], TickState]


@dataclasses.dataclass(frozen=True)
class TickOp:
    """An op of a tick.

    name: its column in `TickColumns.runs`, and its scope in a profile
    state, constants: masks (tick_state.py) of what the op reads or writes
    run: (that part of the state, that part of the constants, the tick's columns) → the same part
        of the state, changed
    last: whether it is for a unit's last W, or for the others; None: for all cells
    """

    name: str
    state: TickState
    constants: Constants
    run: Run
    last: bool | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulate:
    """One microbatch on one stage, forward and backward at once: what a table with one stage is.

    stack: the model's only unit
    """

    embedding_and_head: EmbeddingAndHead
    stack: LayerStack
    constants: Constants

    def _constants(self, columns: TickColumns) -> tuple[Constants, jax.Array]:
        """Returns (the constants, the microbatch)."""
        # or XLA gathers once, before the scan, what does not depend on the microbatch
        if self.embedding_and_head.zero.gathers_in_ops:
            return lax.optimization_barrier((self.constants, columns.microbatch))
        return self.constants, columns.microbatch

    def add_loss(self, state: TickState, columns: TickColumns) -> TickState:
        """The state with the microbatch's loss."""
        constants, microbatch = self._constants(columns)
        extra = positions_and_segments(constants.batch, microbatch)
        with jax.named_scope(EMBED):
            x = self.embedding_and_head.embed(constants, microbatch)
        with jax.named_scope(cell_op("F", 0)):
            y = self.stack.output(constants.params.layers[self.stack.unit], x, extra)
        with jax.named_scope(HEAD):
            loss = state.loss + self.embedding_and_head.loss(constants, microbatch, y)
        return dataclasses.replace(state, loss=loss)

    def add_gradients(self, state: TickState, columns: TickColumns) -> TickState:
        """The state with the microbatch's losses and gradients."""
        stack, ends = self.stack, self.embedding_and_head
        constants, microbatch = self._constants(columns)
        params, extra = (
            constants.params.layers[stack.unit],
            positions_and_segments(constants.batch, microbatch),
        )
        with jax.named_scope(EMBED):
            x = ends.embed(constants, microbatch)
        with jax.named_scope(cell_op("F", 0)):
            y, saved = stack.output_saving(params, x, extra)
        with jax.named_scope(HEAD):
            state, g = ends.loss_and_gradients(state, constants, microbatch, y)
        if ends.zero.reduces_in_ops and on_tpu():
            # A TPU needs memory for each sum that waits beside products: the head's took 0.6 of
            # 11.3 GB for Llama 3 8B on 64 chips.
            state, g = lax.optimization_barrier((state, g))
        with jax.named_scope(cell_op("B", 0)):
            sums = state.gradients.layers[stack.unit]
            sums, g = stack.gradients(params, sums, extra, saved, g)
        with jax.named_scope(EMBED_GRADIENT):
            changed = ends.embed_gradient(state.gradients, constants, microbatch, g)
        changed = dataclasses.replace(changed, layers={stack.unit: sums})
        return merged(state, TickState(gradients=changed))


class Tick:
    """tick(state, columns) → state, for the columns of one tick.

    stacks: by local unit
    updates: of a table of several steps
    """

    def __init__(
        self,
        embedding_and_head: EmbeddingAndHead,
        stacks: list[LayerStack],
        ticks: TickTable,
        constants: Constants,
        updates: Updates | None = None,
    ):
        self.embedding_and_head, self.constants = embedding_and_head, constants
        self._updates = updates
        self.ticks, self.table = ticks, ticks.slotted.table
        self._stage = lax.axis_index(STAGE)
        self._has_dense_layers = embedding_and_head.parts.cfg.dense_layers > 0
        self._takes = [self._copy_op(copy) for copy in ticks.copies.takes]
        cells = [op for unit, stack in enumerate(stacks) for op in self._cell_ops(unit, stack)]
        for name, (kind, unit, b_unit) in ticks.overlapped.items():
            cells.append(self._overlapped_op(name, kind, stacks[unit], stacks[b_unit], cells))
        copies = [self._copy_op(copy) for copy in (*ticks.copies.sends, *ticks.copies.stays)]
        embed = TickOp(
            EMBED,
            TickState(pools=Pools(activation=True)),
            Constants(ModelTree(embed=True, first=self._has_dense_layers), batch=True),
            self._embed,
        )
        ops = [embed, *cells, *copies, *self._end_ops()]
        if updates:
            ops = [_reading_state(op) for op in ops]
        of_stage = slice(0, len(ops))
        if on_tpu() and self.table.vocabulary == "parallel":
            of_stage = slice(1, 1 + len(cells) + len(copies))
        # A tick's ops in their order. On TPUs those of all stages together, which have collectives,
        # stand before and after a stage's own.
        self._before, self._of_stage, self._after = (
            ops[: of_stage.start],
            ops[of_stage],
            ops[of_stage.stop :],
        )
        if updates:
            (self._after or self._of_stage).extend(self._update_ops(updates))

    def __call__(self, state: TickState, columns: TickColumns) -> TickState:
        if self._updates:
            columns = _unless_wrong(columns, state)
        state = self._run(self._takes, state, columns)
        if not self.ticks.columns.runs[permute_op(Permute.EARLY)].all():
            ops = [*self._before, *self._of_stage, *self._after]
            state = self._run(ops, self._permute(Permute.EARLY, state, columns), columns)
            return self._permute(Permute.LATE, state, columns)
        state = self._run_if_busy(self._before, state, columns)
        # What arrived last is in its slot before anything is sent: then what arrives next lands
        # where that was. What is sent is separate from what the ops write: or XLA makes two copies
        # of it, or has a permute finished before the ops.
        leaving = TickState(buffers=dict.fromkeys(self.ticks.permutes, True))
        filled = dataclasses.replace(leaving, pools=Pools(activation=True, gradient=True))
        sent, rest = lax.optimization_barrier((_copied(only(state, leaving)), only(state, filled)))
        state = merged(state, rest)
        sent = self._permute(Permute.EARLY, merged(state, sent), columns)
        arrived = {ARRIVED[way]: sent.buffers[ARRIVED[way]] for way in self.ticks.permutes}
        # One loop around all ops of a stage: XLA's TPU scheduler starts a permute as late as the
        # loops behind it take, were they to run, and the last ones mostly do not. Only as one loop
        # do they overlap with it. A loop with collectives in it would overlap with one permute of
        # the two.
        buffers = {name: a for name, a in state.buffers.items() if name not in arrived}
        state = dataclasses.replace(state, buffers=buffers)
        carried = self._run_if_busy(self._of_stage, state, columns)
        # Without this XLA's GPU compiler moves the permutes, which nothing else in the tick reads,
        # in front of the next tick's ops, and its TPU compiler beside the head, which does not run
        # in every tick.
        arrived, loss = lax.optimization_barrier((arrived, carried.loss))
        carried = dataclasses.replace(carried, loss=loss)
        carried = self._run_if_busy(self._after, carried, columns)
        return merged(state, merged(carried, TickState(buffers=arrived)))

    # ------------------------------------------------------------------ how an op is run

    def _run_if_busy(self, ops: list[TickOp], state: TickState, columns: TickColumns) -> TickState:
        """The state after the ops, in one loop that has no trip in a tick in which no stage has an
        op."""
        if not ops:
            return state
        return lax.fori_loop(
            0, columns.busy, lambda _, carried: self._run(ops, carried, columns), state
        )

    def _run(self, ops: list[TickOp], state: TickState, columns: TickColumns) -> TickState:
        for op in ops:
            state = self._once(op, state, columns)
        return state

    def _once(self, op: TickOp, state: TickState, columns: TickColumns) -> TickState:
        """Runs the op where the tick wants it. An op that no stage ever wants, or every stage
        always, needs no loop."""
        column, times = self.ticks.columns.runs[op.name], columns.runs[op.name]
        if op.last is not None and columns.last_weights is not None:
            column = column * (self.ticks.columns.last_weights == op.last)
            times = times * (columns.last_weights == op.last)
        elif op.last:
            return state
        if not column.any():
            return state
        carried, constants = only(state, op.state), only(self.constants, op.constants)
        if column.all():
            with jax.named_scope(op.name):
                return merged(state, op.run(carried, constants, columns))

        def body(i, carried):
            i, carried, fixed = lax.optimization_barrier((i, carried, constants))
            with jax.named_scope(op.name):
                return op.run(carried, fixed, columns)

        return merged(state, lax.fori_loop(0, times, body, carried))

    def _permute(self, when: Permute, state: TickState, columns: TickColumns) -> TickState:
        """Sends `up` to the next stage and `down` to the previous one, if this tick does so now."""
        name, stages, ways = permute_op(when), self.table.stages, self.ticks.permutes
        column = self.ticks.columns.runs[name]
        if not column.any() or not ways:
            return state
        closed = wraps(self.table.stage_of, stages)

        def send(state: TickState) -> TickState:
            arrived = {}
            with jax.named_scope(name):
                for way, step in ways.items():
                    to = [(i, i + step) for i in range(stages) if closed or 0 <= i + step < stages]
                    pairs = [(i, j % stages) for i, j in to]
                    arrived[ARRIVED[way]] = lax.ppermute(state.buffers[way], STAGE, pairs)
            return TickState(buffers=arrived)

        def body(i, _):
            # No trip changes what is sent: without the barrier it would be sent before the loop, in
            # every tick.
            leaving = only(state, TickState(buffers=dict.fromkeys(ways, True)))
            return send(lax.optimization_barrier((i, leaving))[1])

        if column.all():
            return merged(state, send(state))
        arrived = only(state, TickState(buffers={ARRIVED[way]: True for way in ways}))
        return merged(state, lax.fori_loop(0, columns.runs[name], body, arrived))

    # ------------------------------------------------------------------ the ops: what they use

    def _copy_op(self, copy: Copy) -> TickOp:
        """Moves a message from a buffer to another one, or to a slot of a pool."""
        message, slotted = copy.target == "activation", bool(copy.slot)
        pools = Pools(activation=slotted and message, gradient=slotted and not message)
        buffers = dict.fromkeys((copy.source,) if slotted else (copy.source, copy.target), True)
        run = functools.partial(self._copy, copy)
        return TickOp(copy.op, TickState(pools=pools, buffers=buffers), Constants(), run)

    def _cell_ops(self, unit: int, stack: LayerStack) -> list[TickOp]:
        """F, K, R, B and W of a local unit."""
        output, input_gradient = (
            {self.ticks.result_buffers[op, unit]: True} for op in (Op.F, Op.B)
        )
        one_unit = ModelTree(layers={stack.unit: True})
        recompute = Pools(activation=True, residual_b=True, residual_w=True)
        saving = Pools(activation=True, saved_b=True, saved_w=True)
        everything = merged(recompute, saving)
        backward = dataclasses.replace(
            everything, activation=None, gradient=True, weight_stash=True, saved_stash=True
        )
        weights = Pools(residual_w=True, weight_stash=True, saved_w=True, saved_stash=True)
        ops: dict[str, tuple[TickState, Callable]] = {
            "F": (TickState(pools=Pools(activation=True), buffers=output), self._forward),
            "K": (
                TickState(pools=everything, buffers=output),
                functools.partial(self._forward_saving, "K"),
            ),
            "R": (TickState(pools=recompute), functools.partial(self._forward_saving, "R")),
            "B": (TickState(pools=backward, buffers=input_gradient), self._input_gradient),
            "W": (TickState(gradients=one_unit, pools=weights), self._weight_gradient),
        }
        if stack.saves_in_f and not self.table.forward_only:
            pools = dataclasses.replace(saving, layer_input=stack.saves_inputs or None)
            state = TickState(pools=pools, buffers=output)
            ops["F"] = state, functools.partial(self._forward_saving, "F")
        if stack.saves_inputs:
            pools = Pools(layer_input=True, residual_b=True, residual_w=True)
            ops["R"] = TickState(pools=pools), self._recompute
        constants = Constants(one_unit, batch=True)
        cells = [
            TickOp(cell_op(kind, unit), state, constants, functools.partial(run, stack))
            for kind, (state, run) in ops.items()
        ]
        if not stack.reduces_in_last:
            return cells
        *others, weight_gradient = cells
        state = dataclasses.replace(weight_gradient.state, reduced=one_unit)
        run = functools.partial(self._last_weight_gradient, stack)
        last = TickOp(weight_gradient.name, state, constants, run, last=True)
        return [*others, dataclasses.replace(weight_gradient, last=False), last]

    def _overlapped_op(
        self, name: str, kind: str, forward: LayerStack, backward: LayerStack, cells: list[TickOp]
    ) -> TickOp:
        """FB or KB: the op `kind` of a unit and B of one at once. cells: the ops of each unit"""
        parts = {op.name: op for op in cells}
        f, b = parts[cell_op(kind, int(forward.unit))], parts[cell_op("B", int(backward.unit))]
        run = functools.partial(self._forward_and_input_gradient, kind, forward, backward)
        return TickOp(name, merged(f.state, b.state), merged(f.constants, b.constants), run)

    def _end_ops(self) -> list[TickOp]:
        """The head and the embedding's gradient; in evaluation the loss."""
        cfg, dense = self.embedding_and_head.parts.cfg, self._has_dense_layers
        predicts = cfg.mtp_depth > 0 and not self.table.forward_only
        params = ModelTree(embed=True, head=True, predictors=predicts)
        constants, pools = Constants(params, batch=True), Pools(activation=True)
        if self.table.forward_only:
            return [TickOp(HEAD, TickState(loss=True, pools=pools), constants, self._loss)]
        pools = Pools(activation=True, gradient=True)
        sums = ModelTree(cfg.tied_embeddings or predicts, head=True, predictors=predicts)
        head = TickState(loss=True, mtp_loss=predicts, gradients=sums, pools=pools)
        sums = ModelTree(embed=True, first=dense)
        embedding = TickState(gradients=sums, pools=Pools(gradient=True))
        dense_layers = Constants(ModelTree(embed=dense, first=dense), batch=True)
        return [
            TickOp(HEAD, head, constants, self._loss_and_gradients),
            TickOp(EMBED_GRADIENT, embedding, dense_layers, self._embed_gradient),
        ]

    def _update_ops(self, updates: Updates) -> list[TickOp]:
        """The optimizer's updates and the check of a step, at the end of a tick."""
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
                TickState(loss=True, mtp_loss=True, layers=True, ends=True, checks=True),
                Constants(),
                lambda state, _, columns: updates.check(state, columns.checked_step),
            ),
        ]

    # ------------------------------------------------------------------ the ops: what they do

    def _copy(
        self, copy: Copy, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        message = state.buffers[copy.source]
        if not copy.slot:
            return merged(state, TickState(buffers={copy.target: message}))
        slot = getattr(columns.slots, copy.slot)
        pools = jax.tree.map(lambda pool: write_at(pool, message, slot), state.pools)
        return dataclasses.replace(state, pools=pools)

    def _on_stage(self, result: jax.Array, before: jax.Array, stage: int) -> jax.Array:
        """The result of an op that all stages share on `stage`; on the others what is there
        before."""
        if not self.embedding_and_head.shared:
            return result
        return jnp.where(self._stage == stage, result.astype(before.dtype), before)

    def _extra(self, constants: Constants, columns: TickColumns):
        return positions_and_segments(constants.batch, columns.microbatch)

    def _embed(self, state: TickState, constants: Constants, columns: TickColumns) -> TickState:
        slot, pool = columns.slots.embed_activation, state.pools.activation
        x = self.embedding_and_head.embed(constants, columns.embed_microbatch)
        x = self._on_stage(x, read_at(pool, slot), self.table.stage_of[0])
        return dataclasses.replace(state, pools=Pools(activation=write_at(pool, x, slot)))

    def _embed_gradient(
        self, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        g = read_at(state.pools.gradient, columns.slots.embedding_gradient)
        sums = self.embedding_and_head.embed_gradient(
            state.gradients, constants, columns.embed_gradient_microbatch, g
        )
        return dataclasses.replace(state, gradients=sums)

    def _loss(self, state: TickState, constants: Constants, columns: TickColumns) -> TickState:
        y = read_at(state.pools.activation, columns.slots.head_activation)
        loss = self.embedding_and_head.loss(constants, columns.head_microbatch, y)
        return dataclasses.replace(state, loss=state.loss + loss)

    def _loss_and_gradients(
        self, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        slot, pools = columns.slots.head_gradient, state.pools
        y = read_at(pools.activation, columns.slots.head_activation)
        several, microbatch = state, columns.head_microbatch
        if self._updates:
            step = microbatch // self.table.microbatches_per_step
            state = _losses_of_step(several, step)
        state, g = self.embedding_and_head.loss_and_gradients(state, constants, microbatch, y)
        if self._updates:
            state = _with_losses(several, state, step)
        g = self._on_stage(g, read_at(pools.gradient, slot), self.table.stage_of[-1])
        pools = dataclasses.replace(pools, gradient=write_at(pools.gradient, g, slot))
        return dataclasses.replace(state, pools=pools)

    def _forward(
        self, stack: LayerStack, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        x = read_at(state.pools.activation, columns.slots.activation)
        params = constants.params.layers[stack.unit]
        y = stack.output(params, x, self._extra(constants, columns))
        return dataclasses.replace(state, buffers=dict.fromkeys(state.buffers, y))

    def _forward_saving(
        self,
        op: str,
        stack: LayerStack,
        state: TickState,
        constants: Constants,
        columns: TickColumns,
    ) -> TickState:
        """The state with the unit's residuals that the op makes (F, K or R), and with its output
        where the op (not R) has a buffer for it."""
        x = read_at(state.pools.activation, columns.slots.activation)
        params, extra = constants.params.layers[stack.unit], self._extra(constants, columns)
        y, pools = stack.output_and_residuals(params, x, extra, state.pools, columns.slots, op)
        return dataclasses.replace(state, pools=pools, buffers=dict.fromkeys(state.buffers, y))

    def _recompute(
        self, stack: LayerStack, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        """The state with the unit's residuals, each layer's from its own input."""
        params, extra = constants.params.layers[stack.unit], self._extra(constants, columns)
        pools = stack.rebuilt(params, extra, state.pools, columns.slots)
        return dataclasses.replace(state, pools=pools)

    def _input_gradient(
        self, stack: LayerStack, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        g = read_at(state.pools.gradient, columns.slots.gradient)
        params, extra = constants.params.layers[stack.unit], self._extra(constants, columns)
        g, pools = stack.input_gradient(params, extra, state.pools, columns.slots, g)
        return dataclasses.replace(state, pools=pools, buffers=dict.fromkeys(state.buffers, g))

    def _forward_and_input_gradient(
        self,
        op: str,
        stack: LayerStack,
        b_stack: LayerStack,
        state: TickState,
        constants: Constants,
        columns: TickColumns,
    ) -> TickState:
        """The state after F (or K) of a unit and B of one, of two microbatches."""
        extra = functools.partial(positions_and_segments, constants.batch)
        forward = Forward(
            op,
            constants.params.layers[stack.unit],
            read_at(state.pools.activation, columns.slots.activation),
            extra(columns.microbatch),
            columns.slots,
        )
        y, g, pools = stack.forward_and_input_gradient(
            forward,
            b_stack,
            constants.params.layers[b_stack.unit],
            extra(columns.b_microbatch),
            state.pools,
            columns.slots.of_overlapped_b(),
            read_at(state.pools.gradient, columns.slots.gradient),
        )
        output, input_gradient = (
            self.ticks.result_buffers[kind, int(unit)]
            for kind, unit in ((Op.F, stack.unit), (Op.B, b_stack.unit))
        )
        buffers = {output: y, input_gradient: g}
        return dataclasses.replace(state, pools=pools, buffers=buffers)

    def _weight_gradient(
        self, stack: LayerStack, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        params, extra = constants.params.layers[stack.unit], self._extra(constants, columns)
        sums = state.gradients.layers[stack.unit]
        sums = stack.weight_gradient(params, sums, extra, state.pools, columns.slots)
        return dataclasses.replace(state, gradients=ModelTree(layers={stack.unit: sums}))

    def _last_weight_gradient(
        self, stack: LayerStack, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        """The state with the unit's reduced gradients of the step; its sums stay."""
        params, extra = constants.params.layers[stack.unit], self._extra(constants, columns)
        sums, shards = (tree.layers[stack.unit] for tree in (state.gradients, state.reduced))
        with jax.named_scope(LAST_WEIGHTS):
            shards = stack.reduced_gradient(params, sums, shards, extra, state.pools, columns.slots)
        return dataclasses.replace(state, reduced=ModelTree(layers={stack.unit: shards}))


def _losses_of_step(state: TickState, step: jax.Array) -> TickState:
    """The state with the losses of one step in the place of those of all steps."""
    loss, mtp_loss = jax.tree.map(
        lambda a: lax.dynamic_index_in_dim(a, step, keepdims=False), (state.loss, state.mtp_loss)
    )
    return dataclasses.replace(state, loss=loss, mtp_loss=mtp_loss)


def _with_losses(several: TickState, state: TickState, step: jax.Array) -> TickState:
    """`state`, with all steps' losses from `several` and its own in the place of one step."""
    loss, mtp_loss = jax.tree.map(
        lambda all_steps, a: lax.dynamic_update_index_in_dim(all_steps, a, step, 0),
        (several.loss, several.mtp_loss),
        (state.loss, state.mtp_loss),
    )
    return dataclasses.replace(state, loss=loss, mtp_loss=mtp_loss)


def _unless_wrong(columns: TickColumns, state: TickState) -> TickColumns:
    """The columns of a tick without ops, permutes among them, if a step was wrong: what they would
    compute is not used."""
    goes_on = 1 - state.checks.rejected.astype(jnp.int32)
    runs = {op: column * goes_on for op, column in columns.runs.items()}
    return dataclasses.replace(columns, runs=runs, busy=columns.busy * goes_on)


def _reading_state(op: TickOp) -> TickOp:
    """The op, which reads parameters from the state, where updates change them; so it carries them
    through its loop."""
    read = op.constants.params

    def run(state: TickState, constants: Constants, columns: TickColumns) -> TickState:
        params = state.params
        constants = dataclasses.replace(constants, params=params)
        changed = op.run(dataclasses.replace(state, params=ModelTree()), constants, columns)
        return dataclasses.replace(changed, params=params)

    state = dataclasses.replace(op.state, params=read)
    return TickOp(op.name, state, dataclasses.replace(op.constants, params=ModelTree()), run)


def _copied(messages: TickState) -> TickState:
    """Copies of the messages. XLA removes a plain copy, but not a sum with a zero that it does not
    know to be one."""
    zero = lax.optimization_barrier(jnp.zeros((), jnp.float32))
    return jax.tree.map(lambda a: a + -zero.astype(a.dtype), messages)
