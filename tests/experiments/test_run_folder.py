"""A run's folder as those who look at runs read it."""

import json

import pytest

from jaxtrain.config import Config, UsageError, with_values
from jaxtrain.config.recipes import config_text
from jaxtrain.experiments.run_folder import read_run


def test_settings_and_curves(tmp_path):
    config = Config()
    config = with_values(config, train=with_values(config.train, steps=7))
    (tmp_path / "config.json").write_text(config_text(config))
    records = [{"step": 1, "loss": 3.0, "tokens": 8}, {"step": 2, "loss": None}, {"step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    run = read_run(tmp_path)
    assert run.config == config and run.name == tmp_path.name and run.records == records
    assert run.curve("loss") == [(1, 3.0)] == run.curve("loss", "step")
    assert run.curve("loss", "tokens") == [(8, 3.0)]


@pytest.mark.parametrize("text", [None, "", "[]", '{"model": {"layers": "many"}}'])
def test_other_folders(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="is not the folder of a run: .* use the --workdir"):
        read_run(tmp_path)
