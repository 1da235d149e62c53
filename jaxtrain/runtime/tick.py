"""One row of the table: an ordered list of ops (columns.py), each a loop of zero trips or one.

A stage that does not want an op pays nothing, and what an op writes is updated in place. Three rules keep XLA from
undoing that (tests read them off the compiled program):

  · an op's body begins with an optimization barrier, or loop-invariant code motion lifts its matmuls into every tick;
  · state that an op only reads is carried through its loop as well, or nothing orders the reader before the next writer
    and whole stashes are copied;
  · no permute stands inside an op: stages run different ops in one tick, and XLA's CPU backend waits for all devices.

The state, on each stage:

    activation, gradient    inputs of units, and gradients of their outputs, by slot [slots, B, T, D]
    residual_b, residual_w, weight_stash    what the forward leaves for B alone, for B and W, and B for W: lists of arrays
                            [slots · rows, ...]
    up, down     what leaves to the next and to the previous stage; y: a result that does neither; up_in, down_in: what came from them
    grad…        float32 gradient sums: embed, first, head, predictors and one for each unit; loss, ahead_loss: the sums so far
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import STAGE
from jaxtrain.parallel.host_memory import row as row_of
from jaxtrain.parallel.host_memory import with_row
from jaxtrain.runtime.embedding_and_head import Ends, State
from jaxtrain.runtime.layer_stack import LayerStack
from jaxtrain.schedule.columns import STAYS, TAKES, WAY, columns, permutes, results
from jaxtrain.schedule.slots import SlottedTable
from jaxtrain.schedule.table import Permute, wraps


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulate:
    """One microbatch on one stage, forward and backward at once: what a table with one stage is. `recompute`: full remat; `host`: what is
    kept for the backward lies in the host's memory."""

    ends: Ends
    stack: LayerStack
    recompute: bool
    forward_only: bool
    host: bool
    constants: State

    def __call__(self, state: State, row: Mapping[str, jax.Array]) -> State:
        constants, k = self.constants, row["microbatch"]
        if self.ends.zero.gathers_in_ops:  # or XLA gathers once, before the scan, what does not depend on the microbatch
            constants, k = lax.optimization_barrier((constants, k))
        s = {**constants, **state}
        layers, extra = s["layers0"], self.ends.extra(s, k)
        with jax.named_scope("embed"):
            x = self.ends.embed(s, k)
        if self.forward_only:
            with jax.named_scope("F0"):
                y = self.stack.forward(layers, x, extra)
            with jax.named_scope("head"):
                return {**state, **self.ends.loss(s, k, y)}
        with jax.named_scope("F0"):
            y, kept = self.stack.forward_with(layers, x, extra, self.recompute, self.host)
        with jax.named_scope("head"):
            new, g = self.ends.loss_and_gradients(s, k, y)
        s |= new
        with jax.named_scope("B0"):
            new["grad0"], g = self.stack.backward_with(layers, s["grad0"], extra, kept, g, self.recompute)
        with jax.named_scope("embed_gradient"):
            return {**state, **new, **self.ends.embed_gradient(s, k, g)}


