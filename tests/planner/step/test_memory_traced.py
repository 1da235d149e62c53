"""The planner's memory beside the program's own arrays, traced on simulated devices and never
compiled."""

import dataclasses
import math
from typing import Any

import jax
import pytest

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.search.predict import predict
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.training.state import bytes_per_device
from jaxtrain.training.step import Step, make_step

# widths that differ, a sequence so long that attention goes by blocks, as a fused kernel keeps no
# scores
SMALL = {
    "model.layers": 2,
    "model.width": 192,
    "model.head_dim": 24,
    "model.expert_width": 320,
    "data.sequence_length": 2048,
    "data.batch_size": 32,
    "mesh.data": 1,
    "mesh.stage": 2,
    "mesh.expert": 2,
    "pipeline.schedule": "1f1b",
    "pipeline.repeats": 1,
    "precision.compute": "bfloat16",
}
WINDOWS = {
    "model.layers": 7,
    "model.pattern": ("window", "window", "full"),
    "model.window": 512,
}
TWO_HEAD_SIZES = {
    "model.pattern": ("window", "wide"),
    "model.window": 512,
    "model.kinds": ("wide.head_dim=48", "wide.window=0"),
}
NUMBER, CAST = 4, 2  # bytes of a parameter, and of its cast for products
COUNTERS = 1e-3  # of the parameters: those of a router, on which counts are hung
# the platform that the programs are traced for, by which kernels and messages are chosen
SIMULATED = dataclasses.replace(load("h100"), name="cpu, simulated")


def small(recipe: str, values: dict[str, Any]) -> configs.Config:
    return configs.replace(load_recipe(find_recipe(recipe)), SMALL | values).resolve()


def traced(config: configs.Config) -> Step:
    mesh = make_mesh(sizes_of(config.mesh), jax.devices()[: math.prod(sizes_of(config.mesh))])
    with jax.set_mesh(mesh):
        return make_step(config, mesh, make_setup(config))


def pools(config: configs.Config) -> dict[str, int]:
    """Bytes of each pool in the device's memory."""
    step = traced(config)
    with jax.set_mesh(step.mesh):
        sizes = {pool: number * each for pool, (number, each) in step.slot_pools().items()}
        on_host = step.slots_on_host()
    on_device = {pool: size - on_host.get(pool, 0) for pool, size in sizes.items()}
    return {pool: size for pool, size in on_device.items() if size}


def for_full(*case):
    """A case whose parts others have in other pairs."""
    return pytest.param(*case, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("recipe", "remat", "values"),
    [
        for_full("mixtral_tiny", "none", {"model.expert_room": 1.0, "model.qk_norm": True}),
        ("mixtral_tiny", "full", {"model.expert_room": 2.0, "mesh.model": 2}),
        (
            "mixtral_tiny",
            "selective",
            {
                "model.expert_room": 1.0,
                "mesh.model": 2,
                "model.qk_norm": True,
                "model.biases": ("out",),
            },
        ),
        for_full(
            "mixtral_tiny", "selective", {"model.expert_room": 2.0, "model.shared_experts": 1}
        ),
        ("mixtral_tiny", "full", {"model.capacity_factor": 1.5}),
        # latent attention and a shared expert
        for_full("deepseek_tiny", "full", {"model.expert_room": 2.0}),
        ("deepseek_tiny", "selective", {"mesh.model": 2}),
        for_full("mixtral_tiny", "selective", {"mesh.expert": 1, "model.activation": "gelu"}),
        for_full("tiny", "selective", {"mesh.expert": 1}),
        ("tiny", "none", {"mesh.expert": 1, "mesh.model": 2, "model.kv_heads": 4}),
        ("tiny", "selective", {"mesh.expert": 1, "pipeline.save": ("attention:host", "mlp_in")}),
        (
            "mixtral_tiny",
            "selective",
            {
                "model.expert_room": 2.0,
                "mesh.model": 2,
                "pipeline.save": ("attention_norm", "attention_out", "mlp_in"),
            },
        ),
        (
            "deepseek_tiny",
            "selective",
            {
                "model.expert_room": 2.0,
                "pipeline.save": ("latent", "attention", "mlp_in"),
            },
        ),
        ("mixtral_tiny", "full:2", {"pipeline.save": ("layer_input:host",), "model.layers": 6}),
        ("tiny", "selective:1", {"mesh.expert": 1, "parallel.offload": "activations"}),
        # gelu, and shared experts, whose activations B makes again
        ("mixtral_tiny", "none", {"model.activation": "gelu", "model.shared_experts": 1}),
        for_full(
            "mixtral_tiny", "selective", {"model.activation": "gelu", "model.expert_room": 2.0}
        ),
        for_full("deepseek_tiny", "none", {"model.expert_room": 2.0}),
        # biases of one row-parallel matrix, layernorm
        (
            "tiny",
            "selective",
            {
                "mesh.expert": 1,
                "mesh.model": 2,
                "model.norm": "layernorm",
                "model.biases": ("qkv", "mlp"),
            },
        ),
        # kinds that share pools, and units in which they differ; pools of their own
        for_full("tiny", "selective", {"mesh.expert": 1} | WINDOWS),
        for_full("tiny", "none", {"mesh.expert": 1, "mesh.model": 2} | WINDOWS),
        ("tiny", "full:2", {"mesh.expert": 1, "model.layers": 8} | TWO_HEAD_SIZES),
        for_full(
            "tiny",
            "selective:1",
            {"mesh.expert": 1, "mesh.stage": 4, "model.layers": 7} | TWO_HEAD_SIZES,
        ),
        for_full(
            "mixtral_tiny",
            "full",
            {
                "model.layers": 7,
                "model.pattern": ("full", "dense", "nope"),
                "model.expert_room": 2.0,
                "pipeline.save": ("layer_input",),
            },
        ),
    ],
)
@pytest.mark.parametrize("matmul", ["compute", pytest.param("fp8", marks=pytest.mark.full)])
def test_slots_of_layers(recipe, remat, values, matmul):
    """Layers with experts keep rows, as many as a device has room for, and `model` splits the
    hidden ones alone. A bias behind a row-parallel matrix sums a device's part of a gradient.

    In FP8 the operands of products wait for W with one byte, and B has all else.
    """
    config = small(recipe, values | {"pipeline.remat": remat, "precision.matmul": matmul})
    assert predict(config, SIMULATED).memory.pools == pools(config)


