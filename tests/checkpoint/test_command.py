"""`python -m jaxtrain.checkpoint`: steps listed, verified, shown, compared and deleted; one line for whatever is wrong."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from support import ROOT, small
from support.damage import damage_numbers

from jaxtrain import config as configs
from jaxtrain.checkpoint import __main__ as command
from jaxtrain.checkpoint import steps
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.steps import Meta
from jaxtrain.config import history
from jaxtrain.run import streams
from jaxtrain.training.state import stored_shapes
from jaxtrain.training.step import make_step

CONFIG = small.config((1, 2, 1), changes={"model.mlp_width": 512}).resolve()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run's folder with steps 3 and 6 of ones and of twos, and 6 with a NaN in its embedding; 3 has the lower validation loss."""
    folder = tmp_path_factory.mktemp("run")
    step = make_step(CONFIG, small.mesh_of(CONFIG))
    saves = Checkpointer(folder / "checkpoints", step.layout.placement, stored_shapes(step.layout, step.optimizer), command.Keep(5, best=1))
    for number, value in ((3, 1), (6, 2)):
        state = jax.tree.map(lambda a, value=value: jax.device_put(np.full(a.shape, value, a.dtype), a.sharding), step.abstract_state())
        changed = configs.replace(CONFIG, {"optimizer.learning_rate": value / 100})
        about = {"wall_s": 12.5, "checksum": "ab" * 32, "tokenizer": {"kind": "bytes"}}
        meta = Meta(config=configs.to_dict(changed), version=history.VERSION, step=number, **about)
        saves.save(number, state, dataclasses.asdict(meta))
        saves.evaluated(number, float(value))
    saves.close()
    return folder


