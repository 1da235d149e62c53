"""`python -m jaxtrain.convert`: a published model in and out, with fixtures that numpy has made;
and what is refused, with nothing written. test_transformers.py compares with transformers."""

import json
import os
import pathlib
import shutil
import time

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from support import safetensors_files, train_runs
from support.hf_imported import complete
from support.hf_models import CONFIGS, llama_tensors, write_llama

from jaxtrain import convert
from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.restoring import load_parameters
from jaxtrain.checkpoint.steps import Meta, fault, read_meta
from jaxtrain.config.errors import UsageError
from jaxtrain.data.tokenizer import prompt_ids
from jaxtrain.generate_command import understand
from jaxtrain.hf.quantization import E2M1
from jaxtrain.hf.safetensors_folder import INDEX
from jaxtrain.hf.source_files import SLOW_TOKENIZERS, SMALL_FILES
from jaxtrain.run.files import CONFIG_FILE

BYTES = "--config.data.tokenizer=bytes"


def run(*words: object) -> int:
    """The command's exit status, in this process."""
    try:
        return convert.main([str(word) for word in words])
    except SystemExit as end:
        return end.code


def tensors_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {
        name: array
        for file in folder.glob("*.safetensors")
        for name, array in load_file(file).items()
    }


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> pathlib.Path:
    """A folder with a published model, and a run in it that starts from the model."""
    folder = tmp_path_factory.mktemp("imported")
    write_llama(folder / "model")
    (folder / "model" / "generation_config.json").write_text('{"temperature": 0.6}')
    assert run("from_hf", folder / "model", f"--workdir={folder / 'run'}", BYTES) == 0
    return folder


# --- in -------------------------------------------------------------------------------------------


def test_a_checkpoint_of_step_0(imported):
    checkpoints = imported / "run" / "checkpoints"
    assert fault(checkpoints / "0") == ""
    meta = Meta.from_json(read_meta(checkpoints, 0))
    config = meta.stored_config()
    assert (meta.step, meta.position, meta.checksum) == (0, 0, "")
    assert meta.tokenizer == {"kind": "bytes"}
    assert not (imported / "run" / "run.lock").exists()
    layout, params = load_parameters(checkpoints, 0, config.model, config.precision)
    published = tensors_of(imported / "model")
    query = np.asarray(params["layers"]["attention"]["query"]["weight"], np.float32)
    expected = published["model.layers.2.self_attn.q_proj.weight"].T
    compute = jax.numpy.dtype(config.precision.compute)
    assert np.array_equal(query[2], expected.astype(compute).astype(np.float32))


@pytest.mark.full
def test_training_continues_it(imported, tmp_path):
    """By the config.json that the command has written, which names the folder too; batches may be
    others, since no data was seen."""
    work = tmp_path / "run"
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a batch is cut into microbatches. " * 200)
    words = [f"--workdir={work}", f"--config.data.source={corpus}", BYTES]
    assert run("from_hf", imported / "model", *words) == 0
    flags = train_runs.settings(
        train__steps=1, train__sample_tokens=0, data__batch_size=8, data__sequence_length=32
    )
    words = ["jaxtrain.train", f"--config={work / CONFIG_FILE}", "--cpu_devices=1", *flags]
    with train_runs.running(tmp_path, *words) as command:
        done = command.end()
    assert "continuing from step 0\n" in done.out and "step 1/1 · loss" in done.out
    assert train_runs.checkpoints(work) == [0, 1]
    assert run("to_hf", tmp_path / "trained", f"--workdir={work}") == 0
    before, after = tensors_of(imported / "model"), tensors_of(tmp_path / "trained")
    assert before.keys() == after.keys()
    name = "model.layers.1.mlp.up_proj.weight"
    # the first step of the warm-up moves every number by at most its learning rate
    assert 0 < np.abs(after[name] - before[name]).max() < 1e-3
    assert run("to_hf", tmp_path / "first", f"--workdir={work}", "--step=0") == 0
    assert_same(tensors_of(tmp_path / "first"), before)


