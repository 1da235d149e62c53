"""The parts put together: parameter counts, the padded vocabulary, gradients of the embedding, and
what a token can see."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ROOT, model_formulas, small

from jaxtrain.models import transformer

CONFIGS = ROOT / "configs"


def recipe(name: str):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config().fill()


def gpt_count(layers: int, width: int, vocabulary: int, positions: int) -> int:
    """12 d² + 13 d a layer: attention 4 d² + 4 d, MLP 8 d² + 5 d, two norms 4 d; and the final norm
    2 d."""
    return (
        vocabulary * width + positions * width + layers * (12 * width**2 + 13 * width) + 2 * width
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2_124m", 124_439_808),
        ("llama3_8b", 8_030_261_248),
        ("gpt3_175b", gpt_count(96, 12288, 50257, 2048)),
    ],
)
def test_parameter_counts(name, count):
    cfg = recipe(name).model
    assert transformer.build(cfg).parameter_count == count
    assert transformer.build(cfg, 8).parameter_count == count  # padding does not count


def test_the_formula_for_gpt():
    assert gpt_count(12, 768, 50257, 1024) == 124_439_808
    assert 174e9 < gpt_count(96, 12288, 50257, 2048) < 176e9


GPT2 = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.biases": ("qkv", "out", "mlp", "norm"),
}
FORMS = {"llama": {}, "gpt2": GPT2 | {"model.tied_embeddings": True}}
# settings of layers and head
PARTS = {
    "gemma 2": {
        "model.norm_weight": "one_plus",
        "model.norm_place": "both",
        "model.activation": "geglu",
        "model.embedding_scale": 5.6,
        "model.logit_softcap": 3.0,
        "model.tied_embeddings": True,
    },
    "olmo 2": {
        "model.norm_place": "after",
        "model.qk_norm": True,
        "model.qk_norm_over": "projection",
        "model.kv_heads": 2,
    },
    "cohere": {
        "model.parallel_block": True,
        "model.norm": "layernorm",
        "model.biases": ("norm",),
        "model.logit_scale": 0.3,
        "model.tied_embeddings": True,
    },
    "gated attention": {
        "model.attention_gate": True,
        "model.norm_weight": "one_plus",
        "model.qk_norm": True,
        "model.kv_heads": 4,
        "model.biases": ("qkv",),
    },
    "clamped": {
        "model.activation": "clamped_swiglu",
        "model.activation_limit": 0.5,
        "model.norm_place": "both",
        "model.qk_norm": True,
        "model.qk_norm_over": "projection",
        "model.attention_gate": True,
        "model.logit_scale": 2.0,
        "model.logit_softcap": 5.0,
        "model.biases": ("qkv", "out", "mlp"),
    },
    "parallel, GELU": {
        "model.parallel_block": True,
        "model.activation": "gelu",
        "model.norm_weight": "one_plus",
        "model.embedding_scale": 0.5,
    },
}


def model(form: str, shards: int = 1):
    """(parts, parameters, tokens), the vocabulary padded for so many shards."""
    return made(FORMS[form], shards)


def made(changes: dict, shards: int = 1):
    cfg = small.config(changes=changes | {"model.init_std": 0.3}).model
    parts = transformer.build(cfg, shards)
    random = np.random.default_rng(0)

    def make(*lead):
        def leaf(s):
            value = s.constant + (s.std or 0.1) * random.standard_normal((*lead, *s.shape)).astype(
                np.float32
            )
            return jnp.pad(
                value,
                [(0, 0)] * len(lead)
                + [(0, full - n) for full, n in zip(s.padded, s.shape, strict=True)],
            )

        return leaf

    params = {k: jax.tree.map(make(), parts.specs[k]) for k in ("embed", "head")}
    params["layers"] = jax.tree.map(make(cfg.layers), parts.specs["layer"])
    return parts, params, random.integers(0, 61, (2, 16), np.int32)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_sees_the_past_alone(form):
    parts, params, tokens = model(form)
    run = jax.jit(lambda tokens: transformer.logits(parts, params, tokens))
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = run(tokens), run(changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.abs(before[:, 9:] - after[:, 9:]).max(-1).min() > 1e-4


OFTEN = ("gemma 2", "cohere", "clamped")


@pytest.mark.parametrize("name", small.named(OFTEN, [name for name in PARTS if name not in OFTEN]))
def test_a_model_by_its_papers_formulas(name):
    """Logits, and gradients of all parameters."""
    parts, params, tokens = made(
        PARTS[name] | {"model.positions": "none", "model.layers": 2}, shards=8
    )
    g = small.normal(1, 2, 16, 61)

    def summed(logits, params):
        result = logits(params)[..., :61]
        return (result * g).sum(), result

    ours = lambda params: transformer.logits(parts, params, tokens)
    formulas = lambda params: model_formulas.logits(parts.cfg, params, tokens)
    (_, got), gradients = jax.jit(jax.value_and_grad(lambda p: summed(ours, p), has_aux=True))(
        params
    )
    (_, expected), theirs = jax.jit(
        jax.value_and_grad(lambda p: summed(formulas, p), has_aux=True)
    )(params)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(theirs), strict=True
    ):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-5 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path)
        )


def test_scaled_embeddings_round_their_factor_first():
    """As Gemma's published code: a product of bfloat16 numbers."""
    parts, params, tokens = made({"model.embedding_scale": 5.657})
    got = parts.embedder(params["embed"])(tokens, np.arange(16)[None], jnp.bfloat16)
    rows = params["embed"]["table"].astype(jnp.bfloat16)[tokens]
    np.testing.assert_array_equal(got, rows * jnp.asarray(5.657, jnp.bfloat16))


