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

from jaxtrain.config import ResolvedModel
from jaxtrain.config.kernels import (
    CUDNN,
    CUDNN_MASK,
    NEIGHBOURS,
    SPLASH,
    TPU,
    XLA,
    AttentionCase,
    attention_kernel,
    reach,
)
from jaxtrain.devices.sharding import constrain, shards
from jaxtrain.parallel.attention import blockwise, context, cudnn, flash, kv_cache, ring, splash
from jaxtrain.parallel.attention.flash import CAUSAL, PLAIN, Inputs, Kernel, Scores, Sight
from jaxtrain.parallel.attention.heads import by_heads
from jaxtrain.parallel.dropout import WEIGHTS, dropped
from jaxtrain.parallel.random_bits import combined
from jaxtrain.parallel.target_device import target_device

HEADS = ("batch", "token", "heads", None)
KV_HEADS = ("batch", "token", "kv_heads", None)
# The scope of attention in the program: planner/programs/measured_step.py tells its products in a
# profile by it.
SCOPE = "attention"


def attend(q_BTNH, k_BSKH, v_BSKH, mask=None, mask_is_causal: bool = False) -> jax.Array:
    """Scaled dot-product attention in plain XLA → [B, T, N, H of v]. Keys and values may have a
    head for several query heads, and values another size than keys.

    mask: bool [B or 1, 1, T, S], true where a query sees a key; None: causal, with T = S
    mask_is_causal: no query of the mask sees a later key (T = S), so most of the scores above the
        diagonal are not computed; the result is the same
    """
    return constrain(grouped_attention(q_BTNH, k_BSKH, v_BSKH, mask, mask_is_causal), HEADS)


def attend_by_cudnn_mask(q_BTNH, k_BSKH, v_BSKH, mask, scores: Scores = PLAIN) -> jax.Array:
    """`attend` by cuDNN, which adds the mask to the scores as numbers."""

    # jax's function wants keys and values of one size: the smaller ones are padded with zeros,
    # which change no score, and the padding of the result is cut off.
    def kernel(q, k, v, m):
        scale = scores.factor(q.shape[-1])
        result = jax.nn.dot_product_attention(
            *cudnn.of_one_size(q, k, v), mask=m, scale=scale, implementation="cudnn"
        )
        return result[..., : v.shape[-1]]

    return constrain(by_heads(kernel, (q_BTNH, k_BSKH, v_BSKH), (mask,)), HEADS)


