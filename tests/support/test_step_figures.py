"""The figures of a step, on the text of a small program whose numbers are known."""

import pytest

from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.plan import flops
from jaxtrain.schedule.columns import columns
from support import small
from support.ahead import Compiled
from support.step_figures import CLOCK, H100_MEMORY, Peaks, StepFigures
from support.step_loops import StepLoops, scope_of

# Two stages and four microbatches; a tick permutes beside one loop around its ops. Arrays [64,16,512] float32 are 2 MB.
END = {"pipeline.vocabulary": "end_stages"}
CONFIG = small.config((1, 2, 1), "1f1b", 1, 4, {"data.sequence_length": 64, "pipeline.permute": "early", "pipeline.remat": "none", **END})
TICKS = make_setup(CONFIG).table.ticks
TICK = "jit(train)/shard_map/while/body/while"
STEP = f"""HloModule jit_train, is_scheduled=true

%wanted (c: (s32[], f32[64,16,512])) -> pred[] {{
  %c = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  ROOT %is = pred[] custom-call(%c), custom_call_target="unknown"
}}

%F (f: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %f = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  %f.i = s32[] get-tuple-element(%f), index=0
  %x = f32[64,16,512]{{2,1,0}} get-tuple-element(%f), index=1
  %w = f32[512,512]{{1,0}} constant({{...}})
  %y = f32[64,16,512]{{2,1,0}} dot(%x, %w), lhs_contracting_dims={{2}}, rhs_contracting_dims={{0}}, metadata={{op_name="{TICK}/body/while/body/K0/dot"}}, backend_config={{"estimated_cycles":"1000"}}
  %scores = bf16[1,4,64,64]{{3,2,1,0}} exponential(%y), metadata={{op_name="{TICK}/body/while/body/K0/scores"}}
  %q = bf16[1,8,64,16]{{3,2,1,0}} custom-call(%scores), custom_call_target="AllocateBuffer"
  %attended = bf16[1,8,64,16]{{3,2,1,0}} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", metadata={{op_name="{TICK}/body/while/body/K0/splash_mha_fwd/pallas_call"}}
  ROOT %f.next = (s32[], f32[64,16,512]{{2,1,0}}) tuple(%f.i, %y)
}}

%B (b: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %b = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  %b.i = s32[] get-tuple-element(%b), index=0
  %g = f32[64,16,512]{{2,1,0}} get-tuple-element(%b), index=1
  %turned = f32[64,16,512]{{1,2,0}} copy(%g), metadata={{op_name="{TICK}/body/while/body/B0/copy"}}, backend_config={{"estimated_cycles":"300"}}
  ROOT %b.next = (s32[], f32[64,16,512]{{2,1,0}}) tuple(%b.i, %g)
}}

%ops (o: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %o = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  %loop.F = (s32[], f32[64,16,512]{{2,1,0}}) while(%o), condition=%wanted, body=%F, metadata={{op_name="{TICK}/body/while"}}
  %loop.B = (s32[], f32[64,16,512]{{2,1,0}}) while(%loop.F), condition=%wanted, body=%B, metadata={{op_name="{TICK}/body/while"}}
  ROOT %o.next = (s32[], f32[64,16,512]{{2,1,0}}) tuple(%o)
}}

%tick (t: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %t = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  %m = f32[64,16,512]{{2,1,0}} get-tuple-element(%t), index=1
  %up = (f32[64,16,512]{{2,1,0}}, f32[64,16,512]{{2,1,0}}, u32[]) collective-permute-start(%m), source_target_pairs={{{{0,1}},{{1,0}}}}, metadata={{op_name="{TICK}/body/permute_EARLY/ppermute"}}
  %early = f32[64,16,512]{{2,1,0}} collective-permute-done(%up)
  %down = (f32[64,16,512]{{2,1,0}}, f32[64,16,512]{{2,1,0}}, u32[]) collective-permute-start(%m), source_target_pairs={{{{0,1}},{{1,0}}}}, metadata={{op_name="{TICK}/body/permute_EARLY/ppermute"}}
  %busy = (s32[], f32[64,16,512]{{2,1,0}}) while(%t), condition=%wanted, body=%ops, metadata={{op_name="{TICK}"}}
  %late = f32[64,16,512]{{2,1,0}} collective-permute-done(%down)
  %slots = f32[64,16,512]{{1,2,0}} copy(%late), backend_config={{"estimated_cycles":"200"}}
  ROOT %t.next = (s32[], f32[64,16,512]{{2,1,0}}) tuple(%t)
}}

ENTRY %main (a: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %a = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  ROOT %scan = (s32[], f32[64,16,512]{{2,1,0}}) while(%a), condition=%less, body=%tick, backend_config={{"known_trip_count":{{"n":"{TICKS}"}}}}
}}
"""  # noqa: E501
SIZE = 4 * 64 * 16 * 512  # bytes
DOT = 2 * 64 * 16 * 512 * 512  # operations
RUNS = columns(make_setup(CONFIG).train).runs


