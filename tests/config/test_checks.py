"""Every rule of a config, the nearest setting it names, JSON, and what may change when a run
continues."""

import dataclasses
import importlib.util
import json
import os
import random
import shlex
from typing import Any

import pytest
from support import ROOT
from support.broken_settings import ALLOWED, RULES, UNUSED

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, addresses, checks, flags
from jaxtrain.config.checks import Environment
from jaxtrain.config.mesh_rules import filled
from jaxtrain.config.resume import changes
from jaxtrain.config.unused import USES, unused_settings
from jaxtrain.pipeline.checks import RULES as RUN_RULES

BASE = cfg.replace(
    Config(),
    {
        "model.layers": 8,
        "model.heads": 8,
        "model.kv_heads": 4,
        "mesh.stage": 2,
        "mesh.model": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.repeats": 2,
        "pipeline.microbatches": 4,
    },
)


def error_of(changes: dict, devices: int | None = None, base: Config = BASE) -> ConfigError:
    config = cfg.replace(base, changes)
    with pytest.raises(ConfigError) as raised:
        checks.check(config) if devices is None else checks.check_devices(config, devices)
    return raised.value


def test_defaults_and_base_work():
    checks.check(Config())
    checks.check(BASE)
    for path, field in cfg.fields().items():
        assert field.metadata["doc"], path
        assert "\n" not in field.metadata["doc"], path


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    RULES,
    ids=[" ".join(f"{k}={v!r}" for k, v in changes.items()) for changes, _ in RULES],
)
def test_broken_rule(changes, message, monkeypatch):
    monkeypatch.setattr(addresses, "_is_installed", lambda store: store == "s3")
    assert str(error_of(changes)) == message


@pytest.mark.parametrize("changes", ALLOWED, ids=str)
def test_allowed(changes):
    checks.check(cfg.replace(BASE, changes))


def test_an_error_is_one_line():
    error = error_of({"model.activation": "relu\nx" * 1000})
    assert "\n" not in str(error)
    assert len(str(error)) < 400


def offer(error: ConfigError) -> dict[str, Any]:
    """What an error's text says to use, read as a shell and the command read it."""
    words = shlex.split(error.nearest.partition(" (or ")[0])
    pairs = [word.removeprefix("--config.").partition("=") for word in words]
    return {path: flags._value(path, text) for path, _, text in pairs}


def test_the_nearest_setting_works():
    """From configs that work, one setting is spoilt at a time: one other value of it mends it, or
    of one that it has to fit."""
    chance = random.Random(0)
    numbers = [
        path
        for path, field in cfg.fields().items()
        if field.type is int and path not in ("mesh.data", "train.seed", "data.seed")
    ]
    offered = 0
    for _ in range(300):
        path = chance.choice(numbers)
        config = cfg.replace(BASE, {path: chance.choice([-3, 0, 3, 5, 6, 7, 9, 12, 100, 1000])})
        environment = Environment(8, "cpu", BASE)
        try:
            checks.check(config, environment)
        except ConfigError as error:
            assert len(offer(error)) == 1, error
            checks.check(cfg.replace(config, offer(error)), environment)
            offered += 1
    assert offered > 50


SEVERAL = [  # devices, changes, flags that mend all at once
    (16, {"mesh.model": 16, "mesh.data": 1, "mesh.stage": 1}, {"mesh.model": 8, "mesh.data": 2}),
    (
        8,
        {"mesh.data": 1, "mesh.stage": 1, "mesh.model": 1},
        {"mesh.data": 8, "pipeline.microbatches": 2},
    ),
    (6, {"mesh.model": 3}, {"mesh.model": 1, "mesh.stage": 3, "pipeline.microbatches": 8}),
    (
        12,
        {"data.batch_size": 7, "pipeline.memory": 0.1},
        {"data.batch_size": 12, "pipeline.memory": 0.0},
    ),
    (
        8,
        {"train.steps": 0, "model.norm": "x", "optimizer.b1": 1.0},
        {"train.steps": 1, "model.norm": "rmsnorm", "optimizer.b1": 0.9},
    ),
    (1, {"model.kv_heads": 3}, {"model.kv_heads": 2, "mesh.stage": 1, "mesh.model": 1}),
]


