"""Attention that never has all scores in memory: the interface of its kernels, and its gradient.

Begin with `Kernel`. A kernel returns the output and the log-sum-exp (lse) of each query's scores.
The backward needs nothing else of the forward. With delta = Σ gradient · output of each query, it
computes the scores once more, a block at a time (FlashAttention-2, Dao 2023, algorithm 2),

    P = exp(S − lse)    dV = Pᵀ dO    dS = P ∘ (dO Vᵀ − delta)    dQ = dS K    dK = dSᵀ Q

A sink (gpt-oss) is one more score of each query's softmax, whose value is 0. No kernel knows it:
attention with a sink is attention without it, times exp(lse − total), where total is the logarithm
of exp(lse) + exp(sink). With that output and total for lse the formulas above hold, as for a part
of the keys, and the sink's gradient is −Σ exp(sink − total) · delta.

The kernels are in parallel/attention/blockwise.py (plain XLA), parallel/attention/splash.py (TPUs)
and parallel/attention/cudnn.py (NVIDIA GPUs).

Shape suffixes: B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dimension
of queries and keys, V of values.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import MODEL, over_model
from jaxtrain.parallel.attention.heads import HEADS, row_major, row_major_part

MASKED = -1e30  # the log-sum-exp of a query that sees nothing


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["full_chunks", "start"],
    meta_fields=["pairs", "diagonal", "window"],
)
@dataclasses.dataclass(frozen=True)
class Sight:
    """The keys that queries see. Both are cut into chunks of one length. A chunk of queries sees
    the lowest `full_chunks` chunks of keys in full, and with `diagonal`, the keys of the next chunk
    up to each query's position.

    full_chunks: int32 [chunks of queries], as an array or numbers; pairs: their sum, which is the
        same on every device
    start: int32, the number of keys before these chunks, which all queries see; negative where the
        keys begin after the queries do; for splash alone
    window: the number of keys that a query sees at most, the last ones of those above; 0: all. It
        needs the diagonal, and queries in one chunk are then the last tokens of the keys
    """

    full_chunks: jax.Array | tuple[int, ...]
    pairs: int = 0
    diagonal: bool = True
    start: jax.Array | None = None
    window: int = 0


CAUSAL = Sight((0,))  # of an unsplit sequence


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sinks"],
    meta_fields=["scale", "softcap", "dropout"],
)
@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores follow from products of queries and keys, and weights from scores, but for the
    mask.

    scale:   factor of a product; 0: 1/sqrt(size of a key)
    softcap: c, which makes c·tanh(s/c) of that (Gemma 2, arXiv:2408.00118, section 2); 0: nothing
    dropout: the fraction of weights that are dropped where there is noise (parallel/dropout.py)
    sinks:   one more score for all queries of a head, [N], whose value is 0; or None
    """

    scale: float = 0.0
    softcap: float = 0.0
    dropout: float = 0.0
    sinks: jax.Array | None = None

    def factor(self, key_size: int) -> float:
        """The factor of a product of a query and a key of this size."""
        return self.scale or key_size**-0.5


PLAIN = Scores()


class Inputs(NamedTuple):
    """The arrays of attention, of a device's own heads.

    q, k, v:  [B, T, N, H], [B, S, K, H] and [B, S, K, V]
    sight:    the keys that queries see
    segments: None, or int32 ([B, T] of the queries, [B, S] of the keys): the document of each
              token; a query sees keys of its own document alone
    noise:    None, or uint32 [B, T, N], of each query and head (parallel/dropout.py): it and the
              distance of query and key say whether a weight is dropped, so it does not matter which
              keys a device has. Of the kernels blockwise.py alone reads it
    scores:   from products to weights; no kernel reads the sinks
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sight: Sight
    segments: tuple[jax.Array, jax.Array] | None = None
    noise: jax.Array | None = None
    scores: Scores = PLAIN

    def part(self, queries: slice, keys: slice) -> "Inputs":
        """Some of the queries and of the keys, with the sight as it is."""
        segments, noise = self.segments, self.noise
        return self._replace(
            q=self.q[:, queries],
            k=self.k[:, keys],
            v=self.v[:, keys],
            segments=None if segments is None else (segments[0][:, queries], segments[1][:, keys]),
            noise=None if noise is None else noise[:, queries],
        )


class AttentionResiduals(NamedTuple):
    """The arrays that the backward reads, besides the gradient of the output.

    out: [B, T, N, V]
    lse: float32, the log-sum-exp of each query's scores, [B, T, N]

    Output and lse may be those of more keys than the inputs': the formulas above hold for any part
    of the keys, which lets a ring go through them part by part.
    """

    inputs: Inputs
    out: jax.Array
    lse: jax.Array


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Attention of a device's queries to keys that it has.

    forward:  (inputs, dtype) → output [B, T, N, V] of `dtype`, lse float32 [B, T, N]; 0 and MASKED
              for a query that sees nothing
    backward: (residuals, gradient of the output [B, T, N, V], dtype) → gradients of q, of `dtype`,
              and of k and v, float32 or of `dtype`
    """

    forward: Callable
    backward: Callable


