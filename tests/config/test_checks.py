"""Every rule of a config, and the flags that it suggests."""

import importlib.util
import random
import shlex

import pytest
from support import ROOT
from support.broken_settings import ALLOWED, BASE, RULES, offer

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, addresses, flags
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment


def error_of(changes: dict, devices: int | None = None, base: Config = BASE) -> ConfigError:
    config = cfg.replace(base, changes)
    with pytest.raises(ConfigError) as raised:
        checks.check(config) if devices is None else checks.check_devices(config, devices)
    return raised.value


def test_defaults_and_base_work():
    checks.check(Config())
    checks.check(BASE)
    for path, field in cfg.fields().items():
        assert cfg.setting_of(field).doc, path
        assert "\n" not in cfg.setting_of(field).doc, path


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
    ("model.tied_embeddings", True),
    ("model.biases", ("qkv", "out")),
    ("optimizer.epsilon", 1e-09),
    ("mesh.data", -1),
]


@pytest.mark.parametrize("path, value", VALUES, ids=str)
def test_a_suggestion_is_read_back_as_it_was_meant(path, value):
    (word,) = shlex.split(cfg.suggestion({path: value}))
    found = cfg.get(flags.apply(Config(), [(path, word.partition("=")[2])]), path)
    assert found == value and type(found) is type(value)


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
        "12: use --config.mesh.stage=3",
    ),
]


@pytest.mark.parametrize(
    "devices, changes, message", DEVICES, ids=[f"{n} {c}" for n, c, _ in DEVICES]
)
def test_devices(devices, changes, message):
    assert str(error_of(changes, devices)) == message


def test_a_published_model_is_never_changed_by_a_suggestion():
    """Four stages do not fit three layers. With mesh.data=2 given, the nearest single change would
    be a fourth layer, which the model does not have."""
    changes = {"model.layers": 3, "mesh.stage": 4, "mesh.data": 2, "mesh.model": 1}
    changes |= {"pipeline.schedule": "1f1b", "pipeline.repeats": 1, "train.init_from": "model"}
    assert str(error_of(changes, 8)).endswith(": use --config.mesh.stage=2 --config.mesh.data=4")


@pytest.mark.parametrize("path", ["data.source", "data.tokenizer", "train.init_from"])
def test_nothing_is_suggested_in_place_of_what_is_named(path):
    """Not even what the recipe names, as the last resort."""
    search = checks._Search(cfg.replace(Config(), {path: "absent", "mesh.data": 3}), Environment(8))
    assert path not in search._restored(Config())


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


# --- recipes --------------------------------------------------------------------------------------


def recipe(name: str) -> Config:
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def parameters(config: Config) -> int:
    """Parameters of a transformer, counted by hand from its shapes."""
    m = config.fill().model
    qkv, out, biased_mlp, biased_norm = (part in m.biases for part in ("qkv", "out", "mlp", "norm"))
    norm = m.width * (1 + biased_norm)
    attention = m.width * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    attention += qkv * m.head_dim * (m.heads + 2 * m.kv_heads) + out * m.width
    wide = 2 if m.activation == "swiglu" else 1
    mlp = m.width * m.mlp_width * (wide + 1) + biased_mlp * (m.mlp_width * wide + m.width)
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


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"model.attention_kernel": "cudnn"}, ": use --config.model.attention_kernel=auto"),
        (
            {"model.kinds": ("far.attention_kernel=cudnn",), "model.pattern": ("full", "far")},
            " (in layers of kind far): use --config.model.kinds=far.attention_kernel=auto",
        ),
    ],
)
def test_a_kernel_of_other_devices(changes, end):
    config = cfg.replace(BASE, changes)
    assert checks.check_devices(config, 8, "gpu").mesh.data == 2
    with pytest.raises(ConfigError) as raised:
        checks.check_devices(config, 8, "cpu")
    rule = "is for NVIDIA GPUs, and the devices here are of platform 'cpu'"
    assert str(raised.value).endswith(rule + end)


def test_tiny_runs_on_eight_devices():
    config = recipe("tiny")
    checks.check(config)
    assert checks.check_devices(config, 8).mesh == cfg.MeshConfig(data=2, stage=2, model=2)


def test_a_published_model_keeps_the_rules_of_all_kinds_together():
    violation = checks.model_violation(cfg.replace(Config(), {"model.biases": ("out", "router")}))
    assert (violation.field, violation.rule) == (
        "model.biases",
        "has 'router' with model.experts=0, where there is no router",
    )
