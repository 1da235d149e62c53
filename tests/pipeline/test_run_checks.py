"""Rules about what a run needs besides its settings: files."""

import os

import pytest
from support.broken_settings import BASE

from jaxtrain import config as cfg
from jaxtrain.config import ConfigError
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment
from jaxtrain.pipeline.run_checks import LARGE, RULES as RUN_RULES, default_corpus_notes


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
    with pytest.raises(ConfigError, match=r"data\.tokenizer='' is neither 'bytes' nor"):
        checks.check(cfg.replace(BASE, {"data.tokenizer": ""}), files)
    os.mkfifo(tmp_path / "pipe")
    for path, value in (("data.tokenizer", tmp_path), ("data.tokenizer", tmp_path / "pipe")):
        with pytest.raises(ConfigError, match=f"{path}='{value}' is not a regular file$"):
            checks.check(cfg.replace(BASE, {path: str(value)}), files)
    for value in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(
            ConfigError, match=f"data.source='{value}' is not a regular file or a folder"
        ):
            checks.check(cfg.replace(BASE, {"data.source": str(value)}), files)


def test_a_filter_that_is_not_there():
    files = Environment(rules=RUN_RULES)
    with pytest.raises(ConfigError) as error:
        checks.check(cfg.replace(BASE, {"data.filter": "keep.py"}), files)
    assert str(error.value) == (
        "data.filter='keep.py' is not FILE.py:NAME or package.module:NAME: use "
        "--config.data.filter="
    )
    items = (f"web={__file__}", "web.filter=absent.py:keep")
    with pytest.raises(ConfigError, match="makes data.filter='absent.py:keep', which names no"):
        checks.check(cfg.replace(BASE, {"data.sources": items}), files)
    checks.check(cfg.replace(BASE, {"data.filter": f"{__file__}:name"}), files)


def test_large_models_on_the_default_corpus_get_a_note():
    large = load_recipe(find_recipe("gpt2_124m"))
    source, tokenizer = {"data.source": "mine/*.txt"}, {"data.tokenizer": "mine.json"}
    both, one, other = (
        default_corpus_notes(cfg.replace(large, changes)) for changes in ({}, source, tokenizer)
    )
    assert len(both) == len(one) == len(other) == 1
    assert both[0].startswith(f"a model of more than {LARGE // 10**6} million parameters trains on")
    flags = ("--config.data.source=YOUR_DATA", "--config.data.tokenizer=YOUR_TOKENIZER")
    for note, named in ((both, flags), (one, flags[1:]), (other, flags[:1])):
        assert f": {' '.join(named)} say what it is for" in note[0]
    assert not default_corpus_notes(cfg.replace(large, source | tokenizer))
    assert not default_corpus_notes(cfg.replace(large, {"model.layers": 1, "model.width": 768}))
    assert not default_corpus_notes(BASE)
