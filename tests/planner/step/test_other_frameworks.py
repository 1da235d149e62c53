"""Other frameworks: what their releases and their experts change of a step."""

import dataclasses

import pytest

from benchmarks.model_forms import llama
from jaxtrain.config import PrecisionConfig
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.layout import Layout, nodes_of_token
from jaxtrain.planner.step.layer_time import LayerWork
from jaxtrain.planner.step.memory import memory
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


def test_stages_with_dense_layers_or_the_head_have_fewer_other_layers():
    """Layouts of Megatron's recipes are balanced by hand, as ours are."""
    model = dataclasses.replace(QWEN, layers=46, dense_layers=2, mtp_depth=1)
    sizes = step("megatron_core", model, stage=4).balanced.sizes
    assert sum(sizes) == 46 and sizes[0] < max(sizes) > sizes[-1]
    assert step("megatron_core", model).balanced is None  # one stage
    assert step("megatron_core", QWEN, stage=4).balanced is None  # nothing but layers and a head


def test_memory_of_experts_in_a_format_that_our_products_do_not_take():
    """What a layer saves by name is traced in the compute type."""
    layout = {"microbatch": 1, "remat": "selective", "save": ("attention", "router")}
    sizes = {
        matmul: memory(step("megatron_core", matmul=matmul, **layout)).parts["activations"]
        for matmul in ("compute", "mxfp8", "nvfp4")
    }
    assert len(set(sizes.values())) == 1


def sent_to_experts(framework: str, expert: int) -> float:
    """Seconds in which a layer of a sequence sends its tokens to experts on H100s, forward."""
    settings = FRAMEWORKS[framework]
    of = StepModel(QWEN, Layout(expert=expert), settings, load("h100"))
    return of.links.seconds(of.collectives.routed("F")[0])["expert"]


@pytest.mark.parametrize("framework", ["megatron_core", "torchtitan"])
def test_a_token_goes_to_a_node_once(framework):
    """Eight choices on 64 devices: over the network a row for each of eight nodes that has some, in
    a node one for each device."""
    rows = QWEN.sequence * nodes_of_token(QWEN, 8) * 2 * QWEN.width * 7 / 8
    assert sent_to_experts(framework, 64) == pytest.approx(rows / 40e9, rel=0.05)
    assert sent_to_experts(framework, 8) == pytest.approx(rows / 346.5e9, rel=0.1)


def test_zero_goes_over_all_devices_that_hold_the_same():
    """What is no expert is gathered over data, context and expert together, experts over data and
    context; with one device of data it takes time, too."""
    zero3 = lambda **layout: step("torchtitan", matmul="compute", hardware="h100", zero=3, **layout)
    groups = zero3(data=2, context=2).device.groups
    assert groups.layers.shard == groups.layers.scatter == ("data", "context", "expert")
    assert groups.experts.shard == ("data", "context") and groups.experts.sums == ("replica",)
    time = zero3().step()
    assert time.exposed["data"] + time.hidden["data"] > 0
    unsharded = step("megatron_core", zero=0, data=2).device.groups.layers
    assert not unsharded.scatter and unsharded.sums == ("replica", "data", "context", "expert")


def test_maxtext_makes_no_output_again():
    """Full recomputation has no down projection, whose result nothing reads."""
    of = step("maxtext", DENSE, "compute", "tpu-v5p", expert=1, data=8, zero=3)
    products = {p.of.names[0]: p.forward for p in of.part(LayerWork).products(False)}
    again = of.layers.ops(False)["R"].exposed["matmuls"]
    assert again == pytest.approx(sum(products.values()) - products["mlp.down.weight"])