def test_independent_replicas_begin_alike(imported, tmp_path):
    flags = ["--config.train.diloco_inner_steps=2", "--config.mesh.replica=2"]
    assert run("from_hf", imported / "model", f"--workdir={tmp_path / 'run'}", *flags) == 0
    assert fault(tmp_path / "run" / "checkpoints" / "0") == ""
    assert run("to_hf", tmp_path / "out", f"--workdir={tmp_path / 'run'}") == 0
    assert_same(tensors_of(tmp_path / "out"), tensors_of(imported / "model"))


def test_names_without_prefix_and_a_tied_matrix(tmp_path):
    """Files of older versions, and of a model without its head, lack the prefix; files of tied
    models may have the matrix twice, and then an export has, too."""
    tensors = write_llama(tmp_path / "model")
    embedding = tensors["model.embed_tokens.weight"]
    write_llama(tmp_path / "model", lm_head_weight=embedding)
    tied = CONFIGS["llama"] | {"tie_word_embeddings": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(tied))
    assert run("from_hf", tmp_path / "model", f"--workdir={tmp_path / 'run'}") == 0
    assert run("to_hf", tmp_path / "out", f"--workdir={tmp_path / 'run'}") == 0
    out = tensors_of(tmp_path / "out")
    assert np.array_equal(out["lm_head.weight"], embedding)
    assert np.array_equal(out["model.embed_tokens.weight"], embedding)
    bare = {name.removeprefix("model."): array for name, array in out.items()}
    save_file(bare, tmp_path / "model" / "model.safetensors")
    assert run("from_hf", tmp_path / "model", f"--workdir={tmp_path / 'bare'}") == 0
    assert run("to_hf", tmp_path / "again", f"--workdir={tmp_path / 'bare'}") == 0
    assert_same(tensors_of(tmp_path / "again"), out)