@pytest.mark.parametrize(
    "devices, changes, flags", SEVERAL, ids=[f"{n} {c}" for n, c, _ in SEVERAL]
)
def test_all_rules_and_devices_at_once(devices, changes, flags):
    error = error_of(changes, devices)
    assert list(offer(error))[0] == error.field or error.field not in offer(error)
    assert set(offer(error)) == set(flags) or len(offer(error)) < len(flags), error
    checks.check_devices(cfg.replace(BASE, changes | offer(error)), devices)


def test_what_was_asked_for_elsewhere_is_not_changed():
    """`zb_h1` and 6 sequences were asked for; the recipe's repeats and microbatches have to
    follow."""
    config = cfg.replace(BASE, {"pipeline.schedule": "zb_h1", "data.batch_size": 6})
    error = checks.error_of(config, Environment(8, "cpu", BASE))
    assert error and error.nearest == "--config.pipeline.repeats=1 --config.pipeline.microbatches=3"


def test_the_search_is_cut_by_configs_and_still_ends_with_what_works(monkeypatch):
    monkeypatch.setattr(checks, "MOST_CONFIGS", 3)
    spoilt = {
        "mesh.data": 3,
        "mesh.stage": 3,
        "mesh.model": 3,
        "data.batch_size": 7,
        "model.heads": 5,
        "model.kv_heads": 0,
    }
    for devices in (8, 7):
        error = error_of(spoilt, devices)
        changes = offer(error)
        checks.check_devices(cfg.replace(BASE, spoilt | changes), devices)
        for idle in changes:
            fewer = {path: value for path, value in changes.items() if path != idle}
            assert checks.error_of(cfg.replace(BASE, spoilt | fewer), Environment(devices)), idle


VALUES = [
    ("pipeline.chunk_layers", (3, 2, 2, 1)),
    ("pipeline.chunk_layers", ()),
    ("pipeline.chunk_layers", (4,)),
    ("pipeline.times", (2.0, 0.25, 1e-05)),
    ("data.text_fields", ("a b", "it's", '"', "x,y", " z")),
    ("data.text_fields", ("$HOME", "`ls`", "(1)")),
    ("data.source", 'my  corpus (1), it\'s "new".txt'),
    ("pipeline.schedule", "csv:my table.csv"),
    ("train.sample_prompt", ""),
    ("model.biases", True),
    ("optimizer.epsilon", 1e-09),
    ("mesh.data", -1),
]


@pytest.mark.parametrize("path, value", VALUES, ids=str)
def test_a_suggestion_is_read_back_as_it_was_meant(path, value):
    (word,) = shlex.split(cfg.suggestion({path: value}))
    found = cfg.get(flags.apply(Config(), [(path, word.partition("=")[2])]), path)
    assert found == value and type(found) is type(value)


# --- settings without a use -----------------------------------------------------------------------


@pytest.mark.parametrize("changes, note", UNUSED, ids=[str(changes) for changes, _ in UNUSED])
def test_a_setting_without_a_use_is_a_note(changes, note):
    config = cfg.replace(BASE, {"mesh.data": 2} | changes)
    checks.check(config)
    assert note in unused_settings(config)
    assert unused_settings(cfg.replace(BASE, {"mesh.data": 2})) == []


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_a_recipe_as_it_is_shipped_has_no_notes(name):
    assert unused_settings(filled(recipe(name), 2048)) == []


def test_every_setting_that_may_have_no_use_is_tried():
    paths = {path for use in USES for path in use.settings}
    assert paths <= cfg.fields().keys()
    tried = {path for changes, _ in UNUSED for path in changes}
    assert len(paths - tried) < len(paths) / 2


# --- devices --------------------------------------------------------------------------------------


