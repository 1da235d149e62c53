"""The optimizer's state on a device, as the planner counts it, is that of the arrays that training
allocates, for every optimizer and every stage of ZeRO."""

import functools

import jax
import pytest
from jax.sharding import AbstractMesh
from support import small

from jaxtrain import config as configs
from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.saved_values import LayerBytes
from jaxtrain.devices.mesh import AXES, make_mesh, sizes_of
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.search.predict import PlannedTable, with_op_times
from jaxtrain.planner.step import memory as memory_of_step, saved
from jaxtrain.planner.step.memory import SlotCounts, memory
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.training.state import abstract_state, bytes_per_device
from jaxtrain.training.step import make_layout, make_step
from jaxtrain.training.update.optimizer import Optimizer

LAYOUTS = {
    "data 8": {"data": 8},
    "data 2 · stage 2 · model 2": {"data": 2, "stage": 2, "model": 2},
    "stage 4 · model 2": {"stage": 4, "model": 2},
    "replica 2 · model 4": {"replica": 2, "model": 4},
    "data 2 · context 2 · model 2": {"data": 2, "context": 2, "model": 2},
}
WITH_EXPERTS = {"data 2 · expert 2 · model 2": {"data": 2, "expert": 2, "model": 2}, **LAYOUTS}
GPT = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.biases": ("qkv", "out", "mlp", "norm"),
    "model.vocab_size": 509,  # a prime: padded wherever it is split
}
# recipe, changes, layouts
MODELS = {
    "gpt": ("tiny", GPT, LAYOUTS),
    "mixtral": (
        "mixtral_tiny",
        {"model.capacity_factor": 2.0, "model.qk_norm": True, "model.biases": ("router",)},
        WITH_EXPERTS,
    ),
    "deepseek": (
        "deepseek_tiny",
        {"model.mtp_depth": 1, "model.biases": ("qkv", "out")},
        WITH_EXPERTS,
    ),
}
ZERO, ZERO_OF_16_BITS = (0, 1, 2, 3), (0, 1, 3)
COUNTS = 8  # bytes of the two counts of updates


@pytest.fixture(autouse=True)
def no_layer_is_traced(monkeypatch):
    """What layers save is of no concern here."""
    nothing = LayerBytes(*[0] * len(LayerBytes._fields))
    for module in (memory_of_step, saved):
        monkeypatch.setattr(module, "layer_bytes", lambda *_, **__: nothing)


def config_of(model: str, layout: dict[str, int], optimizer: str, zero: int) -> configs.Config:
    recipe, changes, _ = MODELS[model]
    axes = ("replica", "data", "stage", "context", "expert", "model")
    several = "stage" in layout
    sizes = {f"mesh.{axis}": layout.get(axis, 1) for axis in axes}
    others = {
        "pipeline.schedule": "1f1b",
        "pipeline.repeats": 1,
        "pipeline.microbatches": 2 if several else 1,
        "optimizer.name": optimizer,
        "parallel.zero": zero,
    }
    return configs.replace(load_recipe(find_recipe(recipe)), sizes | others | changes).resolve()


@functools.cache
def tables(model: str, layout: str) -> tuple[Setup, SlotCounts | None]:
    """The setup of training and the planner's slots, which no optimizer changes."""
    config = config_of(model, MODELS[model][2][layout], "adamw", 1)
    return make_setup(config), PlannedTable(
        with_op_times(config, step_model_of(config, load("h100")))
    ).slots()


def turns_of(stages: tuple[int, ...]) -> list:
    """Which stages of ZeRO go with which layouts: in turn 0 each layout has one, in all turns
    together every one. The other turns are for --full."""
    return small.named([0], range(1, len(stages)))


def layouts(model: str, turn: int, stages: tuple[int, ...]) -> list[tuple[str, dict, int]]:
    """(name, sizes of axes, stage of ZeRO) of each layout of a model."""
    return [
        (name, sizes, stages[([*WITH_EXPERTS].index(name) + turn) % len(stages)])
        for name, sizes in MODELS[model][2].items()
    ]


