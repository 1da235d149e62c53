"""The optimizer's updates as ops of a tick, where a table has several steps
(schedule/repeated_table.py).

The parameters are in two groups, each with an op that updates it: `layers`, the stage's stacks, and
`ends`, which is all others: embedding, head, the first dense layers, prediction modules. Begin with
`GroupUpdate.run`, one update, and `Updates.check`, the end of a step:

    update_layers   on one stage, after its last W of the step   ┐ reduces the group's gradients,
    update_ends     on all stages in one tick                    ┘ updates, gathers the new shards
    check_step      on all stages in one tick, after the step's last update: loss and norm

Updates come before the norm of all gradients is known, so they neither clip nor skip. If `check`
then finds that the step was to be clipped or skipped, the step is not accepted: no later tick runs
an op, and `end` returns the values and the state from before this step, which each update keeps
until the next one. No stage has made an update of the next step by then, since a microbatch goes
through all stages first.

Gradients are reduced over the devices that have the same parameters, as zero.py does after the last
tick of a table of one step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.models.spec import is_spec
from jaxtrain.parallel.zero import (
    Reduction,
    gather_stored,
    norms_of,
    stored_squares,
)
from jaxtrain.runtime.state_plan import ParameterPlan
from jaxtrain.runtime.tick_state import (
    Checks,
    GroupState,
    ModelTree,
    TickState,
    Tree,
    stage_added,
    stage_dropped,
)

# (gradients, the optimizer's state, values) → (updated values, state), of one group of the
# parameters, in float32
UpdateRule = Callable[[Tree, Any, Tree], tuple[Tree, Any]]


class UpdateRules(NamedTuple):
    """The updates of the layers' parameters, {"layers": …}, and of all others.

    accepts: (loss, gradient norm) → bool, False if the step is to be clipped or skipped
    """

    layers: UpdateRule
    ends: UpdateRule
    accepts: Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValuesAndOptimizer:
    """The arrays that updates change, laid out as `Reduction.storage`.

    values: all parameters in float32, a dict by name
    layers, ends: the optimizer's state for the layers' parameters and for all others
    """

    values: Tree
    layers: Any
    ends: Any


def values_specs(state: ValuesAndOptimizer, stored: Tree) -> ValuesAndOptimizer:
    """The specs of `state` over the manual axes. The optimizer's state has trees of arrays like the
    parameters, which are sharded as these, and scalars, which are replicated.

    stored: the specs of the values
    """

    def of_optimizer(optimizer: Any, specs: Tree) -> Any:
        outline: Any = jax.tree.structure(specs)
        follows = lambda tree: jax.tree.structure(tree) == outline
        return jax.tree.map(lambda a: specs if follows(a) else P(), optimizer, is_leaf=follows)

    layers, ends = _groups(stored)
    return ValuesAndOptimizer(
        stored, of_optimizer(state.layers, layers), of_optimizer(state.ends, ends)
    )


def _groups(tree: Tree) -> tuple[Tree, Tree]:
    """Returns (the layers', all others') values of a dict by the parameters' first names."""
    ends = {name: values for name, values in tree.items() if name != "layers"}
    return {"layers": tree["layers"]}, ends


@dataclasses.dataclass(frozen=True)
class GroupUpdate:
    """The update of one group of the parameters.

    field: of `TickState`, with the group's GroupState: "layers" or "ends"
    names: the group's fields of `ModelTree`
    """

    field: str
    names: Sequence[str]
    rule: UpdateRule
    parameters: ParameterPlan

    def run(self, state: TickState, step: jax.Array) -> TickState:
        """The state after the update, with gradient sums of zero for the next step."""
        group: GroupState = getattr(state, self.field)
        specs, reductions, sums = (
            {name: getattr(tree, name) for name in self.names}
            for tree in (self.parameters.specs, self.parameters.reductions, state.gradients)
        )
        # From here on arrays are shards, as ZeRO lays them out: each device updates its own.
        # Values and the optimizer's state have the dimension of stages; the sums get it, too.
        gradients = self.parameters.reduced(stage_added(sums))
        # No norm of all gradients is known yet, and the rule neither clips nor skips.
        values, optimizer = self.rule(gradients, group.optimizer, group.values)

        # The sums of all steps, with this one's. There is one number for each device of `model`;
        # the sum over devices is in `check`, one collective for all parameters of both groups.
        def with_squares(reduction: Reduction, before: jax.Array, *arrays: jax.Array) -> jax.Array:
            new = jnp.stack([stored_squares(a, reduction) for a in arrays])[:, None]
            return lax.dynamic_update_slice_in_dim(before, new, step, 1)

        squares = jax.tree.map(with_squares, reductions, group.squares, gradients, values)
        params = jax.tree.map(self._gathered, specs, reductions, values, is_leaf=is_spec)
        # `before` keeps the values of one step only: the check of this step comes before the next
        # update of any group.
        before = group.values, group.optimizer
        changed: dict[str, Any] = {self.field: GroupState(values, optimizer, before, squares)}
        return dataclasses.replace(
            state,
            gradients=ModelTree(**jax.tree.map(jnp.zeros_like, sums)),
            params=ModelTree(**stage_dropped(params)),
            **changed,
        )

    def _gathered(self, spec, reduction: Reduction, values: jax.Array):
        """A parameter as the next step's ops read it. It is cast before it is gathered, so that the
        collective has the bytes of the compute type."""
        used: Any = self.parameters.as_used(self.parameters.zero, spec, reduction, values)
        return gather_stored(used, reduction)


