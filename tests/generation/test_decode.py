"""The model over its key/value cache gives the logits of the model over whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small
from support.plain_model import plain_model

from jaxtrain.generation.decode import empty_cache, extend, next_logits, tied_table
from jaxtrain.models import transformer

KINDS = {
    "llama, every other layer without rotary positions": {
        "model.kv_heads": 2,
        "model.rotary_dim": 2,
        "model.biases": ("qkv",),
        "model.nope_layers": (1, 3),
        "model.init_std": 0.3,
    },
    "gpt": {
        "model.positions": "learned",
        "model.norm": "layernorm",
        "model.activation": "gelu",
        "model.biases": ("qkv", "out", "mlp", "norm"),
        "model.tied_embeddings": True,
        "model.init_std": 0.3,
    },
    "experts": {
        "model.experts": 4,
        "model.dense_layers": 1,
        "model.nope_layers": (0, 2),
        "model.shared_experts": 1,
        "model.capacity_factor": 2.0,
        "model.biases": ("out", "router"),
        "model.expert_width": 32,
        "model.init_std": 0.3,
    },
    "latent": {
        "model.attention": "mla",
        "model.kv_rank": 20,
        "model.rope_head_dim": 6,
        "model.value_head_dim": 10,
        "model.biases": ("qkv", "out"),
        "model.init_std": 0.3,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_token_by_token_are_those_of_the_whole_sequence(kind):
    cfg = small.config(changes=KINDS[kind])
    parts, params = plain_model(cfg)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 61)
    expected = jax.jit(lambda params, tokens: transformer.logits(parts, params, tokens))(
        params, tokens
    )

    @jax.jit
    def step(tokens, cache, start):
        x, cache = extend(parts, params, tokens, cache, start, jnp.float32)
        return next_logits(parts, params, x, tied_table(parts, params, jnp.float32)), cache

    cache = empty_cache(parts, 2, 32, jnp.float32)
    # the padding is written over, not looked at
    padded = jnp.pad(tokens[:, :5], ((0, 0), (0, 3)), constant_values=7)
    _, cache = step(padded, cache, 0)
    for at in range(5, 16):
        logits, cache = step(tokens[:, at : at + 1], cache, at)
        # The same sums in another order; logits are of order 1 to 10.
        np.testing.assert_allclose(logits, expected[:, at], rtol=1e-4, atol=1e-4)


def test_padding_beyond_the_learned_positions_is_finite():
    cfg = small.config(changes={"model.positions": "learned", "model.max_positions": 16})
    parts, params = plain_model(cfg)
    x, cache = extend(
        parts,
        params,
        jnp.ones((1, 8), jnp.int32),
        empty_cache(parts, 1, 32, jnp.float32),
        12,
        jnp.float32,
    )
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((x, cache)))
