"""The command: from a checkpoint that a pipeline on another mesh has saved, and one line for
whatever is wrong."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand.fuzz_configs import suggested
from etils import epath
from support import ROOT, small
from support.damage import damage_numbers
from support.plain_model import plain_model

from jaxtrain import cli, config as configs, generate_command as generate
from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import load_parameters
from jaxtrain.checkpoint.steps import Meta
from jaxtrain.data.tokenizer import ByteTokenizer, NoTokenizer
from jaxtrain.devices.mesh import make_mesh
from jaxtrain.models import transformer
from jaxtrain.training.state import stored_shapes
from jaxtrain.training.step import make_step

VOCABULARY = 61


def config(mesh=(1, 1, 1), *pipeline) -> configs.Config:
    """5 layers, so that stages differ."""
    changes = {
        "model.layers": 5,
        "model.kv_heads": 4,
        "model.init_std": 0.3,
        "model.positions": "learned",
        "model.max_positions": 40,
    }
    return small.config(mesh, *pipeline, changes=changes)


@functools.cache
def plain() -> dict:
    """The parameters of all checkpoints here, as numpy arrays without padding."""
    return jax.tree.map(np.asarray, plain_model(config())[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """Checkpoints as runs of 2 stages × 2 chunks × 2 tensor-parallel devices leave them: step 3
    computes in bfloat16, 12 in float32."""
    folder, cfg = tmp_path_factory.mktemp("run"), config((1, 2, 2), "interleaved", 2)
    step = make_step(cfg, small.mesh_of(cfg))
    state = small.first_state(step, plain())
    saves = Checkpointer(folder / "checkpoints", stored_shapes(step.layout, step.optimizer))
    for at, compute in ((3, "bfloat16"), (12, "float32")):
        meta = {
            "config": configs.to_dict(configs.replace(cfg, {"precision.compute": compute})),
            "step": at,
            "checksum": "ab" * 32,
        }
        saves.save(at, state, meta | {"tokenizer": NoTokenizer(VOCABULARY).describe()})
    saves.close()
    return folder


def greedy(prompt: list[int], tokens: int) -> list[int]:
    """The continuation by whole forwards."""
    parts, params = plain_model(config())
    logits = jax.jit(lambda tokens: transformer.logits(parts, params, tokens)[0])
    made = list(prompt)
    for _ in range(tokens):
        made.append(int(logits(jnp.array([made + [0] * (40 - len(made))]))[len(made) - 1].argmax()))
    return made[len(prompt) :]


def command(*argv: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": str(ROOT),
        "JAXTRAIN_CACHE": str(ROOT / ".cache"),
    }
    return subprocess.run(
        [sys.executable, "-m", "jaxtrain.generate", *argv],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def test_text_of_a_pipeline_s_checkpoint(run):
    expected = greedy([4, 5, 6], 30)
    assert len(set(expected)) > 5
    for split in ("--model=1", "--model=2"):
        done = command(f"--workdir={run}", "--prompt=4 5 6", "--tokens=30", "--greedy", split)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "4 5 6 " + " ".join(map(str, expected)) + "\n"
        assert re.fullmatch(
            r"a prompt of 3 tokens and up to 30 more go beyond the 16 tokens that the model "
            r"was trained on [(]data.sequence_length[)]\n"
            r"step 12: prompt of 3 tokens and compilation .* s; 30 tokens in .* s, .* tokens/s\n"
            r"stopped: at --tokens=30; the last 17 lie beyond the 16 tokens that the model "
            r"was trained on [(]data.sequence_length[)]\n",
            done.stderr,
        )


@pytest.mark.full
def test_bfloat16_over_two_devices(run):
    """In a process of its own: what XLA's CPU compiler cannot do ends the process."""
    done = command(
        f"--workdir={run}", "--prompt=4 5 6", "--tokens=30", "--greedy", "--model=2", "--step=3"
    )
    assert done.returncode == 0, done.stderr
    ids = [int(i) for i in done.stdout.split()]
    assert ids[:3] == [4, 5, 6] and len(ids) == 33
    # Rounding to 8 bits moves the choice between two tokens that are nearly as likely, but not the
    # first few of this model.
    assert ids[3:6] == greedy([4, 5, 6], 3)


