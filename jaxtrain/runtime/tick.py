"""One tick of the table: an ordered list of ops (schedule/columns.py), each a loop of zero trips or
one.

A stage that does not want an op pays nothing, and what an op writes is updated in place. Three
rules keep XLA from undoing that (tests read them off the compiled program):

  · an op's body begins with an optimization barrier, or loop-invariant code motion lifts its
  matmuls into every tick; · state that an op only reads is carried through its loop as well, or
    nothing orders the reader before the next writer and whole pools are copied;
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

from jaxtrain.config.kernels import TPU
from jaxtrain.devices.mesh import STAGE, hardware
from jaxtrain.parallel.host_memory import read_at, write_at
from jaxtrain.runtime.backward_split import Residuals
from jaxtrain.runtime.embedding_and_head import EmbeddingAndHead
from jaxtrain.runtime.layer_stack import LayerStack, ResidualSlots
from jaxtrain.runtime.tick_state import Constants, Field, TickState, fields, keys_of, merged, only
from jaxtrain.schedule.columns import (
    ARRIVED,
    EMBED,
    EMBED_GRADIENT,
    HEAD,
    SENDS,
    STAYS,
    TAKES,
    Copy,
    TickColumns,
    TickTable,
    cell_op,
    permute_op,
)
from jaxtrain.schedule.slots import TickSlots
from jaxtrain.schedule.table import Op, Permute, wraps

# Here, as schedule/ does without JAX.
for record in (TickColumns, TickSlots):
    jax.tree_util.register_dataclass(record, data_fields=sorted(fields(record)), meta_fields=[])

Run = Callable[[TickState, Constants, TickColumns], TickState]


@dataclasses.dataclass(frozen=True)
class TickOp:
    """An op of a tick.

    name: its column in `TickColumns.runs`, and its scope in a profile
    reads: fields of `TickState` and `Constants`
    writes: fields of `TickState`
    run: the state and the constants with nothing but these fields, the tick's columns → that state,
        changed

    Raises ValueError for a name that is no field.
    """

    name: str
    reads: tuple[Field, ...]
    writes: tuple[Field, ...]
    run: Run

    def __post_init__(self):
        state, constants = fields(TickState), fields(Constants)
        for field in (*self.reads, *self.writes):
            known = state if field in self.writes else state | constants
            if keys_of(field)[0] not in known:
                verb, records = (
                    ("writes", "TickState")
                    if field in self.writes
                    else ("reads", "TickState or Constants")
                )
                raise ValueError(
                    f"op {self.name} {verb} {field!r}, which is no field of {records}: use "
                    f"one of {', '.join(sorted(known))}"
                )

    @property
    def carried(self) -> tuple[Field, ...]:
        """What goes through its loop: the state that it reads or writes."""
        return tuple(
            field for field in (*self.reads, *self.writes) if keys_of(field)[0] in fields(TickState)
        )

    @property
    def fixed(self) -> tuple[Field, ...]:
        """The constants that it reads."""
        return tuple(field for field in self.reads if keys_of(field)[0] in fields(Constants))


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulate:
    """One microbatch on one stage, forward and backward at once: what a table with one stage is.

    recompute: full remat; on_host: what is kept for the backward lies in the host's memory
    """

    embedding_and_head: EmbeddingAndHead
    stack: LayerStack
    recompute: bool
    on_host: bool
    constants: Constants

    def _constants(self, columns: TickColumns) -> tuple[Constants, jax.Array]:
        """(the constants, the microbatch)."""
        # or XLA gathers once, before the scan, what does not depend on the microbatch
        if self.embedding_and_head.zero.gathers_in_ops:
            return lax.optimization_barrier((self.constants, columns.microbatch))
        return self.constants, columns.microbatch

    def add_loss(self, state: TickState, columns: TickColumns) -> TickState:
        """The state with the microbatch's loss."""
        constants, microbatch = self._constants(columns)
        extra = self.embedding_and_head.extra(constants.batch, microbatch)
        with jax.named_scope(EMBED):
            x = self.embedding_and_head.embed(constants, microbatch)
        with jax.named_scope(cell_op("F", 0)):
            y = self.stack.output(constants.params["layers"]["0"], x, extra)
        with jax.named_scope(HEAD):
            return dataclasses.replace(
                state, loss=state.loss + self.embedding_and_head.loss(constants, microbatch, y)
            )

    def add_gradients(self, state: TickState, columns: TickColumns) -> TickState:
        """The state with the microbatch's losses and gradients."""
        constants, microbatch = self._constants(columns)
        params, extra = (
            constants.params["layers"]["0"],
            self.embedding_and_head.extra(constants.batch, microbatch),
        )
        with jax.named_scope(EMBED):
            x = self.embedding_and_head.embed(constants, microbatch)
        with jax.named_scope(cell_op("F", 0)):
            keeping: Callable = (
                self.stack.output_keeping_inputs
                if self.recompute
                else self.stack.output_keeping_residuals
            )
            y, kept = keeping(params, x, extra, self.on_host)
        with jax.named_scope(HEAD):
            state, g = self.embedding_and_head.loss_and_gradients(state, constants, microbatch, y)
        if self.embedding_and_head.zero.reduces_in_ops and hardware().platform == TPU:
            # There a sum beside products needs room of its own: the head's, left to wait, 0.6 of
            # 11.3 GB for Llama 3 8B on 64 chips.
            state, g = lax.optimization_barrier((state, g))
        with jax.named_scope(cell_op("B", 0)):
            gradients_from: Callable = (
                self.stack.gradients_from_inputs
                if self.recompute
                else self.stack.gradients_from_residuals
            )
            sums, g = gradients_from(params, state.gradients["layers"]["0"], extra, kept, g)
        with jax.named_scope(EMBED_GRADIENT):
            embedding = self.embedding_and_head.embed_gradient(
                state.gradients, constants, microbatch, g
            )
        return merged(state, TickState(gradients={"layers": {"0": sums}, **embedding}))


