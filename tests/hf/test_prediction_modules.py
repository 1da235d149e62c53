"""Modules of multi-token prediction in and out: their tensors, the copies of both tables that
published files hold beside them, and models that lack them or are not to have them."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import hf_reference, published, safetensors_files
from support.hf_imported import complete, imported
from support.hf_models import CONFIGS

from jaxtrain import convert
from jaxtrain.config import Config, ConfigError
from jaxtrain.hf import importing
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.model_config import differing, write_model
from jaxtrain.hf.run_config import read_published, started_from

CASES = json.loads((pathlib.Path(published.__file__).parent / "published.json").read_text())
FIELD = "num_nextn_predict_layers"
# a dense layer, two with experts, and the module
GLM = CONFIGS["glm4_moe"] | {FIELD: 1}
MODULE = "model.layers.3"
COPIES = {
    f"{MODULE}.embed_tokens.weight": "model.embed_tokens.weight",
    f"{MODULE}.shared_head.head.weight": "lm_head.weight",
}


def on_disk(given: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The tensors of transformers' DeepSeek-V3 and of its prediction modules ("mtp.0.…") as files
    name them, which have each expert's matrices on their own."""
    tensors = {}
    for name, array in given.items():
        if name.startswith("mtp."):
            _, depth, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            name = f"model.layers.{layers + int(depth)}.{rest}"
        before, fused, matrix = name.partition(".mlp.experts.")
        if not fused:
            tensors[name] = array
            continue
        for expert, weights in enumerate(array):
            parts = {"down_proj": weights}
            if matrix == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(weights, 2), strict=True))
            tensors |= {f"{before}{fused}{expert}.{part}.weight": a for part, a in parts.items()}
    return tensors


def test_the_modules_of_transformers():
    """Parameters by the rules are those whose losses and gradients agree with transformers'
    MtpLayer (tests/models/test_published.py), for a chain of two modules."""
    case = CASES["deepseek_v3, predictions"]
    values = {
        "model_type": case["kind"],
        "vocab_size": published.VOCABULARY,
        "num_key_value_heads": case["config"]["num_attention_heads"],
        **case["config"],
        FIELD: case["mtp_depth"],
    }
    given = published.weights(case["shapes"])
    tensors = on_disk(given, case["config"]["num_hidden_layers"])
    model = imported(values, lambda shapes: tensors, {})
    expected = published.config_of(case["kind"], case["config"], case["mtp_depth"])
    assert list(differing(model.config.model, expected.model)) == []
    parameters = published.parameters_of(case["kind"], expected.model, given)
    assert jax.tree.structure(model.plain) == jax.tree.structure(parameters)
    jax.tree.map(np.testing.assert_array_equal, model.plain, parameters)


# --- folders --------------------------------------------------------------------------------------


def tensors_of(values: dict) -> dict[str, np.ndarray]:
    """Random tensors of a config.json's model, with the copies."""
    return complete(values, functools.partial(hf_reference.weights, 0))


def write(folder: pathlib.Path, tensors: dict, values: dict = GLM) -> pathlib.Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    safetensors_files.write(folder / "model.safetensors", tensors)
    return folder


def run(*words: object) -> int:
    """The command's exit status, in this process."""
    return convert.main([str(word) for word in words])


def there_and_back(folder: pathlib.Path, tmp_path: pathlib.Path, *flags: str) -> pathlib.Path:
    """The folder that an import and an export leave."""
    work, out = tmp_path / "run", tmp_path / "out"
    assert run("from_hf", folder, f"--workdir={work}", *flags) == 0
    assert run("to_hf", out, f"--workdir={work}") == 0
    return out


def depth(folder: pathlib.Path) -> int:
    return json.loads((folder / "config.json").read_text())[FIELD]


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "kimi_k2"])
def test_there_and_back(tmp_path, kind):
    values = CONFIGS[kind] | {FIELD: 2}
    tensors = tensors_of(values)
    folder = write(tmp_path / "model", tensors, values)
    out = there_and_back(folder, tmp_path)
    got = load_file(out / "model.safetensors")
    assert got.keys() == tensors.keys() and depth(out) == 2
    assert all(got[name].tobytes() == array.tobytes() for name, array in tensors.items())
    ends = [name.removeprefix("model.layers.").partition(".")[2] for name in got]
    assert sum(end.startswith(("eh_proj.", "shared_head.")) for end in ends) == 6
    assert ends.count("embed_tokens.weight") == 3


