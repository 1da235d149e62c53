"""The runtime: it executes any table as one scan over its ticks, inside one shard_map.
docs/architecture.md has the picture.

Begin with `Runtime.losses_and_gradients`, and go on with the body that it runs on each device:

    losses_and_gradients     global arrays → `_in_manual_region` → global losses and gradients
      _losses_and_gradients  on a device:
        _constants             parameters in the compute type; the batch, its weights normalized
        _scan                  state before the first tick → state after the last one
          _tick                  the function of a tick (tick.py), pools and buffers (state_plan.py)
        ParameterPlan.reduced  gradient sums → gradients, one collective for each parameter

`losses` (evaluation) and `several_steps` (a table with the optimizer's updates) have the same form.
All mesh axes are manual except `model`, whose collectives the partitioner derives from the layers'
logical axes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxtrain.config.groups.layer_kinds import (
    has_dropout,
    kind_names,
    kinds_of_layers,
    stacked_kinds,
)
from jaxtrain.config.sizes import Remat
from jaxtrain.devices.host_memory import on_device
from jaxtrain.devices.mesh import CONTEXT, MODEL, STAGE, manual_axes, psum, traced_for
from jaxtrain.devices.sharding import BATCH_SPEC
from jaxtrain.models.transformer import ModelParts
from jaxtrain.parallel import collective_matmul, replicas
from jaxtrain.parallel.attention import context
from jaxtrain.parallel.fp8 import Fp8
from jaxtrain.parallel.zero import Zero
from jaxtrain.runtime.batch import extra_inputs, look_ahead, with_noise, with_scaled_weights
from jaxtrain.runtime.embedding_and_head import EmbeddingAndHead
from jaxtrain.runtime.layers.layer_loops import UnitCollectives
from jaxtrain.runtime.layers.layer_stack import LayerStack
from jaxtrain.runtime.layers.saved_bytes import RuntimeLayer, examples, in_manual_region
from jaxtrain.runtime.loss import CROSS_ENTROPY, LossRule
from jaxtrain.runtime.state_plan import ParameterPlan, SlotBytes, UnitPlan
from jaxtrain.runtime.tick import Accumulate, Tick
from jaxtrain.runtime.tick_state import Constants, ModelTree, TickState, stage_added
from jaxtrain.runtime.updates import UpdateRules, Updates, ValuesAndOptimizer, values_specs
from jaxtrain.schedule.columns import TickColumns, TickTable, last_weights, tick_table
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import SlottedTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Losses:
    """float32 scalars.

    loss:     the mean over the weighted tokens of the batch, in nats
    tokens:   their number
    further:  by the names of their metrics, the objective's other terms without their weights; none
        in evaluation. mtp_loss, the mean of the losses of the tokens beyond the next; z_loss, the
        mean of (log Z)² (`LossRule`)
    """

    loss: Any
    tokens: Any
    further: dict[str, Any] = dataclasses.field(default_factory=dict)


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
    """The result of a table of several steps. It accepts the steps before the first one that was to
    be clipped or skipped.

    accepted_steps: int32, their number
    losses: float32 [steps] each; only those of the accepted steps are losses
    gradient_norms, norms: float32 [steps], of the gradients and of the updated parameters
    updated: the values and the optimizer's state after the accepted steps
    """

    # Only the devices know how many steps are accepted, so the arrays have all steps.
    accepted_steps: Any
    losses: Losses
    gradient_norms: Any
    norms: Any
    updated: ValuesAndOptimizer


@dataclasses.dataclass(frozen=True, eq=False)
class Runtime:
    """Executes a table for a model on a mesh: `losses`, `losses_and_gradients`, `several_steps`.

    slotted: the table with its slots; None with one stage, where a tick is the forward and backward
        of a microbatch
    reductions: a `Reduction` for each parameter, in the parameters' tree; `zero` says when those of
        layers are done, `zero_of_ends` when all others are
    shares_vocabulary: embedding and head are split over the stages, which do their ops together
    remat: what the backward recomputes of a unit's lowest layers: full, everything from its input,
        which F saves; selective, everything but products with weights; none, nothing
    save: the names of the values that selective saves, instead of products, or of the input that
        full saves, in the form of `pipeline.save`
    loss_chunk: the most tokens whose logits exist at a time; loss_rule: the loss of a token
    compute: dtype of activations
    independent_replicas: each replica has parameters of its own; they, losses and gradients have a
        leading dimension [replicas]
    offload_activations: what the forward saves for the backward lies in the host's memory
    fp8: the use of FP8 in products with the matrices of layers; None: they are of `compute`
    collective_matmul: as `parallel.collective_matmul`
    seed: of dropout
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
    loss_rule: LossRule = CROSS_ENTROPY
    compute: jnp.dtype = jnp.dtype("float32")
    independent_replicas: bool = False
    offload_activations: bool = False
    fp8: Fp8 | None = None
    collective_matmul: str = "auto"
    seed: int = 0

    def losses(self, params: dict, batch: dict) -> Losses:
        """The losses of a batch, without a backward; the table is one of `make_forward_table`.

        Args:
          params: {"embed", "layers": {local unit: leaves [stages, stack_size, ...]}, "head", …}, as
            training/state.py has them.
          batch: tokens, targets int32 and weights float32, [microbatches, sequences, T]; and
            segments, positions int32 if tokens attend within their document.
        """
        # P(): a loss is summed over all devices, so each has the same.
        columns, out_specs = self._columns(batch), Losses(P(), P())
        params = jax.tree.map(on_device, params)  # an average may be in the host's memory
        return self._in_manual_region(self._losses, params, batch, columns, out_specs)

    def losses_and_gradients(
        self,
        params: dict,
        batch: dict,
        columns: TickColumns | None = None,
        step: jax.Array | int = 0,
    ) -> LossesAndGradients:
        """The losses of a batch and the gradients of the loss with its weighted further terms.

        Args:
          params, batch: as for `losses`.
          columns: int32 [ticks, stages], instead of the table's columns (benchmarks/pipeline.py);
            None: the table's.
          step: the number of steps before this one, on which dropout depends.
        """
        losses = Losses(P(), P(), dict.fromkeys(self._further_weights, P()))
        batch = self._for_training(batch, step)
        columns = self._columns(batch) if columns is None else columns
        out_specs = LossesAndGradients(losses, self._parameters.stored_specs().present())
        return self._in_manual_region(self._losses_and_gradients, params, batch, columns, out_specs)

    def several_steps(
        self,
        params: dict,
        stored: ValuesAndOptimizer,
        batch: dict,
        rules: UpdateRules,
        step: jax.Array | int = 0,
    ) -> StepsResults:
        """The results of a table of several steps, with their updates.

        Args:
          params: as for `losses`, and float32.
          stored: values and state of the optimizer, whose arrays are laid out as
            `Reduction.storage`.
          batch: as for `losses`, of all steps: [steps · microbatches, sequences, T].
          step: the number of steps before the first one.
        """
        batch = self._for_training(batch, step)
        specs = values_specs(stored, self._parameters.stored_specs().present())
        losses = Losses(P(), P(), dict.fromkeys(self._further_weights, P()))
        out_specs = StepsResults(P(), losses, P(), P(), specs)
        body, columns = functools.partial(self._several_steps, rules), self._columns(batch)
        return self._in_manual_region(body, params, batch, columns, out_specs, (stored, specs))

    def slot_bytes(self, sequences: int, tokens: int, documents: bool) -> dict[str, SlotBytes]:
        """Pool → bytes of one of its slots.

        sequences, tokens: shape of a microbatch on one group of `model` devices
        documents: a batch has segments and positions, so tokens attend within their document
        """
        message = (sequences, tokens, self.parts.cfg.width)
        extra = examples(self.parts.cfg, sequences, tokens, documents)
        make = functools.partial(self._units.ranges, message, extra)
        ranges = in_manual_region(make, self.mesh, self.collective_matmul, self.mesh)
        return self._units.slot_bytes(ranges, self.mesh.shape[MODEL])

    def _for_training(self, batch: dict, first_step: jax.Array | int) -> dict:
        """A batch of one or several steps with all that ops of training read of it."""
        # before sequences are split over `context`: the next token may be on another device
        batch = look_ahead(batch, self.parts.cfg.mtp_depth)
        if not has_dropout(self.parts.cfg):
            return batch
        separate = replicas.count(self.mesh) if self.independent_replicas else 1
        return with_noise(batch, self.seed, first_step, self._steps, separate)

    # ------------------------------------------------------------------ plans, without arrays

    @functools.cached_property
    def _units(self) -> UnitPlan:
        layer = functools.partial(RuntimeLayer, self.parts, self.compute, self.fp8)
        return UnitPlan(
            {kind: layer(kind) for kind in kind_names(self.parts.cfg)},
            self.placement.kinds_of_units(stacked_kinds(self.parts.cfg)),
            self.slotted,
            self.remat,
            self.save,
            self.offload_activations,
        )

    @functools.cached_property
    def _parameters(self) -> ParameterPlan:
        layers = self.placement.of_units(self.parts.specs["layer"])
        return ParameterPlan(
            ModelTree(**self.parts.ends, layers=layers),
            ModelTree(**self.reductions),
            self.zero,
            self.zero_of_ends,
            self.compute,
            self.fp8,
            self.mesh.shape,
        )

    @property
    def _steps(self) -> int:
        return self.slotted.table.steps if self.slotted else 1

    @functools.cached_property
    def _ticks(self) -> TickTable | None:
        return _tick_table(self.slotted, self.zero) if self.slotted else None

    def _columns(self, batch: dict) -> TickColumns:
        """int32 [ticks, stages]: the table's; with one stage, a tick for each microbatch."""
        if self._ticks is not None:
            return self._ticks.columns
        return TickColumns(np.arange(batch["tokens"].shape[0], dtype=np.int32)[:, None])

    # ------------------------------------------------------------------ into the manual region

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
        in_specs: Any = self._parameters.held_specs().present()
        if self.independent_replicas:
            in_specs, out_specs = jax.tree.map(replicas.leading, (in_specs, out_specs))
            body = _of_one_replica(body)
        # `model` is not manual: the layers' logical axes say how arrays are split over it, and the
        # partitioner derives the collectives.
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
        # A token attends to those before it, so the end of a sequence is more work than its
        # beginning. With one piece of each all devices of `context` have equal work.
        if (devices := self.mesh.shape[CONTEXT]) > 1:
            batch = jax.tree.map(lambda a: context.zigzag(a, devices), batch)
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
        further = {name: jnp.zeros(()) for name in self._further_weights}
        sums = self._parameters.zero_sums(constants.params)
        # Weights are divided by the number of tokens, so that the sums over microbatches and
        # devices are the mean loss and its gradients.
        state = TickState(jnp.zeros(()), further, sums, self._parameters.zero_shards(sums))
        state = self._scan(constants, state, columns)
        loss, sums = self._sum(state.loss), state.gradients
        if self.zero.reduces_in_last:
            # The last W has reduced the sums of all microbatches already, overlapped with products.
            sums = dataclasses.replace(sums, layers=state.reduced.layers)
        with jax.named_scope("reduce_gradients"):
            gradients = self._parameters.reduced(stage_added(sums.present()))
        further = self._unweighted(jax.tree.map(self._sum, state.further))
        return LossesAndGradients(Losses(loss, tokens, further), gradients)

    def _several_steps(
        self,
        rules: UpdateRules,
        params: dict,
        batch: dict,
        columns: TickColumns,
        stored: ValuesAndOptimizer,
    ) -> StepsResults:
        steps = self._steps
        constants, tokens = self._constants(params, batch)
        loss, further = jnp.zeros(steps), {name: jnp.zeros(steps) for name in self._further_weights}
        sums = self._parameters.zero_sums(constants.params)
        updates = Updates(rules, self._parameters, self._sum, self.mesh.shape[MODEL])
        layers, ends, checks = updates.begin(stored, loss, further)
        # Updates change the parameters, so the state carries them; as constants of the scan they
        # would stay as they were before the first step.
        groups: dict[str, Any] = {"layers": layers, "ends": ends, "checks": checks}
        state = TickState(loss, further, sums, params=constants.params, **groups)
        constants = dataclasses.replace(constants, params=ModelTree())
        state = self._scan(constants, state, columns, updates)
        checks = state.checks
        losses = Losses(checks.loss, tokens, self._unweighted(checks.further))
        gradient_norms, norms = checks.norms
        return StepsResults(
            checks.accepted_steps, losses, gradient_norms, norms, updates.end(state)
        )

    @property
    def _further_weights(self) -> dict[str, float]:
        """The weights of the objective's terms beside the loss, those that there are."""
        mtp = self.parts.cfg.mtp_weight if self.parts.cfg.mtp_depth else 0.0
        weights = {"mtp_loss": mtp, "z_loss": self.loss_rule.z_loss}
        return {name: weight for name, weight in weights.items() if weight}

    def _unweighted(self, further: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The terms as they are reported, from sums that are weighted as in the objective."""
        return {name: further[name] / weight for name, weight in self._further_weights.items()}

    def _sum(self, loss: jax.Array) -> jax.Array:
        """The sum of a loss over all devices that have a term of it."""
        return psum(loss, (*replicas.sum_axes(self.independent_replicas), STAGE))

    def _constants(self, params: dict, batch: dict) -> tuple[Constants, jax.Array]:
        """Returns (the parameters in the compute type with the batch, its weights scaled; the
        number of weighted tokens, a scalar, or [steps] for a table of several)."""
        axes = replicas.sum_axes(self.independent_replicas)
        batch, tokens = with_scaled_weights(batch, self.parts.cfg, self._steps, axes)
        return Constants(self._parameters.constants(params), batch), tokens

    def _scan(
        self,
        constants: Constants,
        state: TickState,
        columns: TickColumns,
        updates: Updates | None = None,
    ) -> TickState:
        """The state after the last tick. state: before the first tick, with losses and gradient
        sums, but without pools and buffers; updates: of a table of several steps"""
        tick, state = self._tick(constants, state, updates)
        # The columns are [ticks, stages], and this device has its own stage's: [ticks, 1].
        of_stage = jax.tree.map(lambda column: column[:, 0], columns)
        # XLA's TPU compiler makes two programs of a scan of one tick: the forward ran twice.
        if len(jax.tree.leaves(of_stage)[0]) == 1:
            return tick(state, jax.tree.map(lambda column: column[0], of_stage))
        return lax.scan(lambda state, columns: (tick(state, columns), None), state, of_stage)[0]

    def _tick(
        self, constants: Constants, state: TickState, updates: Updates | None
    ) -> tuple[Callable[[TickState, TickColumns], TickState], TickState]:
        """Returns (the function of a tick, the state with its pools and buffers)."""
        cfg, reductions = self.parts.cfg, self._parameters.reductions
        ends = EmbeddingAndHead(
            self.parts,
            self.loss_chunk,
            self.loss_rule,
            self.compute,
            self.placement.stage_of[0],
            self.placement.stage_of[-1],
            self.shares_vocabulary,
            self.zero_of_ends,
            reductions,
            self.mesh.shape,
        )
        message = (*constants.batch["tokens"].shape[1:], cfg.width)
        extra = jax.eval_shape(lambda batch: extra_inputs(batch, 0), constants.batch)
        # A layer of each kind is traced and cut once for all units.
        ranges = self._units.ranges(message, extra)
        stack = lambda unit: LayerStack(
            ranges,
            self.placement,
            unit,
            lax.axis_index(STAGE),
            UnitCollectives(self.zero, reductions.layers[str(unit)]),
            kinds_of_layers(cfg),
        )
        # One stage sends nothing and needs no slots: a microbatch is one op, with its backward.
        if self._ticks is None:
            one = Accumulate(ends, stack(0), constants)
            return (one.add_loss if state.gradients.head is None else one.add_gradients), state
        stacks = [stack(unit) for unit in range(self.placement.units_per_stage)]
        state = self._units.begin(state, self._ticks, ranges, message)
        return Tick(ends, stacks, self._ticks, constants, updates), state


def _tick_table(slotted: SlottedTable, zero: Zero) -> TickTable:
    """The ticks of a table, with a column for the last W where ZeRO reduces gradients in it."""
    ticks = tick_table(slotted)
    if not zero.reduces_in_last or slotted.table.forward_only:
        return ticks
    # Only this form of ZeRO has an op of its own for a unit's last W. Without the column one op
    # does for all W, and a tick has no second loop.
    columns = dataclasses.replace(ticks.columns, last_weights=last_weights(slotted.table))
    return dataclasses.replace(ticks, columns=columns)


def _of_one_replica(body: Callable) -> Callable:
    """Turns body(params, …) for one replica into one for parameters and results with a leading
    dimension [replicas], of which each device has one."""

    # Inside, sums leave out the axis `replica` (`replicas.sum_axes`), so each replica's losses and
    # gradients are its own.
    def run(params, *others):
        return jax.tree.map(lambda a: a[None], body(jax.tree.map(lambda a: a[0], params), *others))

    return run