@pytest.mark.parametrize("form", FORMS)
def test_padding_of_the_vocabulary_gets_no_probability_and_changes_nothing(form):
    (parts, params, tokens), (padded, padded_params, _) = model(form), model(form, shards=8)
    assert padded_params["embed"]["table"].shape == (64, 32)
    logits = jax.jit(lambda p: transformer.logits(padded, p, tokens))(padded_params)
    assert logits.shape == (2, 16, 64) and np.isneginf(logits[..., 61:]).all()
    plain = jax.jit(lambda p: transformer.logits(parts, p, tokens))(params)
    np.testing.assert_allclose(logits[..., :61], plain, rtol=1e-5, atol=1e-5)
    assert (jax.nn.softmax(logits)[..., 61:] == 0).all()

    gradients = jax.jit(
        jax.grad(lambda p: jax.nn.log_softmax(transformer.logits(padded, p, tokens))[..., 5].sum())
    )(padded_params)
    tables = [
        gradients["embed"]["table"],
        *([] if form == "gpt2" else [gradients["head"]["table"]]),
    ]
    assert all(not t[61:].any() and np.isfinite(t).all() for t in tables)


def test_a_part_of_the_padded_table_may_have_as_many_rows_as_the_vocabulary():
    """4 tokens, 8 rows, of which a stage has 4: the second stage's are all padding."""
    parts = transformer.build(
        small.config(changes={"model.vocab_size": 4, "data.source": "x.bin"}).model, 4, 2
    )
    assert parts.specs["head"]["table"].padded == (8, 32)
    params = {"norm": {"scale": jnp.ones(32)}, "table": jnp.zeros((4, 32))}
    x = jnp.ones((1, 2, 32))
    logits = [parts.head(params)(x, None, first) for first in (0, 4)]
    assert np.isfinite(logits[0]).all() and np.isneginf(logits[1]).all()


def test_positions_and_documents_reach_every_layer():
    parts, params, tokens = model("gpt2")
    segments = np.repeat([[0, 1]], 8, axis=1).repeat(2, axis=0)
    positions = (
        np.concatenate([np.arange(8), np.arange(8)])[None].repeat(2, axis=0).astype(np.int32)
    )
    run = jax.jit(lambda *arrays: transformer.logits(parts, params, *arrays))
    whole, alone = run(tokens, positions, segments), run(tokens[:, 8:])
    np.testing.assert_allclose(whole[:, 8:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2], ids=["shared positions", "own positions"])
def test_gradient_of_positions_is_added_in_place(rows):
    parts, params, tokens = model("gpt2")
    positions = np.random.default_rng(1).integers(0, 16, (rows, 16), np.int32)
    g = np.random.default_rng(2).normal(size=(2, 16, 32)).astype(np.float32)
    start = jnp.ones_like(params["embed"]["positions"])
    wanted = jax.vjp(lambda p: parts.embedder(p)(tokens, positions, jnp.float32), params["embed"])[
        1
    ](g)[0]["positions"]
    np.testing.assert_allclose(
        transformer.add_position_gradient(start, positions, g), wanted + 1, rtol=1e-5, atol=1e-5
    )


def test_logits_keep_the_compute_type_in_their_gradient():
    x, table = jnp.ones((1, 4, 8), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)
    logits, vjp = jax.vjp(transformer.vocabulary_logits, x, table)
    assert logits.dtype == jnp.float32
    dx, dtable = vjp(jnp.full((1, 4, 16), 0.5))
    assert dx.dtype == dtable.dtype == jnp.bfloat16
    assert (dx == 8).all() and (dtable == 2).all()


def test_initial_values_follow_gpt2():
    """The residual stream's variance stays put with depth: its projections are smaller."""
    cfg = small.config(changes={"model.layers": 8, "model.init_std": 0.1}).model
    layer = transformer.build(cfg).specs["layer"]
    stds = {
        "attention": {"query": 0.1, "out": 0.1 / math.sqrt(16)},
        "mlp": {"up": 0.1, "down": 0.1 / math.sqrt(16)},
    }
    for part, names in stds.items():
        for name, std in names.items():
            assert layer[part][name]["weight"].std == pytest.approx(std)


def test_initial_values_count_the_dense_layers():
    changes = {
        "model.layers": 5,
        "model.dense_layers": 3,
        "model.experts": 4,
        "model.shared_experts": 1,
        "model.init_std": 0.1,
    }
    specs = transformer.build(small.config(changes=changes).model).specs
    first, mlp, std = (
        specs["first"]["0"],
        specs["layer"]["mlp"],
        pytest.approx(0.1 / math.sqrt(2 * 8)),
    )
    assert first["attention"]["out"]["weight"].std == first["mlp"]["down"]["weight"].std == std
    assert (
        specs["layer"]["attention"]["out"]["weight"].std
        == mlp["down"].std
        == mlp["shared_down"].std
        == std
    )
    assert first["mlp"]["up"]["weight"].std == mlp["up"].std == pytest.approx(0.1)
