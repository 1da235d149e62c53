"""Attention on TPUs by the splash kernel that comes with jax
(jax.experimental.pallas.ops.tpu.splash_attention).

The kernel goes over a grid of heads × blocks of queries × blocks of keys of one sequence. We give
it the batch as one sequence, all sequences concatenated, and for each block of queries the blocks
of keys of its own sequence. An array says which of these are computed:

    run[query block, key block]   any query of the block sees any key of the block by position, and
                                  their documents overlap

so blocks above the diagonal or in other documents cost nothing, even if `context` splits the
sequence and the device's index decides what its queries see. Inside a block the kernel compares
positions and segments, so there is never a mask. For each step of the grid `next` names the block
that is needed next, and the kernel fetches it meanwhile.

Begin with `_BlockPairs` and `_forward`. The backward reads in the order `_backward`, `_fused` or
`_by_two_kernels`.

jax's gradient of the kernel is not used: it saves everything in the kernel's layout, and does not
take the log-sum-exp of further keys, which the ring needs. The backward is one fused kernel or two
(config/splash_backward.py). Without a TPU the kernel is interpreted, which is for tests, because a
step takes minutes.

Shape suffixes: B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dimension
of queries and keys, V of values; X, Y blocks of queries, of keys in a sequence.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask_info as mask_info,
)

from jaxtrain.config.splash_backward import (
    FUSED,
    MOST,
    STEP,
    block_size,
    filled_up,
    splash_backward,
    window_block_size,
    window_steps,
)
from jaxtrain.parallel.attention import splash_fused
from jaxtrain.parallel.attention.flash import (
    MASKED,
    AttentionResiduals,
    Inputs,
    Kernel,
    Scores,
    delta,
    padded,
)

LANES = STEP  # numbers in a row of a TPU's registers: blocks are multiples of it


def takes(queries: int, keys: int) -> bool:
    """True if LANES divides these numbers of tokens, so that they can be cut into blocks."""
    return queries % LANES == keys % LANES == 0


def sees(last_key: jax.Array, key: jax.Array, window: int) -> jax.Array:
    """The mask inside a block; the kernel calls `last_key` a query's position."""
    # Its own mask compares positions in one sequence. Here the last key that a query sees stands in
    # for its position, which serves any chunk of any device.
    return (last_key >= key) & (last_key - key < window) if window else last_key >= key


