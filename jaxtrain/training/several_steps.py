"""Several steps as one program without a barrier between them (`pipeline.steps_per_program`), with
the results of one step at a time, bit for bit.

The table of several steps (schedule/repeated_table.py) updates a stage's parameters before the norm
of all gradients is known, as if nothing were clipped or skipped. After a step's last update its
loss and norm are compared (runtime/updates.py). If the step should have been clipped or skipped,
the table ends there: this step and those after it run one at a time from the state before it, which
was kept until then.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxtrain.config import OptimizerConfig
from jaxtrain.models.spec import is_spec
from jaxtrain.runtime.runtime import Runtime, StepsResults
from jaxtrain.runtime.updates import UpdateRule, UpdateRules, ValuesAndOptimizer
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.state import TrainState
from jaxtrain.training.update.optimizer import make_optimizer, parts_of, updates_made

StepMetrics = dict[str, jax.Array]
# (state, a batch for each step, steps to run one at a time or 0) → (state, metrics [steps])
Train = Callable[[TrainState, Sequence[dict], jax.Array], tuple[TrainState, StepMetrics]]


@dataclasses.dataclass(frozen=True, eq=False)
class StepsTogether:
    """The table of several steps, with what it needs of a run.

    optimizer: the settings; total: the steps of the run, for the learning rate
    rate: step → learning rate
    skips: updates that are not finite are to be skipped
    """

    layout: ParameterLayout
    runtime: Runtime
    optimizer: OptimizerConfig
    total: int
    rate: Callable[[ArrayLike], jax.Array]
    skips: bool

    def run(self, state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics, jax.Array]:
        """The state after the steps before the first one that should be clipped or skipped, the
        metrics [steps], those from that step on wrong, and the number of these steps. batch: of all
        steps, [steps · microbatches, sequences, T]"""
        values = jax.tree.map(lax.with_sharding_constraint, state.params, self.layout.scattered)
        held = ValuesAndOptimizer(
            values,
            self._part(state.optimizer, "layers"),
            self._part(state.optimizer, *self._ends),
        )
        results = self.runtime.several_steps(state.params, held, batch, self._rules)
        after = dataclasses.replace(
            state,
            params=self.layout.as_held(results.updated.values),
            optimizer=self._joined(results.updated),
            step=state.step + results.accepted_steps,
        )
        return after, self._metrics(state, results), results.accepted_steps

    def _accepts(self, loss: jax.Array, norm: jax.Array) -> jax.Array:
        accepted = jnp.array(True)
        if self.optimizer.clip_norm:
            accepted &= norm < self.optimizer.clip_norm
        if self.skips:
            accepted &= jnp.isfinite(loss) & jnp.isfinite(norm)
        return accepted

    def _metrics(self, before: TrainState, results: StepsResults) -> StepMetrics:
        """The metrics of `training/step.py`, where no step was clipped or skipped."""
        steps = range(results.gradient_norms.shape[0])
        updates = updates_made(before.optimizer)
        count = updates if self.skips else before.step
        losses = results.losses
        metrics = {
            "loss": losses.loss,
            "grad_norm": results.gradient_norms,
            "learning_rate": jnp.stack([self.rate(count + i) for i in steps]),
            "weighted_tokens": losses.tokens,
            "param_norm": results.norms,
        }
        if losses.mtp_loss is not None:
            metrics["mtp_loss"] = losses.mtp_loss
        if self.skips:
            skipped = (before.step - updates).astype(jnp.float32)
            metrics["skipped"] = jnp.broadcast_to(skipped, len(steps))
        return metrics

    # --- the optimizer's state by part ------------------------------------------------------------

    @property
    def _ends(self) -> list[str]:
        return [name for name in self.layout.specs if name != "layers"]

    @property
    def _rules(self) -> UpdateRules:
        def rule(*names: str) -> UpdateRule:
            specs = {name: self.layout.specs[name] for name in names}
            optimizer = make_optimizer(self.optimizer, self.total, specs)

            def update(gradients: dict, state: Any, values: dict) -> tuple[dict, Any]:
                # A norm that clips nothing, and numbers that are finite. XLA must not know them:
                # with another expression it fuses, and then rounds, otherwise than in one step.
                norm, finite = lax.optimization_barrier(
                    (jnp.float32(self.optimizer.clip_norm / 2), jnp.array(True))
                )
                updated = optimizer.update(
                    gradients, state, values, finite if self.skips else None, norm
                )
                return updated.values, updated.state

            return update

        return UpdateRules(rule("layers"), rule(*self._ends), self._accepts)

    def _part(self, state: Any, *names: str) -> Any:
        """The optimizer's state for these parameters, from that for all."""
        parts, trees, outline = parts_of(state, self._tree(self.layout.specs))
        return outline.unflatten(
            {name: part[name] for name in names} if follows else part
            for part, follows in zip(parts, trees, strict=True)
        )

    def _joined(self, held: ValuesAndOptimizer) -> Any:
        """The optimizer's state for all parameters."""
        specs = self.layout.specs
        layers = {"layers": specs.pop("layers")}
        of_layers, trees, outline = parts_of(held.layers, self._tree(layers))
        of_ends, _, _ = parts_of(held.ends, self._tree(specs))
        return outline.unflatten(
            {**a, **b} if follows else b
            for a, b, follows in zip(of_layers, of_ends, trees, strict=True)
        )

    @staticmethod
    def _tree(specs: dict) -> Any:
        return jax.tree.structure(specs, is_leaf=is_spec)


def train_several(
    together: StepsTogether,
    one_step: Callable[[TrainState, dict], tuple[TrainState, StepMetrics]],
) -> Train:
    """The function of a program of several steps.

    Its arguments are the state, as many batches as the table has steps, and the number of steps to
    run one at a time, int32, 0 for all of them together. From the first one on that is to be
    clipped or skipped they run one at a time. Metrics are [steps], those of steps that did not run
    0.
    """

    def train(
        state: TrainState, batches: Sequence[dict], alone: jax.Array
    ) -> tuple[TrainState, StepMetrics]:
        steps = len(batches)
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *batches)
        joined = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stacked)
        shapes = jax.eval_shape(together.run, state, joined)[1]
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

        def speculate(_, carry):
            before, *_ = carry
            return together.run(before, joined)

        begin = state, nothing, jnp.int32(0)
        tries = (alone == 0).astype(jnp.int32)
        after, metrics, accepted_steps = lax.fori_loop(0, tries, speculate, begin)

        def step_alone(i, carry):
            before, metrics = carry
            batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), stacked)
            after, of_step = one_step(before, batch)
            return after, {
                name: lax.dynamic_update_index_in_dim(metrics[name], value, i, 0)
                for name, value in of_step.items()
            }

        end = jnp.where(alone == 0, steps, alone)
        return lax.fori_loop(accepted_steps, end, step_alone, (after, metrics))

    return train
