"""The model over its key/value cache gives the logits of the model over whole sequences; over one
that the devices of `context` share, those of one device, without a collective of a cache's size."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small
from support.plain_model import plain_model

from jaxtrain.config.groups.layer_kinds import of_kind
from jaxtrain.generation.decode import (
    cache_shardings,
    empty_cache,
    extend,
    next_logits,
    tied_table,
)
from jaxtrain.models import transformer
from jaxtrain.planner.programs.program import Program, along

KINDS = {
    "llama, every other layer without rotary positions": {
        "model.kv_heads": 2,
        "model.rotary_dim": 2,
        "model.biases": ("qkv",),
        "model.pattern": ("full", "nope"),
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
        "model.pattern": ("nope", "full", "nope", "full", "full"),
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


# layers of several kinds, two of which have a window
WINDOWS = {
    "windows": {
        "model.layers": 7,
        "model.pattern": ("window", "full", "slim"),
        "model.window": 5,
        "model.kinds": ("slim.head_dim=6", "slim.window=3", "slim.kv_heads=4", "slim.sinks=true"),
        "model.kv_heads": 2,
        "model.rotary_dim": 2,
        "model.attention_softcap": 3.0,
        "model.init_std": 0.3,
    },
    "windows of latents, dense layers, an irregular pattern": KINDS["latent"]
    | {
        "model.layers": 3,
        "model.dense_layers": 2,
        "model.pattern": ("window", "window", "dense", "moe", "window"),
        "model.kinds": ("moe.experts=4",),
        "model.window": 5,
    },
}


@pytest.mark.parametrize("kind", small.named(*([kind] for kind in WINDOWS)))
def test_windows_whatever_the_calls(kind):
    """A prompt in pieces, longer and shorter than a window, with padding, and tokens one by one."""
    cfg = small.config(changes=WINDOWS[kind])
    parts, params = plain_model(cfg)
    tokens = jax.random.randint(jax.random.key(1), (2, 30), 0, 61)
    expected = jax.jit(lambda tokens: transformer.logits(parts, params, tokens))(tokens)

    def logits(tokens, cache, start, count):
        x, cache = extend(parts, params, tokens, cache, start, jnp.float32, count)
        return parts.head(params["head"])(x), cache

    steps = jax.jit(logits)
    step = jax.jit(lambda *arguments: logits(*arguments, 1))
    cache, at = empty_cache(parts, 2, 32, jnp.float32), 0
    for count, padding in ((4, 4), (7, 1), *[(1, 0)] * 7, (2, 6), (8, 0), (1, 0), (1, 0)):
        new = jnp.pad(tokens[:, at : at + count], ((0, 0), (0, padding)), constant_values=7)
        if count == 1:
            got, cache = step(new, cache, at)
        else:
            got, cache = steps(new, cache, at, count)
        np.testing.assert_allclose(
            got[:, :count], expected[:, at : at + count], rtol=0, atol=1e-5 * abs(expected).max()
        )
        at += count
    assert at == 30


def test_the_cache_of_a_window_is_as_long_as_it():
    """And never longer than that of all tokens."""
    cfg = small.config(changes=WINDOWS["windows"])
    parts = transformer.build(cfg.model)
    empty = lambda slots: jax.eval_shape(lambda: empty_cache(parts, 2, slots, jnp.bfloat16))
    arrays = empty(1024)
    shapes = {kind: {array.shape for array in arrays[kind]} for kind in arrays}
    assert shapes == {
        "window": {(3, 2, 5, 2, 4)},
        "full": {(2, 2, 1024, 2, 4)},
        "slim": {(2, 2, 3, 4, 6)},
    }
    assert small.nbytes(arrays["window"]) == 2 * 2 * (3 * 2 * 5 * 2 * 4)  # keys and values
    assert {array.shape[2] for array in empty(4)["window"]} == {4}


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


# --- slots split over `context` -------------------------------------------------------------------

BATCH, PROMPT, END = 2, 28, 36  # tokens
SHARED = KINDS | {
    "grouped": {"model.kv_heads": 2, "model.init_std": 0.3},
    **WINDOWS,
    "latent, by a query latent": KINDS["latent"] | {"model.query_rank": 12},
}


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Logits [tokens, B, V] of a sequence, token by token after a prompt; the programs of the
    prompt and of a token, with their bytes of temporary memory, by the number of tokens in a call;
    and the cache after them."""

    logits: np.ndarray
    programs: dict[int, Program]
    temporary: dict[int, int]
    mesh: jax.sharding.Mesh
    cache: dict[str, tuple[jax.Array, ...]]