def test_what_is_left_is_filled_in():
    assert checks.check_devices(BASE, 8).mesh == cfg.MeshConfig(data=2, stage=2, model=2)
    stages = checks.check_devices(cfg.replace(BASE, {"mesh.data": 2, "mesh.stage": -1}), 16)
    assert stages.mesh.stage == 4
    assert checks.check_devices(cfg.replace(BASE, {"mesh.data": 2}), 8).mesh.data == 2


DEVICES = [
    (
        8,
        {"mesh.stage": 3},
        "mesh.stage=3 does not fit: mesh.stage=3 × mesh.model=2 = 6 does not divide the 8 "
        "devices: use --config.mesh.stage=2 (or 1, 4)",
    ),
    (
        8,
        {"mesh.data": 4},
        "mesh.data=4 does not fit: mesh.data=4 × mesh.stage=2 × mesh.model=2 = 16 is not the "
        "8 devices: use --config.mesh.data=2",
    ),
    (
        1,
        {},
        "mesh.stage=2 does not fit: mesh.stage=2 × mesh.model=2 = 4 does not divide the 1 device"
        ": use --config.mesh.stage=1 --config.mesh.model=1",
    ),
    (
        64,
        {},
        "pipeline.microbatches=4 × mesh.data=16 does not divide data.batch_size=16: use "
        "--config.pipeline.microbatches=1",
    ),
    (
        12,
        {},
        "data.batch_size=16 is no multiple of mesh.data=3 × pipeline.microbatches=4, that is "
        "12: use --config.data.batch_size=12 (or 24)",
    ),
]


@pytest.mark.parametrize(
    "devices, changes, message", DEVICES, ids=[f"{n} {c}" for n, c, _ in DEVICES]
)
def test_devices(devices, changes, message):
    assert str(error_of(changes, devices)) == message


def test_rules_hold_for_what_was_filled_in():
    """32 devices leave 8 stages of 2 chunks for 8 layers: known only with the devices, and refused
    by the usual rule."""
    error = error_of({"mesh.data": 2, "mesh.stage": -1}, 32)
    assert "makes more chunks (mesh.stage=8 · pipeline.repeats=2) than model.layers=8" in str(error)


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 7, 8, 12, 64, 1024])
def test_the_nearest_mesh_works(devices):
    try:
        checks.check_devices(BASE, devices)
    except ConfigError as error:
        checks.check_devices(cfg.replace(BASE, offer(error)), devices)


def test_a_kernel_and_a_mesh_at_once():
    error = checks.error_of(
        cfg.replace(BASE, {"model.attention_kernel": "cudnn"}), Environment(2, "cpu")
    )
    assert error and set(offer(error)) in (
        {path, "model.attention_kernel"} for path in ("mesh.stage", "mesh.model")
    )


# --- files ----------------------------------------------------------------------------------------


def test_files(tmp_path):
    files = Environment(rules=RUN_RULES)
    (tmp_path / "corpus.jsonl").write_text("{}")
    checks.check(BASE, files)
    checks.check(
        cfg.replace(
            BASE,
            {
                "data.source": str(tmp_path / "corpus.jsonl"),
                "data.tokenizer": str(tmp_path / "corpus.jsonl"),
            },
        ),
        files,
    )
    checks.check(cfg.replace(BASE, {"data.source": str(tmp_path)}), files)
    with pytest.raises(ConfigError) as error:
        checks.check(cfg.replace(BASE, {"data.source": str(tmp_path / "corpsu.jsonl")}), files)
    assert str(error.value).endswith(
        "is neither 'stdlib' nor an existing path: use "
        f"--config.data.source={tmp_path}/corpus.jsonl"
    )
    with pytest.raises(ConfigError, match=r"data\.tokenizer=''.*use --config.data.tokenizer=bytes"):
        checks.check(cfg.replace(BASE, {"data.tokenizer": ""}), files)
    os.mkfifo(tmp_path / "pipe")
    for path, value in (("data.tokenizer", tmp_path), ("data.tokenizer", tmp_path / "pipe")):
        with pytest.raises(
            ConfigError, match=f"{path}='{value}' is not a regular file: use --config.{path}="
        ):
            checks.check(cfg.replace(BASE, {path: str(value)}), files)
    for value in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(
            ConfigError,
            match=f"data.source='{value}' is not a regular file or a folder: use "
            "--config.data.source=",
        ):
            checks.check(cfg.replace(BASE, {"data.source": str(value)}), files)


