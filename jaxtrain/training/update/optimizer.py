"""optax optimizers and learning-rate schedules from the config's `optimizer` group."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from jaxtrain.config import OptimizerConfig
from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.devices.host_memory import is_on_host, read, write
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.training.update.rounding import rounded


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


class Updated(NamedTuple):
    """The result of an update.

    values: the parameters' new values as float32, exactly as `params` has them, laid out as the
        gradients
    params: the parameters in their own types and memories
    state:  of the optimizer
    """

    values: Any
    params: Any
    state: Any


class Optimizer(NamedTuple):
    """An optimizer of a tree of parameters.

    init:   parameters → its state: optax's of the clipping, of the directions, of the decay and of
            the learning rate
    update: (gradients, state, parameters, finite, norm) → Updated. finite: a scalar; if it is
            false, parameters and state stay as they are, bit for bit. None: they change in any
            case. norm: of all gradients; None: these are all
    """

    init: Callable[[Any], Any]
    update: Callable[..., Updated]


# (gradient, leaves of the state, parameter, its key) → (new values in float32, leaves of the new
# state), of one parameter
UpdateOne = Callable[
    [jax.Array, list[jax.Array], jax.Array, jax.Array | None], tuple[jax.Array, list[jax.Array]]
]


def make_optimizer(
    cfg: OptimizerConfig,
    steps: int,
    specs: dict,
    moments: str = "float32",
    offload: bool = False,
    keys: Sequence[np.ndarray] | None = None,
) -> Optimizer:
    """The optimizer of `optimizer.name` (config/optimizers.py) with clipping by the global norm
    before it, and after it decay of weights (matrices decay, norm scales and biases do not) and the
    learning rate, which depends on the number of updates.

    A number is computed in float32. Where the parameter or the moment is of 16 bits, it is rounded
    up or down at random (training/update/rounding.py), since the nearest number is often the old
    one.

    specs: a pytree like the parameters, of Specs. Stacks are leaves [stages, layers, ...] under
        "layers". moments: type of the arrays of the state
    offload: the optimizer's state, and what the layout says of the parameters, is in the host's
        memory: `update` fetches it and writes it back leaf by leaf, and in stacks layer by layer.
    keys: for each parameter, in the order of the leaves, the keys of its random numbers [stages,
        layers, 2], or [2]; None where nothing is of 16 bits
    """
    specs_of, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    record, rates = OPTIMIZERS[cfg.name], learning_rate(cfg, steps)
    directions = record.make(jax, optax, cfg)

    def init(params):
        state = _init_directions(directions, params, specs_of, tree, record.elementwise)
        state = _with_moments(state, tree, moments)
        nothing = optax.EmptyState()
        # Checkpoints name the state's arrays by their places in this tuple.
        return nothing, state, nothing, optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(gradients, state, params, finite=None, norm=None):
        if cfg.clip_norm:
            norm = optax.tree.norm(gradients) if norm is None else norm
            gradients = _clipped(gradients, norm, cfg.clip_norm)
        _, of_directions, _, schedule = state
        count = schedule.count
        parts, trees, outline = parts_of(of_directions, tree)
        columns = [
            tree.flatten_up_to(part) if follows else [part] * len(specs_of)
            for part, follows in zip(parts, trees, strict=True)
        ]
        rate = rates(count)
        values, new_params, results = [], [], []
        for i, ((path, gradient), held) in enumerate(
            zip(
                jax.tree_util.tree_leaves_with_path(gradients),
                tree.flatten_up_to(params),
                strict=True,
            )
        ):
            decay = cfg.weight_decay if specs_of[i].matrix else 0.0
            one = _of_one(directions, outline, trees, decay, rate, count, finite)
            if not record.elementwise:
                one = _unstacked(one, specs_of[i], trees, gradient.shape)
            leaves = [column[i] for column in columns]
            key = jnp.asarray(keys[i]) if keys is not None else None
            if offload:
                layers = gradient.shape[1] if path[0].key == "layers" else 0
                value, held, new_state = _layer_by_layer(one, gradient, leaves, held, key, layers)
            else:
                value, new_state = one(gradient, leaves, held, key)
            values.append(value)
            new_params.append(held if is_on_host(held) else value.astype(held.dtype))
            results.append(new_state)
        after = _joined(results, trees, outline, tree)
        counted = count + 1 if finite is None else jnp.where(finite, count + 1, count)
        return Updated(
            tree.unflatten(values),
            tree.unflatten(new_params),
            (state[0], after, state[2], optax.ScaleByScheduleState(counted)),
        )

    return Optimizer(init, update)


def _clipped(gradients: Any, norm: jax.Array, limit: float) -> Any:
    """optax's clip_by_global_norm, of gradients that may be some of those whose norm this is."""
    clip = lambda g: lax.select(norm < limit, g, g * (limit / norm).astype(g.dtype))
    return jax.tree.map(clip, gradients)


def updates_made(state: Any) -> jax.Array:
    """The number of updates in a state of `make_optimizer`, int32: of steps without skipped
    ones."""
    return state[-1].count


def parts_of(state: Any, tree: Any) -> tuple[list, list[bool], Any]:
    """The parts of an optimizer's state: trees like the parameters (each moment), and leaves that
    all parameters share (the count of steps).

    tree: the parameters' structure. Returns the parts, for each whether it is a tree, and the
    structure whose leaves they are.
    """
    follows = lambda part: jax.tree.structure(part) == tree
    parts, outline = jax.tree.flatten(state, is_leaf=follows)
    return parts, [follows(part) for part in parts], outline


