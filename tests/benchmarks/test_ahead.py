"""benchmarks/ahead.py without a compiler: its cases are configs that work, what is wrong is one
line, what it prints has the figures."""

import json

import ahead as benchmark
import pytest
import step_flops
from ahead_figures import as_dict, exposed_lines, is_copy
from instruction_costs import InstructionCosts
from step_seconds import StepSeconds
from support import ROOT
from support.step_text import CONFIG, STEP, TICKS

from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.programs import topology
from jaxtrain.planner.programs.program import Program
from jaxtrain.planner.programs.report import step_counts
from jaxtrain.planner.programs.topology import INSTALL_COMMAND, Platform, parse
from jaxtrain.planner.step.step_model import milliseconds, step_model_of
from jaxtrain.schedule.columns import columns

CLOCK = 1e9 * load("tpu-v5p").clock_ghz
SIZE = 4 * 64 * 16 * 512  # bytes
DOT = 2 * 64 * 16 * 512 * 512  # operations
RUNS = columns(make_setup(CONFIG).train).runs
FLAGS = {flag.name: flag.default for flag in benchmark.FLAGS}


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """All of them, as if installed."""
    monkeypatch.setattr(Platform, "missing", False)


def op_times(config, kind):
    return milliseconds(step_model_of(config, load(kind)).op_times())


def test_every_case_is_a_config_that_works():
    found = list(benchmark.cases({**FLAGS, "recipe": ",".join(benchmark.LAYOUTS)}, []))
    assert len(found) == 2 * sum(map(len, benchmark.LAYOUTS.values()))
    case = next(
        c
        for c in found
        if (c.recipe, c.layout, c.topology.text) == ("llama3_8b", "pipeline", "v5p:4x4x4")
    )
    assert case.config.data.sequence_length == 8192 and not case.config.data.attend_across_documents
    assert case.config.mesh.data * case.config.mesh.stage == case.topology.devices == 64


def test_a_case_is_planned_for_its_devices():
    """Its table and its bubble follow from op times of the devices that it is compiled for, or of
    those that a flag names."""
    values = {**FLAGS, "layout": "pipeline"}
    v5p, h100 = benchmark.cases(values, [])
    for case, kind in ((v5p, "tpu-v5p"), (h100, "h100")):
        times = make_setup(case.config).times
        assert op_times(case.config, kind)[:3] == (times.F, times.B, times.W)
        assert times.B > 1.1 * times.F and times.W < times.F
    assert make_setup(v5p.config).times != make_setup(h100.config).times
    (named, _) = benchmark.cases(values, [("train.hardware", "tpu-v5e")])
    assert op_times(named.config, "tpu-v5e")[0] == make_setup(named.config).times.F


def test_settings_and_sizes():
    (case,) = benchmark.cases(
        {**FLAGS, "layout": "zero3", "platform": "h100", "layers": 4, "sequence": 512},
        [("parallel.zero", "1")],
    )
    assert (
        case.config.model.layers,
        case.config.data.sequence_length,
        case.config.parallel.zero,
    ) == (4, 512, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--layout=flat"],
            "--layout='flat' is none of zero3, tensor, pipeline, pipeline_tensor: use "
            "--layout=zero3",
        ),
        (["--platform=h200"], "--platform='h200' is none of v5p, h100: use --platform=v5p"),
        (
            ["--recipe=tiny"],
            "--recipe='tiny' is none of llama3_8b, mixtral_8x7b, deepseek_v3: use "
            "--recipe=llama3_8b",
        ),
        (["--", "--config.mesh.model=3"], "mesh.model=3 does not divide"),
        (["--layers=-1"], "--layers=-1 must be at least 0: use --layers=0"),
        (["--colour"], "--colour is an unknown flag"),
    ],
)
def test_what_is_wrong_is_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and says in line


def test_a_platform_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(Platform, "missing", True)
    with pytest.raises(SystemExit):
        benchmark.main(["--platform=h100"])
    assert INSTALL_COMMAND in capsys.readouterr().err


def test_what_is_printed_and_written(monkeypatch, tmp_path, capsys):
    """Of a case that compiles, and of one that the compiler refuses."""
    table, file = tmp_path / "table.md", tmp_path / "rows.json"
    case = benchmark.Case("llama3_8b", "pipeline", parse("v5p:2x2x1"), "stage 2", CONFIG)
    monkeypatch.setattr(benchmark, "TABLE", table)
    monkeypatch.setattr(benchmark, "cases", lambda *_: [case, case])
    compiled = topology.Compiled(
        STEP, tracing=2.0, compiling=10.0, memory={"argument": 3e9, "temp": 4e9}
    )
    answers = [compiled, topology.Refused("in a\njax.Error: no room")]

    def compile_config(*_, **__):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(benchmark, "compile_config", compile_config)
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--append", f"--json={file}", f"--text={tmp_path}"])
    assert ended.value.code == 1  # one was refused
    said, rows, lines = (
        capsys.readouterr().out,
        json.loads(file.read_text()),
        table.read_text().splitlines(),
    )
    assert (
        "3.00 GB arguments, 4.00 GB temporary; compiled in 12 s" in said
        and "refused: jax.Error: no room" in said
    )
    assert rows[0]["attention"] == "pallas splash_mha"
    assert rows[1]["refused"] == "jax.Error: no room"
    columns = [line.count("|") for line in lines]
    header = next(
        line
        for line in (ROOT / "benchmarks" / "ahead.md").read_text().splitlines()
        if line.startswith("| date")
    )
    assert (
        columns == [header.count("|")] * 2
        and "pallas splash_mha; bf16[1, 4, 64, 64] in K" in lines[0]
    )
    assert (tmp_path / "llama3_8b_pipeline_v5p.txt").read_text() == STEP


