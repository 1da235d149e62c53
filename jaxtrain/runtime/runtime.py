"""Runs any table: one scan over its ticks, inside one shard_map. See docs/architecture.md for the
picture.

This file has what surrounds the scan: the manual region, the state before the first tick, the
reduction after the last. A tick itself is in tick.py. The manual axes are all but `model`, whose
collectives the partitioner makes from the layers' logical axes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import (
    CONTEXT,
    DATA,
    MANUAL_AXES,
    MODEL,
    STAGE,
    manual_axes,
    psum,
    traced_for,
)
from jaxtrain.devices.sharding import BATCH_SPEC, constrain, local_shape, restricted
from jaxtrain.models.layers import SPLIT
from jaxtrain.models.spec import Spec
from jaxtrain.models.transformer import Parts
from jaxtrain.parallel import context, host_memory, replicas
from jaxtrain.parallel.heads import row_major
from jaxtrain.parallel.tensor import TOKENS
from jaxtrain.parallel.zero import (
    Reduction,
    Zero,
    gather,
    reduce,
    reduce_rest,
    shard_shape,
    unsharded_shape,
)
from jaxtrain.runtime.backward_split import LayerSplit, keep_everything, keep_products
from jaxtrain.runtime.embedding_and_head import EmbeddingAndHead, look_ahead
from jaxtrain.runtime.layer_stack import LayerStack, empty_pool
from jaxtrain.runtime.tick import Accumulate, Tick
from jaxtrain.runtime.tick_state import Constants, TickState
from jaxtrain.schedule.columns import ARRIVED, TickColumns, TickTable, tick_table
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import SlottedTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Losses:
    """float32 scalars.

    loss:     the mean over the weighted tokens of the batch, in nats
    tokens:   their number
    mtp_loss: the mean of the losses of the tokens beyond the next; None in evaluation, and where
        the model predicts none
    """

    loss: Any
    tokens: Any
    mtp_loss: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossesAndGradients:
    """losses: as they are; gradients: float32, in the parameters' tree and the layout of
    `Runtime.reductions`' `storage`."""

    losses: Losses
    gradients: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Runtime:
    """What a pipelined evaluation of the model needs to know.

    slotted: the table with its slots; None on one stage, where a tick is a microbatch, forward and
        backward at once
    reductions: a tree like the parameters, of `Reduction`s; `zero`: what they mean when
    shares_vocabulary: embedding and head are split over the stages, which do their ops together
    remat: what the backward computes again: full (F keeps a unit's input), selective (all but
        products with weights), none
    loss_chunk: tokens whose logits may exist at a time
    compute: dtype of activations
    independent_replicas: each replica has parameters of its own; they, losses and gradients have a
        leading dimension [replicas]
    offload_activations: what the forward leaves for the backward lies in the host's memory
    """

    parts: Parts
    placement: Placement
    slotted: SlottedTable | None
    mesh: Mesh
    reductions: dict
    zero: Zero = Zero()
    shares_vocabulary: bool = False
    remat: str = "full"
    loss_chunk: int = 2048
    compute: jnp.dtype = jnp.dtype("float32")
    independent_replicas: bool = False
    offload_activations: bool = False

    def losses(self, params: dict, batch: dict) -> Losses:
        """The losses of a batch, without a backward; the table is one of `make_forward_table`.

        Args:
          params: {"embed", "layers": {local unit: leaves [stages, stack_size, ...]}, "head", …}, as
            training/state.py has them.
          batch: tokens, targets int32 and weights float32, [microbatches, sequences, T], and
            segments, positions int32 if documents are kept apart.
        """
        return self._in_manual_region(
            self._losses, params, batch, self._columns(batch), Losses(P(), P())
        )

    def losses_and_gradients(
        self, params: dict, batch: dict, columns: TickColumns | None = None
    ) -> LossesAndGradients:
        """The losses of a batch and the gradients of `loss` and the weighted `mtp_loss`.

        Args:
          params, batch: as for `losses`.
          columns: int32 [ticks, stages], where these are not the table's own
            (benchmarks/pipeline.py).
        """
        losses = Losses(P(), P(), P() if self.parts.cfg.mtp_depth else None)
        gradients = jax.tree.map(lambda r: restricted(r.storage, MANUAL_AXES), self.reductions)
        batch = look_ahead(batch, self.parts.cfg.mtp_depth)
        columns = self._columns(batch) if columns is None else columns
        return self._in_manual_region(
            self._losses_and_gradients,
            params,
            batch,
            columns,
            LossesAndGradients(losses, gradients),
        )

    @property
    def host_pools(self) -> tuple[str, ...]:
        """The pools of slots in the host's memory: of what F leaves for B, the units' inputs with
        full remat, else the residuals."""
        kept = ("activation",) if self.remat == "full" else ("residual_b", "residual_w")
        return kept if self.offload_activations and self.slotted is not None else ()

    def slot_bytes(self, sequences: int, tokens: int, documents: bool) -> dict[str, int]:
        """Pool → bytes of one of its slots on a device, for microbatches of `sequences` × `tokens`
        there, `documents` kept apart or not.

        Everything in a slot counts as split over `model` but what an op has gathered.
        """
        numbers = lambda n: jax.ShapeDtypeStruct((n, tokens), jnp.int32)
        extra = (numbers(sequences), numbers(sequences)) if documents else (numbers(1), None)
        split = self._split_inside((sequences, tokens, self.parts.cfg.width), extra)
        model = self.mesh.shape[MODEL]
        size = lambda arrays: sum(a.size * a.dtype.itemsize for a in arrays) // model
        gathered = [
            a
            for a, is_gathered in zip(split.weight_stash, split.gathered, strict=True)
            if is_gathered
        ]
        message = (
            sequences * tokens * self.parts.cfg.width * jnp.dtype(self.compute).itemsize // model
        )
        layers = max(self.placement.sizes)
        return {
            "activation": message,
            "gradient": message,
            "residual_b": layers * size(split.residuals.for_b),
            "residual_w": layers * size(split.residuals.for_w),
            "weight_stash": layers * (size(split.weight_stash) + size(gathered) * (model - 1)),
        }

    # ------------------------------------------------------------------ around the manual region

    @functools.cached_property
    def _ticks(self) -> TickTable | None:
        return None if self.slotted is None else tick_table(self.slotted)

    def _columns(self, batch: dict) -> TickColumns:
        """int32 [ticks, stages]."""
        if self._ticks is not None:
            return self._ticks.columns
        return TickColumns(np.arange(batch["tokens"].shape[0], dtype=np.int32)[:, None])

    def _in_manual_region(
        self, body: Callable, params: dict, batch: dict, columns: TickColumns, out_specs
    ):
        """body(params, batch, columns) of each device's parts; `out_specs` of its result, of one
        replica's where these are independent."""
        sharded = self.zero.stage == 3
        in_specs = jax.tree.map(
            lambda r: restricted(r.sharded if sharded else r.unsharded, MANUAL_AXES),
            self.reductions,
        )
        if self.independent_replicas:
            in_specs, out_specs = jax.tree.map(replicas.leading, (in_specs, out_specs))
            body = _of_one_replica(body)
        run = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(in_specs, dict.fromkeys(batch, BATCH_SPEC), P(None, STAGE)),
            out_specs=out_specs,
            axis_names=manual_axes(self.mesh),
            check_vma=False,
        )
        if (parts := self.mesh.shape[CONTEXT]) > 1:
            batch = jax.tree.map(lambda a: context.zigzag(a, parts), batch)
        with traced_for(self.mesh):
            return run(params, batch, jax.tree.map(jnp.asarray, columns))

    # ------------------------------------------------------------------ inside the manual region

    def _losses(self, params: dict, batch: dict, columns: TickColumns) -> Losses:
        constants, tokens = self._constants(params, batch)
        state = self._scan(constants, TickState(loss=jnp.zeros(())), columns)
        return Losses(self._sum(state.loss), tokens)

    def _losses_and_gradients(
        self, params: dict, batch: dict, columns: TickColumns
    ) -> LossesAndGradients:
        constants, tokens = self._constants(params, batch)
        mtp_loss = jnp.zeros(()) if self.parts.cfg.mtp_depth else None
        state = self._scan(
            constants,
            TickState(jnp.zeros(()), mtp_loss, self._gradient_sums(constants.params)),
            columns,
        )
        loss = self._sum(state.loss)
        stacks = jax.tree.map(lambda a: a[None], state.gradients["layers"])
        with jax.named_scope("reduce_gradients"):
            reduce_sums = reduce_rest if self.zero.reduces_in_ops else reduce
            sums = {**state.gradients, "layers": stacks}
            gradients = jax.tree.map(
                lambda r, g: reduce_sums(g, r, self.zero.dtype), self.reductions, sums
            )
        if mtp_loss is not None:
            mtp_loss = self._sum(state.mtp_loss) / self.parts.cfg.mtp_weight
        return LossesAndGradients(Losses(loss, tokens, mtp_loss), gradients)

    def _sum(self, loss: jax.Array) -> jax.Array:
        """A loss of all devices that have a part of it."""
        return psum(loss, (*replicas.sum_axes(self.independent_replicas), STAGE))

    def _constants(self, params: dict, batch: dict) -> tuple[Constants, jax.Array]:
        """(parameters in the compute type, and the batch, its weights divided by their global sum;
        that sum)."""
        specs = self.parts.specs
        cast = lambda s, a: a.astype(self.compute) if s.cast else a
        layers = {
            unit: jax.tree.map(lambda s, a: cast(s, a[0]), specs["layer"], stack)
            for unit, stack in params["layers"].items()
        }
        params = {
            name: jax.tree.map(cast, specs[name], params[name]) for name in self.parts.ends
        } | {"layers": layers}
        if self.zero.stage == 3 and not self.zero.gathers_in_ops:
            with jax.named_scope("gather"):
                params = jax.tree.map(lambda r, a: gather(a, r), self.reductions, params)
        weights, tokens = self._normalized(batch["weights"], 1.0)
        batch = {**batch, "weights": weights}
        if "mtp" in batch:
            part = self.parts.cfg.mtp_weight / self.parts.cfg.mtp_depth
            modules = batch["mtp"].items()
            batch["mtp"] = {
                d: {**module, "weights": self._normalized(module["weights"], part)[0]}
                for d, module in modules
            }
        return Constants(params, batch), tokens

    def _normalized(self, weights: jax.Array, part: float) -> tuple[jax.Array, jax.Array]:
        """(weights whose sum over the global batch is `part`, their sum before)."""
        total = psum(
            weights.astype(jnp.float32).sum(), replicas.sum_axes(self.independent_replicas)
        )
        return weights * (part / jnp.maximum(total, 1)), total

    def _scan(self, constants: Constants, state: TickState, columns: TickColumns) -> TickState:
        """The state after the last tick, from what it has of losses and gradient sums before the
        first."""
        stage_of = self.placement.stage_of
        embedding_and_head = EmbeddingAndHead(
            self.parts,
            self.loss_chunk,
            self.compute,
            stage_of[0],
            stage_of[-1],
            self.shares_vocabulary,
            self.zero,
            self.reductions,
        )
        message = (*constants.batch["tokens"].shape[1:], self.parts.cfg.width)
        split = self._split(
            message,
            jax.eval_shape(lambda batch: embedding_and_head.extra(batch, 0), constants.batch),
        )
        stacks = [
            LayerStack(
                self._layer,
                split,
                self.placement,
                u,
                lax.axis_index(STAGE),
                self.zero,
                self.reductions["layers"][str(u)],
            )
            for u in range(self.placement.units_per_stage)
        ]
        tick: Callable[[TickState, TickColumns], TickState]
        if self._ticks is None:
            one = Accumulate(
                embedding_and_head,
                stacks[0],
                self.remat == "full",
                self.offload_activations,
                constants,
            )
            tick = one.add_loss if state.gradients is None else one.add_gradients
        else:
            tick, state = (
                Tick(embedding_and_head, stacks, self._ticks, constants),
                self._with_buffers(state, self._ticks, split, message),
            )
        ticks = jax.tree.map(lambda column: column[:, 0], columns)
        # of a scan of one tick XLA's TPU compiler makes two programs: the forward ran twice
        if len(jax.tree.leaves(ticks)[0]) == 1:
            return tick(state, jax.tree.map(lambda column: column[0], ticks))
        return lax.scan(lambda state, columns: (tick(state, columns), None), state, ticks)[0]

    def _layer(self, params, x, extra):
        return row_major(self.parts.block(params, row_major(x, TOKENS), *extra), TOKENS)

    def _split(self, message: tuple[int, ...], extra) -> LayerSplit:
        """One layer's ops, on activations of this shape [B, T, D] on a device."""
        dtype = lambda s: self.compute if s.cast else jnp.dtype("float32")
        shape = lambda s: jax.ShapeDtypeStruct(local_shape(s.axes, s.padded), dtype(s))
        keep = keep_products if self.remat == "selective" else keep_everything
        params, x = (
            jax.tree.map(shape, self.parts.specs["layer"]),
            jax.ShapeDtypeStruct(message, self.compute),
        )
        return LayerSplit(self._layer, params, x, extra, keep)

    def _split_inside(self, message: tuple[int, ...], extra) -> LayerSplit:
        """The same from outside of the manual region, where experts and the context are those of
        all devices."""
        splits = []

        def body():
            splits.append(self._split(message, extra))
            return jnp.zeros(())

        with traced_for(self.mesh):
            jax.eval_shape(
                jax.shard_map(
                    body,
                    mesh=self.mesh,
                    in_specs=(),
                    out_specs=P(),
                    axis_names=manual_axes(self.mesh),
                    check_vma=False,
                )
            )
        return splits[0]

    # ------------------------------------------------------------------ the state before the first

    def _gradient_sums(self, params: dict) -> dict:
        """Zeros for the gradient sums, in the parameters' tree."""
        specs, reductions = self.parts.specs, self.reductions
        sums = {
            name: jax.tree.map(self._zero_sum, specs[name], reductions[name], params[name])
            for name in self.parts.ends
        }
        layers = {
            u: jax.tree.map(self._zero_sum, specs["layer"], reductions["layers"][u], stack)
            for u, stack in params["layers"].items()
        }
        return sums | {"layers": layers}

    def _zero_sum(self, s: Spec, reduction: Reduction, parameter: jax.Array) -> jax.Array:
        """Zeros for a parameter's gradient sum, given the parameter as the ops get it."""
        shards, shape = self.mesh.shape[DATA], parameter.shape
        if self.zero.gathers_in_ops:
            shape = unsharded_shape(shape, reduction, shards)
        if self.zero.reduces_in_ops:
            shape = shard_shape(shape, reduction, shards)
        return constrain(
            jnp.zeros(shape, jnp.float32), (*(None for _ in shape[len(s.axes) :]), *s.axes)
        )

    def _with_buffers(
        self, state: TickState, ticks: TickTable, split: LayerSplit, message: tuple[int, ...]
    ) -> TickState:
        """The state with the pools, and the buffers for what leaves and arrives, that the table
        uses."""
        sizes, host = (
            {pool: max(1, slots) for pool, slots in ticks.slotted.pool_sizes.items()},
            self.host_pools,
        )

        def zeros(*lead: int) -> jax.Array:
            return constrain(
                jnp.zeros((*lead, *message), self.compute), (*(None for _ in lead), *SPLIT)
            )

        def pool(name: str, shapes) -> list[jax.Array]:
            return empty_pool(sizes[name], max(self.placement.sizes), shapes, name in host)

        if "activation" in host:
            activation = host_memory.empty_pool(
                (sizes["activation"], *message), self.compute, on_host=True
            )
        else:
            activation = zeros(sizes["activation"])
        buffers = {
            *ticks.result_buffers.values(),
            *ticks.permutes,
            *(ARRIVED[way] for way in ticks.permutes),
        }
        state = dataclasses.replace(
            state, activation=activation, **{buffer: zeros() for buffer in sorted(buffers)}
        )
        if ticks.slotted.table.forward_only:
            return state
        # What B has gathered for W stays whole: the partitioner may split it, and W would gather it
        # again.
        whole = lambda a, is_gathered: constrain(a, (None,) * a.ndim) if is_gathered else a
        stash = pool("weight_stash", split.weight_stash)
        return dataclasses.replace(
            state,
            gradient=zeros(sizes["gradient"]),
            residual_b=pool("residual_b", split.residuals.for_b),
            residual_w=pool("residual_w", split.residuals.for_w),
            weight_stash=[
                whole(a, is_gathered) for a, is_gathered in zip(stash, split.gathered, strict=True)
            ],
        )


def _of_one_replica(body: Callable) -> Callable:
    """body(params, …) of one replica's parameters → the same of arrays that have the dimension
    [replicas], of which 1 is here."""

    def of_one_replica(params, *others):
        return jax.tree.map(lambda a: a[None], body(jax.tree.map(lambda a: a[0], params), *others))

    return of_one_replica
