"""Collectives of a compiled step, on texts whose numbers are known."""

import pytest
from support.step_text import CONFIG, STEP, TICKS

from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.layer.links import sent as sent_bytes
from jaxtrain.planner.programs.compile_check import step_loops
from jaxtrain.planner.programs.compiled_collectives import FEW, collectives, step_collectives
from jaxtrain.planner.programs.loops import StepLoops
from jaxtrain.planner.programs.program import Program

MESH = {"replica": 1, "data": 1, "stage": 2, "context": 1, "expert": 1, "model": 1}
SIZE = 4 * 64 * 16 * 512  # bytes of the array that the step permutes


def test_permutes_and_what_overlaps_with_them():
    """One is done before the ops begin; the other one waits for the ops of its tick."""
    loops = step_loops(Program(STEP), make_setup(CONFIG))
    early, late = step_collectives(loops, MESH, lambda i: float(i.opcode == "dot"))
    assert {(run.times, c.kind, c.axes) for c, run, _ in (early, late)} == {
        (TICKS, "collective-permute", ("stage",))
    }
    assert early[0].size == early[0].sending == SIZE and early[-1] == 0
    assert late[-1] == pytest.approx(loops.op_runs["K0"] / TICKS)  # one dot in each forward


ALONE = """HloModule jit_f

%all-reduce-scatter.1 (p: f32[8,64]) -> f32[4,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %sum = f32[8,64]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  ROOT %part = f32[4,64]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={4,64}
}

ENTRY %main (a: f32[8,64], n: f32[32]) -> f32[16,64] {
  %a = f32[8,64]{1,0} parameter(0)
  %n = f32[32]{0} parameter(1)
  %scattered = f32[4,64]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
  %norm = f32[32]{0} all-reduce(%n), replica_groups={{0,1}}, to_apply=%add
  %ragged = f32[8,64]{1,0} ragged-all-to-all(%a, %scattered, %n, %n, %n, %n), replica_groups={{0,1}}
  %sent = f32[8,64]{1,0} collective-permute(%a), source_target_pairs={{0,1}}
  ROOT %all = f32[16,64]{1,0} all-gather(%a), replica_groups={{0,1}}, dimensions={0}
}
"""


@pytest.mark.parametrize(
    ("name", "kind", "size", "sent"),
    [
        ("scattered", "reduce-scatter", 2048, 1024),  # a TPU's, fused
        ("ragged", "ragged-all-to-all", 1024, 512),  # the smaller of operand and capacity
        ("sent", "collective-permute", 2048, 2048),
        ("all", "all-gather", 4096, 2048),
    ],
)
def test_sizes(name, kind, size, sent):
    program = Program(ALONE)
    (found,) = collectives(program, program.named[name], MESH)
    assert (found.kind, found.size) == (kind, size)
    assert sent_bytes(kind, found.sending, found.devices) == sent
    assert (found.dtype, found.axes, found.devices) == ("f32", ("stage",), 2)


def test_what_does_not_count():
    """Few bytes; a permute that does not begin on the stage sends none."""
    program = Program(ALONE)
    assert not list(collectives(program, program.named["norm"], MESH)) and FEW >= 4 * 32
    (permute,) = collectives(program, program.named["sent"], MESH, stage=1)
    assert permute.sending == 0 and permute.size == 2048


OFFLOADED = """HloModule jit_f

%scattering (p: f32[8,64]) -> f32[4,64] {
  %p = f32[8,64]{1,0} parameter(0)
  ROOT %part = f32[4,64]{1,0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, \
to_apply=%add
}, execution_thread="sparsecore"

%taking (q: f32[8,64]) -> f32[8,64] {
  %q = f32[8,64]{1,0} parameter(0)
  ROOT %taken = f32[8,64]{1,0} gather(%q)
}, execution_thread="sparsecore"

ENTRY %main (a: f32[8,64]) -> f32[4,64] {
  %a = f32[8,64]{1,0} parameter(0)
  %begin = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", \
to_apply=%scattering
  %ready = token[] after-all()
  %before = f32[64,64]{1,0} dot(%a, %a)
  %under.way = ((f32[8,64]{1,0}), f32[4,64]{1,0}) call-update(%begin, %a)
  %beside = f32[64,64]{1,0} dot(%a, %a)
  %begin.2 = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", \
to_apply=%taking
  %other = ((f32[8,64]{1,0}), f32[8,64]{1,0}) call-update(%begin.2, %a)
  %other.done = f32[8,64]{1,0} call-done(%other)
  ROOT %scattered = f32[4,64]{1,0} call-done(%under.way)
}
"""


# as libtpu 0.0.42.1 writes it
WITHOUT_UPDATE = OFFLOADED.replace(
    "call-update(%begin, %a)", "call-start(%a, %ready), to_apply=%scattering"
)


@pytest.mark.parametrize("text", [OFFLOADED, WITHOUT_UPDATE])
def test_collectives_on_the_sparse_cores(text):
    """One is under way from where its operand is there, and not from where it is made ready."""
    loops = StepLoops(Program(text), 0, {}, 0)
    mesh = dict.fromkeys(MESH, 1) | {"data": 2}
    ((found, run, overlapped),) = step_collectives(loops, mesh, lambda i: float(i.opcode == "dot"))
    assert (found.kind, found.axes, found.dtype) == ("reduce-scatter", ("data",), "f32")
    assert found.size == 4 * 8 * 64 and run.times == overlapped == 1
