"""A step's time: its parts, and what must be true of it whatever the constants are."""

import dataclasses

import pytest

from benchmarks.model_forms import gpt, llama
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.links import EXCHANGE, GATHER, SUM, Collective
from jaxtrain.planner.layer.model import Model
from jaxtrain.planner.step.layer_time import LayerWork
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS
from jaxtrain.planner.step.saved import layer_bytes
from jaxtrain.planner.step.step_time import StepModel

LLAMA = llama(32, 4096, 32, 8, 128, 14336, 128256, 8192)
MIXTRAL = dataclasses.replace(
    LLAMA, experts=8, experts_per_token=2, expert_width=14336, vocab_size=32000
)


def work(
    layout: Layout, model: Model = LLAMA, framework: str = "jaxtrain", hardware: str = "h100"
) -> StepModel:
    return StepModel(model, layout, FRAMEWORKS[framework], load(hardware))


def test_counts():
    """Llama 3 8B and Mixtral 8x7B have the parameters that their names say."""
    assert LLAMA.parameters() == 8_030_261_248
    assert MIXTRAL.parameters() / 1e9 == pytest.approx(46.7, abs=0.05)
    assert LLAMA.sequence_flops() == pytest.approx(
        2 * 8192 * (LLAMA.parameters() - 128256 * 4096 - 65 * 4096) + 32 * 8192**2 * 4096 * 2
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("hardware", ["a100-80gb", "tpu-v5p"])
def test_parts(framework, hardware):
    """They add up, none is negative, and recomputation, ZeRO and stages change what they should."""
    base = Layout(data=8, model=4, stage=2, microbatch=1, microbatches=8)
    seconds = {}
    for remat in ("full", "selective", "none"):
        for zero in (0, 1, 3):
            w = work(
                dataclasses.replace(base, remat=remat, zero=zero),
                framework=framework,
                hardware=hardware,
            )
            parts = w.step()
            assert sum(parts.exposed.values()) == parts.seconds > 0
            assert min(parts.exposed.values()) >= 0 and min(parts.hidden.values(), default=0) >= 0
            assert w.hardware_flops() >= w.model_flops()
            seconds[remat, zero] = parts.seconds
    assert seconds["full", 1] > seconds["selective", 1] >= seconds["none", 1]


def test_more_devices_take_less_time_each_step_and_waste_more():
    times = [
        work(Layout(data=d, microbatches=1024 // d)).step().seconds for d in (16, 64, 256, 1024)
    ]
    assert times == sorted(times, reverse=True)
    assert all(4 * later > earlier for earlier, later in zip(times, times[1:], strict=False))


def test_the_bubble_shrinks_with_repeats_and_with_work_put_off():
    base = Layout(data=2, stage=8, model=4, microbatches=16, remat="none")
    bubbles = {}
    for schedule, repeats in (
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zb_h1", 1),
        ("zb_h2", 1),
    ):
        bubbles[schedule, repeats] = (
            work(dataclasses.replace(base, schedule=schedule, repeats=repeats))
            .step()
            .exposed["bubble"]
        )
    assert (
        bubbles["1f1b", 1]
        == pytest.approx(2 * bubbles["interleaved", 2])
        == pytest.approx(4 * bubbles["interleaved", 4])
    )
    assert bubbles["1f1b", 1] > bubbles["zb_h1", 1] > bubbles["zb_h2", 1]


def test_tensor_parallelism_beyond_a_node_costs_more():
    """For twice the tokens on twice the devices, although all adapters of both nodes send."""
    inside, outside = (
        work(Layout(model=m, data=128 // m, microbatches=8, microbatch=m // 8)).step()
        for m in (8, 16)
    )
    assert outside.exposed["model"] > 2.2 * inside.exposed["model"]


def test_an_axis_over_nodes_has_their_links_together():
    """Eight neighbours of a node send over eight adapters, one of each node over one."""
    wide, narrow = work(Layout(data=64)), work(Layout(data=64, model=8))
    gather = [Collective(GATHER, ("data",), 1e9)]
    assert narrow.links.seconds(gather)["data"] > 4 * wide.links.seconds(gather)["data"]


def test_zero_3_loses_where_devices_are_many():
    """Narayanan et al. 2021, table 2: level on 384 GPUs, and more than three times slower on
    1,536."""
    gpt3 = gpt(12288, 96, 96)
    ratios = []
    for devices in (384, 768, 1536):
        zero3 = work(
            Layout(data=devices, microbatch=1536 // devices, zero=3), gpt3, "zero3", "a100-80gb"
        )
        data = devices // 96
        ptdp = work(
            Layout(data=data, stage=12, model=8, microbatches=1536 // data, zero=0),
            gpt3,
            "megatron2021",
            "a100-80gb",
        )
        ratios.append(zero3.step().seconds / ptdp.step().seconds)
    assert ratios == sorted(ratios) and 0.9 < ratios[0] < 1.3 and ratios[2] > 2.5


def test_the_optimizer_s_state_takes_its_way_from_the_host_and_back():
    """16 bytes of each of a device's parameters over PCIe, of which ZeRO-1 has a share alone."""
    for zero, shards in ((0, 1), (1, 8)):
        there, away = (
            work(Layout(data=8, zero=zero, offload=offload)).step()
            for offload in ("none", "optimizer")
        )
        host = 2 * 8.0 * LLAMA.parameters() / shards / load("h100").host_bytes_per_s
        assert away.seconds - there.seconds == away.exposed["host"] == pytest.approx(host)


def test_saves_on_the_host_are_copied_there_in_f_and_back_in_the_backward():
    """W, where it is an op of its own, reads its part once more. What is longer than an op's work
    is waited for."""
    save = ("layer_input", "qkv:host", "attention:host")
    slow = dataclasses.replace(load("h100"), host_gb_per_s=1e-3)
    for stage in (1, 2):
        layout = Layout(stage=stage, remat="selective", save=save, microbatches=4)
        fast = work(layout)
        layer, layers = layer_bytes(fast), 4 * LLAMA.layers / stage
        copied = 2 * (layer.host_b + layer.host_w) + (stage > 1) * layer.host_w
        assert layer.host_b + layer.host_w == 8192 * (4 * 4096 + 4 * 1024 + 4 * 32)
        here = work(dataclasses.replace(layout, save=("layer_input", "qkv", "attention"))).step()
        seconds = copied * layers / fast.hardware.host_bytes_per_s
        there = fast.step()
        exposed = there.exposed["host"]
        assert exposed + there.hidden["host"] == pytest.approx(seconds)
        assert exposed == pytest.approx(0, abs=1e-12)
        if stage == 1:
            assert there.seconds - here.seconds == pytest.approx(exposed)
        waits = StepModel(LLAMA, layout, fast.settings, slow).step().exposed["host"]
        least = copied * layers / slow.host_bytes_per_s
        assert least - here.seconds < waits < least


def test_experts_axis_sums_what_its_devices_share():
    """The gradients of all but the experts cross `expert`: a longer step, by the two rounds of
    their bytes."""
    one, four = (work(Layout(data=8 // e, expert=e, zero=1), MIXTRAL) for e in (1, 4))
    shared = MIXTRAL.parameters() - 32 * 8 * 3 * 4096 * 14336
    held = four.device.parameters()
    assert held.layers + held.ends - held.experts == pytest.approx(shared, rel=1e-6)
    rows = 1.1 * one.tokens * 2 * 4096 * 2  # the busiest device's, to two experts each, in 16 bits
    # there and back in F and B; R does not bring them back. With F, R and B go float32 weights
    ways, weights = 5, rows / 4096 * 2
    sums = Collective(SUM, ("expert",), 4 * shared / 2)  # a device's half of what `data` has summed
    exchanges = [
        Collective(EXCHANGE, ("expert",), rows, 32 * ways),
        Collective(EXCHANGE, ("expert",), weights, 32 * 3),
    ]
    assert four.step().exposed["expert"] == pytest.approx(
        four.links.seconds([sums, *exchanges])["expert"], rel=1e-3
    )


def test_memory_by_zero_and_recomputation():
    by_zero = [memory(work(Layout(data=64, zero=zero))).bytes for zero in range(3)]
    assert by_zero == sorted(by_zero, reverse=True)
    by_remat = [
        memory(work(Layout(data=64, remat=remat))).parts["activations"]
        for remat in ("none", "selective", "full")
    ]
    assert by_remat == sorted(by_remat, reverse=True) and by_remat[2] == 2 * 8192 * 4096 * 32
    deep = [
        memory(work(Layout(stage=8, microbatches=m, schedule=s, remat="selective"))).pools[
            "residual_b"
        ]
        for s, m in (("gpipe", 32), ("1f1b", 32), ("1f1b", 4))
    ]
    assert deep[0] == 4 * deep[1] == 8 * deep[2] > 0


@pytest.mark.parametrize(
    "layout, gigabytes",
    [
        (Layout(data=64, zero=3), 11.55),
        (Layout(data=16, model=4, microbatch=4), 19.24),
        (Layout(data=16, stage=4, repeats=2, microbatches=16, schedule="interleaved"), 31.88),
    ],
)
def test_memory_beside_the_compiler_s(layout, gigabytes):
    """XLA's for H100s, llama3_8b, all computed again (jax 0.10.2, compiled ahead of time)."""
    assert memory(work(layout)).bytes / 1e9 == pytest.approx(gigabytes, rel=0.1)


def test_a_module_of_prediction_is_a_layer_and_a_join_where_the_head_is():
    """Beside the logits of its own."""
    one, more = (work(Layout(data=8), dataclasses.replace(LLAMA, mtp_depth=n)) for n in (0, 2))
    matmuls = lambda w: w.head.exposed["matmuls"]
    layer = sum(op.exposed["matmuls"] for name, op in one.layers.ops(False).items() if name != "R")
    # without logits
    joins = more.model_flops() / 8 - one.model_flops() / 8 - 6 * 2 * 8192 * 128256 * 4096
    assert matmuls(more) > 3 * matmuls(one) + 2 * layer
    assert joins / (matmuls(more) - 3 * matmuls(one)) < one.hardware.peak()
    of_microbatch = lambda w: sum(
        seconds for part, seconds in w.step().exposed.items() if part not in ("data", "optimizer")
    )
    assert of_microbatch(more) - of_microbatch(one) == pytest.approx(
        more.head.seconds - one.head.seconds
    )
    held = more.device.parameters()
    assert more.step().exposed["optimizer"] / one.step().exposed["optimizer"] == pytest.approx(
        (held.layers + held.ends) / LLAMA.parameters()
    )


def test_the_others_wait_for_the_busiest_device_of_expert():
    """Rows of its experts' products and of what it is sent; a device that has all experts has all
    rows. Latency is not multiplied."""
    for expert, slower in ((4, True), (1, False)):
        layout, ours = Layout(data=8, expert=expert), FRAMEWORKS["jaxtrain"]
        even, busy = (
            StepModel(
                MIXTRAL, layout, dataclasses.replace(ours, imbalance=n), load("h100")
            ).layers.ops(False)
            for n in (1.0, 1.5)
        )
        assert (busy["F"].exposed["matmuls"] > 1.2 * even["F"].exposed["matmuls"]) == slower
        assert busy["F"].exposed.get("expert", 0.0) == pytest.approx(
            1.5 * even["F"].exposed.get("expert", 0.0), rel=0.03
        )


def test_experts_with_a_capacity_compute_all_of_it_and_no_room_is_exceeded():
    """Also where a device has all experts, and in other frameworks: 1.25 times the products of a
    capacity of 1. An imbalance changes neither these nor experts whose room is the mean."""

    def products(framework="jaxtrain", expert=1, imbalance=1.1, **changes):
        model = dataclasses.replace(MIXTRAL, **changes)
        settings = dataclasses.replace(FRAMEWORKS[framework], imbalance=imbalance)
        layout = Layout(data=8, expert=expert, microbatch=2)
        step = StepModel(model, layout, settings, load("tpu-v6e"))
        return step.part(LayerWork).products(False)[-1].forward

    for framework in ("jaxtrain", "maxtext"):
        for expert in (1, 4):
            even, more = (products(framework, expert, capacity_factor=n) for n in (1.0, 1.25))
            assert more / even == pytest.approx(1.25, rel=0.02)
            assert more == products(framework, expert, imbalance=2.0, capacity_factor=1.25)
    assert products(expert=4, expert_room=1.0) == pytest.approx(products(expert=4, imbalance=1.0))
    assert products(expert=4, expert_room=4.0) == products(expert=4) > products(expert=1)


def test_our_loops_over_blocks_of_experts_rows_take_turns_on_gpus():
    """A measured step of two layers of Mixtral on an H100 takes 0.673 s (benchmarks/README.md).
    Experts with a capacity, TPUs' kernels and other frameworks have no such loops."""
    two = dataclasses.replace(MIXTRAL, layers=2)
    layout = Layout(microbatch=2, microbatches=2, remat="full")
    assert work(layout, two).step().seconds == pytest.approx(0.673, rel=0.1)
    turns = lambda model=two, **kinds: sum(
        work(layout, model, **kinds).part(LayerWork).turns(4096, 4096 * 14336, True)
    )
    assert turns() > 3 * 4 * 40e-6
    assert turns(hardware="tpu-v5p") == turns(framework="torchtitan") == 0
    assert turns(dataclasses.replace(two, capacity_factor=1.0)) == 0
