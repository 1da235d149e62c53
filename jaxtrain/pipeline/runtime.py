"""Runs any table: one scan over its rows, inside one shard_map. See docs/architecture.md for the picture.

This file has what surrounds the scan: the manual region, the state before the first row, the reduction after the last.
A row itself is in tick.py. The manual axes are all but `model`, whose collectives the partitioner makes from the layers' logical axes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh import BATCH_AXES, MANUAL_AXES, STAGE, psum
from jaxtrain.models.layers import SPLIT
from jaxtrain.models.transformer import Parts
from jaxtrain.parallel.zero import Reduction, reduce
from jaxtrain.pipeline.placement import Placement
from jaxtrain.pipeline.schedule import Program
from jaxtrain.pipeline.tick import Tick, columns
from jaxtrain.sharding import constrain

BATCH = P(None, BATCH_AXES)  # [microbatch, row, token]


@dataclasses.dataclass(frozen=True, eq=False)
class Runtime:
    """What a pipelined evaluation of the model needs to know.

    reductions: pytree like the parameters, of `Reduction`s; None for a forward-only program
    loss_chunk: tokens whose logits may exist at a time
    compute, reduce: dtypes of activations, and of the gradient on its way over the data axis
    """

    parts: Parts
    placement: Placement
    program: Program
    mesh: Mesh
    reductions: dict | None
    loss_chunk: int = 2048
    compute: jnp.dtype = jnp.dtype("float32")
    reduce: jnp.dtype = jnp.dtype("float32")

    def __call__(self, params: dict, batch: dict):
        """→ (mean loss over the global batch's weighted tokens, their number, gradients), or without gradients.

        batch: tokens, targets int32 and weights float32, [microbatches, rows, T], and segments, positions if documents are
        kept apart. Gradients are float32, in the layout of `reductions`.
        """
        table = self.program.table
        layers = jax.tree.map(lambda _: P(STAGE), params["layers"])
        specs = {k: jax.tree.map(lambda _: P(), v) for k, v in params.items()} | {"layers": layers}
        out_specs: tuple = (P(), P())
        if not table.forward_only:
            manual = lambda r: P(*[_manual_part(part) for part in r.storage])
            out_specs += (jax.tree.map(manual, self.reductions, is_leaf=_is_reduction),)
        rows = columns(self.program)
        run = jax.shard_map(
            self._body,
            mesh=self.mesh,
            in_specs=(specs, dict.fromkeys(batch, BATCH), {k: P(None, STAGE) for k in rows}),
            out_specs=out_specs,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        return run(params, batch, {k: jnp.asarray(a) for k, a in rows.items()})

    # ------------------------------------------------------------------ inside the manual region

    def _body(self, params, batch, rows):
        table = self.program.table
        constants, state = self._initial(params, batch)
        tick = Tick(self.parts, self.placement, self.program, self.loss_chunk, constants)
        state, _ = lax.scan(lambda s, row: (tick(s, row), None), state, {k: a[:, 0] for k, a in rows.items()})
        loss = psum(state["loss"], (*BATCH_AXES, STAGE))
        if table.forward_only:
            return loss, constants["count"]
        sums = {
            "embed": state["grad_embed"],
            "layers": {str(c): jax.tree.map(lambda a: a[None], state[f"grad{c}"]) for c in range(table.chunks)},
            "head": state["grad_head"],
        }
        with jax.named_scope("reduce_gradients"):
            gradients = jax.tree.map(lambda r, g: reduce(g, r, self.reduce), self.reductions, sums, is_leaf=_is_reduction)
        return loss, constants["count"], gradients

    def _initial(self, params, batch):
        """What no op changes, and the state before the first row."""
        table, specs = self.program.table, self.parts.specs
        cast = lambda s, a: a.astype(self.compute) if s.matrix else a
        constants = {k: jax.tree.map(cast, specs[k], params[k]) for k in ("embed", "head")}
        for c in range(table.chunks):
            constants[f"layers{c}"] = jax.tree.map(lambda s, a: cast(s, a[0]), specs["layer"], params["layers"][str(c)])
        count = psum(batch["weights"].astype(jnp.float32).sum(), BATCH_AXES)
        constants |= {"batch": batch | {"weights": batch["weights"] / jnp.maximum(count, 1)}, "count": count}
        payload = (*batch["tokens"].shape[1:], self.parts.cfg.width)
        zeros = lambda *lead: constrain(jnp.zeros((*lead, *payload), self.compute), (*(None for _ in lead), *SPLIT))
        state = {"loss": jnp.zeros(()), "x": zeros(self.program.x_slots)}
        if table.stages > 1:
            state |= {"y": zeros(), "x_in": zeros()}
        if table.forward_only:
            return constants, state
        state["g"] = zeros()
        if table.stages > 1:
            state |= {"g_kept": zeros(self.program.g_slots), "g_in": zeros()}
        sums = lambda *lead: lambda s: constrain(jnp.zeros((*lead, *s.padded), jnp.float32), (*(None for _ in lead), *s.axes))
        state |= {f"grad_{k}": jax.tree.map(sums(), specs[k]) for k in ("embed", "head")}
        state |= {f"grad{c}": jax.tree.map(sums(self.placement.rows(c)), specs["layer"]) for c in range(table.chunks)}
        return constants, state


def _is_reduction(x) -> bool:
    return isinstance(x, Reduction)


def _manual_part(part):
    """A dimension's mesh axes without the partitioner's."""
    names = tuple(n for n in ((part,) if isinstance(part, str) else part or ()) if n in MANUAL_AXES)
    return names[0] if len(names) == 1 else names or None
