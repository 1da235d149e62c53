"""An instruction's costs, on text whose meaning is known."""

import pytest

from jaxtrain.hlo.cost import Costs
from jaxtrain.hlo.program import Instruction, Program

# A loop whose trips stand in its condition, as libtpu writes it; [8,16] × [16,4] eight times as a
# convolution with a dilated base.
PROGRAM = """HloModule jit_f, is_scheduled=true

%less (state: (s32[], f32[8,64,64])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[8,64,64]{2,1,0:T(8,128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  %limit = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

%products (p.0: bf16[8,8,16], p.1: bf16[8,16,4]) -> f32[8,8,4] {
  %p.0 = bf16[8,8,16]{2,1,0} parameter(0)
  %p.1 = bf16[8,16,4]{2,1,0} parameter(1)
  ROOT %conv = f32[8,8,4]{2,1,0} convolution(%p.0, %p.1), window={size=8 stride=7 lhs_dilate=8}, \
dim_labels=0bf_0io->0bf
}

%row (q.0: f32[8,64,64], q.1: s32[]) -> f32[1,64,64] {
  %q.0 = f32[8,64,64]{2,1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,64,64]{2,1,0} dynamic-slice(%q.0, %q.1, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %minus = f32[1,64,64]{2,1,0} negate(%cut)
}

%write (r.0: f32[8,64,64], r.1: f32[1,64,64], r.2: s32[]) -> f32[8,64,64] {
  %r.0 = f32[8,64,64]{2,1,0} parameter(0)
  %r.1 = f32[1,64,64]{2,1,0} parameter(1)
  %r.2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = f32[8,64,64]{2,1,0} dynamic-update-slice(%r.0, %r.1, %r.2, %zero.1, %zero.1)
}

%turn (t.0: f32[8,64,64]) -> f32[64,8,64] {
  %t.0 = f32[8,64,64]{2,1,0} parameter(0)
  ROOT %transpose.1 = f32[64,8,64]{2,1,0} transpose(%t.0), dimensions={1,0,2}
}

%body (state.1: (s32[], f32[8,64,64])) -> (s32[], f32[8,64,64]) {
  %state.1 = (s32[]{:T(128)}, f32[8,64,64]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %pool = f32[8,64,64]{2,1,0:T(8,128)} get-tuple-element(%state.1), index=1
  %part = f32[1,64,64]{2,1,0:T(8,128)} fusion(%pool, %i), kind=kLoop, calls=%row, backend_config={"window_config":{"estimated_cycles":"50"}}
  %new = f32[8,64,64]{2,1,0:T(8,128)} fusion(%pool, %part, %i), kind=kLoop, calls=%write
  %same = f32[8,64,64]{2,1,0:T(8,128)} copy(%new)
  %other = f32[8,64,64]{1,2,0:T(8,128)} copy(%same)
  %near = f32[8,64,64]{1,2,0:T(8,128)S(1)} copy(%other)
  %turned = f32[64,8,64]{2,1,0} fusion(%other), kind=kLoop, calls=%turn
  ROOT %next = (s32[]{:T(128)}, f32[8,64,64]{2,1,0:T(8,128)}) tuple(%i, %new)
}

ENTRY %main (a: bf16[8,8,16], b: bf16[8,16,4], c: f32[8,64,64], n: s32[]) -> f32[8,8,4] {
  %a = bf16[8,8,16]{2,1,0} parameter(0)
  %b = bf16[8,16,4]{2,1,0:T(8,128)S(1)} parameter(1)
  %c = f32[8,64,64]{2,1,0} parameter(2)
  %n = s32[] parameter(3)
  %begin = s32[] constant(2)
  %begin.1 = s32[] copy(%begin)
  %start = (s32[], f32[8,64,64]{2,1,0}) tuple(%begin.1, %c)
  %loop = (s32[], f32[8,64,64]{2,1,0}) while(%start), condition=%less, body=%body
  %start.1 = (s32[], f32[8,64,64]{2,1,0}) tuple(%n, %c)
  %loop.1 = (s32[], f32[8,64,64]{2,1,0}) while(%start.1), condition=%less, body=%body
  %gemm = (bf16[8,4]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"]}}}
  %dot = f32[8,8,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
  ROOT %result = f32[8,8,4]{2,1,0} fusion(%a, %b), kind=kOutput, calls=%products
}
"""  # noqa: E501
POOL, ROW = 4 * 8 * 64 * 64, 4 * 64 * 64  # bytes


@pytest.fixture(scope="module")
def costs() -> Costs:
    return Costs(Program(PROGRAM))