def test_parameters_are_those_that_were_saved(run):
    """The stack of layers in order, bit for bit, on one device and on two."""
    for devices in (None, jax.devices()[4:6]):
        own = make_mesh((1, 1, 1, 1, 1, 2), devices) if devices else None
        with jax.set_mesh(make_mesh((1, 1, 2, 1, 1, 2), jax.devices()[:4])):  # inside another mesh
            _, params = load_parameters(
                run / "checkpoints", 3, config().model, config().precision, mesh=own
            )
        assert all(
            a.sharding.device_set == set(devices or jax.devices()[:1])
            for a in jax.tree.leaves(params)
        )
        params["embed"]["table"], params["head"]["table"] = (
            np.asarray(params[k]["table"])[:VOCABULARY] for k in ("embed", "head")
        )
        jax.tree.map(np.testing.assert_array_equal, params, plain())


def test_matrices_come_in_the_compute_type(run):
    precision = dataclasses.replace(config().precision, compute="bfloat16")
    _, params = load_parameters(run / "checkpoints", 3, config().model, precision)
    assert (
        params["head"]["table"].dtype
        == params["layers"]["mlp"]["up"]["weight"].dtype
        == jnp.bfloat16
    )
    for vector_or_looked_up in (
        params["layers"]["mlp_norm"]["scale"],
        params["head"]["norm"]["scale"],
        params["embed"]["table"],
    ):
        assert vector_or_looked_up.dtype == jnp.float32


@pytest.fixture
def here(monkeypatch):
    """The command in this process, whose devices are already there."""
    monkeypatch.setattr(generate, "start_jax", lambda flags: None)

    def call(*argv: str) -> int:
        return generate.main(argv)

    return call


def test_several_samples(run, here, capsys):
    assert (
        here(
            f"--workdir={run}",
            "--prompt=1 2",
            "--tokens=5",
            "--samples=2",
            "--temperature=2",
            "--step=3",
        )
        == 0
    )
    out, err = capsys.readouterr()
    first, second = re.fullmatch(
        r"--- sample 1 of 2\n1 2((?: \d+){5})\n--- sample 2 of 2\n1 2((?: \d+){5})\n", out
    ).groups()
    assert first != second
    assert (
        err.startswith("step 3: ")
        and " 10 tokens in " in err
        and err.endswith("\nstopped: 2 of 2 samples at --tokens=5\n")
    )


def test_a_cache_over_devices(run, here, capsys):
    flags = ["--prompt=4 5 6", "--tokens=30", "--greedy", "--context=3", "--model=2"]
    assert here(f"--workdir={run}", *flags, "--samples=2") == 0
    text = "4 5 6 " + " ".join(map(str, greedy([4, 5, 6], 30)))
    assert capsys.readouterr().out == "".join(
        f"--- sample {number} of 2\n{text}\n" for number in (1, 2)
    )


def test_the_end_of_the_positions_is_said(run, here, capsys):
    assert here(f"--workdir={run}", "--prompt=1 2", "--tokens=38", "--greedy") == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "stopped: at --tokens=38; no position is left (model.max_positions=40); the last 24 "
        "lie beyond the 16 tokens"
    )


def refused(capsys, call, *argv: str) -> str:
    status = call(*argv)
    out, err = capsys.readouterr()
    assert status == 2 and not out
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--prompt=1", "--step=7"],
            "--step=7 is no checkpoint of .* [(]it has 3, 12[)]: use --step=3",
        ),
        (
            ["--prompt=1 2", "--tokens=39"],
            "--tokens=39 after a prompt of 2 goes beyond .* model.max_positions=40: use "
            "--tokens=38",
        ),
        (
            ["--prompt=" + "1 " * 40, "--tokens=8"],
            "after a prompt of 40 .*: use a prompt of at most 32 tokens",
        ),
        (
            ["--prompt=1", "--tokens=5", "--ema"],
            "--ema=true asks for an average, .*: use --ema=false",
        ),
        (["--prompt=61"], "takes ids from 0 to 60 .* not '61'"),
        (["--prompt="], "the prompt is empty, .* use one id or more"),
        (
            ["--prompt=1", "--tokens=5", "--model=3"],
            "--model=3 does not divide model.heads=8: use --model=2 .or 1, 4, 8.",
        ),
        (
            ["--prompt=1", "--tokens=5", "--model=3", "--context=1000"],
            "--context=1000 × --model=3 is more than 1024 devices: use --context=2 --model=2",
        ),
        (
            ["--prompt=1", "--tokens", "5", "--top_p=run", "--step=5", "--seed=inf"],
            "--top_p='run' is not a number .and --seed='inf' is not an integer.$",
        ),
        (
            ["--prompt=1", "--step=7", "--model", "-0.0", "--samples=x"],
            "--model='-0.0' is not an integer: use --model=1 "
            ".and --samples='x' is not an integer.$",
        ),
        (
            ["--prompt=\udcff", "--samples=x"],
            "--samples='x' is not an integer$",
        ),
    ],
)
def test_what_the_checkpoint_refuses(run, here, capsys, argv, message):
    """The real command says the same, and what it suggests works."""
    line = refused(capsys, here, f"--workdir={run}", *argv)
    assert re.search(message, line)
    if (words := suggested(line)) and " (and " not in line:
        assert cli.checked_flags(
            [f"--workdir={run}", *argv, *words], "", generate.FLAGS, generate.check
        )


