"""One step as functions for jit: gradients, update, metrics.

Begin with `OneStep.train`, which is a step from top to bottom. Where the optimizer's state is on
disk a step has three kinds of programs: `OneStep.gradients`, one update after the other
(training/update/streamed_update.py), and `OneStep.finish`. All share `_before_update` and
`_after_update`, so they compute the same numbers and the same metrics.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.host_memory import is_on_host
from jaxtrain.devices.mesh import platform_of
from jaxtrain.parallel import replicas
from jaxtrain.run.metrics import METRICS, host
from jaxtrain.runtime.runtime import LossesAndGradients, Runtime
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.state import TrainState
from jaxtrain.training.update import balance
from jaxtrain.training.update.average import moved_average
from jaxtrain.training.update.optimizer import Guard, Optimizer, updates_made

# Float32 scalars by their names in METRICS (run/metrics.py); of independent replicas arrays
# [replicas], of several steps in one program arrays [steps].
StepMetrics = dict[str, jax.Array]


def step_metrics(**values: jax.Array | None) -> StepMetrics:
    """The metrics that are not None. Raises KeyError for one that METRICS lacks, ValueError for one
    that METRICS does not combine over replicas."""
    for name in values:
        if METRICS[name].combine is host:
            raise ValueError(f"{name} is a number of the host (run/metrics.py)")
    return {name: value for name, value in values.items() if value is not None}


def combine_replicas(each: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step from those of each independent replica, [replicas], jax or numpy."""
    tokens = each["weighted_tokens"]
    return {name: METRICS[name].combine(values, tokens) for name, values in each.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class OneStep:
    """The functions of a step of a run.

    skips: an update whose loss or gradients are not finite is skipped. The learning rate then
        depends on the number of updates, not of steps
    balance_rate: of the experts' biases
    """

    layout: ParameterLayout
    optimizer: Optimizer
    runtime: Runtime
    skips: bool
    balance_rate: float

    def train(self, state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics]:
        """The state after a step, and its metrics: gradients, then the optimizer, separately in
        each replica if replicas are independent."""
        layout, params = self.layout, state.params
        on_tpu = platform_of(layout.mesh.devices.flat[0]) == "tpu"
        if on_tpu and layout.zero in (1, 2) and not layout.independent_replicas:
            # What an update reads of them is cut off before the layers run: else XLA's TPU compiler
            # copies all parameters first, and keeps both.
            params, batch = lax.optimization_barrier((self._shards(params), batch))
        results = self.runtime.losses_and_gradients(state.read, batch, step=state.step)
        with jax.named_scope("optimizer"):
            update: Callable = functools.partial(self._update, state.step)
            if layout.independent_replicas:
                # Their arrays have a first dimension [replicas]: the update is mapped over it, and
                # its sums stay inside a replica.
                update = replicas.in_each(update)
            # `params` are what the update reads, cut off above on TPUs; ops have read `state.read`.
            params, optimizer_state, ema, working, metrics = update(
                params, state.optimizer, state.ema, results
            )
        after = dataclasses.replace(
            state,
            params=params,
            optimizer=optimizer_state,
            step=state.step + 1,
            ema=ema,
            working=working,
        )
        return after, metrics

    def gradients(self, state: TrainState, batch: dict) -> tuple[Any, Guard, StepMetrics]:
        """The first part of a step whose update is streamed: the gradients, with counts in place of
        those of routers' counts, what the updates need of all of them, and the metrics so far."""
        results = self.runtime.losses_and_gradients(state.read, batch, step=state.step)
        with jax.named_scope("optimizer"):
            guard, metrics = self._before_update(results, state.optimizer, state.step)
        return results.gradients, guard, metrics

    def finish(self, state: TrainState, squares: jax.Array | None) -> tuple[jax.Array, StepMetrics]:
        """The end of a step whose update is streamed: the number of steps, and the metrics that
        need the updated state.

        state: updated, with the number of steps before this one
        squares: the sum of the squares of all parameters, which the updates have added up since
            masters never are on the devices together; None if no parameter is a master
        """
        if squares is None:
            layout = self.layout
            scattered = jax.tree.map(lax.with_sharding_constraint, state.params, layout.scattered)
            norm = layout.norm(scattered)
        else:
            norm = jnp.sqrt(squares)
        step = state.step + 1
        return step, self._after_update(norm, state.optimizer, step)

    def _update(
        self,
        step: jax.Array,
        params: Any,
        optimizer_state: Any,
        ema: Any,
        results: LossesAndGradients,
    ) -> tuple[Any, Any, Any, Any, StepMetrics]:
        """(parameters, optimizer's state, average, copies that ops read, metrics) after the update
        of one replica, or of all if they are not independent. step: the number of steps before this
        one"""
        layout = self.layout
        with_counts = results.gradients
        gradients = balance.without_counts(layout.specs, with_counts)
        guard, metrics = self._before_update(results, optimizer_state, step)
        # Each data shard updates its part of the parameters; then they are gathered.
        updated, params, after = self.optimizer.update(
            gradients, optimizer_state, self._shards(params), guard.finite, guard.norm
        )
        moved = balance.move(layout.specs, updated, with_counts, self.balance_rate, guard.finite)
        ema = moved_average(self.optimizer.settings.ema_decay, ema, moved, guard.finite)
        # Masters on the host were written there by the optimizer; the others are gathered in the
        # type and layout of the state.
        on_device = layout.as_held(moved)
        params = jax.tree.map(lambda a, b: a if is_on_host(a) else b, params, on_device)
        metrics |= self._after_update(layout.norm(moved), after, step + 1)
        # The copies are made from the same float32 numbers, not from the gathered parameters: so
        # 16-bit numbers are gathered.
        return params, after, ema, layout.working(moved), metrics

    def _shards(self, params: Any) -> Any:
        """Each data shard's part of the parameters, which it updates; those on the host as they
        are."""
        return jax.tree.map(
            lambda a, s: a if is_on_host(a) else lax.with_sharding_constraint(a, s),
            params,
            self.layout.scattered,
        )

    def _before_update(
        self, results: LossesAndGradients, optimizer_state: Any, step: jax.Array
    ) -> tuple[Guard, StepMetrics]:
        """What an update needs of all gradients, and the metrics that are known before it. step:
        the number of steps before this one"""
        losses, with_counts = results.losses, results.gradients
        specs, rate = self.layout.specs, self.optimizer.rate
        gradients = balance.without_counts(specs, with_counts)
        # Once, for the metric, for clipping and for the skip: a second norm would be a second
        # all-reduce that everything waits for.
        norm = self.layout.norm(gradients)
        # The norm is finite only if all gradients are: one scalar tells what a pass over all of
        # them would.
        finite = jnp.isfinite(losses.loss) & jnp.isfinite(norm) if self.skips else None
        metrics = step_metrics(
            loss=losses.loss,
            grad_norm=norm,
            learning_rate=rate(updates_made(optimizer_state) if self.skips else step),
            weighted_tokens=losses.tokens,
            **losses.further,
            expert_load=balance.expert_load(specs, with_counts),
            dropped=balance.dropped(specs, with_counts),
        )
        return Guard(norm, finite), metrics

    def _after_update(
        self, param_norm: jax.Array, optimizer_state: Any, step: jax.Array
    ) -> StepMetrics:
        """The metrics that need the updated state. step: the number of steps, with this one"""
        skipped = None
        if self.skips:
            skipped = (step - updates_made(optimizer_state)).astype(jnp.float32)
        return step_metrics(param_norm=param_norm, skipped=skipped)
