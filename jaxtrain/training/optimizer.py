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
from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.devices.host_memory import read, write
from jaxtrain.models.spec import Spec, is_spec


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
    """The optimizer of `optimizer.name` (config/optimizers.py) with clipping by the global norm
    before it, and after it decay of weights (matrices decay, norm scales and biases do not) and the
    learning rate.

    specs: a pytree like the parameters, of Specs. offload: the optimizer's state is in the host's
        memory, and `update` fetches it leaf by leaf.
    `update` takes the norm of all gradients, `norm`, if its caller knows it.
    skips: `update` takes a scalar `finite`; if that is false, the state and the count of updates,
        on which the learning rate depends, stay as they are. The caller keeps the parameters.
    """
    decays = jax.tree.map(lambda s: s.matrix, specs, is_leaf=is_spec)
    guarded = where_finite if skips else lambda inner: inner
    record = OPTIMIZERS[cfg.name]
    directions = guarded(record.make(optax, cfg))
    if offload or not record.elementwise:
        directions = by_parameter(directions, specs, record.elementwise, offload)
    parts = [
        # A part also without clipping, so that the state's structure, which checkpoints have, does
        # not depend on it.
        clip_by_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        directions,
        optax.add_decayed_weights(cfg.weight_decay, decays),
        guarded(optax.scale_by_learning_rate(learning_rate(cfg, steps))),
    ]
    return optax.chain(*parts)


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """optax's clip_by_global_norm, of gradients that may be a part of those whose norm this is."""

    def update(updates, state, params=None, *, norm=None, **_):
        norm = optax.tree.norm(updates) if norm is None else norm
        clips = lambda g: lax.select(norm < limit, g, (g / norm.astype(g.dtype)) * limit)
        return jax.tree.map(clips, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


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


def parts_of(state: Any, tree: Any) -> tuple[list, list[bool], Any]:
    """The parts of an optimizer's state: trees like the parameters (each moment), and leaves that
    all parameters share (the count of steps).

    tree: the parameters' structure. Returns the parts, for each whether it is a tree, and the
    structure whose leaves they are.
    """
    follows = lambda part: jax.tree.structure(part) == tree
    parts, outline = jax.tree.flatten(state, is_leaf=follows)
    return parts, [follows(part) for part in parts], outline


def by_parameter(
    inner: optax.GradientTransformation, specs: dict, elementwise: bool, offload: bool
) -> optax.GradientTransformationExtraArgs:
    """`inner` for each parameter on its own, with a state of the same structure.

    specs: a pytree like the parameters, of Specs. Stacks are leaves [stages, layers, ...] under
        "layers", and their layers are separate parameters.
    elementwise: `inner` treats each number on its own and needs no parameters. Otherwise it gets
        parameters without leading dimensions and without padding.
    offload: its state is in the host's memory: it is fetched and written back leaf by leaf, and in
        stacks layer by layer.
    """
    tree: Any
    specs_of, tree = jax.tree.flatten(specs, is_leaf=is_spec)

    def joined(results: list[list], trees: list[bool], outline: Any) -> Any:
        columns = zip(*results, strict=True)
        return outline.unflatten(
            tree.unflatten(column) if follows else column[-1]
            for column, follows in zip(columns, trees, strict=True)
        )

    def init(params):
        if elementwise:
            return inner.init(params)
        _, trees, outline = parts_of(jax.eval_shape(inner.init, params), tree)
        results = []
        for array, spec in zip(tree.flatten_up_to(params), specs_of, strict=True):
            start = lambda a, s=spec: jax.tree.leaves(inner.init(a[: s.shape[0]]))
            for _ in array.shape[: -len(spec.shape)]:
                start = jax.vmap(start, out_axes=[0 if follows else None for follows in trees])
            results.append(start(array))
        return joined(results, trees, outline)

    def update(updates, state, params=None, **extra):
        update_one = functools.partial(optax.with_extra_args_support(inner).update, **extra)
        parts, trees, outline = parts_of(state, tree)
        columns = [
            tree.flatten_up_to(part) if follows else [part] * len(specs_of)
            for part, follows in zip(parts, trees, strict=True)
        ]
        values = [None] * len(specs_of) if elementwise else tree.flatten_up_to(params)
        new_updates, results = [], []
        for i, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(updates)):
            one = _with_lists(update_one, outline)
            if not elementwise:
                one = _unstacked(one, specs_of[i], trees, gradient.shape)
            if offload:
                layers = gradient.shape[1] if path[0].key == "layers" else 0
                one = functools.partial(_layer_by_layer, one, layers=layers)
            new_update, new_state = one(gradient, [column[i] for column in columns], values[i])
            new_updates.append(new_update)
            results.append(new_state)
        return tree.unflatten(new_updates), joined(results, trees, outline)

    return optax.GradientTransformationExtraArgs(init, update)


# (gradient, leaves of the state, parameter) → (update, leaves of the new state), of one parameter
UpdateOne = Callable[
    [jax.Array, list[jax.Array], jax.Array | None], tuple[jax.Array, list[jax.Array]]
]


def _with_lists(update: Callable, outline: Any) -> UpdateOne:
    """`update`, of an optimizer whose state has this structure, for one parameter."""

    def one(gradient, leaves, value):
        new_update, new_state = update(gradient, outline.unflatten(leaves), value)
        return new_update, jax.tree.leaves(new_state)

    return one


def _unstacked(one: UpdateOne, spec: Spec, trees: list[bool], shape: tuple[int, ...]) -> UpdateOne:
    """`one` for each layer of a stack, without the rows that pad a parameter. shape: the array's,
    with the stack's dimensions in front."""
    rows, padding = spec.shape[0], spec.padded[0] - spec.shape[0]

    def unpadded(gradient, leaves, value):
        new_update, new_leaves = one(gradient[:rows], leaves, value[:rows])
        return jnp.pad(new_update, [(0, padding), *[(0, 0)] * (new_update.ndim - 1)]), new_leaves

    update, of_state = unpadded, [0 if follows else None for follows in trees]
    for _ in shape[: -len(spec.shape)]:
        update = jax.vmap(update, in_axes=(0, of_state, 0), out_axes=(0, of_state))
    return update


def _layer_by_layer(
    one: UpdateOne,
    gradient: jax.Array,
    state: list[jax.Array],
    value: jax.Array | None,
    layers: int,
) -> tuple[jax.Array, list[jax.Array]]:
    """`one` by a loop over the layers of a stack; at once for another parameter (0 layers).

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
        layer_value = None if value is None else read_layer(layer, value)
        update, new_state = one(read_layer(layer, gradient), layer_state, layer_value)
        pairs = zip(leaves, new_state, strict=True)
        return write(gradient, update, start(layer, gradient)), [
            write(a, b, start(layer, a)) if a.ndim else b for a, b in pairs
        ]

    return lax.fori_loop(
        0, layers if layers > 1 else lax.optimization_barrier(1), update_layer, (gradient, state)
    )
