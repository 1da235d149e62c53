"""Defaults that depend on other settings."""

import dataclasses

from jaxtrain import config as cfg
from jaxtrain.config import Config


def test_resolve():
    model = cfg.ModelConfig(width=96, heads=6)
    resolved = Config(model=model, data=cfg.DataConfig(sequence_length=64)).resolve()
    assert (
        dataclasses.replace(
            model, kv_heads=6, head_dim=16, rotary_dim=16, mlp_width=384, max_positions=64
        )
        == resolved.model
    )
    assert resolved.resolve() == resolved
    own = dataclasses.replace(
        model, kv_heads=2, head_dim=8, rotary_dim=4, mlp_width=10, max_positions=100
    )
    assert Config(model=own).resolve().model == own


def test_resolve_of_experts_and_latents():
    experts = lambda **fields: Config(model=cfg.ModelConfig(experts=4, **fields)).resolve().model
    assert [experts(experts_per_token=n).router_normalize for n in (1, 2)] == ["never", "always"]
    assert experts(experts_per_token=1, router_normalize="always").router_normalize == "always"
    assert experts(router_normalize="never").router_normalize == "never"
    latent = cfg.ModelConfig(attention="mla", norm_epsilon=1e-5)
    assert Config(model=latent).resolve().model.latent_norm_epsilon == 1e-5
    assert (
        Config(model=dataclasses.replace(latent, latent_norm_epsilon=1e-6))
        .resolve()
        .model.latent_norm_epsilon
        == 1e-6
    )
