"""optax optimizers and learning-rate schedules from the config's `optimizer` group."""

from collections.abc import Callable

import jax
import optax

from jaxtrain.models.spec import Spec


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


def make_optimizer(cfg, steps: int, specs: dict) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) with clipping by the global norm; matrices decay, norm scales and biases do not.

    specs: a pytree like the parameters, of Specs.
    """
    decays = jax.tree.map(lambda s: s.matrix, specs, is_leaf=lambda s: isinstance(s, Spec))
    parts = [
        # One part also where nothing is clipped: the state's structure, which a checkpoint holds, does not depend on it.
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        optax.scale_by_adam(cfg.b1, cfg.b2, cfg.epsilon),
        optax.add_decayed_weights(cfg.weight_decay, decays),
        optax.scale_by_learning_rate(learning_rate(cfg, steps)),
    ]
    return optax.chain(*parts)
