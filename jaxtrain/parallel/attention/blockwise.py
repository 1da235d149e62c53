"""Causal attention block by block in plain XLA: memory does not grow with queries × keys.

The algorithm is FlashAttention-2 (Dao 2023, section 3.1). A loop goes over the pairs of a block of
queries and a block of keys in which some query sees some key. The forward (algorithm 1) computes
one block of scores at a time and carries the softmax's largest score and sum along. The backward
(algorithm 2, with its formulas in parallel/attention/flash.py) computes the scores once more, and
sums the gradients. Statistics and sums are float32, matmuls have the arrays' type. The loop is a
`while`, not a scan, so that runtime/layers/backward_split.py does not cut it: it is one equation in
the forward and one in the backward. Begin with `output_and_lse`; `gradients` has the same form, and
`_BlockPairs` the shapes of both.

Shape suffixes: B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dimension
of queries and keys, V of values; in blocks I of queries and J of keys: X tokens of a block, R rows
(the heads of a group × tokens).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.parallel.attention.flash import (
    MASKED,
    AttentionResiduals,
    Inputs,
    Kernel,
    delta,
    padded,
)
from jaxtrain.parallel.dropout import dropped

# of attention block by block: from this number on it was no slower on CPU (benchmarks/README.md)
LEAST_KEYS = 1024
LEAST_BLOCK = 64  # tokens: a smaller block's products are too small for a matmul unit
MOST_BLOCKS = 1 << 15  # whose pairs an int32 counts
SCORES = 1 << 24  # at a time, over the batch and the heads: 64 MB in float32
# The least number of blocks in a window: a block of queries meets one more block of keys.
WINDOW_BLOCKS = 8


def block_size(batch_heads: int, chunk: int, keys: int) -> int:
    """Tokens of a block, a divisor of `chunk`: a 64th of the keys, at least 256, but no more than
    make SCORES for `batch_heads` (batch × heads), and in any case so many that the keys have
    MOST_BLOCKS at most. A chunk without such a divisor of LEAST_BLOCK or more is one block."""
    least = max(LEAST_BLOCK, -(-keys // MOST_BLOCKS))
    most = max(least, min(max(256, keys // 64), math.isqrt(SCORES // batch_heads)))
    return next(
        (n for n in range(min(chunk, most), 0, -1) if chunk % n == 0 and n >= min(chunk, least)),
        chunk,
    )


def window_block_size(batch_heads: int, window: int) -> int:
    """Tokens of a block for queries that see so many keys, in steps of 8; no divisor of anything,
    since the last block may be filled up."""
    before = window - 1
    count = max(WINDOW_BLOCKS, -(-before // math.isqrt(SCORES // batch_heads)))
    return max(LEAST_BLOCK, -(-before // (8 * count)) * 8)


def is_long(batch_heads: int, chunk: int, keys: int, window: int = 0) -> bool:
    """True if attention to this number of keys, in chunks of this length, goes block by block."""
    return keys >= LEAST_KEYS and (window > 0 or block_size(batch_heads, chunk, keys) < chunk)


class _BlockPairs:
    """Arrays cut into blocks, and the pairs of a block of queries and a block of keys that a loop
    goes over. Blocks of queries and of keys have one size."""

    def __init__(self, inputs: Inputs):
        q, k, _, sight, segments, noise, scores = inputs
        self.batch, self.tokens, self.heads, head_dim = q.shape
        self.key_tokens, self.groups, self.window = k.shape[1], k.shape[2], sight.window
        self.scale, self.rule = scores.factor(head_dim), scores
        batch_heads = self.batch * self.heads
        full_chunks = jnp.asarray(sight.full_chunks, jnp.int32)
        chunk = self.tokens // len(full_chunks)
        # tokens that fill up the first block of keys, and the last one of queries and of keys
        self.before, self.after = 0, 0
        if sight.window and len(full_chunks) == 1:
            # numpy: a program needs to know how often it loops
            self.size = window_block_size(batch_heads, sight.window)
            self.before, self.after = -(self.key_tokens - chunk) % self.size, -chunk % self.size
            limits = np.arange(self.before + self.key_tokens + self.after, dtype=np.int32) + 1
            limits_IX = limits[-(chunk + self.after) :].reshape(-1, self.size)
            # the lowest block of keys for each block of queries
            lowest_I = np.maximum(limits_IX[:, 0] - sight.window, 0) // self.size
            self.limit_IX = jnp.asarray(limits_IX)
            self.steps = int((limits_IX[:, -1] // self.size - lowest_I).sum())
        else:
            self.size = block_size(batch_heads, chunk, self.key_tokens)
            # A chunk of queries meets each of the n² pairs of blocks of a chunk that it sees in
            # full, and the pairs on and below the diagonal of its own.
            n = chunk // self.size
            self.steps = sight.pairs * n * n + (
                n * (n + 1) // 2 * len(full_chunks) if sight.diagonal else 0
            )
            on_diagonal = (
                jnp.arange(1, chunk + 1) if sight.diagonal else jnp.zeros(chunk, jnp.int32)
            )
            # the number of keys, from the lowest on, that a query sees
            self.limit_IX = (full_chunks[:, None] * chunk + on_diagonal).reshape(-1, self.size)
            lowest_I = np.zeros(self.tokens // self.size, np.int32)
        # Blocks of keys for each block of queries: its last query sees most. Step s is the pair
        # (_of_queries[s], _of_keys[s]), one block of queries after the other, so that the softmax's
        # running sums are of one block at a time.
        counts = -(-self.limit_IX[:, -1] // self.size) - lowest_I
        self._of_queries = jnp.repeat(
            jnp.arange(len(counts)), counts, total_repeat_length=self.steps
        )
        self._first_step_I = jnp.cumsum(counts) - counts
        of_first_step_I = lowest_I - self._first_step_I
        self._of_keys = jnp.arange(self.steps) + of_first_step_I[self._of_queries]
        cut = lambda a: jnp.swapaxes(a.reshape(self.batch, -1, self.size), 0, 1)
        self._segments = segments and [
            cut(padded(a, 1, before, self.after))
            for a, before in zip(segments, (0, self.before), strict=True)
        ]
        self._noise = None if noise is None else self.queries(noise)

    def queries(self, a_BTNH):
        """[B, T, N, …] → [I, B, K, R, …]."""
        a = padded(a_BTNH, 1, 0, self.after).reshape(
            self.batch, -1, self.size, self.groups, self.heads // self.groups, *a_BTNH.shape[3:]
        )
        # The query heads of a key/value head are rows of the same products.
        a = jnp.moveaxis(a, (1, 0, 3, 4, 2), range(5))
        return a.reshape(*a.shape[:3], -1, *a.shape[5:])

    def from_queries(self, a_IBKR):
        """The inverse of `queries`: [I, B, K, R, …] → [B, T, N, …]."""
        a = a_IBKR.reshape(
            *a_IBKR.shape[:3], self.heads // self.groups, self.size, *a_IBKR.shape[4:]
        )
        a = jnp.moveaxis(a, range(5), (1, 0, 3, 4, 2)).reshape(
            self.batch, self.tokens + self.after, self.heads, *a_IBKR.shape[4:]
        )
        return a[:, : self.tokens]

    def keys(self, a_BSKH):
        """[B, S, K, H] → [J, B, K, X, H]."""
        a = padded(a_BSKH, 1, self.before, self.after)
        return jnp.transpose(
            a.reshape(self.batch, -1, self.size, *a_BSKH.shape[2:]), (1, 0, 3, 2, 4)
        )

    def from_keys(self, a_JBKXH):
        """The inverse of `keys`: [J, B, K, X, H] → [B, S, K, H]."""
        a = a_JBKXH.transpose(1, 0, 3, 2, 4).reshape(self.batch, -1, self.groups, a_JBKXH.shape[-1])
        return a[:, self.before : self.before + self.key_tokens]

    def scores(self, q_BKRH, k_BKXH, i, j):
        """(masked scores of a block of queries and a block of keys, float32 [B, K, R, X]; their
        derivative by the products of queries and keys, where they are not masked)."""
        products = jnp.einsum("bkrh,bkxh->bkrx", q_BKRH, k_BKXH, preferred_element_type=jnp.float32)
        s, by_product = products * self.scale, self.scale
        if self.rule.softcap:
            bounded = jnp.tanh(s / self.rule.softcap)
            s, by_product = bounded * self.rule.softcap, (1 - bounded**2) * self.scale
        limit = self.limit_IX[i][:, None]
        key = j * self.size + jnp.arange(self.size)
        seen = key < limit
        if self.window:
            seen &= key >= limit - self.window
        if self._segments is not None:
            of_queries, of_keys = (
                a[n][:, None, None] for a, n in zip(self._segments, (i, j), strict=True)
            )
            seen = seen & (of_queries[..., :, None] == of_keys[..., None, :])
        by_head = s.reshape(self.batch, self.groups, -1, self.size, self.size)
        return jnp.where(seen, by_head, MASKED).reshape(s.shape), by_product

    def weighted(self, weights_BKRX, i, j):
        """The weights of a block's scores, or other numbers in their places, after dropout."""
        if self._noise is None:
            return weights_BKRX
        distance = self.limit_IX[i][:, None] - 1 - (j * self.size + jnp.arange(self.size))
        by_head = lambda a: a.reshape(self.batch, self.groups, -1, self.size, a.shape[-1])
        noise = by_head(self._noise[i][..., None])
        return dropped(by_head(weights_BKRX), noise, distance, self.rule.dropout).reshape(
            weights_BKRX.shape
        )

    def loop(self, step, carry: Any):
        """The carry after step(i, j, whether j is the lowest for i, carry) for every pair of a
        block i of queries and j of keys."""

        def body(state):
            n, carry = state
            i, j = self._of_queries[n], self._of_keys[n]
            return n + 1, step(i, j, n == self._first_step_I[i], carry)

        return lax.while_loop(lambda state: state[0] < self.steps, body, (0, carry))[1]


