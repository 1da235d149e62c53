"""Published models against transformers: random small models of each family (hf_models.CONFIGS)
there and back by jaxtrain convert.

Of each model: logits, gradients of every tensor, and greedy continuations after from_hf; the same
bytes after to_hf, which transformers reads with the same logits; older and newer forms of its
config.json. tests/hf/test_reference.py has the figures that need no transformers.
"""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import ROOT, hf_reference, in_transformers, small
from support.hf_imported import (
    complete,
    continuations,
    gradient_errors,
    imported_folder,
    logits_of,
    restored,
)
from support.hf_models import CONFIGS, older

from jaxtrain import convert
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import load_parameters, restore
from jaxtrain.checkpoint.steps import AVERAGE, PARAMETERS, Meta, read_meta
from jaxtrain.hf.fields import read_json
from jaxtrain.hf.model_config import read_model
from jaxtrain.training.state import stored_shapes
from jaxtrain.training.step import make_step

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not in_transformers.has("torch"),
        reason=f"no transformers here: {in_transformers.INSTALL_COMMAND}",
    ),
]
FLOAT32 = "precision.compute=float32"
NEWER, OLDER, WRITTEN, FROM_OLDER = "newer", "older", "written", "from older"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> pathlib.Path:
    """A folder with a model of each name, and what transformers computes with it."""
    folder = tmp_path_factory.mktemp("models")
    for name, values in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    in_transformers.run_script("transformers_models.py", "make", *folder.iterdir())
    return folder


@pytest.fixture(scope="module")
def round_trips(models, tmp_path_factory) -> pathlib.Path:
    """A folder with what to_hf makes of each name's run, "NAME newer" (as the run began), "NAME
    written" (with a config.json that the command writes) and "NAME from older" (of a run from an
    older form), and of the model in the older form; with transformers' logits of each."""
    folder, runs = tmp_path_factory.mktemp("round_trips"), tmp_path_factory.mktemp("runs")
    for name, values in CONFIGS.items():
        source = folder / f"{name} {OLDER}"
        shutil.copytree(models / name, source)
        (source / "config.json").write_text(json.dumps(older(values)))
        for form, model in ((NEWER, models / name), (FROM_OLDER, source)):
            run = runs / f"{name} {form}"
            convert.main(["from_hf", str(model), f"--workdir={run}"])
            convert.main(["to_hf", str(folder / run.name), f"--workdir={run}"])
        run = runs / f"{name} {NEWER}"
        (run / "hf" / "config.json").unlink()
        convert.main(["to_hf", str(folder / f"{name} {WRITTEN}"), f"--workdir={run}"])
    in_transformers.run_script("transformers_models.py", "read", *folder.iterdir())
    return folder


