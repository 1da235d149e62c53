"""`jaxtrain.train.train`, as a Python program calls it: in a thread, more than once, with a recipe
of its own, and with mistakes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from support import COMPILE_QUICKLY, ROOT, train_runs

from jaxtrain.launch import free_port

PROGRAM = """
import json
import pathlib
import signal
import threading

from jaxtrain.config.recipes import load_recipe
from jaxtrain.run.exit_status import RunError
from jaxtrain.train_command import train

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
assert handlers == {
    number: signal.getsignal(number) for number in handlers
}, "signals are the program's"
print(json.dumps(found))
"""


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Of a program that runs in a folder."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_", "SLURM_", "OMPI_"))
    }
    return clean | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": COMPILE_QUICKLY,
        "JAXTRAIN_CACHE": str(folder / "cache"),
    }


@pytest.mark.full
def test_in_a_thread(tmp_path):
    """A run, the same once more, and errors with their statuses; the process lives on, and its
    signals are as they were."""
    train_runs.write_inputs(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
    )
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


STARTED_BEFORE = """
import concurrent.futures
import sys

import jax

from jaxtrain.train_command import train

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
flags = ["--config=recipe.py", "--workdir=run", "--config.train.steps=3"]
with concurrent.futures.ThreadPoolExecutor(1) as worker:
    print(worker.submit(train, flags).result().name, jax.process_count(), flush=True)
"""


@pytest.mark.full
def test_where_jax_distributed_runs_already(tmp_path):
    """As a worker of Ray Train: two processes with a device each, known to jax alone."""
    train_runs.write_inputs(tmp_path)
    own = environment(tmp_path) | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_ENABLE_PREEMPTION_SERVICE": "false",
    }
    words = [sys.executable, "-c", STARTED_BEFORE, f"localhost:{free_port()}"]
    processes = [
        subprocess.Popen(
            [*words, str(number)], cwd=tmp_path, env=own, stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [text.splitlines()[-1] for text in said] == ["FINISHED 2", "FINISHED 2"]
    assert "(2 × cpu, 2 processes)" in said[0] and list(train_runs.losses(tmp_path / "run")) == [
        1,
        2,
        3,
    ]
