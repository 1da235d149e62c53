"""The reader of compiled programs, on text whose meaning is known."""

import pytest
from support.products_text import PROGRAM as PRODUCTS
from support.ticks_text import groups_over, is_fill, loop, moves

from jaxtrain.planner.programs.program import Program

PROGRAM = """HloModule jit_f, is_scheduled=true

%update (param_0: f32[8,4], param_1: f32[1,4], param_2: s32[]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %param_1 = f32[1,4]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dynamic-update-slice.1 = f32[8,4]{1,0} \
dynamic-update-slice(%param_0, %param_1, %param_2, %zero)
}

%op (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  %number = s32[] get-tuple-element(%arg), index=0
  %array = f32[8,4]{1,0} get-tuple-element(%arg), index=1
  %moved = f32[8,4]{1,0} collective-permute(%array), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %tuple.1 = (s32[], f32[8,4]{1,0}) tuple(%number, %moved)
}

%body (arg.2: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg.2 = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg.2), index=0
  %stash = f32[8,4]{1,0} get-tuple-element(%arg.2), index=1
  %row = f32[1,4]{1,0} all-reduce(%stash), replica_groups={{0,2},{1,3}}, to_apply=%add
  %updated = f32[8,4]{1,0} fusion(%stash, %row, %i), kind=kLoop, calls=%update
  %copy.3 = f32[8,4]{1,0} copy(%updated), metadata={op_name="a[2]/while(x)"}
  %both = (f32[8,4]{1,0}, /*index=1*/bf16[2,2,2]{2,1,0}) fusion(%copy.3), kind=kLoop, calls=%two
  %inner = (s32[], f32[8,4]{1,0}) tuple(%i, %copy.3)
  ROOT %while.1 = (s32[], f32[8,4]{1,0}) while(%inner), condition=%wanted, body=%op
}

%two (p: f32[8,4]) -> (f32[8,4], bf16[2,2,2]) {
  %p = f32[8,4]{1,0} parameter(0)
  %half = bf16[2,2,2]{2,1,0} custom-call(%p), custom_call_target="half"
  ROOT %t = (f32[8,4]{1,0}, bf16[2,2,2]{2,1,0}) tuple(%p, %half)
}

ENTRY %main (a: f32[8,4]) -> (s32[], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  %start = s32[] constant(0)
  %tuple.9 = (s32[], f32[8,4]{1,0}) tuple(%start, %a)
  ROOT %while.2 = (s32[], f32[8,4]{1,0}) while(%tuple.9), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_what_a_trip_moves():
    program = Program(PROGRAM)
    body = loop(program, 5).calls["body"]
    # The update in place counts the row alone; the copy, and the fusion that returns its parameter,
    # count whole.
    assert moves(program, body) == {
        ("all-reduce", 4): 1,
        ("fusion", 4): 1,
        ("copy", 32): 1,
        ("fusion", 32): 1,
        ("fusion", 8): 1,
    }


def test_what_is_below():
    program = Program(PROGRAM)
    assert [
        i.name for i in program.below(program.entry) if i.collective == "collective-permute"
    ] == ["moved"]
    assert [i.name for i in program.inline("body") if i.collective] == ["row"]
    assert is_fill(program, "start") and not is_fill(program, "updated")


def test_no_loop_of_that_many_trips():
    with pytest.raises(ValueError, match=r"0 loops of 4 trips .*\('while.2', 5\)"):
        loop(Program(PROGRAM), 4)
    with pytest.raises(ValueError, match="no entry"):
        Program("HloModule nothing")


@pytest.mark.parametrize(
    "text",
    [
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add",
        "replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add",
        "replica_groups=mesh['data'=2,'stage'=2,'model'=2] {'data'}, to_apply=%add",
        "replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_0'}, "
        "to_apply=%add",
        "replica_groups=mesh['data'=8,'model'=1] {'data':(1)2}, to_apply=%add",
        "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b':(1)2}, to_apply=%add",
        "replica_groups=mesh['a'=8], device_ids=([2,2,2]T(0,2,1)) {'a':(1)2}, to_apply=%add",
        "replica_groups=mesh['a'=8], device_ids=([2,2,2]T(2,0,1)) {'a':(2)2}, to_apply=%add",
    ],
)
def test_groups(text):
    line = (
        f"ENTRY %e (a: f32[4]) -> f32[4] {{\n  ROOT %r = f32[4]{{0}} all-reduce(%a), "
        f"channel_id=1, {text}\n}}\n"
    )
    (instruction,) = Program(line).computations["e"]
    assert (
        instruction.groups(8)
        == {frozenset(pair) for pair in ((0, 4), (1, 5), (2, 6), (3, 7))}
        == groups_over((2, 2, 2), (0,))
    )


def test_all_devices_and_unknown_groups():
    line = (
        "ENTRY %e (a: f32[4]) -> f32[4] {{\n  ROOT %r = f32[4]{{0}} all-reduce(%a), {}, "
        "to_apply=%add\n}}\n"
    )
    assert Program(line.format("replica_groups={}")).computations["e"][0].groups(4) == {
        frozenset(range(4))
    }
    with pytest.raises(ValueError, match="unknown replica groups"):
        Program(line.format("replica_groups=something")).computations["e"][0].groups(4)


def test_trips_by_a_condition():
    """From 2 to 7; of a counter that begins with an argument nothing is known."""
    program = Program(PRODUCTS)
    assert program.trip_count(program.named["loop"]) == 5
    assert program.trip_count(program.named["loop.1"]) is None


UNROLLED = """
%lt (state: (bf16[8,4], u32[])) -> pred[] {
  %state = (bf16[8,4]{1,0}, u32[]{:T(128)}) parameter(0)
  %count = u32[]{:T(128)} get-tuple-element(%state), index=1
  %limit = u32[]{:T(128)} constant(LIMIT)
  ROOT %less = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

%plus (x: u32[], n: u32[]) -> u32[] {
  %x = u32[]{:T(128)} parameter(0)
  %n = u32[]{:T(128)} parameter(1)
  ROOT %sum = u32[]{:T(128)} add(%x, %n)
}

%body (state.1: (bf16[8,4], u32[])) -> (bf16[8,4], u32[]) {
  %state.1 = (bf16[8,4]{1,0}, u32[]{:T(128)}) parameter(0)
  %shard = bf16[8,4]{1,0} get-tuple-element(%state.1), index=0
  %i = u32[]{:T(128)} get-tuple-element(%state.1), index=1
  %two = u32[]{:T(128)} constant(2)
  %sum.1 = u32[]{:T(128)} STEP
  %i.next = u32[]{:T(128)} copy(%sum.1)
  ROOT %next = (bf16[8,4]{1,0}, u32[]{:T(128)}) tuple(%shard, %i.next)
}

ENTRY %main (a: bf16[8,4]) -> (bf16[8,4], u32[]) {
  %a = bf16[8,4]{1,0} parameter(0)
  %begin = u32[]{:T(128)} constant(0)
  %start = (bf16[8,4]{1,0}, u32[]{:T(128)}) tuple(%a, %begin)
  ROOT %loop = (bf16[8,4]{1,0}, u32[]{:T(128)}) while(%start), condition=%lt, body=%body
}
"""


@pytest.mark.parametrize(
    ("step", "limit", "trips"),
    [
        ("add(%i, %two)", 8, 4),
        ("add(%two, %i)", 7, 4),
        ("fusion(%i, %two), kind=kLoop, calls=%plus", 8, 4),
        ("multiply(%i, %two)", 8, None),
        ("add(%i, %i)", 8, None),
    ],
)
def test_a_loop_unrolled_by_two(step, limit, trips):
    """XLA unrolls a windowed einsum's loop: its counter goes up by two, so the condition's constant
    is not the number of trips."""
    program = Program(UNROLLED.replace("STEP", step).replace("LIMIT", str(limit)))
    assert program.trip_count(program.named["loop"]) == trips


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
        text = PRODUCTS.replace("\nENTRY", FLAG + "\nENTRY").replace(
            "condition=%less", f"condition=%{condition}", 1
        )
        program = Program(text)
        waits[condition] = program.waits_for_a_flag(program.named["loop"])
    assert waits == {"go": True, "more": False, "less": False}


def test_what_multiplies():
    """Products, also fused ones and a library's; no cuts, copies or loops around them."""
    program = Program(PRODUCTS)
    instructions = [i for body in program.computations.values() for i in body]
    multiplying = {i.name for i in instructions if program.multiplies(i)}
    assert multiplying == {"conv", "result", "dot", "gemm"}
    assert not any(i.is_kernel for i in instructions)