def error(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_continuations(models, tmp_path, name):
    """Of the checkpoint that from_hf writes."""
    assert convert.main(["from_hf", str(models / name), f"--workdir={tmp_path}"]) == 0
    config, layout, params = restored(tmp_path)
    expected = np.load(models / name / "reference.npz")
    assert error(logits_of(config, layout, params), expected["logits"]) < 1e-5
    for row, ids in enumerate(continuations(config, layout, params)):
        assert ids == list(expected[f"continuation {row}"])


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(models, name):
    wrong = {tensor: e for tensor, e in gradient_errors(models / name).items() if e > 1e-4}
    assert not wrong


@pytest.mark.parametrize("form", [NEWER, WRITTEN, FROM_OLDER])
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(models, round_trips, name, form):
    before, folder = load_file(models / name / "model.safetensors"), round_trips / f"{name} {form}"
    after = load_file(folder / "model.safetensors")
    assert_read(folder, models / name)
    kind = read_json(folder / "config.json")["model_type"]
    if kind != CONFIGS[name]["model_type"]:  # the first family that can hold it, such as a Phi-3's
        assert form == WRITTEN
        return
    assert before.keys() == after.keys()
    for tensor, numbers in before.items():
        assert (numbers.dtype, numbers.shape) == (after[tensor].dtype, after[tensor].shape)
        # a config.json that is written anew has rotated columns in pairs
        assert form == WRITTEN or numbers.tobytes() == after[tensor].tobytes(), tensor


def assert_read(folder: pathlib.Path, model: pathlib.Path) -> None:
    """transformers has the model's logits for the folder, but for the rounding of frequencies that
    config.json has in other words."""
    error_text = folder / "error.txt"
    assert not error_text.exists(), error_text.read_text()
    assert error(np.load(folder / "logits.npy"), np.load(model / "reference.npz")["logits"]) < 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_older_form(models, round_trips, name):
    """transformers reads the older form as the same model, and so does jaxtrain."""
    folder = round_trips / f"{name} {OLDER}"
    assert_read(folder, models / name)
    read = lambda folder: read_model(read_json(folder / "config.json"), "config.json")[1]
    assert read(folder) == read(models / name)


@pytest.mark.parametrize("name", ["deepseek_v3 with yarn", "glm4_moe"])
def test_prediction_modules(tmp_path, name):
    """transformers reads the module of an export, and its loss is that of a training step."""
    folder, out, run = tmp_path / "model", tmp_path / "out", tmp_path / "run"
    values = CONFIGS[name] | {"num_nextn_predict_layers": 1}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    tensors = complete(values, functools.partial(hf_reference.weights, 0))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert convert.main(["from_hf", str(folder), f"--workdir={run}"]) == 0
    assert convert.main(["to_hf", str(out), f"--workdir={run}"]) == 0
    in_transformers.run_script("transformers_models.py", "predict", out)
    assert not (error_text := out / "error.txt").exists(), error_text.read_text()
    batch = {
        "mesh.data": 1,
        "data.batch_size": hf_reference.SEQUENCES,
        "data.sequence_length": hf_reference.LENGTH - 1,
    }
    model = imported_folder(out, batch)
    step = make_step(model.config, small.mesh_of(model.config))
    tokens = hf_reference.tokens_of(model.config)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rows = {"tokens": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}
    with jax.set_mesh(step.mesh):
        params = small.from_plain(step.layout, model.plain)
        placed = small.place_batch(step, model.config, rows)
        losses = jax.device_get(step.gradients(params, placed)).losses
    np.testing.assert_allclose(losses.further["mtp_loss"], np.load(out / "mtp_loss.npy"), rtol=1e-5)


def test_an_exported_average(tmp_path):
    """transformers' logits of `to_hf --ema` are those of the average, and not of the parameters."""
    folder, run = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    tensors = complete(CONFIGS["llama"], functools.partial(hf_reference.weights, 0))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    averaged = [f"--config.{s}" for s in ("optimizer.ema_decay=0.9", "mesh.data=1", FLOAT32)]
    assert convert.main(["from_hf", str(folder), f"--workdir={run}", *averaged]) == 0
    meta = read_meta(run / "checkpoints", 0)
    config = Meta.from_json(meta).stored_config().resolve()
    step = make_step(config, small.mesh_of(config))
    stored = stored_shapes(step.layout, step.optimizer)
    state = restore(run / "checkpoints", 0, step.abstract_state(), stored)
    state = dataclasses.replace(state, ema=jax.tree.map(lambda a: a * 1.1, state.ema))
    saves = Checkpointer(run / "checkpoints", stored)
    saves.save(1, state, meta | {"step": 1})
    saves.close()
    logits = {}
    for flags in ([], ["--ema"]):
        out = tmp_path / f"out{flags}"
        assert convert.main(["to_hf", str(out), f"--workdir={run}", *flags]) == 0
        in_transformers.run_script("transformers_models.py", "read", out)
        assert not (out / "error.txt").exists(), (out / "error.txt").read_text()
        group = AVERAGE if flags else PARAMETERS
        layout, params = load_parameters(
            run / "checkpoints", 1, config.model, config.precision, group
        )
        logits[group] = np.load(out / "logits.npy")
        assert error(logits_of(config, layout, params), logits[group]) < 1e-5
    assert error(*logits.values()) > 1e-2


def test_what_is_recorded():
    """reference.npz has every model."""
    recorded = np.load(ROOT / "tests" / "hf" / "reference.npz")
    assert {name.removesuffix("/loss") for name in recorded if name.endswith("/loss")} == {*CONFIGS}