def test_what_is_not_whole_is_passed_over(run, here, capsys, tmp_path):
    """Without --step the newest complete one is taken; one that is asked for must be complete."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", folder)
    (folder / "40").mkdir()
    for step in (20, 30):
        shutil.copytree(folder / "12", folder / str(step))
        meta = json.loads((folder / "12" / "meta" / "metadata").read_text()) | {"step": step}
        meta["config"]["model"]["mlp_width"] = 99
        (folder / str(step) / "meta" / "metadata").write_text(json.dumps(meta))
        manifest.write(epath.Path(folder / str(step)))
    shutil.rmtree(folder / "30" / "state" / "d")
    (folder / "3" / "meta" / "metadata").write_text("{}")
    assert here(f"--workdir={tmp_path}", "--prompt=1 2", "--tokens=2", "--greedy") == 0
    out, err = capsys.readouterr()
    assert len(out.split()) == 4
    passed, figures, *_ = err.splitlines()
    why = r"its state's params/layers/mlp/\S+ is \[.*\], not \[.*\]"
    assert re.fullmatch(
        rf"passed over: 20 \({why}\), 30 \(state/d/\w+ is missing\), 40 \(an empty folder\)", passed
    ), passed
    assert figures.startswith("step 12: ")
    for step, reason in (
        (3, "its meta has no 'config'"),
        (20, why),
        (30, r"state/d/\w+ is missing"),
        (40, "an empty folder"),
    ):
        error = refused(
            capsys, here, f"--workdir={tmp_path}", "--prompt=1", "--tokens=2", f"--step={step}"
        )
        assert re.search(
            rf"--step={step} is not complete: {reason} \(it has .*12.*\): use --step=12", error
        ), error
    # Of arrays, damage is found when they are read: then the one before is taken.
    damage_numbers(folder / "12", "params.layers.mlp.up.weight/c/4")
    assert (
        f"{folder}/12/state: params/layers/mlp/up/weight cannot be read: its data is damaged"
        in refused(capsys, here, f"--workdir={tmp_path}", "--prompt=1", "--tokens=2", "--step=12")
    )
    shutil.copytree(run / "checkpoints" / "3", folder / "2")
    meta = json.loads((folder / "2" / "meta" / "metadata").read_text())
    (folder / "2" / "meta" / "metadata").write_text(json.dumps(meta | {"step": 2}))
    manifest.write(epath.Path(folder / "2"))
    assert here(f"--workdir={tmp_path}", "--prompt=1 2", "--tokens=2", "--greedy") == 0
    err = capsys.readouterr().err
    assert (
        ", 12 (params/layers/mlp/up/weight cannot be read: its data is damaged), 20 (" in err
        and "\nstep 2: " in err
    )
    shutil.rmtree(folder / "12")
    shutil.rmtree(folder / "2")
    assert "has no finished checkpoint; these are not complete: 3 (" in refused(
        capsys, here, f"--workdir={tmp_path}", "--prompt=1"
    )


def test_too_few_devices(run, here, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None] * 3)
    for split, message in (
        (["--model=4"], "--model=4 is more than the 3 devices here: use --model=2"),
        (["--context=4"], "--context=4 is more than the 3 devices here: use --context=3"),
        (
            ["--context=2", "--model=2"],
            "--context=2 × --model=2 is more than the 3 devices here: use --context=1",
        ),
        (
            ["--context=2", "--model=4"],
            "--context=2 × --model=4 is more than the 3 devices here: use --model=2 --context=1",
        ),
    ):
        assert message in refused(
            capsys, here, f"--workdir={run}", "--prompt=1", "--tokens=5", *split
        )


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"greedy": True, "top_k": 4, "seed": 2, "samples": 3}, "--top_k=4 --samples=3 --seed=2"),
        ({"temperature": 0.0, "top_p": 0.5}, "--top_p=0.5"),
        ({"greedy": True, "temperature": 0.7}, "--temperature=0.7"),
        ({"greedy": True, "tokens": 7}, ""),
        ({"temperature": 0.5, "top_k": 4, "top_p": 0.5, "seed": 2, "samples": 3}, ""),
    ],
)
def test_flags_of_random_choices_that_are_not_made(given, unused):
    flags = {flag.name: flag.default for flag in generate.FLAGS} | given
    assert generate.unused_flags(types.SimpleNamespace(**flags)) == unused


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"tokenizer": {}}, "describes its tokenizer without 'kind'"),
        ({"tokenizer": {"kind": "tokenizers"}}, "describes its tokenizer without 'path'"),
        ({"config": {"model": {"depth": 3}}}, "model.depth=3 is an unknown setting"),
        (
            {"tokenizer": {"kind": "tokenizers", "path": "/nowhere/t.json", "sha256": "12" * 32}},
            "data.tokenizer=/nowhere/t.json is gone",
        ),
    ],
)
def test_metas_that_do_not_say_enough(meta, message):
    good = {"config": configs.to_dict(small.config()), "tokenizer": ByteTokenizer().describe()}
    assert generate.understand(Meta.from_json(good), "7", "run")[0] == small.config().to_store()
    with pytest.raises(ValueError, match=message):
        generate.understand(Meta.from_json(good | meta), "7", "run")


def test_flags_are_checked_without_jax(tmp_path):
    """All in one process: starting one is what takes the time."""
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    cases = {
        "--workdir is empty: use the folder": [],
        "--workdir='nowhere' does not exist: use": ["--workdir=nowhere"],
        "is not a folder: use": [f"--workdir={tmp_path}/file"],
        "has no finished checkpoint: use it first in": [f"--workdir={tmp_path}/empty"],
        "--top_p=1.5 must be above 0 and at most 1: use --top_p=1.0": ["--top_p=1.5"],
        "--top_p=0 must be above 0 and at most 1: use --top_p=0.9": ["--top_p=0"],
        "--temperature=-1 must be at least 0": ["--temperature=-1"],
        "--tokens=0 must be at least 1": ["--tokens=0"],
        f"--seed={2**32 + 5} must be at most {2**32 - 1}: use --seed=0": [f"--seed={2**32 + 5}"],
        "--cpu_devices=1 is less than --model=2": ["--cpu_devices=1", "--model=2"],
        "--cpu_devices=5 is less than --context=3 × --model=2: use --cpu_devices=6": [
            *("--cpu_devices=5", "--context=3", "--model=2")
        ],
        "--context=0 must be at least 1: use --context=1": ["--context=0"],
        "--context=5000 is more than 1024 devices: use --context=8": ["--context=5000"],
        "--top_q is an unknown flag: use --top_p": ["--top_q=1"],
    }
    program = f"""
import sys
from jaxtrain import generate_command as generate
for argv in {list(cases.values())!r}:
    assert generate.main(argv) == 2
assert "jax" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(cases)
    for line, message in zip(lines, cases, strict=True):
        assert line.startswith("error: ") and message in line


def test_a_run_is_proposed(tmp_path, monkeypatch, capsys, here):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "gpt2_124m"):
        pathlib.Path("runs", name, "checkpoints", "3").mkdir(parents=True)
    assert "use the folder of a training run, such as --workdir=runs/gpt2_124m" in refused(
        capsys, here, "--workdir=runs/gpt2"
    )


def test_a_model_is_split_in_layers_of_each_kind():
    kinds = {"model.pattern": ("full", "odd"), "model.kinds": ("odd.heads=3", "odd.kv_heads=3")}
    model = configs.replace(small.SMALL, kinds).resolve().model
    flags = types.SimpleNamespace(tokens=1, model=2)
    with pytest.raises(
        configs.UsageError, match="--model=2 does not divide model.heads=3: use .*=1"
    ):
        generate.check_model(model, 3, flags)
