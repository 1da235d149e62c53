"""One tick of the table: an ordered list of ops (schedule/columns.py), each a loop of zero trips or
one. `Tick.__call__` runs a tick, in the order of its plan, a `TickOrder`. The ops and what they
compute are in tick_ops.py, the state and the constants in tick_state.py.

    every tick permutes early                        otherwise

    takes       messages into their slots            takes
    before      all stages together (TPU)            early permute, in some ticks
      barrier   the messages that leave are copied
    early permute ┐                                  between     all ops
    between       │ own ops, while messages travel
      barrier  ◄──┘                                  late permute, in some ticks
    after       all stages together (TPU)

An op costs nothing on a stage that does not run it, and it updates arrays in place. Three rules
keep XLA from undoing that (tests check them in the compiled program):

  · an op's body begins with an optimization barrier, or loop-invariant code motion lifts its
    matmuls into every tick;
  · state that an op only reads is carried through its loop as well, or nothing orders the reader
    before the next writer and entire pools are copied;
  · no permute stands inside an op: stages run different ops in one tick, and XLA's CPU backend
    waits for all devices.

`Accumulate` is the tick on one stage, which has no table.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import STAGE, on_tpu
from jaxtrain.runtime.batch import extra_inputs
from jaxtrain.runtime.embedding_and_head import EmbeddingAndHead
from jaxtrain.runtime.layers.layer_stack import LayerStack
from jaxtrain.runtime.tick_ops import TickOp, tick_ops
from jaxtrain.runtime.tick_state import Constants, Pools, TickState, merged, only
from jaxtrain.runtime.updates import Updates
from jaxtrain.schedule.columns import (
    ARRIVED,
    CELL_OPS,
    CHECK_STEP,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    UPDATE_ENDS,
    UPDATE_LAYERS,
    TickColumns,
    TickTable,
    cell_op,
    permute_op,
)
from jaxtrain.schedule.slots import TickSlots
from jaxtrain.schedule.table import Permute, wraps

# They are registered here, since schedule/ does without JAX.
for record in (TickColumns, TickSlots):
    names = sorted(field.name for field in dataclasses.fields(record))
    jax.tree_util.register_dataclass(record, data_fields=names, meta_fields=[])


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
        # Without the barrier XLA gathers all layers before the scan, as the microbatch changes none
        # of them: a device then has memory for the parameters of all layers.
        if self.embedding_and_head.zero.gathers_in_ops:
            return lax.optimization_barrier((self.constants, columns.microbatch))
        return self.constants, columns.microbatch

    def add_loss(self, state: TickState, columns: TickColumns) -> TickState:
        """The state with the microbatch's loss."""
        constants, microbatch = self._constants(columns)
        extra = extra_inputs(constants.batch, microbatch)
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
            extra_inputs(constants.batch, microbatch),
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


@dataclasses.dataclass(frozen=True)
class TickOrder:
    """The names of the ops that a table has, in the order in which a tick runs them.

    takes: the copies of arrived messages into their slots
    before: the ops before the early permute starts
    between: the ops between the early permute and the late one, or, where every tick permutes
        early, those that the permute overlaps with
    after: the ops after the early permute's messages have arrived
    always_early: every tick permutes early, and none late
    """

    takes: tuple[str, ...]
    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    always_early: bool


