"""A step by its table: what is counted on devices that share cores and on others, and when closed
forms stand."""

import dataclasses

import pytest

from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.costs.collectives import STAGE
from jaxtrain.costs.hardware import Hardware, Matmul, Tier, load
from jaxtrain.costs.step_time import BUBBLE
from jaxtrain.plan import layout_flag
from jaxtrain.plan.predict import Prediction, exactly, predict

# Eight devices on two cores, as --calibrate writes it.
SIMULATED = Hardware(
    "cpu, simulated",
    {"float32": 0.03},
    3.0,
    0.94,
    5.0,
    1.0,
    Matmul(1.0, (30.0, 10.0, 50.0)),
    0.2,
    0.4,
    4.0,
    (Tier("local", 0, 2.0, 1.0, 5.0),),
    0.0,
    (),
    alone=4.0,
)


def predicted(
    layout: str, hardware: Hardware = SIMULATED, recipe: str = "tiny", assume: str = "jaxtrain"
) -> Prediction:
    config = layout_flag.apply(load_recipe(find_recipe(recipe)), layout_flag.read(layout))
    return predict(config.resolve(), hardware, assume)


@pytest.mark.parametrize(
    "layout", ["data=8,microbatch=2", "data=2,stage=4,repeats=1,schedule=gpipe"]
)
def test_who_has_no_table(layout):
    """One stage, and a program of others."""
    prediction = predicted(
        layout, load("h100"), assume="megatron_core" if "stage" in layout else "jaxtrain"
    )
    exact = exactly(prediction)
    assert exact is prediction and exact.in_flight is None


def test_gpipe_computes_all_of_it_again_on_shared_cores():
    """1F1B's last stage has no R, for its B follows its F; GPipe's has. What one of the stages is
    busy with the others wait for, or use."""
    gpipe, one_f_one_b = (
        exactly(predicted(f"stage=8,repeats=1,microbatch=2,schedule={name}"))
        for name in ("gpipe", "1f1b")
    )
    again = gpipe.work.layout.microbatches * gpipe.work.ops()["R"].seconds / 8
    busy = lambda prediction: (
        prediction.seconds - prediction.time.exposed[BUBBLE] - prediction.time.exposed[STAGE]
    )
    assert again > 0.01 * busy(gpipe)
    assert busy(gpipe) - busy(one_f_one_b) == pytest.approx(again)


@pytest.mark.parametrize("stages", [1, 4])
def test_more_recomputed_layers_take_more_time_and_less_memory(stages):
    """Up to those of all layers, from those of none, and each as much as the one before."""

    def of(remat: str) -> Prediction:
        layout = f"data={16 // stages},stage={stages},microbatch=2,remat={remat},schedule=1f1b"
        return exactly(predicted(layout, load("h100"), "llama3_8b"))

    layers = 32 // stages
    none, *some, full = (of(f"full:{count}") for count in (0, 2, 4, 6, layers))
    assert (none.seconds, none.memory) == (of("none").seconds, of("none").memory)
    assert (full.seconds, full.memory) == (of("full").seconds, of("full").memory)
    sizes = [each.memory.bytes for each in some]
    assert none.memory.bytes > sizes[0] > sizes[1] > sizes[2] > full.memory.bytes
    assert sizes[0] - sizes[1] == pytest.approx(sizes[1] - sizes[2])
    assert none.seconds < some[0].seconds < some[1].seconds < some[2].seconds < full.seconds


def test_waits_of_shared_cores():
    """With few microbatches a stage works alone most of the time, and faster; how much faster, the
    hardware says."""
    idle, full = (
        exactly(predicted(f"stage=8,repeats=1,microbatch={n},schedule=1f1b")) for n in (16, 1)
    )
    assert full.bubble_fraction < 0.05 < idle.bubble_fraction
    slower = dataclasses.replace(SIMULATED, alone=2.0)
    assert (
        exactly(predicted("stage=8,repeats=1,microbatch=16,schedule=1f1b", slower)).seconds
        > 1.5 * idle.seconds
    )


@pytest.mark.parametrize("remat", ["full", "selective", "none", "full:2", "selective:2"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "interleaved,repeats=2"])
def test_devices_of_their_own(schedule, remat):
    """Near the closed forms where these are made for: the same layers everywhere, and messages that
    take next to nothing."""
    prediction = predicted(
        f"data=4,stage=4,microbatch=2,remat={remat},schedule={schedule}", load("h100"), "llama3_8b"
    )
    exact = exactly(prediction)
    assert exact.seconds == pytest.approx(prediction.seconds, rel=0.06)
    assert (
        sum(exact.time.exposed.values()) == pytest.approx(exact.seconds)
        and min(exact.time.exposed.values()) >= 0
    )
    assert exact.bubble_fraction == pytest.approx(prediction.bubble_fraction, abs=0.06)
    assert exact.in_flight > 0
