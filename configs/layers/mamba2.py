"""A layer of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): norm, state space dual, residual sum.

    --config.model.block=configs/layers/mamba2.py:Mamba2

The state h [head_dim, state] of a head shrinks by exp(Δ A) and gets Δ x Bᵀ, and its output is

    h ← exp(Δ A) h + Δ x Bᵀ        y = h C + D x

Tokens go in chunks (section 6 of the paper). With c, the sums of Δ A in a chunk, a chunk adds

    Σ exp(c_last − c_j) Δ_j x_j B_jᵀ to the state, and (C Bᵀ ∘ exp(c_i − c_j) for j ≤ i) Δ x to y

Both are products; a scan over the chunks alone makes the state before each. A document's first
token finds an empty state.

Shapes: B batch, T tokens, H heads, C tokens of a chunk, N chunks.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain import product


class Mamba2(nnx.Module):
    @dataclasses.dataclass
    class Settings:
        heads: int = 8
        head_dim: int = 32
        state: int = 32
        conv: int = 4  # tokens that the convolution reads
        chunk: int = 64
        epsilon: float = 1e-5

    def __init__(self, width: int, *, rngs: nnx.Rngs, **settings):
        self.s = s = self.Settings(**settings)
        inner, std = s.heads * s.head_dim, 0.02
        normal = lambda *shape: std * jax.random.normal(rngs.params(), shape)
        uniform = lambda low, high: jax.random.uniform(
            rngs.params(), (s.heads,), minval=low, maxval=high
        )
        weight = lambda columns: nnx.Param(
            normal(width, columns), axes=("width", "heads"), product=True
        )
        self.norm = nnx.Param(jnp.ones(width))
        self.gate, self.input = weight(inner), weight(inner)
        self.step = nnx.Param(normal(width, s.heads), axes=("width", "heads"))
        self.b_and_c = nnx.Param(normal(width, 2 * s.state))  # of all heads
        self.conv_input = nnx.Param(normal(s.conv, inner), axes=(None, "heads"))
        self.conv_b_and_c = nnx.Param(normal(s.conv, 2 * s.state))
        self.rate = nnx.Param(jnp.log(uniform(1, 16)), axes=("heads",))  # log −A
        # steps from 0.001 to 0.1 at first, by the inverse of softplus
        steps = jnp.exp(uniform(math.log(0.001), math.log(0.1)))
        self.step_bias = nnx.Param(steps + jnp.log(-jnp.expm1(-steps)), axes=("heads",))
        self.skip = nnx.Param(jnp.ones(s.heads), axes=("heads",))
        self.inner_norm = nnx.Param(jnp.ones(inner), axes=("heads",))
        self.output = nnx.Param(normal(inner, width), axes=("heads", "width"), product=True)

    def __call__(self, x, positions, segments):
        return self.mixed(x, self.cache_arrays(x.shape[0], 0, x.dtype), segments)[0]

    def cache_arrays(self, batch, slots, dtype):
        """The last inputs of the convolutions, and the state."""
        s, before = self.s, (batch, self.s.conv - 1)
        return {
            "input": jnp.zeros((*before, s.heads * s.head_dim), dtype),
            "b_and_c": jnp.zeros((*before, 2 * s.state), dtype),
            "state": jnp.zeros((batch, s.heads, s.head_dim, s.state), jnp.float32),
        }

    def cached(self, x, positions, cache, start, count):
        return self.mixed(x, cache, None, count)

    def mixed(self, x, cache, segments, count=None):
        """Returns (the output, the cache after the first `count` tokens)."""
        s, (batch, tokens, _) = self.s, x.shape
        count = tokens if count is None else count
        segments = jnp.zeros((batch, tokens), jnp.int32) if segments is None else segments
        y = normed(x, self.norm[...], s.epsilon)
        gate, u, new = product(y, self.gate), product(y, self.input), {}
        u, new["input"] = convolved(u, cache["input"], self.conv_input[...], segments, count)
        bc, weight = y @ self.b_and_c[...], self.conv_b_and_c[...]
        bc, new["b_and_c"] = convolved(bc, cache["b_and_c"], weight, segments, count)
        b, c = jnp.split(bc.astype(jnp.float32), 2, -1)
        u = u.astype(jnp.float32).reshape(batch, tokens, s.heads, -1)
        step = jax.nn.softplus((y @ self.step[...]).astype(jnp.float32) + self.step_bias[...])
        # padding behind `count` neither shrinks the state nor adds to it
        step = jnp.where((jnp.arange(tokens) < count)[:, None], step, 0)

        state = cache["state"]
        args = u * step[..., None], -jnp.exp(self.rate[...]) * step, b, c, segments, state, s.chunk
        out, new["state"] = dual(*args)
        out = (out + self.skip[...][:, None] * u).reshape(batch, tokens, -1)
        out = normed(out * jax.nn.silu(gate.astype(jnp.float32)), self.inner_norm[...], s.epsilon)
        return x + product(out.astype(x.dtype), self.output), new


def normed(x, scale, epsilon):
    """RMSNorm, in the type of x."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + epsilon) * scale
    return y.astype(x.dtype)


def convolved(x, before, weight, segments, count):
    """SiLU of the causal convolution along [B, T, D] inside documents, and its last inputs."""
    most, tokens = weight.shape[0] - 1, x.shape[1]
    x = jnp.concatenate([before.astype(x.dtype), x], 1)
    ids = jnp.concatenate([jnp.repeat(segments[:, :1], most, 1), segments], 1)
    same = lambda i: (ids[:, i : i + tokens] == segments)[..., None]
    y = sum(jnp.where(same(i), x[:, i : i + tokens], 0) * weight[i] for i in range(most + 1))
    return jax.nn.silu(y), lax.dynamic_slice_in_dim(x, count, most, 1)


def dual(u, log_decay, b, c, ids, state, chunk):
    """Returns (Σ_j≤i exp(Σ_j<k≤i log_decay_k) (c_i · b_j) u_j [B, T, H, D] inside documents, the
    state after them), from the state [B, H, D, S] before."""
    shape = u.shape[0], -1, math.gcd(u.shape[1], chunk)
    in_chunks = lambda a: a.reshape(*shape, *a.shape[2:])  # [B, N, C, …]
    u_, log_decay, b, c, ids = map(in_chunks, (u, log_decay, b, c, ids))
    sums = jnp.cumsum(log_decay, 2)
    after = jnp.tril(jnp.ones((shape[2], shape[2]), bool)) & (ids[..., None] == ids[:, :, None])
    between = sums[:, :, :, None] - sums[:, :, None]  # [B, N, C, C, H]
    decay = jnp.exp(jnp.where(after[..., None], between, -jnp.inf))
    out = jnp.einsum("bnis,bnjs,bnijh,bnjhd->bnihd", c, b, decay, u_)
    added = jnp.einsum("bnjs,bnjh,bnjhd->bnhds", b, decay[:, :, -1], u_)
    # what each token sees of the state before its chunk: nothing from another document
    last = jnp.concatenate([ids[:, :1, 0], ids[:, :-1, -1]], 1)[..., None]
    seen = jnp.exp(sums) * (ids == last)[..., None]

    def step(state, each):
        shrinks, added = each
        return state * shrinks[..., None, None] + added, state

    by_chunk = lambda a: jnp.moveaxis(a, 1, 0)
    state, before = lax.scan(step, state, (by_chunk(seen[:, :, -1]), by_chunk(added)))
    out = out + jnp.einsum("bnis,bnih,nbhds->bnihd", c, seen, before)
    return out.reshape(u.shape), state
