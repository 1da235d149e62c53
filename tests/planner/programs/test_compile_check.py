"""The compile check: its report from the text of a small program whose numbers are known, errors
before anything is compiled, and a real compile (--full)."""

import json

import pytest
from support.compilers import KINDS, compiled_for
from support.step_text import CONFIG, STEP, TICKS

from jaxtrain.config.errors import UsageError
from jaxtrain.planner.command import main as plan_command
from jaxtrain.planner.layer import hardware
from jaxtrain.planner.programs import compile_check, topology
from jaxtrain.planner.programs.program import Program
from jaxtrain.planner.programs.report import step_counts
from jaxtrain.planner.programs.topology import INSTALL_COMMAND, parse
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.step_model import step_model_of

MEMORY = {
    "argument": 3 * 10**9,
    "temp": 4 * 10**9,
    "output": 3 * 10**9,
    "alias": 3 * 10**9,
    "host_argument": 0,
    "host_temp": 0,
}
KNOWN = {
    "parameters": 10**9,
    "moments": 2 * 10**9,
    "accumulators": 10**9,
    "slots": 5 * 10**8,
    "outer": 10**8,
    "slots on the host": 7,
}
SIZE = 4 * 64 * 16 * 512  # bytes of the array that the program permutes
H100S = parse("h100:1x2")


def checked() -> compile_check.CompileCheck:
    return compile_check.compile_check(
        CONFIG, H100S, topology.Compiled(STEP, 2.0, 10.0, MEMORY, KNOWN)
    )


def test_memory_by_part():
    """What the program is known to hold stands beside the planner's part of the same; the rest of
    both is one part; nothing is lost."""
    record = checked()
    planned = memory(step_model_of(CONFIG, hardware.load("h100")), CONFIG.model.loss_chunk)
    by_name = {part.name: part for part in record.parts}
    assert by_name["weights"] == compile_check.MemoryPart("weights", 1e9, planned.parts["weights"])
    assert (
        by_name["optimizer"].compiled == 2e9
        and by_name["activations"].compiled == 5e8
        and by_name["outer"].compiled == 1e8
    )
    rest = next(part for name, part in by_name.items() if name.startswith("rest"))
    assert (
        rest.compiled
        == 7e9 - 4.6e9
        == pytest.approx(sum(part.compiled for part in record.parts) - 4.6e9)
    )
    assert (record.total.compiled, record.total.planned) == (7e9, pytest.approx(planned.bytes))
    assert record.error == pytest.approx(planned.bytes / 7e9 - 1) and record.fits


def test_weights_that_are_cast_before_all_loops():
    """A fusion and a convert of parameters, one of them behind a view; what has another size, or
    stands in a loop, is no cast of them."""
    text = """HloModule jit_train

%turn (p.1: f32[8,4]) -> bf16[4,8] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  %c.1 = bf16[8,4]{1,0} convert(%p.1)
  ROOT %t.1 = bf16[4,8]{0,1} transpose(%c.1), dimensions={1,0}
}

%body (p.2: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.2 = (s32[], f32[8,4]{1,0}) parameter(0)
  %w.2 = f32[8,4]{1,0} get-tuple-element(%p.2), index=1
  %inside = bf16[8,4]{1,0} convert(%w.2)
  ROOT %t.2 = (s32[], f32[8,4]{1,0}) tuple(%p.2, %w.2)
}

ENTRY %main (a: f32[8,4], b: f32[2,8]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[2,8]{1,0} parameter(1)
  %flat = f32[16]{0} bitcast(%b)
  %first = bf16[4,8]{0,1} fusion(%a), kind=kLoop, calls=%turn
  %second = bf16[16]{0} convert(%flat)
  %rows = bf16[8]{0} fusion(%a), kind=kLoop, calls=%turn
  %sum = f32[8,4]{1,0} add(%a, %a)
  ROOT %loop = f32[8,4]{1,0} while(%sum), condition=%turn, body=%body, \
backend_config={"known_trip_count":{"n":"2"}}
}
"""
    assert compile_check.cast_bytes(Program(text)) == 2 * (32 + 16)


def test_a_device_that_is_too_small():
    huge = topology.Compiled(STEP, memory=MEMORY | {"temp": 10**12}, kinds=KNOWN)
    assert not compile_check.compile_check(CONFIG, H100S, huge).fits


def test_products_that_xla_repeats_are_told():
    """A dot of its own, and one in a fusion; a copy that is made again is no product."""
    program = """HloModule step, is_scheduled=true

%inside (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %d = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %product = f32[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%inside
  %copy.remat = f32[8,8]{1,0} copy(%x)
  %product.remat = f32[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%inside
  ROOT %r.remat2 = f32[8,8]{1,0} dot(%copy.remat, %product.remat), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}
"""
    compiled = topology.Compiled(program, memory=MEMORY, kinds=KNOWN)
    record = compile_check.compile_check(CONFIG, H100S, compiled)
    assert record.repeated_products == record.as_dict()["memory"]["repeated_products"] == 2
    (line,) = [line for line in record.lines() if "once more" in line]
    assert "computes 2 products" in line


def test_collectives_compiled_and_planned():
    """A device of the stage that sends most sends both ways of its permutes, one of which overlaps
    with the ops."""
    record = checked()
    (permute,) = [c for c in record.collectives if c.kind == "collective-permute"]
    assert (permute.axes, permute.compiled) == ("stage", 2 * TICKS * SIZE)
    # the other is done before the ops begin
    assert permute.asynchronous == 1 and permute.overlapped == pytest.approx(0.5)
    assert sum(c.planned for c in record.collectives) == sum(
        entry.bytes for entry in step_counts(CONFIG).volume(record.stage)
    )
    (missing,) = [c for c in record.collectives if c.kind == "reduce-scatter"]
    assert missing.compiled == 0 < missing.planned


