"""Losses of every shipped recipe, shrunk by listed flags, on a text that never changes: the runs,
and the values of earlier ones.

tests/golden/ has the text, the flags, and a file of values for each version of jax, which
tests/golden/write.py makes.
"""

import json
import pathlib
from unittest import mock

from jaxtrain import cli, loop, train_command as train
from jaxtrain.config.rules.checks import Environment
from jaxtrain.config.rules.mesh_rules import on_mesh
from jaxtrain.phases import prepare
from jaxtrain.pipeline.prepared_run import CheckedRun
from jaxtrain.run.metrics import read_metrics
from jaxtrain.run.wall_clock import WallClock
from support import ROOT

FOLDER = ROOT / "tests" / "golden"
FLAGS = json.loads((FOLDER / "flags.json").read_text())
RECIPES = sorted(FLAGS.keys() - {"every"})
FIGURES = ("loss", "grad_norm", "mtp_loss")


def values_file(version: str) -> pathlib.Path:
    """Of a version of jax."""
    return FOLDER / f"jax-{version}.json"


def run(recipe: str, folder: pathlib.Path) -> dict[str, float]:
    """ "step 1 loss" → its value, of a shrunk recipe that this process trains in an empty folder on
    8 devices. $JAXTRAIN_CACHE says where the prepared text is kept."""
    shrunk = [f"--config.{flag}" for flag in (*FLAGS["every"], *FLAGS[recipe])]
    words = [
        f"--config={ROOT / 'configs' / recipe}.py",
        f"--config.data.source={FOLDER / 'corpus.txt'}",
        *shrunk,
    ]
    config, flags = cli.parse(words, train.DESCRIPTION, train.FLAGS)
    environment = Environment(8, "cpu", flags.recipe)
    checked = CheckedRun(config, environment, on_mesh(config, 8))
    prepared = prepare.prepare(checked, folder, reads_times=False, measures_times=False)
    # its program takes long to compile, and other tests have it
    with mock.patch.object(loop.Evaluation, "losses", return_value={}):
        loop.run(prepared, WallClock())
    records = read_metrics(folder)
    return {
        f"step {record['step']} {name}": record[name]
        for record in records
        for name in FIGURES
        if name in record
    }
