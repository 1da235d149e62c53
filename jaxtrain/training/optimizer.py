"""optax optimizers and learning-rate schedules from the config's `optimizer` group."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from jaxtrain.config import OptimizerConfig
from jaxtrain.devices.host_memory import read, write
from jaxtrain.models.spec import Spec


def learning_rate(cfg: OptimizerConfig, steps: int) -> Callable[[ArrayLike], jax.Array]:
    """A function step → learning rate: linear warm-up over `warmup_steps`, then decay to
    `final_fraction` of the peak by step `steps`.

    schedule: cosine and linear decay from the warm-up on; constant decays over the last
    `decay_steps`, or not at all if these are 0.
    """
    peak, end = cfg.learning_rate, cfg.learning_rate * cfg.final_fraction
    warm, rest = cfg.warmup_steps, max(1, steps - cfg.warmup_steps)
    if cfg.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, rest, cfg.final_fraction)
    elif cfg.schedule == "linear":
        decay = optax.linear_schedule(peak, end, rest)
    else:
        flat = rest - cfg.decay_steps
        decay = optax.constant_schedule(peak)
        if cfg.decay_steps:
            decay = optax.join_schedules(
                [decay, optax.linear_schedule(peak, end, cfg.decay_steps)], [flat]
            )
    if not warm:
        return decay
    # The first step already updates: step 0 has 1/warm of the peak.
    return optax.join_schedules(
        [optax.linear_schedule(peak / warm, peak, max(1, warm - 1)), decay], [warm]
    )


def make_optimizer(
    cfg: OptimizerConfig, steps: int, specs: dict, offload: bool = False, skips: bool = False
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) with clipping by the global norm; matrices decay, norm
    scales and biases do not.

    specs: a pytree like the parameters, of Specs. offload: the moments are in the host's memory,
        and `update` fetches them leaf by leaf.
    skips: `update` takes a scalar `finite`; if that is false, moments and counts of updates, on
        which the learning rate depends, stay as they are. The caller keeps the parameters.
    """
    decays = jax.tree.map(lambda s: s.matrix, specs, is_leaf=lambda s: isinstance(s, Spec))
    guarded = where_finite if skips else lambda inner: inner
    moments = guarded(optax.scale_by_adam(cfg.b1, cfg.b2, cfg.epsilon))
    parts = [
        # A part also without clipping, so that the state's structure, which checkpoints have, does
        # not depend on it.
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        leaf_by_leaf(moments) if offload else moments,
        optax.add_decayed_weights(cfg.weight_decay, decays),
        guarded(optax.scale_by_learning_rate(learning_rate(cfg, steps))),
    ]
    return optax.chain(*parts)


def updates_made(state: Any) -> jax.Array:
    """The number of updates in a state of `make_optimizer`, int32: of steps without skipped
    ones."""
    return state[-1].count


def where_finite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` with a state that changes only if the scalar `finite` is true, bit for bit."""

    def update(updates, state, params=None, *, finite, **_):
        updates, changed = inner.update(updates, state, params)
        return updates, jax.tree.map(functools.partial(jnp.where, finite), changed, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def leaf_by_leaf(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` with its state in the host's memory: it is fetched and written back leaf by leaf, and
    in stacks layer by layer.

    inner: treats each matrix independently and needs no parameters. Stacks are leaves [stages,
    layers, ...] under "layers".
    """

    def update(updates, state, params=None, **extra):
        update_one = functools.partial(optax.with_extra_args_support(inner).update, **extra)
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        follows = lambda part: jax.tree.structure(part) == tree
        # Parts of the state: trees like the parameters (each moment), and leaves that all
        # parameters share (the count of steps).
        parts, outline = jax.tree.flatten(state, is_leaf=follows)
        columns = [
            jax.tree.leaves(part) if follows(part) else [part] * len(leaves) for part in parts
        ]
        results = []
        for i, (path, gradient) in enumerate(leaves):
            layers = gradient.shape[1] if path[0].key == "layers" else 0
            leaf_state = [column[i] for column in columns]
            results.append(_layer_by_layer(update_one, gradient, leaf_state, outline, layers))
        new_updates, new_states = zip(*results, strict=True)
        new_columns = zip(*new_states, strict=True)
        new_parts = [
            jax.tree.unflatten(tree, column) if follows(part) else column[-1]
            for part, column in zip(parts, new_columns, strict=True)
        ]
        return jax.tree.unflatten(tree, new_updates), jax.tree.unflatten(outline, new_parts)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _layer_by_layer(
    update_one: Callable,
    gradient: jax.Array,
    state: list[jax.Array],
    outline: jax.tree_util.PyTreeDef,
    layers: int,
) -> tuple[jax.Array, list[jax.Array]]:
    """The update of one parameter, and its state, by a loop over the layers of a stack; at once for
    another parameter (0 layers).

    update_one: (gradient, state) → (update, state); state: the leaves of `outline`, the structure
    of this state for a single parameter.

    XLA runs one loop after the other. Without loops it fetches several parameters' states, and
    begins during the pipeline, when memory is scarcest. So a single update is a loop too, with a
    number of trips that XLA does not see.
    """

    def start(layer: jax.Array, a: jax.Array) -> tuple:
        return (0, layer if layers else 0, *[0] * (a.ndim - 2))[: a.ndim]

    def read_layer(layer: jax.Array, a: jax.Array) -> jax.Array:
        return read(a, start(layer, a), (a.shape[0], 1, *a.shape[2:]) if layers else a.shape)

    def update_layer(
        layer: jax.Array, carry: tuple[jax.Array, list[jax.Array]]
    ) -> tuple[jax.Array, list[jax.Array]]:
        gradient, leaves = carry  # the gradient's layers become the update's
        # A scalar counts steps: every layer begins from the count before the step.
        layer_state = [
            read_layer(layer, a) if a.ndim else before
            for a, before in zip(leaves, state, strict=True)
        ]
        update, new_state = update_one(
            read_layer(layer, gradient), jax.tree.unflatten(outline, layer_state)
        )
        pairs = zip(leaves, jax.tree.leaves(new_state), strict=True)
        return write(gradient, update, start(layer, gradient)), [
            write(a, b, start(layer, a)) if a.ndim else b for a, b in pairs
        ]

    return lax.fori_loop(
        0, layers if layers > 1 else lax.optimization_barrier(1), update_layer, (gradient, state)
    )
