"""The backward of splash (parallel/attention/splash.py) as one Pallas kernel with five products.

Begin with `_kernel`, a step of the grid; `gradients` makes the grid and its blocks.

The grid is key/value heads × sequences × query heads of the key/value head × blocks of queries ×
blocks of keys (of a window: those that it may reach). All is summed in vector memory, in float32:

    dQ of a block of queries           over the blocks of keys, the innermost steps
    dK and dV of a sequence's keys     over all steps of a key/value head and sequence, then copied
                                       to memory

so no partial gradient passes through memory. More keys than fit take several calls: a call begins
with the dQ of the one before. Scores are computed with keys in rows and queries in columns,
S = K Qᵀ, so that what belongs to a query is a row: two of the products then need no transpose.

Shape suffixes: B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dimension
of queries and keys, V of values; X, Y blocks of queries, of keys in a sequence.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxtrain.config.splash_backward import STEP, block_size

# The score of a pair that is masked: exp of it is 0, and no difference of two scores is infinite.
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
NAME = "splash_mha_bwd_fused_{keys}_keys"  # benchmarks/step_seconds.py reads it
KEYS_AT_ONCE = 512  # whose scores are computed, of a block of keys
BY_COLUMNS = (((1,), (1,)), ((), ()))  # a bᵀ
BY_ROWS = (((0,), (0,)), ((), ()))  # aᵀ b


def _product(a, b, contracted=(((1,), (0,)), ((), ()))):
    return lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)


def _kernel(
    fetched_ref,
    run_ref,
    q_ref,
    k_ref,
    v_ref,
    g_ref,
    lse_ref,
    delta_ref,
    last_key_ref,
    of_queries_ref,
    of_keys_ref,
    before_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    dq_sum,
    dk_sum,
    dv_sum,
    *,
    keys_at_once: int,
    scale: float,
    softcap: float,
    window: int,
):
    """A step of the grid.

    fetched, run: int32 [B · X · steps], in scalar memory: the block of keys that each step has,
        which the grid's index functions read, too, and whether it is computed
    q … of_keys: blocks in vector memory; before: the dQ of earlier calls, or None
    dq: a block of the result; dk, dv: the entire arrays in memory, which `end_keys` copies to
    dq_sum, dk_sum, dv_sum: float32 in vector memory, which stay from step to step
    """
    head, sequence, group, x, y = map(pl.program_id, range(5))
    groups, blocks_q, steps = map(pl.num_programs, (2, 3, 4))
    block, keys = k_ref.shape[0], dk_sum.shape[0]
    step = (sequence * blocks_q + x) * steps + y
    key_block = fetched_ref[step] - sequence * (keys // block)  # of a step that is computed

    # The steps go on in the order of the grid, the last index fastest. Keys of a sequence are begun
    # with their first query head and block, and complete with the last.
    @pl.when((group == 0) & (x == 0) & (y == 0))
    def start_keys():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(y == 0)
    def start_queries():
        dq_sum[...] = jnp.zeros_like(dq_sum) if before_ref is None else before_ref[...]

    def add(part: int):
        q, g = q_ref[...], g_ref[...]
        in_block = pl.ds(part * keys_at_once, keys_at_once)
        lowest_key = key_block * block + part * keys_at_once
        k, v = k_ref[in_block, :], v_ref[in_block, :]
        scores = _product(k, q, BY_COLUMNS)
        if softcap:
            bounded = jnp.tanh(scores / softcap)
            scores = bounded * softcap
        key = lowest_key + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        sees = last_key_ref[...] >= key
        if window:
            sees &= last_key_ref[...] - key < window
        if of_keys_ref is not None:
            # STEP equal columns in memory become as many as there are queries.
            segments = jnp.tile(of_keys_ref[in_block, :], (1, scores.shape[1] // STEP))
            sees &= segments == of_queries_ref[...]
        # algorithm 2 of parallel/attention/flash.py, transposed
        p = jnp.exp(jnp.where(sees, scores, HIDDEN) - lse_ref[...])
        at = pl.ds(pl.multiple_of(lowest_key, keys_at_once), keys_at_once)
        dv_sum[at, :] += _product(p.astype(g.dtype), g)
        ds = (_product(v, g, BY_COLUMNS) - delta_ref[...]) * p
        ds = (ds * (1 - bounded**2) if softcap else ds).astype(q.dtype)
        dk_sum[at, :] += _product(ds, q)
        dq_sum[...] += _product(ds, k, BY_ROWS)

    @pl.when(run_ref[step] != 0)
    def run():
        # In parts of the block, whose scores fit in vector memory with the sums.
        for part in range(block // keys_at_once):
            add(part)

    @pl.when(y == steps - 1)
    def end_queries():
        dq_ref[...] = (dq_sum[...] * scale).astype(dq_ref.dtype)

    # dK and dV are as long as a sequence, so they are not blocks that Pallas writes after each
    # step.
    @pl.when((group == groups - 1) & (x == blocks_q - 1) & (y == steps - 1))
    def end_keys():
        at = pl.ds(pl.multiple_of(sequence * keys, keys), keys)
        pltpu.sync_copy(dk_sum, dk_ref.at[head, at])
        pltpu.sync_copy(dv_sum, dv_ref.at[head, at])


class QuerySum(NamedTuple):
    """The sum of the queries' gradients from call to call.

    before: the sum of the calls before, [N, B · T, H], not scaled; None in the first call
    dtype:  of this call's result
    scale:  by which this call multiplies its result
    """

    before: jax.Array | None
    dtype: jnp.dtype
    scale: float


def gradients(arrays, pairs, query_sum: QuerySum, softcap: float, interpret: bool):
    """Gradients of queries, of `query_sum.dtype`, and of keys and values, float32, each [heads,
    tokens, size of a head].

    arrays:   scaled q [N, B · T, H], k [K, B · S, H], v [K, B · S, V], the gradient of the output
              [N, B · T, V], lse and delta [N, B · T]
    pairs:    the pairs of blocks that are computed (splash._BlockPairs)
    softcap:  as of flash.Scores
    """
    q, k, v, g, lse, delta = arrays
    segments, before = pairs.segments, query_sum.before
    batch, blocks_q, _ = pairs.run_BXY.shape
    group, bq, bk, keys = len(q) // len(k), pairs.queries, pairs.keys, pairs.key_tokens
    info = pairs.by_queries()
    steps = info.block_mask.shape[-1]
    # of each step: its block of keys, counted through the batch, and whether it is computed
    prefetched = [a[0].reshape(-1).astype(jnp.int32) for a in (info.data_next, info.block_mask)]

    # Which block of each operand a step of the grid has. h: key/value head, b: sequence, n: query
    # head of h, i: block of queries, j: block of keys. A step that is not computed has the keys and
    # values of the next one that is: the kernel fetches what it will need, or still has it.
    of_query = lambda h, b, n, i, j, *_: (h * group + n, b * blocks_q + i, 0)
    row = lambda h, b, n, i, j, *_: (h * group + n, 0, b * blocks_q + i)
    shared_row = lambda h, b, n, i, j, *_: (0, b * blocks_q + i)
    fetched = lambda fetch, b, i, j: fetch[(b * blocks_q + i) * steps + j]
    of_key = lambda h, b, n, i, j, fetch, *_: (h, fetched(fetch, b, i, j), 0)
    column = lambda h, b, n, i, j, fetch, *_: (fetched(fetch, b, i, j), 0)

    in_queries = lambda a: pl.BlockSpec((None, bq, a.shape[-1]), of_query)
    in_keys = lambda a: pl.BlockSpec((None, bk, a.shape[-1]), of_key)
    in_rows, in_shared_row = pl.BlockSpec((None, 1, bq), row), pl.BlockSpec((1, bq), shared_row)
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    of_queries = of_keys = None
    if segments is not None:
        of_queries = segments[0].reshape(1, -1)
        of_keys = lax.broadcast_in_dim(segments[1].reshape(-1), (k.shape[1], STEP), (0,))
    last_key = jnp.tile(pairs.last_T, batch)[None]
    operands: tuple[Any, ...] = (
        *(q, k, v, g, lse[:, None], delta[:, None]),
        *(last_key, of_queries, of_keys, before),
    )
    in_specs = (
        *(in_queries(q), in_keys(k), in_keys(v), in_queries(g), in_rows, in_rows),
        in_shared_row,
        None if of_queries is None else in_shared_row,
        None if of_keys is None else pl.BlockSpec((bk, STEP), column),
        None if before is None else in_queries(before),
    )
    sums = [pltpu.VMEM((n, a.shape[-1]), jnp.float32) for n, a in ((bq, q), (keys, k), (keys, v))]
    return pl.pallas_call(
        functools.partial(
            _kernel,
            keys_at_once=block_size(bk, KEYS_AT_ONCE),
            scale=query_sum.scale,
            softcap=softcap,
            window=pairs.window,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(k), batch, group, blocks_q, steps),
            in_specs=in_specs,
            out_specs=(in_queries(q), in_memory, in_memory),
            scratch_shapes=sums,
        ),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, query_sum.dtype),
            *(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (k, v)),
        ),
        # Each key/value head begins with sums of its own, so a chip's cores may share the heads.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", *("arbitrary",) * 4)),
        interpret=interpret,
        name=NAME.format(keys=keys),
    )(*prefetched, *operands)
