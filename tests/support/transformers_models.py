"""Random small models of transformers, and what transformers computes with them.

    python transformers_models.py make FOLDER…   FOLDER/config.json → a model in each folder, and
                                                 what transformers computes with it
    python transformers_models.py read FOLDER…   the logits of each FOLDER/model.safetensors
    python transformers_models.py predict FOLDER…
                                                 the loss of each FOLDER's prediction module
    python transformers_models.py record FILE    the figures of hf_models.CONFIGS, for tests without
                                                 transformers

A folder with a config.json gets

    model.safetensors     random weights (hf_reference.py)
    reference.npz         "logits" [B, T, V] and "loss" of the batch, "continuation N" of prompts
    gradients.safetensors the loss's gradient by the published names; NaN: no parameter
    error.txt             instead of these, what transformers says against the config

Runs in a process of its own with the packages of requirements/transformers.txt; jax is not
imported. One process serves many models: torch takes seconds to start.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from safetensors.numpy import load_file, save_file

from support import hf_models, hf_reference

# Beside a config.json, if at all: {"seed", "dtype"} of the weights; "saved": the config.json is
# replaced by the one that transformers writes; "everything": false for logits and loss alone.
SETTINGS = "case.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}  # of its "dtype"
# Families that transformers does not have, and those that compute the same.
COUNTERPARTS = {"kimi_k2": "deepseek_v3"}
# Float32 and float64 must agree to this: else a choice of experts, or of a token, hangs on rounding
# and another seed is taken.
ROUNDING = 3e-6
SEEDS = 20


def load(folder: pathlib.Path) -> Any:
    """The folder's model in float32. Fails for tensors that are missing or too many."""
    import torch
    import transformers

    config = read_config(folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        experts_implementation="eager",  # the others know no float64
        output_loading_info=True,
    )
    wrong = {kind: names for kind, names in info.items() if names}
    assert not wrong, f"{folder}: {wrong}"
    model.generation_config = transformers.GenerationConfig()  # none of its tokens is an end
    return model.eval()


def read_config(folder: pathlib.Path) -> Any:
    """transformers' config of a folder's config.json."""
    import transformers

    values = json.loads((folder / "config.json").read_text())
    kind = COUNTERPARTS.get(values["model_type"], values["model_type"])
    values["architectures"] = None
    return transformers.AutoConfig.for_model(**values | {"model_type": kind})


def shapes_of(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """The published tensors of a folder's config.json: name → shape."""
    import torch
    import transformers

    config = read_config(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {name: tensor.shape for name, tensor in published(model).items()}


def published(model: Any) -> dict[str, np.ndarray]:
    """A model's tensors by the names of its files."""
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        files = pathlib.Path(saved).glob("*.safetensors")
        return {name: array for file in files for name, array in load_file(file).items()}


def make(folder: pathlib.Path) -> None:
    """Writes the files of the docstring above, for one folder with a config.json."""

    settings = folder / SETTINGS
    settings = json.loads(settings.read_text()) if settings.exists() else {}
    shapes, everything = shapes_of(folder), settings.get("everything", True)
    for attempt in range(SEEDS):
        seed = settings.get("seed", 0) + 1000 * attempt
        tensors = hf_reference.weights(seed, shapes, read_config(folder).model_type)
        if dtype := settings.get("dtype"):
            tensors = {name: tensor.astype(DTYPES[dtype]) for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model = load(folder)
        found = computed(model, everything)
        exact = computed(load(folder).double(), everything)
        if all(close(found[name], exact[name]) for name in found):
            break
    else:
        raise RuntimeError(f"{folder}: no seed of {SEEDS} whose figures do not hang on rounding")
    if settings.get("saved"):
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            shutil.copy(pathlib.Path(saved) / "config.json", folder)
    np.savez(folder / "reference.npz", seed=seed, **found)
    if everything:
        save_file(gradients(model), folder / "gradients.safetensors")


def close(found: np.ndarray, exact: np.ndarray) -> bool:
    """Whether float32 figures are those of float64; of token ids, whether they are the same."""
    if found.dtype.kind == "i":
        return bool((found == exact).all())
    return bool(np.abs(found - exact).max() <= ROUNDING * np.abs(exact).max())


def computed(model: Any, everything: bool) -> dict[str, np.ndarray]:
    """The logits and the loss of the batch, and the greedy continuations of its prompts."""
    import torch

    ids = torch.tensor(hf_reference.tokens(model.config.vocab_size))
    with torch.no_grad():
        logits = model(ids).logits
        found = {"logits": logits[:, :-1].numpy(), "loss": next_token_loss(logits, ids).numpy()}
        for row, length in enumerate(hf_reference.PROMPTS if everything else ()):
            prompt = ids[row : row + 1, :length]
            longer = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),  # no token is padding
                generation_config=greedy(),
            )
            found[f"continuation {row}"] = longer[0, length:].numpy()
    return found


def greedy() -> Any:
    """The rule of generation: the likeliest of all tokens, to the last one."""
    import transformers

    return transformers.GenerationConfig(
        do_sample=False, max_new_tokens=hf_reference.CONTINUATION, pad_token_id=0
    )


def next_token_loss(logits: Any, ids: Any) -> Any:
    """The mean over all tokens but the first of each sequence, in nats."""
    import torch

    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: Any) -> dict[str, np.ndarray]:
    """The gradients of the loss by the published names. They take the parameters' places, so that
    transformers names them."""
    import torch

    ids = torch.tensor(hf_reference.tokens(model.config.vocab_size))
    # torch leaves the padding's embedding as it is, even where it is a token like any other
    model.get_input_embeddings().padding_idx = None
    next_token_loss(model(ids).logits, ids).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
    return published(model)