def test_what_it_says_of_a_step():
    compiled = topology.Compiled(STEP, memory={"argument": 5, "temp": 7})
    found, runs = as_dict(StepSeconds(CONFIG, "v5p", compiled)), int(RUNS["K0"][:, 0].sum())
    backward = int(RUNS["B0"][:, 0].sum())
    assert found["memory"] == {"arguments": 5, "temporary": 7}
    planned = step_flops.total(step_counts(CONFIG), found["stage"])
    assert (
        found["flops"]["products"] == runs * DOT
        and found["flops"]["planned"] == planned.total > planned.once > 0
    )
    assert (
        found["kernels"]["pallas splash_mha_fwd"]["times"] == runs
        and "AllocateBuffer" not in found["kernels"]
    )
    assert found["attention"] == "pallas splash_mha"
    assert found["square_arrays"] == ["bf16[1, 4, 64, 64] in K"]
    copies = found["copies"]
    assert copies["bytes"] == (TICKS + backward) * SIZE and copies["seconds"] == pytest.approx(
        (TICKS * 200 + backward * 300) / CLOCK
    )
    assert copies["share"] == pytest.approx(copies["seconds"] / found["seconds"]["busy"])
    (permutes,) = found["collectives"]
    assert permutes["bytes"] == permutes["asynchronous"] == 2 * TICKS * SIZE
    assert permutes["hidden"] == TICKS * SIZE  # one of both is done before the ops begin
    kernel = found["kernels"]["pallas splash_mha_fwd"]["flops"]
    assert permutes["flops"] == pytest.approx(runs * DOT + kernel)
    bubble = make_setup(CONFIG).simulation().bubble_fraction_coupled
    assert (
        found["seconds"]["step"] == pytest.approx(found["seconds"]["busy"] / (1 - bubble))
        and bubble > 0.1
    )


def test_exposed_bytes_and_the_compilers_figures():
    """The permute that is done before the ops begin is exposed; the other one is not, if the ops
    beside it take longer."""
    compiled = topology.Compiled(
        STEP, memory={"argument": 5, "temp": 7}, cost={"flops": DOT, "bytes accessed": 1.0}
    )
    found = as_dict(StepSeconds(CONFIG, "v5p", compiled))
    (permutes,) = found["exposed"]
    assert (permutes["kind"], permutes["axes"]) == ("collective-permute", "stage")
    assert TICKS * SIZE <= permutes["exposed"] <= 2 * TICKS * SIZE
    assert permutes["seconds"] == pytest.approx(permutes["exposed"] / 90e9)
    assert exposed_lines([permutes], least=1.0)[1].split()[:2] == ["collective-permute", "stage"]
    parts = found["seconds"]["by_part"]
    assert sum(parts.values()) == pytest.approx(found["seconds"]["busy"])
    assert parts["products"] > 0 and parts["kernels"] > 0
    assert found["second_reader"]["flops"] == {"ours": DOT, "theirs": DOT}
    about = {"recipe": "r", "layout": "l", "platform": "v5p", "text": "t"}
    said = "\n".join(benchmark.report(about | {"layers": 1, "sequence": 1} | found))
    assert "exposed collectives, at the assumed speed of the links: " in said
    assert "exposed GB" in said and "  a second reader, the compiler:" in said


MOVES = """HloModule jit_f, is_scheduled=true

%turn (t.0: f32[8,64,64]) -> f32[64,8,64] {
  %t.0 = f32[8,64,64]{2,1,0} parameter(0)
  ROOT %transpose.1 = f32[64,8,64]{2,1,0} transpose(%t.0), dimensions={1,0,2}
}

%minus (m.0: f32[8,64,64]) -> f32[64,8,64] {
  %m.0 = f32[8,64,64]{2,1,0} parameter(0)
  %negative = f32[8,64,64]{2,1,0} negate(%m.0)
  ROOT %transpose.2 = f32[64,8,64]{2,1,0} transpose(%negative), dimensions={1,0,2}
}

ENTRY %main (a: f32[8,64,64]) -> f32[8,64,64] {
  %a = f32[8,64,64]{2,1,0:T(8,128)} parameter(0)
  %same = f32[8,64,64]{2,1,0:T(8,128)} copy(%a)
  %other = f32[8,64,64]{1,2,0:T(8,128)} copy(%same)
  %near = f32[8,64,64]{1,2,0:T(8,128)S(1)} copy(%other)
  %turned = f32[64,8,64]{2,1,0} fusion(%other), kind=kLoop, calls=%turn
  %computed = f32[64,8,64]{2,1,0} fusion(%other), kind=kLoop, calls=%minus
  ROOT %next = f32[8,64,64]{2,1,0:T(8,128)} add(%same, %same)
}
"""


def test_copies():
    """Also into the same order, if in the device's memory; not into vector memory in the same
    order."""
    costs = InstructionCosts(Program(MOVES))
    assert [i.name for i in costs.program.computations["main"] if is_copy(costs, i)] == [
        "same",
        "other",
        "turned",
    ]
