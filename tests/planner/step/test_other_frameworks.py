"""Other frameworks: what their releases and their experts change of a step."""

import dataclasses

import pytest

from benchmarks.model_forms import llama
from jaxtrain.config import PrecisionConfig
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.layout import Layout, nodes_of_token
from jaxtrain.planner.step.layer_time import LayerWork
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS
from jaxtrain.planner.step.step_time import StepModel

QWEN = dataclasses.replace(
    llama(48, 2048, 32, 4, 128, 6144, 151936, 4096),
    experts=128,
    experts_per_token=8,
    expert_width=768,
    expert_room=1.0,
)
DENSE = dataclasses.replace(QWEN, experts=0, experts_per_token=0)


def step(framework, model=QWEN, matmul="mxfp8", hardware="gb200", **layout):
    settings = dataclasses.replace(FRAMEWORKS[framework], precision=PrecisionConfig(matmul=matmul))
    layout = Layout(**{"expert": 8, "microbatch": 4, "microbatches": 4, "zero": 1} | layout)
    return StepModel(model, layout, settings, load(hardware))


def test_a_release_changes_experts_alone():
    """The figure: Qwen3-30B on 8 GB200 made 23,766 tokens/s on a device in 25.11, 39,936 in
    26.08."""
    releases = ("megatron_core@25.11", "megatron_core@26.04", "megatron_core@26.08")
    old, mid, new = (step(name).step().seconds for name in releases)
    assert old >= mid > 1.3 * new and old / new == pytest.approx(39936 / 23766, rel=0.15)
    assert step("megatron_core").step() == step("megatron_core@26.08").step()
    dense = [step(name, DENSE, expert=1, data=8).step() for name in releases]
    assert dense[0] == dense[1] == dense[2]


def test_the_host_s_time_bounds_small_layers_from_below():
    """Forward, and backward two times as much. It grows with the experts of a device whose
    operands are rounded, not with a capacity nor in the compute type, and a layer that takes
    longer waits for nothing."""
    launches = lambda **changes: (
        step("megatron_core@25.11", **changes).step().exposed.get("launches", 0.0)
    )
    rates = FRAMEWORKS["megatron_core@25.11"].rates
    ops = step("megatron_core@25.11", microbatch=1).layers.ops(False)
    host = 1e-3 * rates.host_ms + 1e-6 * rates.rounding_us[0] * 4 * 16
    assert ops["F"].seconds == pytest.approx(host / 3)
    assert ops["B"].seconds + ops["W"].seconds == pytest.approx(2 * host / 3)
    assert launches(microbatch=1) > launches(microbatch=4) > 0
    assert launches(microbatch=32, microbatches=1) == 0
    assert (
        launches(expert=64, microbatch=1)
        < launches(microbatch=1)
        < launches(matmul="fp8", microbatch=1)
    )
    some = dataclasses.replace(QWEN, capacity_factor=1.0)
    assert launches(model=some, microbatch=1) < launches(microbatch=1)
    assert launches(model=DENSE, expert=1) == 0


def test_a_token_goes_once_to_each_device_of_its_experts():
    """8 of 128 experts over 8 devices lie on 5.3 of them in the mean."""
    once = step("megatron_core@25.11", matmul="compute").collectives.routed("F")[0][0].size
    each = step("maxtext", matmul="compute").collectives.routed("F")[0][0].size
    assert (
        once / each == pytest.approx(nodes_of_token(QWEN, 8) / 8) == pytest.approx(0.66, abs=0.01)
    )


def test_one_kernel_of_all_experts_rounds_nothing_twice():
    """In MXFP8, from 26.08 on: one launch, and no passes over operands."""
    fused, apart = (
        step(name).part(LayerWork).products(False)[-1].forward
        for name in ("megatron_core", "megatron_core@26.04")
    )
    assert fused < 0.7 * apart
    assert step("megatron_core", matmul="fp8").step().exposed["launches"] > 0


def test_the_ends_of_a_pipeline_are_two_stages():
    """Dense layers before the others are on the first stage, the head and a module of prediction
    on the last one: the longer of both counts."""
    model = dataclasses.replace(QWEN, layers=46, dense_layers=2, mtp_depth=1)
    work = step("megatron_core", model, stage=2)
    layers, first, last = work._busiest_stage(work.layers.total.seconds, 1.0, 2.0)
    assert (layers, first, last) == (23, False, True)
    assert work._busiest_stage(1.0, 2.0, 1.0) == (23, True, False)
    assert step("megatron_core", model)._busiest_stage(1.0, 2.0, 1.0) == (46, True, True)