def figures(platform: str = "tpu_v5p", **peaks: float) -> StepFigures:
    return StepFigures(CONFIG, platform, Compiled(STEP, 0, 0, memory={"argument": 5, "temp": 7}), Peaks(**peaks))


@pytest.mark.parametrize("stage", [0, 1])
def test_how_often_a_stage_runs_what(stage):
    """An op as its column says, what is around the ops in every tick."""
    compiled = Compiled(STEP, 0, 0)
    times = {run.instruction.name: (run.times, run.op) for run in StepLoops(compiled.program, make_setup(CONFIG), stage).executed()}
    assert times["y"] == (RUNS["K0"][:, stage].sum(), "K")
    assert times["turned"] == (RUNS["B0"][:, stage].sum(), "B")
    assert times["slots"] == (TICKS, "tick") and times["up"] == (TICKS, "permute") and times["scan"] == (1, "other")


def test_seconds_of_cycles():
    """Of stage 0, as busy as the other; the kernel's two products of 8 heads of 16 numbers are half masked."""
    found, kernel = figures(), 2 * 2 * 8 * 64 * 64 * 16 / 2
    forward, backward = (int(RUNS[op][:, 0].sum()) for op in ("K0", "B0"))
    by_op = found.by_op()
    assert by_op["K"] == pytest.approx(forward * (1000 / CLOCK + 2 * kernel / 459e12))
    assert by_op["B"] == pytest.approx(backward * 300 / CLOCK) and by_op["tick"] == pytest.approx(TICKS * 200 / CLOCK)
    slow = figures(kernels=0.25).by_op()
    assert slow["K"] - by_op["K"] == pytest.approx(forward * 2 * kernel / 459e12)


def test_seconds_of_a_roofline():
    """On an H100 a copy takes what its bytes take, a large product what its operations take, in float32 at half of the peak."""
    found = figures("h100")
    assert found.by_op()["tick"] == pytest.approx(TICKS * 2 * SIZE / H100_MEMORY)
    product = next(run for run in found.runs if run.instruction.name == "y")
    assert found.seconds(product) == pytest.approx(product.times * max(DOT / (0.7 * 494.5e12), (2 * SIZE + 4 * 512**2) / H100_MEMORY))


def test_what_it_says_of_a_step():
    found, runs = figures().as_dict(), int(RUNS["K0"][:, 0].sum())
    backward = int(RUNS["B0"][:, 0].sum())
    assert found["memory"] == {"arguments": 5, "temporary": 7}
    planned = flops.total(CONFIG, found["stage"])
    assert found["flops"]["products"] == runs * DOT and found["flops"]["planned"] == planned.total > planned.own > 0
    assert found["kernels"]["pallas splash_mha_fwd"]["times"] == runs and "AllocateBuffer" not in found["kernels"]
    assert found["attention"] == "pallas splash_mha"
    assert found["square_arrays"] == ["bf16[1, 4, 64, 64] in K"]
    copies = found["copies"]
    assert copies["bytes"] == (TICKS + backward) * SIZE and copies["seconds"] == pytest.approx((TICKS * 200 + backward * 300) / CLOCK)
    assert copies["share"] == pytest.approx(copies["seconds"] / found["seconds"]["busy"])
    (permutes,) = found["collectives"]
    assert permutes["bytes"] == permutes["asynchronous"] == 2 * TICKS * SIZE
    assert permutes["hidden"] == TICKS * SIZE  # one of both is done before the ops begin
    kernel = found["kernels"]["pallas splash_mha_fwd"]["flops"]
    assert permutes["flops"] == pytest.approx(runs * DOT + kernel)
    bubble = make_setup(CONFIG).simulation().bubble_fraction_coupled
    assert found["seconds"]["step"] == pytest.approx(found["seconds"]["busy"] / (1 - bubble)) and bubble > 0.1


def test_the_busiest_stage():
    """One op is left that takes time, and stage 1 alone runs it."""
    only = STEP.replace('"estimated_cycles":"200"', "").replace('"estimated_cycles":"300"', "").replace("/K0/", "/head/")
    assert figures().stage == 0
    found = StepFigures(CONFIG, "tpu_v5p", Compiled(only, 0, 0, memory={"argument": 0, "temp": 0}))
    assert found.stage == 1 and found.by_op().keys() == {"head"}


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(train)/shard_map/while/body/eval_jaxpr/while/body/while/body/K1/while/body/dot_general", "K"),
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
    runs = StepLoops(Compiled(text, 0, 0).program, make_setup(config)).executed()
    assert {run.instruction.name: run.op for run in runs if run.instruction.name != "a"} == {"again": "R", "back": "B"}


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
    runs = StepLoops(Compiled(text, 0, 0).program, make_setup(config), rows=rows).executed()
    assert {run.instruction.name: run.times for run in runs}["x"] == expected
