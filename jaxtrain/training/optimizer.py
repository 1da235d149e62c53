"""optax optimizers and learning-rate schedules from the config's `optimizer` group."""

from collections.abc import Callable

import jax
import optax
from jax import lax

from jaxtrain.models.spec import Spec
from jaxtrain.parallel.host_memory import read, write


def learning_rate(cfg, steps: int) -> Callable:
    """step → learning rate: linear warm-up over `warmup_steps`, then down to `final_fraction` of the peak by step `steps`.

    cosine, linear: all the way; constant: only over the last `decay_steps` (none if 0).
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
            decay = optax.join_schedules([decay, optax.linear_schedule(peak, end, cfg.decay_steps)], [flat])
    if not warm:
        return decay
    # The first step already moves: step 0 has 1/warm of the peak.
    return optax.join_schedules([optax.linear_schedule(peak / warm, peak, max(1, warm - 1)), decay], [warm])


def make_optimizer(cfg, steps: int, specs: dict, offload: bool = False) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) with clipping by the global norm; matrices decay, norm scales and biases do not.

    specs: a pytree like the parameters, of Specs. offload: the moments lie in the host's memory, and `update` fetches them leaf by leaf.
    """
    decays = jax.tree.map(lambda s: s.matrix, specs, is_leaf=lambda s: isinstance(s, Spec))
    moments = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.epsilon)
    parts = [
        # One part also where nothing is clipped: the state's structure, which a checkpoint holds, does not depend on it.
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        leaf_by_leaf(moments) if offload else moments,
        optax.add_decayed_weights(cfg.weight_decay, decays),
        optax.scale_by_learning_rate(learning_rate(cfg, steps)),
    ]
    return optax.chain(*parts)


def leaf_by_leaf(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, which treats each matrix by itself and needs no parameters, with what it keeps for each in the host's memory: fetched and
    put back leaf by leaf, and of stacks of layers, leaves [stages, rows, ...] under "layers", row by row."""

    def update(updates, state, params=None):
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        follows = lambda part: jax.tree.structure(part) == tree
        parts, whole = jax.tree.flatten(state, is_leaf=follows)
        by_leaf = [jax.tree.leaves(part) if follows(part) else [part] * len(leaves) for part in parts]
        made = []
        for i, (path, gradient) in enumerate(leaves):
            rows = gradient.shape[1] if path[0].key == "layers" else 0
            made.append(_in_turn(inner, gradient, [own[i] for own in by_leaf], whole, rows))
        outs, news = zip(*made, strict=True)
        new = [
            jax.tree.unflatten(tree, own) if follows(part) else own[-1] for part, own in zip(parts, zip(*news, strict=True), strict=True)
        ]
        return jax.tree.unflatten(tree, outs), jax.tree.unflatten(whole, new)

    return optax.GradientTransformation(inner.init, update)


def _in_turn(inner, gradient: jax.Array, state: list, whole, rows: int) -> tuple[jax.Array, list]:
    """The update of one parameter, and its state, by a loop over the rows of a stack; of something else (0 rows) all at once.

    XLA runs one loop after the other. Without loops it fetches several parameters' states, and begins during the pipeline, where memory
    is scarcest; so what is done once is a loop, too, of a number of trips that XLA does not see.
    """

    def row(r, carry):
        gradient, new = carry  # the gradient's rows become the update's
        start = lambda a: (0, r if rows else 0, *[0] * (a.ndim - 2))[: a.ndim]
        own = lambda a: read(a, start(a), (a.shape[0], 1, *a.shape[2:]) if rows else a.shape)
        here = [own(a) if a.ndim else old for a, old in zip(new, state, strict=True)]
        out, here = inner.update(own(gradient), jax.tree.unflatten(whole, here))
        new = [write(a, b, start(a)) if a.ndim else b for a, b in zip(new, jax.tree.leaves(here), strict=True)]
        return write(gradient, out, start(gradient)), new

    return lax.fori_loop(0, rows if rows > 1 else lax.optimization_barrier(1), row, (gradient, state))
