"""benchmarks/ahead.py without a compiler: its cases are configs that work, what is wrong is one line, what it prints has the figures."""

import importlib.util
import json
import sys

import pytest
from support import ROOT
from support.step_text import CONFIG, STEP

from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.config.work import planned_op_times
from jaxtrain.costs.hardware import load
from jaxtrain.hlo import topology
from jaxtrain.hlo.topology import INSTALL_COMMAND, Platform, parse

sys.path.append(str(ROOT / "benchmarks"))
SPEC = importlib.util.spec_from_file_location("benchmark_ahead", ROOT / "benchmarks" / "ahead.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)
FLAGS = {flag.name: flag.default for flag in benchmark.FLAGS}


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """All of them, as if installed."""
    monkeypatch.setattr(Platform, "missing", False)


def test_every_case_is_a_config_that_works():
    found = list(benchmark.cases({**FLAGS, "recipe": ",".join(benchmark.LAYOUTS)}, []))
    assert len(found) == 2 * sum(map(len, benchmark.LAYOUTS.values()))
    case = next(c for c in found if (c.recipe, c.layout, c.topology.text) == ("llama3_8b", "pipeline", "v5p:4x4x4"))
    assert case.config.data.sequence_length == 8192 and not case.config.data.attend_across_documents
    assert case.config.mesh.data * case.config.mesh.stage == case.topology.devices == 64


def test_a_case_is_planned_for_its_devices():
    """Its table and its bubble follow from op times of the devices that it is compiled for, or of those that a flag names."""
    values = {**FLAGS, "layout": "pipeline"}
    v5p, h100 = benchmark.cases(values, [])
    for case, kind in ((v5p, "tpu-v5p"), (h100, "h100")):
        times = make_setup(case.config).times
        assert planned_op_times(case.config, load(kind))[:3] == (times.F, times.B, times.W)
        assert times.B > 1.1 * times.F and times.W < times.F
    assert make_setup(v5p.config).times != make_setup(h100.config).times
    (named, _) = benchmark.cases(values, [("train.hardware", "tpu-v5e")])
    assert planned_op_times(named.config, load("tpu-v5e"))[0] == make_setup(named.config).times.F


def test_settings_and_sizes():
    (case,) = benchmark.cases({**FLAGS, "layout": "zero3", "platform": "h100", "layers": 4, "sequence": 512}, [("parallel.zero", "1")])
    assert (case.config.model.layers, case.config.data.sequence_length, case.config.parallel.zero) == (4, 512, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--layout=flat"], "--layout='flat' is none of zero3, tensor, pipeline, pipeline_tensor: use --layout=zero3"),
        (["--platform=h200"], "--platform='h200' is none of v5p, h100: use --platform=v5p"),
        (["--recipe=tiny"], "--recipe='tiny' is none of llama3_8b, mixtral_8x7b, deepseek_v3: use --recipe=llama3_8b"),
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
    compiled = topology.Compiled(STEP, tracing=2.0, compiling=10.0, memory={"argument": 3e9, "temp": 4e9})
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
    said, rows, lines = capsys.readouterr().out, json.loads(file.read_text()), table.read_text().splitlines()
    assert "3.00 GB arguments, 4.00 GB temporary; compiled in 12 s" in said and "refused: jax.Error: no room" in said
    assert rows[0]["attention"] == "pallas splash_mha" and rows[0]["flops"]["planned"] > rows[0]["flops"]["model"] > 0
    assert rows[1]["refused"] == "jax.Error: no room"
    columns = [line.count("|") for line in lines]
    header = next(line for line in (ROOT / "benchmarks" / "ahead.md").read_text().splitlines() if line.startswith("| date"))
    assert columns == [header.count("|")] * 2 and "pallas splash_mha; bf16[1, 4, 64, 64] in K" in lines[0]
    assert (tmp_path / "llama3_8b_pipeline_v5p.txt").read_text() == STEP
