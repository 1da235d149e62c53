"""The step as XLA compiles it for a TPU v5p slice and for H100s, without either: the permutes run
beside the ops, and nothing else is in their way. What compiles is for --full, and skipped where the
compilers are not installed."""

import collections
import json
import re
import subprocess
import sys

import pytest
from support import ROOT, ahead
from support.compilers import KINDS, compiled_for

from jaxtrain.planner.layer.links import RAGGED
from jaxtrain.planner.programs.compiled_collectives import collectives
from jaxtrain.planner.programs.program import Instruction, Program

SCHEDULES = {"interleaved": 2, "zb_h1": 1}  # with repeats

# A tick that is as it should be, and what breaks it. A payload has 64 elements, the smallest matrix
# 256.
TICK = """HloModule jit_step, is_scheduled=true

%F0 (p.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %x.1 = f32[8,8]{1,0} get-tuple-element(%p.1), index=1
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %gathered = f32[16,8]{1,0} all-gather(%x.1), dimensions={0}, \
metadata={op_name="step/while/body/while/body/while/body/F0/gather"}
  ROOT %t.1 = (s32[], f32[8,8]{1,0}) tuple(%i.1, %x.1)
}

%ops (p.2: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p.2 = (s32[], f32[8,8]{1,0}) parameter(0)
  %x.2 = f32[8,8]{1,0} get-tuple-element(%p.2), index=1
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %small = f32[8,8]{1,0} copy(%x.2)
  %t.2 = (s32[], f32[8,8]{1,0}) tuple(%i.2, %small)
  ROOT %while.2 = (s32[], f32[8,8]{1,0}) while(%t.2), condition=%wanted, body=%F0, \
metadata={op_name="step/while/body/while/body/while"}
}

%take (p.3: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  ROOT %p.3 = (s32[], f32[8,8]{1,0}) parameter(0), \
metadata={op_name="step/while/body/while/body/take_x"}
}

%tick (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]{1,0}) parameter(0)
  %while.3 = (s32[], f32[8,8]{1,0}) while(%p), condition=%wanted, body=%take, \
metadata={op_name="step/while/body/while"}
  %x = f32[8,8]{1,0} get-tuple-element(%while.3), index=1
  %up = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,0}}
  %down = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,0}}
  %while.1 = (s32[], f32[8,8]{1,0}) while(%while.3), condition=%wanted, body=%ops, \
metadata={op_name="step/while/body/while"}
  %up.done = f32[8,8]{1,0} collective-permute-done(%up)
  %down.done = f32[8,8]{1,0} collective-permute-done(%down)
  %i = s32[] get-tuple-element(%while.1), index=0
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%i, %up.done)
}

ENTRY %main (a: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %a = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %while = (s32[], f32[8,8]{1,0}) while(%a), condition=%less, body=%tick, \
metadata={op_name="step/while"}
}
"""


def tick(text: str = TICK) -> ahead.CompiledTick:
    return ahead.CompiledTick(text, payload=64, smallest_matrix=256)


def moved(line: str, before: str) -> str:
    """TICK with the line that begins with a name in front of that of another."""
    lines = TICK.splitlines()
    at = lambda name: next(
        n for n, text in enumerate(lines) if text.strip().startswith(f"%{name} =")
    )
    text = lines.pop(at(line))
    lines.insert(at(before), text)
    return "\n".join(lines)


def test_a_right_tick():
    assert ahead.faults(tick()) == {}
    assert [i.name for i in tick().ops] == ["while.2"] and tick().holders == {"while.1"}


BLOCKING = re.sub(
    r"%up = .* collective-permute-start\((.*)\), source",
    r"%up = f32[8,8] collective-permute(\1), source",
    TICK,
)
PERMUTE = "%small = f32[8,8] collective-permute(%x.2), source_target_pairs={{0,1}}\n"


