"""The estimated seconds of a step, on the text of a small program whose numbers are known."""

import pytest
from step_seconds import StepSeconds, scope_of, scoped_runs
from support import small
from support.step_text import CONFIG, STEP, TICKS

from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.layer import hardware
from jaxtrain.planner.programs.compile_check import step_loops
from jaxtrain.planner.programs.topology import Compiled
from jaxtrain.schedule.columns import columns

H100_BYTES_PER_S = 1e9 * hardware.load("h100").memory_gb_per_s
CLOCK = 1e9 * hardware.load("tpu-v5p").clock_ghz
SIZE = 4 * 64 * 16 * 512  # bytes
DOT = 2 * 64 * 16 * 512 * 512  # operations
RUNS = columns(make_setup(CONFIG).train).runs


def figures(platform: str = "v5p", **efficiency: float) -> StepSeconds:
    return StepSeconds(
        CONFIG, platform, Compiled(STEP, memory={"argument": 5, "temp": 7}), **efficiency
    )


def by_op(estimate: StepSeconds) -> dict[str, float]:
    """Seconds by scope."""
    return {
        op: sum(estimate.seconds(run) for run in estimate.runs if run.op == op)
        for op in {run.op for run in estimate.runs}
    }


def test_seconds_of_cycles():
    """Of stage 0, as busy as the other; the kernel's two products of 8 heads of 16 numbers are half
    masked."""
    estimate, kernel = figures(), 2 * 2 * 8 * 64 * 64 * 16 / 2
    forward, backward = (int(RUNS[op][:, 0].sum()) for op in ("K0", "B0"))
    seconds = by_op(estimate)
    assert seconds["K"] == pytest.approx(forward * (1000 / CLOCK + 2 * kernel / 459e12))
    assert seconds["B"] == pytest.approx(backward * 300 / CLOCK) and seconds[
        "tick"
    ] == pytest.approx(TICKS * 200 / CLOCK)
    slow = by_op(figures(kernel_efficiency=0.25))
    assert slow["K"] - seconds["K"] == pytest.approx(forward * 2 * kernel / 459e12)


def test_seconds_of_a_roofline():
    """On an H100 a copy takes what its bytes take, a large product what its operations take, in
    float32 at half of the peak."""
    estimate = figures("h100")
    assert by_op(estimate)["tick"] == pytest.approx(TICKS * 2 * SIZE / H100_BYTES_PER_S)
    product = next(run for run in estimate.runs if run.instruction.name == "y")
    assert estimate.seconds(product) == pytest.approx(
        product.times * max(DOT / (0.7 * 494e12), (2 * SIZE + 4 * 512**2) / H100_BYTES_PER_S)
    )


def test_the_busiest_stage():
    """One op is left that takes time, and stage 1 alone runs it."""
    only = (
        STEP.replace('"estimated_cycles":"200"', "")
        .replace('"estimated_cycles":"300"', "")
        .replace("/K0/", "/head/")
    )
    assert figures().stage == 0
    estimate = StepSeconds(CONFIG, "v5p", Compiled(only, memory={"argument": 0, "temp": 0}))
    assert estimate.stage == 1 and {op for op, seconds in by_op(estimate).items() if seconds} == {
        "head"
    }


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        (
            "jit(train)/shard_map/while/body/eval_jaxpr/while/body/while/body/K1/while/body/dot_general",
            "K",
        ),
        ("jit(train)/shard_map/while/body/F0/while/body/gather/all_gather", "gather"),
        ("jit(train)/shard_map/reduce_gradients/reduce_scatter", "reduce"),
        ("jit(train)/shard_map/while/body/permute_EARLY/ppermute", "permute"),
        ("jit(train)/shard_map/while/body/embed_gradient/scatter", "embed_gradient"),
        ("jit(train)/optimizer/mul", "optimizer"),
        ("jit(train)/shard_map/while/body/take_up/copy", "take"),
        ("jit(train)/shard_map/while/body/Fused/copy", ""),
    ],
)
def test_scopes(name, scope):
    assert scope_of(name) == scope


def test_one_stage_recomputes_in_its_backward():
    config = small.config((1, 1, 1), "1f1b", 1, 1, {"data.sequence_length": 64})
    text = """HloModule jit_train, is_scheduled=true
ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %again = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="s/while/body/B0/while/body/jvp()/dot"}
  ROOT %back = f32[8,8]{1,0} dot(%again, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="s/while/body/B0/while/body/transpose(jvp())/dot"}
}
"""  # noqa: E501
    runs = scoped_runs(step_loops(Compiled(text).program, make_setup(config)))
    assert {run.instruction.name: run.op for run in runs if run.instruction.name != "a"} == {
        "again": "R",
        "back": "B",
    }


@pytest.mark.parametrize("stage", [0, 1])
def test_the_scope_of_a_run(stage):
    """What stands around the ops is the tick's, its permutes have a scope of their own."""
    runs = scoped_runs(step_loops(Compiled(STEP).program, make_setup(CONFIG), stage))
    ops = {run.instruction.name: run.op for run in runs}
    assert ops["y"] == "K" and ops["turned"] == "B" and ops["slots"] == "tick"
    assert ops["up"] == "permute" and ops["scan"] == "other"
