"""Attention on NVIDIA GPUs by cuDNN, documents by their places in the sequence: no mask of queries × keys is made.

To cuDNN a document is a sequence of its own that begins somewhere in the arrays ("ragged offsets", in numbers from their beginning), and
of which it knows the length. There is room for a fixed number of documents in a sequence, DOCUMENTS or one for each TOKENS. Where a batch
has a sequence of more, its attention goes by blocks in XLA (parallel/blockwise.py), in a loop that otherwise has no trip: slower, and
right. What cuDNN keeps for the backward has a row of T numbers for each document that there is room for; only a document's own cross.

    tokens      a a a a b b | c c d e e e      B = 2, T = 6, M = 4 documents
    lengths     4 2 2 1 | 3 0 0 0              of all documents of the batch, one after the other
    starts      0 4 6 8 9 | 12 12 12 12 12      tokens from the batch's beginning; times the heads' numbers in a token: offsets

jax's own function for this (jax._src.cudnn.fused_attention_stablehlo.dot_product_attention) is left aside, its two primitives are used:
it multiplies the places of keys with the queries' heads before jax 0.12 (pull request 39521), keeps the rows of all documents, and asks
the local devices what they can, which are not there when a step is compiled ahead of time; config/kernels.py does.

Shape suffixes: B batch, T tokens, N heads, K key/value heads, H head dimension of queries and keys, V of values, M documents.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxtrain.parallel import blockwise
from jaxtrain.parallel.context import CAUSAL, Sight
from jaxtrain.parallel.flash import Kernel

DOCUMENTS, TOKENS = 32, 512
# Of the primitives: no dropout, no bias, nor what jax 0.12 can change scores by.
COMMON: dict[str, Any] = {
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),
    "layout": cudnn.AttentionLayout.BTNH.value,
    "sliding_window_length": None,
} | ({} if jax.__version_info__ < (0, 12) else {"score_mod_name": None, "score_mod_jaxpr": None})


def is_addressable(shape: tuple[int, ...]) -> bool:
    """Whether places in queries of such a shape are 32-bit integers, as documents need it."""
    return math.prod(shape) < 1 << 31


def room(tokens: int) -> int:
    """Documents in a sequence of so many tokens that cuDNN is given room for."""
    return max(DOCUMENTS, tokens // TOKENS)


@dataclasses.dataclass(frozen=True)
class _Documents:
    """The documents of segments [B, T], in each sequence the first M.

    lengths: int32 [B, M], starts: int32 [B, M + 1], as above; too_many: bool, whether a sequence has more
    row_BT: which document a token is in, counted through the batch; place_BT: its place there
    """

    lengths: jax.Array
    starts: jax.Array
    too_many: jax.Array
    row_BT: jax.Array
    place_BT: jax.Array

    @property
    def count(self) -> int:
        return self.lengths.size


def _documents(segments_BT: jax.Array, m: int) -> _Documents:
    b, t = segments_BT.shape
    at = jnp.arange(t, dtype=jnp.int32)
    begins = jnp.concatenate([jnp.ones((b, 1), bool), segments_BT[:, 1:] != segments_BT[:, :-1]], 1)
    index_BT = jnp.cumsum(begins, 1, dtype=jnp.int32) - 1  # of the sequence's documents
    first_BT = lax.cummax(jnp.where(begins, at, 0), 1)
    number_B = jnp.minimum(index_BT[:, -1] + 1, m)
    row_BT = index_BT + (jnp.cumsum(number_B) - number_B)[:, None]
    ends = jnp.concatenate([begins[:, 1:], jnp.ones((b, 1), bool)], 1)

    def write(where_BT, size: int, rest: int, x_BT) -> jax.Array:
        """An entry for each document that there is room for; what is in no such document goes to a place that does not exist."""
        place_BT = jnp.where(where_BT & (index_BT < m), row_BT, size)
        return jnp.full(size, rest, jnp.int32).at[place_BT].set(x_BT, mode="drop")

    lengths = write(ends, b * m, 0, at - first_BT + 1)
    starts = write(begins, b * (m + 1), b * t, at + t * jnp.arange(b, dtype=jnp.int32)[:, None])
    return _Documents(lengths.reshape(b, m), starts.reshape(b, m + 1), jnp.any(index_BT >= m), row_BT, at - first_BT)


def _places(q: jax.Array, k: jax.Array, documents: _Documents | None) -> tuple[list[jax.Array], dict[str, Any]]:
    """The operands of both primitives after queries, keys and values, and parameters."""
    unused = jnp.zeros(0, q.dtype)
    if documents is None:
        return [unused] * 7, COMMON | {"mask_type": cudnn.MaskType.CAUSAL}
    offsets = [documents.starts * (a.shape[2] * a.shape[3]) for a in (q, k)]
    operands = [unused, documents.lengths, documents.lengths, *offsets, unused, unused]
    return operands, COMMON | {"mask_type": cudnn.MaskType.PADDING_CAUSAL}


def _of_one_size(segments, *arrays: jax.Array) -> list[jax.Array]:
    """Arrays whose heads have one size: with documents, values and keys share their places in memory."""
    size = max(a.shape[-1] for a in arrays)
    return [a if segments is None else jnp.pad(a, ((0, 0),) * 3 + ((0, size - a.shape[-1]),)) for a in arrays]


def _unless(too_many: jax.Array, found: tuple, otherwise) -> tuple:
    """`found`, or otherwise(), which costs nothing where it is not needed."""
    again = lambda state: (jnp.zeros((), bool), *otherwise())
    return tuple(lax.while_loop(lambda state: state[0], again, (too_many, *found))[1:])


def _forward(q_BTNH, k_BTKH, v_BTKV, sight: Sight, segments=None, dtype=jnp.float32):
    """sight: of whole sequences."""
    documents = None if segments is None else _documents(segments[0], room(q_BTNH.shape[1]))
    q, k, v = _of_one_size(segments, q_BTNH, k_BTKH, v_BTKV)
    operands, parameters = _places(q, k, documents)
    scale = q_BTNH.shape[-1] ** -0.5
    out, rows = cudnn._dot_product_attention_fwd_p.bind(q, k, v, *operands, **parameters, scale=scale, is_training=True)
    out = out[..., : v_BTKV.shape[-1]].astype(dtype)
    if documents is None:
        return out, rows.swapaxes(1, 2)
    lse_BTN = rows.at[documents.row_BT, :, documents.place_BT].get(mode="fill", fill_value=0.0)

    def by_blocks():
        arrays = lax.optimization_barrier((q_BTNH, k_BTKH, v_BTKV))  # or the copies that blocks are made of stand before the loop
        return blockwise.output_and_lse(*arrays, CAUSAL, segments, dtype)

    return _unless(documents.too_many, (out, lse_BTN), by_blocks)


def _backward(q_BTNH, k_BTKH, v_BTKV, g_BTNV, out_BTNV, lse_BTN, sight: Sight, segments=None, dtype=jnp.float32):
    documents = None if segments is None else _documents(segments[0], room(q_BTNH.shape[1]))
    q, k, v, g, out = _of_one_size(segments, q_BTNH, k_BTKH, v_BTKV, g_BTNV.astype(q_BTNH.dtype), out_BTNV.astype(q_BTNH.dtype))
    operands, parameters = _places(q, k, documents)
    rows = lse_BTN.swapaxes(1, 2)
    if documents is not None:
        rows = jnp.zeros((documents.count, *rows.shape[1:]), jnp.float32)
        rows = rows.at[documents.row_BT, :, documents.place_BT].set(lse_BTN, mode="drop", unique_indices=True)
    found = cudnn._dot_product_attention_bwd_p.bind(q, k, v, *operands, rows, out, g, **parameters, scale=q_BTNH.shape[-1] ** -0.5)
    found = tuple(d[..., : a.shape[-1]].astype(dtype) for d, a in zip(found, (q_BTNH, k_BTKH, v_BTKV), strict=True))
    if documents is None:
        return found

    def by_blocks():
        arrays = lax.optimization_barrier((q_BTNH, k_BTKH, v_BTKV, g_BTNV, out_BTNV, lse_BTN))
        return tuple(d.astype(dtype) for d in blockwise.gradients(*arrays, CAUSAL, segments, dtype))

    return _unless(documents.too_many, found, by_blocks)


KERNEL = Kernel(_forward, _backward)
