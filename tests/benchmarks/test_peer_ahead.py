"""benchmarks/peer_ahead.py without a compiler: its cases, its reader on the text of a windowed
einsum, a MaxText that stands in for the real one, recorded figures, wrong flags."""

import json
import sys
import textwrap

import peer_ahead as benchmark
import pytest
from peer_cases import AXES, CASES
from support.compilers import needs
from support.windowed_text import FLOPS, ROLLED, TRIPS, WINDOWED

from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.programs.topology import Compiled, Platform

CLOCK = 1e9 * load("tpu-v5p").clock_ghz
MEMORY = {"argument": 5, "temp": 7}
LINK = load("tpu-v5p").tiers[0].bytes_per_s / 2


def summary(text: str, case: str = "model8") -> dict:
    compiled = Compiled(text, memory=MEMORY, cost={"flops": 2.0 * FLOPS, "bytes accessed": 1.0})
    return benchmark.summary(benchmark.maxtext_reader(CASES[case], compiled), compiled)


@pytest.mark.parametrize("name", CASES)
def test_both_sides_have_the_same_sizes(name):
    """Devices, sequences of a step, tokens of a sequence, layers of a stage."""
    case = CASES[name]
    config, settings = case.config, dict(s.split("=", 1) for s in case.maxtext_settings(True, "-"))
    sizes = {axis: size for axis, size in case.maxtext_mesh.items() if size > 1}
    product = 1
    for size in sizes.values():
        product *= size
    assert product == case.topology.devices == 64
    assert int(settings["per_device_batch_size"]) * 64 == config.data.batch_size
    assert int(settings["max_target_length"]) == config.data.sequence_length
    assert not config.data.attend_across_documents and {*sizes} <= {*AXES}
    recomputes_all = config.pipeline.remat == settings["remat_policy"] == "full"
    assert recomputes_all != name.endswith("_kept")
    if config.mesh.stage > 1:
        stages = sizes["stage"] * int(settings["num_pipeline_repeats"])
        assert int(settings["num_layers_per_pipeline_stage"]) * stages == config.model.layers
        assert int(settings["num_pipeline_microbatches"]) == config.pipeline.microbatches
        assert int(settings["ici_pipeline_parallelism"]) == config.mesh.stage


def test_fastest_and_default_settings():
    fastest = CASES["fsdp"].maxtext_settings(True, benchmark.options(CASES["fsdp"]))
    assert "sa_use_fused_bwd_kernel=True" in fastest
    assert any("xla_tpu_scoped_vmem_limit_kib=65536" in setting for setting in fastest)
    defaults = CASES["fsdp"].maxtext_settings(False, benchmark.options(CASES["fsdp"]))
    assert not any("sa_" in setting or "xla" in setting for setting in defaults)


def test_a_windowed_einsum():
    """Two products a trip, for XLA unrolled the loop: as many products as without unrolling."""
    for text in (WINDOWED, ROLLED):
        figures = summary(text)
        (permutes,) = figures["exposed"]
        assert figures["seconds"]["products"] == pytest.approx(TRIPS * 1000 / CLOCK)
        assert permutes["times"] == TRIPS and permutes["bytes"] == TRIPS * 2 * 64 * 512
        assert permutes["hidden"] == permutes["asynchronous"] == permutes["bytes"]


def test_exposed_seconds():
    """A permute that takes longer than the product beside it is exposed for the rest."""
    figures = summary(WINDOWED)
    (permutes,) = figures["exposed"]
    takes, product = 2 * 64 * 512 / LINK, 1000 / CLOCK
    assert takes > product
    assert permutes["seconds"] == pytest.approx(TRIPS * (takes - product))
    assert permutes["exposed"] == pytest.approx(permutes["bytes"] * (1 - product / takes))
    assert figures["seconds"]["total"] == pytest.approx(
        figures["seconds"]["step"] + permutes["seconds"]
    )


def test_the_second_reader():
    """XLA counts a loop as if of one trip: of the unrolled one, two products."""
    compared = summary(WINDOWED)["second_reader"]
    assert compared["flops"] == {"ours": 2 * FLOPS, "theirs": 2 * FLOPS}
    # Of a permute the start reads one array and writes two, the done reads two and writes one, both
    # with a context of 8 bytes.
    sent = 2 * (6 * 2 * 64 * 512 + 2 * 8)
    product = 2 * (2 * 2 * 64 * 512 + 2 * 512 * 512)
    assert compared["bytes"]["ours"] == sent + product + 3 * 4  # the counter
    assert compared["arguments"]["ours"] == 2 * 64 * 512 + 2 * 512 * 512
    lines = benchmark.second_reader_lines({"flops": {"ours": 105.0, "theirs": 100.0}})
    assert lines[-1].endswith("+5.0%")


ROW = {
    "case": "fsdp",
    "side": "ours",
    "date": "2026-11-25",
    "jax": "0.12.0.1",
    "libtpu": "0.0.50.1",
}


def row(side: str, seconds: float) -> dict:
    names = ("products", "kernels", "other", "bubble", "exposed")
    return ROW | {
        "side": side,
        "seconds": dict.fromkeys(names, 0.0) | {"step": 0.9 * seconds, "total": seconds},
        "memory": {"arguments": 1, "temporary": 2},
        "exposed": [],
        "second_reader": {},
        "compile_seconds": 1.0,
    }