def test_a_folder_without_copies(tmp_path):
    tensors = {name: array for name, array in tensors_of(GLM).items() if name not in COPIES}
    out = there_and_back(write(tmp_path / "model", tensors), tmp_path)
    assert load_file(out / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_is_none(tmp_path, capsys, copy):
    tensors = tensors_of(GLM)
    tensors[copy] = tensors[copy].copy()
    tensors[copy][-1, -1] += 1
    folder = write(tmp_path / "model", tensors)
    assert run("from_hf", folder, f"--workdir={tmp_path / 'run'}") == 2
    expected = f"{copy} differs from {COPIES[copy]}, which the model uses in its place\n"
    assert capsys.readouterr().err == f"error: {folder}/model.safetensors: {expected}"
    assert not (tmp_path / "run").exists()


def test_a_copy_of_another_shape(tmp_path):
    tensors, copy = tensors_of(GLM), f"{MODULE}.embed_tokens.weight"
    tensors[copy] = tensors[copy][1:]
    model = read_published(write(tmp_path / "model", tensors))
    with pytest.raises(HfError, match=rf"{copy} is \[\d+, 16\], not \[\d+, 16\] by config.json"):
        importing.open_weights(model, Config(model=model.model).fill())


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("lacking", ["", "model."])
def test_files_without_the_modules(tmp_path, capsys, said, lacking):
    """transformers, whose default is one module, saves none."""
    tensors = {n: a for n, a in tensors_of(GLM).items() if not n.startswith(f"{MODULE}.")}
    named = {name.removeprefix(lacking): array for name, array in tensors.items()}
    values = {name: value for name, value in GLM.items() if name != FIELD or said}
    out = there_and_back(write(tmp_path / "model", named, values), tmp_path)
    note = f"note: {FIELD}=1 is read as 0: the files have none of its tensors\n"
    assert (note in capsys.readouterr().out) == said
    assert len(load_file(out / "model.safetensors")) == len(tensors) and depth(out) == 0


@pytest.mark.parametrize("lacking", [None, f"{MODULE}.eh_proj.weight"])
def test_modules_that_are_left_out(tmp_path, capsys, lacking):
    """By a flag, whatever the files have of them; a part of a module is no module."""
    tensors = {name: array for name, array in tensors_of(GLM).items() if name != lacking}
    folder = write(tmp_path / "model", tensors)
    out = there_and_back(folder, tmp_path, "--config.model.mtp_depth=0")
    said = f"model.mtp_depth=0 leaves out prediction modules: {folder}/config.json says 1"
    assert f"note: {said}\n" in capsys.readouterr().out
    assert not any(name.startswith(MODULE) for name in load_file(out / "model.safetensors"))
    assert depth(out) == 0
    status = run("from_hf", folder, f"--workdir={tmp_path / 'complete'}")
    assert status == (2 if lacking else 0)
    assert not lacking or f"{lacking} is missing" in capsys.readouterr().err


def test_modules_without_experts(tmp_path):
    """Their layers come behind all others, and first_k_dense_replace counts them."""
    values = GLM | {"first_k_dense_replace": 9}
    tensors = tensors_of(values)
    assert f"{MODULE}.mlp.gate_proj.weight" in tensors
    out = there_and_back(write(tmp_path / "model", tensors, values), tmp_path)
    assert load_file(out / "model.safetensors").keys() == tensors.keys() and depth(out) == 1
    written = write_model(Config(model=read_published(out).model).fill().model, None, 8)
    assert (written["model_type"], written["first_k_dense_replace"]) == ("glm4_moe", 4)


def test_tensors_that_a_model_has_no_part_for(tmp_path, capsys):
    values = CONFIGS["qwen3_next"]
    tensors, note = tensors_of(values), "note: mtp.* is left out: "
    there_and_back(write(tmp_path / "model", tensors, values), tmp_path)
    assert note not in capsys.readouterr().out
    more = tensors | {"mtp.fc.weight": np.ones((2, 2), np.float32)}
    (tmp_path / "more").mkdir()
    out = there_and_back(write(tmp_path / "more" / "model", more, values), tmp_path / "more")
    assert note in capsys.readouterr().out
    assert load_file(out / "model.safetensors").keys() == tensors.keys()


def test_modules_that_nobody_asked_for(tmp_path):
    """In a file whose config.json has none, and in a run of a model that has none."""
    folder = write(tmp_path / "model", tensors_of(GLM), GLM | {FIELD: 0})
    model = read_published(folder)
    with pytest.raises(HfError, match=rf"{MODULE}\.\S+ is no tensor of a glm4_moe"):
        importing.open_weights(model, Config(model=model.model).fill())
    with pytest.raises(ConfigError, match=r"mtp_depth=1 contradicts .* use --config.*_depth=0"):
        started_from(model, Config(), [("model.mtp_depth", "1")])
