"""`jaxtrain.train.train`, as a Python program calls it: in a thread, more than once, with a recipe of its own, and with mistakes."""

import json
import os
import subprocess
import sys

from support import COMPILE_QUICKLY, ROOT, train_runs

PROGRAM = """
import json
import pathlib
import signal
import threading

from jaxtrain.config.recipes import load_recipe
from jaxtrain.run.exit_status import RunError
from jaxtrain.train import train

handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
found = {}


def call(name, *flags, **more):
    try:
        found[name] = train(["--workdir=run", "--cpu_devices=2", *flags], **more).name
    except RunError as error:
        found[name] = [error.status.name, str(error)]


def work():
    call("unknown flag", "--config=recipe.py", "--nothing=1")
    call("too few devices", "--config=recipe.py", "--config.mesh.stage=3")
    call("first", "--config.train.steps=3", recipe=load_recipe(pathlib.Path("recipe.py")))
    call("goes on", "--config=recipe.py", "--config.train.steps=3")
    call("other data", "--config=recipe.py", "--config.data.source=none.txt")


worker = threading.Thread(target=work)
worker.start()
worker.join()
assert handlers == {number: signal.getsignal(number) for number in handlers}, "signals are the program's"
print(json.dumps(found))
"""


def test_in_a_thread(tmp_path):
    """A run, the same once more, and errors with their statuses; the process lives on, and its signals are as they were."""
    train_runs.write_inputs(tmp_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_", "SLURM_", "OMPI_"))}
    environment |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": COMPILE_QUICKLY, "JAXTRAIN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["first"], found["goes on"]) == ("FINISHED", "FINISHED")
    assert "run already has its 3 steps" in done.stdout
    assert list(train_runs.losses(tmp_path / "run")) == [1, 2, 3]
    for name, status, text in (
        ("unknown flag", "BAD_CONFIG", "--nothing"),
        ("too few devices", "BAD_CONFIG", "mesh.stage=3"),
        ("other data", "BAD_CONFIG", "none.txt"),
    ):
        assert found[name][0] == status and text in found[name][1], found[name]
