"""An instruction's costs, on text whose meaning is known."""

import pytest
from instruction_costs import InstructionCosts
from support.products_text import PROGRAM

from jaxtrain.planner.programs.program import Program

POOL, ROW = 4 * 8 * 64 * 64, 4 * 64 * 64  # bytes


@pytest.fixture(scope="module")
def costs() -> InstructionCosts:
    return InstructionCosts(Program(PROGRAM))


@pytest.mark.parametrize("name", ["conv", "result", "dot"])
def test_products(costs, name):
    """Of eight matrices, each output is a sum of 16 products, however the batch is written."""
    assert costs.flops(costs.program.named[name]) == 2 * 8 * 8 * 4 * 16


def test_a_call_of_cublas(costs):
    assert costs.flops(costs.program.named["gemm"]) == 2 * 8 * 4 * 16


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
    costs = InstructionCosts(Program(text))
    assert costs.flops(costs.program.named["c"]) == 2 * 2 * 3 * 5 * times


def test_bytes_of_memory(costs):
    """What is cut, and what is updated in place, counts its part; what lies in vector memory not at
    all."""
    counts = {
        name: costs.bytes(costs.program.named[name])
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


NESTED = """HloModule jit_f, is_scheduled=true

%view (v.0: bf16[1,64,32]) -> bf16[64,32] {
  %v.0 = bf16[1,64,32]{2,1,0} parameter(0)
  ROOT %bitcast.1 = bf16[64,32]{1,0} bitcast(%v.0)
}

%products (p.0: bf16[8,64], p.1: bf16[1,64,32]) -> bf16[8,32] {
  %p.0 = bf16[8,64]{1,0} parameter(0)
  %p.1 = bf16[1,64,32]{2,1,0} parameter(1)
  %weight = bf16[64,32]{1,0} fusion(%p.1), kind=kLoop, calls=%view
  ROOT %conv = bf16[8,32]{1,0} convolution(%p.0, %weight), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[8,64], b: bf16[1,64,32]) -> bf16[8,32] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[1,64,32]{2,1,0} parameter(1)
  ROOT %product = bf16[8,32]{1,0} fusion(%a, %b), kind=kOutput, calls=%products
}
"""


def test_a_weight_that_a_nested_fusion_views():
    """libtpu wraps a product's weight into a fusion that only changes its dimensions: it is read
    all the same."""
    program = Program(NESTED)
    assert InstructionCosts(program).bytes(program.named["product"]) == 2 * (8 * 64 + 64 * 32 + 256)


def test_cycles(costs):
    """Its own, or its parts' where it has none."""
    assert (
        costs.cycles(costs.program.named["part"]) == 50
        and costs.cycles(costs.program.named["new"]) == 0
    )
    inner = PROGRAM.replace(
        "%zero.1, %zero.1)", '%zero.1, %zero.1), backend_config={"estimated_cycles":"9"}'
    )
    with_parts = InstructionCosts(Program(inner))
    assert with_parts.cycles(with_parts.program.named["new"]) == 9
