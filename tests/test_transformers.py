"""Published models against transformers: a random small model of each family has its logits after
from_hf, and transformers has them again after to_hf. Logits agree to 1e-5 of their largest."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import ROOT
from support.transformers_models import CASES, TOKENS

from jaxtrain import convert
from jaxtrain.checkpoint.restoring import load_parameters
from jaxtrain.checkpoint.steps import Meta, read_meta
from jaxtrain.models import transformer

PACKAGES = ROOT / ".venv-transformers"
INSTALL_COMMAND = (
    f"python -m pip install --no-deps --target {PACKAGES.name} -r requirements-transformers.txt"
)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (PACKAGES / "torch").exists(), reason=f"no transformers here: {INSTALL_COMMAND}"
    ),
]


def in_transformers(command: str, folder: pathlib.Path) -> None:
    """Runs transformers_models.py with the packages of PACKAGES."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
    script = ROOT / "tests" / "support" / "transformers_models.py"
    words = [sys.executable, str(script), command, str(folder)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models")
    in_transformers("make", folder)
    return folder


def our_logits(workdir: pathlib.Path) -> np.ndarray:
    """Float32 logits of a run's checkpoint of step 0."""
    config = Meta.from_json(read_meta(workdir / "checkpoints", 0)).stored_config().resolve()
    layout, params = load_parameters(
        workdir / "checkpoints", 0, config.model, config.precision, independent_replicas=False
    )
    with jax.set_mesh(layout.mesh):
        logits = jax.jit(
            lambda params: transformer.logits(layout.parts, params, TOKENS, dtype=jnp.float32)
        )(params)
    return np.asarray(logits)[..., : config.model.vocab_size]


def error(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_logits_of_transformers(models, tmp_path, name):
    work, out = tmp_path / "run", tmp_path / "out"
    flags = [f"--workdir={work}", "--config.precision.compute=float32"]
    assert convert.main(["from_hf", str(models / name), *flags]) == 0
    expected = np.load(models / name / "logits.npy")
    assert error(our_logits(work), expected) < 1e-5
    assert convert.main(["to_hf", str(out), f"--workdir={work}"]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (models / name, out))
    assert before.keys() == after.keys()
    assert all(before[tensor].tobytes() == after[tensor].tobytes() for tensor in before)
    # without the config.json that the run began with, a new one is written
    (work / "hf" / "config.json").unlink()
    assert convert.main(["to_hf", str(tmp_path / "new"), f"--workdir={work}"]) == 0
    for folder in (out, tmp_path / "new"):
        in_transformers("logits", folder)
        assert error(np.load(folder / "logits.npy"), expected) < 1e-6