def test_slots_of_layers_whose_one_kind_has_a_name():
    values = {"mesh.expert": 1, "model.window": 512, "pipeline.remat": "selective"}
    slots = [
        memory(step_model_of(small("tiny", values | pattern), SIMULATED)).pools
        for pattern in ({}, {"model.pattern": ("window",)})
    ]
    assert slots[0] == slots[1] and slots[0]["residual_b"]


@pytest.mark.parametrize(
    "values",
    [
        {"pipeline.remat": "full"},
        pytest.param({"pipeline.remat": "selective", "mesh.model": 1}, marks=pytest.mark.full),
        {"pipeline.remat": "selective", "pipeline.save": ("attention", "mlp_in")},
    ],
    ids=["full", "selective", "named"],
)
def test_slots_in_blocks(values):
    """Of MXFP8: inputs that F rounds along tokens wait for W in its residuals, where the rest is
    saved, too; what B rounds waits in the stash. A gradient that B has gathered stays gathered."""
    blocks = {"precision.matmul": "mxfp8", "model.head_dim": 64, "model.mlp_width": 512}
    config = small("tiny", blocks | {"mesh.expert": 1, "mesh.model": 2} | values)
    assert predict(config, SIMULATED).memory.pools == pools(config)


@pytest.mark.parametrize(
    "values",
    [
        {"model.mtp_depth": 0},
        {"model.mtp_depth": 2, "mesh.data": 2},
        {"mesh.model": 2, "mesh.expert": 1, "mesh.data": 2, "parallel.zero": 3},
        {"mesh.stage": 1, "mesh.data": 2, "parallel.zero": 0},
    ],
)
def test_parameters_of_every_kind(values):
    """Layers before the first and modules of prediction are on all stages, which update them in
    parts; `model` leaves latents whole."""
    # with the planner's op times, by which layers are placed
    config = small("deepseek_tiny", values | {"train.hardware": "h100"})
    parts, state = predict(config, load("h100")).memory.parts, traced(config).abstract_state()
    weights = parts["weights"] * NUMBER / (NUMBER + CAST)
    assert weights == pytest.approx(bytes_per_device(state.params), rel=COUNTERS)
    assert parts["optimizer"] == pytest.approx(bytes_per_device(state.optimizer), rel=COUNTERS)


@pytest.mark.parametrize("zero", [0, 1])
def test_what_replicas_have_in_common(zero):
    """Replicas that train apart keep the last exchange and its momentum, shared out over `data`
    without ZeRO, too."""
    values = {
        "mesh.data": 2,
        "mesh.replica": 2,
        "mesh.expert": 1,
        "parallel.zero": zero,
        "train.diloco_inner_steps": 10,
    }
    config = small("mixtral_tiny", values)
    state = traced(config).abstract_state()
    planned = predict(config, load("h100")).memory.parts["outer"]
    assert planned == pytest.approx(
        bytes_per_device((state.anchor, state.outer_momentum)), rel=COUNTERS
    )
    together = small("mixtral_tiny", values | {"train.diloco_inner_steps": 0})
    assert "outer" not in predict(together, load("h100")).memory.parts
