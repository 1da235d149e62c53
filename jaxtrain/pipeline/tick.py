"""One row of the table. An ordered list of ops, each a loop of zero trips or one:

    take in what arrived → embed → F and B of each chunk → L → the embedding's gradient → the two permutes

A stage that does not want an op pays nothing, and what an op writes is updated in place. Three rules keep XLA from
undoing that (tests read them off the compiled program):

  · an op's body begins with an optimization barrier, or loop-invariant code motion lifts its matmuls into every tick;
  · state that an op only reads is carried through its loop as well, or nothing orders the reader before the next writer
    and whole stashes are copied;
  · no permute stands inside an op: stages run different ops in one tick, and XLA's CPU backend waits for all devices.

The state, on each stage:

    x       inputs of chunks by slot [x_slots, B, T, D], from arrival (or embedding) to the backward
    g_kept  gradients that arrived, by slot; g: the gradient made last, which leaves to the previous stage
    y       the output made last, which leaves to the next stage; x_in, g_in: what the last permute brought
    grad…   float32 gradient sums: embed, head and one for each chunk; loss: the sum so far
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtrain.mesh import STAGE
from jaxtrain.models.transformer import Parts, add_embedding_gradient, default_positions
from jaxtrain.pipeline.layers import LayerStack
from jaxtrain.pipeline.placement import Placement
from jaxtrain.pipeline.schedule import Op, Permute, Program
from jaxtrain.training.loss import loss_and_gradients, loss_sum

State = dict[str, Any]


def columns(program: Program) -> dict[str, np.ndarray]:
    """What a tick reads, int32 [ticks, stages]: for each op whether the stage runs it, then microbatch and slots."""
    t = program.table
    first = (t.chunk == 0) & (np.arange(t.stages) == 0)
    wanted = {"take_x": program.arriving_x >= 0, "take_g": program.arriving_g >= 0, "embed": first & np.isin(t.op, (Op.F, Op.L))}
    for c in range(t.chunks):
        wanted |= {f"F{c}": (t.op == Op.F) & (t.chunk == c), f"B{c}": (t.op == Op.B) & (t.chunk == c)}
    wanted |= {"L": t.op == Op.L, "embed_gradient": first & np.isin(t.op, (Op.B, Op.L)) & (not t.forward_only)}
    for when in (Permute.EARLY, Permute.LATE):
        wanted[f"permute_{when.name}"] = np.broadcast_to((t.permute == when)[:, None], t.op.shape)
    slots = {k: np.maximum(getattr(program, k), 0) for k in ("x_slot", "g_slot", "arriving_x", "arriving_g")}
    return {k: a.astype(np.int32) for k, a in (wanted | slots | {"microbatch": np.maximum(t.microbatch, 0)}).items()}


def _take(a, i):
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _put(a, value, i):
    return lax.dynamic_update_index_in_dim(a, value.astype(a.dtype), i, 0)


class Tick:
    """tick(state, row) → state. `constants` (parameters in the compute type, the batch) are what no op changes."""

    def __init__(self, parts: Parts, placement: Placement, program: Program, loss_chunk: int, constants: State):
        self.parts, self.table, self.loss_chunk, self.constants = parts, program.table, loss_chunk, constants
        self.columns = columns(program)
        stage = lax.axis_index(STAGE)
        alone = self.table.stages == 1
        splits: list = []
        self.stacks = [LayerStack(parts.block, placement, c, stage, alone, splits) for c in range(self.table.chunks)]

    def __call__(self, state: State, row: Mapping[str, jax.Array]) -> State:
        s, last = state, self.table.chunks - 1
        once = lambda name, reads, writes, fn, s: self._once(name, row, reads, writes, fn, s)
        s = once("take_x", ["x_in"], ["x"], lambda s: {"x": _put(s["x"], s["x_in"], row["arriving_x"])}, s)
        s = once("take_g", ["g_in"], ["g_kept"], lambda s: {"g_kept": _put(s["g_kept"], s["g_in"], row["arriving_g"])}, s)
        s = self._permute(Permute.EARLY, row, s)
        s = once("embed", ["embed", "batch"], ["x"], lambda s: {"x": _put(s["x"], self._embed(s, row), row["x_slot"])}, s)
        for c in range(self.table.chunks):
            s = once(f"F{c}", [f"layers{c}", "x", "batch"], ["y"], lambda s, c=c: self._forward(c, s, row), s)
            s = once(f"B{c}", [f"layers{c}", "x", "g_kept", "batch"], ["g", f"grad{c}"], lambda s, c=c: self._backward(c, s, row), s)
        reads = [f"layers{last}", "x", "head", "embed", "batch"]
        if self.table.forward_only:
            return self._permute(Permute.LATE, row, once("L", reads, ["loss"], lambda s: self._loss(last, s, row), s))
        writes = ["g", "loss", f"grad{last}", "grad_head"] + ["grad_embed"] * self.parts.cfg.tied_embeddings
        s = once("L", reads, writes, lambda s: self._last(last, s, row), s)
        s = once("embed_gradient", ["g", "batch"], ["grad_embed"], lambda s: self._embed_gradient(s, row), s)
        return self._permute(Permute.LATE, row, s)

    # ------------------------------------------------------------------ how an op is run

    def _once(self, name: str, row, reads: list[str], writes: list[str], fn: Callable[[State], State], state: State) -> State:
        """Runs `fn` where the row wants it. An op that no stage ever wants, or every stage always, needs no loop."""
        column = self.columns[name]
        if not column.any():
            return state
        if column.all():
            with jax.named_scope(name):
                return {**state, **fn({**self.constants, **state})}
        carried = {k: state[k] for k in {*reads, *writes} if k in state}
        fixed = {k: self.constants[k] for k in reads if k not in carried}

        def body(i, carried):
            i, carried, here = lax.optimization_barrier((i, carried, fixed))
            with jax.named_scope(name):
                return {**carried, **fn({**here, **carried})}

        return {**state, **lax.fori_loop(0, row[name], body, carried)}

    def _permute(self, when: Permute, row, state: State) -> State:
        """Sends y to the next stage and g to the previous one, if this row does so now."""
        name, p = f"permute_{when.name}", self.table.stages
        column = self.columns[name]
        if not column.any():
            return state
        ways = {"x_in": ("y", 1)} if self.table.forward_only else {"x_in": ("y", 1), "g_in": ("g", -1)}

        def send(sources):
            with jax.named_scope(name):
                return {
                    to: lax.ppermute(sources[made], STAGE, [(i, (i + step) % p) for i in range(p)]) for to, (made, step) in ways.items()
                }

        if column.all():
            return {**state, **send(state)}
        carried = {to: state[to] for to in ways}
        return {**state, **lax.fori_loop(0, row[name], lambda _, s: send(state), carried)}

    # ------------------------------------------------------------------ the ops

    def _batch(self, s: State, row, *names: str):
        """The microbatch's arrays; None for one that this batch does not have."""
        return [_take(s["batch"][n], row["microbatch"]) if n in s["batch"] else None for n in names]

    def _tokens(self, s: State, row):
        tokens, positions = self._batch(s, row, "tokens", "positions")
        return tokens, default_positions(tokens) if positions is None else positions

    def _extra(self, s: State, row):
        """What every layer needs beside its input: positions and, where documents are kept apart, segments."""
        return self._tokens(s, row)[1], self._batch(s, row, "segments")[0]

    def _embed(self, s: State, row):
        return self.parts.embed(s["embed"], *self._tokens(s, row), s["x"].dtype)

    def _embed_gradient(self, s: State, row) -> State:
        tokens, positions = self._tokens(s, row)
        return {"grad_embed": add_embedding_gradient(s["grad_embed"], tokens, positions, s["g"])}

    def _forward(self, c: int, s: State, row) -> State:
        return {"y": self.stacks[c].forward(s[f"layers{c}"], _take(s["x"], row["x_slot"]), self._extra(s, row))}

    def _backward(self, c: int, s: State, row) -> State:
        params, extra = s[f"layers{c}"], self._extra(s, row)
        _, kept = self.stacks[c].forward_keeping(params, _take(s["x"], row["x_slot"]), extra)
        sums, g = self.stacks[c].backward(params, s[f"grad{c}"], extra, kept, _take(s["g_kept"], row["g_slot"]))
        return {"g": g, f"grad{c}": sums}

    def _head(self, params, x):
        return self.parts.head(params["head"], x, params.get("table"))

    def _head_params(self, tree: State, prefix: str = "") -> State:
        """The head's parameters, or their gradient sums: with the embedding table where the two are tied."""
        tied = {"table": tree[f"{prefix}embed"]["table"]} if self.parts.cfg.tied_embeddings else {}
        return {"head": tree[f"{prefix}head"], **tied}

    def _loss(self, c: int, s: State, row) -> State:
        y = self.stacks[c].forward(s[f"layers{c}"], _take(s["x"], row["x_slot"]), self._extra(s, row))
        params = self._head_params(s)
        targets, weights = self._batch(s, row, "targets", "weights")
        loss = loss_sum(lambda y: self._head(params, y), y, targets, weights, self.loss_chunk)
        return {"loss": s["loss"] + loss}

    def _last(self, c: int, s: State, row) -> State:
        params, extra, stack = s[f"layers{c}"], self._extra(s, row), self.stacks[c]
        y, kept = stack.forward_keeping(params, _take(s["x"], row["x_slot"]), extra)
        sums = self._head_params(s, "grad_")
        targets, weights = self._batch(s, row, "targets", "weights")
        loss, sums, g = loss_and_gradients(self._head, self._head_params(s), sums, y, targets, weights, self.loss_chunk)
        layers, g = stack.backward(params, s[f"grad{c}"], extra, kept, g)
        new = {"loss": s["loss"] + loss, "g": g, f"grad{c}": layers, "grad_head": sums["head"]}
        if "table" in sums:
            new["grad_embed"] = {**s["grad_embed"], "table": sums["table"]}
        return new
