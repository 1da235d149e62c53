"""The search itself, without the command."""

import dataclasses

import pytest

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.search import layout_search
from jaxtrain.planner.search.layout_flag import of
from jaxtrain.planner.search.layout_search import Space, by_offload, laid_out
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.step_model import step_model_of


@pytest.mark.parametrize(
    "recipe, devices",
    [
        pytest.param("gpt_1t", 3072, marks=pytest.mark.full),
        ("gpt2_124m", 12),
        ("llama3_8b", 7),
        ("llama3_8b", 67),
    ],
)
def test_layouts(recipe, devices):
    """As many devices as asked for, each layout once, fastest first, and all fit; data shards as
    replicas where those are faster."""
    config = load_recipe(find_recipe(recipe))
    space = Space(config, config, load("a100-80gb"), devices)
    found = next(filter(None, by_offload(space)), [])
    assert (found == []) == (devices == 67), "67 share out neither layers nor batch; 7 are stages"
    assert [c.layout.devices for c in found] == [devices] * len(found) and len(
        {c.layout for c in found}
    ) == len(found)
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    for candidate in found[:3]:
        work = step_model_of(laid_out(space, candidate.layout).resolve(), space.hardware)
        assert (
            work.step().seconds == pytest.approx(candidate.seconds)
            and memory(work).bytes <= space.hardware.memory
        )
        assert of(laid_out(space, candidate.layout).resolve())["model"] <= 8, (
            "tensor parallelism stays inside the node"
        )
    if recipe == "gpt_1t":
        assert any(candidate.layout.replica > 1 for candidate in found), (
            "data 6 divides no width, data 2 does"
        )


def test_layouts_are_compared_with_the_optimizer_of_the_config():
    """Lion has half of AdamW's state."""
    config = configs.replace(load_recipe(find_recipe("llama3_8b")), {"optimizer.name": "lion"})
    space = Space(config, config, load("h100"), 8)
    for work in layout_search._works(space):
        config = laid_out(space, work.layout).resolve()
        held = memory(step_model_of(config, space.hardware)).parts["optimizer"]
        assert memory(work).parts["optimizer"] == held > 0


@pytest.mark.parametrize(
    "recipe, devices", [("gpt2_124m", 12), ("llama3_8b", 32), ("mixtral_8x7b", 16)]
)
def test_no_step_is_shorter_than_its_bound(recipe, devices):
    """Whatever the schedule, the number of chunks and ZeRO's stage: what is passed over for its
    bound is not among the best."""
    config = load_recipe(find_recipe(recipe))
    works = list(layout_search._cuts(Space(config, config, load("h100"), devices), "none"))[::7]
    with_layout = lambda work, layout: dataclasses.replace(work, layout=layout)
    tables = [
        (layout_search._lower_bound(work), with_layout(work, layout))
        for work in works
        for layout in layout_search._tables(work)
    ]
    assert any(work.layout.repeats > 1 for _, work in tables) and any(
        work.layout.zero == 3 for _, work in tables
    )
    assert all(bound <= work.step().seconds * (1 + 1e-12) for bound, work in tables)


def test_overlapped_cells_are_tried_where_they_gain():
    """Each dualpipe_v with experts on other devices a second time, faster; none on TPUs."""
    config = load_recipe(find_recipe("mixtral_8x7b"))
    layouts = {}
    for kind in ("h100", "tpu-v5p"):
        space = Space(config, config, load(kind), 16)
        works = [w for w in layout_search._cuts(space, "none") if w.layout.microbatch == 1]
        layouts[kind] = [
            dataclasses.replace(work, layout=layout)
            for work in works
            for layout in layout_search._tables(work)
            if layout.schedule == "dualpipe_v"
        ]
    assert layouts["tpu-v5p"] and not any(work.layout.overlap for work in layouts["tpu-v5p"])
    together = [work for work in layouts["h100"] if work.layout.overlap]
    apart = [work for work in layouts["h100"] if not work.layout.overlap]
    assert len(together) == sum(work.layout.expert > 1 for work in apart) > 0
    for work in together:
        alone = dataclasses.replace(work.layout, overlap=False)
        cells = work.layout.microbatches * 2 - 3 * work.layout.stage + 1
        faster = dataclasses.replace(work, layout=alone).step().seconds - work.step().seconds
        assert (faster > 0) == (cells > 0 or work.layout.stage > 2)
        laid = laid_out(space, work.layout)
        assert laid.pipeline.overlap and of(laid.resolve())["overlap"]
