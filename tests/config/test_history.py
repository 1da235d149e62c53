"""history.py: a checkpoint of an earlier version goes on as it was, or is refused by the field that
changed."""

import pytest

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError
from jaxtrain.config.history import VERSION, refuse_to_continue, stored_config

NEW = ("router_normalize", "router_bias", "router_group_best", "latent_norm_epsilon")
EXPERTS = {"model.experts": 12, "model.router": "sigmoid"}
LATENT = {
    "model.attention": "mla",
    "model.kv_rank": 8,
    "model.rope_head_dim": 4,
    "model.norm_epsilon": 1e-5,
}


def groups(number: int, limit: int, choices: int, **more) -> dict:
    names = {
        "router_groups": number,
        "router_group_limit": limit,
        "experts_per_token": choices,
        **more,
    }
    return EXPERTS | {f"model.{name}": value for name, value in names.items()}


def made(changes: dict) -> Config:
    return cfg.replace(Config(), changes).resolve()


def version_1(changes: dict) -> tuple[dict, int]:
    """The config and version that a run with these settings has left: without the fields of version
    2."""
    values = cfg.to_dict(made(changes))
    return values | {
        "model": {name: value for name, value in values["model"].items() if name not in NEW}
    }, 1


# settings of a run of version 1, what version 2 has to change to go on in the same way (None: it
# cannot)
GOES_ON = {
    "dense": ({}, {}),
    "experts": (EXPERTS, {}),
    "one expert a token": (
        EXPERTS | {"model.experts_per_token": 1},
        {"model.router_normalize": "never"},
    ),
    "two best already": (groups(4, 2, 3), {"model.router_group_best": 2}),
    "one best": (groups(4, 2, 2), {"model.router_group_best": 1}),
    "three best": (groups(3, 1, 3), {"model.router_group_best": 3}),
    "groups of one": (groups(12, 5, 3), {"model.router_group_best": 2}),
    "all groups": (groups(4, 4, 2), {"model.router_group_best": 2}),
    "latents": (LATENT, {"model.latent_norm_epsilon": 1e-5}),
    "not moved any more": (EXPERTS | {"model.balance_rate": 0.0}, {"model.router_bias": True}),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_version_1_goes_on(case):
    settings, same = GOES_ON[case]
    stored = version_1(settings)
    refuse_to_continue(*stored, made(settings | same))
    # generation, too, does what the run did
    assert stored_config(*stored).resolve() == made(settings | same)


REFUSED = {
    "model.router_group_best=2 cannot continue a checkpoint of model.router_group_best=1"
    ": use --config.model.router_group_best=1 (or another --workdir)": (
        groups(4, 2, 2),
        {},
    ),
    "model.router_normalize='always' cannot continue a checkpoint of model.router_normalize='never'"
    ": use --config.model.router_normalize=never (or another --workdir)": (
        EXPERTS | {"model.experts_per_token": 1},
        {"model.router_normalize": "always"},
    ),
    "model.latent_norm_epsilon=1e-06 cannot continue a checkpoint of "
    "model.latent_norm_epsilon=1e-05"
    ": use --config.model.latent_norm_epsilon=1e-05 (or another --workdir)": (
        LATENT,
        {"model.latent_norm_epsilon": 1e-6},
    ),
    "model.router_bias=False cannot continue a checkpoint of model.router_bias=True"
    ": use --config.model.router_bias=true (or another --workdir)": (
        EXPERTS | {"model.balance_rate": 0.0},
        {"model.router_bias": False},
    ),
    "model.mtp_depth=2 cannot continue a checkpoint whose modules of prediction read the "
    "stream before the norm, as they did before "
    "version 2: use --workdir=runs/again (or any other)": ({"model.mtp_depth": 2}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_version_1_is_refused_by_the_field_that_changed(message):
    settings, changes = REFUSED[message]
    with pytest.raises(ConfigError) as error:
        refuse_to_continue(*version_1(settings), made(settings | changes))
    assert str(error.value) == message


def test_this_version_goes_on():
    for settings in (
        groups(4, 2, 2),
        {"model.mtp_depth": 2},
        LATENT,
        EXPERTS | {"model.router_bias": False},
    ):
        config = made(settings)
        refuse_to_continue(cfg.to_dict(config), VERSION, config)
        assert stored_config(cfg.to_dict(config), VERSION) == config