# every model and every optimizer; all pairs with --full
STATES = {
    f"{model}-{optimizer}": (model, optimizer) for model in MODELS for optimizer in OPTIMIZERS
}
SAMPLE = ["gpt-adafactor", "mixtral-adafactor", "deepseek-adamw", "gpt-lion", "mixtral-muon"]
OTHERS = sorted({*STATES} - {*SAMPLE})


@pytest.mark.parametrize("turn", turns_of(ZERO))
@pytest.mark.parametrize("case", small.named(SAMPLE, OTHERS))
def test_state_of_a_device(case, turn):
    """The planner's closed form has the bytes of the arrays, which are the dry run's too."""
    model, optimizer = STATES[case]
    # the cases begin with different stages: each layout meets each stage in the sample, too
    for name, sizes, zero in layouts(model, turn + [*SAMPLE, *OTHERS].index(case), ZERO):
        config, (setup, slots) = config_of(model, sizes, optimizer, zero), tables(model, name)
        mesh = AbstractMesh(sizes_of(config.mesh), AXES)
        layout = make_layout(config, mesh, setup)
        made = Optimizer(config.optimizer, config.train.steps, layout.specs)
        allocated = bytes_per_device(abstract_state(layout, made).optimizer)
        planned = step_model_of(config, load("h100"))
        parts = memory(planned, config.model.loss_chunk, slots).parts
        assert parts["optimizer"] + COUNTS == allocated, f"{name}, ZeRO {zero}"


FORMS = {
    "masters": {"precision.params": "bfloat16"},
    "masters, 16-bit moments": {
        "precision.params": "bfloat16",
        "precision.moments": "bfloat16",
    },
    "16 bits alone": {
        "precision.params": "bfloat16",
        "precision.masters": "none",
        "precision.moments": "bfloat16",
    },
    "masters, average": {"precision.params": "bfloat16", "optimizer.ema_decay": 0.999},
}


@pytest.mark.parametrize("turn", turns_of(ZERO_OF_16_BITS))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_16_bit_state_of_a_device(model, form, turn):
    """Masters and moments to the byte, what ops read but for vectors and routers, which the plan
    counts as 16-bit numbers: they are less than 3 % of these models."""
    for name, sizes, zero in layouts(model, turn + [*FORMS].index(form), ZERO_OF_16_BITS):
        config, (setup, slots) = config_of(model, sizes, "adamw", zero), tables(model, name)
        config = configs.replace(config, FORMS[form] | {"precision.compute": "bfloat16"})
        mesh = AbstractMesh(sizes_of(config.mesh), AXES)
        layout = make_layout(config, mesh, setup)
        made = Optimizer(
            config.optimizer, config.train.steps, layout.specs, config.precision.moments
        )
        state = abstract_state(layout, made)
        masters = bytes_per_device((state.params, state.working)) - bytes_per_device(state.read)
        parts = memory(step_model_of(config, load("h100")), config.model.loss_chunk, slots).parts
        allocated = bytes_per_device((state.optimizer, state.ema)) + masters
        assert parts["optimizer"] + COUNTS == allocated, f"{name}, ZeRO {zero}"
        if zero < 3:  # then the plan shards vectors, too
            read = bytes_per_device(state.read)
            assert parts["weights"] == pytest.approx(read, rel=0.03), f"{name}, ZeRO {zero}"


@pytest.mark.parametrize(
    "optimizer", small.named(["adafactor"], sorted({*OPTIMIZERS} - {"adafactor"}))
)
def test_the_compiled_step_gets_these_bytes(optimizer):
    config = config_of("gpt", {"data": 2, "stage": 2, "model": 2}, optimizer, 1)
    mesh = make_mesh(sizes_of(config.mesh))
    with jax.set_mesh(mesh):
        step = make_step(config, mesh)
        state = step.abstract_state()
        compiled = step.train.lower(state, step.abstract_batch).compile()
    others = bytes_per_device((state.params, state.step, step.abstract_batch))
    # jit leaves out what the step does not read: optax's [1] in the place of no array, which
    # Muon's update returns as it is
    no_arrays = [a for a in jax.tree.leaves(state.optimizer) if a.shape[-1:] == (1,)]
    unread = no_arrays if optimizer != "muon" else []
    expected = others + step.state_memory(reduces_in_ops=False)["moments"]
    expected -= bytes_per_device(unread)
    assert compiled.memory_analysis().argument_size_in_bytes == expected
