"""What `import jaxtrain` offers, as Python programs and notebooks use it: docs/python.md from
beginning to end, in a thread, more than once, with Ctrl-C, and with mistakes."""

import ast
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from support import COMPILE_QUICKLY, ROOT, train_runs

import jaxtrain
from jaxtrain import api, train_command
from jaxtrain.launch import free_port

DOCUMENT = ROOT / "docs" / "python.md"
PAGE_BYTES = 6_000


# --- the names ------------------------------------------------------------------------------------


def test_names_without_jax():
    """Settings and recipes are there without jax; so is every other name, until it is called, but
    product, which a layer of one's own calls."""
    program = (
        "import sys, jaxtrain; jaxtrain.Config, jaxtrain.load_recipe('tiny'); "
        "print([name for name in ('jax', 'jaxtrain.api') if name in sys.modules]); "
        "[getattr(jaxtrain, name) for name in jaxtrain.__all__ if name != 'product']; "
        "print('jax' in sys.modules)"
    )
    words = [sys.executable, "-c", program]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=own, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]


def test_editors_and_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "jaxtrain" / "__init__.py").read_text())
    (for_types,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [name.name for node in for_types.body for name in node.names]
    assert sorted(imported) == jaxtrain.__all__ == sorted({*jaxtrain.__all__} & {*dir(jaxtrain)})
    homes = {node.module for node in for_types.body}
    assert homes == {*jaxtrain.HOMES}


def test_settings_of_items_may_be_dicts(tmp_path):
    web, code = tmp_path / "web.txt", tmp_path / "code.txt"
    for path in (web, code):
        path.write_text("text")
    changes = {
        "data.sources": {"web": str(web), "code": {"path": str(code), "weight": 0.25}},
        "train.phases": {"late": {"step": 7, "weight.code": 1}},
    }
    config, _ = train_command.parse(*api._command_line("tiny", changes))
    assert config.data.sources == (f"web={web}", f"code={code}", "code.weight=0.25")
    assert config.train.phases == ("late.step=7", "late.weight.code=1")


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="'jaxtrain' has no attribute 'trian'"):
        jaxtrain.trian  # noqa: B018


@pytest.mark.parametrize("name", ["train", "generate", "plan"])
def test_a_command_does_not_take_its_functions_place(name):
    with pytest.raises(ImportError, match=f"use `from jaxtrain import {name}`"):
        importlib.import_module(f"jaxtrain.{name}")
    assert getattr(jaxtrain, name).__module__ == "jaxtrain.api"


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_short():
    assert len(DOCUMENT.read_bytes()) <= PAGE_BYTES


def test_the_page_runs(tmp_path):
    """Its blocks one after the other, and the examples of api.py, in one process, which no mistake
    ends."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "python_page.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "mesh.model=3 does not divide model.heads=4: use --config.mesh.model=" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    losses = {int(step): loss for step, loss in found["losses"].items()}
    assert sorted(losses) == [1, 10, 20, 25] and losses[25] < losses[1] - 1
    assert found["first"] == "FINISHED" and 0 < len(found["text"]) <= 8
    assert abs(found["metrics"]["loss"] - losses[1]) < 0.5 and found["step"] == 20
    assert found["best"]["data"] == 8
    assert found["still functions"] == [True] * 3
    assert found["examples"] == [
        f"jaxtrain.api.{name}" for name in ("generate", "make_step", "plan", "train")
    ]
    assert found["failures"] == 0, done.stdout
    for name, text in (
        ("no recipe", "use --config=tiny"),
        ("no setting", "mesh.modell='2' is an unknown setting"),
        ("no data", "none.txt"),
        ("other devices", "this process has used jax already, and has 2 cpu devices"),
    ):
        assert found[name][0] == "BAD_CONFIG" and text in found[name][1], found[name]


# --- as a program calls it ------------------------------------------------------------------------


PROGRAM = """
import json
import pathlib
import signal
import threading

from jaxtrain import RunError, load_recipe, train

handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
found = {}


def call(name, *flags, **more):
    try:
        run = train(workdir="run", cpu_devices=2, flags=flags, **more)
        found[name] = [run.status.name, sorted(run.losses)]
    except RunError as error:
        found[name] = [error.status.name, str(error)]


def work():
    call("unknown flag", "--nothing=1", recipe="recipe.py")
    call("too few devices", recipe="recipe.py", changes={"mesh.stage": 3})
    call("first", recipe=load_recipe("recipe.py"), changes={"train.steps": 3})
    call("goes on", "--config=recipe.py", "--config.train.steps=3")
    call("other data", recipe=pathlib.Path("recipe.py"), changes={"data.source": "none.txt"})


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
    assert found["first"] == found["goes on"] == ["FINISHED", [1, 2, 3]]
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

from jaxtrain import train

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
flags = ["--config=recipe.py", "--workdir=run", "--config.train.steps=3"]
with concurrent.futures.ThreadPoolExecutor(1) as worker:
    print(worker.submit(train, flags=flags).result().status.name, jax.process_count(), flush=True)
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


INTERRUPTED = """
import jaxtrain

for steps in (2000, 4):
    run = jaxtrain.train("recipe.py", {"train.steps": steps}, workdir="run", cpu_devices=2)
    print("ended", run.status.name, flush=True)
"""


@pytest.mark.full
def test_ctrl_c_stops_the_run_and_not_the_program(tmp_path):
    """The run is saved at a step, and the program goes on: here with fewer steps than were
    made."""
    train_runs.write_inputs(tmp_path)
    program = subprocess.Popen(
        [sys.executable, "-u", "-c", INTERRUPTED],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = []
        for line in program.stdout:
            said.append(line)
            if line.startswith("step 1/"):
                program.send_signal(signal.SIGINT)
        assert program.wait(60) == 0, said
    finally:
        program.kill()
    ended = [line for line in said if line.startswith("ended")]
    assert ended == ["ended INTERRUPTED\n", "ended FINISHED\n"]
    assert any("the same command goes on from there" in line for line in said)