# --- resolve, JSON, continuing --------------------------------------------------------------------


def test_resolve():
    model = cfg.ModelConfig(width=96, heads=6)
    resolved = Config(model=model, data=cfg.DataConfig(sequence_length=64)).resolve()
    assert (
        dataclasses.replace(model, kv_heads=6, head_dim=16, mlp_width=384, max_positions=64)
        == resolved.model
    )
    assert resolved.resolve() == resolved
    own = dataclasses.replace(model, kv_heads=2, head_dim=8, mlp_width=10, max_positions=100)
    assert Config(model=own).resolve().model == own


def test_resolve_of_experts_and_latents():
    experts = lambda **fields: Config(model=cfg.ModelConfig(experts=4, **fields)).resolve().model
    assert [experts(experts_per_token=n).router_normalize for n in (1, 2)] == ["never", "always"]
    assert experts(experts_per_token=1, router_normalize="always").router_normalize == "always"
    assert experts(router_normalize="never").router_normalize == "never"
    latent = cfg.ModelConfig(attention="mla", norm_epsilon=1e-5)
    assert Config(model=latent).resolve().model.latent_norm_epsilon == 1e-5
    assert (
        Config(model=dataclasses.replace(latent, latent_norm_epsilon=1e-6))
        .resolve()
        .model.latent_norm_epsilon
        == 1e-6
    )


def test_json_round_trip():
    config = cfg.replace(
        BASE,
        {
            "data.loss_mask": ("a", "b"),
            "optimizer.epsilon": 1e-9,
            "model.biases": True,
            "data.cache": "ü",
        },
    )
    again = cfg.from_dict(json.loads(json.dumps(cfg.to_dict(config))))
    assert again == config
    assert isinstance(again.data.loss_mask, tuple)


def test_from_dict_takes_what_is_missing_from_the_defaults_and_integers_for_floats():
    config = cfg.from_dict({"optimizer": {"learning_rate": 1}})
    assert config == cfg.replace(Config(), {"optimizer.learning_rate": 1.0})
    assert isinstance(config.optimizer.learning_rate, float)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"mesh": {"stag": 2}}, "mesh.stag=2 is an unknown setting: use --config.mesh.stage=2"),
        ({"mesh": {"steps": 2}}, "mesh.steps=2 is an unknown setting: use --config.train.steps=2"),
        ({"mash": {"stage": 2}}, "mash={'stage': 2} is an unknown group of settings: use mesh"),
        ({"mesh": 3}, "mesh=3 is a group of settings, not a value: use --config.mesh.replica=1"),
        ({"mesh": {"stage": True}}, "mesh.stage=True is not an integer: use --config.mesh.stage=1"),
        (
            {"model": {"biases": 0}},
            "model.biases=0 is not a boolean (true or false): use --config.model.biases=false",
        ),
        (
            {"model": {"norm": None}},
            "model.norm=None is not a string: use --config.model.norm=rmsnorm",
        ),
        (
            {"optimizer": {"b1": "0.9"}},
            "optimizer.b1='0.9' is not a number: use --config.optimizer.b1=0.9",
        ),
        (
            {"data": {"loss_mask": "prompt"}},
            "data.loss_mask='prompt' is not a tuple of strings: use --config.data.loss_mask=prompt",
        ),
        (
            {"data": {"loss_mask": [1]}},
            "data.loss_mask=[1] is not a tuple of strings: use --config.data.loss_mask=",
        ),
    ],
)
def test_from_dict_is_strict(values, message):
    with pytest.raises(ConfigError) as error:
        cfg.from_dict(values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "changes",
    [
        {"model.width": 256},
        {"model.mlp_width": 4 * 128 + 8},
        {"model.vocab_size": 300},
        {"data.source": "other"},
        {"data.tokenizer": "other.json"},
        {"data.sequence_length": 64},
        {"data.batch_size": 32},
        {"data.seed": 1},
        {"data.attend_across_documents": False},
        {"data.loss_mask": ("a",)},
        {"data.text_fields": ("a",)},
        {"data.validation_fraction": 0.1},
        {"data.token_dtype": "uint32"},
        {"train.seed": 1},
        {"train.diloco_inner_steps": 20, "mesh.replica": 2},
    ],
    ids=str,
)
def test_what_cannot_continue(changes):
    field = next(iter(changes))
    with pytest.raises(
        ConfigError, match=f"{field}=.* cannot continue a checkpoint of {field}="
    ) as error:
        checks.check_resume(BASE, cfg.replace(BASE, changes))
    assert error.value.field == field


