"""The config of a run that starts from a published model: a setting that somebody chose may not
contradict config.json, a default may."""

import dataclasses
import json

import pytest
from support.hf_models import CONFIGS

from jaxtrain.config import Config, ConfigError, replace, to_dict
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.quantization import Float8
from jaxtrain.hf.run_config import (
    read_origin,
    read_published,
    started_from,
)
from jaxtrain.hf.safetensors_folder import INDEX, SINGLE
from jaxtrain.hf.source_files import CONFIG, TOKENIZER
from jaxtrain.run.files import CONFIG_FILE


@pytest.fixture
def published(tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(CONFIGS["llama"]))
    return read_published(tmp_path)


DEFAULTS = Config()


def config_of(published, recipe=DEFAULTS, **overrides: object) -> Config:
    flags = [(path.replace("__", "."), str(value)) for path, value in overrides.items()]
    return started_from(published, recipe, flags)[0]


def test_the_model_is_that_of_config_json(published):
    config = config_of(published)
    assert config.model == published.model and config.model.layers == 3
    assert config.data == replace(Config(), {"data.tokenizer": "none"}).data


def test_settings_that_say_the_same_or_are_free(published):
    config = config_of(
        published, model__width=16, model__kv_heads=2, model__loss_chunk=64, data__batch_size=8
    )
    assert (config.model.width, config.model.loss_chunk, config.data.batch_size) == (16, 64, 8)
    # resolved, as the config.json of a run has them
    resolved = config.fill().as_read()
    assert config_of(published, resolved) == resolved
    assert config_of(published, replace(Config(), {"model.init_std": 0.5})).model.init_std == 0.5


@pytest.mark.parametrize(
    "setting, value",
    [("width", 32), ("layers", 4), ("kv_heads", 4), ("qk_norm", True), ("heads", 0), ("norm", "x")],
)
def test_contradictions(published, setting, value):
    """A flag is a choice, also of a default; a recipe's value is one if it is no default."""
    path = f"model.{setting}"
    expected = getattr(published.model, setting)
    rule = f"contradicts {published.folder / CONFIG}, which says {expected}"
    recipe = replace(Config(), {path: value})
    if recipe != Config():
        with pytest.raises(ConfigError) as error:
            config_of(published, recipe)
        assert (error.value.field, error.value.value, error.value.rule) == (path, value, rule)
        # a flag may put the recipe right
        assert config_of(published, recipe, **{path: expected}).model == published.model
    with pytest.raises(ConfigError, match=f"use --config.{path}="):
        config_of(published, **{path: value})


def test_a_quantised_model(tmp_path):
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / CONFIG).write_text(json.dumps(CONFIGS["llama"] | {"quantization_config": fp8}))
    assert read_published(tmp_path).quantization == Float8((128, 128))


def test_the_tokenizer_of_the_folder(published):
    file = published.folder / TOKENIZER
    file.write_text("{}")
    published = read_published(published.folder)
    assert config_of(published).data.tokenizer == str(file)
    assert config_of(published, data__tokenizer="bytes").data.tokenizer == "bytes"
    recipe = replace(Config(), {"data.tokenizer": "none"})
    assert config_of(published, recipe).data.tokenizer == "none"


@pytest.mark.parametrize("vocabulary", [99, 260])
def test_without_a_tokenizer_bytes_are_trained_only_if_they_are_named(tmp_path, vocabulary):
    (tmp_path / CONFIG).write_text(json.dumps(CONFIGS["llama"] | {"vocab_size": vocabulary}))
    published, started = read_published(tmp_path), {"train__init_from": tmp_path}
    assert config_of(published).data.tokenizer == "none"
    assert config_of(published, data__tokenizer="bytes").data.tokenizer == "bytes"
    assert config_of(published, **started, data__source="ids.npy").data.tokenizer == "none"
    rule = f"^{tmp_path} has no tokenizer.json, and data.source=stdlib is text: name the model's "
    with pytest.raises(HfError, match=rule):
        config_of(published, **started)
    config = config_of(published, **started, data__tokenizer="bytes")
    assert config.data.tokenizer == "bytes"


def test_files_and_lengths_that_are_not_followed_are_noted(published):
    """A single file has precedence over an index, in transformers too."""
    folder, config = published.folder, config_of(published, data__sequence_length=64)
    assert published.notes_for(config.model, config.data) == ()
    for name in ("adapter_config.json", INDEX, SINGLE):
        (folder / name).write_text("{}")
    longer = dataclasses.replace(config.data, sequence_length=65)
    index, adapter, beyond = read_published(folder).notes_for(config.model, longer)
    assert adapter.startswith("adapter_config.json is left out: ")
    assert index == f"{INDEX} is left out: {SINGLE} beside it is read, as in transformers"
    said = f"max_position_embeddings=64 of {folder / CONFIG}"
    assert beyond == f"data.sequence_length=65 is beyond {said}"
    (folder / SINGLE).unlink()
    assert len(read_published(folder).notes) == 1


def test_a_tokenizer_that_only_transformers_reads(tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(CONFIGS["gpt2"]))
    (tmp_path / "vocab.json").write_text("{}")
    published = read_published(tmp_path)
    with pytest.raises(HfError, match="vocab.json is not read without a tokenizer.json"):
        config_of(published)
    assert config_of(published, data__tokenizer="bytes").data.tokenizer == "bytes"


def test_sequences_fit_a_learned_table(tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(CONFIGS["gpt2"]))
    published = read_published(tmp_path)
    assert config_of(published).data.sequence_length == CONFIGS["gpt2"]["n_positions"]
    assert config_of(published, data__sequence_length=32).data.sequence_length == 32
    recipe = replace(Config(), {"data.sequence_length": 100})
    assert config_of(published, recipe).data.sequence_length == 100, "the checks refuse it"


def test_a_folder_that_is_gone(published, tmp_path):
    """The run that began with it has its settings; another run has not."""
    config = replace(config_of(published), {"train.init_from": str(tmp_path)})
    run = tmp_path / "run"
    run.mkdir()
    (run / CONFIG_FILE).write_text(json.dumps(to_dict(config)))
    (tmp_path / CONFIG).unlink()
    origin = read_origin(str(tmp_path), str(run))
    assert (origin.model, origin.place) == (published.model, run / CONFIG_FILE)
    assert origin.tokenizer == config.data.tokenizer, "it may come back"
    copy = run / "hf" / "tokenizer.json"
    copy.parent.mkdir()
    copy.write_text("{}")
    of_folder = replace(config, {"data.tokenizer": str(tmp_path / "tokenizer.json")})
    (run / CONFIG_FILE).write_text(json.dumps(to_dict(of_folder)))
    assert read_origin(str(tmp_path), str(run)).tokenizer == str(copy)
    for folder, workdir in ((tmp_path, tmp_path / "other"), (tmp_path / "x", run)):
        with pytest.raises(ConfigError, match=f"^train.init_from='{folder}' is no folder"):
            read_origin(str(folder), str(workdir))
