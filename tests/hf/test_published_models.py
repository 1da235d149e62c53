"""Published models by their config.json: each is read as a model of the published number of
layers and parameters."""

import math

import pytest
from support.hf_imported import parameter_shapes
from support.hf_published import PUBLISHED

from jaxtrain.config import Config
from jaxtrain.hf.families.family import COUNTERS
from jaxtrain.hf.model_config import differing, read_model, write_model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    values, billions = PUBLISHED[name]
    family, model, _ = read_model(values, "config.json")
    assert model.mtp_depth == values.get("num_nextn_predict_layers", 0)
    layers = values.get("num_hidden_layers", values.get("n_layer"))
    assert model.dense_layers + model.layers == layers
    assert model.dense_layers == values.get("first_k_dense_replace", 0)
    config = Config(model=model).fill()
    counted = {
        array: math.prod(shape)
        for array, shape in parameter_shapes(config).items()
        if not array.endswith(COUNTERS) and not array.startswith("predictors/")
    }
    parameters = sum(counted.values()) / 1e9
    digits = len(str(billions).partition(".")[2])
    assert round(parameters, digits) == billions
    written = write_model(config.model, family, 64)
    assert not [*differing(read_model(written, "config.json")[1], model)]