def test_what_can_continue():
    changes = {
        "model.attention_kernel": "xla",
        "model.loss_chunk": 64,
        "model.mtp_weight": 0.1,
        "model.kv_heads": 4,
        "model.mlp_width": 4 * 128,  # its default, written out
        "data.cache": "elsewhere",
        "data.prefetch": 0,
        "mesh.data": 2,
        "mesh.stage": 4,
        "pipeline.schedule": "1f1b",
        "pipeline.repeats": 1,
        "pipeline.microbatches": 8,
        "parallel.zero": 0,
        "precision.compute": "float32",
        "optimizer.learning_rate": 1e-5,
        "train.steps": 1000,
        "checkpoint.every": 7,
        "metrics.log_every": 3,
    }
    checks.check_resume(BASE, cfg.replace(BASE, changes))


def test_all_that_a_checkpoint_keeps_is_put_back_at_once():
    """In the form in which it was asked for: what follows a setting needs no flag; and the mesh has
    to fit what is put back."""
    asked = {
        "model.width": 256,
        "model.heads": 16,
        "data.seed": 3,
        "train.seed": 2,
        "mesh.model": 16,
    }
    environment = Environment(64, "cpu", BASE)
    base = cfg.replace(BASE, {"model.kv_heads": 0, "pipeline.microbatches": 1})
    with pytest.raises(ConfigError) as raised:
        checks.check_resume(base.resolve(), cfg.replace(base, asked), environment)
    changes = offer(raised.value)
    assert {path: changes[path] for path in changes if path != "mesh.model"} == {
        "model.width": 128,
        "model.heads": 8,
        "data.seed": 0,
        "train.seed": 0,
    }
    assert str(raised.value).endswith(" (or another --workdir)")
    checks.check_resume(base.resolve(), cfg.replace(base, asked | changes), environment)


def test_where_no_setting_continues_a_checkpoint_another_folder_does():
    """Three devices cannot share eight sequences."""
    plain = {
        "pipeline.microbatches": 1,
        "pipeline.schedule": "1f1b",
        "pipeline.repeats": 1,
        "mesh.stage": 1,
        "mesh.model": 1,
    }
    old = cfg.replace(BASE, plain | {"data.batch_size": 8, "model.layers": 2})
    with pytest.raises(ConfigError) as raised:
        checks.check_resume(
            old, cfg.replace(old, {"data.batch_size": 7}), Environment(7, "cpu", old)
        )
    assert str(raised.value).endswith(": use another --workdir, or other than 7 devices")


def test_replicas_that_train_apart_stay_as_many():
    apart = cfg.replace(BASE, {"mesh.replica": 2, "train.diloco_inner_steps": 20})
    outer = {
        "train.diloco_inner_steps": 30,
        "precision.outer": "int8",
        "optimizer.outer_learning_rate": 1.0,
        "mesh.data": 4,
    }
    checks.check_resume(apart, cfg.replace(apart, outer))
    with pytest.raises(
        ConfigError,
        match="mesh.replica=4 cannot continue a checkpoint of mesh.replica=2: use "
        "--config.mesh.replica=2 .or another --workdir.",
    ):
        checks.check_resume(apart, cfg.replace(apart, {"mesh.replica": 4}))
    with pytest.raises(ConfigError, match="train.diloco_inner_steps=0 cannot continue"):
        checks.check_resume(apart, cfg.replace(apart, {"train.diloco_inner_steps": 0}))


