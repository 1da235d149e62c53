"""Attention over all devices: the choice of a kernel, and of the collectives for a split sequence.

`attend_causal` is what the models call. The table of config/kernels.py says which kernel. An
unsplit sequence goes to the kernel as it is; one that is split over `context` goes by gathering the
keys, by exchanging tokens for heads (ulysses) or around a ring (parallel/attention/context.py).
`attend` is attention in plain XLA that computes all scores, for short sequences and for a cache.

Shape suffixes: B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dimension,
R the query heads of a key/value head × tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxtrain.config.kernels import (
    CUDNN,
    CUDNN_MASK,
    SPLASH,
    TPU,
    XLA,
    AttentionCase,
    attention_kernel,
)
from jaxtrain.devices.sharding import constrain, shards
from jaxtrain.parallel.attention import blockwise, context, cudnn, flash, kv_cache, ring, splash
from jaxtrain.parallel.attention.flash import Kernel
from jaxtrain.parallel.attention.heads import by_heads
from jaxtrain.parallel.dropout import WEIGHTS, WeightDropout, dropped
from jaxtrain.parallel.random_bits import combined
from jaxtrain.parallel.target_device import target_device

HEADS = ("batch", "token", "heads", None)
KV_HEADS = ("batch", "token", "kv_heads", None)
# The scope of attention in the program: planner/programs/measured_step.py tells its products in a
# profile by it.
SCOPE = "attention"


def attend(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    mask=None,
    mask_is_causal: bool = False,
    dropout: WeightDropout | None = None,
) -> jax.Array:
    """Scaled dot-product attention in plain XLA → [B, T, N, H of v]. Keys and values may have a
    head for several query heads, and values another size than keys.

    mask: bool [B or 1, 1, T, S], true where a query sees a key; None: causal, with T = S
    mask_is_causal: no query of the mask sees a later key (T = S), so most of the scores above the
        diagonal are not computed; the result is the same
    """
    out = grouped_attention(q_BTNH, k_BSKH, v_BSKH, mask, mask_is_causal, dropout)
    return constrain(out, HEADS)


def attend_by_cudnn_mask(q_BTNH, k_BSKH, v_BSKH, mask) -> jax.Array:
    """`attend` by cuDNN, which adds the mask to the scores as numbers."""
    # jax's function wants keys and values of one size: the smaller ones are padded with zeros,
    # which change no score, and the padding of the result is cut off.
    (size, of_values), scale = (q_BTNH.shape[-1], v_BSKH.shape[-1]), q_BTNH.shape[-1] ** -0.5

    def filled(a):
        missing = max(size, of_values) - a.shape[-1]
        # Nothing is padded where nothing is missing: pad makes a new array, which the backward
        # would save besides the other.
        return jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else a

    def kernel(q, k, v, m):
        result = jax.nn.dot_product_attention(
            *map(filled, (q, k, v)), mask=m, scale=scale, implementation="cudnn"
        )
        return result[..., :of_values]

    return constrain(by_heads(kernel, (q_BTNH, k_BSKH, v_BSKH), (mask,)), HEADS)


def causal_blocks(tokens: int) -> int:
    """The number of equal blocks into which causal attention cuts the queries: 4 or 2 if each has
    at least 128 tokens, else 1. A block needs no keys after its end, so n blocks compute (n + 1) /
    2n of the scores."""
    return next(n for n in (4, 2, 1) if n == 1 or (tokens % n == 0 and tokens // n >= 128))


def grouped_attention(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    mask=None,
    mask_is_causal: bool = False,
    dropout: WeightDropout | None = None,
) -> jax.Array:
    """`attend` without the result's sharding."""
    # `jax.nn.dot_product_attention` would have the heads of a group as a fifth dimension, and
    # transposes for it: 5 % of a training step on CPU (benchmarks/README.md).
    t, s = q_BTNH.shape[1], k_BSKH.shape[1]
    if mask is not None and not mask_is_causal:
        return _block_attention(q_BTNH, k_BSKH, v_BSKH, mask, dropout)
    mask = jnp.tril(jnp.ones((t, s), bool))[None, None] if mask is None else mask
    n = causal_blocks(t)
    blocks = [(i * t // n, (i + 1) * t // n) for i in range(n)]
    out = [
        _block_attention(
            q_BTNH[:, a:b],
            k_BSKH[:, :b],
            v_BSKH[:, :b],
            mask[:, :, a:b, :b],
            dropout and dropout.part(slice(a, b)),
        )
        for a, b in blocks
    ]
    return jnp.concatenate(out, 1) if n > 1 else out[0]


def _block_attention(q_BTNH, k_BSKH, v_BSKH, mask, dropout: WeightDropout | None) -> jax.Array:
    """Attention of one block of queries, with a softmax in float32."""
    b, t, n, h = q_BTNH.shape
    s, k = k_BSKH.shape[1:3]
    # The query heads that share keys are rows of one matmul, which reads the keys once.
    by_keys = lambda a, *sizes: jnp.moveaxis(a.reshape(b, t, k, n // k, *sizes), 1, 3).reshape(
        b, k, n // k * t, *sizes
    )
    q_BKRH = by_keys(q_BTNH, h)
    scores = (
        jnp.einsum("bkrh,bskh->bkrs", q_BKRH, k_BSKH, preferred_element_type=jnp.float32) * h**-0.5
    )
    scores = jnp.where(mask[:, :, None], scores.reshape(b, k, n // k, t, s), -1e30).reshape(
        scores.shape
    )
    # The softmax does not change with what is subtracted, so the maximum has no gradient.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    weighted = weights
    if dropout:
        distance_TS = dropout.position_T[:, None] - jnp.arange(s)
        distance_RS = jnp.tile(distance_TS, (n // k, 1))
        noise_BKR1 = by_keys(dropout.noise_BTN)[..., None]
        weighted = dropped(weights, noise_BKR1, distance_RS, dropout.rate)
    out_BKRH = jnp.einsum(
        "bkrs,bskh->bkrh", weighted.astype(v_BSKH.dtype), v_BSKH, preferred_element_type=jnp.float32
    )
    # The sum divides the product and not the weights: the output has fewer columns than the scores.
    out_BKRH = (out_BKRH / weights.sum(-1, keepdims=True)).astype(v_BSKH.dtype)
    return out_BKRH.reshape(b, k, n // k, t, -1).transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """The settings of a config that choose how attention is computed.

    context:  parallel.context, the collectives for sequences that `context` splits
    kernel:   model.attention_kernel; config/kernels.py chooses the kernel for the devices that the
              program is traced for
    backward: model.attention_backward
    dropout:  model.dropout_attention
    window:   model.window
    """

    context: str = "all_gather"
    kernel: str = "auto"
    backward: str = "auto"
    dropout: float = 0.0
    window: int = 0


@functools.partial(jax.named_call, name=SCOPE)
def attend_causal(
    q, k, v, segments_BT, settings: AttentionSettings = AttentionSettings(), noise_BT=None
) -> jax.Array:
    """Causal self-attention of complete sequences → [B, T, N, H of v], also where `context` splits
    them. q, k, v [B, T, heads, size of a head] are of this device's tokens.

    segments_BT: int32, the document of each token, which sees no token of another document; None: a
        sequence is one document
    noise_BT: of the layer (parallel/dropout.py); None: no weight is dropped
    """
    dropout, rate = None, settings.dropout if noise_BT is not None else 0.0
    if rate:
        noise_BTN = combined(combined(noise_BT, WEIGHTS)[..., None], jnp.arange(q.shape[2]))
        position_T = context.positions(q.shape[1])[0]
        dropout = WeightDropout(constrain(noise_BTN, HEADS[:3]), position_T, rate)
    parts, way = context.size(), settings.context
    # By ulysses a device has complete sequences, of some heads; else two chunks of each.
    in_chunks = parts > 1 and way != "ulysses"
    case = AttentionCase(
        target_device(),
        bits=8 * q.dtype.itemsize,
        key_size=q.shape[-1],
        value_size=v.shape[-1],
        queries=q.shape[1] // 2 if in_chunks else q.shape[1] * parts,
        keys=q.shape[1] * parts,
        documents=segments_BT is not None,
        context=way if in_chunks else "",
        dropout=rate > 0,
    )
    chosen = attention_kernel(case, settings.kernel).kernel
    kernel = _flash_kernel(chosen, q.shape, case, settings.backward, rate)
    unsplit = functools.partial(_attend_unsplit, kernel, chosen)
    if parts == 1:
        return unsplit(q, k, v, segments_BT, dropout)
    if way == "ulysses":
        return context.attend_by_heads(unsplit, q, k, v, segments_BT, dropout)
    if way == "ring":  # in XLA always by blocks, however few keys a device has
        return constrain(ring.attend(kernel or blockwise.KERNEL, q, k, v, segments_BT), HEADS)
    if kernel:
        return constrain(
            context.attend_by_gather(
                functools.partial(flash.attend, kernel), q, k, v, segments_BT, dropout
            ),
            HEADS,
        )
    return context.attend_by_halves(
        attend_by_cudnn_mask if chosen == CUDNN_MASK else attend, q, k, v, segments_BT, dropout
    )


def attend_cached(
    q, extended: kv_cache.Extended, start, settings: AttentionSettings = AttentionSettings()
) -> jax.Array:
    """Attention of T tokens from position `start` on, which are in a cache of keys and values.
    Splash attends for a prompt's many tokens if it is the chosen kernel; otherwise plain XLA does.
    Each device of `context` attends to its own slots (parallel/attention/kv_cache.py).
    """
    k, v = (a.astype(q.dtype) for a in extended.seen)
    if settings.window:
        return attend(q, k, v, extended.mask)
    (t, s), device = (q.shape[1], k.shape[1]), target_device()
    local_slots = s // shards(kv_cache.SLOT)
    case = AttentionCase(
        device,
        8 * q.dtype.itemsize,
        q.shape[-1],
        v.shape[-1],
        queries=t,
        keys=local_slots,
        documents=False,
        context="cache",
    )
    chosen = attention_kernel(case, settings.kernel).kernel
    if chosen == SPLASH and splash.takes(t, local_slots):
        kernel = splash.kernel(interpret=device.platform != TPU)
        return constrain(kv_cache.attend_by_kernel(kernel, q, k, v, start), HEADS)
    return attend(q, k, v, extended.mask)


def _attend_unsplit(
    kernel: Kernel | None, chosen: str, q, k, v, segments, dropout: WeightDropout | None
) -> jax.Array:
    """Causal attention over complete sequences, all tokens of which are on one device."""
    if kernel:
        return constrain(
            flash.attend(
                kernel,
                q,
                k,
                v,
                context.CAUSAL,
                None if segments is None else (segments, segments),
                dropout and dropout.noise_BTN,
            ),
            HEADS,
        )
    mask, t = None, q.shape[1]
    if segments is not None:
        mask = (segments[:, None, :, None] == segments[:, None, None, :]) & jnp.tril(
            jnp.ones((t, t), bool)
        )
    return (
        attend_by_cudnn_mask(q, k, v, mask)
        if chosen == CUDNN_MASK
        else attend(q, k, v, mask, mask_is_causal=True, dropout=dropout)
    )


def _flash_kernel(
    chosen: str, shape: tuple[int, ...], case: AttentionCase, backward: str, rate: float
) -> Kernel | None:
    """The kernel that never has all scores in memory, for queries of `shape` [B, T, N, H]; None
    where plain XLA computes them for few tokens, and for cuDNN with a mask."""
    batch_heads = shape[0] * shape[2]
    if not case.context:
        batch_heads = batch_heads * shape[1] // case.keys
    if chosen == SPLASH:
        return splash.kernel(case.device.platform != TPU, backward)
    if chosen == CUDNN and (not case.documents or cudnn.is_addressable(shape)):
        return cudnn.KERNEL
    if chosen in (XLA, CUDNN) and blockwise.is_long(batch_heads, case.queries, case.keys):
        return blockwise.kernel(rate)
    return None