@functools.cache
def decoded(kind: str, context: int, model: int, slots: int) -> Decoded:
    cfg = small.config((1, 1, model), changes=SHARED[kind] | {"mesh.context": context})
    parts, params = plain_model(cfg)
    mesh, tokens = small.mesh_of(cfg), np.random.default_rng(1).integers(0, 61, (BATCH, END))
    tokens, programs, logits = tokens.astype(np.int32), {}, []

    def step(params, tokens, cache, start):
        count = 1 if tokens.shape[1] == model else None
        x, cache = extend(parts, params, tokens, cache, start, jnp.float32, count)
        return next_logits(parts, params, x, tied_table(parts, params, jnp.float32)), cache

    def run(tokens, cache, start):
        arguments = (params, tokens, cache, np.int32(start))
        count = tokens.shape[1]
        if count not in programs:
            programs[count] = (
                jax.jit(step, out_shardings=(None, stored)).lower(*arguments).compile()
            )
        return programs[count](*arguments)

    with jax.set_mesh(mesh):
        stored = cache_shardings(parts, mesh)
        empty = jax.jit(lambda: empty_cache(parts, BATCH, slots, jnp.float32), out_shardings=stored)
        _, cache = run(tokens[:, :PROMPT], empty(), 0)
        for at in range(PROMPT, END):
            # the devices that split the sequence divide the tokens of a call
            result, cache = run(np.repeat(tokens[:, at : at + 1], model, 1), cache, at)
            logits.append(np.asarray(result))
    texts = {count: Program(program.as_text()) for count, program in programs.items()}
    temporary = {
        count: program.memory_analysis().temp_size_in_bytes for count, program in programs.items()
    }
    return Decoded(np.stack(logits), texts, temporary, mesh, cache)


@pytest.mark.parametrize(
    "case",
    small.named(
        [("grouped", 3, 2), ("latent", 4, 1), ("windows", 2, 2)],
        [
            *(("windows", 3, 1), ([*WINDOWS][1], 2, 2)),
            *(("grouped", 2, 1), ("grouped", 4, 2), ("grouped", 2, 4), ("grouped", 5, 1)),
            *(("latent", 3, 2), ("latent, by a query latent", 2, 2)),
            *(("experts", 3, 2), ("gpt", 2, 2)),
        ],
    ),
)
def test_a_split_cache(case):
    kind, context, model = case
    local_slots = 32 if context == 2 else 16  # tokens after the prompt go over a device's border
    slots = local_slots * context
    one, split = decoded(kind, 1, 1, slots), decoded(kind, context, model, slots)
    cfg = small.config(changes=SHARED[kind])
    # The same numbers in other sums, in float32, whose relative precision is 6e-8.
    largest = np.abs(one.logits).max()
    assert largest > 1
    np.testing.assert_allclose(split.logits, one.logits, rtol=0, atol=1e-5 * largest)
    np.testing.assert_array_equal(split.logits.argmax(-1), one.logits.argmax(-1))
    windows = {kind: of_kind(cfg.model, kind).window for kind in split.cache}
    for kind, arrays in split.cache.items():
        length = -(-windows[kind] // context) if windows[kind] else local_slots
        for array in arrays:
            assert {part.data.shape[2] for part in array.addressable_shards} == {length}


@pytest.mark.parametrize(
    "case",
    small.named(
        [("grouped", 3, 2, 16), ("latent", 4, 1, 16)],
        [
            *(("grouped", 3, 2, 512), ("grouped", 2, 4, 512), ("latent", 4, 1, 512)),
            *(("latent", 3, 2, 512), ("experts", 3, 2, 512)),
        ],
    ),
)
def test_collectives_of_a_split_cache(case):
    """In a layer two all-reduces over `context`: the largest scores; and weights with weighted
    values. None of their sizes has the number of slots. Over `model` go activations alone."""
    kind, context, model, local_slots = case
    cfg, split = small.config(changes=SHARED[kind]).model, decoded(*case[:3], local_slots * context)
    values = cfg.kv_rank if cfg.attention == "mla" else cfg.head_dim
    bodies = cfg.dense_layers + 1  # dense layers, and a loop over the others
    arrays = jax.tree.leaves(split.cache)
    of_a_layer = min(a.nbytes // len(a) // context // model for a in arrays)
    for tokens, program in split.programs.items():
        scores = 4 * BATCH * tokens * cfg.heads // model
        expected = [(scores,), (scores * values, scores)] * bodies
        activations = 4 * BATCH * tokens * max(cfg.width, cfg.vocab_size)
        assert local_slots < 512 or tokens == PROMPT or of_a_layer > 8 * activations
        over_context = []
        for i in program.below(program.entry):
            if i.collective:
                sizes = tuple(operand.bytes for operand in program.operands(i))
                if along(i, split.mesh.shape)[0] == ("context",):
                    over_context.append((i.collective, sizes))
                else:
                    assert sum(sizes) <= activations, i.text
        assert over_context == [("all-reduce", sizes) for sizes in expected]


@pytest.mark.full
@pytest.mark.parametrize("case", [("grouped", 1, 1), ("grouped", 3, 1), ("latent", 4, 1)])
def test_a_step_does_not_copy_the_cache(case):
    """It has memory for some layers of it."""
    kind, context, model = case
    split = decoded(kind, context, model, 2048 * context)
    arrays = jax.tree.leaves(split.cache)
    cache = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    assert split.temporary[model] < cache