@pytest.mark.parametrize(
    "text, check",
    [
        (
            BLOCKING.replace("  %up.done = f32[8,8]{1,0} collective-permute-done(%up)\n", ""),
            "blocking_permutes",
        ),
        (
            TICK.replace("{{0,1},{1,0}}", '{{0,1},{1,0}}, backend_config={"is_sync":true}'),
            "blocking_permutes",
        ),
        (moved("while.1", before="down"), "late_permutes"),
        (moved("down.done", before="while.1"), "late_permutes"),
        (TICK.replace("%small = f32[8,8]{1,0} copy(%x.2)", PERMUTE), "permutes_in_ops"),
        (TICK.replace("%gathered = f32[16,8]", "%gathered = f32[32,8]"), "wide_collectives"),
        (TICK.replace("%x = ", "%large = f32[9,8]{1,0} copy(%while.3)\n  %x = "), "large_moves"),
        # in the loop around the ops
        (TICK.replace("%small = f32[8,8]{1,0}", "%small = f32[9,8]{1,0}"), "large_moves"),
        (
            TICK.replace("%x = ", "%c = f32[8,8]{1,0} copy(%while.3)\n  " * 8 + "%x = "),
            "large_moves",
        ),
    ],
)
def test_each_check_can_fail(text, check):
    assert text != TICK and list(ahead.faults(tick(text))) == [check]


