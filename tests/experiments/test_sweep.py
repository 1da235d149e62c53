"""experiments/sweep.py: which runs a sweep has, what it refuses, and that it ends with the same
table however often it was killed. A program of a few lines stands for training; with --full the
real one, too."""

import contextlib
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support import ROOT

from jaxtrain import launch, train_command
from jaxtrain.experiments import sweep

# Trains like jaxtrain: it goes on where metrics.jsonl ends, until train.stop_at or 8 steps. The
# learning rate decides the loss; that of 9 ends it.
TRAIN = """
import json, os, pathlib, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
rate = float(flags["config.optimizer.learning_rate"])
folder = pathlib.Path(flags["workdir"])
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text("{}")
metrics = folder / "metrics.jsonl"
begin = len(metrics.read_text().splitlines()) if metrics.exists() else 0
print("after", begin, "on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
for step in range(begin + 1, int(flags.get("config.train.stop_at", 8)) + 1):
    time.sleep(SECONDS)
    if rate == 9 and step == 2:
        sys.exit("error: loss is nan")
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step, "loss": abs(rate - 4) + 1 / step}) + "\\n")
"""
SWEEP = """
import sys
from jaxtrain import launch, train_command
from jaxtrain.experiments import sweep
from jaxtrain.run import streams
launch.python = lambda module: [sys.executable, "train.py"]
sys.exit(streams.run(sweep.main, sys.argv[1:]))
"""
MESH = ["--config.mesh.stage=1", "--config.mesh.model=1", "--config.mesh.data=1"]
FLAGS = [*MESH, "--config.train.steps=8", "--workdir=all", "--parallel=2", "--cpu_devices=1"]
RATES = "--grid=optimizer.learning_rate=1,2,3.5,5,7"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to be in, with the programs above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(f"SECONDS = 0\n{TRAIN}")
    (tmp_path / "sweep.py").write_text(SWEEP)
    monkeypatch.setattr(launch, "python", lambda module: [sys.executable, "train.py"])
    monkeypatch.setattr(launch, "received_signals", list)
    return tmp_path


@pytest.fixture
def run(folder, capfd):
    """Runs a sweep in this process: its status, and its lines."""

    def run(*flags: str, common=FLAGS) -> tuple[int, list[str]]:
        status = sweep.main([*common, *flags])
        out, err = capfd.readouterr()
        return status, [*out.splitlines(), *err.splitlines()]

    return run


def table(lines: list[str]) -> list[str]:
    """The lines from the table's head on."""
    return lines[next(i for i, line in enumerate(lines) if line.endswith("  status")) :]


def test_the_runs_of_a_grid():
    runs = sweep.settings_of_runs(["a.b=1, 2", "c.d=x,y;z"], 0, 0)
    assert runs == [{"a.b": b, "c.d": d} for b in "12" for d in ("x,y", "z")]
    assert [sweep.name_of(each) for each in runs[:2]] == ["b=1,d=x,y", "b=1,d=z"]
    assert sweep.name_of({"a.b": "1", "c.b": "2"}) == "a.b=1,c.b=2"


def test_what_is_drawn():
    """Distinct runs within the ranges; more of them begin with the same ones."""
    texts = ["o.rate=1e-4..1e-2", "m.width=16..64", "m.name=a,b"]
    runs = sweep.settings_of_runs(texts, 40, 0)
    assert runs[:7] == sweep.settings_of_runs(texts, 7, 0) != sweep.settings_of_runs(texts, 7, 1)
    assert len({*map(sweep.name_of, runs)}) == 40
    rates = [float(each["o.rate"]) for each in runs]
    assert 1e-4 <= min(rates) < 4e-4 and 3e-3 < max(rates) <= 1e-2
    assert 10 < sum(rate < 1e-3 for rate in rates) < 30, "log-uniform: the middle is 1e-3"
    assert all(16 <= int(each["m.width"]) <= 64 for each in runs)
    assert len(sweep.settings_of_runs(["m.width=1..3"], 9, 0)) == 3, "there are no others"


