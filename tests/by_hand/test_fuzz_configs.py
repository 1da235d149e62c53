"""tests/by_hand/fuzz_configs.py: what the trainer suggests for random configs that cannot
work is true, and the drawing is not idle."""

import concurrent.futures
import os
import random
import subprocess
import sys

import pytest
from support import ROOT

from by_hand import fuzz_configs


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
    line = (
        "error: x: use a, b: use --config.data.source='my  file (1).txt' --config.data.loss_mask= "
        "(or 'b c', d)"
    )
    assert fuzz_configs.suggested(line) == [
        "--config.data.source=my  file (1).txt",
        "--config.data.loss_mask=",
    ]


def test_every_process_suggests_the_same():
    """Sets of strings have another order in each process."""
    settings = {
        "mesh.data": 4,
        "mesh.replica": 2,
        "mesh.stage": 4,
        "mesh.model": 2,
        "model.layers": 2,
        "model.heads": 8,
    }
    wrong = {
        "model.router_normalize": "1f1b",
        "model.loss_chunk": 2**31,
        "parallel.reduce": "x",
        "optimizer.b1": 7.0,
    }
    flags = [
        *fuzz_configs.flags_of(settings | wrong),
        "--config.pipeline.schedule=auto",
        "--config.pipeline.repeats=0",
    ]
    code = f"from by_hand import fuzz_configs; print(fuzz_configs.refusal_of({flags}, 4))"
    said = []
    for seed in ("1", "2", "3"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        }
        said.append(
            subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert len(set(said)) == 1 and said[0].startswith("error: ")


def test_threads_get_their_own_refusals():
    flags = [[f"--config.optimizer.b1={1 + i}"] for i in range(12)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns so often that they meet
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            said = list(pool.map(fuzz_configs.refusal_of, flags, [8] * len(flags)))
    finally:
        sys.setswitchinterval(interval)
    assert [line.split()[1] for line in said] == [f"optimizer.b1={1.0 + i}" for i in range(12)]