def _joined(results: list[list], trees: list[bool], outline: Any, tree: Any) -> Any:
    """The state of all parameters from the leaves of each one's."""
    columns = zip(*results, strict=True)
    return outline.unflatten(
        tree.unflatten(column) if follows else column[-1]
        for column, follows in zip(columns, trees, strict=True)
    )


def _init_directions(
    directions: optax.GradientTransformation,
    params: Any,
    specs_of: list[Spec],
    tree: Any,
    elementwise: bool,
) -> Any:
    """The state of the directions before the first step. Where an update depends on all numbers of
    a layer's parameter, that of each layer on its own, without padding."""
    if elementwise:
        return directions.init(params)
    _, trees, outline = parts_of(jax.eval_shape(directions.init, params), tree)
    results = []
    for array, spec in zip(tree.flatten_up_to(params), specs_of, strict=True):
        start = lambda a, s=spec: jax.tree.leaves(directions.init(a[: s.shape[0]]))
        for _ in array.shape[: -len(spec.shape)]:
            start = jax.vmap(start, out_axes=[0 if follows else None for follows in trees])
        results.append(start(array))
    return _joined(results, trees, outline, tree)


def _with_moments(state: Any, tree: Any, dtype: str) -> Any:
    """The state with its trees, of the structure `tree`, in this type."""
    parts, trees, outline = parts_of(state, tree)
    cast = lambda part: jax.tree.map(lambda a: a.astype(dtype), part)
    return outline.unflatten(
        cast(part) if follows else part for part, follows in zip(parts, trees, strict=True)
    )


def _of_one(
    directions: optax.GradientTransformation,
    outline: Any,
    trees: list[bool],
    decay: float,
    rate: jax.Array,
    count: jax.Array,
    finite: jax.Array | None,
) -> UpdateOne:
    """The update of one parameter. outline, trees: of the state, as of `parts_of`."""

    def one(gradient, leaves, held, key):
        value = held.astype(jnp.float32)
        wide = [
            a.astype(jnp.float32) if follows else a
            for a, follows in zip(leaves, trees, strict=True)
        ]
        direction, new_state = directions.update(gradient, outline.unflatten(wide), value)
        if decay:
            direction = direction + decay * value
        new = [value - rate * direction, *jax.tree.leaves(new_state)]
        old = [held, *leaves]
        new = [
            rounded(a, before.dtype, key, count, use)
            for use, (a, before) in enumerate(zip(new, old, strict=True))
        ]
        if finite is not None:
            new = [jnp.where(finite, a, before) for a, before in zip(new, old, strict=True)]
        return new[0].astype(jnp.float32), new[1:]

    return one


def _unstacked(one: UpdateOne, spec: Spec, trees: list[bool], shape: tuple[int, ...]) -> UpdateOne:
    """`one` for each layer of a stack, without the rows that pad a parameter. shape: the array's,
    with the stack's dimensions in front."""
    rows, padding = spec.shape[0], spec.padded[0] - spec.shape[0]

    def unpadded(gradient, leaves, held, key):
        value, new_leaves = one(gradient[:rows], leaves, held[:rows], key)
        return jnp.pad(value, [(0, padding), *[(0, 0)] * (value.ndim - 1)]), new_leaves

    update, of_state = unpadded, [0 if follows else None for follows in trees]
    for _ in shape[: -len(spec.shape)]:
        update = jax.vmap(update, in_axes=(0, of_state, 0, 0), out_axes=(0, of_state))
    return update


def _layer_by_layer(
    one: UpdateOne,
    gradient: jax.Array,
    state: list[jax.Array],
    held: jax.Array,
    key: jax.Array | None,
    layers: int,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """`one` by a loop over the layers of a stack; at once for another parameter (0 layers). Returns
    (new values, the parameter, leaves of the new state); only a parameter in the host's memory is
    written, for the others are the new values.

    XLA runs one loop after the other. Without loops it fetches several parameters' states, and
    begins during the pipeline, when memory is scarcest. So a single update is a loop too, with a
    number of trips that XLA does not see.
    """

    def start(layer: jax.Array, a: jax.Array) -> tuple:
        return (0, layer if layers else 0, *[0] * (a.ndim - 2))[: a.ndim]

    def read_layer(layer: jax.Array, a: jax.Array) -> jax.Array:
        return read(a, start(layer, a), (a.shape[0], 1, *a.shape[2:]) if layers else a.shape)

    def update_layer(
        layer: jax.Array, carry: tuple[jax.Array, jax.Array, list[jax.Array]]
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        gradient, held, leaves = carry  # the gradient's layers become the new values'
        # A scalar counts steps: every layer begins from the count before the step.
        layer_state = [
            read_layer(layer, a) if a.ndim else before
            for a, before in zip(leaves, state, strict=True)
        ]
        value, new_state = one(
            read_layer(layer, gradient),
            layer_state,
            read_layer(layer, held),
            None if key is None else read_layer(layer, key),
        )
        if is_on_host(held):
            held = write(held, value.astype(held.dtype), start(layer, held))
        pairs = zip(leaves, new_state, strict=True)
        return (
            write(gradient, value, start(layer, gradient)),
            held,
            [write(a, b, start(layer, a)) if a.ndim else b for a, b in pairs],
        )

    trips = layers if layers > 1 else lax.optimization_barrier(1)
    return lax.fori_loop(0, trips, update_layer, (gradient, held, state))