def test_names_are_those_of_files():
    names = [sweep.name_of({"a.b": text}) for text in ("../x", "__/x", "x" * 300, "x" * 301, "…")]
    assert len({*names}) == 5 and all(re.fullmatch("[A-Za-z0-9_.,=+-]{1,140}", n) for n in names)


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "a sweep has no --grid: use --grid optimizer"),
        (["--grid", "data.seed"], "data.seed='' is not an integer"),
        (["--grid", "optimizer.learning_rat=1"], "use --config.optimizer.learning_rate=1"),
        (["--grid=optimizer.learning_rate=1e-3,-1"], "learning_rate=-1.0 must be above 0"),
        (["--grid=optimizer.learning_rate=1e-3..1e-2"], "'1e-3..1e-2' is not a number"),
        (["--grid=mesh.data=1,3"], "no multiple of mesh.data=3"),
        ([f"--grid=data.seed={','.join(map(str, range(1001)))}"], "1,001 runs has more than 1,000"),
        ([RATES, "--index=5"], "--index=5 is not below the number of runs, 5: use --index=4"),
        ([RATES, "--workdir=/proc/x"], "cannot be locked"),
    ],
)
def test_what_is_refused(run, folder, flags, message):
    before = sorted(os.listdir())
    status, (line,) = run(*flags)
    assert status == 2 and line.startswith("error: ") and message in line
    assert sorted(os.listdir()) == before


def test_a_sweep_its_failures_and_the_next_start(run, folder):
    """A run that fails does not end the sweep; the next start trains it once more, and no other."""
    grid = "--grid=optimizer.learning_rate=5,9,4", "--grid", "data.seed=7"
    status, lines = run(*grid)
    assert status == 1 and lines[0] == "runs to 1/1 of their steps: 3, of which 3 now"
    assert "/3 learning_rate=9,seed=7: 1 FAULT, error: loss is nan" in "\n".join(lines)
    words = [line.split() for line in table(lines)]
    assert words[:4] == [
        ["optimizer.learning_rate", "data.seed", *sweep.REACHED, "status"],
        ["4", "7", "8", "0.125", "finished"],
        ["5", "7", "8", "1.125", "finished"],
        ["9", "7", "1", "6", "1", "FAULT"],
    ]
    assert table(lines)[4:] == ["1 FAULT: all/learning_rate=9,seed=7: error: loss is nan"]
    said = pathlib.Path("all/learning_rate=9,seed=7/output.log")
    # each stream has a reader of its own
    assert {*said.read_text().splitlines()} >= {"after 0 on None", "error: loss is nan"}
    assert (folder / "all" / "sweep.png").stat().st_size > 9000
    assert (folder / "all" / "table.txt").read_text().splitlines() == table(lines)
    status, again = run(*grid)
    assert "3, of which 1 now" in again[0] and table(again) == table(lines)
    assert "after 1 on None" in said.read_text()
    assert (
        "1, of which 1 now" in run("--grid=data.seed=7", "--config.optimizer.learning_rate=6")[1][0]
    )


def test_what_has_no_record_is_trained_again(run, folder):
    """A removed run, and one of whose record another program has made something else."""
    before = table(run(RATES)[1])
    records = folder / "all" / "sweep.jsonl"
    lines = records.read_text().splitlines()
    spoiled = [line.replace('"status": 0', '"status": "0"') for line in lines if "rate=7" in line]
    rest = [line for line in lines if "rate=7" not in line]
    other = ["[]", "7", "{}", '{"cut": 1}', lines[0][:-9], "\0", *spoiled]
    records.write_text("".join(f"{line}\n" for line in [*rest, *other]))
    shutil.rmtree("all/learning_rate=2")
    status, lines = run(RATES)
    assert (status, lines[0]) == (0, "runs to 1/1 of their steps: 5, of which 2 now")
    assert table(lines) == before


def test_halving(run, folder):
    """The best third goes on, by the losses at the end of each rung."""
    rates = "--grid=optimizer.learning_rate=1,2,3,4,5,6,7,8,9"
    status, lines = run(rates, "--halving=3")
    assert status == 1 and [line for line in lines if "of their steps" in line] == [
        "runs to 1/3 of their steps: 9, of which 9 now",
        "runs to 1/1 of their steps: 3, of which 3 now",
    ]
    words = [line.split()[:2] for line in table(lines)[1:10]]
    assert words == [
        *(["4", "8"], ["3", "8"], ["5", "8"]),
        *(["2", "2"], ["6", "2"], ["1", "2"], ["7", "2"], ["8", "2"], ["9", "1"]),
    ]
    assert table(run(rates, "--halving=3")[1]) == table(lines)


def test_another_halving(run, folder):
    """A run that is beyond the rung already is ranked by its loss at the rung's end, and the table
    has the furthest that it came."""
    run("--grid=optimizer.learning_rate=3.9")
    _, lines = run("--grid=optimizer.learning_rate=3.9,4.05", "--halving=2")
    assert "1, of which 1 now" in [line for line in lines if "of their steps" in line][1]
    words = [line.split()[:3] for line in table(lines)[1:3]]
    assert words == [["4.05", "8", "0.175"], ["3.9", "8", "0.225"]]


