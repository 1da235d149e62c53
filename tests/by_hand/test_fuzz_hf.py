"""tests/by_hand/fuzz_hf.py: random config.json's of published families are read, and written
again, or refused by a field; some of its cases against transformers; and
that it sees what is wrong."""

import json
import re
import sys

import pytest
from support import in_transformers

from by_hand import fuzz_hf, fuzz_hf_configs
from jaxtrain.config import Config, replace
from jaxtrain.hf.families import FAMILIES
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.model_config import differing, read_model, write_model

SEED, DRAWN = 5, 40


@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_are_read_or_refused_by_a_field(family):
    imported = 0
    for number in range(DRAWN):
        case = fuzz_hf_configs.draw(family, SEED, number)
        values = json.loads(json.dumps(case.values))
        try:
            family_of_values, model, _ = read_model(values, "config.json")
        except HfError as error:
            line = str(error)
            assert re.match(r"config\.json: [a-z_]\w*", line) and "\n" not in line, line
            continue
        assert not case.unknown, case
        imported += 1
        config = replace(Config(model=model), {"data.sequence_length": 16})
        written = write_model(config.fill().model, family_of_values, 16)
        assert list(differing(read_model(written, "config.json")[1], model)) == [], case
    assert imported > DRAWN / 4


def test_cases_are_drawn_from_the_seed_and_cover_what_they_should():
    draw = fuzz_hf_configs.draw
    assert vars(draw("llama", 1, 2)) == vars(draw("llama", 1, 2)) != vars(draw("llama", 2, 2))
    cases = [draw("llama", 1, number) for number in range(200)]
    assert {*fuzz_hf_configs.KINDS} <= {fuzz_hf_configs.kind_of(case.values) for case in cases}
    for name in ("unknown", "odd", "removed", "saved"):
        assert 5 < sum(bool(getattr(case, name)) for case in cases) < 195, name


def test_a_refusal_needs_a_reason():
    case = fuzz_hf_configs.draw("llama", 1, 2)
    case.values, case.unknown, case.odd = {"hidden_act": "silu", "x": 1}, "x", ""
    assert fuzz_hf_configs.reason(case, "x")
    assert not fuzz_hf_configs.reason(case, "hidden_act")
    case.values["hidden_act"] = "gelu"
    assert fuzz_hf_configs.reason(case, "hidden_act")


@pytest.mark.full
@pytest.mark.skipif(not in_transformers.has("torch"), reason=in_transformers.INSTALL_COMMAND)
def test_random_configs_have_the_logits_of_transformers(tmp_path, monkeypatch, capsys):
    words = ["fuzz_hf.py", f"--seed={SEED}", "--cases=3", f"--folder={tmp_path}"]
    monkeypatch.setattr(sys, "argv", words)
    assert fuzz_hf.main() == 0, capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * len(FAMILIES)
    assert sum(line["outcome"] == "imported" for line in lines) > len(FAMILIES)
