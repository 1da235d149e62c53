"""Folders that appear complete or not at all. test_families.py exports the tensors of each family,
tests/test_convert.py checkpoints."""

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import ROOT, small
from support.hf_models import stored_array

from jaxtrain import convert
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.steps import Meta
from jaxtrain.config import Config, to_dict
from jaxtrain.hf import exporting
from jaxtrain.hf.exporting import export_folder
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.tensor_rules import PublishedTensor, TensorRule
from jaxtrain.training.state import initial_state, stored_shapes
from jaxtrain.training.step import make_step


def exported(target, numbers, dtype="F32", **log):
    """Exports one tensor. log: functions as of export_folder"""
    tensor = PublishedTensor("x", numbers.shape, (TensorRule("x", "array"),))
    arrays = {"array": stored_array(numbers, numbers.shape)}
    export_folder(target, {"a": 1}, [tensor], arrays, {"x": dtype}, 10**9, {}, **log)


@pytest.mark.parametrize(
    "value, message",
    [
        (np.nan, "x has numbers that are not finite"),
        (np.inf, "x has numbers that are not finite"),
        (1e5, r"x has 100000, which float16 does not have: use --dtype=bfloat16"),
    ],
)
def test_numbers_that_no_model_has(tmp_path, value, message):
    with pytest.raises(HfError, match=message):
        exported(tmp_path / "new" / "out", np.array([1, value], np.float32), "F16")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exporting, "write_synced", full)
    with pytest.raises(HfError) as raised:
        exported(tmp_path / "out", np.ones(3, np.float32))
    assert str(raised.value) == f"{tmp_path / 'out'} cannot be written (No space left on device)"
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HfError, match=r"file/out cannot be written \(Not a directory\)"):
        exported(tmp_path / "file" / "out", np.ones(3, np.float32))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(HfError, match="link exists already: name a folder that does not"):
        exported(tmp_path / "link", np.ones(3, np.float32))


EXPORT = """
import pathlib, sys
sys.path[:0] = ["tests", "tests/hf"]
import test_exporting
test_exporting.exporting.BLOCK_BYTES = 160
print("ready", flush=True)
test_exporting.exported(
    pathlib.Path(sys.argv[1]),
    test_exporting.MANY,
    log=lambda line: print(line, flush=True),
    progress=lambda done, total: print("row", flush=True),
)
"""
MANY = np.arange(4000, dtype=np.float32).reshape(100, 40)


@pytest.mark.full
def test_kill_9_leaves_no_half_folder(tmp_path):
    """An export that is killed after some rows leaves a complete folder or none, and the next one
    removes what it has left."""
    target, hidden = tmp_path / "out", tmp_path / ".out.unfinished"
    random = np.random.default_rng(0)
    removed = 0
    for rows in [1, 60, 100, 100, 100]:
        left_before = hidden.exists() and any(hidden.iterdir())
        process = subprocess.Popen(
            [sys.executable, "-c", EXPORT, str(target)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        lines = [process.stdout.readline()]
        while lines.count("row\n") < rows:
            lines.append(process.stdout.readline())
            assert lines[-1], "the export has ended too early"
        time.sleep(random.uniform(0, 0.003))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        if left_before and rows:
            assert f"{hidden} was left by an export that did not finish" in "".join(lines)
            removed += 1
        if target.exists():
            assert np.array_equal(load_file(target / "model.safetensors")["x"], MANY)
            assert json.loads((target / "config.json").read_text()) == {"a": 1}
            shutil.rmtree(target)
    assert removed >= 2
    exported(target, MANY)
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_in_place_of_the_hidden_folder_is_removed_alone(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / ".out.unfinished").symlink_to("other")
    exported(tmp_path / "out", MANY)
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]
    assert os.listdir(tmp_path / "other") == ["file"]


def test_two_exports_to_one_folder(tmp_path):
    second = []

    def progress(done, total):
        with pytest.raises(HfError, match="out is being written by another process") as raised:
            exported(tmp_path / "out", MANY)
        second.append(raised.value)

    exported(tmp_path / "out", MANY, progress=progress)
    assert second and os.listdir(tmp_path) == ["out"]


# --- checkpoints of meshes ------------------------------------------------------------------------

TIED = {"model.tied_embeddings": True, "model.layers": 3}
MIXTRAL = {
    "model.experts": 4,
    "model.expert_width": 24,
    "model.router_bias": False,
    "model.router_normalize": "always",
}
ZERO_3 = {"parallel.zero": 3}
MESHES = {
    "data 2 · stage 2 · model 2, ZeRO-3, tied": ((2, 2, 2), TIED, ZERO_3),
    "two chunks a stage": (
        (1, 2, 2),
        {"model.layers": 5},
        {"pipeline.schedule": "interleaved", "pipeline.repeats": 2},
    ),
    "an expert axis": ((2, 2, 1), MIXTRAL, {"mesh.expert": 2}),
    "independent replicas": (
        (2, 1, 2),
        {"model.layers": 2},
        {"mesh.replica": 2, "train.diloco_inner_steps": 2},
    ),
}


def save_initial(config: Config, workdir: pathlib.Path) -> None:
    """Saves the state of a seed on the config's mesh as step 0 of a run."""
    step = make_step(config, small.mesh_of(config))
    state = initial_state(step.layout, step.optimizer, 0)
    tokenizer = {"kind": "none", "vocab_size": config.model.vocab_size}
    saves = Checkpointer(workdir / "checkpoints", stored_shapes(step.layout, step.optimizer))
    saves.save(0, state, vars(Meta(to_dict(config), tokenizer=tokenizer)))
    saves.close()


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_s_checkpoint_is_that_of_one_device(tmp_path, name):
    """Byte for byte, all files."""
    mesh, model, layout = MESHES[name]
    save_initial(small.config(changes=model), tmp_path / "one")
    save_initial(small.config(mesh, microbatches=2, changes=model | layout), tmp_path / "many")
    exports = []
    for run in ("one", "many"):
        words = ["to_hf", f"--workdir={tmp_path / run}", "--max_shard=20KB", "--dtype=bfloat16"]
        assert convert.main([*words, str(tmp_path / f"{run} out")]) == 0
        files = sorted((tmp_path / f"{run} out").iterdir())
        exports.append({path.name: path.read_bytes() for path in files})
    assert exports[0] == exports[1] and len(exports[0]) > 3
