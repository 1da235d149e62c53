"""Settings that may change when a checkpoint is resumed, and what is said of those that changed."""

import json

import pytest
from support.broken_settings import BASE, offer

from jaxtrain import config as cfg
from jaxtrain.config import ConfigError
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment
from jaxtrain.config.rules.resume import changes


@pytest.mark.parametrize(
    "changes",
    [
        {"model.width": 256},
        {"model.mlp_width": 4 * 128 + 8},
        {"model.vocab_size": 300},
        {"data.tokenizer": "other.json"},
        {"data.sequence_length": 64},
        {"data.batch_size": 32},
        {"data.seed": 1},
        {"data.attend_across_documents": False},
        {"data.loss_mask": ("a",), "data.text_fields": ("a", "b")},
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
        checks.check_resume(BASE.to_store(), cfg.replace(BASE, changes))
    assert error.value.field == field


def test_what_can_continue():
    changes = {
        "model.attention_kernel": "xla",
        "model.loss_chunk": 64,
        "model.mtp_weight": 0.1,
        "model.kv_heads": 4,
        "model.mlp_width": 4 * 128,  # its default, written out
        "data.source": "moved",  # the corpus's checksum decides
        "data.cache": "elsewhere",
        "data.prefetch": 0,
        "data.filter": "moved.py:keep",  # a file that has moved; the checksum decides
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
    checks.check_resume(BASE.to_store(), cfg.replace(BASE, changes))


MIXTURE = cfg.replace(BASE, {"data.sources": {"web": {"path": "w", "weight": 3}, "code": "c"}})


@pytest.mark.parametrize(
    "items, rule",
    [
        (("code=c", "web=w", "web.weight=3"), "cannot continue a checkpoint that has web, code as"),
        (("web=w", "web.weight=3"), "cannot continue a checkpoint that has web, code as the first"),
        ((), "cannot continue a checkpoint that has web, code as the first ones"),
        (("code.text_fields=a",), "of data.sources.code.text_fields=text"),
        (("code.weight=2",), "of 7 batches: batch 0 has .* weights 3.0.2.0, and had .* 3.0.1.0"),
        (("wiki=w",), "of 7 batches: batch 0 has .* weights 3.0.1.0.1.0, and had .* 3.0.1.0"),
    ],
    ids=str,
)
def test_the_sources_of_the_past_stay(items, rule):
    one = len(items) == 1
    changed = cfg.replace(BASE, {"data.sources": (*MIXTURE.data.sources * one, *items)})
    with pytest.raises(ConfigError, match=rf"^data.sources=.*{rule}") as error:
        checks.check_resume(MIXTURE.to_store(), changed, position=7)
    assert offer(error.value) == {"data.sources": MIXTURE.data.sources}


@pytest.mark.parametrize(
    "changes",
    [
        {"data.sources": (*MIXTURE.data.sources, "wiki=w", "wiki.weight=0")},
        {
            "data.sources": (*MIXTURE.data.sources, "wiki=w", "wiki.weight=0"),
            "train.phases": {"late": {"step": 7, "weight.wiki": 2}},
        },
        {"data.sources": {"web": {"path": "moved", "weight": 3}, "code": "c"}},
        {"train.phases": {"late": {"step": 7, "weight.web": 1}}},
        {"train.phases": {"rate": {"step": 3, "learning_rate_end": 0.0}}},
    ],
    ids=str,
)
def test_weights_may_change_later(changes):
    checks.check_resume(MIXTURE.to_store(), cfg.replace(MIXTURE, changes), position=7)


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
        checks.check_resume(base.to_store(), cfg.replace(base, asked), environment)
    changes = offer(raised.value)
    assert {path: changes[path] for path in changes if path != "mesh.model"} == {
        "model.width": 128,
        "model.heads": 8,
        "data.seed": 0,
        "train.seed": 0,
    }
    assert str(raised.value).endswith(" (or another --workdir)")
    checks.check_resume(base.to_store(), cfg.replace(base, asked | changes), environment)


def test_where_no_setting_continues_a_checkpoint_another_folder_does():
    """Seven devices cannot share the checkpoint's eight sequences, and four can."""
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
            old.to_store(), cfg.replace(old, {"data.batch_size": 7}), Environment(7, "cpu", old)
        )
    assert str(raised.value).endswith(": use another --workdir")
    for platform, use in (("cpu", "--cpu_devices=4"), ("tpu", "4 devices")):
        with pytest.raises(ConfigError) as raised:
            checks.check_resume(old.to_store(), old, Environment(7, platform, old))
        assert str(raised.value).endswith(f", that is 7: use {use}")


def test_replicas_that_train_apart_stay_as_many():
    apart = cfg.replace(BASE, {"mesh.replica": 2, "train.diloco_inner_steps": 20})
    outer = {
        "train.diloco_inner_steps": 30,
        "precision.outer": "int8",
        "optimizer.outer_learning_rate": 1.0,
        "mesh.data": 4,
        "pipeline.microbatches": 2,
    }
    checks.check_resume(apart.to_store(), cfg.replace(apart, outer))
    with pytest.raises(
        ConfigError,
        match="mesh.replica=4 cannot continue a checkpoint of mesh.replica=2: use "
        "--config.mesh.replica=2 .or another --workdir.",
    ):
        more = {"mesh.replica": 4, "pipeline.microbatches": 2}
        checks.check_resume(apart.to_store(), cfg.replace(apart, more))
    with pytest.raises(ConfigError, match="train.diloco_inner_steps=0 cannot continue"):
        checks.check_resume(apart.to_store(), cfg.replace(apart, {"train.diloco_inner_steps": 0}))


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
    assert changes(old.to_store(), old.fill()) == []
    stored = cfg.to_dict(old.to_store())
    del stored["checkpoint"]["minutes"]  # as an earlier version left it
    assert changes(cfg.from_dict(json.loads(json.dumps(stored))).to_store(), old.fill()) == []
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