def read(folder: pathlib.Path) -> None:
    """Writes logits.npy, of the batch, into a folder with a model."""
    np.save(folder / "logits.npy", computed(load(folder), everything=False)["logits"])


def predict(folder: pathlib.Path) -> None:
    """Writes mtp_loss.npy: the loss of the batch's tokens but one, by the folder's only module of
    multi-token prediction."""
    import torch
    import transformers
    from transformers.modeling_layers import MtpModel

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    # transformers finds a module by the layer numbers of the models that it knows
    names = [rf"model\.layers\.{model.config.num_hidden_layers}\."]
    model._keys_to_ignore_on_load_unexpected = names
    (module,) = MtpModel.from_pretrained(model).eval().layers
    ids = torch.tensor(hf_reference.tokens(model.config.vocab_size))
    with torch.no_grad():
        stream = model.model(ids[:, :-2]).last_hidden_state
        embeddings = model.model.embed_tokens(ids[:, 1:-1])
        positions = torch.arange(1, ids.shape[1] - 1)[None]
        mask = torch.full([positions.shape[1]] * 2, float("-inf")).triu(1)[None, None]
        rotation = model.model.rotary_emb(embeddings, positions)
        stream = module(embeddings, stream, rotation, mask, positions, None)
        logits = model.lm_head(stream).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 2:].flatten())
    np.save(folder / "mtp_loss.npy", loss.numpy())


def record(file: pathlib.Path) -> None:
    """Writes, for each of hf_models.CONFIGS, the seed, the loss, the last tokens' logits and the
    digests of gradients."""
    figures = {}
    with tempfile.TemporaryDirectory() as place:
        for name, values in hf_models.CONFIGS.items():
            folder = pathlib.Path(place) / "model"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(values))
            print(name)
            make(folder)
            reference = np.load(folder / "reference.npz")
            figures |= {
                f"{name}/seed": reference["seed"],
                f"{name}/loss": reference["loss"],
                f"{name}/logits": reference["logits"][:, -1],
                f"{name}/gradients": hf_reference.digest(
                    load_file(folder / "gradients.safetensors")
                ),
            }
            shutil.rmtree(folder)
    np.savez_compressed(file, **figures)


def main(command: str, *words: str) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    folders = [pathlib.Path(word) for word in words]
    if command == "record":
        return record(*folders)
    for folder in folders:
        try:
            {"make": make, "read": read, "predict": predict}[command](folder)
        except Exception as error:  # of any kind: what a config is refused with
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
