"""Kinds of layers: the model of each, and those that share parameters."""

from jaxtrain.config import ModelConfig
from jaxtrain.config.groups.layer_kinds import forms_of_kinds, forms_of_layers, of_kind

EXPERTS = ModelConfig(
    layers=5,
    width=32,
    heads=4,
    pattern=("full", "moe", "latent"),
    kinds={
        "moe.experts": 4,
        "moe.experts_per_token": 1,
        "latent.attention": "mla",
        "full.heads": 2,
        "full.head_dim": 16,
    },
    kv_rank=8,
    rope_head_dim=4,
).resolve(16)


def test_defaults_that_one_kind_alone_has_are_filled_in():
    moe, latent, full = (of_kind(EXPERTS, kind) for kind in ("moe", "latent", "full"))
    assert (moe.expert_width, moe.router_normalize) == (128, "never")
    assert (latent.kv_rank, latent.rope_head_dim, latent.value_head_dim) == (8, 4, 8)
    assert (full.kv_rank, full.experts, full.expert_width) == (0, 0, 0)
    assert (full.heads, full.kv_heads, full.head_dim, full.rotary_dim) == (2, 2, 16, 16)


def test_kinds_of_one_form_have_equal_parameters():
    assert forms_of_layers(EXPERTS) == ("full", "moe", "latent", "full", "moe")
    shapeless = ModelConfig(
        layers=4,
        window=8,
        pattern=("window", "full", "nope", "far"),
        kinds=("far.rotary_base=1e6", "full.attention_softcap=30"),
    ).resolve(16)
    assert set(forms_of_kinds(shapeless).values()) == {""}
    assert forms_of_layers(shapeless) == ()
    assert of_kind(shapeless, "nope").positions == "none"
    assert of_kind(shapeless, "far").rotary_base == 1e6
