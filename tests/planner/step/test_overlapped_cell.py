"""What an overlapped cell saves, by its phases and in a step."""

import dataclasses
import itertools

import pytest

from benchmarks.model_forms import llama
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.links import EXPERT
from jaxtrain.planner.layer.model import Model
from jaxtrain.planner.layer.settings import Rates, StepSettings
from jaxtrain.planner.step.layer_time import LayerTime
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS
from jaxtrain.planner.step.overlapped_cell import Phases, most_saved
from jaxtrain.planner.step.step_time import StepModel

MIXTRAL = dataclasses.replace(
    llama(32, 4096, 32, 8, 128, 14336, 32000, 8192),
    experts=8,
    experts_per_token=2,
    expert_width=14336,
)
LAYOUT = Layout(stage=4, expert=8, microbatches=16, repeats=2, schedule="dualpipe_v", remat="none")
ALL = StepSettings(rates=Rates(cell_overlap=1.0))


def work(layout: Layout = LAYOUT, model: Model = MIXTRAL, framework=ALL) -> StepModel:
    return StepModel(model, layout, framework, load("h100"))


def test_phases():
    """Each line saves the shorter of what stands in it; the cell takes no less than either op."""
    forward, backward = Phases(3.0, 2.0, 5.0, 1.0), Phases(6.0, 4.0, 7.0, 2.5)
    assert most_saved(forward, backward) == 2.5 + 2.0 + 4.0 + 1.0
    assert most_saved(forward, Phases(0.0, 0.0, 0.0, 0.0)) == 0.0
    for f, b in itertools.product(itertools.product((0.5, 2.0, 9.0), repeat=4), repeat=2):
        assert most_saved(Phases(*f), Phases(*b)) <= min(sum(f), sum(b)) + 1e-12


def with_links(step: StepModel, factor: float) -> StepModel:
    tiers = tuple(
        dataclasses.replace(tier, gb_per_s=tier.gb_per_s * factor) for tier in step.hardware.tiers
    )
    return dataclasses.replace(step, hardware=dataclasses.replace(step.hardware, tiers=tiers))


def test_fast_links_hide_all_messages_and_slow_ones_all_products():
    """On fast links a cell's messages of tokens are all hidden; on slow ones products are, but for
    those of F's attention or B's, which have no message beside them in the other op."""
    step = work()
    fast, slow = with_links(step, 1e3), with_links(step, 1e-5)
    messages = lambda of: sum(of.ops()[op].exposed[EXPERT] for op in "FB")
    assert fast.saved_by_overlap() == pytest.approx(messages(fast))
    phases = [slow.part(LayerTime).phases(op) for op in "FB"]
    products = sum(phase.attention + phase.experts for phase in phases)
    assert slow.saved_by_overlap() == pytest.approx(products * 32 / 4)
    assert slow.saved_by_overlap() < messages(slow)
    part = StepSettings(rates=Rates(cell_overlap=0.5))
    assert work(framework=part).saved_by_overlap() == pytest.approx(step.saved_by_overlap() / 2)


@pytest.mark.parametrize("remat", ["none", "selective", "full", "full:2"])
def test_a_step_hides_what_its_cells_save(remat):
    """The same messages, some of them hidden; two terms less of the bubble's formula."""
    layout = dataclasses.replace(LAYOUT, remat=remat)
    apart, together = (work(dataclasses.replace(layout, overlap=on)) for on in (False, True))
    saved, cells = apart.saved_by_overlap(), 2 * 16 - 3 * 4 + 1
    assert saved > 0
    a, b = apart.step(), together.step()
    assert b.hidden[EXPERT] == pytest.approx(saved * cells / 2)
    assert a.exposed[EXPERT] == pytest.approx(b.exposed[EXPERT] + b.hidden[EXPERT])
    assert a.seconds - b.seconds == pytest.approx(saved * (cells / 2 + (4 / 2 - 1) / 2))


def test_where_nothing_is_saved():
    """Without experts, or with all of them on each device; on kinds of devices of which nothing is
    known; and in other frameworks."""
    dense = dataclasses.replace(MIXTRAL, experts=0, experts_per_token=0, expert_width=0)
    assert work(dataclasses.replace(LAYOUT, expert=1, model=8), dense).saved_by_overlap() == 0
    assert work(dataclasses.replace(LAYOUT, expert=1, data=8)).saved_by_overlap() == 0
    for framework in FRAMEWORKS.values():  # a config's platform says what is covered
        assert work(framework=framework).saved_by_overlap() == 0


def test_op_times():
    """FB is there where the layout has overlapped cells, the update where it has several steps."""
    plain, steps = work(), work(dataclasses.replace(LAYOUT, steps=3))
    cells = work(dataclasses.replace(LAYOUT, overlap=True))
    times = plain.op_times()
    assert len(times) == 6 and cells.op_times()[:6] == times == steps.op_times()[:6]
    assert cells.op_times()[6:] == (times[0] + times[1] - plain.saved_by_overlap(),)
    assert steps.op_times()[6:] == (0.0, steps.update.op.seconds)
    assert steps.update.op.seconds >= steps.update.optimizer.seconds > 0
