"""Parts that a search times once, beside those of each layout by itself."""

import dataclasses
import random

import pytest

from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.planner.search import search
from jaxtrain.planner.search.search import Space
from jaxtrain.planner.step.hardware import load
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.step_time import StepModel


@pytest.mark.parametrize(
    "recipe, devices", [("llama3_8b", 64), ("mixtral_8x7b", 64), ("deepseek_v3", 2048)]
)
def test_shared_parts_are_those_of_each_step(recipe, devices):
    """Time and memory of layouts in any order, to the last bit: also of steps with some layers
    recomputed, and of other ZeRO stages, chunks and data shards of the same layers."""
    config = load_recipe(find_recipe(recipe))
    draw, fields = random.Random(1), [field.name for field in dataclasses.fields(StepModel)][:6]
    works = search._cuts(Space(config, config, load("h100"), devices), "none")
    works = [w for w in works if max(w.layout.model, w.layout.microbatch) <= 2]  # with much alike
    layouts, compared = {}, 0
    for work in draw.choices(works, k=120):
        known = layouts.setdefault(work.layout.context, [])
        known += draw.sample(tables := list(search._tables(work)), min(4, len(tables)))
        for layout in draw.sample(known, min(3, len(known))):
            remat = draw.choice(["none", "selective", "full", "full:1", "selective:1"])
            shared = dataclasses.replace(work, layout=dataclasses.replace(layout, remat=remat))
            alone = StepModel(*(getattr(shared, name) for name in fields))
            assert shared.step() == alone.step(), shared.layout
            assert memory(shared) == memory(alone), shared.layout
            assert shared.saved_in_layer() == alone.saved_in_layer(), shared.layout
            compared += 1
    parts = len(works[0].parts)
    assert compared > 200 and parts < 2 * compared, "parts are shared"
