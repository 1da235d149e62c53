"""The loop's listener that says the measured step beside the planned one: when, of which steps, and what it leaves. Whole runs are in
test_train.py and test_processes.py."""

import json

import pytest
from support import hardware_file

from jaxtrain.config import Config, MeshConfig, ModelConfig, PipelineConfig, TrainConfig, replace
from jaxtrain.plan.after_warm_up import LEAST, STEPS_MEASURED, AfterWarmUp
from jaxtrain.plan.planned_step import PLANNED, plan_at_hand
from jaxtrain.run.goodput import Part, WallClock
from jaxtrain.training.profile import WARM_UP, Profile

STEP, SLOW = 0.5, 9.0
CONFIG = Config(
    model=ModelConfig(layers=4, width=32, heads=4),
    mesh=MeshConfig(data=1, stage=2),
    pipeline=PipelineConfig(schedule="1f1b", microbatches=2),
    train=TrainConfig(steps=100),
)


class Run:
    """A loop without devices: steps take as long as they are told to."""

    def __init__(self, folder, start: int = 0, profile_steps: int = 0, program=None, known: bool = True):
        self.now, self.lines = 0.0, []
        self.clock = WallClock(0.0, lambda: self.now)
        self.clock.enter(Part.STEPPING)
        self.profile = Profile(folder / "profile", start, profile_steps, self.clock)
        config = replace(CONFIG, {"train.hardware": str(hardware_file.write(folder)) if known else ""}).resolve()
        self.planned = plan_at_hand(config, "cpu").prediction
        self.measured = AfterWarmUp(config, "cpu", program, folder, self.profile, self.clock, self.lines.append)
        self.at = start

    def steps(self, count: int, seconds: float = STEP) -> None:
        for _ in range(count):
            self.now += seconds
            self.at += 1
            self.measured.after(self.at)


def test_the_median_of_steps_after_warm_up(tmp_path):
    """The first steps are slow, as is one of those that count; saves between steps are none of their time."""
    run = Run(tmp_path, start=6)
    run.steps(WARM_UP, SLOW)
    run.steps(STEPS_MEASURED // 2)
    with run.clock.part(Part.SAVING):
        run.now += SLOW
    run.steps(1, SLOW)
    run.steps(STEPS_MEASURED - STEPS_MEASURED // 2 - 1)
    assert run.lines == []
    run.steps(1)
    (line,) = run.lines
    assert f"planned step {run.planned.seconds:.4g} s (simulated), measured 0.5 s ({STEP / run.planned.seconds:.2f} x)" in line
    record = json.loads((tmp_path / PLANNED).read_text())
    assert record["step"] == run.at == 6 + WARM_UP + 1 + STEPS_MEASURED and record["steps"] == STEPS_MEASURED
    assert record["step_time_s"] == pytest.approx(STEP) and record["planned"] == dict(run.planned.time.exposed)
    run.steps(50)
    run.measured.finish(run.at)
    assert len(run.lines) == 1


def test_traced_steps_do_not_count(tmp_path):
    run = Run(tmp_path, profile_steps=3)
    run.steps(WARM_UP + 3, SLOW)
    run.steps(1 + STEPS_MEASURED)
    assert len(run.lines) == 1 and "measured 0.5 s" in run.lines[0]


def test_a_run_that_goes_back(tmp_path):
    """The way back is no step; those before it count."""
    run = Run(tmp_path)
    run.steps(WARM_UP + 5)
    run.measured.go_back(None)
    run.steps(1, SLOW)
    run.steps(STEPS_MEASURED)
    record = json.loads((tmp_path / PLANNED).read_text())
    assert record["step_time_s"] == pytest.approx(STEP) and record["steps"] == STEPS_MEASURED


@pytest.mark.parametrize("laps", [LEAST - 1, LEAST])
def test_a_short_run_says_it_at_its_end(laps, tmp_path):
    run = Run(tmp_path)
    run.steps(WARM_UP + 1 + laps)
    assert run.lines == []
    run.measured.finish(run.at)
    assert len(run.lines) == (laps >= LEAST) and (tmp_path / PLANNED).exists() == (laps >= LEAST)


def test_nothing_is_said_of_devices_that_are_not_known(tmp_path):
    run = Run(tmp_path, known=False)
    run.steps(100)
    run.measured.finish(run.at)
    assert run.lines == [] and not (tmp_path / PLANNED).exists()


class Broken:
    """A program whose text is none."""

    def as_text(self) -> str:
        return "HloModule jit_train\n\n%what is this"


def test_a_trace_that_cannot_be_read_ends_no_run(tmp_path):
    """A line, and the record without parts."""
    run = Run(tmp_path, profile_steps=2, program=Broken())
    run.profile.step_time_s = STEP
    run.steps(100)
    warning, line, *_ = run.lines
    assert warning.startswith("warning: the profile cannot be read by part (TraceError: ") and "\n" not in warning
    assert "measured 0.5 s" in line and json.loads((tmp_path / PLANNED).read_text())["trace"] is None


def test_a_folder_that_cannot_be_written(tmp_path):
    run = Run(tmp_path)
    (tmp_path / PLANNED).mkdir()
    run.steps(100)
    assert "measured 0.5 s" in run.lines[0] and run.lines[-1].startswith("warning: ") and "training goes on" in run.lines[-1]
