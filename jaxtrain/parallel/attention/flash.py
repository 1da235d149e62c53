"""Attention that never has all scores in memory: the interface of its kernels, and its gradient.

A kernel returns the output and the log-sum-exp (lse) of each query's scores. The backward needs
nothing else of the forward. With delta = Σ gradient · output of each query, it computes the scores
once more, a block at a time (FlashAttention-2, Dao 2023, algorithm 2),

    P = exp(S − lse)    dV = Pᵀ dO    dS = P ∘ (dO Vᵀ − delta)    dQ = dS K    dK = dSᵀ Q

The kernels are in parallel/attention/blockwise.py (plain XLA), parallel/attention/splash.py (TPUs)
and parallel/attention/cudnn.py (NVIDIA GPUs).

Shape suffixes: B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dimension
of queries and keys, V of values.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import MODEL, over_model
from jaxtrain.parallel.attention.context import Sight
from jaxtrain.parallel.attention.heads import HEADS, row_major, row_major_part

MASKED = -1e30  # the log-sum-exp of a query that sees nothing
LSE = P(None, MODEL)  # of a log-sum-exp [B, N, T]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Attention to some of the keys, on a device's own heads.

    forward: (q [B, T, N, H], k [B, S, K, H], v [B, S, K, V], sight, segments, dtype) → output [B,
        T, N, V] of `dtype`, lse float32 [B, T, N]; 0 and MASKED for a query that sees nothing.
    backward: (q, k, v, gradient of the output [B, T, N, V], output, lse, sight, segments, dtype) →
        gradients of q, of `dtype`, and of k and v. Output and lse may be those of more keys than
        these.

    sight: the keys that queries see (context.Sight). segments: None, or int32 ([B, T] of the
    queries, [B, S] of the keys): a query sees its own segment alone.
    """

    forward: Callable
    backward: Callable


def delta(g_BTNV: jax.Array, out_BTNV: jax.Array) -> jax.Array:
    """Σ gradient · output of each query and head, float32 [B, T, N]."""
    return jnp.einsum("btnv,btnv->btn", g_BTNV, out_BTNV, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(kernel: Kernel, q_BTNH, k_BSKH, v_BSKV, sight: Sight, segments=None) -> jax.Array:
    """Attention by a kernel → [B, T, N, V]; the heads of all arrays are split over `model`."""
    return _attend(kernel, q_BTNH, k_BSKH, v_BSKV, sight, segments)[0]


def _attend(kernel, q, k, v, sight, segments):
    """The log-sum-exp goes to the backward as [B, N, T], the order in which TPU's and GPU's kernels
    write and read it: in another one entire pools would be transposed in every tick, and, where
    they lie on the host, moved to the device and back (seen in programs compiled ahead of time)."""

    def run(*arguments):
        out, lse_BTN = kernel.forward(*arguments, dtype=v.dtype)
        return out, row_major_part(jnp.moveaxis(lse_BTN, 2, 1))

    out, lse_BNT = over_model(run, (HEADS, HEADS, HEADS, P(), P()), (HEADS, LSE))(
        q, k, v, sight, segments
    )
    out = row_major(out)
    return out, (q, k, v, sight, segments, out, lse_BNT)


def _attend_backward(kernel, residuals, g):
    q, k, v, sight, segments, out, lse_BNT = residuals

    def run(q, k, v, g, out, lse_BNT, *seen):
        lse_BTN = jnp.moveaxis(row_major_part(lse_BNT), 1, 2)
        return kernel.backward(q, k, v, g, out, lse_BTN, *seen, dtype=q.dtype)

    by_inputs = over_model(run, (*(HEADS,) * 5, LSE, P(), P()), HEADS)(
        q, k, v, g, out, lse_BNT, sight, segments
    )
    return *(d.astype(a.dtype) for d, a in zip(by_inputs, (q, k, v), strict=True)), None, None


attend.defvjp(_attend, _attend_backward)
