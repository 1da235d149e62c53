"""Other frameworks: what their releases and their experts change of a step."""

import dataclasses

import pytest

from benchmarks.model_forms import llama
from jaxtrain.config import PrecisionConfig
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.layout import Layout, nodes_of_token
from jaxtrain.planner.step.layer_time import LayerWork
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.other_frameworks import (
    FRAMEWORKS,
    ON_ITS_WAY,
    saved_by_others,
    working_of_others,
)
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
    sizes = step("megatron_core", model, stage=4).uneven_placement.sizes
    assert sum(sizes) == 46 and sizes[0] < max(sizes) > sizes[-1]
    assert step("megatron_core", model).uneven_placement is None  # one stage
    assert (
        step("megatron_core", QWEN, stage=4).uneven_placement is None
    )  # nothing but layers and a head


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


# --- memory ---------------------------------------------------------------------------------------

LLAMA = llama(32, 4096, 32, 8, 128, 14336, 128256, 8192)
TOKENS = 3 * LLAMA.sequence


def memory_of(framework="maxtext", model=LLAMA, hardware="tpu-v6e", **layout):
    layout = {"data": 8, "microbatch": 3, "zero": 3} | layout
    work = StepModel(model, Layout(**layout), FRAMEWORKS[framework], load(hardware))
    return work, memory(work).parts


def test_names_say_what_a_layer_saves_and_where():
    """MaxText's recipes for v6e: inputs, queries, keys, values and attention's output, kept or in
    the host's memory, where two layers are on their way."""
    names = ("layer_input", "qkv", "attention_out")
    each = 2 * TOKENS * (4096 + 6144 + 4096)
    _, kept = memory_of(remat="selective", save=names)
    assert kept["activations"] == 32 * each
    for save, here, there in (
        (("layer_input:host", "qkv:host", "attention_out:host"), 0, each),
        (("layer_input", "qkv:host", "attention_out"), 2 * TOKENS * 8192, 2 * TOKENS * 6144),
        (("layer_input:host", "mlp_out:host"), 0, 2 * TOKENS * 4096),  # nothing reads the latter
    ):
        work, parts = memory_of(remat="selective", save=save)
        assert parts["activations"] == 32 * here + ON_ITS_WAY * there
        step, speed = work.step(), work.hardware.host_bytes_per_s
        copied = step.exposed.get("host", 0) + step.hidden["host"]
        assert copied == pytest.approx(32 * 2 * there / speed)


@pytest.mark.parametrize("layout", [{"save": ("layer_input:host",)}, {"offload": "activations"}])
def test_full_recomputation_from_the_host(layout):
    for stage in (1, 4):
        work, parts = memory_of(remat="full", stage=stage, microbatches=8, **layout)
        assert parts["activations"] == ON_ITS_WAY * 2 * TOKENS * 4096
        assert (
            work.step().hidden["host"]
            > 0
            == memory_of(remat="full")[0].step().hidden.get("host", 0)
        )


def test_gradients_have_the_type_of_their_sums_and_all_that_hold_the_same_share_state():
    """Experts' state is cut over `data` and `context`, the rest over `expert`, too."""
    work, parts = memory_of("megatron_core", QWEN, "gb200", data=2, expert=8, context=2, zero=1)
    held = work.device.parameters()
    assert parts["gradients"] == parts["weights"] == 2 * (held.layers + held.ends)
    others = held.layers - held.experts + held.ends
    assert parts["optimizer"] == pytest.approx(12 * (others / 32 + held.experts / 4))
    assert memory_of("torchtitan", hardware="h100")[1]["gradients"] == pytest.approx(
        4 * LLAMA.parameters() / 8
    )


def test_zero_3_gathers_what_a_framework_has_at_once():
    """XLA scatters each matrix's gradient as it is made; FSDP has a layer's, and the next layer's
    matrices."""
    model = llama(2, 8192, 64, 8, 128, 28672, 4096, 128)
    layer = model.layer().size
    gathered = lambda name: memory_of(name, model)[1]["working"]
    arrays = 2 * 4 * 3 * 128 * 2 * 28672
    assert gathered("maxtext") == pytest.approx(arrays + (2 + 2 / 3) * layer)
    assert gathered("torchtitan") == pytest.approx(arrays + 10 * layer)
    zero_2 = memory_of("torchtitan", model, zero=2)[1]["working"]
    assert zero_2 == pytest.approx(arrays + 2 * layer)


def test_layers_save_as_many_rows_of_experts_as_these_compute():
    """By a capacity, and on the busiest device without one."""
    none = {"remat": "none"}
    saved = lambda expert=8, **changes: memory(
        step(
            "maxtext", dataclasses.replace(QWEN, expert_room=0.0, **changes), **none, expert=expert
        )
    ).parts["activations"]
    even, more = saved(capacity_factor=1.0), saved(capacity_factor=1.5)
    assert 1.25 * even < more < 1.5 * even
    assert saved(expert=1) < saved() < 1.1 * saved(expert=1)


def test_a_tile_of_rows_is_computed_for_both_of_its_experts():
    """Half as many rows again with 1,024 rows of an expert and tiles of 512, but not where experts
    have a capacity, and at most as many again, where matrices are read for longer."""

    def products(tile, microbatch, **changes):
        model, layout = dataclasses.replace(QWEN, **changes), {"microbatch": microbatch}
        work = step("maxtext", model, expert=1, **layout)
        settings = dataclasses.replace(work.settings, tile_rows=tile)
        work = StepModel(work.model, work.layout, settings, load("tpu-v6e"))
        return sum(p.forward for p in work.part(LayerWork).products(False) if p.of.experts)

    more = lambda *args, **changes: products(512, *args, **changes) / products(0, *args, **changes)
    assert 1.4 < more(microbatch=4) < 1.5 and 1.2 < more(microbatch=1) < 2.0
    assert more(microbatch=4, capacity_factor=1.0) == 1.0


@pytest.mark.parametrize("framework", ["megatron2021", "megatron_core", "maxtext"])
@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_activations_have_the_type_of_products(framework, remat):
    """And what a backward works with, but for the weights and gradients of a ZeRO-3 layer."""
    of = {}
    for compute in ("bfloat16", "float32"):
        work = step(framework, LLAMA, "compute", "h100", data=8, remat=remat)
        precision = dataclasses.replace(work.settings.precision, compute=compute)
        settings = dataclasses.replace(work.settings, precision=precision)
        work = dataclasses.replace(work, settings=settings)
        of[compute] = saved_by_others(work), working_of_others(work)
    assert of["float32"] == tuple(2 * part for part in of["bfloat16"])
