"""Seconds for which a step waits for its collectives, on a small text whose seconds are known."""

import pytest
from waits import Message, Waits

from jaxtrain.planner.programs.loops import StepLoops
from jaxtrain.planner.programs.program import Program

TEXT = """
%more (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]{0}) parameter(0)
  ROOT %is = pred[] custom-call(%s), custom_call_target="unknown"
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %up = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %down = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{1,0}}
  %again = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %y = f32[8]{0} multiply(%x, %x)
  %up.done = f32[8]{0} collective-permute-done(%up)
  %down.done = f32[8]{0} collective-permute-done(%down)
  %z = f32[8]{0} multiply(%y, %up.done)
  %again.done = f32[8]{0} collective-permute-done(%again)
  ROOT %next = (s32[], f32[8]{0}) tuple(%x, %z)
}

ENTRY %main (a: (s32[], f32[8])) -> f32[8] {
  %a = (s32[], f32[8]{0}) parameter(0)
  %b = f32[8]{0} get-tuple-element(%a), index=1
  %early = (f32[8]{0}, f32[8]{0}) all-gather-start(%b), replica_groups={{0,1}}, dimensions={0}
  %loop = (s32[], f32[8]{0}) while(%a), condition=%more, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %gathered = f32[8]{0} all-gather-done(%early)
  %sum = f32[8]{0} all-reduce(%gathered), replica_groups={{0,1}}, to_apply=%add
  %fused = f32[8]{0} fusion(%sum), kind=kLoop, calls=%more
  %sync = (f32[8]{0}, f32[8]{0}) all-gather-start(%b), backend_config={"is_sync":true}
  %lost = (f32[8]{0}, f32[8]{0}) all-gather-start(%b), replica_groups={{0,1}}, dimensions={0}
  ROOT %out = f32[8]{0} multiply(%fused, %fused)
}
"""
SECONDS = {"y": 2.0, "z": 1.0, "fused": 3.0, "out": 9.0}
TAKES = {"up": 5.0, "down": 4.0, "again": 5.0, "early": 30.0, "sum": 7.0, "fused": 4.0}
TAKES |= {"sync": 1.0, "lost": 6.0}
LINKS = {"up": "→", "down": "←", "again": "→"}


def test_waits():
    program = Program(TEXT)
    loops = StepLoops(program, 0, {}, 0)
    message = lambda i: (
        Message(TAKES[i.name], LINKS.get(i.name, "ring")) if i.name in TAKES else None
    )
    found = Waits(loops, lambda i: SECONDS.get(i.name, 0.0), message).once
    # A trip: 2 computed, 3 waited for the one up; that down has ended. The second one up begins
    # when the first has ended, and ends at 10.
    assert found["up"] == 3 and found["down"] == 0 and found["again"] == 10 - 6
    # Three trips of 10 seconds: the gather beside the loop has ended.
    assert found["early"] == 0 and found["sum"] == 7 and found["fused"] == 1
    assert found["sync"] == 1 and found["lost"] == pytest.approx(6)


SHARED = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %under.way = (f32[8]{0}, f32[8]{0}) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}
  %y = f32[8]{0} multiply(%a, %a)
  %sum = f32[8]{0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%add
  %gathered = f32[8]{0} all-gather-done(%under.way)
  ROOT %out = f32[8]{0} multiply(%gathered, %y)
}
"""


@pytest.mark.parametrize(("takes", "waited"), [(6.0, 4.0), (2.0, 0.0)])
def test_a_synchronous_collective_delays_what_is_under_way_on_its_links(takes, waited):
    loops = StepLoops(Program(SHARED), 0, {}, 0)
    takes = {"under.way": takes, "sum": 5.0}
    message = lambda i: Message(takes[i.name], "ring") if i.name in takes else None
    found = Waits(loops, lambda i: 2.0 * (i.name == "y"), message).once
    assert found == {"under.way": waited, "sum": 5.0}