def test_parallel_runs_share_the_gpus(run, folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,8,9")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status, _ = run(RATES, common=["--workdir=all", "--parallel=2"])
    assert status == 0
    seen = {path.read_text().split()[-1] for path in pathlib.Path("all").glob("*/output.log")}
    assert seen == {"3,5", "6,8"}


def test_a_run_of_a_list_by_its_index(run, folder, monkeypatch):
    """In this process, and the table of the sweep has it: a job of an array has trained it."""
    _, lines = run(RATES, "--list")
    assert len(lines) == 5 and not (folder / "all").exists()
    words = shlex.split(lines[2])
    assert words[:2] == ["jaxtrain", "train"] and words[-1] == "--workdir=all/learning_rate=3.5"
    train = lambda argv: subprocess.run([*launch.python(""), *argv], check=True).returncode
    monkeypatch.setattr(train_command, "main", train)
    (folder / "all").mkdir()
    assert run(RATES, "--index=2")[0] == 0
    status, lines = run(RATES)
    assert (status, lines[0]) == (0, "runs to 1/1 of their steps: 5, of which 4 now")
    assert table(lines)[1].split() == ["3.5", "8", "0.625", "finished"]


def alive(folder: pathlib.Path) -> list[int]:
    """The processes that train in a folder."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            is_here = pathlib.Path(os.readlink(process / "cwd")) == folder
        except OSError:
            continue  # it has ended
        if is_here and any(word.startswith("--workdir=all/") for word in words):
            found.append(int(process.name))
    return found


RUN = 0  # in the place of a signal to the sweep: SIGKILL to one of its runs
KILLS = (signal.SIGKILL, RUN, signal.SIGTERM, signal.SIGINT, RUN, signal.SIGKILL)


def kill_at_random(
    folder: pathlib.Path, command: list[str], kills: tuple[int, ...], wait: float
) -> None:
    """Starts a sweep once for each kill, which comes at most `wait` seconds after a run has
    begun."""
    generator, own = random.Random(0), os.environ | {"PYTHONPATH": str(ROOT)}
    for kill in kills:
        sweeping = subprocess.Popen(command, cwd=folder, env=own, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not alive(folder) and sweeping.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(generator.uniform(0, wait))
        for process in alive(folder)[:1] if kill == RUN else [sweeping.pid]:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process, kill or signal.SIGKILL)
        sweeping.communicate(timeout=600)
        deadline = time.monotonic() + 5
        while alive(folder):
            assert time.monotonic() < deadline, "a run outlives the sweep"
            time.sleep(0.01)


@pytest.mark.parametrize(
    "halving, kills",
    [
        ("1", KILLS[:1]),
        pytest.param("1", KILLS, marks=pytest.mark.full),
        pytest.param("2", KILLS, marks=pytest.mark.full),
    ],
)
def test_a_sweep_killed_at_random(run, folder, halving, kills):
    """It has the table of one that was not killed."""
    flags = [*FLAGS, RATES, f"--halving={halving}"]
    (folder / "train.py").write_text(f"SECONDS = 0.05\n{TRAIN}")
    kill_at_random(folder, [sys.executable, "sweep.py", *flags], kills, 1.0)
    (folder / "train.py").write_text(f"SECONDS = 0\n{TRAIN}")
    killed = table(run(*flags, common=())[1])
    shutil.rmtree("all")
    assert killed == table(run(*flags, common=())[1])


@pytest.mark.full
@pytest.mark.parametrize("halving", ["1", "3"])
def test_twelve_runs_killed_at_random(tmp_path, halving):
    """The same with the real training."""
    (tmp_path / "killed").mkdir()
    (tmp_path / "straight").mkdir()
    model = {"model.layers": 1, "model.width": 8, "model.heads": 1, "train.sample_tokens": 0}
    sizes = {"data.sequence_length": 8, "data.batch_size": 2, "pipeline.microbatches": 1}
    settings = model | sizes | {"train.steps": 12, "checkpoint.every": 3, "train.eval_every": 5}
    command = [
        *(sys.executable, "-m", "jaxtrain", "sweep", *MESH, "--workdir=all", "--parallel=2"),
        *("--cpu_devices=1", f"--halving={halving}", "--grid=data.seed=0,1,2"),
        "--grid=optimizer.learning_rate=1e-3,3e-3,1e-2,3e-2",
        *(f"--config.{path}={value}" for path, value in settings.items()),
    ]
    kill_at_random(tmp_path / "killed", command, KILLS, 25.0)
    tables = []
    for name in ("killed", "straight"):
        done = subprocess.run(
            command,
            cwd=tmp_path / name,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done
        tables.append(table(done.stdout.splitlines()))
    assert tables[0] == tables[1] and len(tables[0]) == 13
    assert all(line.endswith("  finished") for line in tables[0][1:])
