"""Attention on NVIDIA GPUs by cuDNN, which gets documents as offsets in the sequence: there is no
mask of queries × keys.

For cuDNN a document is a sequence that begins at an offset in the arrays ("ragged offsets", counted
in numbers) and has a length. A call takes a fixed number of documents: DOCUMENTS for each sequence
of the batch, whichever sequences they are in. A loop calls cuDNN until all documents are done:
once, unless the batch has more than that. Only the results for its documents are taken from a
call. Its statistics for the backward are T numbers for each document that it can take; of these,
the call returns only the numbers of the document's own tokens.

Begin with `_forward` and `_in_calls`.

For each document that a call can take, cuDNN launches blocks for T tokens, and its backward has a
workspace of T · N · (8 · H + 4) bytes. With 32 for each sequence two sequences of `llama3_8b` had
17.2 GB on an H100 (benchmarks/README.md).

    tokens      a a a a b b | c c d e e e       B = 2, T = 6, M = 4 documents
    lengths     4 2 2 1 | 3 0 0 0               of all documents of the call, one after the other
    starts      0 4 6 8 9 | 12 12 12 12 12      tokens from the batch's beginning; times the heads'
                                                numbers in a token: offsets

We use the two primitives of jax's function for this
(jax._src.cudnn.fused_attention_stablehlo.dot_product_attention) instead of the function. Before jax
0.12 the function multiplies the offsets of keys with the queries' heads (pull request 39521). It
saves the statistics of all documents. And it asks the local devices for their abilities, which a
step that is compiled ahead of time does not have; config/kernels.py decides instead.

Shape suffixes: B batch, T tokens, N heads, K key/value heads, H head dimension of queries and keys,
V of values, M documents.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxtrain.parallel.attention.flash import MASKED, AttentionResiduals, Inputs, Kernel, padded

# Documents of a sequence, on average, in a call: workspace and launches grow with this number, and
# a batch with more documents takes another call.
DOCUMENTS = 8
# Parameters of the primitives: no dropout, no bias, and no score modifier of jax 0.12.
COMMON: dict[str, Any] = {
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),
    "layout": cudnn.AttentionLayout.BTNH.value,
} | ({} if jax.__version_info__ < (0, 12) else {"score_mod_name": None, "score_mod_jaxpr": None})

# what jax asks before it traces or lowers attention → answers of an H100 with cuDNN 9.14
PRESENT: dict[str, Any] = {
    "check_cudnn_version": lambda: 91400,
    "check_compute_capability": lambda least: float(least) <= 9.0,
    "is_cuda_compute_capability_equal": lambda wanted: float(wanted) == 9.0,
}


# For programs that are compiled ahead of time, on a machine without a GPU.
@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """A context in which jax finds cuDNN and an H100, which this machine need not have."""
    before = {name: getattr(cudnn, name) for name in PRESENT}
    vars(cudnn).update(PRESENT)
    try:
        yield
    finally:
        vars(cudnn).update(before)


def is_addressable(shape: tuple[int, ...]) -> bool:
    """True if offsets in queries of this shape fit into 32-bit integers, which documents need."""
    return math.prod(shape) < 1 << 31


@dataclasses.dataclass(frozen=True)
class _Documents:
    """The documents of a call, M for each sequence.

    lengths: int32 [B, M]; starts: int32 [B, M + 1]; see the example above
    inside_BT:   whether a token is in a document of the call
    document_BT: that document, counted through the batch; B · M for none
    position_BT: the token's position in its document
    """

    lengths: jax.Array
    starts: jax.Array
    inside_BT: jax.Array
    document_BT: jax.Array
    position_BT: jax.Array

    @property
    def count(self) -> int:
        return self.lengths.size


def _numbers(segments_BT: jax.Array) -> jax.Array:
    """The document of each token, counted through the batch from 0, int32 [B, T]."""
    # A sequence begins with a document of its own, whatever the number of the one before.
    begins = segments_BT[:, 1:] != segments_BT[:, :-1]
    begins_BT = jnp.pad(begins, ((0, 0), (1, 0)), constant_values=True)
    return jnp.cumsum(begins_BT, dtype=jnp.int32).reshape(segments_BT.shape) - 1


def _documents(segments_BT: jax.Array, m: int, call: jax.Array | int = 0) -> _Documents:
    """The documents of call 0, 1, …: the next B · M of the batch."""
    b, t = segments_BT.shape
    number_BT = _numbers(segments_BT) - call * b * m
    at = jnp.arange(t, dtype=jnp.int32)
    changes = number_BT[:, 1:] != number_BT[:, :-1]
    begins, ends = (
        jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True),
        jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True),
    )
    position_BT = at - lax.cummax(jnp.where(begins, at, 0), 1)
    inside_BT = (number_BT >= 0) & (number_BT < b * m)
    document_BT = jnp.where(inside_BT, number_BT, b * m)

    # Starts and lengths are scattered: the first token of a document writes where it begins, the
    # last one how long it is.
    def write(selected_BT, shape: tuple[int, int], rest: int, x_BT) -> jax.Array:
        """An entry for each document; tokens of no document write out of bounds, which is
        dropped."""
        size = math.prod(shape)
        return (
            jnp.full(size, rest, jnp.int32)
            .at[jnp.where(selected_BT & inside_BT, document_BT, size)]
            .set(x_BT, mode="drop")
            .reshape(shape)
        )

    starts = write(begins, (b, m + 1), b * t, at + t * jnp.arange(b, dtype=jnp.int32)[:, None])
    return _Documents(
        write(ends, (b, m), 0, position_BT + 1), starts, inside_BT, document_BT, position_BT
    )


def _in_calls(
    segments_BT: jax.Array,
    call: Callable[[_Documents], tuple],
    results: Sequence[jax.ShapeDtypeStruct],
) -> tuple:
    """The results of call(documents) for all documents, M for each sequence at a time: arrays [B,
    T, …] of these shapes."""
    # A call takes B · DOCUMENTS documents, wherever in the batch they are. The number of calls
    # depends on the data, so it is a loop; each call's results replace those of its own tokens.
    calls = _numbers(segments_BT)[-1, -1] // (DOCUMENTS * len(segments_BT)) + 1

    def step(state):
        n, *before = state
        documents = _documents(segments_BT, DOCUMENTS, n)
        inside = lambda a: documents.inside_BT.reshape(
            documents.inside_BT.shape + (1,) * (a.ndim - 2)
        )
        return n + 1, *(
            jnp.where(inside(a), a, b) for a, b in zip(call(documents), before, strict=True)
        )

    begin = (jnp.zeros((), jnp.int32), *(jnp.zeros(a.shape, a.dtype) for a in results))
    # mostly one call, which planner/programs/loops.py counts for a loop of this name
    with jax.named_scope("document_calls"):
        return tuple(lax.while_loop(lambda state: state[0] < calls, step, begin)[1:])


def _operands(
    q: jax.Array, k: jax.Array, window: int, documents: _Documents | None
) -> tuple[list[jax.Array], dict[str, Any]]:
    """The operands of both primitives after queries, keys and values, and parameters."""
    # The primitives take all operands that cuDNN knows (bias, lengths, offsets, pages), empty if
    # unused.
    unused = jnp.zeros(0, q.dtype)
    common = COMMON | {"sliding_window_length": window or None}
    if documents is None:
        return [unused] * 7, common | {"mask_type": cudnn.MaskType.CAUSAL}
    # cuDNN counts offsets in numbers, and keys may have fewer heads than queries.
    offsets = [documents.starts * (a.shape[2] * a.shape[3]) for a in (q, k)]
    operands = [unused, documents.lengths, documents.lengths, *offsets, unused, unused]
    return operands, common | {"mask_type": cudnn.MaskType.PADDING_CAUSAL}


def of_one_size(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays with zeros after the numbers of smaller heads."""
    size = max(a.shape[-1] for a in arrays)
    return [padded(a, -1, 0, size - a.shape[-1]) for a in arrays]


