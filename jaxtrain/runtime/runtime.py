"""The runtime: it executes any table as one scan over its ticks, inside one shard_map.
docs/architecture.md has the picture.

This file has the manual region, the state before the first tick, the scan, and the reduction after
the last tick. tick.py has the tick itself. All mesh axes are manual except `model`, whose
collectives the partitioner derives from the layers' logical axes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.config.saved_values import LAYER_INPUT, names_on_host
from jaxtrain.config.sizes import Remat
from jaxtrain.devices import host_memory
from jaxtrain.devices.mesh import (
    CONTEXT,
    MANUAL_AXES,
    MODEL,
    STAGE,
    manual_axes,
    psum,
    traced_for,
)
from jaxtrain.devices.sharding import BATCH_SPEC, constrain, mesh_axes, restricted
from jaxtrain.models.layers import SPLIT
from jaxtrain.models.rotary import layer_positions
from jaxtrain.models.spec import Spec
from jaxtrain.models.transformer import ModelParts
from jaxtrain.parallel import collective_matmul, replicas
from jaxtrain.parallel.attention import context
from jaxtrain.parallel.fp8 import Fp8, Quantized
from jaxtrain.parallel.zero import (
    Reduction,
    Zero,
    gather,
    reduce,
    reduce_rest,
    shard_shape,
    unsharded_shape,
)
from jaxtrain.runtime.backward_split import LayerSplit, RecomputedLayer
from jaxtrain.runtime.embedding_and_head import EmbeddingAndHead, look_ahead
from jaxtrain.runtime.layer_loops import LayerRange, UnitCollectives
from jaxtrain.runtime.layer_stack import LayerStack, empty_pool
from jaxtrain.runtime.saved_bytes import (
    RuntimeLayer,
    as_used,
    bytes_of,
    examples,
    host_rule,
    in_manual_region,
    keep_rule,
)
from jaxtrain.runtime.tick import Accumulate, Tick
from jaxtrain.runtime.tick_state import Constants, ModelTree, Pools, TickState
from jaxtrain.runtime.updates import PartsState, UpdateRules, Updates, parts_specs
from jaxtrain.schedule.columns import (
    ARRIVED,
    TickColumns,
    TickTable,
    last_weights,
    tick_table,
)
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import SAVED, SlottedTable


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
    """The losses of a batch and their gradients: float32, in the parameters' tree, laid out by the
    `storage` of `Runtime.reductions`."""

    losses: Losses
    gradients: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepsResults:
    """The result of a table of several steps, up to the first one that was to be clipped or
    skipped.

    right: int32, the number of steps before that one
    losses: float32 [steps] each; only those of the right steps are losses
    gradient_norms, norms: float32 [steps], of the gradients and of the updated parameters
    parts: the values and states after the right steps
    """

    right: Any

    losses: Losses
    gradient_norms: Any
    norms: Any
    parts: PartsState


class SlotBytes(NamedTuple):
    """Bytes of a slot on a device and its host, and those on the host."""

    all: int
    on_host: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Runtime:
    """Executes a table for a model on a mesh.

    slotted: the table with its slots; None with one stage, where a tick is the forward and backward
        of a microbatch
    reductions: a `Reduction` for each parameter, in the parameters' tree; `zero` says when those of
        layers are done, `zero_of_ends` when all others are
    shares_vocabulary: embedding and head are split over the stages, which do their ops together
    remat: what the backward recomputes of a unit's lowest layers: full, everything from its input,
        which F saves; selective, everything but products with weights; none, nothing
    save: the names of the values that selective saves, instead of products, or of the input that
        full does, as `pipeline.save` has them
    loss_chunk: the most tokens whose logits exist at a time
    compute: dtype of activations
    independent_replicas: each replica has parameters of its own; they, losses and gradients have a
        leading dimension [replicas]
    offload_activations: what the forward saves for the backward lies in the host's memory
    fp8: the use of FP8 in products with the matrices of layers; None: they are of `compute`
    collective_matmul: as `parallel.collective_matmul`
    """

    parts: ModelParts
    placement: Placement
    slotted: SlottedTable | None
    mesh: Mesh
    reductions: dict
    zero: Zero = Zero()
    zero_of_ends: Zero = Zero()
    shares_vocabulary: bool = False
    remat: Remat = Remat("full")
    save: tuple[str, ...] = ()
    loss_chunk: int = 2048
    compute: jnp.dtype = jnp.dtype("float32")
    independent_replicas: bool = False
    offload_activations: bool = False
    fp8: Fp8 | None = None
    collective_matmul: str = "auto"

    def losses(self, params: dict, batch: dict) -> Losses:
        """The losses of a batch, without a backward; the table is one of `make_forward_table`.

        Args:
          params: {"embed", "layers": {local unit: leaves [stages, stack_size, ...]}, "head", …}, as
            training/state.py has them.
          batch: tokens, targets int32 and weights float32, [microbatches, sequences, T]; and
            segments, positions int32 if tokens attend within their document.
        """
        columns, out_specs = self._columns(batch), Losses(P(), P())
        return self._in_manual_region(self._losses, params, batch, columns, out_specs)

    def losses_and_gradients(
        self, params: dict, batch: dict, columns: TickColumns | None = None
    ) -> LossesAndGradients:
        """The losses of a batch and the gradients of `loss` and the weighted `mtp_loss`.

        Args:
          params, batch: as for `losses`.
          columns: int32 [ticks, stages], instead of the table's columns (benchmarks/pipeline.py);
            None: the table's.
        """
        losses = Losses(P(), P(), P() if self.parts.cfg.mtp_depth else None)
        gradients = jax.tree.map(lambda r: restricted(r.storage, MANUAL_AXES), self.reductions)
        batch = look_ahead(batch, self.parts.cfg.mtp_depth)
        columns = self._columns(batch) if columns is None else columns
        out_specs = LossesAndGradients(losses, gradients)
        return self._in_manual_region(self._losses_and_gradients, params, batch, columns, out_specs)

    def several_steps(
        self, params: dict, parts: PartsState, batch: dict, rules: UpdateRules
    ) -> StepsResults:
        """The steps of a table of several ones, with their updates.

        Args:
          params: as for `losses`, and float32.
          parts: values and state of the optimizer, whose arrays are laid out as
            `Reduction.storage`.
          batch: as for `losses`, of all steps: [steps · microbatches, sequences, T].
        """
        batch = look_ahead(batch, self.parts.cfg.mtp_depth)
        specs = parts_specs(parts, self.reductions)
        mtp_loss = P() if self.parts.cfg.mtp_depth else None
        out_specs = StepsResults(P(), Losses(P(), P(), mtp_loss), P(), P(), specs)
        body = functools.partial(self._several_steps, rules)
        columns = self._columns(batch)
        return self._in_manual_region(body, params, batch, columns, out_specs, (parts, specs))

    @property
    def _input_on_host(self) -> str:
        """The pool in the host's memory of the inputs that full recomputation starts from: those of
        layers, or of units; "" where they are in the device's."""
        if self.remat.mode != "full" or not (
            self.offload_activations or LAYER_INPUT in names_on_host(self.save)
        ):
            return ""
        return "layer_input" if self._saves_inputs else "activation"

    def slot_bytes(self, sequences: int, tokens: int, documents: bool) -> dict[str, SlotBytes]:
        """Pool → bytes of one of its slots.

        sequences, tokens: shape of a microbatch on one group of `model` devices
        documents: a batch has segments and positions, so tokens attend within their document
        """
        message = (sequences, tokens, self.parts.cfg.width)
        make = functools.partial(self._ranges, message, examples(sequences, tokens, documents))
        sizes: dict[str, SlotBytes] = {}
        for part in in_manual_region(make, self.mesh, self.collective_matmul, self.mesh):
            saved = bytes_of(part.split, self.mesh.shape[MODEL])
            layers = part.most(self.placement.sizes)
            inputs = {"activation": saved.input, "gradient": saved.input}
            if part.layer_input:
                inputs[part.layer_input] = layers * saved.input
            sizes |= {
                name: SlotBytes(size, size * (name == self._input_on_host))
                for name, size in inputs.items()
            }
            sizes |= {
                part.residual_b: SlotBytes(layers * saved.residual_b, layers * saved.host_b),
                part.residual_w: SlotBytes(layers * saved.residual_w, layers * saved.host_w),
                part.weight_stash: SlotBytes(layers * saved.weight_stash),
            }
        return sizes

    # ------------------------------------------------------------------ into the manual region

    @functools.cached_property
    def _ticks(self) -> TickTable | None:
        if self.slotted is None:
            return None
        ticks = tick_table(self.slotted)
        if not self.zero.reduces_in_last or self.slotted.table.forward_only:
            return ticks
        columns = dataclasses.replace(ticks.columns, last_weights=last_weights(self.slotted.table))
        return dataclasses.replace(ticks, columns=columns)

    def _columns(self, batch: dict) -> TickColumns:
        """The table's columns, int32 [ticks, stages]; with one stage, a tick for each
        microbatch."""
        if self._ticks is not None:
            return self._ticks.columns
        return TickColumns(np.arange(batch["tokens"].shape[0], dtype=np.int32)[:, None])

    def _in_manual_region(
        self,
        body: Callable,
        params: dict,
        batch: dict,
        columns: TickColumns,
        out_specs,
        *others: tuple[Any, Any],
    ):
        """Runs body(params, batch, columns, …) on each device's shards of these.

        out_specs: the specs of the body's result; for independent replicas, of one replica's
        others: further arguments, each with its specs
        """
        held = lambda zero, reduction: restricted(zero.held(reduction), MANUAL_AXES)
        in_specs: Any = {
            name: jax.tree.map(functools.partial(held, self._zero_of(name)), part)
            for name, part in self.reductions.items()
        }
        if self.independent_replicas:
            in_specs, out_specs = jax.tree.map(replicas.leading, (in_specs, out_specs))
            body = _of_one_replica(body)
        run = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(
                in_specs,
                dict.fromkeys(batch, BATCH_SPEC),
                P(None, STAGE),
                *(specs for _, specs in others),
            ),
            out_specs=out_specs,
            axis_names=manual_axes(self.mesh),
            check_vma=False,
        )
        if (parts := self.mesh.shape[CONTEXT]) > 1:
            batch = jax.tree.map(lambda a: context.zigzag(a, parts), batch)
        with traced_for(self.mesh), collective_matmul.requested(self.collective_matmul):
            columns = jax.tree.map(jnp.asarray, columns)
            return run(params, batch, columns, *(argument for argument, _ in others))

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
        sums = self._of_parts(self._zero_sum, self._specs, self._reductions, constants.params)
        state = TickState(jnp.zeros(()), mtp_loss, sums, self._zero_shards(sums))
        state = self._scan(constants, state, columns)
        loss = self._sum(state.loss)
        parts = {name: part for name, part in vars(state.gradients).items() if part is not None}
        if self.zero.reduces_in_last:
            parts["layers"] = state.reduced.layers
        parts["layers"] = jax.tree.map(lambda a: a[None], parts["layers"])
        with jax.named_scope("reduce_gradients"):
            gradients = {
                name: jax.tree.map(
                    lambda r, g, name=name: self._reduced(name, r, g), self.reductions[name], part
                )
                for name, part in sorted(parts.items())
            }
        if mtp_loss is not None:
            mtp_loss = self._sum(state.mtp_loss) / self.parts.cfg.mtp_weight
        return LossesAndGradients(Losses(loss, tokens, mtp_loss), gradients)

    def _reduced(self, name: str, reduction: Reduction, sums: jax.Array) -> jax.Array:
        """A parameter's sums of the part `name` of the model, reduced over the axes over which no
        op has."""
        zero = self._zero_of(name)
        in_ops = zero.reduces_in_ops or (zero.reduces_in_last and name == "layers")
        return (reduce_rest if in_ops else reduce)(sums, reduction, zero.dtype)

    def _zero_of(self, name: str) -> Zero:
        """ZeRO of the parameters in the part `name` of the model."""
        return self.zero if name == "layers" else self.zero_of_ends

    def _of_parts(self, fn: Callable, *trees: ModelTree) -> ModelTree:
        """fn(zero, …) for each parameter, with its values in these trees."""
        return ModelTree(
            **{
                name: jax.tree.map(
                    functools.partial(fn, self._zero_of(name)),
                    *(getattr(tree, name) for tree in trees),
                )
                for name in self.reductions
            }
        )

    def _several_steps(
        self,
        rules: UpdateRules,
        params: dict,
        batch: dict,
        columns: TickColumns,
        parts: PartsState,
    ) -> StepsResults:
        assert self.slotted
        steps = self.slotted.table.steps
        constants, tokens = self._constants(params, batch)
        mtp_loss = jnp.zeros(steps) if self.parts.cfg.mtp_depth else None
        sums = self._of_parts(self._zero_sum, self._specs, self._reductions, constants.params)
        model = self.mesh.shape[MODEL]
        as_used = functools.partial(self._as_used, self.zero)
        updates = Updates(
            rules, model, self._sum, self._specs, self._reductions, self.zero.dtype, as_used
        )
        loss = jnp.zeros(steps)
        layers, ends, checks = updates.begin(parts, loss, mtp_loss)
        state = TickState(
            loss,
            mtp_loss,
            sums,
            params=constants.params,
            layers=layers,
            ends=ends,
            checks=checks,
        )
        constants = dataclasses.replace(constants, params=ModelTree())
        state = self._scan(constants, state, columns, updates)
        checks = state.checks
        if mtp_loss is not None:
            mtp_loss = checks.mtp_loss / self.parts.cfg.mtp_weight
        losses, (gradient_norms, norms) = Losses(checks.loss, tokens, mtp_loss), checks.norms
        return StepsResults(checks.right, losses, gradient_norms, norms, updates.end(state))

    @functools.cached_property
    def _reductions(self) -> ModelTree:
        return ModelTree(**self.reductions)

    @functools.cached_property
    def _specs(self) -> ModelTree:
        """The parameters' specifications; for a unit's stack of layers, those of one layer."""
        layers = dict.fromkeys(self.reductions["layers"], self.parts.specs["layer"])
        return ModelTree(**self.parts.ends, layers=layers)

    def _sum(self, loss: jax.Array) -> jax.Array:
        """The sum of a loss over all devices that have a part of it."""
        return psum(loss, (*replicas.sum_axes(self.independent_replicas), STAGE))

    def _constants(self, params: dict, batch: dict) -> tuple[Constants, jax.Array]:
        """Returns (the parameters in the compute type with the batch, whose weights are divided by
        their global sum; this sum)."""
        stacks = jax.tree.map(lambda a: a[0], params["layers"])
        held = ModelTree(**{**params, "layers": stacks})
        tree = self._of_parts(self._as_used, self._specs, self._reductions, held)
        with jax.named_scope("gather"):
            tree = self._of_parts(
                lambda zero, r, a: gather(a, r) if zero.gathers_once else a, self._reductions, tree
            )
        weights, tokens = self._normalized(batch["weights"], 1.0)
        batch = {**batch, "weights": weights}
        if "mtp" in batch:
            share = self.parts.cfg.mtp_weight / self.parts.cfg.mtp_depth
            batch["mtp"] = {
                d: {**module, "weights": self._normalized(module["weights"], share)[0]}
                for d, module in batch["mtp"].items()
            }
        return Constants(tree, batch), tokens

    def _as_used(
        self, zero: Zero, spec: Spec, reduction: Reduction, a: jax.Array
    ) -> jax.Array | Quantized:
        """A parameter of this device, or a stack of them, in the form that products take."""
        named = {axis for part in zero.held(reduction) for axis in mesh_axes(part)}
        axes = [axis for axis in MANUAL_AXES if axis in named and axis != STAGE]
        return as_used(spec, a, self.compute, self.fp8, axes)

    def _normalized(self, weights: jax.Array, target: float) -> tuple[jax.Array, jax.Array]:
        """Returns (the weights scaled so that they sum to `target` over the global batch of each
        step, their sum before: a scalar, or [steps] where the table has several)."""
        axes = replicas.sum_axes(self.independent_replicas)
        steps = self.slotted.table.steps if self.slotted else 1
        if steps == 1:
            total = psum(weights.astype(jnp.float32).sum(), axes)
            return weights * (target / jnp.maximum(total, 1)), total
        of_steps = weights.reshape(steps, -1, *weights.shape[1:])
        total = psum(of_steps.astype(jnp.float32).sum((1, 2, 3)), axes)
        scale = target / jnp.maximum(total, 1)
        return (of_steps * scale[:, None, None, None]).reshape(weights.shape), total

    def _scan(
        self,
        constants: Constants,
        state: TickState,
        columns: TickColumns,
        updates: Updates | None = None,
    ) -> TickState:
        """The state after the last tick. state: that before the first tick, with losses and
        gradient sums, but without buffers; updates: of a table of several steps"""
        stage_of, width = self.placement.stage_of, self.parts.cfg.width
        ends = EmbeddingAndHead(
            self.parts,
            self.loss_chunk,
            self.compute,
            stage_of[0],
            stage_of[-1],
            self.shares_vocabulary,
            self.zero_of_ends,
            self._reductions,
            self.mesh.shape,
        )
        message = (*constants.batch["tokens"].shape[1:], width)
        extra = jax.eval_shape(lambda batch: ends.extra(batch, 0), constants.batch)
        ranges = self._ranges(message, extra)
        stack = lambda unit: LayerStack(
            ranges,
            self.placement,
            unit,
            lax.axis_index(STAGE),
            UnitCollectives(self.zero, self._reductions.layers[str(unit)]),
            self._extra_of_layer if self.parts.cfg.nope_layers else None,
        )
        tick: Callable[[TickState, TickColumns], TickState]
        if self._ticks is None:
            one = Accumulate(ends, stack(0), constants)
            tick = one.add_loss if state.gradients.head is None else one.add_gradients
        else:
            stacks = [stack(unit) for unit in range(self.placement.units_per_stage)]
            tick = Tick(ends, stacks, self._ticks, constants, updates)
            state = self._with_buffers(state, self._ticks, ranges, message)
        ticks = jax.tree.map(lambda column: column[:, 0], columns)
        # XLA's TPU compiler makes two programs of a scan of one tick: the forward ran twice.
        if len(jax.tree.leaves(ticks)[0]) == 1:
            return tick(state, jax.tree.map(lambda column: column[0], ticks))
        return lax.scan(lambda state, columns: (tick(state, columns), None), state, ticks)[0]

    def _extra_of_layer(self, extra, layer):
        """A layer's positions and segments; `layer` counts from the first after the dense ones."""
        positions, segments = extra
        cfg = self.parts.cfg
        return layer_positions(cfg, cfg.dense_layers + layer, positions), segments

    def _ranges(self, message: tuple[int, ...], extra) -> list[LayerRange]:
        """The layers of a unit by what they save, for activations of this shape [B, T, D] on a
        device: the recomputed ones, which are the lowest, and those that save everything."""
        mode, most = self.remat.mode, max(self.placement.sizes)
        recomputed = self.remat.recomputed(most)
        if not recomputed:
            return [LayerRange(self._split("none", message, extra))]
        lowest = LayerRange(
            self._split(mode, message, extra),
            recomputed=mode == "full",
            layer_input="layer_input" * self._saves_inputs,
        )
        if recomputed == most:
            return [lowest]
        rest = LayerRange(self._split("none", message, extra), recomputed, None, False, *SAVED)
        return [dataclasses.replace(lowest, end=recomputed), rest]

    @property
    def _saves_inputs(self) -> bool:
        return self.slotted is not None and self.slotted.table.saves_inputs

    def _split(self, mode: str, message: tuple[int, ...], extra) -> LayerSplit | RecomputedLayer:
        """One layer cut into ops as this mode of remat says, for activations of this shape [B, T,
        D] on a device."""
        layer = RuntimeLayer(self.parts, self.compute, self.fp8)
        if mode == "full" and self._ticks is None:
            x = jax.ShapeDtypeStruct(message, self.compute)
            return RecomputedLayer(layer, layer.specs, x, bool(self._input_on_host))
        hosted = host_rule(mode, self.save, self.offload_activations)
        return layer.split(message, extra, keep_rule(mode, self.save), hosted)

    # ------------------------------------------------------------------ before the first tick

    def _zero_sum(
        self, zero: Zero, spec: Spec, reduction: Reduction, parameter: jax.Array | Quantized
    ) -> jax.Array:
        """Zeros in the shape of a parameter's gradient sum. parameter: as the ops receive it."""
        sizes, shape = self.mesh.shape, parameter.shape
        if zero.gathers_in_ops:
            shape = unsharded_shape(shape, reduction, sizes)
        if zero.reduces_in_ops:
            shape = shard_shape(shape, reduction, sizes)
        axes = (*(None for _ in shape[len(spec.axes) :]), *spec.axes)
        return constrain(jnp.zeros(shape, jnp.float32), axes)

    def _zero_shards(self, sums: ModelTree) -> ModelTree:
        """Zeros in the shapes of `TickState.reduced`."""
        if not self.zero.reduces_in_last:
            return ModelTree()

        def zeros(spec: Spec, reduction: Reduction, a: jax.Array) -> jax.Array:
            shape = shard_shape(a.shape, reduction, self.mesh.shape)
            return constrain(jnp.zeros(shape, jnp.float32), (None, *spec.axes))

        specs, reductions = self._specs.layers, self._reductions.layers
        return ModelTree(layers=jax.tree.map(zeros, specs, reductions, sums.layers))

    def _with_buffers(
        self,
        state: TickState,
        ticks: TickTable,
        ranges: list[LayerRange],
        message: tuple[int, ...],
    ) -> TickState:
        """The state with the pools and the message buffers that the table uses."""
        slots = {pool: max(1, count) for pool, count in ticks.slotted.pool_sizes.items()}

        def messages(name: str, layers: int = 1) -> jax.Array:
            shape, on_host = (slots[name] * layers, *message), name == self._input_on_host
            pool = host_memory.empty_pool(shape, self.compute, on_host)
            return pool if on_host else constrain(pool, (None, *SPLIT))

        def pool(name: str, layers: LayerRange, shapes, on_host=()) -> list[jax.Array]:
            return empty_pool(slots[name], layers.most(self.placement.sizes), shapes, on_host)

        activation = messages("activation")
        names = {*ticks.result_buffers.values(), *ticks.permutes}
        names |= {ARRIVED[way] for way in ticks.permutes}
        # permutes send buffers that nobody has filled: of zeros, whatever reads them stays finite
        buffers = {
            name: constrain(jnp.zeros(message, self.compute), SPLIT) for name in sorted(names)
        }
        if ticks.slotted.table.forward_only:
            return dataclasses.replace(state, pools=Pools(activation), buffers=buffers)
        # What B has gathered for W stays replicated: the partitioner may split it, and W would
        # gather it again.
        replicated = lambda a, gathered: constrain(a, (None,) * a.ndim) if gathered else a
        pools = Pools(activation, messages("gradient"))
        for part in ranges:
            if part.layer_input:
                layers = part.most(self.placement.sizes)
                inputs = [messages(part.layer_input, layers)]
                pools = dataclasses.replace(pools, layer_input=inputs)
            split, residuals, hosted = part.split, part.split.residuals, part.split.on_host
            stash = pool(part.weight_stash, part, split.weight_stash)
            of_range = {
                part.residual_b: pool(part.residual_b, part, residuals.for_b, hosted.for_b),
                part.residual_w: pool(part.residual_w, part, residuals.for_w, hosted.for_w),
                part.weight_stash: list(map(replicated, stash, split.gathered)),
            }
            pools = dataclasses.replace(pools, **of_range)
        return dataclasses.replace(state, pools=pools, buffers=buffers)


def _of_one_replica(body: Callable) -> Callable:
    """Turns body(params, …) for one replica into one for parameters and results with a leading
    dimension [replicas], of which each device has one."""

    def run(params, *others):
        return jax.tree.map(lambda a: a[None], body(jax.tree.map(lambda a: a[0], params), *others))

    return run
