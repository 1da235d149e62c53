"""The planner's memory beside XLA's for H100s (jax 0.10.2, compiled ahead of time by plan/witness.py)."""

import pytest

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.costs.hardware import load
from jaxtrain.plan import layout_flag
from jaxtrain.plan.prediction import predict

# Recipe, layout, settings beside it, GB on a device.
COMPILED = [
    ("llama3_8b", "data=64,zero=3,microbatch=1", {"data.batch_size": 64}, 11.55),
    ("llama3_8b", "data=16,model=4,microbatch=4", {"data.batch_size": 64}, 25.45),
    ("llama3_8b", "data=16,stage=4,repeats=2,schedule=interleaved,microbatch=1", {"data.batch_size": 256}, 31.88),
    ("gpt3_175b", "data=8,stage=16,model=8,repeats=3,schedule=interleaved,microbatch=2", {}, 18.24),
    ("gpt_1t", "data=6,stage=64,model=8,repeats=2,schedule=interleaved,microbatch=1", {}, 40.38),
]


@pytest.mark.parametrize("recipe, layout, settings, gigabytes", COMPILED)
def test_within_a_tenth(recipe, layout, settings, gigabytes):
    config = configs.replace(load_recipe(find_recipe(recipe)), settings)
    planned = predict(layout_flag.apply(config, layout_flag.read(layout)).resolve(), load("h100"))
    assert planned.memory.bytes / 1e9 == pytest.approx(gigabytes, rel=0.1)