def _forward(inputs: Inputs, dtype):
    """Kernel.forward, for complete sequences under a causal mask alone, or for their last tokens'
    queries, with segments."""
    segments, window = inputs.segments, inputs.sight.window
    # With documents heads of one size: values and keys then share their offsets.
    q, k, v = inputs[:3] if segments is None else of_one_size(*inputs[:3])
    # cuDNN begins queries and keys at the same token: there are queries of 0 before, whose results
    # are cut off.
    before = k.shape[1] - q.shape[1]
    q = padded(q, 1, before)
    scale = inputs.scores.factor(inputs.q.shape[-1])

    def call(documents: _Documents | None) -> tuple:
        operands, parameters = _operands(q, k, window, documents)
        out, statistics = cudnn._dot_product_attention_fwd_p.bind(
            q, k, v, *operands, **parameters, scale=scale, is_training=True
        )
        out = out[..., : inputs.v.shape[-1]].astype(dtype)
        if documents is None:
            return out, statistics.swapaxes(1, 2)
        # [documents, N, T], almost all of it empty, → [B, T, N]: saved for the backward without
        # gaps
        return out, statistics.at[documents.document_BT, :, documents.position_BT].get(
            mode="fill", fill_value=0.0
        )

    if segments is None:
        return call(None)
    shape = (*q.shape[:3], inputs.v.shape[-1])
    out, lse = _in_calls(
        segments[1],
        call,
        (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:3], jnp.float32)),
    )
    return out[:, before:], lse[:, before:]


def _backward(residuals: AttentionResiduals, g_BTNV, dtype):
    """Kernel.backward, all gradients of `dtype`."""
    inputs, out_BTNV, lse_BTN = residuals
    arrays, segments = (inputs.q, inputs.k, inputs.v), inputs.segments
    input_dtype, scale = inputs.q.dtype, inputs.scores.factor(inputs.q.shape[-1])
    # cuDNN wants all operands of one type; the gradient may come in another.
    all_arrays = *arrays, g_BTNV.astype(input_dtype), out_BTNV.astype(input_dtype)
    q, k, v, g, out = all_arrays if segments is None else of_one_size(*all_arrays)
    before = k.shape[1] - q.shape[1]
    q, g, out = (padded(a, 1, before) for a in (q, g, out))
    lse_BTN = padded(lse_BTN, 1, before, value=-MASKED)  # which makes weights of 0

    def call(documents: _Documents | None) -> tuple:
        operands, parameters = _operands(q, k, inputs.sight.window, documents)
        statistics = lse_BTN.swapaxes(1, 2)
        if documents is not None:  # the inverse: each token's numbers where cuDNN expects them
            statistics = jnp.zeros((documents.count, *statistics.shape[1:]), jnp.float32)
            statistics = statistics.at[documents.document_BT, :, documents.position_BT].set(
                lse_BTN, mode="drop"
            )
        gradients = cudnn._dot_product_attention_bwd_p.bind(
            q, k, v, *operands, statistics, out, g, **parameters, scale=scale
        )
        return tuple(
            d[..., : a.shape[-1]].astype(dtype) for d, a in zip(gradients, arrays, strict=True)
        )

    if segments is None:
        return call(None)
    shapes = [jax.ShapeDtypeStruct((*k.shape[:2], *a.shape[2:]), dtype) for a in arrays]
    dq, dk, dv = _in_calls(segments[1], call, shapes)
    return dq[:, before:], dk, dv


KERNEL = Kernel(_forward, _backward)
