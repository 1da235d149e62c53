"""The optimizer's update as an op of a tick, where a table has several steps
(schedule/repeated_table.py).

Two ops update parameters: `update_layers` a stage's layers, as soon as its last W of the step is
done, and `update_ends` embedding and head, on all stages in one tick. They reduce the gradients
over the devices that have the same parameters, as zero.py does after the last tick of a table of
one step, and gather the updated shards. No device knows the norm of all gradients at this time, so
an update is neither clipped nor skipped. `check` follows the last update of a step, on all stages
in one tick: it adds up the norm. If the step was to be clipped or skipped, the table ends there,
with the values and the state from before this step, which each update keeps until the next one. No
stage has made an update of the next step by then, since a microbatch goes through all stages first.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import MANUAL_AXES
from jaxtrain.devices.sharding import restricted
from jaxtrain.models.spec import is_spec
from jaxtrain.parallel.zero import (
    Reduction,
    gather_stored,
    norms_of,
    reduce,
    stored_squares,
)
from jaxtrain.runtime.tick_state import Checks, ModelTree, PartState, TickState, Tree

# (gradients, the optimizer's state, values) → (updated values, state), of one part of the
# parameters, in float32
Rule = Callable[[Tree, Any, Tree], tuple[Tree, Any]]


class UpdateRules(NamedTuple):
    """The updates of the layers' parameters, {"layers": …}, and of all others.

    right: (loss, gradient norm) → bool, True if the step is neither to be clipped nor to be skipped
    """

    layers: Rule
    ends: Rule
    right: Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartsState:
    """What an update changes, laid out as `Reduction.storage`.

    values: the parameters in float32, a dict by name
    layers, ends: the optimizer's state for the layers' parameters and for all others
    """

    values: Tree
    layers: Any
    ends: Any


def parts_specs(parts: PartsState, reductions: Tree) -> PartsState:
    """The manual axes' part of the specs of a PartsState. The optimizer's state has arrays like the
    parameters, and scalars."""
    stored = jax.tree.map(
        lambda r: restricted(r.storage, MANUAL_AXES),
        reductions,
        is_leaf=lambda r: isinstance(r, Reduction),
    )

    def of_state(state: Any, specs: Tree) -> Any:
        tree: Any = jax.tree.structure(specs)
        follows = lambda part: jax.tree.structure(part) == tree
        return jax.tree.map(lambda part: specs if follows(part) else P(), state, is_leaf=follows)

    return PartsState(
        stored, of_state(parts.layers, _layers(stored)), of_state(parts.ends, _ends(stored))
    )


def _layers(tree: Mapping) -> dict:
    return {"layers": tree["layers"]}


def _ends(tree: Mapping) -> dict:
    return {name: part for name, part in tree.items() if name != "layers"}


@dataclasses.dataclass(frozen=True)
class PartUpdate:
    """The update of one part of the parameters.

    names: of its trees in `ModelTree`
    part: the field of `TickState` with its PartState
    specs, reductions: by name
    dtype: of gradients in collectives
    as_used: (spec, reduction, values) → the parameter in the form that ops read
    """

    names: tuple[str, ...]
    part: str
    rule: Rule
    specs: Tree
    reductions: Tree
    dtype: jnp.dtype
    as_used: Callable[..., Any]

    def run(self, state: TickState, step: jax.Array) -> TickState:
        """The state after the update, with gradient sums of zero."""
        part: PartState = getattr(state, self.part)
        sums = {name: getattr(state.gradients, name) for name in self.names}
        gradients = jax.tree.map(
            lambda r, g: reduce(g, r, self.dtype), self.reductions, self._led(sums)
        )
        values, optimizer = self.rule(gradients, part.optimizer, part.values)
        squares = jax.tree.map(
            lambda r, before, *arrays: self._with_squares(before, r, arrays, step),
            self.reductions,
            part.squares,
            gradients,
            values,
        )
        params = jax.tree.map(self._gathered, self.specs, self.reductions, values, is_leaf=is_spec)
        zeros = jax.tree.map(jnp.zeros_like, sums)
        return dataclasses.replace(
            state,
            gradients=ModelTree(**zeros),
            params=ModelTree(**self._unled(params)),
            **self._as_field(PartState(values, optimizer, (part.values, part.optimizer), squares)),
        )

    def _as_field(self, part: PartState) -> dict[str, Any]:
        return {self.part: part}

    def _gathered(self, spec, reduction: Reduction, values: jax.Array):
        return gather_stored(self.as_used(spec, reduction, values), reduction)

    def _with_squares(
        self, squares: jax.Array, reduction: Reduction, arrays, step: jax.Array
    ) -> jax.Array:
        new = jnp.stack([stored_squares(a, reduction) for a in arrays])[:, None]
        return lax.dynamic_update_slice_in_dim(squares, new, step, 1)

    def _led(self, tree: Tree) -> Tree:
        """The tree with the dimension of the stages, of one, in front of stacks."""
        return {
            name: jax.tree.map(lambda a: a[None], part) if name == "layers" else part
            for name, part in tree.items()
        }

    def _unled(self, tree: Tree) -> Tree:
        return {
            name: jax.tree.map(lambda a: a[0], part) if name == "layers" else part
            for name, part in tree.items()
        }


class Updates:
    """The updates of both parts in the manual region.

    specs, reductions: of all parameters
    model: the number of devices of `model`
    sum_losses: adds up the losses of all devices
    """

    def __init__(
        self,
        rules: UpdateRules,
        model: int,
        sum_losses: Callable[[jax.Array], jax.Array],
        specs: ModelTree,
        reductions: ModelTree,
        dtype: jnp.dtype,
        as_used: Callable[..., Any],
    ):
        def part(names: Sequence[str], field: str, rule: Rule) -> PartUpdate:
            of_part = lambda tree: {name: getattr(tree, name) for name in names}
            return PartUpdate(
                tuple(names), field, rule, of_part(specs), of_part(reductions), dtype, as_used
            )

        self.model, self._sum_losses, self._right = model, sum_losses, rules.right
        present = [name for name, tree in vars(specs).items() if tree is not None]
        ends = [name for name in present if name != "layers"]
        self.layers = part(["layers"], "layers", rules.layers)
        self.ends = part(ends, "ends", rules.ends)

    def begin(
        self, parts: PartsState, loss: jax.Array, mtp_loss: jax.Array | None
    ) -> tuple[PartState, PartState, Checks]:
        """The states of layers, ends and checks before the first tick. loss, mtp_loss: [steps],
        0"""
        steps = loss.shape[0]

        def state(values: Tree, optimizer: Any) -> PartState:
            squares = jax.tree.map(lambda _: jnp.zeros((2, steps, self.model)), values)
            return PartState(values, optimizer, (values, optimizer), squares)

        return (
            state(_layers(parts.values), parts.layers),
            state(_ends(parts.values), parts.ends),
            Checks(loss, mtp_loss, jnp.zeros((2, steps)), jnp.int32(0), jnp.array(False)),
        )

    def check(self, state: TickState, step: jax.Array) -> TickState:
        """The state after the check of a step whose updates are made on all stages."""
        squares = jax.tree.leaves({**state.layers.squares, **state.ends.squares})
        of_step = [lax.dynamic_index_in_dim(a, step, 1, keepdims=False) for a in squares]
        norms = norms_of(of_step)
        losses = jax.tree.map(
            lambda a: self._sum_losses(lax.dynamic_index_in_dim(a, step, keepdims=False)),
            (state.loss, state.mtp_loss),
        )
        right = self._right(losses[0], norms[0])
        loss, mtp_loss = jax.tree.map(
            lambda of_steps, a: lax.dynamic_update_index_in_dim(of_steps, a, step, 0),
            (state.checks.loss, state.checks.mtp_loss),
            losses,
        )
        checks = Checks(
            loss,
            mtp_loss,
            lax.dynamic_update_index_in_dim(state.checks.norms, norms, step, 1),
            state.checks.right + right.astype(jnp.int32),
            ~right,
        )
        return dataclasses.replace(state, checks=checks)

    def end(self, state: TickState) -> PartsState:
        """What the updates have changed, after the last tick: those of the right steps."""

        def right(part: PartState) -> tuple[Tree, Any]:
            return jax.tree.map(
                lambda before, after: jnp.where(state.checks.wrong, before, after),
                part.before,
                (part.values, part.optimizer),
            )

        layers, of_layers = right(state.layers)
        ends, of_ends = right(state.ends)
        return PartsState({**layers, **ends}, of_layers, of_ends)