class Tick:
    """tick(state, columns) → state, for the columns of one tick."""

    def __init__(
        self,
        embedding_and_head: EmbeddingAndHead,
        stacks: list[LayerStack],
        ticks: TickTable,
        constants: Constants,
    ):
        self.embedding_and_head, self.stacks, self.constants = embedding_and_head, stacks, constants
        self.ticks, self.table = ticks, ticks.slotted.table
        self._stage = lax.axis_index(STAGE)
        self._takes = [self._copy_op(copy) for copy in TAKES]
        cells = [op for unit in range(len(stacks)) for op in self._cell_ops(unit)]
        copies = [self._copy_op(copy) for copy in (*SENDS, *STAYS)]
        self._ops = [self._embed_op(), *cells, *copies, *self._end_ops()]

    def __call__(self, state: TickState, columns: TickColumns) -> TickState:
        state = self._run(self._takes, state, columns)
        if not self.ticks.columns.runs[permute_op(Permute.EARLY)].all():
            state = self._run(self._ops, self._permute(Permute.EARLY, state, columns), columns)
            return self._permute(Permute.LATE, state, columns)
        # What arrived last is in its slot before anything is sent: then what arrives next lands
        # where that was. What is sent lies apart from what the ops write: or XLA makes two copies
        # of it, or has a permute finished before the ops.
        sent, rest = lax.optimization_barrier(
            (self._departing(state), only(state, ("activation", "gradient", *self.ticks.permutes)))
        )
        state = merged(state, rest)
        arrived = only(
            self._permute(Permute.EARLY, merged(state, sent), columns),
            [ARRIVED[way] for way in self.ticks.permutes],
        )
        # One loop around all ops: XLA's TPU scheduler starts a permute as late as the loops behind
        # it take, were they to run, and the last ones mostly do not. Only as a whole do they stand
        # beside it.
        carried = only(state, fields(TickState) - set(ARRIVED.values()))
        carried = lax.fori_loop(
            0, columns.busy, lambda _, carried: self._run(self._ops, carried, columns), carried
        )
        # Without this XLA's GPU compiler moves the permutes, which nothing else in the tick reads,
        # in front of the next tick's ops.
        arrived, loss = lax.optimization_barrier((arrived, carried.loss))
        return merged(state, merged(carried, dataclasses.replace(arrived, loss=loss)))

    def _departing(self, state: TickState) -> TickState:
        """The payloads once more. XLA takes a copy away again, but not a sum: with a zero that it
        does not know to be one."""
        zero = lax.optimization_barrier(jnp.zeros((), jnp.float32))
        return jax.tree.map(lambda a: a + -zero.astype(a.dtype), only(state, self.ticks.permutes))

    # ------------------------------------------------------------------ how an op is run

    def _run(self, ops: list[TickOp], state: TickState, columns: TickColumns) -> TickState:
        for op in ops:
            state = self._once(op, state, columns)
        return state

    def _once(self, op: TickOp, state: TickState, columns: TickColumns) -> TickState:
        """Runs the op where the tick wants it. An op that no stage ever wants, or every stage
        always, needs no loop."""
        column = self.ticks.columns.runs[op.name]
        if not column.any():
            return state
        carried, constants = only(state, op.carried), only(self.constants, op.fixed)
        if column.all():
            with jax.named_scope(op.name):
                return merged(state, op.run(carried, constants, columns))

        def body(i, carried):
            i, carried, fixed = lax.optimization_barrier((i, carried, constants))
            with jax.named_scope(op.name):
                return op.run(carried, fixed, columns)

        return merged(state, lax.fori_loop(0, columns.runs[op.name], body, carried))

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
                    pairs = [
                        (i, (i + step) % stages)
                        for i in range(stages)
                        if closed or 0 <= i + step < stages
                    ]
                    arrived[ARRIVED[way]] = lax.ppermute(getattr(state, way), STAGE, pairs)
            return TickState(**arrived)

        if column.all():
            return merged(state, send(state))

        def body(i, _):
            # No trip changes what is sent: without the barrier it would be sent before the loop, in
            # every tick.
            _, sources = lax.optimization_barrier((i, only(state, ways)))
            return send(sources)

        carried = only(state, [ARRIVED[way] for way in ways])
        return merged(state, lax.fori_loop(0, columns.runs[name], body, carried))

    # ------------------------------------------------------------------ the ops: names, what they r

    def _copy_op(self, copy: Copy) -> TickOp:
        return TickOp(copy.op, (copy.source,), (copy.target,), functools.partial(self._copy, copy))

    def _embed_op(self) -> TickOp:
        first = [("params", "first")] if self.embedding_and_head.parts.cfg.dense_layers else []
        return TickOp(EMBED, (("params", "embed"), *first, "batch"), ("activation",), self._embed)

    def _cell_ops(self, unit: int) -> list[TickOp]:
        """F, K, R, B and W of a local unit."""
        fixed = (("params", "layers", str(unit)), "batch")
        output, input_gradient = (self.ticks.result_buffers[op, unit] for op in (Op.F, Op.B))
        residuals = ("residual_b", "residual_w")

        def cell(
            kind: str, reads: tuple[Field, ...], writes: tuple[Field, ...], run: Callable
        ) -> TickOp:
            return TickOp(
                cell_op(kind, unit), (*fixed, *reads), writes, functools.partial(run, unit)
            )

        return [
            cell("F", ("activation",), (output,), self._forward),
            cell("K", ("activation",), (output, *residuals), self._forward_keeping),
            cell("R", ("activation",), residuals, self._recompute),
            cell(
                "B",
                ("gradient", *residuals),
                (input_gradient, "weight_stash"),
                self._input_gradient,
            ),
            cell(
                "W",
                ("residual_w", "weight_stash"),
                (("gradients", "layers", str(unit)),),
                self._weight_gradient,
            ),
        ]

    def _end_ops(self) -> list[TickOp]:
        """The head and the embedding's gradient; in evaluation the loss."""
        cfg = self.embedding_and_head.parts.cfg
        head: tuple[Field, ...] = (("params", "embed"), ("params", "head"))
        if self.table.forward_only:
            return [TickOp(HEAD, (*head, "batch", "activation"), ("loss",), self._loss)]
        writes: tuple[Field, ...] = ("loss", "gradient", ("gradients", "head"))
        if cfg.tied_embeddings or cfg.mtp_depth:
            writes += (("gradients", "embed"),)
        if cfg.mtp_depth:
            head, writes = (
                (*head, ("params", "predictors")),
                (*writes, "mtp_loss", ("gradients", "predictors")),
            )
        first = ("first",) if cfg.dense_layers else ()
        dense = (("params", "embed"), ("params", "first")) if first else ()
        sums = tuple(("gradients", name) for name in ("embed", *first))
        return [
            TickOp(HEAD, (*head, "batch", "activation"), writes, self._loss_and_gradients),
            TickOp(EMBED_GRADIENT, ("gradient", *dense, "batch"), sums, self._embed_gradient),
        ]

    # ------------------------------------------------------------------ the ops: what they do

    def _copy(
        self, copy: Copy, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        value = getattr(state, copy.source)
        if copy.slot:
            value = write_at(getattr(state, copy.target), value, getattr(columns.slots, copy.slot))
        return dataclasses.replace(state, **{copy.target: value})

    def _on_stage(self, result, kept, stage: int):
        """Of an op that all stages share: its result on the stage that keeps it, on the others what
        they kept before."""
        return (
            jnp.where(self._stage == stage, result.astype(kept.dtype), kept)
            if self.embedding_and_head.shared
            else result
        )

    def _embed(self, state: TickState, constants: Constants, columns: TickColumns) -> TickState:
        slot, pool = columns.slots.embed_activation, state.activation
        x = self.embedding_and_head.embed(constants, columns.embed_microbatch)
        x = self._on_stage(x, read_at(pool, slot), self.table.stage_of[0])
        return dataclasses.replace(state, activation=write_at(pool, x, slot))

    def _embed_gradient(
        self, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        g = read_at(state.gradient, columns.slots.embedding_gradient)
        sums = self.embedding_and_head.embed_gradient(
            state.gradients, constants, columns.embed_gradient_microbatch, g
        )
        return dataclasses.replace(state, gradients=sums)

    def _loss(self, state: TickState, constants: Constants, columns: TickColumns) -> TickState:
        y = read_at(state.activation, columns.slots.head_activation)
        return dataclasses.replace(
            state,
            loss=state.loss + self.embedding_and_head.loss(constants, columns.head_microbatch, y),
        )

    def _loss_and_gradients(
        self, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        slot, y = (
            columns.slots.head_gradient,
            read_at(state.activation, columns.slots.head_activation),
        )
        state, g = self.embedding_and_head.loss_and_gradients(
            state, constants, columns.head_microbatch, y
        )
        g = self._on_stage(g, read_at(state.gradient, slot), self.table.stage_of[-1])
        return dataclasses.replace(state, gradient=write_at(state.gradient, g, slot))

    def _extra(self, constants: Constants, columns: TickColumns):
        return self.embedding_and_head.extra(constants.batch, columns.microbatch)

    def _forward(
        self, unit: int, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        x, extra = (
            read_at(state.activation, columns.slots.activation),
            self._extra(constants, columns),
        )
        y = self.stacks[unit].output(constants.params["layers"][str(unit)], x, extra)
        return dataclasses.replace(state, **{self.ticks.result_buffers[Op.F, unit]: y})

    def _output_and_residuals(
        self, unit: int, state: TickState, constants: Constants, columns: TickColumns
    ) -> tuple[jax.Array, TickState]:
        """(the unit's output, the state with its residuals)."""
        x, extra = (
            read_at(state.activation, columns.slots.activation),
            self._extra(constants, columns),
        )
        pools, slots = Residuals(state.residual_b, state.residual_w), self._residual_slots(columns)
        y, pools = self.stacks[unit].output_and_residuals(
            constants.params["layers"][str(unit)], x, extra, pools, slots
        )
        return y, dataclasses.replace(state, residual_b=pools.for_b, residual_w=pools.for_w)

    def _residual_slots(self, columns: TickColumns) -> ResidualSlots:
        return ResidualSlots(columns.slots.residual_b, columns.slots.residual_w)

    def _forward_keeping(
        self, unit: int, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        y, state = self._output_and_residuals(unit, state, constants, columns)
        return dataclasses.replace(state, **{self.ticks.result_buffers[Op.F, unit]: y})

    def _recompute(
        self, unit: int, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        return self._output_and_residuals(unit, state, constants, columns)[1]

    def _input_gradient(
        self, unit: int, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        pools, slots = Residuals(state.residual_b, state.residual_w), self._residual_slots(columns)
        g, extra = (
            read_at(state.gradient, columns.slots.gradient),
            self._extra(constants, columns),
        )
        params, slot = constants.params["layers"][str(unit)], columns.slots.weight_stash
        g, weight_stash = self.stacks[unit].input_gradient(
            params, extra, pools, slots, g, state.weight_stash, slot
        )
        return dataclasses.replace(
            state, weight_stash=weight_stash, **{self.ticks.result_buffers[Op.B, unit]: g}
        )

    def _weight_gradient(
        self, unit: int, state: TickState, constants: Constants, columns: TickColumns
    ) -> TickState:
        sums = self.stacks[unit].weight_gradient(
            constants.params["layers"][str(unit)],
            state.gradients["layers"][str(unit)],
            self._extra(constants, columns),
            state.residual_w,
            columns.slots.residual_w,
            state.weight_stash,
            columns.slots.weight_stash,
        )
        return dataclasses.replace(state, gradients={"layers": {str(unit): sums}})