def test_a_large_move_in_an_op_is_none():
    assert (
        ahead.faults(
            tick(
                TICK.replace(
                    "%gathered = f32[16,8]{1,0} all-gather(", "%gathered = f32[99,8]{1,0} copy("
                )
            )
        )
        == {}
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@compiled_for(*KINDS)
def test_permutes_run_beside_the_ops(platform, schedule):
    c = ahead.compile_step(
        platform, {"pipeline.schedule": schedule, "pipeline.repeats": SCHEDULES[schedule]}
    )
    # forward, backward, the last chunk or the head, and both ends of the embedding
    assert len(c.ops) >= 5
    assert ahead.faults(c) == {}


RING = {
    "mesh.data": 1,
    "mesh.stage": 2,
    "mesh.context": 4,
    "parallel.context": "ring",
    "model.layers": 4,
    "model.vocab_size": 4096,
    "data.sequence_length": 8192,
    "data.batch_size": 4,
    "pipeline.microbatches": 4,
}


@compiled_for("h100")
def test_keys_go_round_beside_attention(platform):
    """All messages are asynchronous, and all but the last gradients have attention's loop or other
    products beside them. No permute is in an op."""
    c = ahead.compile_step(platform, RING)
    assert not ahead.permutes_in_ops(c) and not ahead.late_permutes(c)
    beside = ahead.covered(c, "ragged-all-to-all")
    assert beside
    for op, covered in beside.items():
        assert covered.count(False) <= (op[0] == "B"), beside


EXPERTS = {
    **{
        "model.experts": 16,
        "model.experts_per_token": 4,
        "model.expert_width": 2048,
        "model.shared_experts": 1,
        "model.expert_room": 2.0,
    },
    **{
        "mesh.data": 1,
        "mesh.expert": 4,
        "mesh.stage": 2,
        "data.batch_size": 32,
        "model.layers": 4,
        "model.vocab_size": 4096,
    },
}


@compiled_for("h100")
def test_products_of_shared_experts_stand_beside_both_ways_of_the_rows(platform):
    """What goes to the experts and what comes back, rows and gradients. R and K may have copies of
    residuals beside the way back."""
    c = ahead.compile_step(platform, EXPERTS)
    beside = ahead.products_beside(c, "ragged-all-to-all")
    assert len(beside) == 8  # F, R, K and B
    assert sum(not products for products in beside.values()) <= 2


@compiled_for("h100")
def test_elementwise_work_is_on_the_rows_that_are_there(platform):
    """A device has memory for twice the mean of 4,096 rows. What makes an array of all of them, as
    wide as an expert, writes a part in place, or moves residuals to or from the loop over
    layers."""
    c = ahead.compile_step(platform, EXPERTS)
    tokens = ahead.MODEL["data.sequence_length"] * EXPERTS["model.experts_per_token"]
    array = 2 * tokens, EXPERTS["model.expert_width"] // 2  # over model
    whole = [
        i
        for i in c.program.below(c.tick)
        if i.opcode in ("fusion", "copy") and array in {shape[-2:] for shape in i.shapes}
    ]
    assert whole
    assert not [i.text for i in whole if not re.search(r"/dynamic_(update_)?slice$", i.op_name)]


@compiled_for("h100")
def test_a_token_crosses_nodes_once(platform):
    """Of 4 choices in 2 nodes 2 rows cross, there and back; inside a node go as many as there is
    room for."""
    c = ahead.compile_step(platform, EXPERTS | {"parallel.expert_nodes": 2})
    mesh = {"stage": 2, "expert": 4, "model": 2}
    found = collections.defaultdict(set)
    for i in c.program.below(c.program.entry):
        for message in collectives(c.program, i, mesh):
            if message.kind == RAGGED and message.dtype == "bf16":
                span = max(max(group) - min(group) for group in i.groups(ahead.DEVICES))
                found[message.devices, span].add(message.size)
    token, tokens = 2 * ahead.MODEL["model.width"], ahead.MODEL["data.sequence_length"]
    across, inside = (2, 2 * mesh["model"]), (2, mesh["model"])
    assert found == {across: {2 * tokens * token}, inside: {2 * 4 * tokens * token}}


@compiled_for("h100")
def test_without_its_options_xla_permutes_after_the_ops(platform):
    usual = {"xla_gpu_experimental_parallel_collective_overlap_limit": 1}
    c = ahead.compile_step(
        platform,
        {"pipeline.schedule": "interleaved", "pipeline.repeats": 2, "model.layers": 8},
        options=usual,
    )
    assert "late_permutes" in ahead.faults(c)


HOST = 5  # XLA's number of the host's memory
FEW = {"model.layers": 8, "model.vocab_size": 4096, "pipeline.permute": "late"}


@pytest.mark.parametrize("remat", ["none", "full"])
@compiled_for(*KINDS)
def test_slots_on_the_host_leave_the_device(platform, remat):
    """The host has the slots; the device as much less, but for what is on its way: of 8 layers in 4
    slots, one or two; of their inputs one that comes and one that goes. No entire pool comes to the
    device in a tick."""
    here, there = (
        ahead.compile_step(platform, {**FEW, "pipeline.remat": remat, "parallel.offload": o})
        for o in ("none", "activations")
    )
    assert here.memory["host_temp"] == 0 == here.on_host
    assert there.on_host <= there.memory["host_temp"] < 1.1 * there.on_host
    on_its_way = 0.3 * there.on_host if remat == "none" else 2.1 * 2 * there.payload
    moved = [i for i in there.program.below(there.tick) if i.opcode in ("copy", "copy-start")]
    assert not [i for i in moved if HOST in i.spaces]
    stays = there.on_host - (here.memory["temp"] - there.memory["temp"])
    if (platform, remat) == ("v5p", "none") and stays >= on_its_way:
        # B's loop over two layers is laid out whole: both layers, and two matrices of attention
        # that B copies, twice
        assert stays < there.on_host / 4 + 2 * 2 * there.smallest_matrix
        pytest.xfail("libtpu fetches a layer beside the other's work: 30.03 % are on their way")
    assert stays < on_its_way


# The least part of the bytes that go to the host with products beside them.
BESIDE = {"h100": 0.6, "v5p": 0.0}


@compiled_for(*KINDS)
def test_named_values_go_to_the_host_and_back_in_asynchronous_copies(platform):
    """What is not named stays. What B fetches first has nothing beside it."""
    names = {"pipeline.remat": "selective", "pipeline.save": ("layer_input", "qkv:host", "mlp_in")}
    c = ahead.compile_step(platform, FEW | names)
    assert 0 < c.on_host <= c.memory["host_temp"] < 1.1 * c.on_host
    assert c.on_host < c.kinds["slots"]
    moved = [i for i in c.program.below(c.tick) if i.opcode in ("copy", "dynamic-slice")]
    assert not [i for i in moved if HOST in i.spaces]
    to_host, back = ahead.host_copies(c)
    beside, size = map(sum, zip(*to_host, strict=True))
    assert back and size and beside >= BESIDE[platform] * size


# of GPUs that are not there jax knows no memory, so arguments cannot be said to lie in the host's
@compiled_for("v5p")
def test_moments_on_the_host_leave_the_device_and_do_not_come_back_at_once(platform):
    """Of 4-byte parameters, two moments of 4 bytes each, shared out over data 2; temporary memory
    stays what it was."""
    small = {**FEW, "model.layers": 4, "data.sequence_length": 128}
    here, there = (
        ahead.compile_step(platform, {**small, "parallel.offload": o}, program="train")
        for o in ("none", "optimizer")
    )
    moments = there.memory["host_argument"]
    assert here.memory["argument"] - there.memory["argument"] == moments
    assert abs(moments - here.memory["argument"] / 2) < 0.03 * moments
    assert there.memory["temp"] < here.memory["temp"] + 0.1 * moments


OVERLAPPED = {
    "none": {"pipeline.remat": "none", "model.shared_experts": 0},
    "full": {"pipeline.remat": "full"},
    "selective": {"pipeline.remat": "selective"},
    "zero": {"pipeline.remat": "selective", "parallel.zero": 3},
    "two steps": {"pipeline.remat": "selective", "parallel.expert_nodes": 2},
}


@compiled_for("h100")
@pytest.mark.parametrize("case", OVERLAPPED)
def test_messages_of_one_microbatch_go_beside_products_of_the_other(platform, case):
    """In an overlapped cell all messages of rows, of two steps one of eight may have none; by
    themselves F and B have some without."""
    changes = {
        **EXPERTS,
        "mesh.data": 2,
        "mesh.model": 1,
        "data.batch_size": 64,
        "model.layers": 8,
        "pipeline.schedule": "dualpipe_v",
        "pipeline.repeats": 2,
        "pipeline.permute": "auto",
        "pipeline.overlap": True,
    }
    compiled = ahead.compile_step(platform, changes | OVERLAPPED[case])
    by_op = ahead.covered(compiled, "ragged-all-to-all")
    overlapped = {name: each for name, each in by_op.items() if "B" in name[1:]}
    alone = [each for name, each in by_op.items() if name[0] == "B"]
    assert len(overlapped) >= 2 and alone
    messages, without = (8, 1) if case == "two steps" else (4, 0)
    for each in overlapped.values():
        assert len(each) == messages and each.count(False) <= without, by_op
    assert not any(map(all, alone)), by_op


@compiled_for("h100")
def test_a_long_sequence_fits(platform, tmp_path):
    """131,072 tokens of Llama 3 8B over a context of 8 on 64 H100s, by every way to attend."""
    script = ROOT / "benchmarks" / "long_context.py"
    subprocess.run(
        [sys.executable, script, "--lengths=131072", f"--json={tmp_path / 'memory.json'}"],
        check=True,
        timeout=1200,
    )
    found = json.loads((tmp_path / "memory.json").read_text())
    assert [row["mode"] for row in found] == ["all_gather", "ulysses", "ring"]
    assert max(row["total"] for row in found) < 80e9
    # parameters and both moments are counted
    assert min(row["arguments"] for row in found) > 12 * 8.03e9 / 8


FP8 = {
    "dense": {"pipeline.schedule": "zb_h1", "pipeline.remat": "none"},
    "experts": {
        "pipeline.schedule": "1f1b",
        "data.batch_size": 32,
        "model.experts": 8,
        "model.expert_width": 4096,
        "mesh.expert": 2,
        "mesh.model": 1,
        "parallel.zero": 3,
    },
}


def sources(program: Program, name: str) -> list[Instruction]:
    """The values in memory that an operand is made from: what only renames or moves it, back to
    what the fusion before them reads; or to a loop's carry, a collective or another call."""
    i = program.named[name]
    if i.opcode == "get-tuple-element" and program.operands(i)[0].opcode == "fusion":
        return [i, *program.operands(program.operands(i)[0])]
    if i.opcode == "fusion":
        return [i, *program.operands(i)]
    if i.opcode in ("bitcast", "copy", "transpose", "reshape"):
        return [i, *sources(program, i.operands[0])]
    return [i]


@pytest.mark.parametrize("case", FP8)
@compiled_for("h100")
def test_products_in_fp8(platform, case):
    """Every product of layers in every op is cuBLASLt's in FP8, but the router's; none is left to
    XLA, none reads an operand of 32 bits, and what ZeRO-3 gathers has 8 bits."""
    c = ahead.compile_step(platform, {"model.layers": 8, "precision.matmul": "fp8"} | FP8[case])
    products: dict[str, list] = {}
    for i in c.program.below(c.tick):
        assert i.opcode != "dot"
        op = re.search(r"/([FKRBW])\d/", i.op_name)
        if op and i.target.startswith("__cublas"):
            products.setdefault(op[1], []).append(i)
    assert products.keys() >= set("KBW")
    router = 2 if case == "experts" else 0  # of a layer, in 32 bits
    for op, found in products.items():
        of_fp8 = [i for i in found if i.target == "__cublas$lt$matmul$f8"]
        assert len(of_fp8) >= 4, op
        assert len(found) - len(of_fp8) == router, op
        for product in of_fp8:
            for operand in product.operands[:2]:
                size = c.program.named[operand].sizes[0]
                made_from = sources(c.program, operand)
                of_8_bits = {t for i in made_from for t in i.types} & {"u8", "f8e4m3fn", "f8e5m2"}
                wide = [
                    i.text
                    for i in made_from
                    for t, n in zip(i.types, i.sizes, strict=True)
                    if t in ("f32", "f64") and n >= size
                ]
                assert of_8_bits and not wide, (op, wide)
    if case == "dense":
        assert ahead.faults(c) == {}
        return
    matrices = {
        dtype
        for i in c.program.below(c.tick)
        if i.collective == "all-gather" and re.search(r"/[FKRBW]\d/.*gather", i.op_name)
        for size, dtype in zip(i.sizes, i.types, strict=True)
        if size >= c.smallest_matrix
    }
    assert matrices == {"u8"}


@pytest.mark.parametrize("masters", ["float32", "none"])
@compiled_for("h100", "v5p")
def test_an_update_gathers_numbers_of_16_bits(platform, masters):
    """Each matrix of a device's shards is gathered in the type that ops read."""
    c = ahead.compile_step(
        platform,
        {
            "model.layers": 4,
            "model.width": 1024,
            "model.heads": 8,
            "model.vocab_size": 16384,
            "mesh.data": 16,
            "mesh.stage": 1,
            "mesh.model": 1,
            "data.batch_size": 32,
            "pipeline.microbatches": 2,
            "pipeline.permute": "late",
            "precision.params": "bfloat16",
            "precision.masters": masters,
        },
        program="train",
    )
    gathered = {
        dtype
        for i in c.program.below(c.program.entry)
        if i.collective == "all-gather"
        for size, dtype in zip(i.sizes, i.types, strict=True)
        if size >= c.smallest_matrix / 16
    }
    assert gathered == {"bf16"}


ON_DATA = {
    "model.layers": 4,
    "model.width": 1024,
    "model.heads": 8,
    "model.vocab_size": 8192,
    "mesh.data": ahead.DEVICES,
    "mesh.stage": 1,
    "mesh.model": 1,
    "pipeline.microbatches": 1,
    "pipeline.permute": "late",
}


@compiled_for("v5p")
def test_gradients_over_a_whole_slice_are_scattered_in_two_steps(platform):
    """No sum of a layer's matrix over all chips, of which each would take a slice."""
    c = ahead.compile_step(platform, {**ON_DATA, "parallel.zero": 3})
    matrices = collections.Counter(
        i.collective
        for i in c.program.below(c.program.entry)
        if i.collective in ("all-reduce", "reduce-scatter") and "B0" in i.op_name
        for size in i.sizes
        if size >= c.smallest_matrix / ahead.DEVICES
    )
    assert matrices["reduce-scatter"] and not matrices["all-reduce"]


@compiled_for("h100")
def test_a_microbatch_s_gradients_are_reduced_beside_products(platform):
    """ZeRO-1 with one microbatch on one stage: in the loop over layers the gradients of the layer
    before are on their way while products run."""
    c = ahead.compile_step(platform, {**ON_DATA, "model.layers": 8, "parallel.zero": 1})
    (loop,) = {
        i.computation
        for i in c.program.below(c.program.entry)
        if i.collective == "reduce-scatter" and "/B0/while/" in i.op_name
    }
    body = list(c.program.computations[loop])
    for number, i in enumerate(body):
        if i.collective == "reduce-scatter" and max(i.sizes) >= c.smallest_matrix / ahead.DEVICES:
            done = next(n for n, j in enumerate(body) if n > number and i.name in j.operands)
            assert any(map(c.multiplies, body[number:done])), i.name


@compiled_for("h100")
def test_gradients_of_the_last_microbatch_are_reduced_beside_its_w(platform):
    """`parallel.reduce=last`: in the loop over a unit's layers, the layer before's beside products;
    and no sum is transposed in a tick."""
    few = {"model.layers": 24, "mesh.data": 4, "mesh.model": 1, "pipeline.schedule": "interleaved"}
    c = ahead.compile_step(
        platform, {**few, "parallel.reduce": "last", "data.batch_size": 32, "model.width": 1024}
    )
    scattered = [
        i
        for i in c.program.below(c.tick)
        if i.collective == "reduce-scatter" and "/last_weights/while/" in i.op_name
    ]
    assert scattered
    for i in scattered:
        body = list(c.program.computations[i.computation])
        begin = body.index(i)
        done = next(n for n, j in enumerate(body) if n > begin and i.name in j.operands)
        assert any(map(c.multiplies, body[begin:done])), i.name
    assert not [
        i.name
        for i in c.program.inline(c.tick)
        if i.opcode in ("copy", "transpose") and max(i.sizes) >= 2 * c.smallest_matrix
    ]


@compiled_for("h100")
def test_no_stage_waits_for_all_between_two_steps_of_a_program(platform):
    """A stage's update is an op of the tick, and its collectives stay on the stage. Between the
    steps all stages have two ops together: the update of embedding and head, and the check, one sum
    of a few numbers."""
    stages = 4
    c = ahead.compile_step(
        platform,
        {
            "model.layers": 8,
            "model.width": 1024,
            "model.heads": 8,
            "model.vocab_size": 8192,
            "mesh.data": ahead.DEVICES // stages,
            "mesh.stage": stages,
            "mesh.model": 1,
            "data.sequence_length": 512,
            "pipeline.schedule": "zb_h2",
            "pipeline.repeats": 1,
            "pipeline.microbatches": 4,
            "pipeline.permute": "auto",
            "pipeline.steps_per_program": 2,
            "train.on_nonfinite": "skip",
        },
        program="train",
    )
    program = c.program
    table = ahead.loop_around(program, "check_step")
    of_ops = collections.defaultdict(list)
    for i in program.below(table.calls["body"]):
        if i.collective:
            of_ops[ahead.scope(program, i)].append(i)
    stages_of = lambda i: {len({n % stages for n in group}) for group in i.groups(ahead.DEVICES)}
    assert set(of_ops) == {
        *("embed", "head", "embed_gradient", "permute_LATE"),
        *("update_layers", "update_ends", "check_step"),
    }
    kinds = lambda op: {i.collective for i in of_ops[op]}
    assert kinds("update_layers") == {"reduce-scatter", "all-gather"} == kinds("update_ends")
    assert [stages_of(i) for i in of_ops["update_layers"]] == [{1}] * len(of_ops["update_layers"])
    assert kinds("check_step") == {"all-reduce"}
    assert sum(i.bytes for i in of_ops["check_step"]) <= 16
    assert {frozenset(stages_of(i)) for i in of_ops["check_step"]} <= {
        frozenset({stages}),
        frozenset({1}),
    }
    # the table has both steps, and behind it nothing is reduced that a stage has for itself
    (around,) = [
        i
        for i in program.inline(program.entry)
        if i.opcode == "while" and table.name in {j.name for j in program.below(i.calls["body"])}
    ]
    beside = [i for i in program.inline(around.calls["body"]) if i.collective]
    assert not [i for i in beside if i.collective == "reduce-scatter"]
