"""Published models by their config.json: each is read, and the tensors of its rules have the
published number of parameters."""

import math

import pytest
from support.hf_imported import laid_out
from support.hf_published import PUBLISHED

from jaxtrain.config import Config
from jaxtrain.hf.model_config import differing, read_model, write_model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    values, billions = PUBLISHED[name]
    if values.get("num_nextn_predict_layers"):
        values = values | {"num_nextn_predict_layers": 0}
    family, model, _ = read_model(values, "config.json")
    layers = values.get("num_hidden_layers", values.get("n_layer"))
    assert model.dense_layers + model.layers == layers
    assert model.dense_layers == values.get("first_k_dense_replace", 0)
    _, tensors, _ = laid_out(values)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors) / 1e9
    digits = len(str(billions).partition(".")[2])
    assert round(parameters, digits) == billions
    written = write_model(Config(model=model).resolve().model, family, 64)
    assert not [*differing(read_model(written, "config.json")[1], model)]
