"""A batch on its way to the ops of a step.

`look_ahead` and `with_noise` add what training reads beside tokens, targets and weights, while the
arrays are global. `with_scaled_weights` divides weights inside the manual region, so that losses
are plain sums. An op reads `extra_inputs` of its microbatch.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxtrain.config import ResolvedModel
from jaxtrain.devices.mesh import psum
from jaxtrain.parallel.attention import context
from jaxtrain.parallel.dropout import token_noise
from jaxtrain.runtime.tick_state import Tree


def look_ahead(batch: Tree, depth: int) -> Tree:
    """A batch of full sequences [..., T] with what the modules of multi-token prediction need, if
    there are any, under "mtp": for module d = "0", "1", … the tokens d + 1 positions later, with
    their targets and weights. The weights are 0 where a document or the sequence ends before."""
    # Tokens a b c d with targets b c d e: module "0" gets tokens b c d 0 and targets c d e 0, so at
    # position 0 it reads b and predicts c, the second token after a.
    modules = {}
    for d in range(depth):
        later = lambda a, d=d: jnp.pad(a[..., d + 1 :], (*[(0, 0)] * (a.ndim - 1), (0, d + 1)))
        module = {name: later(batch[name]) for name in ("tokens", "targets", "weights")}
        if "segments" in batch:
            same = batch["segments"] == later(batch["segments"])
            module["weights"] = jnp.where(same, module["weights"], 0)
        modules[str(d)] = module
    return {**batch, "mtp": modules} if depth else batch


def with_noise(batch: Tree, seed: int, first_step: ArrayLike, steps: int, replicas: int) -> Tree:
    """A batch of so many steps with the noise of its tokens (parallel/dropout.py): an array like
    the others, whose shards a device has with its tokens. replicas: that train separately"""
    shape = (batch["tokens"].shape[0] // steps, *batch["tokens"].shape[1:])
    of_steps = [token_noise(seed, first_step + i, shape, replicas) for i in range(steps)]
    return {**batch, "noise": jnp.concatenate(of_steps)}


def with_scaled_weights(
    batch: Tree, cfg: ResolvedModel, steps: int, axes: tuple[str, ...]
) -> tuple[Tree, jax.Array]:
    """Returns (the batch of so many steps, its weights scaled to a sum of 1 in each step, and those
    of the modules of multi-token prediction together to `mtp_weight`; the number of weighted
    tokens, a scalar, or [steps] for several). axes: of the mesh, over which the batch is split"""
    # Tokens are counted before the first tick: the first microbatch's backward runs before the last
    # one's forward, and divides by them.
    weights, tokens = _scaled_to(1.0, batch["weights"], steps, axes)
    batch = {**batch, "weights": weights}
    if "mtp" in batch:
        share = cfg.mtp_weight / cfg.mtp_depth
        batch["mtp"] = {
            d: {**module, "weights": _scaled_to(share, module["weights"], steps, axes)[0]}
            for d, module in batch["mtp"].items()
        }
    return batch, tokens


def _scaled_to(
    target: float, weights: jax.Array, steps: int, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns (the weights scaled to a sum of `target` over the global batch of each step, their
    sum before). axes: of the mesh, over which the batch is split"""
    # A batch without weighted tokens has a loss of 0, and no division by 0.
    if steps == 1:
        total = psum(weights.astype(jnp.float32).sum(), axes)
        return weights * (target / jnp.maximum(total, 1)), total
    of_steps = weights.reshape(steps, -1, *weights.shape[1:])
    total = psum(of_steps.astype(jnp.float32).sum((1, 2, 3)), axes)
    scale = target / jnp.maximum(total, 1)
    return (of_steps * scale[:, None, None, None]).reshape(weights.shape), total


def extra_inputs(batch: Tree, microbatch) -> tuple[jax.Array | None, ...]:
    """What every layer reads beside its input: positions [B or 1, T]; segments [B, T] or, if a
    sequence is one document, None; in training with dropout also noise (parallel/dropout.py)."""
    of = lambda name: take(batch[name], microbatch) if name in batch else None
    positions, noise = of("positions"), of("noise")
    if positions is None:
        positions = context.positions(batch["tokens"].shape[-1])
    return positions, of("segments"), *(() if noise is None else (noise,))


def take(a, i):
    """a[i] for a traced i."""
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)