def tick_order(ticks: TickTable, tpu: bool) -> TickOrder:
    """The order of a table's ops in a tick. tpu: the program is for TPUs"""
    runs, copies, table = ticks.columns.runs, ticks.copies, ticks.slotted.table
    cells = [cell_op(kind, unit) for unit in range(table.units_per_stage) for kind in CELL_OPS]
    own = [*cells, *ticks.overlapped, *(copy.op for copy in (*copies.sends, *copies.stays))]
    before_units = [EMBED]
    after_units = [HEAD, EMBED_GRADIENT, UPDATE_LAYERS, UPDATE_ENDS, CHECK_STEP]
    used = lambda names: tuple(name for name in names if name in runs and runs[name].any())
    always_early = bool(runs[permute_op(Permute.EARLY)].all())
    takes = used(copy.op for copy in copies.takes)
    if always_early and tpu and table.vocabulary == "parallel":
        # All stages run embedding and head together, with collectives. A TPU overlaps a loop with
        # collectives with one permute of the two, so these ops are not in the loop of the others.
        return TickOrder(takes, used(before_units), used(own), used(after_units), always_early)
    return TickOrder(takes, (), used([*before_units, *own, *after_units]), (), always_early)


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
        self.ticks, self.constants, self._updates = ticks, constants, updates
        self.order = tick_order(ticks, on_tpu())
        self._ops = tick_ops(embedding_and_head, stacks, ticks, lax.axis_index(STAGE), updates)

    def __call__(self, state: TickState, columns: TickColumns) -> TickState:
        if self._updates:
            # No op and no permute runs after a step that was not accepted: nothing would use their
            # results.
            goes_on = 1 - state.checks.rejected.astype(jnp.int32)
            runs = {op: column * goes_on for op, column in columns.runs.items()}
            columns = dataclasses.replace(columns, runs=runs, busy=columns.busy * goes_on)
        state = self._run(self.order.takes, state, columns)
        if self.order.always_early:
            return self._around_permute(state, columns)
        state = self._permute(Permute.EARLY, state, columns)
        state = self._run(self.order.between, state, columns)
        return self._permute(Permute.LATE, state, columns)

    def _around_permute(self, state: TickState, columns: TickColumns) -> TickState:
        """The state after the ops and the early permute, which overlaps with them."""
        state = self._run_if_busy(self.order.before, state, columns)
        # The messages of the last permute are in their slots before anything is sent: then the next
        # ones arrive in the same buffers. What is sent is a copy, separate from the buffers that
        # the ops write: or XLA makes two copies, or has the permute finished before the ops.
        leaving = TickState(buffers=dict.fromkeys(self.ticks.permutes, True))
        filled = dataclasses.replace(leaving, pools=Pools(activation=True, gradient=True))
        sent, rest = lax.optimization_barrier((_copied(only(state, leaving)), only(state, filled)))
        state = merged(state, rest)
        sent = self._permute(Permute.EARLY, merged(state, sent), columns)
        arrived = {ARRIVED[way]: sent.buffers[ARRIVED[way]] for way in self.ticks.permutes}
        # One loop around all ops of a stage: XLA's TPU scheduler counts each loop behind a permute
        # as if it ran, and starts the permute so late that these loops would cover it. The last
        # ones mostly do not run. Only one loop around all is there in every tick with work.
        buffers = {name: a for name, a in state.buffers.items() if name not in arrived}
        state = dataclasses.replace(state, buffers=buffers)
        carried = self._run_if_busy(self.order.between, state, columns)
        # Nothing else in the tick reads the arrived messages. Without this barrier XLA's GPU
        # compiler moves the permutes in front of the next tick's ops, and its TPU compiler
        # overlaps them with the head, which does not run in every tick.
        arrived, loss = lax.optimization_barrier((arrived, carried.loss))
        carried = dataclasses.replace(carried, loss=loss)
        carried = self._run_if_busy(self.order.after, carried, columns)
        return merged(state, merged(carried, TickState(buffers=arrived)))

    # ------------------------------------------------------------------ how an op is run

    def _run_if_busy(
        self, names: tuple[str, ...], state: TickState, columns: TickColumns
    ) -> TickState:
        """The state after the ops, in one loop that has no trip in a tick in which no stage has an
        op."""
        if not names:
            return state
        return lax.fori_loop(
            0, columns.busy, lambda _, carried: self._run(names, carried, columns), state
        )

    def _run(self, names: Iterable[str], state: TickState, columns: TickColumns) -> TickState:
        for op in (op for name in names for op in self._ops[name]):
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

        # A loop and no conditional: XLA copies the state of a conditional's branches, and updates a
        # loop's in place.
        return merged(state, lax.fori_loop(0, times, body, carried))

    def _permute(self, when: Permute, state: TickState, columns: TickColumns) -> TickState:
        """Sends `up` to the next stage and `down` to the previous one, if this tick does so now."""
        table = self.ticks.slotted.table
        name, stages, ways = permute_op(when), table.stages, self.ticks.permutes
        column = self.ticks.columns.runs[name]
        if not column.any() or not ways:
            return state
        closed = wraps(table.stage_of, stages)

        def send(state: TickState) -> TickState:
            arrived = {}
            with jax.named_scope(name):
                for way, step in ways.items():
                    to = [(i, i + step) for i in range(stages) if closed or 0 <= i + step < stages]
                    pairs = [(i, j % stages) for i, j in to]
                    arrived[ARRIVED[way]] = lax.ppermute(state.buffers[way], STAGE, pairs)
            return TickState(buffers=arrived)

        def body(i, _):
            # No trip changes the messages: without the barrier they would be sent before the loop,
            # in every tick.
            leaving = only(state, TickState(buffers=dict.fromkeys(ways, True)))
            return send(lax.optimization_barrier((i, leaving))[1])

        if column.all():
            return merged(state, send(state))
        arrived = only(state, TickState(buffers={ARRIVED[way]: True for way in ways}))
        return merged(state, lax.fori_loop(0, columns.runs[name], body, arrived))


def _copied(messages: TickState) -> TickState:
    """Copies of the messages. XLA removes a plain copy, but not a sum with a zero that it does not
    know to be one."""
    zero = lax.optimization_barrier(jnp.zeros((), jnp.float32))
    return jax.tree.map(lambda a: a + -zero.astype(a.dtype), messages)
