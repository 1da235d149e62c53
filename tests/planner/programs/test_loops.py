"""How often a step's instructions run, on texts whose numbers are known."""

import pytest
from support import small
from support.step_text import CONFIG, STEP, TICK, TICKS

from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.programs.compile_check import step_loops
from jaxtrain.planner.programs.loops import op_in
from jaxtrain.planner.programs.topology import Compiled
from jaxtrain.schedule.columns import columns

RUNS = columns(make_setup(CONFIG).train).runs


@pytest.mark.parametrize("stage", [0, 1])
def test_how_often_a_stage_runs_what(stage):
    """An op runs as its column says, what stands around the ops in every tick."""
    compiled = Compiled(STEP)
    times = {
        run.instruction.name: run.times
        for run in step_loops(compiled.program, make_setup(CONFIG), stage).executed()
    }
    assert times["y"] == RUNS["K0"][:, stage].sum()
    assert times["turned"] == RUNS["B0"][:, stage].sum()
    assert times["slots"] == times["up"] == TICKS and times["scan"] == 1


def test_a_kernel_is_called_once_for_a_sequences_documents():
    """However many layers the unit has that the loop's name speaks of."""
    loop = f'body=%F, metadata={{op_name="{TICK}/body/'
    assert loop in STEP
    compiled = Compiled(STEP.replace(loop, f"{loop}while/body/K0/while/body/document_calls/"))
    setup = make_setup(CONFIG)
    times = {
        run.instruction.name: run.times for run in step_loops(compiled.program, setup, 0).executed()
    }
    assert times["y"] == columns(setup.train).busy[:, 0].sum()


@pytest.mark.parametrize(
    "loop, tokens, expected",
    [
        ("row_blocks_512_2_64", None, 4),
        ("row_blocks_512_2_64", 300, 3),
        ("row_excess_512_256_32", None, 8),
        ("row_excess_512_256_32", 300, 2),
        ("row_excess_512_256_32", 256, 0),
    ],
)
def test_loops_over_blocks_run_as_often_as_tokens_fill_blocks(loop, tokens, expected):
    """512 tokens, or fewer, for 2 groups in blocks of 64; or those beyond a mean of 256 in blocks
    of 32."""
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
    text = text.replace("row_blocks_512_2_64", loop)
    runs = step_loops(Compiled(text).program, make_setup(config), expert_tokens=tokens).executed()
    assert {run.instruction.name: run.times for run in runs}.get("x", 0) == expected


def test_the_loops_around():
    """The scan, the loop around a tick's ops, the op's own; the innermost last."""
    runs = step_loops(Compiled(STEP).program, make_setup(CONFIG)).executed()
    around = {run.instruction.name: [loop.name for loop in run.loops] for run in runs}
    assert around["scan"] == [] and around["slots"] == ["scan"]
    assert around["y"] == ["scan", "busy", "loop.F"]


def test_a_loop_of_unknown_trips():
    loop = f'body=%F, metadata={{op_name="{TICK}/body/while"}}'
    text = STEP.replace("/K0/", "/").replace(loop, loop.replace(TICK, "elsewhere"))
    with pytest.raises(ValueError, match="a loop without a known number of trips: %loop.F"):
        list(step_loops(Compiled(text).program, make_setup(CONFIG)).executed())


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("jit(train)/while/body/K1/while/body/F0/dot_general", "F"),
        ("jit(train)/transpose(embed_gradient)/scatter", "embed_gradient"),
        ("jit(train)/while/body/permute_EARLY/ppermute", "permute"),
        ("jit(train)/while/body/Fused/copy", ""),
    ],
)
def test_the_innermost_op(name, op):
    assert op_in(name) == op