def named(costs: Costs, name: str) -> Instruction:
    return next(
        i
        for instructions in costs.program.computations.values()
        for i in instructions
        if i.name == name
    )


def test_trips_by_a_condition(costs):
    """From 2 to 7; of a counter that begins with an argument nothing is known."""
    assert costs.program.trip_count(named(costs, "loop")) == 5
    assert costs.program.trip_count(named(costs, "loop.1")) is None


FLAG = """
%go (g: (s32[], pred[])) -> pred[] {
  %g = (s32[], pred[]) parameter(0)
  %flag = pred[] get-tuple-element(%g), index=1
  ROOT %same.1 = pred[] copy(%flag)
}

%fused_compare (h.0: s32[], h.1: s32[]) -> pred[] {
  %h.0 = s32[] parameter(0)
  %h.1 = s32[] parameter(1)
  ROOT %less.1 = pred[] compare(%h.0, %h.1), direction=LT
}

%more (k: (s32[], s32[])) -> pred[] {
  %k = (s32[], s32[]) parameter(0)
  %k.0 = s32[] get-tuple-element(%k), index=0
  %k.1 = s32[] get-tuple-element(%k), index=1
  ROOT %compared = pred[] fusion(%k.0, %k.1), kind=kLoop, calls=%fused_compare
}
"""


def test_a_loop_that_waits_for_a_flag():
    """The first loop's condition is each of these in turn."""
    waits = {}
    for condition in ("go", "more", "less"):
        text = PROGRAM.replace("\nENTRY", FLAG + "\nENTRY").replace(
            "condition=%less", f"condition=%{condition}", 1
        )
        costs = Costs(Program(text))
        waits[condition] = costs.program.waits_for_a_flag(named(costs, "loop"))
    assert waits == {"go": True, "more": False, "less": False}


@pytest.mark.parametrize("name", ["conv", "result", "dot"])
def test_products(costs, name):
    """Of eight matrices, each output is a sum of 16 products, however the batch is written."""
    assert costs.flops(named(costs, name)) == 2 * 8 * 8 * 4 * 16


def test_a_call_of_cublas(costs):
    assert costs.flops(named(costs, "gemm")) == 2 * 8 * 4 * 16


@pytest.mark.parametrize(
    ("window", "times"),
    [
        ("size=3 pad=1_1", 3 * 8 - 2),  # at both ends a place of the window is outside
        ("size=3", 3 * 6),
        ("size=1 stride=2", 4),
        # every pair of a number and a place of the window, once
        ("size=15 pad=14_14 rhs_reversal=1 lhs_dilate=2", 8 * 15),
    ],
)
def test_windows(window, times):
    size = {"size=3 pad=1_1": 8, "size=3": 6, "size=1 stride=2": 4}.get(window, 29)
    kernel = window.split("=")[1].split(" ")[0]
    text = f"""HloModule m
ENTRY %main (a: f32[2,8,3], b: f32[{kernel},3,5]) -> f32[2,{size},5] {{
  %a = f32[2,8,3]{{2,1,0}} parameter(0)
  %b = f32[{kernel},3,5]{{2,1,0}} parameter(1)
  ROOT %c = f32[2,{size},5]{{2,1,0}} convolution(%a, %b), window={{{window}}}, \
dim_labels=b0f_0io->b0f
}}
"""
    costs = Costs(Program(text))
    assert costs.flops(named(costs, "c")) == 2 * 2 * 3 * 5 * times


def test_bytes_of_memory(costs):
    """What is cut, and what is updated in place, counts its part; what lies in vector memory not at
    all."""
    counts = {
        name: costs.bytes(named(costs, name))
        for name in ("part", "new", "same", "near", "dot", "loop", "pool")
    }
    assert counts == {
        "part": 2 * ROW + 4,  # the row, its negative, and its number
        "new": 2 * ROW + 4,
        "same": 2 * POOL,
        "near": POOL,
        "dot": 2 * 8 * 8 * 16 + 4 * 8 * 8 * 4,
        "loop": 0,
        "pool": 0,
    }


def test_cycles(costs):
    """Its own, or its parts' where it has none."""
    assert costs.cycles(named(costs, "part")) == 50 and costs.cycles(named(costs, "new")) == 0
    inner = PROGRAM.replace(
        "%zero.1, %zero.1)", '%zero.1, %zero.1), backend_config={"estimated_cycles":"9"}'
    )
    with_parts = Costs(Program(inner))
    assert with_parts.cycles(named(with_parts, "new")) == 9
