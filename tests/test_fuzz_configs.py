"""scripts/fuzz_configs.py: what the trainer suggests for random configs that cannot work is true, and the drawing is not idle."""

import pathlib
import random
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parent.parent / "scripts"))

import fuzz_configs


@pytest.mark.parametrize("seed", range(25))
def test_a_suggestion_ends_the_search(seed):
    chance = random.Random(f"suite/{seed}")
    devices = chance.choice(fuzz_configs.DEVICES)
    flags = fuzz_configs.draw_invalid(chance, devices)
    assert fuzz_configs.refusal_holds(flags, devices) is None


def test_a_wrong_suggestion_is_seen(monkeypatch):
    def said(line):
        answers = iter([line, "error: and again: use --config.mesh.data=2"])
        monkeypatch.setattr(fuzz_configs, "refusal_of", lambda *_: next(answers))
        return fuzz_configs.refusal_holds([], 8)

    assert "is refused" in said("error: x=1 is odd: use --config.mesh.model=2 (or 1, 4)")
    assert "suggests no flags" in said("error: x=1 is odd: use 2")
    assert "no shell" in said("error: x=1 is odd: use --config.data.source=it's")
    assert "not one line" in said("error: a\nerror: b: use --config.mesh.data=2")
    assert "not refused" in said("")


def test_suggested_flags_are_read_as_a_shell_does():
    line = "error: x: use a, b: use --config.data.source='my  file (1).txt' --config.data.loss_mask= (or 'b c', d)"
    assert fuzz_configs.suggested(line) == ["--config.data.source=my  file (1).txt", "--config.data.loss_mask="]
