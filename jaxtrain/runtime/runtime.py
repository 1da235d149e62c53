"""Runs any table: one scan over its rows, inside one shard_map. See docs/architecture.md for the picture.

This file has what surrounds the scan: the manual region, the state before the first row, the reduction after the last.
A row itself is in tick.py. The manual axes are all but `model`, whose collectives the partitioner makes from the layers' logical axes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import BATCH_AXES, CONTEXT, DATA, MANUAL_AXES, MODEL, STAGE, psum
from jaxtrain.devices.sharding import constrain, local_shape, restricted
from jaxtrain.models.layers import SPLIT
from jaxtrain.models.spec import Spec
from jaxtrain.models.transformer import Parts
from jaxtrain.parallel import context, host_memory, replicas
from jaxtrain.parallel.zero import Reduction, Zero, gather, reduce, reduce_rest, resized
from jaxtrain.runtime.backward_split import Split, keep_all, keep_matmuls
from jaxtrain.runtime.embedding_and_head import Ends, look_ahead
from jaxtrain.runtime.layer_stack import LayerStack, slots
from jaxtrain.runtime.tick import Accumulate, Tick
from jaxtrain.schedule.columns import columns, permutes, results
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import SlottedTable

BATCH = P(None, BATCH_AXES, CONTEXT)  # [microbatch, row, token]


@dataclasses.dataclass(frozen=True, eq=False)
class Runtime:
    """What a pipelined evaluation of the model needs to know.

    program: the table with its slots; None on one stage, where a row is a microbatch, forward and backward at once
    reductions: pytree like the parameters, of `Reduction`s; `zero`: what they mean when
    forward_only: losses alone
    remat: what the backward computes again: full (F keeps a unit's input), selective (all but products with weights), none
    loss_chunk: tokens whose logits may exist at a time
    compute: dtype of activations
    apart: each replica has parameters of its own; they, losses, counts and gradients have a leading dimension [replicas]
    host: what the forward leaves for the backward lies in the host's memory
    """

    parts: Parts
    placement: Placement
    program: SlottedTable | None
    mesh: Mesh
    reductions: dict
    zero: Zero = Zero()
    forward_only: bool = False
    remat: str = "full"
    loss_chunk: int = 2048
    compute: jnp.dtype = jnp.dtype("float32")
    apart: bool = False
    host: bool = False

    def __call__(self, params: dict, batch: dict, rows: dict | None = None):
        """→ (mean loss over the global batch's weighted tokens, their number, gradients, more), or the first two.

        more: "mtp_loss" where the model predicts tokens beyond the next, the mean of these predictions' losses.

        batch: tokens, targets int32 and weights float32, [microbatches, rows, T], and segments, positions if documents are
        kept apart. Gradients are float32, in the layout of `reductions`. `rows`: the columns by name, int32 [rows, stages], where it is
        not the table's own rows that are to be run (benchmarks/pipeline.py).
        """
        specs = jax.tree.map(lambda r: restricted(r.sharded if self.zero.stage == 3 else r.whole, MANUAL_AXES), self.reductions)
        out_specs: tuple = (P(), P())
        if not self.forward_only:
            out_specs += (jax.tree.map(lambda r: restricted(r.storage, MANUAL_AXES), self.reductions), P())
            batch = look_ahead(batch, self.parts.cfg.mtp_depth)
        body = self._body
        if self.apart:
            specs, out_specs = jax.tree.map(replicas.leading, (specs, out_specs))
            body = self._one_replica
        microbatches = batch["tokens"].shape[0]
        if rows is None:
            rows = columns(self.program) if self.program else {"microbatch": np.arange(microbatches, dtype=np.int32)[:, None]}
        run = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(specs, dict.fromkeys(batch, BATCH), {k: P(None, STAGE) for k in rows}),
            out_specs=out_specs,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        if (parts := self.mesh.shape[CONTEXT]) > 1:
            batch = {k: context.zigzag(a, parts) for k, a in batch.items()}
        return run(params, batch, {k: jnp.asarray(a) for k, a in rows.items()})

    @property
    def host_pools(self) -> tuple[str, ...]:
        """The pools of slots in the host's memory: of what F leaves for B, the units' inputs with full remat, else the residuals."""
        kept = ("activation",) if self.remat == "full" else ("residual_b", "residual_w")
        return kept if self.host and self.program is not None else ()

    # ------------------------------------------------------------------ inside the manual region

    def _one_replica(self, params, batch, rows):
        made = self._body(jax.tree.map(lambda a: a[0], params), batch, rows)
        return jax.tree.map(lambda a: a[None], made)

    def _body(self, params, batch, rows):
        constants = self._constants(params, batch)
        tick, state = self._tick(constants)
        state, _ = lax.scan(lambda s, row: (tick(s, row), None), state, {k: a[:, 0] for k, a in rows.items()})
        loss = psum(state["loss"], (*replicas.sum_axes(self.apart), STAGE))
        if self.forward_only:
            return loss, constants["count"]
        sums = {
            **{name: state[f"grad_{name}"] for name in self.parts.ends},
            "layers": {str(c): jax.tree.map(lambda a: a[None], state[f"grad{c}"]) for c in range(self.placement.units_per_stage)},
        }
        with jax.named_scope("reduce_gradients"):
            left = reduce_rest if self.zero.reduces_in_ops else reduce
            gradients = jax.tree.map(lambda r, g: left(g, r, self.zero.dtype), self.reductions, sums)
        more = (
            {"mtp_loss": psum(state["ahead_loss"], (*replicas.sum_axes(self.apart), STAGE)) / self.parts.cfg.mtp_weight}
            if "ahead_loss" in state
            else {}
        )
        return loss, constants["count"], gradients, more

    def _constants(self, params, batch) -> dict[str, Any]:
        """What no op changes: parameters in the compute type, and the batch, its weights divided by their global sum."""
        specs = self.parts.specs
        cast = lambda s, a: a.astype(self.compute) if s.cast else a
        params = {k: jax.tree.map(cast, specs[k], params[k]) for k in self.parts.ends} | {
            "layers": {c: jax.tree.map(lambda s, a: cast(s, a[0]), specs["layer"], p) for c, p in params["layers"].items()}
        }
        if self.zero.stage == 3 and not self.zero.gathers_in_ops:
            with jax.named_scope("gather"):
                params = jax.tree.map(lambda r, a: gather(a, r), self.reductions, params)
        constants = {name: params[name] for name in self.parts.ends}
        constants |= {f"layers{c}": p for c, p in params["layers"].items()}
        counts = {k: psum(a.astype(jnp.float32).sum(), replicas.sum_axes(self.apart)) for k, a in batch.items() if "weights" in k}
        cfg = self.parts.cfg
        share = {k: cfg.mtp_weight / cfg.mtp_depth if k != "weights" else 1.0 for k in counts}
        weights = {k: batch[k] * (share[k] / jnp.maximum(count, 1)) for k, count in counts.items()}
        return constants | {"batch": batch | weights, "count": counts["weights"]}

    def _tick(self, constants) -> tuple[Callable, dict[str, Any]]:
        """The scan's body, and the state before the first row."""
        place = self.placement.stage_of
        shared = self.program is not None and self.program.table.vocabulary == "parallel"
        ends = Ends(self.parts, self.loss_chunk, self.compute, place[0], place[-1], shared, self.zero, self.reductions)
        payload = (*constants["batch"]["tokens"].shape[1:], self.parts.cfg.width)
        split = self._split(payload, jax.eval_shape(lambda c: ends.extra(c, 0), constants))
        stacks = [
            LayerStack(self._layer, split, self.placement, u, lax.axis_index(STAGE), self.zero, self.reductions["layers"][str(u)])
            for u in range(self.placement.units_per_stage)
        ]
        state: dict[str, Any] = {"loss": jnp.zeros(())}
        if not self.forward_only:
            specs, how = self.parts.specs, self.reductions
            state |= {f"grad_{k}": jax.tree.map(self._sums, specs[k], how[k], constants[k]) for k in self.parts.ends}
            state |= {"ahead_loss": jnp.zeros(())} if self.parts.cfg.mtp_depth else {}
            for u in range(self.placement.units_per_stage):
                state[f"grad{u}"] = jax.tree.map(self._sums, specs["layer"], how["layers"][str(u)], constants[f"layers{u}"])
        if self.program is None:
            return Accumulate(ends, stacks[0], self.remat == "full", self.forward_only, self.host, constants), state
        return Tick(ends, stacks, self.program, constants), state | self._buffers(split, payload)

    def _sums(self, s: Spec, how: Reduction, parameter) -> jax.Array:
        """Zeros for a parameter's gradient sums, given the parameter as the ops get it."""
        shards, shape = self.mesh.shape[DATA], parameter.shape
        if self.zero.gathers_in_ops:
            shape = resized(shape, how, shards, up=True)
        if self.zero.reduces_in_ops:
            shape = resized(shape, how, shards, up=False)
        return constrain(jnp.zeros(shape, jnp.float32), (*(None for _ in shape[len(s.axes) :]), *s.axes))

    def _layer(self, params, x, extra):
        return self.parts.block(params, x, *extra)

    def _split(self, payload: tuple[int, ...], extra) -> Split:
        """One layer's ops, on payloads of this shape."""
        dtype = lambda s: self.compute if s.cast else jnp.dtype("float32")
        row = jax.tree.map(lambda s: jax.ShapeDtypeStruct(local_shape(s.axes, s.padded), dtype(s)), self.parts.specs["layer"])
        keep = keep_matmuls if self.remat == "selective" else keep_all
        return Split(self._layer, row, jax.ShapeDtypeStruct(payload, self.compute), extra, keep)

    def _split_inside(self, payload: tuple[int, ...], extra) -> Split:
        """The same from outside of the manual region, where experts and the context are those of all devices."""
        made = []

        def body():
            made.append(self._split(payload, extra))
            return jnp.zeros(())

        jax.eval_shape(jax.shard_map(body, mesh=self.mesh, in_specs=(), out_specs=P(), axis_names=set(MANUAL_AXES), check_vma=False))
        return made[0]

    def slot_bytes(self, rows: int, tokens: int, documents: bool) -> dict[str, int]:
        """Pool → bytes of one of its slots on a device, for microbatches of `rows` × `tokens` there, `documents` kept apart or not.

        Everything in a slot counts as split over `model` but what an op has gathered.
        """
        numbers = lambda n: jax.ShapeDtypeStruct((n, tokens), jnp.int32)
        extra = (numbers(rows), numbers(rows)) if documents else (numbers(1), None)
        split = self._split_inside((rows, tokens, self.parts.cfg.width), extra)
        for_b, for_w = split.sort(split.residuals)
        model = self.mesh.shape[MODEL]
        size = lambda arrays: sum(a.size * a.dtype.itemsize for a in arrays) // model
        whole = size(a for a, gathered in zip(split.stash, split.gathered, strict=True) if gathered) * (model - 1)
        message = rows * tokens * self.parts.cfg.width * jnp.dtype(self.compute).itemsize // model
        layers = max(self.placement.sizes)
        kept = {"residual_b": for_b, "residual_w": for_w, "weight_stash": split.stash}
        of_layers = {pool: layers * size(arrays) for pool, arrays in kept.items()}
        return {"activation": message, "gradient": message, **of_layers, "weight_stash": of_layers["weight_stash"] + layers * whole}

    def _buffers(self, split: Split, payload: tuple[int, ...]) -> dict[str, Any]:
        """The slots, and what leaves and arrives."""
        assert self.program is not None
        table, counts = self.program.table, self.program.pool_sizes
        zeros = lambda *lead: constrain(jnp.zeros((*lead, *payload), self.compute), (*(None for _ in lead), *SPLIT))
        host = self.host_pools
        state: dict[str, Any] = {"activation": zeros(max(1, counts["activation"]))}
        if "activation" in host:
            state["activation"] = host_memory.slots(state["activation"].shape, self.compute, True)
        used = set(results(self.program).values()) | set(permutes(table))
        state |= {name: zeros() for name in used} | {f"{way}_in": zeros() for way in permutes(table)}
        if table.forward_only:
            return state
        state["gradient"] = zeros(max(1, counts["gradient"]))
        rows = max(self.placement.sizes)
        pool = lambda kind, kept: slots(max(1, counts[kind]), rows, kept, kind in host)
        for_b, for_w = split.sort(split.residuals)
        stash = pool("weight_stash", split.stash)
        if "weight_stash" not in host:  # what B has gathered for W stays whole: the partitioner may split it, and W would gather it again
            whole = lambda a, gathered: constrain(a, (None,) * a.ndim) if gathered else a
            stash = [whole(*each) for each in zip(stash, split.gathered, strict=True)]
        return state | {"residual_b": pool("residual_b", for_b), "residual_w": pool("residual_w", for_w), "weight_stash": stash}