# splits over `model`: heads are on different devices, sight and segments the same on all
SINKS = P(MODEL)
SPLITS = Inputs._make((HEADS, HEADS, HEADS, P(), P(), HEADS, SINKS))
LSE = P(None, MODEL)  # of a log-sum-exp [B, N, T]


def padded(a: jax.Array, axis: int, before: int, after: int = 0, value: float = 0.0) -> jax.Array:
    """The array with so many more numbers of this value before and after an axis."""
    # Nothing is padded where nothing is missing: pad makes a new array, which the backward would
    # save besides the other.
    if not before and not after:
        return a
    widths = [(0, 0)] * a.ndim
    widths[axis] = before, after
    return jnp.pad(a, widths, constant_values=value)


def delta(g_BTNV: jax.Array, out_BTNV: jax.Array) -> jax.Array:
    """Σ gradient · output of each query and head, float32 [B, T, N]."""
    return jnp.einsum("btnv,btnv->btn", g_BTNV, out_BTNV, preferred_element_type=jnp.float32)


def with_sinks(out_BTNV: jax.Array, lse_BTN: jax.Array, sinks_N: jax.Array | None):
    """Output, of its type, and log-sum-exp with the sinks, if there are any."""
    if sinks_N is None:
        return out_BTNV, lse_BTN
    total = jnp.logaddexp(lse_BTN, sinks_N.astype(jnp.float32))
    return (out_BTNV * jnp.exp(lse_BTN - total)[..., None]).astype(out_BTNV.dtype), total


def gradient_of_sinks(sinks_N: jax.Array | None, g_BTNV, out_BTNV, lse_BTN) -> jax.Array | None:
    """The sinks' gradient [N], by the output and log-sum-exp with them."""
    if sinks_N is None:
        return None
    weights = jnp.exp(sinks_N.astype(jnp.float32) - lse_BTN)
    return -(weights * delta(g_BTNV, out_BTNV)).sum((0, 1)).astype(sinks_N.dtype)


def input_gradients(inputs: Inputs, of_arrays, of_sinks: jax.Array | None) -> Inputs:
    """The gradient of the inputs, in the form in which a custom_vjp takes it, by those of q, k and
    v, here cast to their types, and of the sinks."""
    cast = [d.astype(a.dtype) for d, a in zip(of_arrays, inputs[:3], strict=True)]
    # None: the others have no gradients
    scores = dataclasses.replace(inputs.scores, sinks=of_sinks)
    return Inputs._make((*cast, None, None, None, scores))


# A custom_vjp: kernels have no gradient that jax knows, and one of plain XLA's loop would save the
# scores of every block.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(kernel: Kernel, inputs: Inputs) -> jax.Array:
    """Attention by a kernel → [B, T, N, V]; the heads of all arrays are split over `model`."""
    return _attend(kernel, inputs)[0]


def _attend(kernel, inputs: Inputs):
    """The output, and AttentionResiduals with the log-sum-exp as [B, N, T]."""

    # [B, N, T] is the order in which TPU's and GPU's kernels write and read the log-sum-exp. In
    # another one entire pools would be transposed in every tick, and, where they lie on the host,
    # moved to the device and back (seen in programs compiled ahead of time).
    def run(inputs: Inputs):
        out, lse_BTN = kernel.forward(inputs, inputs.v.dtype)
        out, lse_BTN = with_sinks(out, lse_BTN, inputs.scores.sinks)
        return out, row_major_part(jnp.moveaxis(lse_BTN, 2, 1))

    out, lse_BNT = over_model(run, (SPLITS,), (HEADS, LSE))(inputs)
    # Without this XLA lays the output out by heads, and transposes it for the next product.
    out = row_major(out)
    return out, AttentionResiduals(inputs, out, lse_BNT)


def _attend_backward(kernel, residuals, g):
    def run(residuals: AttentionResiduals, g):
        lse_BTN = jnp.moveaxis(row_major_part(residuals.lse), 1, 2)
        residuals = residuals._replace(lse=lse_BTN)
        inputs = residuals.inputs
        of_sinks = gradient_of_sinks(inputs.scores.sinks, g, residuals.out, lse_BTN)
        return kernel.backward(residuals, g, inputs.q.dtype), of_sinks

    # On each device's own heads: the partitioner cannot split a kernel, and would gather its
    # inputs.
    gradients, of_sinks = over_model(
        run, (AttentionResiduals._make((SPLITS, HEADS, LSE)), HEADS), (HEADS, SINKS)
    )(residuals, g)
    return (input_gradients(residuals.inputs, gradients, of_sinks),)


attend.defvjp(_attend, _attend_backward)