class Updates:
    """The updates of both groups, and the checks of steps.

    sum_losses: adds up the losses of all devices
    model_devices: the size of the mesh's axis `model`
    """

    def __init__(
        self,
        rules: UpdateRules,
        parameters: ParameterPlan,
        sum_losses: Callable[[jax.Array], jax.Array],
        model_devices: int,
    ):
        self._accepts, self._sum_losses = rules.accepts, sum_losses
        self._model_devices = model_devices
        layers, ends = map(tuple, _groups(parameters.specs.present()))
        self.layers = GroupUpdate("layers", layers, rules.layers, parameters)
        self.ends = GroupUpdate("ends", ends, rules.ends, parameters)

    def begin(
        self, state: ValuesAndOptimizer, loss: jax.Array, further: dict[str, jax.Array]
    ) -> tuple[GroupState, GroupState, Checks]:
        """The states of layers, ends and checks before the first tick. loss, further: [steps],
        0"""
        steps = loss.shape[0]

        def group(values: Tree, optimizer: Any) -> GroupState:
            # The partitioner splits arrays over `model`: each of its devices has squares of its
            # own, which `check` adds up.
            squares = jax.tree.map(lambda _: jnp.zeros((2, steps, self._model_devices)), values)
            return GroupState(values, optimizer, (values, optimizer), squares)

        layers, ends = _groups(state.values)
        return (
            group(layers, state.layers),
            group(ends, state.ends),
            Checks(loss, further, jnp.zeros((2, steps)), jnp.int32(0), jnp.array(False)),
        )

    def check(self, state: TickState, step: jax.Array) -> TickState:
        """Adds up the losses and norms of a step whose updates have run on all stages, writes them
        to `state.checks`, and rejects the step if it is to be clipped or skipped. step: its number
        in the table"""
        squares = jax.tree.leaves({**state.layers.squares, **state.ends.squares})
        of_step = [lax.dynamic_index_in_dim(a, step, 1, keepdims=False) for a in squares]
        norms = norms_of(of_step)
        losses = jax.tree.map(
            lambda a: self._sum_losses(lax.dynamic_index_in_dim(a, step, keepdims=False)),
            (state.loss, state.further),
        )
        # The loss and the norm are sums over all devices, so all accept the same steps, and no
        # device waits for one that has ended the table.
        accepted = self._accepts(losses[0], norms[0])
        loss, further = jax.tree.map(
            lambda of_steps, a: lax.dynamic_update_index_in_dim(of_steps, a, step, 0),
            (state.checks.loss, state.checks.further),
            losses,
        )
        checks = Checks(
            loss,
            further,
            lax.dynamic_update_index_in_dim(state.checks.norms, norms, step, 1),
            state.checks.accepted_steps + accepted.astype(jnp.int32),
            ~accepted,
        )
        return dataclasses.replace(state, checks=checks)

    def end(self, state: TickState) -> ValuesAndOptimizer:
        """The values and the optimizer's state after the accepted steps, from the state after the
        last tick."""

        # A rejected step has ended the table, so `before` is from before this step; otherwise the
        # last update was accepted.
        def accepted(group: GroupState) -> tuple[Tree, Any]:
            return jax.tree.map(
                lambda before, after: jnp.where(state.checks.rejected, before, after),
                group.before,
                (group.values, group.optimizer),
            )

        layers, optimizer_of_layers = accepted(state.layers)
        ends, optimizer_of_ends = accepted(state.ends)
        return ValuesAndOptimizer({**layers, **ends}, optimizer_of_layers, optimizer_of_ends)
