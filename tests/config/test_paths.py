"""A config as JSON, there and back."""

import json

import pytest
from support.broken_settings import BASE

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError


def test_json_round_trip():
    config = cfg.replace(
        BASE,
        {
            "data.loss_mask": ("a", "b"),
            "optimizer.epsilon": 1e-9,
            "model.tied_embeddings": True,
            "model.biases": ("mlp", "qkv"),
            "data.cache": "ü",
        },
    )
    again = cfg.from_dict(json.loads(json.dumps(cfg.to_dict(config))))
    assert again == config
    assert isinstance(again.data.loss_mask, tuple)


@pytest.mark.parametrize(
    "numbers, pattern",
    [
        ([], ()),
        ([3, 7], ("full", "full", "full", "nope")),
        ([0, 3], ("nope", "full", "full", "nope", "full", "full", "full", "full")),
        ([0, 1, 2, 3, 4, 5, 6, 7], ("nope",)),
    ],
)
def test_layers_without_positions_as_versions_before_stored_them(numbers, pattern):
    stored = {"model": {"layers": 6, "dense_layers": 2, "experts": 4, "nope_layers": numbers}}
    config = cfg.from_dict(stored)
    assert config.model.pattern == pattern
    assert config.model.layers == 6


@pytest.mark.parametrize("layers", ["six", None])
def test_a_stored_number_of_layers_that_is_none_is_refused_by_its_name(layers):
    with pytest.raises(cfg.ConfigError, match=r"^model\.layers=.* is not an integer$"):
        cfg.from_dict({"model": {"layers": layers, "nope_layers": [3, 7]}})


def test_too_many_stored_layers_get_no_kinds():
    config = cfg.from_dict({"model": {"layers": 2**62, "nope_layers": [3, 7]}})
    assert config.model == cfg.ModelConfig(layers=2**62)


def test_items_of_a_dict_are_texts():
    kinds = {"window.rotary_base": 10000, "full.biases": ("qkv", "out"), "full.sinks": True}
    texts = ("window.rotary_base=10000", "full.biases=qkv+out", "full.sinks=true")
    assert cfg.ModelConfig(kinds=kinds).kinds == texts
    assert cfg.replace(Config(), {"model.kinds": kinds}).model.kinds == texts
    assert cfg.from_dict({"model": {"kinds": kinds, "block_settings": {"state": 8}}}) == (
        cfg.replace(Config(), {"model.kinds": texts, "model.block_settings": ("state=8",)})
    )


def test_from_dict_takes_what_is_missing_from_the_defaults_and_integers_for_floats():
    config = cfg.from_dict({"optimizer": {"learning_rate": 1}})
    assert config == cfg.replace(Config(), {"optimizer.learning_rate": 1.0})
    assert isinstance(config.optimizer.learning_rate, float)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"mesh": {"stag": 2}}, "mesh.stag=2 is an unknown setting: use --config.mesh.stage=2"),
        ({"mesh": {"steps": 2}}, "mesh.steps=2 is an unknown setting"),
        ({"mash": {"stage": 2}}, "mash={'stage': 2} is an unknown group of settings: use mesh"),
        ({"mesh": 3}, "mesh=3 is a group of settings, not a value"),
        ({"mesh": {"stage": True}}, "mesh.stage=True is not an integer"),
        (
            {"model": {"tied_embeddings": 0}},
            "model.tied_embeddings=0 is not a boolean (true or false): use "
            "--config.model.tied_embeddings=false",
        ),
        (
            {"model": {"norm": None}},
            "model.norm=None is not a string",
        ),
        (
            {"optimizer": {"b1": "0.9"}},
            "optimizer.b1='0.9' is not a number: use --config.optimizer.b1=0.9",
        ),
        (
            {"data": {"loss_mask": "prompt"}},
            "data.loss_mask='prompt' is not a tuple of strings: use --config.data.loss_mask=prompt",
        ),
        ({"data": {"loss_mask": [1]}}, "data.loss_mask=[1] is not a tuple of strings"),
    ],
)
def test_from_dict_is_strict(values, message):
    with pytest.raises(ConfigError) as error:
        cfg.from_dict(values)
    assert str(error.value) == message
