"""The states of a config, and defaults that depend on other settings."""

import dataclasses
import json
import pickle

import pytest

from jaxtrain import config as cfg
from jaxtrain.config import Config


def test_resolve():
    model = cfg.ModelConfig(width=96, heads=6)
    filled = Config(model=model, data=cfg.DataConfig(sequence_length=64)).fill()
    assert vars(filled.model) == vars(model) | {
        "kv_heads": 6,
        "head_dim": 16,
        "rotary_dim": 16,
        "mlp_width": 384,
        "max_positions": 64,
    }
    assert filled.fill() == filled
    own = dataclasses.replace(
        model, kv_heads=2, head_dim=8, rotary_dim=4, mlp_width=10, max_positions=100
    )
    assert vars(Config(model=own).fill().model) == vars(own)


def test_resolve_of_experts_and_latents():
    experts = lambda **fields: Config(model=cfg.ModelConfig(experts=4, **fields)).fill().model
    assert [experts(experts_per_token=n).router_normalize for n in (1, 2)] == ["never", "always"]
    assert experts(experts_per_token=1, router_normalize="always").router_normalize == "always"
    assert experts(router_normalize="never").router_normalize == "never"
    latent = cfg.ModelConfig(attention="mla", norm_epsilon=1e-5)
    assert Config(model=latent).fill().model.latent_norm_epsilon == 1e-5
    assert (
        Config(model=dataclasses.replace(latent, latent_norm_epsilon=1e-6))
        .fill()
        .model.latent_norm_epsilon
        == 1e-6
    )


STATES = {
    "requested": lambda config: config,
    "meshed": Config.on_own_mesh,
    "filled": Config.fill,
    "resolved": Config.resolve,
    "stored": Config.to_store,
}


@pytest.mark.parametrize("state", STATES)
def test_a_state_is_a_value(state):
    """Equal and hashed by state and settings, pickled with its state, and written as JSON as the
    config that it is."""
    config, reach = cfg.replace(Config(), {"mesh.data": 2}), STATES[state]
    one, other = reach(config), reach(cfg.replace(config, {"mesh.data": 4}))
    assert one == reach(config) and hash(one) == hash(reach(config)) and one != other
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and type(copy) is type(one) and type(copy.model) is type(one.model)
    read = cfg.from_dict(json.loads(json.dumps(cfg.to_dict(one))))
    assert type(read) is Config and cfg.to_dict(read) == cfg.to_dict(one)


@pytest.mark.parametrize("state", STATES)
def test_a_changed_config_is_one_as_read(state):
    config = STATES[state](cfg.replace(Config(), {"mesh.data": 2}))
    changed = cfg.replace(config, {"model.width": 64})
    assert type(changed) is Config and type(changed.model) is cfg.ModelConfig
    assert changed.resolve().model.heads == config.model.heads
    if state != "requested":
        with pytest.raises(TypeError, match="jaxtrain.config.replace changes its settings"):
            dataclasses.replace(config, model=changed.model)


def test_an_open_mesh_is_not_resolved():
    with pytest.raises(ValueError, match="mesh.data=-1 is no number of devices"):
        Config().resolve()
    assert Config().fill().mesh.data == -1


def test_op_times_of_a_resolved_config():
    config = cfg.replace(Config(), {"mesh.data": 2}).resolve()
    timed = config.with_times((1.0, 2.0, 1.0))
    assert type(timed) is type(config) and timed.pipeline.times == (1.0, 2.0, 1.0)
    assert timed.with_times(()) == config
