"""The one function through which all attention goes: which kernel, and how over a split sequence.

    attend         one device's queries and keys: cuDNN's flash attention, or plain XLA
    attend_whole   whole sequences: block by block where they are long; over `context` by gathering, by heads (ulysses) or by the ring

Shape suffixes: B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dimension.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.rules import cudnn_has
from jaxtrain.devices.sharding import constrain
from jaxtrain.parallel import blockwise, context, ring
from jaxtrain.parallel.heads import over_heads

HEADS = ("batch", "token", "heads", None)
KV_HEADS = ("batch", "token", "kv_heads", None)
LARGEST_MASK = 1 << 28  # elements of a mask that a kernel may be given; longer sequences go block by block
KERNEL = ring.Kernel(blockwise.output_and_lse, blockwise.gradients, blockwise.delta)
CUDNN_TYPES = (jnp.bfloat16, jnp.float16)


def choose_implementation(wanted: str, dtype, head_dim: int, platform: str) -> Any:
    """ "auto" → cuDNN's flash attention where it exists (NVIDIA GPU, 16-bit, heads up to 128 wide), XLA's elsewhere."""
    if wanted != "auto":
        return wanted
    return "cudnn" if platform == "gpu" and dtype in CUDNN_TYPES and cudnn_has(head_dim) else "xla"


def attend(q_BTNH, k_BSKH, v_BSKH, mask=None, implementation: str = "auto", causal: bool = False) -> jax.Array:
    """Scaled dot-product attention → [B, T, N, a value's H]. Causal (then T = S), or by `mask` (bool [B or 1, 1, T, S]: may look) if given.

    `causal` says of a mask that it is that as well (T = S): most of the scores above the diagonal are then not even computed.
    """
    chosen = choose_implementation(implementation, q_BTNH.dtype, q_BTNH.shape[-1], jax.default_backend())
    if chosen == "xla":
        return constrain(grouped_attention(q_BTNH, k_BSKH, v_BSKH, mask, causal), HEADS)
    out = over_heads(
        lambda q, k, v, m: jax.nn.dot_product_attention(q, k, v, mask=m, is_causal=m is None, implementation=chosen),
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask,
    )
    return constrain(out, HEADS)


def causal_blocks(tokens: int) -> int:
    """Into how many blocks of queries causal attention is cut, each with the keys up to its end alone: with n of them it computes
    (n + 1) / 2n of the scores. Up to 4, of at least 128 tokens."""
    return next(n for n in (4, 2, 1) if n == 1 or (tokens % n == 0 and tokens // n >= 128))


def grouped_attention(q_BTNH, k_BSKH, v_BSKH, mask=None, causal: bool = False) -> jax.Array:
    """`attend` in plain XLA.

    `jax.nn.dot_product_attention` keeps the group as a fifth dimension and transposes around it: 5 % of a whole training
    step on CPU (benchmarks/README.md).
    """
    t, s = q_BTNH.shape[1], k_BSKH.shape[1]
    if mask is not None and not causal:
        return _block_attention(q_BTNH, k_BSKH, v_BSKH, mask)
    mask = jnp.tril(jnp.ones((t, s), bool))[None, None] if mask is None else mask
    n = causal_blocks(t)
    blocks = [(i * t // n, (i + 1) * t // n) for i in range(n)]
    out = [_block_attention(q_BTNH[:, a:b], k_BSKH[:, :b], v_BSKH[:, :b], mask[:, :, a:b, :b]) for a, b in blocks]
    return jnp.concatenate(out, 1) if n > 1 else out[0]


def _block_attention(q_BTNH, k_BSKH, v_BSKH, mask) -> jax.Array:
    """Softmax in float32, divided by its sum after the product with the values, which has fewer columns. The query heads of a group
    are rows of one matmul with their keys."""
    b, t, n, h = q_BTNH.shape
    s, k = k_BSKH.shape[1:3]
    q_BKRH = q_BTNH.reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4).reshape(b, k, n // k * t, h)  # rows R: group, token
    scores = jnp.einsum("bkrh,bskh->bkrs", q_BKRH, k_BSKH, preferred_element_type=jnp.float32) * h**-0.5
    scores = jnp.where(mask[:, :, None], scores.reshape(b, k, n // k, t, s), -1e30).reshape(scores.shape)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    out_BKRH = jnp.einsum("bkrs,bskh->bkrh", weights.astype(v_BSKH.dtype), v_BSKH, preferred_element_type=jnp.float32)
    out_BKRH = (out_BKRH / weights.sum(-1, keepdims=True)).astype(v_BSKH.dtype)
    return out_BKRH.reshape(b, k, n // k, t, -1).transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)


def attend_whole(q, k, v, segments_BT, over: str, implementation: str) -> jax.Array:
    """Causal self-attention over whole sequences, also where `context` splits them (over: parallel/context.py); with segments a token
    sees its own segment alone. All arrays [B, T, heads, size of a head], of this device's tokens."""
    chosen = choose_implementation(implementation, q.dtype, q.shape[-1], jax.default_backend())

    def by_blocks(q, chunk: int, keys: int, mask: int) -> bool:
        """Whether to go block by block. mask: elements of that which the kernel would need otherwise."""
        able = chosen == "xla" or (implementation == "auto" and mask > LARGEST_MASK)
        return able and blockwise.is_long(q.shape[0] * q.shape[2], chunk, keys)

    def whole(q, k, v, segments):
        t = q.shape[1]
        if by_blocks(q, t, t, 0 if segments is None else t * t):
            return constrain(blockwise.attend(q, k, v, context.CAUSAL, None if segments is None else (segments, segments)), HEADS)
        mask = None
        if segments is not None:
            mask = (segments[:, None, :, None] == segments[:, None, None, :]) & jnp.tril(jnp.ones((t, t), bool))
        return attend(q, k, v, mask, chosen, causal=True)

    parts, tokens = context.size(), q.shape[1]
    if parts == 1:
        return whole(q, k, v, segments_BT)
    if over == "ring":
        return constrain(ring.attend(KERNEL, q, k, v, segments_BT), HEADS)
    if over == "ulysses":
        return context.attend_by_heads(whole, q, k, v, segments_BT)
    if by_blocks(q, tokens // 2, tokens * parts, tokens // 2 * tokens * parts):
        out = context.attend_by_gather(blockwise.attend, q, k, v, segments_BT)
        return constrain(out, HEADS)
    return context.attend_by_halves(lambda q, k, v, mask: attend(q, k, v, mask, chosen), q, k, v, segments_BT)
