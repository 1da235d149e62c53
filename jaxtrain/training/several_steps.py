"""Several steps as one program without a barrier between them (`pipeline.steps_per_program`), with
the results of one step at a time, bit for bit.

The table of several steps (schedule/repeated_table.py) updates a stage's parameters before the norm
of all gradients is known, as if nothing were clipped or skipped. After a step's last update its
loss and norm are compared (runtime/updates.py). If the step should have been clipped or skipped,
the table ends there: this step and those after it run one at a time from the state before it, which
was kept until then.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled

from jaxtrain.models.spec import is_spec
from jaxtrain.runtime.runtime import Runtime
from jaxtrain.runtime.updates import UpdateRule, UpdateRules, ValuesAndOptimizer
from jaxtrain.training.one_step import OneStep, StepMetrics, step_metrics
from jaxtrain.training.state import TrainState
from jaxtrain.training.update.average import moved_average
from jaxtrain.training.update.optimizer import parts_of, updates_made


@dataclasses.dataclass(frozen=True, eq=False)
class StepsTogether:
    """The table of several steps, with what it needs of a run. Begin with `train`.

    one:     the same step alone
    runtime: with the table of several steps
    """

    one: OneStep
    runtime: Runtime

    def train(
        self, state: TrainState, batches: Sequence[dict], alone: jax.Array
    ) -> tuple[TrainState, StepMetrics]:
        """The program of several steps, for jit. Returns (the state, the metrics [steps]).

        Args:
          batches: one for each step of the table.
          alone: int32, the number of steps to run one at a time; 0: all of them together. From the
            first one on that is to be clipped or skipped they run one at a time. Metrics of steps
            that did not run are 0.
        """
        steps = len(batches)
        # The table reads all microbatches of all steps in one array, a step alone those of its
        # batch.
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *batches)
        joined = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stacked)
        # Loops carry metrics of fixed shapes, from before the first trip on.
        shapes = jax.eval_shape(self.run, state, joined)[1]
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

        # The table, as a loop of one trip or none. A conditional would copy the state, and two
        # programs would need memory for two.
        def speculate(_, carry):
            before, *_ = carry
            return self.run(before, joined)

        begin = state, nothing, jnp.int32(0)
        tries = (alone == 0).astype(jnp.int32)
        after, metrics, accepted_steps = lax.fori_loop(0, tries, speculate, begin)

        # The ordinary step, from the state after the last accepted step on. When all were accepted,
        # which is the rule, this loop has no trip.
        def step_alone(i, carry):
            before, metrics = carry
            batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), stacked)
            after, of_step = self.one.train(before, batch)
            return after, {
                name: lax.dynamic_update_index_in_dim(metrics[name], value, i, 0)
                for name, value in of_step.items()
            }

        end = jnp.where(alone == 0, steps, alone)
        return lax.fori_loop(accepted_steps, end, step_alone, (after, metrics))

    def run(self, state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics, jax.Array]:
        """Returns (the state, metrics [steps], accepted). `accepted` is the number of steps before
        the first one that should be clipped or skipped. The state is the one after these steps;
        the metrics of later steps are wrong.

        batch: the microbatches of all steps, [steps · microbatches, sequences, T]
        """
        layout = self.one.layout
        # The table updates each data shard's part of the parameters, as the update of one step does
        # it; ops read the gathered ones.
        values = jax.tree.map(lax.with_sharding_constraint, state.params, layout.scattered)
        # The average moves with the optimizer's state.
        moving = state.optimizer, state.ema
        stored = ValuesAndOptimizer(
            values, self._part(moving, "layers"), self._part(moving, *self._ends)
        )
        results = self.runtime.several_steps(state.params, stored, batch, self._rules, state.step)
        optimizer_state, ema = self._joined(results.updated)
        after = dataclasses.replace(
            state,
            params=layout.as_held(results.updated.values),
            optimizer=optimizer_state,
            ema=ema,
            step=state.step + results.accepted_steps,
        )
        # The metrics of `OneStep.train` for each step, where none was clipped or skipped.
        steps = results.gradient_norms.shape[0]
        updates = updates_made(state.optimizer)
        losses, rate, count, skipped = results.losses, self.one.optimizer.rate, state.step, None
        if self.one.skips:
            # no step of this program was skipped: the number is that of the program's first state
            count = updates
            skipped = jnp.broadcast_to((state.step - updates).astype(jnp.float32), steps)
        metrics = step_metrics(
            loss=losses.loss,
            grad_norm=results.gradient_norms,
            learning_rate=jnp.stack([rate(count + i) for i in range(steps)]),
            weighted_tokens=losses.tokens,
            param_norm=results.norms,
            skipped=skipped,
            **losses.further,
        )
        return after, metrics, results.accepted_steps

    def _accepts(self, loss: jax.Array, norm: jax.Array) -> jax.Array:
        """True for a step that is neither to be clipped nor to be skipped."""
        accepted, clip_norm = jnp.array(True), self.one.optimizer.settings.clip_norm
        if clip_norm:
            accepted &= norm < clip_norm
        if self.one.skips:
            accepted &= jnp.isfinite(loss) & jnp.isfinite(norm)
        return accepted

    # --- the optimizer's state by part ------------------------------------------------------------

    @property
    def _ends(self) -> list[str]:
        return [name for name in self.one.layout.specs if name != "layers"]

    @property
    def _rules(self) -> UpdateRules:
        def rule(*names: str) -> UpdateRule:
            specs = {name: self.one.layout.specs[name] for name in names}
            optimizer = self.one.optimizer.of_part(specs)

            def update(gradients: dict, state: Any, values: dict) -> tuple[dict, Any]:
                # The update is made before the norm of all gradients is known.
                # A norm that clips nothing, and numbers that are finite. XLA must not know them:
                # with another expression it fuses, and then rounds, otherwise than in one step.
                norm, finite = lax.optimization_barrier(
                    (jnp.float32(optimizer.settings.clip_norm / 2), jnp.array(True))
                )
                state, ema = state
                updated = optimizer.update(
                    gradients, state, values, finite if self.one.skips else None, norm
                )
                ema = moved_average(optimizer.settings.ema_decay, ema, updated.values)
                return updated.values, (updated.state, ema)

            return update

        return UpdateRules(rule("layers"), rule(*self._ends), self._accepts)

    def _part(self, state: Any, *names: str) -> Any:
        """The optimizer's state for these parameters, from that for all."""
        parts = parts_of(state, self._tree(self.one.layout.specs))
        return parts.outline.unflatten(
            {name: part[name] for name in names} if follows else part
            for part, follows in zip(parts.parts, parts.follow, strict=True)
        )

    def _joined(self, updated: ValuesAndOptimizer) -> Any:
        """The optimizer's state for all parameters."""
        specs = self.one.layout.specs
        layers = {"layers": specs.pop("layers")}
        of_layers = parts_of(updated.layers, self._tree(layers))
        of_ends = parts_of(updated.ends, self._tree(specs))
        pairs = zip(of_layers.parts, of_ends.parts, of_layers.follow, strict=True)
        # Both have the count of updates, of all steps that were done: the same number.
        return of_layers.outline.unflatten({**a, **b} if follows else b for a, b, follows in pairs)

    @staticmethod
    def _tree(specs: dict) -> Any:
        return jax.tree.structure(specs, is_leaf=is_spec)


@dataclasses.dataclass(frozen=True)
class CompiledSteps:
    """The compiled program of `number` steps."""

    program: Compiled
    number: int

    def together(
        self, state: TrainState, batches: Sequence[dict]
    ) -> tuple[TrainState, StepMetrics]:
        """The state after `number` steps and their metrics, arrays [number]. The table of several
        steps has them if none is clipped or skipped."""
        return self._run(state, batches, 0)

    def alone(self, state: TrainState, batches: Sequence[dict]) -> tuple[TrainState, StepMetrics]:
        """The state after up to `number` steps, run one at a time, and their metrics, arrays
        [number] with 0 for steps that are not run."""
        # The program has an argument for each of its steps, and does not read those behind the
        # last: any batch will do.
        unused = [batches[-1]] * (self.number - len(batches))
        return self._run(state, [*batches, *unused], len(batches))

    def take(self, state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics]:
        """One step, as `Programs.take` (training/compiled_step.py)."""
        state, metrics = self.alone(state, [batch])
        return state, {name: a[0] for name, a in metrics.items()}

    def _run(
        self, state: TrainState, batches: Sequence[dict], alone: int
    ) -> tuple[TrainState, StepMetrics]:
        return self.program(state, tuple(batches), np.int32(alone))