class Tick:
    """tick(state, row) → state. `constants` (parameters in the compute type, the batch) are what no op changes."""

    def __init__(self, ends: Ends, stacks: list[LayerStack], program: SlottedTable, constants: State):
        self.ends, self.stacks, self.table, self.constants = ends, stacks, program.table, constants
        self.columns, self.results, self.permutes = columns(program), results(program), permutes(program.table)
        self._stage = lax.axis_index(STAGE)

    def __call__(self, state: State, row: Mapping[str, jax.Array]) -> State:
        s = state
        for name in TAKES:
            _, way, kind = name.split("_")
            s = self._once(row, name, [f"{way}_in"], [kind], functools.partial(self._take_in, way, kind), s)
        early = self.columns["permute_EARLY"]
        if not early.all():
            return self._permute(Permute.LATE, row, self._ops(self._permute(Permute.EARLY, row, s), row))
        # What arrived last is in its slot before anything is sent: then what arrives next lands where that was. A copy instead would let
        # XLA's GPU scheduler finish the permutes before the ops.
        s = s | lax.optimization_barrier({k: s[k] for k in ("activation", "gradient", *self.permutes) if k in s})
        s = self._permute(Permute.EARLY, row, s)
        # One loop around all ops: XLA's TPU scheduler starts a permute as late as the loops behind it take, were they to run, and the
        # last ones mostly do not. Only as a whole do they stand beside it.
        carried = {k: a for k, a in s.items() if not k.endswith("_in")}
        return {**s, **lax.fori_loop(0, row["busy"], lambda _, s: self._ops(s, row), carried)}

    def _ops(self, s: State, row: Mapping[str, jax.Array]) -> State:
        """All that a row may compute, in order."""
        run, op = functools.partial(self._once, row), functools.partial
        cfg = self.ends.parts.cfg
        first = ["first"] if cfg.dense_layers else []
        s = run("embed", ["embed", *first, "batch"], ["activation"], self._embed, s)
        residuals = ["residual_b", "residual_w"]
        for u in range(len(self.stacks)):
            fixed = [f"layers{u}", "batch"]
            forward, backward = self.results["F", u], self.results["B", u]
            s = run(f"F{u}", [*fixed, "activation"], [forward], op(self._forward, u), s)
            s = run(f"K{u}", [*fixed, "activation"], [forward, *residuals], op(self._forward_keeping, u), s)
            s = run(f"R{u}", [*fixed, "activation"], residuals, op(self._recompute, u), s)
            s = run(f"B{u}", [*fixed, "gradient", *residuals], [backward, "weight_stash"], op(self._input_gradient, u), s)
            s = run(f"W{u}", [*fixed, "residual_w", "weight_stash"], [f"grad{u}"], op(self._weight_gradient, u), s)
        for way in WAY:
            s = run(f"send_{way}", ["y"], [way], op(self._send, way), s)
        for name in STAYS:
            _, kind, buffer = name.split("_")
            s = run(name, [buffer], [kind], op(self._stay, kind, buffer), s)
        if self.table.forward_only:
            s = run("head", ["embed", "head", "batch", "activation"], ["loss"], self._loss, s)
        else:
            made = ["loss", "gradient", "grad_head", *(["grad_embed"] if cfg.tied_embeddings or cfg.mtp_depth else [])]
            made += ["ahead_loss", "grad_predictors"] if cfg.mtp_depth else []
            reads = ["embed", "head", *(["predictors"] if cfg.mtp_depth else []), "batch", "activation"]
            s = run("head", reads, made, self._loss_and_gradients, s)
            reads = ["gradient", "embed", "first", "batch"] if first else ["gradient", "batch"]
            s = run("embed_gradient", reads, ["grad_embed", *(f"grad_{name}" for name in first)], self._embed_gradient, s)
        return s

    # ------------------------------------------------------------------ how an op is run

    def _once(self, row, name: str, reads: list[str], writes: list[str], fn: Callable[[State, Any], State], state: State) -> State:
        """Runs `fn` where the row wants it. An op that no stage ever wants, or every stage always, needs no loop."""
        column = self.columns[name]
        if not column.any():
            return state
        if column.all():
            with jax.named_scope(name):
                return {**state, **fn({**self.constants, **state}, row)}
        carried = {k: state[k] for k in {*reads, *writes} if k in state}
        fixed = {k: self.constants[k] for k in reads if k not in carried}

        def body(i, carried):
            i, carried, here = lax.optimization_barrier((i, carried, fixed))
            with jax.named_scope(name):
                return {**carried, **fn({**here, **carried}, row)}

        return {**state, **lax.fori_loop(0, row[name], body, carried)}

    def _permute(self, when: Permute, row, state: State) -> State:
        """Sends `up` to the next stage and `down` to the previous one, if this row does so now."""
        name, p = f"permute_{when.name}", self.table.stages
        column = self.columns[name]
        if not column.any() or not self.permutes:
            return state
        closed = wraps(self.table.stage_of, p)

        def send(sources):
            pairs = lambda step: [(i, (i + step) % p) for i in range(p) if closed or 0 <= i + step < p]
            with jax.named_scope(name):
                return {f"{way}_in": lax.ppermute(sources[way], STAGE, pairs(step)) for way, step in self.permutes.items()}

        if column.all():
            return {**state, **send(state)}

        def body(i, carried):
            # No trip changes what is sent: without the barrier it would be sent before the loop, in every row.
            _, sources = lax.optimization_barrier((i, {way: state[way] for way in self.permutes}))
            return send(sources)

        carried = {f"{way}_in": state[f"{way}_in"] for way in self.permutes}
        return {**state, **lax.fori_loop(0, row[name], body, carried)}

    # ------------------------------------------------------------------ the ops

    def _take_in(self, way: str, kind: str, s: State, row) -> State:
        return {kind: with_row(s[kind], s[f"{way}_in"], row[f"{way}_{kind}_slot"])}

    def _send(self, way: str, s: State, row) -> State:
        return {way: s["y"]}

    def _stay(self, kind: str, buffer: str, s: State, row) -> State:
        return {kind: with_row(s[kind], s[buffer], row[f"stay_{kind}_slot"])}

    def _own(self, new, old, stage: int):
        """Of a shared op's result: `new` on the stage that keeps it, `old` on the others."""
        return jnp.where(self._stage == stage, new.astype(old.dtype), old) if self.ends.shared else new

    def _embed(self, s: State, row) -> State:
        slot = row["embed_activation_slot"]
        new = self.ends.embed(s, row["embed_microbatch"])
        return {"activation": with_row(s["activation"], self._own(new, row_of(s["activation"], slot), self.table.stage_of[0]), slot)}

    def _embed_gradient(self, s: State, row) -> State:
        return self.ends.embed_gradient(s, row["embed_gradient_microbatch"], row_of(s["gradient"], row["embed_gradient_gradient_slot"]))

    def _loss(self, s: State, row) -> State:
        return self.ends.loss(s, row["head_microbatch"], row_of(s["activation"], row["head_activation_slot"]))

    def _loss_and_gradients(self, s: State, row) -> State:
        slot = row["head_gradient_slot"]
        new, g = self.ends.loss_and_gradients(s, row["head_microbatch"], row_of(s["activation"], row["head_activation_slot"]))
        return {**new, "gradient": with_row(s["gradient"], self._own(g, row_of(s["gradient"], slot), self.table.stage_of[-1]), slot)}

    def _input(self, u: int, s: State, row):
        return s[f"layers{u}"], row_of(s["activation"], row["activation_slot"]), self.ends.extra(s, row["microbatch"])

    def _forward(self, u: int, s: State, row) -> State:
        return {self.results["F", u]: self.stacks[u].forward(*self._input(u, s, row))}

    def _keeping(self, u: int, s: State, row) -> tuple[jax.Array, State]:
        layers, x, extra = self._input(u, s, row)
        slots = row["residual_b_slot"], row["residual_w_slot"]
        y, b, w = self.stacks[u].forward_keeping(layers, x, extra, s["residual_b"], s["residual_w"], *slots)
        return y, {"residual_b": b, "residual_w": w}

    def _forward_keeping(self, u: int, s: State, row) -> State:
        y, kept = self._keeping(u, s, row)
        return {self.results["F", u]: y, **kept}

    def _recompute(self, u: int, s: State, row) -> State:
        return self._keeping(u, s, row)[1]

    def _input_gradient(self, u: int, s: State, row) -> State:
        kept, slots = (s["residual_b"], s["residual_w"]), (row["residual_b_slot"], row["residual_w_slot"])
        g, extra = row_of(s["gradient"], row["gradient_slot"]), self.ends.extra(s, row["microbatch"])
        g, stash = self.stacks[u].input_gradient(s[f"layers{u}"], extra, *kept, *slots, g, s["weight_stash"], row["weight_stash_slot"])
        return {self.results["B", u]: g, "weight_stash": stash}

    def _weight_gradient(self, u: int, s: State, row) -> State:
        extra, at = self.ends.extra(s, row["microbatch"]), (row["residual_w_slot"], s["weight_stash"], row["weight_stash_slot"])
        return {f"grad{u}": self.stacks[u].weight_gradient(s[f"layers{u}"], s[f"grad{u}"], extra, s["residual_w"], *at)}