@dataclasses.dataclass(frozen=True)
class _BlockPairs:
    """The pairs of blocks of queries and of keys that are computed.

    queries, keys: tokens of a block
    last_T:        the last key that a query sees, −1 for none
    run_BXY:       whether a block of queries meets a block of keys
    key_tokens:    keys of a sequence
    segments:      as of flash.Inputs
    window:        as of Sight
    own_block:     the block of keys that has the first query's own, if queries are in one chunk and
                   there is a window: then a block meets only those that its window may reach
    """

    queries: int
    keys: int
    last_T: jax.Array
    run_BXY: jax.Array
    key_tokens: int
    segments: tuple[jax.Array, jax.Array] | None
    window: int = 0
    own_block: int | None = None

    @property
    def _starts_B(self) -> jax.Array:
        return jnp.arange(self.run_BXY.shape[0], dtype=jnp.int32)

    def by_queries(self) -> mask_info.MaskInfo:
        """For kernels that go through the keys for a block of queries: steps [1, B · X, Y]."""
        lowest_block = (self.own_block or 0) - window_steps(self.window, self.keys) + 1
        run, following, lowest = self._steps(self.run_BXY, lowest_block)
        # the next block of queries, or the lowest one of the next head
        after = jnp.roll(lowest, -1)[:, None]
        return self._info(run, jnp.where(following < 0, after, following), self.run_BXY.shape[2])

    def by_keys(self) -> mask_info.MaskInfo:
        """For the kernel that goes through the queries for a block of keys: steps [1, X, B · Y]."""
        run, following, lowest = self._steps(
            self.run_BXY.transpose(0, 2, 1), -(self.own_block or 0)
        )
        # the same for the next head
        next_block = jnp.where(following < 0, lowest[:, None], following)
        return self._info(run.T, next_block.T, self.run_BXY.shape[1])

    def _steps(self, run: jax.Array, offset: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The steps of each block, one for each block of the other kind, or, with `own_block`, for
        those that its window may reach: from `offset` after the block's own number on.

        run: bool [B, blocks, other blocks]

        Returns run of the steps, [B · blocks, steps]; of each step, the other block of the earliest
        step from it on that is run, −1 for none; of each block, the other block of its earliest
        step that is run, or of its last one for none. Other blocks are counted through the batch.
        """
        batch, blocks, others = run.shape
        steps, begin = others, jnp.zeros(blocks, jnp.int32)
        if self.own_block is not None:
            steps = min(others, window_steps(self.window, self.keys))
            begin = jnp.clip(jnp.arange(blocks, dtype=jnp.int32) + offset, 0, others - steps)
            run = jnp.take_along_axis(run, (begin[:, None] + jnp.arange(steps))[None], 2)
        run = run.reshape(batch * blocks, steps)
        start = (self._starts_B[:, None] * others + begin).reshape(-1)
        # A minimum from the right: at each step the number of the next one that is run.
        at = lax.cummin(jnp.where(run, jnp.arange(steps, dtype=jnp.int32), steps), 1, reverse=True)
        following = jnp.where(at < steps, at + start[:, None], -1)
        return run, following, start + jnp.minimum(at[:, 0], steps - 1)

    def with_keys(self, start: int, end: int) -> "_BlockPairs":
        """The pairs with keys from `start` to `end`, multiples of a block."""
        return dataclasses.replace(
            self,
            last_T=self.last_T - start,
            run_BXY=self.run_BXY[:, :, start // self.keys : end // self.keys],
            key_tokens=end - start,
            segments=self.segments and (self.segments[0], self.segments[1][:, start:end]),
            own_block=None if self.own_block is None else self.own_block - start // self.keys,
        )

    def _info(self, run, following, blocks: int) -> mask_info.MaskInfo:
        """The arrays that the kernel reads before its steps. blocks: of a sequence, those that the
        steps fetch"""
        blocks *= len(self.run_BXY)
        # The smallest integers that hold the numbers: scalar memory is small, and a long batch has
        # a number for each pair of blocks.
        small = jnp.int8 if blocks <= 1 << 7 else jnp.int16 if blocks <= 1 << 15 else jnp.int32
        # of each query [B · T]: the last key that it sees, counted through the batch
        positions: Any = (self._starts_B[:, None] * self.key_tokens + self.last_T).reshape(-1)
        return mask_info.MaskInfo(
            following[None].astype(small), None, run[None].astype(jnp.int8), None, positions
        )


def _block_pairs(inputs: Inputs, most_queries: int, most_keys: int) -> _BlockPairs:
    """The pairs for blocks of at most so many queries and keys."""
    q, k, _, sight, segments, *_ = inputs
    tokens, keys, full_chunks = q.shape[1], k.shape[1], jnp.asarray(sight.full_chunks, jnp.int32)
    # A query of chunk c sees keys up to full_chunks[c] · chunk − 1, and with the diagonal as many
    # more as its position in the chunk + 1.
    chunk, window = tokens // len(full_chunks), sight.window
    is_one_window = window > 0 and len(full_chunks) == 1
    first_key = keys - tokens if is_one_window else 0  # the first query's own
    by_query = jnp.arange(chunk, dtype=jnp.int32) if sight.diagonal else jnp.full(chunk, -1)
    last_T = (full_chunks[:, None] * chunk + by_query).reshape(-1) + (
        first_key if sight.start is None else sight.start
    )
    if window:
        x = y = window_block_size(chunk, window)
    else:
        x, y = block_size(chunk, most_queries), block_size(keys, most_keys)
    begins_Y, last_XQ = jnp.arange(keys // y) * y, last_T.reshape(-1, x)
    run_XY = begins_Y <= last_XQ[:, -1:]
    if window:
        run_XY &= begins_Y + y > last_XQ[:, :1] + 1 - window
    run_BXY = jnp.broadcast_to(run_XY, (len(q), *run_XY.shape))
    if segments is not None:
        of_queries, of_keys = (
            a.reshape(len(q), -1, size) for a, size in zip(segments, (x, y), strict=True)
        )
        # Documents are numbered in the order of the text: blocks whose ranges of numbers do not
        # overlap share no document.
        earliest = of_queries.min(-1)[:, :, None] <= of_keys.max(-1)[:, None]
        run_BXY &= earliest & (of_queries.max(-1)[:, :, None] >= of_keys.min(-1)[:, None])
    own_block = first_key // y if is_one_window else None
    return _BlockPairs(x, y, last_T, run_BXY, keys, segments, window, own_block)


def _to_kernel(a_BTNH: jax.Array) -> jax.Array:
    """[B, T, heads, …] → [heads, B · T, …]: the batch as one sequence."""
    a = jnp.moveaxis(a_BTNH, 2, 0)
    return a.reshape(a.shape[0], -1, *a.shape[3:])


def _from_kernel(a: jax.Array, batch: int) -> jax.Array:
    """The inverse of `_to_kernel`."""
    return jnp.moveaxis(a.reshape(a.shape[0], batch, -1, *a.shape[2:]), 0, 2)


def _scaled(q: jax.Array, scores: Scores) -> jax.Array:
    """Queries times the scores' factor, which the kernel leaves to its caller."""
    # multiplied in float32, so that they are rounded once
    return (q.astype(jnp.float32) * scores.factor(q.shape[-1])).astype(q.dtype)


def _with_entire_blocks(inputs: Inputs) -> Inputs:
    """The inputs with zeros before the keys, which the window hides, for keys of entire blocks."""
    q, k, v, sight, segments, *_ = inputs
    if not sight.window:
        return inputs
    missing = filled_up(q.shape[1], k.shape[1], sight.window) - k.shape[1]
    k, v = (padded(a, 1, missing) for a in (k, v))
    segments = segments and (segments[0], padded(segments[1], 1, missing))
    return inputs._replace(k=k, v=v, segments=segments)


def _segment_ids(segments) -> splash.SegmentIds | None:
    return None if segments is None else splash.SegmentIds(*(a.reshape(-1) for a in segments))


def _common(inputs: Inputs) -> dict[str, Any]:
    """The arguments that all of jax's kernels have."""
    return {
        "mask_value": splash.DEFAULT_MASK_VALUE,
        "is_mqa": False,
        "mask_function": functools.partial(sees, window=inputs.sight.window),
        "attn_logits_soft_cap": inputs.scores.softcap or None,
    }


LAYOUTS = {f"{name}_layout": splash.QKVLayout.HEAD_DIM_MINOR for name in "qkv"}


def _forward(inputs: Inputs, dtype, *, interpret: bool):
    """Kernel.forward."""
    inputs = _with_entire_blocks(inputs)
    q, k, v, sight, segments, _, scores = inputs
    pairs = _block_pairs(inputs, MOST, MOST)
    sizes = splash.BlockSizes(
        block_q=pairs.queries, block_kv=pairs.keys, block_kv_compute=block_size(pairs.keys, 512)
    )
    # jax's public function makes the kernel's arrays from a mask of queries × keys. The one inside
    # it takes the arrays, which are made from the device's index and the documents here.
    run: Any = splash._splash_attention_forward
    out, (lse,) = run(
        pairs.by_queries(),
        *map(_to_kernel, (_scaled(q, scores), k, v)),
        _segment_ids(segments),
        sinks=None,
        block_sizes=sizes,
        residual_checkpoint_name=None,
        save_residuals=True,
        interpret=interpret,
        **_common(inputs),
    )
    out, lse = (_from_kernel(a, len(q)) for a in (out, lse))
    if sight.diagonal and sight.start is None:  # every query sees its own key at least
        return out.astype(dtype), lse
    # Where no step of the grid ran, the kernel has written nothing: memory may hold NaN, which is
    # not above MASKED either.
    sees_any = lse > MASKED
    return jnp.where(sees_any[..., None], out, 0).astype(dtype), jnp.where(sees_any, lse, MASKED)


def _backward(residuals: AttentionResiduals, g_BTNV, dtype, *, wanted: str, interpret: bool):
    """Kernel.backward; gradients of keys and values are float32 by the fused kernel, or of their
    own types."""
    given, out, lse = residuals
    inputs = _with_entire_blocks(given)
    q, k, v, *_, scores = inputs
    missing = k.shape[1] - given.k.shape[1]
    choice = splash_backward(wanted, k.shape[1], q.shape[3], v.shape[3])
    arrays = _scaled(q, scores), k, v, g_BTNV.astype(q.dtype), lse, delta(g_BTNV, out)
    # One kernel computes the scores once for all three gradients; two compute them twice, but need
    # no sums in vector memory that grow with the keys.
    if choice.kernels == FUSED:
        dq, dk, dv = _fused(arrays, inputs, choice.call_keys, dtype, interpret)
    else:
        dq, dk, dv = _by_two_kernels(arrays, inputs, interpret)
        dq = (dq.astype(jnp.float32) * scores.factor(q.shape[-1])).astype(dtype)
    return dq, dk[:, missing:], dv[:, missing:]


def _by_two_kernels(arrays, inputs: Inputs, interpret: bool):
    """Gradients of scaled queries, of keys and of values. arrays: scaled q, k, v, the gradient of
    the output [B, T or S, heads, …], lse and delta [B, T, N]"""
    q, k, v, g, lse, inner = map(_to_kernel, arrays)
    arguments = q, k, v, _segment_ids(inputs.segments), None, lse, g, inner
    pairs = _block_pairs(inputs, MOST, 512)
    common = _common(inputs) | LAYOUTS | {"interpret": interpret}
    dq = splash._splash_attention_bwd_dq(
        *arguments, bq=pairs.queries, bkv=pairs.keys, mask_info=pairs.by_queries(), **common
    )
    pairs = _block_pairs(inputs, MOST, MOST)
    _, dk, dv = splash._splash_attention_bwd_dkv(
        *arguments,
        bq=pairs.queries,
        bkv=pairs.keys,
        bkv_compute=block_size(pairs.keys, 512),
        mask_info=pairs.by_keys(),
        use_fused_bwd_kernel=False,
        **common,
    )
    return tuple(_from_kernel(a, len(inputs.q)) for a in (dq, dk, dv))


def _fused(arrays, inputs: Inputs, call_keys: int, dtype, interpret: bool):
    """Gradients of queries, of `dtype`, of keys and of values by the fused kernel. arrays: as of
    `_by_two_kernels`; call_keys: the keys of a call"""
    batch, keys = inputs.k.shape[:2]
    q, k, v, *others = map(_to_kernel, arrays)
    pairs = _block_pairs(inputs, MOST, MOST)
    dq: Any = None
    by_call = []  # the gradients of keys and values
    for start in range(0, keys, call_keys):
        # dQ goes from call to call as a float32 sum; only the last call scales and rounds it.
        is_last = start + call_keys == keys
        scale = inputs.scores.factor(q.shape[-1]) if is_last else 1.0
        dq, *by_keys = splash_fused.gradients(
            (q, *(_some_keys(a, batch, start, call_keys) for a in (k, v)), *others),
            pairs.with_keys(start, start + call_keys),
            splash_fused.QuerySum(dq, dtype if is_last else jnp.dtype("float32"), scale),
            inputs.scores.softcap,
            interpret,
        )
        by_call.append([_from_kernel(a, batch) for a in by_keys])
    joined = (a[0] if len(a) == 1 else jnp.concatenate(a, 1) for a in zip(*by_call, strict=True))
    return _from_kernel(dq, batch), *joined


def _some_keys(a: jax.Array, batch: int, start: int, number: int) -> jax.Array:
    """So many keys of each sequence, [heads, B · number, …], of an array [heads, B · S, …]."""
    if a.shape[1] == batch * number:  # all of them: no copy
        return a
    by_sequence = a.reshape(a.shape[0], batch, -1, *a.shape[2:])[:, :, start : start + number]
    return by_sequence.reshape(a.shape[0], batch * number, *a.shape[2:])


@functools.cache
def kernel(interpret: bool, backward: str = "auto") -> Kernel:
    """The kernel. interpret: off a TPU. backward: model.attention_backward"""
    return Kernel(
        functools.partial(_forward, interpret=interpret),
        functools.partial(_backward, wanted=backward, interpret=interpret),
    )