def test_what_is_printed_and_what_json_has():
    record = checked()
    values = json.loads(json.dumps(record.as_dict()))
    assert (
        values["devices"] == 2
        and values["compiling_s"] == 10
        and values["memory"]["compiled"]["total"] == 7 * 10**9
    )
    assert (
        values["memory"]["planned"]["outer"] is None and values["memory"]["parts"]["outer"] == 1e8
    )
    text = "\n".join(record.lines())
    assert "h100:1x2: 2 × NVIDIA H100" in text and "traced in 2 s, compiled in 10 s" in text
    assert "  total" in text and "6.52" in text  # 7e9 bytes in GiB
    assert "collective-permute over stage" in text and "50%" in text and "nan" not in text
    assert "once more" not in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--topology=v5q:4x4x4"], "use --topology=v5p:4x4x4"),
        ([], "--topology='' is none of"),
        (["--topology=v5p:2x2x1", "--config.mesh.data=64"], "mesh"),
        (["--topology=h100:1x8", "--colour"], "--colour is an unknown flag"),
        (["--topology=h100:1x8", "--config=nothing"], "nothing"),
    ],
)
def test_what_is_wrong_is_one_line(flags, says, capsys):
    assert plan_command.main(["--compile", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_mesh_that_does_not_use_the_devices():
    with pytest.raises(
        UsageError, match=r"has 8 devices, and the mesh has 2: use --topology=h100:1x2"
    ):
        compile_check.check_topology(parse("h100:1x8"), 2)
    with pytest.raises(UsageError, match=r"no v5p topology has 2 devices .*: use another mesh"):
        compile_check.check_topology(parse("v5p:2x2x2"), 2)


def test_a_missing_compiler_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(topology.Platform, "missing", True)
    monkeypatch.setenv("JAXTRAIN_COMPILERS", str(tmp_path))
    with pytest.raises(UsageError) as error:
        compile_check.check_topology(H100S, 2)
    assert INSTALL_COMMAND in str(error.value) and str(tmp_path) in str(error.value)


@pytest.fixture
def refused(monkeypatch):
    """A function of a text, with which the compiler refuses every step from then on."""

    def refuse(text):
        def compile_config(*_):
            raise topology.Refused(text)

        monkeypatch.setattr(compile_check, "compile_config", compile_config)
        monkeypatch.setattr(topology.Platform, "missing", False)

    return refuse


def test_a_refusal_is_the_compilers_words(refused, capsys):
    refused(
        "Traceback\n  in a file\njax.errors.JaxRuntimeError: UNIMPLEMENTED: a product of "
        "another type\nsome advice"
    )
    assert compile_check.main(["--config=tiny", "--topology=h100:1x8"]) == 1
    assert (
        "the compiler refuses the step: jax.errors.JaxRuntimeError: UNIMPLEMENTED"
        in capsys.readouterr().err
    )


def test_a_step_that_has_no_memory_is_a_line_with_less(refused, capsys):
    refused(
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space "
        "hbm. Used 160.00G of 95.00G hbm."
    )
    words = "--compile --config=llama3_8b --topology=v5p:2x2x2 --config.pipeline.remat=none"
    layout = "--layout=data=8,microbatch=4"
    assert plan_command.main([*words.split(), layout]) == 82
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "error: out of memory: 171,798,691,840 bytes asked for, 102,005,473,280 there; a device is "
        "planned to need "
    )
    assert "activations " in line and ": use --config.p" in line


@compiled_for(*KINDS)
def test_a_real_compile(platform, capsys):
    """The tiny recipe on 8 devices: what is known of its memory is its own, the collectives are
    those of the communication volume."""
    devices = topology.fitting(platform, 8)
    assert compile_check.main(["--config=tiny", f"--topology={devices.text}", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    parts = values["memory"]["parts"]
    assert sum(parts.values()) == values["memory"]["compiled"]["total"] and min(parts.values()) > 0
    assert (
        values["memory"]["kinds"]["parameters"] + values["memory"]["kinds"]["moments"]
        <= values["memory"]["compiled"]["argument"]
    )
    sent, planned = (
        sum(c[name] for c in values["collectives"] if "stage" in c["axes"])
        for name in ("compiled", "planned")
    )
    assert sent == pytest.approx(planned, rel=0.05)


@compiled_for("h100")
def test_a_plan_that_fits_is_compiled_as_planned(platform, capsys):
    """73.8 of 74.4 GiB: no product is computed twice, and permutes run beside the ops."""
    words = "--config=llama3_8b --topology=h100:1x8 --json --config.data.batch_size=14"
    layout = "--layout=data=2,stage=4,microbatch=1,remat=none"
    long = "--config.data.sequence_length=9728"
    assert compile_check.main([*words.split(), layout, long]) == 0
    values = json.loads(capsys.readouterr().out)
    memory = values["memory"]
    assert 0.97 < memory["planned"]["total"] / memory["usable"] < 1
    assert memory["fits"] and memory["repeated_products"] == 0
    (permute,) = [c for c in values["collectives"] if c["kind"] == "collective-permute"]
    assert permute["overlapped"] == 1


def test_a_program_of_several_steps_is_refused(capsys):
    words = "--config=llama3_8b --topology=h100:4x8 --config.pipeline.steps_per_program=2"
    layout = "--layout=data=4,stage=8,microbatch=1,schedule=zb_h2,remat=selective"
    assert plan_command.main(["--compile", *words.split(), layout]) == 2
    error = capsys.readouterr().err.strip()
    assert error.splitlines()[-1].startswith(
        "error: pipeline.steps_per_program=2 has loops whose trips no table"
    )
