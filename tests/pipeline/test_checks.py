"""Rules about what a run needs besides its settings: files."""

import os

import pytest
from support.broken_settings import BASE

from jaxtrain import config as cfg
from jaxtrain.config import ConfigError, checks
from jaxtrain.config.checks import Environment
from jaxtrain.pipeline.checks import RULES as RUN_RULES


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