def output_and_lse(inputs: Inputs, dtype) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, V] of `dtype`, and log-sum-exp of the scores, float32 [B, T, N], about −1e30
    for a query that sees nothing."""
    blocks = _BlockPairs(inputs)
    q, k, v = blocks.queries(inputs.q), blocks.keys(inputs.k), blocks.keys(inputs.v)
    blocks_shape, block = q.shape[:4], q.shape[1:4]
    begin = jnp.zeros((*block, v.shape[-1])), jnp.full(block, MASKED), jnp.zeros(block)

    def step(i, j, begins, carry):
        *running, out, lse = carry
        sums, top, total = (
            jnp.where(begins, start, previous)
            for start, previous in zip(begin, running, strict=True)
        )
        # The online softmax: sums so far are relative to the highest score so far, and shrink when
        # a block has a higher one.
        scores, _ = blocks.scores(q[i], k[j], i, j)
        highest = jnp.maximum(top, scores.max(-1))
        powers, shrink = jnp.exp(scores - highest[..., None]), jnp.exp(top - highest)
        total = total * shrink + powers.sum(-1)
        update = jnp.einsum(
            "bkrx,bkxv->bkrv",
            blocks.weighted(powers, i, j).astype(v.dtype),
            v[j],
            preferred_element_type=jnp.float32,
        )
        sums = sums * shrink[..., None] + update
        # Every step writes its block of queries, and the last one leaves the result: no step needs
        # a conditional.
        return (
            sums,
            highest,
            total,
            out.at[i].set((sums / total[..., None]).astype(dtype)),
            lse.at[i].set(highest + jnp.log(total)),
        )

    *_, out, lse = blocks.loop(
        step,
        (*begin, jnp.zeros((*blocks_shape, v.shape[-1]), dtype), jnp.full(blocks_shape, MASKED)),
    )
    return blocks.from_queries(out), blocks.from_queries(lse)


def gradients(residuals: AttentionResiduals, g_BTNV, dtype):
    """Gradients of queries, of `dtype`, and of keys and values, float32."""
    inputs, blocks = residuals.inputs, _BlockPairs(residuals.inputs)
    q, g, lse, inner = (
        blocks.queries(a) for a in (inputs.q, g_BTNV, residuals.lse, delta(g_BTNV, residuals.out))
    )
    k, v = blocks.keys(inputs.k), blocks.keys(inputs.v)
    product = lambda subscripts, a, b: jnp.einsum(
        subscripts, a, b, preferred_element_type=jnp.float32
    )

    def step(i, j, begins, carry):
        dq_block, dq, dk, dv = carry
        scores, by_product = blocks.scores(q[i], k[j], i, j)
        weights = jnp.exp(scores - lse[i][..., None])
        by_weights = blocks.weighted(product("bkrv,bkxv->bkrx", g[i], v[j]), i, j)
        by_products = weights * (by_weights - inner[i][..., None]) * by_product
        weights = blocks.weighted(weights, i, j).astype(g.dtype)
        by_products = by_products.astype(q.dtype)
        # The steps of a block of queries follow each other, so dQ's sum is one block. A block of
        # keys comes back with each block of queries, so the sums of dK and dV are entire arrays.
        dq_block = jnp.where(begins, 0.0, dq_block) + product("bkrx,bkxh->bkrh", by_products, k[j])
        dk = dk.at[j].add(product("bkrx,bkrh->bkxh", by_products, q[i]))
        dv = dv.at[j].add(product("bkrx,bkrv->bkxv", weights, g[i]))
        return dq_block, dq.at[i].set(dq_block.astype(dtype)), dk, dv

    zeros = lambda a: jnp.zeros(a.shape, jnp.float32)
    _, dq, dk, dv = blocks.loop(step, (zeros(q[0]), jnp.zeros(q.shape, dtype), zeros(k), zeros(v)))
    return blocks.from_queries(dq), blocks.from_keys(dk), blocks.from_keys(dv)


KERNEL = Kernel(output_and_lse, gradients)
