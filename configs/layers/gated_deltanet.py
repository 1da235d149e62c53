"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), the linear recurrence of Qwen3-Next.

    --config.model.mixer=configs/layers/gated_deltanet.py:GatedDeltaNet

The state S [key, value] of a head shrinks by α, loses what it has under the key k, and gets v:
S ← α (S − β k (kᵀ S)) + β k vᵀ, with the output qᵀ S. Tokens go in chunks. With c, sums of log α
in a chunk, and S₀, the state before it, its tokens write the values U, and the outputs are O
(section 3.3 of the paper, the WY form):

    L_ij = β_i (k_i · k_j) exp(c_i − c_j) for j < i        (I + L) U = β (V − exp(c) K S₀)
    O = exp(c) Q S₀ + (Q Kᵀ ∘ exp(c_i − c_j) for j ≤ i) U

A document's first token finds an empty state. Parameters have the published models' names and
order of columns: in_proj_qkvz and in_proj_ba by key heads, conv1d all of q, k and v.

Shapes: B batch, T tokens, H heads, C tokens of a chunk, N chunks.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain import product


class GatedDeltaNet(nnx.Module):
    @dataclasses.dataclass
    class Settings:
        key_heads: int = 2
        value_heads: int = 4
        key_dim: int = 32
        value_dim: int = 32
        conv: int = 4  # tokens that the convolution reads
        chunk: int = 64
        epsilon: float = 1e-6

        def __post_init__(self):
            if self.value_heads % self.key_heads:
                raise ValueError(f"key_heads={self.key_heads} does not divide value_heads")

    def __init__(self, width: int, *, rngs: nnx.Rngs, **settings):
        self.s = s = self.Settings(**settings)
        keys, values, std = s.key_heads * s.key_dim, s.value_heads * s.value_dim, 0.02
        normal = lambda *shape: std * jax.random.normal(rngs.params(), shape)
        rates = jax.random.uniform(rngs.params(), (s.value_heads,), minval=0.01, maxval=16)
        columns, rows = ("width", "heads"), ("heads", "width")
        joined = normal(width, 2 * (keys + values))
        self.in_proj_qkvz = nnx.Param(joined, axes=columns, product=True)
        self.in_proj_ba = nnx.Param(normal(width, 2 * s.value_heads), axes=columns)
        self.conv1d = nnx.Param(normal(s.conv, 2 * keys + values))
        self.A_log = nnx.Param(jnp.log(rates), axes=("heads",))
        self.dt_bias = nnx.Param(jnp.ones(s.value_heads), axes=("heads",))
        self.norm = nnx.Param(jnp.ones(s.value_dim))
        self.out_proj = nnx.Param(normal(values, width), axes=rows, product=True)

    def __call__(self, x, positions, segments):
        return self.mixed(x, self.cache_arrays(x.shape[0], 0, x.dtype), segments)[0]

    def cache_arrays(self, batch, slots, dtype):
        """The last inputs of the convolution, and the state."""
        s, before = self.s, (batch, self.s.conv - 1)
        return {
            "q": jnp.zeros((*before, s.key_heads, s.key_dim), dtype),
            "k": jnp.zeros((*before, s.key_heads, s.key_dim), dtype),
            "v": jnp.zeros((*before, s.value_heads, s.value_dim), dtype),
            "state": jnp.zeros((batch, s.value_heads, s.key_dim, s.value_dim), jnp.float32),
        }

    def cached(self, x, positions, cache, start, count):
        return self.mixed(x, cache, None, count)

    def mixed(self, x, cache, segments, count=None):
        """Returns (the output, the cache after the first `count` tokens)."""
        s, (batch, tokens, _) = self.s, x.shape
        count = tokens if count is None else count
        segments = jnp.zeros((batch, tokens), jnp.int32) if segments is None else segments
        group, keys = s.value_heads // s.key_heads, s.key_heads * s.key_dim
        by_value_head = lambda a: a.reshape(batch, tokens, s.value_heads, -1)

        joined = product(x, self.in_proj_qkvz).reshape(batch, tokens, s.key_heads, -1)
        ends = s.key_dim, 2 * s.key_dim, 2 * s.key_dim + group * s.value_dim
        q, k, v, z = jnp.split(joined, ends, -1)
        v, z = by_value_head(v), by_value_head(z)
        b, a = jnp.split((x @ self.in_proj_ba[...]).reshape(*joined.shape[:3], -1), 2, -1)
        b, a = by_value_head(b)[..., 0], by_value_head(a)[..., 0].astype(jnp.float32)
        weights = jnp.split(self.conv1d[...], (keys, 2 * keys), -1)
        inputs, new = {"q": q, "k": k, "v": v}, {}
        for (name, part), weight in zip(inputs.items(), weights, strict=True):
            weight = weight.reshape(s.conv, *part.shape[2:])
            inputs[name], new[name] = convolved(part, cache[name], weight, segments, count)
        q, k, v = (part.astype(jnp.float32) for part in inputs.values())
        q, k = (a * lax.rsqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        q, k = (jnp.repeat(a, group, 2) for a in (q / math.sqrt(s.key_dim), k))

        # padding behind `count` neither shrinks the state nor writes to it
        real = (jnp.arange(tokens) < count)[:, None]
        beta = jnp.where(real, jax.nn.sigmoid(b.astype(jnp.float32)), 0)
        steps = jnp.where(real, jax.nn.softplus(a + self.dt_bias[...]), 0)
        log_decay = -jnp.exp(self.A_log[...]) * steps

        shape = batch, -1, math.gcd(tokens, s.chunk)
        in_chunks = lambda a: jnp.moveaxis(a.reshape(*shape, *a.shape[2:]), 1, 0)
        heads_first = lambda a: jnp.moveaxis(in_chunks(a), 3, 2)  # [N, B, H, C, …]
        parts = *map(heads_first, (q, k, v, beta, log_decay)), in_chunks(segments)
        (new["state"], _), o = lax.scan(chunk, (cache["state"], segments[:, 0]), parts)
        o = jnp.moveaxis(jnp.moveaxis(o, 2, 3), 0, 1).reshape(z.shape)

        o = o * lax.rsqrt((o * o).mean(-1, keepdims=True) + s.epsilon) * self.norm[...]
        o = (o * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
        return product(o.reshape(batch, tokens, -1), self.out_proj), new


def convolved(x, before, weight, segments, count):
    """SiLU of the causal convolution along [B, T, H, D] inside documents, and its last inputs."""
    most, tokens = weight.shape[0] - 1, x.shape[1]
    x = jnp.concatenate([before.astype(x.dtype), x], 1)
    ids = jnp.concatenate([jnp.repeat(segments[:, :1], most, 1), segments], 1)
    same = lambda i: (ids[:, i : i + tokens] == segments)[..., None, None]
    y = sum(jnp.where(same(i), x[:, i : i + tokens], 0) * weight[i] for i in range(most + 1))
    return jax.nn.silu(y), lax.dynamic_slice_in_dim(x, count, most, 1)


def chunk(carry, parts):
    """The state after a chunk with its last document, and the chunk's outputs [B, H, C, V]."""
    (state, last), (q, k, v, beta, log_decay, ids) = carry, parts
    size, beta = q.shape[2], beta[..., None]
    c = jnp.cumsum(log_decay, -1)
    after = jnp.tril(jnp.ones((size, size), bool)) & (ids[:, None, :, None] == ids[:, None, None])
    decay = jnp.exp(jnp.where(after, c[..., :, None] - c[..., None, :], -jnp.inf))
    seen = jnp.exp(c)[..., None] * (ids == last[:, None])[:, None, :, None]  # of the state before
    written = inverse(beta * (k @ k.mT) * jnp.tril(decay, -1)) @ (beta * (v - seen * (k @ state)))
    o = seen * (q @ state) + ((q @ k.mT) * decay) @ written
    return (state * seen[:, :, -1:] + (k * decay[..., -1, :, None]).mT @ written, ids[:, -1]), o


def inverse(lower):
    """(I + L)⁻¹ of strictly lower L, by blocks of twice the size in each turn: [[A, 0], [B, D]] has
    an inverse with −D⁻¹ B A⁻¹ below its diagonal."""
    size = lower.shape[-1]
    result, i = jnp.broadcast_to(jnp.eye(size), lower.shape), jnp.arange(size)
    for half in (2**n for n in range((size - 1).bit_length())):
        block = i // half
        below = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block[None, :])
        result = result - result @ jnp.where(below, lower, 0) @ result
    return result
