"""Parts that steps share: the same figures as those of a step by itself, each computed once."""

import dataclasses
import random
from collections.abc import Iterator

import pytest

from benchmarks.model_forms import llama
from jaxtrain.config import ParallelConfig
from jaxtrain.config.saved_values import LayerBytes
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.step import memory as memory_of_step, other_frameworks, saved
from jaxtrain.planner.step.layer_time import LayerTime, LayerWork, MeanLayer
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS
from jaxtrain.planner.step.outside_layers import EndsTime, UpdateTime
from jaxtrain.planner.step.parameters import DeviceState
from jaxtrain.planner.step.step_time import StepModel

RING = ParallelConfig(context="ring")
LLAMA = llama(32, 4096, 32, 8, 128, 14336, 128256, 8192)
EXPERTS = dataclasses.replace(
    LLAMA, experts=8, experts_per_token=2, expert_width=1024, dense_layers=1, mtp_depth=1
)
VALUES = {
    "data": (1, 8),
    "stage": (1, 4),
    "model": (1, 2),
    "context": (1, 2),
    "expert": (1, 4),
    "replica": (1, 2),
    "microbatch": (1, 2),
    "microbatches": (1, 8),
    "repeats": (1, 2),
    "layers_per_op": (0, 2),
    "remat": ("none", "selective", "full", "full:2"),
    "save": ((), ("attention",)),
    "zero": (0, 1, 2, 3),
    "shards_ends": (False, True),
    "expert_nodes": (1, 2),
    "schedule": ("1f1b", "zb_h1", "dualpipe_v"),
    "offload": ("none", "optimizer", "both"),
    "disk": (False, True),
    "steps": (1, 2),
    "overlap": (False, True),
}


@pytest.fixture(autouse=True)
def no_layer_is_traced(monkeypatch):
    """What layers save is of no concern here."""
    nothing = LayerBytes(*[0] * len(LayerBytes._fields))
    for module in (memory_of_step, saved, other_frameworks):
        monkeypatch.setattr(module, "layer_bytes", lambda *_, **__: nothing)


KINDS = (LayerWork, LayerTime, MeanLayer, DeviceState, EndsTime, UpdateTime)


def layouts(experts: bool) -> Iterator[Layout]:
    rng = random.Random(0)
    assert VALUES.keys() == {field.name for field in dataclasses.fields(Layout)}
    for _ in range(60):
        layout = Layout(**{name: rng.choice(values) for name, values in VALUES.items()})
        if not experts or layout.expert == 1:
            layout = dataclasses.replace(layout, expert=1, expert_nodes=1)
        if layout.schedule != "dualpipe_v":
            layout = dataclasses.replace(layout, overlap=False)
        yield layout


def figures(step: StepModel) -> tuple:
    bytes_by_part = memory(step).parts
    return step.step(), step.op_times(), step.hardware_flops(), bytes_by_part


@pytest.mark.parametrize("framework", ["jaxtrain", "megatron2022", "zero3"])
@pytest.mark.parametrize("experts", [False, True])
def test_parts_read_what_they_say(framework, experts, monkeypatch):
    """Steps that share parts, each of which sees what it reads of a layout alone, have the figures
    of steps that share nothing and whose parts see all of the layout."""
    settings = dataclasses.replace(FRAMEWORKS[framework], parallel=RING, imbalance=1.5)
    step = StepModel(EXPERTS if experts else LLAMA, Layout(), settings, load("h100"))
    shared = [figures(step.on(layout)) for layout in layouts(experts)]
    for kind in KINDS:
        assert set(kind.reads) < set(VALUES)
        monkeypatch.setattr(kind, "reads", tuple(VALUES))
    alone = (figures(dataclasses.replace(step, layout=layout)) for layout in layouts(experts))
    for layout, of_shared, by_itself in zip(layouts(experts), shared, alone, strict=True):
        assert of_shared == by_itself, layout


def test_a_part_is_computed_once_for_what_it_reads():
    step = StepModel(LLAMA, Layout(data=8, stage=4), FRAMEWORKS["jaxtrain"], load("h100"))
    changed = dataclasses.replace(step.layout, schedule="zb_h1", microbatches=8)
    assert step.on(changed).part(MeanLayer) is step.part(MeanLayer)
    other = dataclasses.replace(step, hardware=load("a100-80gb"))
    assert other.part(MeanLayer) is not step.part(MeanLayer)
    narrow = step.on(dataclasses.replace(step.layout, model=2))
    assert narrow.part(MeanLayer) is not step.part(MeanLayer)
