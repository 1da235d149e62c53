"""tests/by_hand/fuzz_checkpoints.py: some of its cases, and that it notices a
command that counts what is not complete."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from support import small

from by_hand import fuzz_checkpoints
from jaxtrain import config as configs
from jaxtrain.checkpoint import retention, steps
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.steps import Meta
from jaxtrain.training.state import stored_shapes
from jaxtrain.training.step import make_step

CONFIG = small.config((1, 2, 1)).resolve()


@pytest.fixture
def fuzz(tmp_path, monkeypatch, capsys):
    """Runs the script on steps that were not trained → (status, what it has printed)."""

    def save(folder, seed):
        step = make_step(CONFIG, small.mesh_of(CONFIG))
        saves = Checkpointer(
            folder / "checkpoints",
            stored_shapes(step.layout, step.optimizer),
            retention.Retention(5),
        )
        for number in (3, 6, 9):
            state = jax.tree.map(
                lambda a, n=number + seed: jax.device_put(np.full(a.shape, n, a.dtype), a.sharding),
                step.abstract_state(),
            )
            about = {"checksum": "ab" * 32, "tokenizer": {"kind": "bytes"}}
            meta = Meta(config=configs.to_dict(CONFIG), step=number, **about)
            saves.save(number, state, dataclasses.asdict(meta))
            saves.evaluated(number, 1.0)
        saves.close()
        (folder / "config.json").write_text("{}")

    def run(*words):
        flags = ["--cases=5", "--real_every=0", f"--folder={tmp_path}", *words]
        monkeypatch.setattr(sys, "argv", ["fuzz_checkpoints.py", *flags])
        return fuzz_checkpoints.main(), capsys.readouterr().out

    monkeypatch.setenv("FUZZ_UNPRIVILEGED", "1")
    monkeypatch.setattr(retention, "DELETION_S", 0.1)
    monkeypatch.setattr(fuzz_checkpoints, "train", save)
    return run


def test_some_cases(fuzz):
    status, out = fuzz()
    assert status == 0 and out.endswith("5 cases, 0 failed\n"), out


def test_a_command_that_counts_what_is_not_complete_is_noticed(fuzz, monkeypatch):
    monkeypatch.setattr(steps, "fault", lambda folder: "")
    status, out = fuzz()
    assert status == 1 and "ls has " in out
