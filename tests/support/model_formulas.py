"""A decoder-only transformer by its papers' formulas, in plain jax.numpy and without jaxtrain's
modules: what models/ must compute, for dense layers without rotary positions. Norms and MLPs also
of numpy arrays.

Sources: Gemma 2 (arXiv:2408.00118) for norms of 1 + w, norms of outputs, scaled embeddings and
capped logits; OLMo 2 (arXiv:2501.00656) for norms after alone and norms over all heads; PaLM
(arXiv:2204.02311) for parallel blocks; Qwen3-Next's published code for gated attention; gpt-oss's
for clamped SwiGLU.
"""

import jax
import jax.numpy as jnp

from jaxtrain.config import ModelConfig, ResolvedModel


def norm(cfg: ModelConfig, params: dict, x):
    """RMSNorm or LayerNorm over the last dimension."""
    if cfg.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    factor = params["scale"] + (cfg.norm_weight == "one_plus")
    normed = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_epsilon) * factor
    return normed + params.get("bias", 0)


def dense(params: dict, x):
    return x @ params["weight"] + params.get("bias", 0)


def attention(cfg: ResolvedModel, params: dict, x):
    """Causal attention of [B, T, D] without positions."""
    batch, length = x.shape[:2]
    q, k, v = (dense(params[name], x) for name in ("query", "key", "value"))
    if cfg.qk_norm and cfg.qk_norm_over == "projection":
        q, k = norm(cfg, params["query_norm"], q), norm(cfg, params["key_norm"], k)
    q, k, v = (a.reshape(batch, length, -1, cfg.head_dim) for a in (q, k, v))
    if cfg.qk_norm and cfg.qk_norm_over == "head":
        q, k = norm(cfg, params["query_norm"], q), norm(cfg, params["key_norm"], k)
    k, v = (jnp.repeat(a, cfg.heads // cfg.kv_heads, axis=2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(cfg.head_dim)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v).reshape(batch, length, -1)
    if cfg.attention_gate:
        y = y / (1 + jnp.exp(-dense(params["gate"], x)))
    return dense(params["out"], y)


def hidden(cfg: ModelConfig, up, gate=None):
    """The hidden layer of an MLP or an expert. gate: None without one"""
    gelu = lambda a: a / 2 * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (a + 0.044715 * a**3)))
    if gate is None:
        return gelu(up)
    if cfg.activation == "clamped_swiglu":
        gate = jnp.minimum(gate, cfg.activation_limit)
        up = jnp.clip(up, -cfg.activation_limit, cfg.activation_limit) + 1
    alpha = cfg.activation_alpha if cfg.activation == "clamped_swiglu" else 1
    gated = gelu(gate) if cfg.activation == "geglu" else gate / (1 + jnp.exp(-alpha * gate))
    return gated * up


def mlp(cfg: ModelConfig, params: dict, x):
    gate = dense(params["gate"], x) if cfg.activation != "gelu" else None
    return dense(params["down"], hidden(cfg, dense(params["up"], x), gate))


def layer(cfg: ResolvedModel, params: dict, x):
    before, after = cfg.norm_place != "after", cfg.norm_place != "before"
    normed = lambda name, there, x: norm(cfg, params[name], x) if there else x
    read = normed("attention_norm", before, x)
    attended = x + normed("attention_out_norm", after, attention(cfg, params["attention"], read))
    if not cfg.parallel_block:
        read = normed("mlp_norm", before, attended)
    return attended + normed("mlp_out_norm", after, mlp(cfg, params["mlp"], read))


def logits(cfg: ResolvedModel, params: dict, tokens):
    """[B, T, V] of tokens [B, T]."""
    table = params["embed"]["table"][: cfg.vocab_size]
    x = table[tokens] * cfg.embedding_scale
    for i in range(cfg.layers):
        x = layer(cfg, jax.tree.map(lambda a, i=i: a[i], params["layers"]), x)
    head = table if cfg.tied_embeddings else params["head"]["table"][: cfg.vocab_size]
    scores = norm(cfg, params["head"]["norm"], x) @ head.T * cfg.logit_scale
    return cfg.logit_softcap * jnp.tanh(scores / cfg.logit_softcap) if cfg.logit_softcap else scores
