"""A step by its table: what is counted on devices that share cores and on others, and when closed
forms stand."""

import dataclasses

import pytest

from jaxtrain.config import replace
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.planner.layer.hardware import Hardware, Matmul, Tier, load
from jaxtrain.planner.layer.links import EXPERT, STAGE
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.explain import explained
from jaxtrain.planner.search.predict import (
    PlannedTable,
    Prediction,
    exactly,
    predict,
    with_op_times,
)
from jaxtrain.planner.step.time_breakdown import BUBBLE

STEPS = "pipeline.steps_per_program"

# Eight devices on two cores, as --calibrate writes it.
SIMULATED = Hardware(
    "cpu, simulated",
    {"float32": 0.03},
    3.0,
    0.94,
    5.0,
    1.0,
    Matmul(1.0, (30.0, 10.0, 50.0)),
    (0.2, 0.4),
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


OVERLAPPED = "stage=4,expert=8,microbatch=2,repeats=2,schedule=dualpipe_v,overlap="


@pytest.mark.parametrize("remat", ["full", "none", "selective"])
def test_overlapped_cells(remat):
    """A stage hides what its own cells save, the step is as much shorter as the clock says, and
    near the closed form; a line of the explanation has the figures."""

    def mixtral(on: str) -> Prediction:
        layout = layout_flag.read(f"{OVERLAPPED}{on},remat={remat}")
        config = layout_flag.apply(load_recipe(find_recipe("mixtral_8x7b")), layout)
        # with layers' inputs R hides messages, too
        return predict(replace(config, {"pipeline.save": ()}).resolve(), load("h100"))

    prediction = mixtral("true")
    with_cells, apart = exactly(prediction), exactly(mixtral("false"))
    saved = prediction.work.saved_by_overlap()
    table = PlannedTable(with_op_times(prediction.config, prediction.work)).setup.table
    cells = table.overlapped.sum(0) / 2  # of half a stage each
    hidden = with_cells.time.hidden[EXPERT]
    assert any(hidden / saved == pytest.approx(of_stage) for of_stage in cells)
    assert min(cells) > 20
    gain = apart.seconds - with_cells.seconds
    # with Rs the two tables' cells pack otherwise, so that the sign is the tables'
    if remat != "full":
        # W takes longer than B, for which the table without cells waits, too
        assert gain > max(0.75 * hidden, 0.02 * apart.seconds)
    assert with_cells.seconds == pytest.approx(prediction.seconds, rel=0.1)
    both = with_cells.time.exposed[EXPERT] + hidden
    assert both == pytest.approx(apart.time.exposed[EXPERT]) and EXPERT not in apart.time.hidden
    line = next(line for line in explained(with_cells) if line.startswith("overlapped"))
    assert line.endswith(f"({with_cells.seconds / apart.seconds - 1:+.1%})")
    assert not [line for line in explained(apart) if line.startswith("overlapped")]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_closed_form_of_overlapped_cells_with_kinds_of_layers(remat):
    """The stage that works most has more layers than the mean, whose cells save more. Waits for a
    W that takes longer than B are not in it."""
    layout = f"data=2,stage=16,expert=64,microbatch=1,remat={remat}"
    prediction = predicted(layout, load("h100"), "deepseek_v3")
    assert prediction.seconds == pytest.approx(exactly(prediction).seconds, rel=0.08)


def test_overlapped_cells_that_gain_nothing():
    """On TPUs, and without messages to experts."""
    layout = f"{OVERLAPPED}true,remat=none"
    lines = [
        explained(exactly(predicted(layout, load(kind), recipe)))
        for kind, recipe, layout in (
            ("tpu-v5p", "mixtral_8x7b", layout),
            ("h100", "llama3_8b", layout.replace("expert", "data")),
        )
    ]
    tpu, dense = (next(line for line in each if "no gain" in line) for each in lines)
    assert "tpu-v5p" in tpu and "no tokens go to experts" in dense


def test_updates_in_the_table():
    """An update is once in the step, whether after its table or in it, where others wait less."""
    layout = "stage=4,data=8,microbatch=1,schedule=zb_h2,repeats=1,remat=none"
    config = layout_flag.apply(load_recipe(find_recipe("llama3_8b")), layout_flag.read(layout))
    one, three = (
        exactly(predict(replace(config, {STEPS: n}).resolve(), load("h100"))) for n in (1, 3)
    )
    parts = set(one.time.exposed) - {BUBBLE}
    for part in parts:
        assert three.time.exposed[part] == pytest.approx(one.time.exposed[part])
    assert three.time.exposed[BUBBLE] < one.time.exposed[BUBBLE]
    times = three.work.op_times()
    assert len(times) == 8 and times[7] > one.work.update.optimizer.seconds