# --- recipes --------------------------------------------------------------------------------------


def recipe(name: str) -> Config:
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def parameters(config: Config) -> int:
    """Parameters of a transformer, counted by hand from its shapes."""
    m = config.resolve().model
    bias = int(m.biases)
    norm = m.width * (2 if m.norm == "layernorm" and m.biases else 1)
    attention = m.width * m.head_dim * (2 * m.heads + 2 * m.kv_heads) + bias * (
        m.head_dim * (m.heads + 2 * m.kv_heads) + m.width
    )
    wide = 2 if m.activation == "swiglu" else 1
    mlp = m.width * m.mlp_width * (wide + 1) + bias * (m.mlp_width * wide + m.width)
    table = m.vocab_size * m.width * (1 if m.tied_embeddings else 2) + (
        m.max_positions * m.width if m.positions == "learned" else 0
    )
    return m.layers * (attention + mlp + 2 * norm) + norm + table


@pytest.mark.parametrize(
    "name, published, devices",
    [
        ("gpt2_124m", 124_439_808, 8),
        ("llama3_8b", 8_030_261_248, 64),
        ("gpt3_175b", 174.6e9, 1024),
        ("gpt_1t", 1008.0e9, 3072),
    ],
)
def test_recipe_has_its_published_size(name, published, devices):
    """GPT-2 and Llama 3: the parameters of the released weights; GPT-3 and the trillion of
    Megatron-LM: their papers, to half a percent."""
    config = recipe(name)
    assert parameters(config) == pytest.approx(
        published, rel=0 if isinstance(published, int) else 5e-3
    )
    checks.check(config)
    checks.check_devices(config, devices)


def test_a_kernel_of_other_devices():
    config = cfg.replace(BASE, {"model.attention_kernel": "cudnn"})
    assert checks.check_devices(config, 8, "gpu").mesh.data == 2
    with pytest.raises(ConfigError) as raised:
        checks.check_devices(config, 8, "cpu")
    assert str(raised.value).endswith(
        "is for NVIDIA GPUs, and the devices here are of platform 'cpu': use "
        "--config.model.attention_kernel=auto"
    )


def test_tiny_runs_on_eight_devices():
    config = recipe("tiny")
    checks.check(config)
    assert checks.check_devices(config, 8).mesh == cfg.MeshConfig(data=2, stage=2, model=2)


# --- what a resume changes ------------------------------------------------------------------------


def test_what_a_resume_changes_is_listed():
    """Resolved values, as they are written in flags, in the order of the settings; nothing where
    nothing differs."""
    old = cfg.replace(
        BASE,
        {
            "optimizer.learning_rate": 0.003,
            "mesh.data": 4,
            "pipeline.repeats": 0,
            "pipeline.schedule": "1f1b",
        },
    )
    assert changes(old, old) == []
    assert changes(old, old.resolve()) == []  # a default that was filled in is no change
    stored = cfg.to_dict(old.resolve())
    del stored["checkpoint"]["minutes"]  # as an earlier version left it
    assert changes(cfg.from_dict(json.loads(json.dumps(stored))), old) == []
    new = {
        "optimizer.learning_rate": 0.1,
        "mesh.data": 2,
        "train.sample_prompt": "",
        "metrics.tensorboard": False,
        "pipeline.times": (1.0, 2.5, 1.0, 0.1),
        "checkpoint.minutes": 0.0,
    }
    old = cfg.replace(old, {"train.sample_prompt": "def "})
    assert changes(old, cfg.replace(old, new)) == [
        "mesh.data: 4 → 2",
        "pipeline.times: none → 1.0,2.5,1.0,0.1",
        "optimizer.learning_rate: 0.003 → 0.1",
        "train.sample_prompt: def  → ''",
        "checkpoint.minutes: 10.0 → 0.0",
        "metrics.tensorboard: true → false",
    ]