def write_tokenizer(folder: pathlib.Path, words: int) -> dict[str, bytes]:
    """Writes a tokenizer of so many ids, which begins a text with id 1, and the files beside it;
    file → content."""
    ids = {"<s>": 1, "</s>": 2} | {f"w{i}": i for i in (0, *range(3, words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": b'{"eos_token": {"content": "w5"}, "bos_token": "<s>"}',
        "generation_config.json": b'{"eos_token_id": [5, 6]}',
        "chat_template.jinja": b"{{ messages }}",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def test_a_tokenizer_stays_with_the_run(tmp_path, capsys):
    """Its files are in the run's folder, so the source may go; and in the export."""
    write_llama(tmp_path / "model")
    written = write_tokenizer(tmp_path / "model", 258)
    work = tmp_path / "run"
    assert run("from_hf", tmp_path / "model", f"--workdir={work}") == 0
    note = f"note: data.tokenizer={tmp_path / 'model' / 'tokenizer.json'} has 258 of 260 ids; the "
    assert note + "other 2 are never made\n" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "model")
    config = json.loads((work / CONFIG_FILE).read_text())
    assert config["data"]["tokenizer"] == str(work / "hf" / "tokenizer.json")
    meta = Meta.from_json(read_meta(work / "checkpoints", 0))
    moved = work.rename(tmp_path / "moved")
    for folder in (moved, moved / "checkpoints"):
        _, tokenizer = understand(meta, "0", str(folder))
        assert prompt_ids(tokenizer, "w3 w9", 260) == [1, 3, 9]
        assert (tokenizer.end_of_document, tokenizer.stops) == (5, (5, 6))
    assert run("to_hf", tmp_path / "out", f"--workdir={moved}") == 0
    for name, content in written.items():
        assert (tmp_path / "out" / name).read_bytes() == content, name


# --- out ------------------------------------------------------------------------------------------


def test_there_and_back_is_the_same_bytes(imported, tmp_path):
    out = tmp_path / "out"
    assert run("to_hf", out, f"--workdir={imported / 'run'}") == 0
    assert_same(tensors_of(out), tensors_of(imported / "model"))
    assert json.loads((out / "config.json").read_text()) == CONFIGS["llama"] | {"dtype": "float32"}
    assert (out / "generation_config.json").read_text() == '{"temperature": 0.6}'
    assert os.listdir(tmp_path) == ["out"], "nothing unfinished is left"


def test_bfloat16_in_several_files(tmp_path):
    tensors = write_llama(tmp_path / "model", bfloat16=True)
    assert run("from_hf", tmp_path / "model", f"--workdir={tmp_path / 'run'}") == 0
    out = tmp_path / "out"
    assert run("to_hf", out, f"--workdir={tmp_path / 'run'}", "--max_shard=9KB") == 0
    assert_same(tensors_of(out), tensors)
    index = json.loads((out / INDEX).read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted({*index["weight_map"].values()}) == files and len(files) == 4
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors.values())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    # what was written is read again, by its index
    assert run("from_hf", out, f"--workdir={tmp_path / 'again'}") == 0
    flags = [f"--workdir={tmp_path / 'again'}", "--dtype=float32"]
    assert run("to_hf", tmp_path / "wide", *flags) == 0
    assert_same(
        tensors_of(tmp_path / "wide"), {name: a.astype(np.float32) for name, a in tensors.items()}
    )


def test_quantised_weights(tmp_path):
    """Weights in 8 bits become what they stand for, and are published as bfloat16 without scales;
    blocks that the sizes cut off count too."""
    tensors = llama_tensors()
    block, quantised, expected = (7, 9), {}, {}
    random = np.random.default_rng(1)
    for name, array in tensors.items():
        if ".layers." not in name or "norm" in name:
            quantised[name] = expected[name] = array
            continue
        weight = array.astype(ml_dtypes.float8_e4m3fn)
        rows, columns = (-(-size // part) for size, part in zip(array.shape, block, strict=True))
        scales = random.random((rows, columns), np.float32)
        quantised |= {name: weight, f"{name}_scale_inv": scales}
        of_row, of_column = (np.arange(n) // part for n, part in zip(array.shape, block))
        number = weight.astype(np.float32) * scales[of_row][:, of_column]
        expected[name] = number.astype(ml_dtypes.bfloat16)
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    fp8 = {"quant_method": "fp8", "weight_block_size": block}
    (model / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"quantization_config": fp8}))
    safetensors_files.write(model / "model.safetensors", quantised)
    assert run("from_hf", model, f"--workdir={tmp_path / 'run'}") == 0
    assert run("to_hf", out, f"--workdir={tmp_path / 'run'}") == 0
    assert_same(tensors_of(out), expected)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_weights_in_4_bits(tmp_path):
    """gpt-oss's experts, one tensor of blocks and one of scales for all of a layer."""
    values = CONFIGS["gpt_oss"] | {"hidden_size": 32, "intermediate_size": 32}
    random = np.random.default_rng(1)
    drawn = lambda shapes: {
        name: random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    expected = complete(values, drawn)
    stored = dict(expected)
    for name in [name for name in expected if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = random.integers(120, 130, blocks.shape[:-1], np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = E2M1[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*scales.shape, 32)
        numbers = np.ldexp(numbers, scales.astype(int)[..., None] - 127)
        numbers = numbers.reshape(experts, outputs, inputs).swapaxes(1, 2)
        expected[name] = numbers.astype(ml_dtypes.bfloat16)
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    quantised = values | {"quantization_config": {"quant_method": "mxfp4"}}
    (model / "config.json").write_text(json.dumps(quantised))
    safetensors_files.write(model / "model.safetensors", stored)
    assert run("from_hf", model, f"--workdir={tmp_path / 'run'}") == 0
    assert run("to_hf", out, f"--workdir={tmp_path / 'run'}") == 0
    assert_same(tensors_of(out), expected)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize(
    "text, size",
    [("7B", 7), ("3KB", 3000), ("2MB", 2 * 10**6), ("5GB", 5 * 10**9), ("1KiB", 1024)]
    + [("3GiB", 3 * 2**30), ("1TB", 10**12)],
)
def test_sizes_of_files(text, size):
    assert convert._bytes(text) == size


@pytest.mark.parametrize("text", ["0GB", "5", "GB", "1.5GB", "iB", "1iB", "5gb", "-1GB"])
def test_texts_that_are_no_sizes(text):
    with pytest.raises(UsageError, match=f"--max_shard={text} is no size"):
        convert._bytes(text)


def test_a_folder_that_exists_stays(imported, tmp_path, capsys):
    assert run("to_hf", tmp_path, f"--workdir={imported / 'run'}") == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path} exists already: name a folder that does not\n"
    )


# --- refused --------------------------------------------------------------------------------------


def test_a_model_with_a_further_parameter(imported, tmp_path, capsys, monkeypatch):
    """A checkpoint of other code is refused by the array's name: the rest of it is no model."""
    shutil.copytree(imported / "run", tmp_path / "run")
    shapes = manifest.shapes_of
    more = {"optimizer/1/mu/head/scale": (32,), "params/head/scale": (32,)}
    monkeypatch.setattr(manifest, "shapes_of", lambda values: {**shapes(values), **more})
    line = "not complete: 0 (its state has params/head/scale, which its config's model does not"
    for step in ("-1", "0"):
        words = (tmp_path / "out", f"--workdir={tmp_path / 'run'}", f"--step={step}")
        assert_refused(capsys, line, "to_hf", *words, unwritten=tmp_path / "out")


def assert_refused(capsys, message: str, *words: object, unwritten: pathlib.Path) -> None:
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert not unwritten.exists()


UP = "model.layers.1.mlp.up_proj.weight"
WRONG_TENSORS = {
    "missing": (None, f"{UP} is missing"),
    "shape": (np.zeros((16, 24), np.float32), f"{UP} is [16, 24], not [24, 16]"),
    "type": (np.zeros((24, 16), np.int8), f"{UP} is of I8: only F32, F16, BF16 are read"),
    "nan": (np.full((24, 16), np.nan, np.float32), f"{UP} has numbers that are not finite"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors(capsys, tmp_path, name):
    array, message = WRONG_TENSORS[name]
    write_llama(tmp_path / "model", **{UP.replace(".", "_"): array})
    words = ["from_hf", tmp_path / "model", f"--workdir={tmp_path / 'run'}"]
    assert_refused(capsys, message, *words, unwritten=tmp_path / "run")


def test_a_size_by_default_that_the_tensors_do_not_have(capsys, tmp_path):
    write_llama(tmp_path / "model")
    sizes = {name: value for name, value in CONFIGS["llama"].items() if name != "hidden_size"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    message = "[260, 16], not [260, 4096] by config.json and its defaults"
    words = ["from_hf", tmp_path / "model", f"--workdir={tmp_path / 'run'}"]
    assert_refused(capsys, message, *words, unwritten=tmp_path / "run")


def test_wrong_folders(capsys, tmp_path):
    model, run_folder = tmp_path / "model", tmp_path / "run"
    words = ["from_hf", model, f"--workdir={run_folder}"]

    def refused(message: str) -> None:
        assert_refused(capsys, message, *words, unwritten=run_folder)

    refused(f"{model / 'config.json'} cannot be read (No such file or directory)")
    write_llama(model, bonus=np.zeros(3, np.float32))
    refused("model.safetensors: bonus is no tensor of a llama of config.json")
    write_llama(model)
    file = model / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refused(f"{file} is no complete safetensors file")
    file.write_bytes(content[:5])
    refused(f"{file} is no complete safetensors file")
    file.rename(model / "pytorch_model.bin")
    refused("pytorch_model.bin is pickled, which is not read")
    (model / INDEX).write_text(json.dumps({"weight_map": {UP: "gone.safetensors"}}))
    refused(f"{model / 'gone.safetensors'} is missing")
    write_llama(model)
    (model / "model.safetensors").rename(model / "part.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"x": "part.safetensors"}}))
    refused("part.safetensors: x is missing")
    (model / "config.json").write_text("{")
    refused(f"{model / 'config.json'} is no JSON")


def test_wrong_tokenizers(capsys, tmp_path):
    model, run_folder = tmp_path / "model", tmp_path / "run"
    write_llama(model)
    words = ["from_hf", model, f"--workdir={run_folder}"]
    for name in SLOW_TOKENIZERS:
        (model / name).write_text("")
        message = f"{model / name} is not read without a tokenizer.json, which transformers writes"
        assert_refused(capsys, message, *words, unwritten=run_folder)
        (model / name).unlink()
    write_tokenizer(model, 261)
    message = "config.json: vocab_size=260 is less than the 261 ids of data.tokenizer="
    assert_refused(capsys, message, *words, unwritten=run_folder)
    write_tokenizer(model, 260)
    (model / "tokenizer_config.json").write_text('{"eos_token": "none"}')
    message = "tokenizer_config.json: eos_token='none' is no token of tokenizer.json"
    assert_refused(capsys, message, *words, unwritten=run_folder)


def test_files_that_lead_out_of_the_folder(capsys, tmp_path):
    """A small file is refused before anything is written, whether the model needs it or not."""
    model, run_folder, secret = tmp_path / "model", tmp_path / "run", tmp_path / "secret"
    secret.write_text("{}")
    write_llama(model)
    write_tokenizer(model, 260)
    words = ["from_hf", model, f"--workdir={run_folder}"]
    for name in SMALL_FILES:
        before = (model / name).read_bytes() if (model / name).exists() else None
        for target in (secret, "../secret", "/dev/zero"):
            (model / name).unlink(missing_ok=True)
            (model / name).symlink_to(target)
            message = f"{model / name} cannot be read (it is a link to"
            assert_refused(capsys, message, *words, unwritten=run_folder)
        (model / name).unlink()
        os.mkfifo(model / name)
        message = f"{model / name} cannot be read (it is a FIFO, not a file)"
        assert_refused(capsys, message, *words, unwritten=run_folder)
        (model / name).unlink()
        if before is not None:
            (model / name).write_bytes(before)


def test_a_hub_s_cache_is_a_plain_folder(tmp_path):
    """models--X/snapshots/REVISION/FILE is a link to models--X/blobs/DIGEST."""
    write_llama(tmp_path / "model")
    write_tokenizer(tmp_path / "model", 260)
    blobs, snapshot = (tmp_path / "models--X" / name for name in ("blobs", "snapshots/f00"))
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    for number, file in enumerate((tmp_path / "model").iterdir()):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    for source, name in ((tmp_path / "model", "plain"), (snapshot, "cached")):
        assert run("from_hf", source, f"--workdir={tmp_path / name}") == 0
        assert run("to_hf", tmp_path / f"{name}_out", f"--workdir={tmp_path / name}") == 0
    metas = [read_meta(tmp_path / name / "checkpoints", 0) for name in ("plain", "cached")]
    assert metas[0]["tokenizer"]["marks"] == metas[1]["tokenizer"]["marks"]
    plain, cached = (tmp_path / name for name in ("plain_out", "cached_out"))
    assert len([*plain.iterdir()]) == 6
    for file in plain.iterdir():
        assert (cached / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("value", [10**30, 260, [5, 260], -1, True, 5.0, [[5]], "5", ["x"] * 10**5])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ids_that_the_model_does_not_have(capsys, tmp_path, name, value):
    write_llama(tmp_path / "model")
    write_tokenizer(tmp_path / "model", 260)
    (tmp_path / "model" / "generation_config.json").unlink()
    path = tmp_path / "model" / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | {"eos_token_id": value}))
    words = ["from_hf", tmp_path / "model", f"--workdir={tmp_path / 'run'}"]
    assert_refused(capsys, "eos_token_id", *words, unwritten=tmp_path / "run")


def test_more_layers_or_experts_than_tensors(capsys, tmp_path):
    """No rules are made for layers and experts that no file can hold."""
    for changes in (
        CONFIGS["llama"] | {"num_hidden_layers": 65_536},
        CONFIGS["mixtral"] | {"num_local_experts": 2**31 - 1},
        CONFIGS["deepseek_v3"] | {"num_hidden_layers": 65_536, "first_k_dense_replace": 65_535},
    ):
        write_llama(tmp_path / "model")
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(changes))
        words = ["from_hf", tmp_path / "model", f"--workdir={tmp_path / 'run'}", BYTES]
        began = time.process_time()
        assert_refused(capsys, "tensors, too few for the", *words, unwritten=tmp_path / "run")
        assert time.process_time() - began < 3


def test_a_stranger_s_run(imported, tmp_path, capsys):
    """Types of tensors that are none, a link out of its folder, and a tokenizer that lies
    elsewhere: its files are named."""
    work, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(imported / "run", work)
    (work / "hf" / "merges.txt").symlink_to(tmp_path / "secret")
    message = f"{work / 'hf' / 'merges.txt'} cannot be read (it is a link to"
    assert_refused(capsys, message, "to_hf", out, f"--workdir={work}", unwritten=out)
    (work / "hf" / "merges.txt").unlink()
    for types_ in ({"x": "F64"}, {"x": 2**62}, {"x": ["F32"]}):
        (work / "hf" / "tensors.json").write_text(json.dumps(types_))
        message = f"{work / 'hf' / 'tensors.json'} has types that are none of F32, F16, BF16"
        assert_refused(capsys, message, "to_hf", out, f"--workdir={work}", unwritten=out)
    write_llama(tmp_path / "model")
    write_tokenizer(tmp_path / "model", 260)
    (tmp_path / "other").mkdir()
    shutil.copyfile(tmp_path / "model" / "tokenizer.json", tmp_path / "other" / "tokenizer.json")
    tokenizer = f"--config.data.tokenizer={tmp_path / 'other' / 'tokenizer.json'}"
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"eos_token": "w5"}')
    assert run("from_hf", tmp_path / "model", f"--workdir={tmp_path / 'b'}", tokenizer) == 0
    assert run("to_hf", out, f"--workdir={tmp_path / 'b'}") == 0
    err = capsys.readouterr().err
    assert f"tokenizer_config.json: those of {tmp_path / 'other'}\n" in err and "tensors" not in err
    (work / "checkpoints").rename(tmp_path / "elsewhere")
    (work / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (work / "hf" / "tensors.json").unlink()
    assert run("to_hf", tmp_path / "again", f"--workdir={work}") == 0
    assert f"note: tensors: those of {work / 'checkpoints'}\n" in capsys.readouterr().err
    (work / "hf").rename(tmp_path / "hf")
    (work / "hf").symlink_to(tmp_path / "hf")
    message = f"{work / 'hf'} is a link to '{tmp_path / 'hf'}', not the run's folder"
    assert_refused(
        capsys, message, "to_hf", tmp_path / "3", f"--workdir={work}", unwritten=tmp_path / "3"
    )


def test_wrong_flags(capsys, imported, tmp_path):
    model, unwritten = imported / "model", tmp_path / "run"
    for message, words in {
        "'in' is no command of jaxtrain convert": ["in"],
        "from_hf is about one folder, not 2": ["from_hf", model, model, "--workdir=x"],
        "--workdir is empty: use --workdir=runs/model": ["from_hf", model],
        "--workdir is empty: use jaxtrain convert to_hf DIR --workdir=W (and "
        f"{model} exists already: name a folder that does not)": ["to_hf", model],
        "--workdir is empty: use jaxtrain convert to_hf DIR --workdir=W": ["to_hf", "absent"],
        "model.width=32 contradicts": [
            "from_hf",
            model,
            f"--workdir={unwritten}",
            "--config.model.width=32",
        ],
        "has checkpoints already": ["from_hf", model, f"--workdir={imported / 'run'}"],
        "s3://bucket/model is an address (s3)": ["from_hf", "s3://bucket/model", "--workdir=x"],
        "--dtype=int8 is no type": ["to_hf", unwritten, "--workdir=x", "--dtype=int8"],
        "--max_shard=5 is no size: use --max_shard=5GB": [
            "to_hf",
            unwritten,
            "--workdir=x",
            "--max_shard=5",
        ],
        "--workdir='none' does not exist": ["to_hf", unwritten, "--workdir=none"],
        "--step=3 is no checkpoint": [
            "to_hf",
            unwritten,
            f"--workdir={imported / 'run'}",
            "--step=3",
        ],
    }.items():
        assert_refused(capsys, message, *words, unwritten=unwritten)
