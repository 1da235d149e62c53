"""The figures of a step, on the text of a small program whose numbers are known."""

import pytest
from support import small
from support.step_text import CONFIG, STEP, TICK, TICKS

from jaxtrain.costs import hardware
from jaxtrain.hlo.loops import StepLoops, scope_of
from jaxtrain.hlo.step_figures import StepFigures
from jaxtrain.hlo.topology import Compiled
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.schedule.columns import columns

H100_BYTES_PER_S = 1e9 * hardware.load("h100").memory_gb_per_s
CLOCK = 1e9 * hardware.load("tpu-v5p").clock_ghz
SIZE = 4 * 64 * 16 * 512  # bytes
DOT = 2 * 64 * 16 * 512 * 512  # operations
RUNS = columns(make_setup(CONFIG).train).runs


def figures(platform: str = "v5p", **efficiency: float) -> StepFigures:
    return StepFigures(
        CONFIG, platform, Compiled(STEP, memory={"argument": 5, "temp": 7}), **efficiency
    )


def by_op(found: StepFigures) -> dict[str, float]:
    """Seconds by scope."""
    return {
        op: sum(found.seconds(run) for run in found.runs if run.op == op)
        for op in {run.op for run in found.runs}
    }


@pytest.mark.parametrize("stage", [0, 1])
def test_how_often_a_stage_runs_what(stage):
    """An op as its column says, what is around the ops in every tick."""
    compiled = Compiled(STEP)
    times = {
        run.instruction.name: (run.times, run.op)
        for run in StepLoops(compiled.program, make_setup(CONFIG), stage).executed()
    }
    assert times["y"] == (RUNS["K0"][:, stage].sum(), "K")
    assert times["turned"] == (RUNS["B0"][:, stage].sum(), "B")
    assert (
        times["slots"] == (TICKS, "tick")
        and times["up"] == (TICKS, "permute")
        and times["scan"] == (1, "other")
    )


def test_a_kernel_is_called_once_for_a_sequences_documents():
    """However many layers the unit has that the loop's name speaks of."""
    loop = f'body=%F, metadata={{op_name="{TICK}/body/'
    assert loop in STEP
    compiled = Compiled(STEP.replace(loop, f"{loop}while/body/K0/while/body/document_calls/"))
    setup = make_setup(CONFIG)
    times = {
        run.instruction.name: run.times for run in StepLoops(compiled.program, setup, 0).executed()
    }
    assert times["y"] == columns(setup.train).busy[:, 0].sum()


def test_seconds_of_cycles():
    """Of stage 0, as busy as the other; the kernel's two products of 8 heads of 16 numbers are half
    masked."""
    found, kernel = figures(), 2 * 2 * 8 * 64 * 64 * 16 / 2
    forward, backward = (int(RUNS[op][:, 0].sum()) for op in ("K0", "B0"))
    seconds = by_op(found)
    assert seconds["K"] == pytest.approx(forward * (1000 / CLOCK + 2 * kernel / 459e12))
    assert seconds["B"] == pytest.approx(backward * 300 / CLOCK) and seconds[
        "tick"
    ] == pytest.approx(TICKS * 200 / CLOCK)
    slow = by_op(figures(kernel_efficiency=0.25))
    assert slow["K"] - seconds["K"] == pytest.approx(forward * 2 * kernel / 459e12)


def test_seconds_of_a_roofline():
    """On an H100 a copy takes what its bytes take, a large product what its operations take, in
    float32 at half of the peak."""
    found = figures("h100")
    assert by_op(found)["tick"] == pytest.approx(TICKS * 2 * SIZE / H100_BYTES_PER_S)
    product = next(run for run in found.runs if run.instruction.name == "y")
    assert found.seconds(product) == pytest.approx(
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
    found = StepFigures(CONFIG, "v5p", Compiled(only, memory={"argument": 0, "temp": 0}))
    assert found.stage == 1 and {op for op, seconds in by_op(found).items() if seconds} == {"head"}


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
    runs = StepLoops(Compiled(text).program, make_setup(config)).executed()
    assert {run.instruction.name: run.op for run in runs if run.instruction.name != "a"} == {
        "again": "R",
        "back": "B",
    }


@pytest.mark.parametrize("rows, expected", [(None, 4), (300, 3)])
def test_loops_over_blocks_of_rows_run_as_often_as_rows_fill_blocks(rows, expected):
    """Of 512 rows, or 300, for 2 groups in blocks of 64."""
    config = small.config((1, 1, 1), "1f1b", 1, 1, {"data.sequence_length": 64})
    text = """HloModule jit_train, is_scheduled=true
%body (p.1: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %p.1 = (s32[], f32[64,8]{1,0}) parameter(0)
  %x = f32[64,8]{1,0} get-tuple-element(%p.1), index=1
  %i = s32[] get-tuple-element(%p.1), index=0
  ROOT %t = (s32[], f32[64,8]{1,0}) tuple(%i, %x)
}
ENTRY %main (a: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %a = (s32[], f32[64,8]{1,0}) parameter(0)
  ROOT %while = (s32[], f32[64,8]{1,0}) while(%a), condition=%less, body=%body, metadata={op_name="s/F0/while/body/row_blocks_512_2_64/while"}
}
%less (p.2: (s32[], f32[64,8])) -> pred[] {
  %p.2 = (s32[], f32[64,8]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  ROOT %c = pred[] compare(%i.2, %i.2), direction=NE
}
"""  # noqa: E501
    runs = StepLoops(Compiled(text).program, make_setup(config), expert_tokens=rows).executed()
    assert {run.instruction.name: run.times for run in runs}["x"] == expected
