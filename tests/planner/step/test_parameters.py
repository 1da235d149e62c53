"""A device's parameters, as the planner counts them, are those of the arrays that training
allocates."""

import math

import jax
import pytest

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.search.predict import PlannedTable, with_op_times
from jaxtrain.planner.step.step_model import settings_of, step_model_of
from jaxtrain.training.step import make_step

LAYOUTS = {
    "data 8": {"data": 8},
    "data 2 · model 4": {"data": 2, "model": 4},
    "data 2 · stage 2 · model 2": {"data": 2, "stage": 2, "model": 2},
    "stage 4 · model 2": {"stage": 4, "model": 2},
    "data 4 · stage 2": {"data": 4, "stage": 2},
    "stage 2 · model 4": {"stage": 2, "model": 4},
}
STAGED = {name: LAYOUTS[name] for name in ("data 2 · stage 2 · model 2", "stage 4 · model 2")}
EXPERTS = {
    "data 2 · stage 2 · expert 2": {"data": 2, "stage": 2, "expert": 2},
    "stage 2 · model 2 · expert 2": {"stage": 2, "model": 2, "expert": 2},
    "data 2 · expert 4": {"data": 2, "expert": 4},
}
GPT = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.biases": ("qkv", "out", "mlp", "norm"),
}
# seven layers, so that stages differ: experts or not, and heads of two sizes with a window or not
ALTERNATING = {
    "model.layers": 7,
    "model.pattern": ("full", "dense", "dense"),
    "model.dense_layers": 1,
    "model.mtp_depth": 1,
}
WINDOWS = {
    "model.layers": 7,
    "model.pattern": ("window", "window", "wide"),
    "model.window": 16,
    "model.kinds": ("wide.head_dim=48", "wide.window=0", "wide.qk_norm=true"),
}
# (recipe, changes, layouts)
CASES = [
    ("tiny", {"model.qk_norm": True, "model.biases": ("qkv",)}, LAYOUTS),
    ("tiny", GPT | {"model.vocab_size": 509}, LAYOUTS),  # a prime: padded wherever it is split
    ("mixtral_tiny", {"model.biases": ("out", "router")}, LAYOUTS | EXPERTS),
    ("deepseek_tiny", {"model.biases": ("qkv", "router")}, LAYOUTS | EXPERTS),
    ("mixtral_tiny", ALTERNATING, STAGED | EXPERTS),
    ("tiny", WINDOWS, STAGED),
]


@pytest.mark.parametrize(
    ("recipe", "changes", "layouts"),
    CASES,
    ids=["tiny", "gpt", "mixtral_tiny", "deepseek_tiny", "experts alternate", "windows"],
)
def test_parameters_of_a_device(recipe, changes, layouts):
    for name, layout in layouts.items():
        sizes = {
            f"mesh.{axis}": layout.get(axis, 1)
            for axis in ("replica", "data", "stage", "context", "expert", "model")
        }
        staged = {
            "pipeline.schedule": "1f1b",
            "pipeline.repeats": 1,
            "pipeline.microbatches": 2 if "stage" in layout else 1,
        }
        config = configs.replace(
            load_recipe(find_recipe(recipe)), sizes | staged | changes
        ).resolve()
        mesh = make_mesh(sizes_of(config.mesh))
        with jax.set_mesh(mesh):
            params = make_step(config, mesh).abstract_state().params
        allocated = sum(
            math.prod(array.sharding.shard_shape(array.shape)) for array in jax.tree.leaves(params)
        )
        work = step_model_of(config, load("h100"))
        slots = PlannedTable(with_op_times(config, work)).slots()
        held = (
            work.device.parameters(slots.stored_layers, slots.shares_vocabulary)
            if slots
            else work.device.parameters((), False)
        )
        assert work.device.sharded(held, 1) == allocated, name
        assert slots or work.device.parameters() == held, name


@pytest.mark.parametrize(
    "hardware, backward, products",
    [("tpu-v5p", "auto", 5), ("tpu-v5p", "two_kernels", 7), ("h100", "two_kernels", 5)],
)
def test_products_of_attentions_backward(hardware, backward, products):
    """Splash's two kernels compute the scores and their gradients twice; other kernels do not."""
    config = configs.replace(
        load_recipe(find_recipe("llama3_8b")), {"model.attention_backward": backward}
    ).fill()
    assert 2 * settings_of(config, load(hardware)).attention_backward == products