@pytest.fixture
def run(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def here(capsys):
    """Runs the command in this process → (status, lines on standard output, standard error)."""

    def call(*argv) -> tuple[int, list[str], str]:
        try:
            status = streams.run(command.main, [str(word) for word in argv])
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return call


def test_ls_and_verify(run, here):
    status, (head, *rows), _ = here("ls", run)
    assert status == 0 and head.split() == ["step", "size", "saved", "validation", "loss"]
    assert [(row.split()[0], row.split()[-2:]) for row in rows] == [("3", ["1.0000", "whole"]), ("6", ["2.0000", "whole"])]
    assert here("verify", run)[:2] == (0, here("verify", run / "checkpoints")[1])
    damage_numbers(run / "checkpoints" / "6", "params.layers.mlp.up.weight/c/1")
    (run / "checkpoints" / "3" / "manifest.json").unlink()
    shutil.copytree(run / "checkpoints" / "6", run / "checkpoints" / "9.broken-1")
    _, (_, three, six, broken), _ = here("ls", run)
    assert three.endswith("it has no manifest.json") and six.endswith("whole") and broken.startswith("9.broken-1  ")
    status, lines, _ = here("verify", run)
    folder = run / "checkpoints"
    assert status == 74 and lines[0] == f"{folder}/3: it has no manifest.json" and lines[1] == "3: 1 damaged"
    assert lines[2].startswith(f"{folder}/6: state: params/layers/mlp/up/weight[1:2, 0:") and lines[2].endswith("is damaged")
    assert lines[3] == "6: 1 damaged"


def test_verify_names_each_damaged_file(run, here):
    folder = run / "checkpoints" / "6"
    for name in ("meta/metadata", "state/_METADATA", "_CHECKPOINT_METADATA"):
        (folder / name).write_bytes((folder / name).read_bytes().replace(b" ", b"\t", 1))
    assert here("verify", run, "--step=3")[0] == 0
    status, lines, _ = here("verify", run, "--step=6")
    assert status == 74
    assert lines == [
        *(f"{folder}: {name} is damaged" for name in ("_CHECKPOINT_METADATA", "meta/metadata", "state/_METADATA")),
        "6: 3 damaged",
    ]


def test_show(run, here):
    status, lines, _ = here("show", run, "--statistics")
    assert status == 0 and lines[0] == f"{run}/checkpoints/6: step 6, 12 s of training, corpus abababababab, tokenizer bytes"
    assert "  optimizer.learning_rate = 0.02" in lines
    (up,) = (line.split() for line in lines if line.startswith("params/layers/mlp/up/weight"))
    numbers = np.prod([int(word.strip("[],")) for word in up[1:4]])
    assert up[4] == "float32" and up[-4:] == ["2", "2", f"{2 * numbers**0.5:.6g}", "0"]
    assert here("show", run / "checkpoints" / "3")[1][0].startswith(f"{run}/checkpoints/3: step 3")


def test_diff(run, here):
    a, b = run / "checkpoints" / "3", run
    status, lines, _ = here("diff", a, b)
    assert status == 0 and "  optimizer.learning_rate: 0.01 → 0.02" in lines
    (up,) = (line.split() for line in here("diff", a, b, "--all")[1] if line.startswith("params/layers/mlp/up/weight"))
    assert up[1:] == ["1", "0.5", "100.0%"]
    assert lines[-1].endswith("0 are the same") and "20 are listed" in lines[-1]
    assert here("diff", a, a)[1][-1].startswith("0 arrays differ; ")


def test_prune(run, here):
    folder = run / "checkpoints"
    for name in ("9", "9.broken-1", "12.orbax-checkpoint-tmp"):
        shutil.copytree(folder / "6", folder / name)
    meta = json.loads((folder / "9" / "meta" / "metadata").read_text())
    (folder / "9" / "meta" / "metadata").write_text(json.dumps(meta))
    (folder / "9" / "manifest.json").unlink()
    flags = ["--keep=1", "--keep_best=1", "--broken", "--unfinished"]
    status, lines, _ = here("prune", run, "--keep=1", "--broken", "--unfinished")
    going = ["3", "9.broken-1", "12.orbax-checkpoint-tmp"]
    assert status == 0 and sorted(line.split()[2] for line in lines[:-1]) == sorted(f"{folder}/{name}" for name in going)
    assert lines[-1].startswith("3 folders, ") and lines[-1].endswith("would be deleted: --yes deletes them")
    assert (folder / "3").exists()
    # What is not whole counts for nothing: 6 is the newest, and 3 the best.
    status, lines, _ = here("prune", run, *flags, "--yes")
    assert status == 0 and sorted(path.name for path in folder.iterdir()) == ["3", "6", "9", "validation_losses.json"]
    assert not (run / "run.lock").exists() and steps.choose(folder, {}).step == 6


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lst", "RUN"], "'lst' is no command of jaxtrain checkpoint: use one of ls, verify, show, diff, prune"),
        (["ls"], "ls is about one folder, not 0: use jaxtrain checkpoint ls DIR"),
        (["diff", "RUN"], "diff is about two steps or runs, not 1: use jaxtrain checkpoint diff A B"),
        (["ls", "nowhere"], "'nowhere' is no folder: use the folder of a run, such as runs/"),
        (["verify", "RUN", "--step=5"], "--step=5 is no checkpoint of RUN/checkpoints (it has 3, 6): use --step=6"),
        (["show", "RUN", "--step=5"], "--step=5 is no checkpoint of RUN/checkpoints (it has 3, 6): use --step=6"),
        (["prune", "RUN"], "prune without a policy deletes nothing: use --keep=3 (and --keep_every, --keep_best)"),
        (["ls", "RUN", "--steps=3"], "--steps is an unknown flag"),
    ],
)
def test_one_line_for_what_is_wrong(original, here, argv, message):
    status, out, err = here(*(word.replace("RUN", str(original)) for word in argv))
    assert status == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"error: {message.replace('RUN', str(original))}"), err


def test_help_needs_no_jax():
    program = "import sys; from jaxtrain.checkpoint.__main__ import main; main(['--help'])"
    check = "import sys, jaxtrain.checkpoint.__main__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "prune DIR" in done.stdout