def causal_blocks(tokens: int) -> int:
    """The number of equal blocks into which causal attention cuts the queries: 4 or 2 if each has
    at least 128 tokens, else 1. A block needs no keys after its end, so n blocks compute (n + 1) /
    2n of the scores."""
    return next(n for n in (4, 2, 1) if n == 1 or (tokens % n == 0 and tokens // n >= 128))


def causal_mask(tokens: int, keys: int, window: int = 0) -> jax.Array:
    """bool [tokens, keys]: which key each of the last `tokens` tokens sees, at most `window`."""
    every, before = jnp.ones((tokens, keys), bool), keys - tokens
    mask = jnp.tril(every, before)
    return mask & jnp.triu(every, before - window + 1) if window else mask


def grouped_attention(q_BTNH, k_BSKH, v_BSKH, mask=None, mask_is_causal: bool = False) -> jax.Array:
    """`attend` without the result's sharding."""
    inputs = Inputs(q_BTNH, k_BSKH, v_BSKH, CAUSAL)
    return attend_at_once(inputs, mask, mask is None or mask_is_causal)


def attend_at_once(
    inputs: Inputs, mask: jax.Array | None, in_order: bool, position_T: jax.Array | None = None
) -> jax.Array:
    """Attention in plain XLA, all scores of which, or a quarter, are in memory, without the
    result's sharding → [B, T, N, V].

    mask: as of `attend`, with the inputs' segments; None: that of the inputs' sight, in order
    in_order: the queries are the last tokens of the keys, and the mask lets none see a later key,
        or one before the sight's window. Most of the scores that no query sees are then not
        computed; the result is the same
    position_T: the queries' places among the keys, which dropout needs if they are not in order
    """
    # `jax.nn.dot_product_attention` would have the heads of a group as a fifth dimension, and
    # transposes for it: 5 % of a training step on CPU (benchmarks/README.md).
    if not in_order:
        return _block_attention(inputs, mask, position_T)
    t, s, window = inputs.q.shape[1], inputs.k.shape[1], inputs.sight.window
    mask = causal_mask(t, s, window)[None, None] if mask is None else mask
    n = causal_blocks(t)
    blocks = [(i * t // n, (i + 1) * t // n) for i in range(n)]
    out = []
    for a, b in blocks:
        queries = slice(a, b)
        keys = slice(max(0, s - t + a - window + 1) if window else 0, s - t + b)
        out.append(_block_attention(inputs.part(queries, keys), mask[:, :, queries, keys]))
    return jnp.concatenate(out, 1) if n > 1 else out[0]


def _block_attention(inputs: Inputs, mask, position_T: jax.Array | None = None) -> jax.Array:
    """Attention of one block of queries, with a softmax in float32. position_T: the queries' places
    among the keys; None: these end with the queries' own"""
    q_BTNH, k_BSKH, v_BSKH, _, _, noise_BTN, rule = inputs
    b, t, n, h = q_BTNH.shape
    s, k = k_BSKH.shape[1:3]
    # The query heads that share keys are rows of one matmul, which reads the keys once.
    by_keys = lambda a, *sizes: jnp.moveaxis(a.reshape(b, t, k, n // k, *sizes), 1, 3).reshape(
        b, k, n // k * t, *sizes
    )
    q_BKRH = by_keys(q_BTNH, h)
    scores = jnp.einsum(
        "bkrh,bskh->bkrs", q_BKRH, k_BSKH, preferred_element_type=jnp.float32
    ) * rule.factor(h)
    if rule.softcap:
        scores = rule.softcap * jnp.tanh(scores / rule.softcap)
    scores = jnp.where(mask[:, :, None], scores.reshape(b, k, n // k, t, s), -1e30).reshape(
        scores.shape
    )
    # The softmax does not change with what is subtracted, so the maximum has no gradient.
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    weighted = weights
    if noise_BTN is not None:
        position_T = jnp.arange(s - t, s) if position_T is None else position_T
        distance_TS = position_T[:, None] - jnp.arange(s)
        distance_RS = jnp.tile(distance_TS, (n // k, 1))
        noise_BKR1 = by_keys(noise_BTN)[..., None]
        weighted = dropped(weights, noise_BKR1, distance_RS, rule.dropout)
    out_BKRH = jnp.einsum(
        "bkrs,bskh->bkrh", weighted.astype(v_BSKH.dtype), v_BSKH, preferred_element_type=jnp.float32
    )
    # The sum divides the product and not the weights: the output has fewer columns than the scores.
    total = weights.sum(-1, keepdims=True)
    if rule.sinks is not None:
        sinks_KR1 = jnp.repeat(rule.sinks.astype(jnp.float32).reshape(k, n // k, 1), t, 1)
        total += jnp.exp(sinks_KR1 - top)
    out_BKRH = (out_BKRH / total).astype(v_BSKH.dtype)
    return out_BKRH.reshape(b, k, n // k, t, -1).transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """The settings of a config that choose what attention computes, and how.

    context:  parallel.context, the collectives for sequences that `context` splits
    kernel:   model.attention_kernel; config/kernels.py chooses the kernel for the devices that the
              program is traced for
    backward: model.attention_backward
    window:   model.window
    scores:   model.attention_scale, attention_softcap and dropout_attention; sinks are an argument
              of the functions, since they are parameters
    """

    context: str = "all_gather"
    kernel: str = "auto"
    backward: str = "auto"
    window: int = 0
    scores: Scores = PLAIN

    @staticmethod
    def of(cfg: ResolvedModel, context: str) -> "AttentionSettings":
        """The settings of a model. context: parallel.context"""
        return AttentionSettings(
            context,
            cfg.attention_kernel,
            cfg.attention_backward,
            cfg.window,
            Scores(cfg.attention_scale, cfg.attention_softcap, cfg.dropout_attention),
        )


@functools.partial(jax.named_call, name=SCOPE)
def attend_causal(
    q,
    k,
    v,
    segments_BT,
    settings: AttentionSettings = AttentionSettings(),
    noise_BT=None,
    sinks_N=None,
) -> jax.Array:
    """Causal self-attention of complete sequences → [B, T, N, H of v], also where `context` splits
    them. q, k, v [B, T, heads, size of a head] are of this device's tokens.

    segments_BT: int32, the document of each token, which sees no token of another document; None: a
        sequence is one document
    noise_BT: of the layer (parallel/dropout.py); None: no weight is dropped
    sinks_N: as of Scores
    """
    parts, scores = context.size(), dataclasses.replace(settings.scores, sinks=sinks_N)
    noise_BTN = None
    if noise_BT is not None and scores.dropout:
        noise_BTN = combined(combined(noise_BT, WEIGHTS)[..., None], jnp.arange(q.shape[2]))
        noise_BTN = constrain(noise_BTN, HEADS[:3])
    tokens = q.shape[1] * parts
    window = settings.window if settings.window < tokens else 0
    way = reach(settings.context, parts, tokens, window)
    case = AttentionCase(
        target_device(),
        bits=8 * q.dtype.itemsize,
        key_size=q.shape[-1],
        value_size=v.shape[-1],
        queries=q.shape[1] // 2 if way else tokens,
        keys=tokens,
        documents=segments_BT is not None,
        context=way,
        dropout=noise_BTN is not None,
        window=window,
        softcap=scores.softcap > 0,
        sinks=sinks_N is not None,
    )
    chosen = attention_kernel(case, settings.kernel).kernel
    kernel = _flash_kernel(chosen, q.shape, case, settings.backward)
    pair = None if segments_BT is None else (segments_BT, segments_BT)
    inputs = Inputs(q, k, v, Sight((0,), window=window), pair, noise_BTN, scores)
    local = functools.partial(_attend_local, kernel, chosen)
    if way == NEIGHBOURS:
        return constrain(context.attend_by_neighbours(local, inputs), HEADS)
    if parts == 1:
        return local(inputs)
    if not way:  # ulysses
        return context.attend_by_heads(local, inputs)
    if way == "ring":  # in XLA always by blocks, however few keys a device has
        return constrain(ring.attend(kernel or blockwise.KERNEL, inputs), HEADS)
    if kernel:
        attend_all = functools.partial(flash.attend, kernel)
        return constrain(context.attend_by_gather(attend_all, inputs), HEADS)
    return context.attend_by_halves(functools.partial(_attend_by_mask, chosen), inputs)


def attend_cached(
    q,
    extended: kv_cache.Extended,
    start,
    settings: AttentionSettings = AttentionSettings(),
    sinks_N=None,
) -> jax.Array:
    """Attention of T tokens from position `start` on, which are in a cache of keys and values.
    Splash attends for a prompt's many tokens if it is the chosen kernel and there are no sinks;
    otherwise plain XLA does. Each device of `context` attends to its own slots
    (parallel/attention/kv_cache.py).
    """
    k, v = (a.astype(q.dtype) for a in extended.seen)
    (t, s), device, window = (q.shape[1], k.shape[1]), target_device(), settings.window
    in_order = extended.is_text is not None
    keys = t if in_order else s // shards(kv_cache.SLOT)
    case = AttentionCase(
        device,
        8 * q.dtype.itemsize,
        q.shape[-1],
        v.shape[-1],
        queries=t,
        keys=keys,
        documents=False,
        context="cache",
        window=window,
        softcap=settings.scores.softcap > 0,
        sinks=sinks_N is not None,
    )
    by_splash = attention_kernel(case, settings.kernel).kernel == SPLASH and splash.takes(t, keys)
    inputs = Inputs(q, k, v, Sight((0,), window=window), scores=settings.scores)
    if by_splash and sinks_N is None and (in_order or not window):
        kernel = splash.kernel(interpret=device.platform != TPU)
        if extended.is_text is not None:
            return constrain(kv_cache.attend_in_order(kernel, inputs, extended.is_text), HEADS)
        return constrain(kv_cache.attend_by_kernel(kernel, inputs, start), HEADS)
    scores = dataclasses.replace(settings.scores, sinks=sinks_N)
    return constrain(attend_at_once(inputs._replace(scores=scores), extended.mask, in_order), HEADS)


def _attend_local(kernel: Kernel | None, chosen: str, inputs: Inputs) -> jax.Array:
    """Causal attention to keys of one device: those of the queries' tokens, or also those of the
    window before them."""
    if kernel:
        return constrain(flash.attend(kernel, inputs), HEADS)
    mask = None
    if inputs.segments is not None:
        of_queries, of_keys = inputs.segments
        mask = (of_queries[:, None, :, None] == of_keys[:, None, None, :]) & causal_mask(
            inputs.q.shape[1], inputs.k.shape[1], inputs.sight.window
        )
    return _attend_by_mask(chosen, inputs, mask)


def _attend_by_mask(
    chosen: str, inputs: Inputs, mask, position_T: jax.Array | None = None
) -> jax.Array:
    """Attention by cuDNN with a mask, or in plain XLA at once. position_T: the queries' places
    among the keys; None: in order. Other arguments as of `attend_at_once`"""
    if chosen == CUDNN_MASK:  # which drops no weights
        return attend_by_cudnn_mask(*inputs[:3], mask, inputs.scores)
    return constrain(attend_at_once(inputs, mask, position_T is None, position_T), HEADS)


def _flash_kernel(
    chosen: str, shape: tuple[int, ...], case: AttentionCase, backward: str
) -> Kernel | None:
    """The kernel that never has all scores in memory, for queries of `shape` [B, T, N, H]; None
    where plain XLA computes them for few tokens, and for cuDNN with a mask."""
    if case.context == NEIGHBOURS:  # in chunks, each with all that it sees
        shape = (2 * shape[0], case.kernel_keys, *shape[2:])
    batch_heads = shape[0] * shape[2]
    if not case.context:
        batch_heads = batch_heads * shape[1] // case.keys
    if chosen == SPLASH:
        return splash.kernel(case.device.platform != TPU, backward)
    if chosen == CUDNN and (not case.has_segments or cudnn.is_addressable(shape)):
        return cudnn.KERNEL
    window = 0 if case.context == "all_gather" else case.window
    is_long = blockwise.is_long(batch_heads, case.queries, case.kernel_keys, window)
    if chosen in (XLA, CUDNN) and is_long:
        return blockwise.KERNEL
    return None