def test_ratios():
    rows = [row("ours", 1.5), row("fastest", 2.0), row("defaults", 3.0)]
    assert benchmark.ratios(rows)[1].split() == [
        *("fsdp", "1.500", "2.000", "3.000", "0.750", "0.500", "0.750", "0.95")
    ]
    assert benchmark.ratios(rows[:1])[1].split()[:2] == ["fsdp", "1.500"]
    again = row("ours", 1.4)
    assert benchmark.merged(rows, [again]) == [again, *rows[1:]]


def run(capfd, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(list(words))
    return ended.value.code or 0, *capfd.readouterr()


def test_recorded_figures(monkeypatch, tmp_path, capfd):
    """Without MaxText the figures of the file are printed."""
    record = tmp_path / "record.json"
    record.write_text(json.dumps([row("ours", 1.5), row("fastest", 2.0)]))
    monkeypatch.setattr(benchmark, "RECORD", record)
    status, out, _ = run(capfd, "--case=fsdp")
    assert status == 0 and "(2026-11-25)" in out and " 0.750 " in out


MAXTEXT = """
    import jax

    def jit_and_compile(function, number):
        return jax.jit(function).lower(number).compile()

    def main(argv):
        assert argv[1].endswith("base.yml") and "model_name=llama3-8b" in argv
        if "sa_use_fused_bwd_kernel=True" in argv:
            raise RuntimeError("no room for " + argv[2])
        jit_and_compile(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), "float32"))
"""


def test_a_compiled_maxtext(monkeypatch, tmp_path, capfd):
    """maxtext_compile.py runs MaxText's own command in another process; what that refuses is a
    line. The program is written, and is read again."""
    package = tmp_path / "src" / "maxtext" / "trainers" / "pre_train"
    package.mkdir(parents=True)
    (package / "train_compile.py").write_text(textwrap.dedent(MAXTEXT))
    (tmp_path / "libtpu-9.9.dist-info").mkdir()
    (tmp_path / "libtpu-9.9.dist-info" / "METADATA").write_text("Name: libtpu\nVersion: 9.9\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(Platform, "missing", False)
    monkeypatch.setattr(benchmark, "RECORD", tmp_path / "record.json")
    where = (f"--maxtext={tmp_path}", f"--python={python}", "--case=fsdp")
    texts = f"{tmp_path}/text"
    status, out, err = run(capfd, *where, "--side=defaults", f"--text={texts}", "--record")
    assert status == 0, out + err
    assert "libtpu 9.9" in out and f"flops: ours {2 * 64**3:.4g}" in out
    (kept,) = json.loads((tmp_path / "record.json").read_text())
    assert (kept["case"], kept["side"], kept["libtpu"]) == ("fsdp", "defaults", "9.9")
    again = run(capfd, f"--read={texts}")
    assert again[0] == 0 and again[1].splitlines()[:3] == out.splitlines()[:3]
    status, out, _ = run(capfd, *where, "--side=fastest")
    assert status == 1 and "refused: RuntimeError: no room for model_name=llama3-8b" in out


COMPILED = ("fsdp_kept", "fsdp_bf16_kept", "model8_kept", "stage4_kept")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(benchmark.PLATFORM)) for name in COMPILED]
)
def test_recorded_figures_hold(name):
    """A step that is compiled anew takes the recorded seconds and memory."""
    (old,) = [r for r in benchmark.recorded() if (r["case"], r["side"]) == (name, "ours")]
    about = benchmark.versions()
    if about["libtpu"] != old["libtpu"]:
        pytest.skip(f"recorded by libtpu {old['libtpu']}, and this is {about['libtpu']}")
    case = CASES[name]
    compiled = benchmark.compile_config(case.topology, case.config)
    new = benchmark.figures(case, "ours", benchmark.Program(compiled, about))
    assert new["seconds"]["total"] == pytest.approx(old["seconds"]["total"], rel=0.02)
    assert new["memory"] == pytest.approx(old["memory"], rel=0.02)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--case=nothing"], "--case='nothing' is none of fsdp, "),
        (["--side=theirs"], "--side='theirs' is none of ours, fastest, defaults"),
        (["--maxtext=HERE"], "--maxtext needs --python: give both"),
        (["--python=HERE"], "--python needs --maxtext: give both"),
        (["--maxtext=HERE", "--python=HERE"], "has no src/maxtext"),
        (["--record"], "--record needs --maxtext and --python"),
        (["--text=HERE"], "--text needs --maxtext and --python"),
        (["--read=HERE/none"], "is no folder"),
        (["--nothing=1"], "--nothing is an unknown flag"),
    ],
)
def test_wrong_flags(words, says, tmp_path, capfd):
    status, _, err = run(capfd, *(word.replace("HERE", str(tmp_path)) for word in words))
    assert status == 2 and says in err and len(err.splitlines()) == 1


def test_a_python_that_is_none(tmp_path, capfd):
    (tmp_path / "src" / "maxtext").mkdir(parents=True)
    status, _, err = run(capfd, f"--maxtext={tmp_path}", f"--python={tmp_path}/python")
    assert status == 2 and "is no program" in err
