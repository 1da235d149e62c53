"""`python -m jaxtrain.plan`: what it prints and what it refuses, in this process."""

import json
import re

import pytest

from jaxtrain.costs.hardware import load
from jaxtrain.costs.program import PROGRAMS
from jaxtrain.plan.__main__ import main

KEYS = (
    "step_time_s model_tflops_per_device hardware_tflops_per_device mfu hfu memory_gib_per_device fits bubble_fraction tokens_per_s "
    "train_days layout"
).split()
PUBLISHED = "data=8,stage=16,model=8,microbatch=1,repeats=2,remat=selective,zero=1,schedule=interleaved"
GPT3 = ("--config=gpt3_175b", "--hardware=a100-80gb")


@pytest.fixture
def plan(capsys):
    """(what the command printed, what it said of an error) for flags."""

    def run(*argv: str) -> tuple[str, str]:
        status = main(argv)
        out, err = capsys.readouterr()
        assert status == (2 if err else 0) and (not err or (err.count("\n") == 1 and err.startswith("error: ") and not out))
        return out, err

    return run


def test_json(plan):
    figures = json.loads(plan(*GPT3, "--devices=1024", f"--layout={PUBLISHED}", "--tokens=300e9", "--json")[0])
    assert list(figures) == KEYS
    tokens_per_s = 1536 * 2048 / figures["step_time_s"]
    assert figures["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert figures["train_days"] == pytest.approx(300e9 / tokens_per_s / 86400)
    peak = load("a100-80gb").peak_tflops["bfloat16"]
    assert figures["mfu"] == pytest.approx(figures["model_tflops_per_device"] / peak) and 0 < figures["mfu"] <= figures["hfu"] < 1
    assert figures["fits"] and 0 < figures["bubble_fraction"] < 0.2
    assert {key: str(value) for key, value in figures["layout"].items()}.items() >= dict(x.split("=") for x in PUBLISHED.split(",")).items()


def test_layout_replaces_the_recipe_before_any_check(plan):
    """The recipe's own mesh and repeats do not fit 95 layers on 19 stages; the layout does."""
    layout = "--layout=data=2,stage=19,microbatch=1,schedule=1f1b"
    figures = json.loads(plan(*GPT3, "--config.model.layers=95", "--config.mesh.stage=7", layout, "--json")[0])
    assert figures["layout"]["stage"] == 19 and figures["layout"]["repeats"] == 1 and figures["layout"]["model"] == 1
    assert figures["train_days"] is None


def test_layout_that_does_not_fit_is_evaluated(plan):
    figures = json.loads(plan(*GPT3, "--layout=data=8,microbatch=1", "--json")[0])
    assert not figures["fits"] and figures["memory_gib_per_device"] > 80 and figures["step_time_s"] > 0


def test_settings_change_the_model(plan):
    small, plain, scores = (
        json.loads(plan(*GPT3, f"--layout={PUBLISHED}", *flags, "--json")[0])
        for flags in (["--config.model.layers=48"], [], ["--config.model.attention_kernel=xla"])
    )
    assert 0.4 < small["step_time_s"] / plain["step_time_s"] < 0.6
    assert scores["step_time_s"] > 1.05 * plain["step_time_s"]  # they pass through memory
    assert scores["model_tflops_per_device"] < plain["model_tflops_per_device"]


@pytest.mark.parametrize("assume", PROGRAMS)
def test_programs(plan, assume):
    figures = json.loads(plan(*GPT3, f"--assume={assume}", f"--layout={PUBLISHED}", "--json")[0])
    assert 0.1 < figures["mfu"] < 0.9


ERRORS = [
    (["--layout=tp=8"], "--layout names 'tp', and its keys are .*: use model=1"),
    (["--layout=data=8,microbatch=5"], "microbatch=5 does not divide the 192 sequences .*: use microbatch=4"),
    (["--layout=data=7"], "cuts data.batch_size=1536 by data=7, .*: use data=6"),
    (["--layout=data=8,model=7"], "mesh.model=7 does not divide model.heads=96: use --layout=data=8,model=8"),
    (["--layout=remat=sel"], "the choices are full, selective, none: use remat=selective"),
    (["--layout=data=x"], "data=x, which must be a whole number from 1 on: use data=1"),
    (["--layout=data=2,data=2"], "names data twice"),
    (["--layout=data=8,stage=2,repeats=2,schedule=1f1b"], "does not fit pipeline.schedule='1f1b', .*: use --layout=.*repeats=1,"),
    (["--layout=data=8", "--devices=16"], "--devices=16 and --layout, which is for 8, .*: use --devices=8 .or data=16 in --layout."),
    (["--layout=data=8", "--hardware=a100"], "--hardware='a100' is not known .*: use --hardware="),
    (["--layout=data=8", "--assume=megatron"], "--assume='megatron' is not known .*: use --assume=megatron"),
    (["--layout=data=8,microbatch=1", "--config.model.width=0"], "model.width=0 must be at least 1"),
    (["--layout=data=8", "--device=16"], "--device is an unknown flag: use --devices=16"),
]


@pytest.mark.parametrize("argv, text", ERRORS, ids=[" ".join(argv) for argv, _ in ERRORS])
def test_errors(plan, argv, text):
    err = plan(*GPT3, *argv)[1]
    assert re.search(text, err), err
