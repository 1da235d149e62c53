"""Runs of several processes on this machine, through `python -m jaxtrain.launch`: the same losses,
checkpoints, stops and failures.

The launcher by itself is in test_launch.py.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
from collections.abc import Sequence

import pytest
from support import hardware_file, train_runs as runs
from support.damage import damage_numbers
from support.processes import assert_gone, children, process_of_run
from support.train_runs import assert_same_trajectory, settings

from jaxtrain.data.row_log import check_rows, read_rows
from jaxtrain.launch import free_port
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.metrics import read_metrics

STEPS = 12
DEVICES = 2  # of all processes together; those of --full have several each


@pytest.fixture(scope="module")
def single(folder):
    """The workdir of one process, with a profile."""
    workdir = folder / "single"
    train(workdir, 1, *settings(train__steps=STEPS, train__profile_steps=2, metrics__rows=True))
    return workdir


@pytest.fixture(scope="module")
def large(folder):
    """The workdir of one process with the larger model on 8 devices."""
    workdir = folder / "large"
    train(workdir, 1, *runs.large("1x4x2"), *settings(train__steps=24), devices=8)
    return workdir


@pytest.fixture
def workdir(folder, request):
    """A new workdir beside the others, gone after the test."""
    workdir = folder / re.sub(r"\W+", "-", request.node.name)
    yield workdir
    shutil.rmtree(workdir, ignore_errors=True)


def launch(workdir: pathlib.Path, processes: int, *flags: str, devices: int = DEVICES) -> list[str]:
    """The words of a launcher of so many processes with so many devices in all."""
    own = [
        "jaxtrain.launch",
        f"--processes={processes}",
        f"--devices_per_process={devices // processes}",
    ]
    return [*own, "--", "--config=recipe.py", f"--workdir={workdir.name}", *flags]


def train(workdir: pathlib.Path, processes: int, *flags: str, devices: int = DEVICES) -> runs.Done:
    """Runs the training command to its end, in one process or by the launcher in several."""
    if processes == 1:
        return runs.train(workdir, *flags, devices=devices)
    with runs.running(
        workdir.parent, *launch(workdir, processes, *flags, devices=devices)
    ) as command:
        return command.end()


@pytest.mark.full
def test_ops_have_their_names_in_a_profile(single):
    """As the table's columns are named: the ops of the chunks, and what comes before and after
    them. On one device a trace has not all."""
    (trace,) = (single / "profile").rglob("*.xplane.pb")
    for op in ("embed", "F0", "K0", "R0", "B0", "W0", "head", "optimizer"):
        assert f"/{op}/".encode() in trace.read_bytes(), op


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_profile_by_part(processes, workdir, folder):
    """Two stages, by one process and by two, of which process 0 reads its own device's part: every
    part of the plan is there."""
    flags = settings(
        train__steps=STEPS, train__profile_steps=2, train__hardware=hardware_file.write(folder)
    )
    train(workdir, processes, *flags)
    record = json.loads((workdir / "planned.json").read_text())
    exposed = record["trace"]["exposed"]
    assert {"matmuls", "attention", "memory", "optimizer", "stage", "waiting"} <= exposed.keys()
    assert "communication" not in exposed and sum(exposed.values()) == pytest.approx(
        record["trace"]["step_time_s"], rel=0.01
    )
    assert (
        record["planned_step_time_s"] == pytest.approx(sum(record["planned"].values()))
        and record["largest_miss"]["part"]
    )


@pytest.mark.full
def test_a_replica_in_each_process(workdir):
    """Replicas that train apart: rows of the log are of both, also where the processes have not met
    since the last one."""
    flags = settings(
        mesh__replica=2, train__diloco_inner_steps=4, metrics__log_every=3, train__steps=10
    )
    train(workdir, 2, *flags, devices=4)
    one = workdir.with_name("one")
    train(one, 1, *flags, *settings(checkpoint__every=0, checkpoint__minutes=0.00001), devices=4)
    assert list(runs.losses(workdir)) == [1, 3, 6, 9, 10]
    assert_same_trajectory(runs.losses(workdir), runs.losses(one))
    assert runs.checkpoints(workdir) == [3, 6, 9, 10]
    # They meet in the log and the exchange, steps 3, 4, 6, 8 and 9; what is asked there is answered
    # a step later.
    assert len(runs.checkpoints(one)) > 1 and set(runs.checkpoints(one)) <= {4, 5, 7, 9, 10}


def assert_continue_each_other(
    whole, workdir, numbers: list[int], *flags: str, devices: int = DEVICES
) -> list[runs.Done]:
    """A run of one process, continued by other numbers of processes: the trajectory of the run that
    was never stopped."""
    runs.copy_up_to(3, whole, workdir)
    runs_done = []
    for start, processes in zip(itertools.count(3, 3), numbers):
        done = train(workdir, processes, *flags, *settings(train__steps=start + 3), devices=devices)
        assert f"continuing from step {start}" in done.out
        runs_done.append(done)
    found = runs.losses(workdir)
    assert list(found) == list(range(1, 3 * len(numbers) + 4))
    assert_same_trajectory(found, runs.losses(whole))
    return runs_done


def test_processes_continue_each_other(single, workdir):
    """A new start of two: below. On and on: of the larger model."""
    # as if two devices of four were gone
    four = settings(mesh__replica=2, mesh__data=1, mesh__elastic=True)
    flags = [*four, *settings(train__sample_tokens=4, metrics__rows=True)]
    (done,) = assert_continue_each_other(single, workdir, [2], *flags)
    elastic = (
        "elastic: mesh.replica 2 → 1, pipeline.microbatches 2 → 4 for the 2 devices at hand; a "
        "step still has 16 sequences"
    )
    assert f"[0] note: {elastic}" in done.out.splitlines()
    # The second start's processes have read what the one process has.
    assert read_rows(workdir) == read_rows(single) and len(list((workdir / "rows").iterdir())) == 2
    # One of them talks and keeps the logs.
    assert "[0] mesh: stage 2 (2 × cpu, 2 processes)" in done.out.splitlines()
    assert "[0] sample, " in done.out
    (sample,) = map(json.loads, (workdir / "samples.jsonl").read_text().splitlines())
    assert (sample["step"], sample["temperature"]) == (6, 0.8) and sample["text"]
    starts = [json.loads(line) for line in (workdir / "starts.jsonl").read_text().splitlines()]
    assert [(each["step"], each["processes"]) for each in starts][-1] == (3, 2)
    assert not [
        line
        for line in done.out.splitlines()
        if re.match(r"\[1\] (mesh|step|validation|sample)", line)
    ]
    assert runs.checkpoints(workdir) == [3, 6] and not runs.unfinished(workdir)


@pytest.mark.full
def test_damage_that_one_process_meets_is_everybody_s(single, workdir):
    """Each reads its stage's layers alone: the second one finds a damaged piece, and both take the
    step before."""
    runs.copy_up_to(6, single, workdir)
    damage_numbers(workdir / "checkpoints" / "6", "params.layers.mlp.up.weight/c/2")
    done = train(workdir, 2, *settings(train__steps=8))
    why = (
        "6 (params/layers/mlp/up/weight cannot be read: its data is damaged); the newest complete "
        "checkpoint is 3"
    )
    assert (
        f"[0] passed over in {workdir.name}/checkpoints: {why}" in done.out
        and "[0] continuing from step 3" in done.out
    )
    assert_same_trajectory(runs.losses(workdir), runs.losses(single))
    assert list(runs.losses(workdir)) == list(range(1, 9)) and runs.unfinished(workdir) == [
        "6.broken-1"
    ]


@pytest.mark.full
def test_another_number_of_processes_neither_repeats_nor_skips_a_row(folder, workdir):
    """4, 2, 1 and again 4 processes of one run, the batch split over all, a mixture and phases:
    rows and losses are those of one process."""
    (folder / "code.txt").write_text((folder / "recipe.py").read_text() * 2)
    sources = (f"text={folder}/corpus.txt", f"code={folder}/code.txt", "code.weight=0.3")
    phases = ("later.step=5", "later.weight.code=0.6", "longer.step=8", "longer.sequence_length=64")
    flags = settings(mesh__stage=1, mesh__data=4, metrics__rows=True)
    flags += settings(data__sources=",".join(sources), train__phases=",".join(phases))
    whole = workdir.with_name("whole-rows")
    train(whole, 1, *flags, *settings(train__steps=STEPS), devices=4)
    for steps, processes in ((3, 4), (6, 2), (9, 1), (12, 4)):
        train(workdir, processes, *flags, *settings(train__steps=steps), devices=4)
    found = read_rows(workdir)
    assert found == read_rows(whole) and [*found] == list(range(STEPS))
    assert sum(read.sequences for read in check_rows(workdir).values()) == 16 * STEPS
    assert [record["batch"] for record in read_metrics(workdir) if "loss" in record] == list(
        range(STEPS)
    )
    assert_same_trajectory(runs.losses(workdir), runs.losses(whole))


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_elastic_run_goes_on_with_the_devices_at_hand(folder, workdir, zero):
    """Four devices of two processes, two of one, and four again, by the same flags: the losses of
    four devices."""
    flags = settings(
        mesh__stage=1, mesh__data=4, mesh__elastic=True, parallel__zero=zero, metrics__rows=True
    )
    whole = workdir.with_name(f"whole-zero-{zero}")
    train(whole, 1, *flags, *settings(train__steps=STEPS), devices=4)
    for steps, processes, devices in ((4, 2, 4), (8, 1, 2), (12, 2, 4)):
        done = train(workdir, processes, *flags, *settings(train__steps=steps), devices=devices)
        assert (
            "elastic: mesh.data 4 → 2, pipeline.microbatches 2 → 4 for the 2 devices at hand"
            in done.out + done.err
        ) == (devices == 2)
    assert read_rows(workdir) == read_rows(whole)
    assert_same_trajectory(runs.losses(workdir), runs.losses(whole))


@pytest.mark.full
def test_processes_of_the_larger_model_continue_each_other(large, workdir):
    assert_continue_each_other(large, workdir, [4, 2, 1, 4, 1, 2], *runs.large("1x4x2"), devices=8)


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("mesh", ["2x2x2", "8x1x1", "1x8x1"])
def test_processes_on_other_meshes(large, workdir, processes, mesh):
    """Each process reads the rows of its own devices, where the batch is split over processes."""
    train(workdir, processes, *runs.large(mesh), *settings(train__steps=6), devices=8)
    train(workdir, 1, *runs.large("1x4x2"), *settings(train__steps=9), devices=8)
    # The gradient's norm in step 7 is so steep that one process on these meshes is 1.6e-5 off, too.
    assert_same_trajectory(runs.losses(workdir), runs.losses(large))


@pytest.mark.full
def test_one_that_is_told_to_stop_and_one_that_is_killed(single, workdir):
    """The first as a cluster takes a machine away: all save the same step and stop, with a status
    of their own. Then a kill: the others say who has gone. Each time the launcher starts the run
    again, which ends as if nothing had been; nobody is left behind."""
    steps = 60
    flags = settings(train__steps=steps, mesh__stage=1, mesh__data=2, checkpoint__every=30)
    words = launch(workdir, 2, *flags)
    words.insert(1, "--restarts=2")
    with runs.running(workdir.parent, *words) as command:
        command.wait_for(lambda: runs.last_step(workdir) > 0, "a step")
        before = children(command.process.pid)
        os.kill(process_of_run(command.process.pid, 1), signal.SIGTERM)
        command.wait_for(
            lambda: "restart 1 of 2: the run ended with status 75" in command.errors(),
            "a stop on request",
        )
        step = runs.last_step(workdir)
        assert f"[0] stopped at step {step} of {steps}" in command.output()
        assert runs.checkpoints(workdir)[-1] == step < steps and not runs.unfinished(workdir)

        command.wait_for(lambda: runs.last_step(workdir) > step, "a step after going on")
        assert f"continuing from step {step}" in command.output()
        before += children(command.process.pid)
        os.kill(process_of_run(command.process.pid, 1), signal.SIGKILL)
        command.wait_for(
            lambda: "restart 2 of 2: the run ended with status " in command.errors(), "a kill"
        )
        assert re.search(
            r"^error: process 1 \(.+, pid \d+\) has gone without a word, after step \d+$",
            command.errors(),
            re.MULTILINE,
        )
        done = command.end()
    assert "Traceback" not in done.err + done.out
    assert_gone([pid for pid in before if pid != command.process.pid])
    found = runs.losses(workdir)
    assert list(found) == list(range(1, steps + 1))
    assert_same_trajectory({step: found[step] for step in range(1, STEPS + 1)}, runs.losses(single))


@pytest.mark.full
def test_a_process_with_slow_data_is_named(folder, workdir):
    """By number and host, with how much the others lose by it, as soon as a window is over."""
    flags = settings(
        train__steps=10_000, checkpoint__every=0, mesh__stage=1, mesh__data=2, data__prefetch=1
    )
    words = launch(workdir, 2, *flags)
    words.insert(1, "--module=support.slow_data")
    paths = {"PYTHONPATH": f"{runs.ROOT}:{runs.ROOT / 'tests'}"}
    with runs.running(folder, *words, environment=paths) as command:
        named = lambda: [record for record in read_metrics(workdir) if "slowest_process" in record]
        command.wait_for(lambda: len(named()) > 2, "a process is named")
        command.signal(signal.SIGTERM)
        done = command.end(status=ExitStatus.STOPPED)
    assert {record["slowest_process"] for record in named()} == {1}
    assert all(0.1 < record["slowest_behind_s"] < 0.3 for record in named())
    lines = [line for line in done.err.splitlines() if "is slowest" in line]
    pattern = (
        rf"\[0\] warning: steps \d+ to \d+: process 1 \({re.escape(socket.gethostname())}, pid "
        r"\d+\) is slowest, with 0\.\d+ s of its own"
    )
    assert lines and all(re.match(pattern, line) for line in lines)


def test_what_every_process_finds_wrong(folder, workdir):
    """Too few devices: status 2 from the launcher, and nothing written."""
    with runs.running(folder, *launch(workdir, 2, *settings(mesh__stage=3))) as command:
        done = command.end(status=2)
    said = r"\[[01]\] error: mesh.stage=3 does not fit.*\nprocess [01] failed with status 2\n"
    assert re.fullmatch(said, done.err), "once"
    assert not workdir.exists()


# --- processes that differ ------------------------------------------------------------------------

THREE = settings(mesh__stage=1, data__batch_size=24, train__steps=3)


def three(
    workdir: pathlib.Path,
    *flags: str,
    own: Sequence[str] = (),
    within: Sequence[str] = (),
    turned: bool = False,
    status: int = 0,
    **environment: str,
) -> list[runs.Done]:
    """Three processes that a user has started one by one, at their end. flags: of all.

    The second has its `own` flags and environment, the words of a command that becomes it, and the
    other flags in another order if it is `turned`.
    """
    _, *words = runs.training(workdir, *THREE, *flags, devices=1)
    words += [f"--coordinator=localhost:{free_port()}", "--processes=3"]
    others = ["jaxtrain.train", *words]
    second = ["jaxtrain.train", *(reversed(words) if turned else words), "--process_id=1", *own]
    with contextlib.ExitStack() as running:
        commands = [
            running.enter_context(runs.running(workdir.parent, *others, f"--process_id={number}"))
            for number in (0, 2)
        ]
        different = runs.running(
            workdir.parent, *second, environment=environment, within=tuple(within)
        )
        commands.append(running.enter_context(different))
        return [command.end(status) for command in commands]


@pytest.fixture(scope="module")
def changed(folder):
    """Another text, another folder of the code, and a recipe and a text with other names."""
    (folder / "other.txt").write_text((folder / "corpus.txt").read_text() + "more.\n")
    (folder / "elsewhere").mkdir()
    for name in ("corpus.txt", "recipe.py"):
        shutil.copy(folder / name, folder / "elsewhere" / f"my_{name}")
    code = folder / "code"
    shutil.copytree(runs.ROOT / "jaxtrain", code / "jaxtrain")
    (code / "configs").symlink_to(runs.ROOT / "configs")
    (code / "jaxtrain" / "loop.py").open("a").write("# another version\n")
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, environment, says",
    [
        (
            ["--config.optimizer.learning_rate=0.5"],
            {},
            "optimizer.learning_rate=0.5 on {1}, and 0.005",
        ),
        (["--config.train.seed=3"], {}, "train.seed=3 on {1}, and 0 on {0}"),
        (["--config.data.batch_size=48"], {}, "data.batch_size=48 on {1}, and 24 on {0}"),
        (["--config.mesh.elastic=true"], {}, "mesh.elastic=true on {1}, and false on {0}"),
        (["--dry_run"], {}, "--dry_run=True on {1}, and False on {0}"),
        (["--cpu_devices=2"], {}, "--cpu_devices=2 on {1}, and 1 on {0}"),
        ([], {"JAX_ENABLE_X64": "1"}, "JAX_ENABLE_X64=True on {1}, and False on {0}"),
        ([], {"XLA_FLAGS": ""}, "XLA_FLAGS --xla_backend_optimization_level=none on {1}, and 0"),
        ([], {"PYTHONPATH": "{folder}/code"}, "code="),
        (["--config.data.source=other.txt"], {}, "corpus="),
        (["--workdir=other"], {}, "--workdir='other' on {host} is"),
        (
            ["--config.checkpoint.directory=other"],
            {},
            "process 1: checkpoint.directory='other' on ",
        ),
        (["--processes=4"], {}, "it has --processes=4, process 0 3: give all the same"),
        (["--process_id=2"], {}, "has the same --process_id: give each its own"),
        (["--config.model.layers=none"], {}, "model.layers='none'"),
    ],
)
def test_three_that_differ_end_with_its_name(changed, workdir, flags, environment, says):
    """Before anything is compiled or written, all with status 2, and soon."""
    environment = {k: v.format(folder=changed) for k, v in environment.items()}
    done = three(workdir, own=flags, status=2, **environment)
    host = socket.gethostname()
    says = says.format(*(f"{host} (process {number})" for number in range(3)), host=host)
    for each in done:
        (line,) = [line for line in each.err.splitlines() if line.startswith("error: ")]
        assert says in line and "Traceback" not in each.err + each.out
        assert each.seconds < 40
    assert not workdir.exists() and not (changed / "other").exists()


@pytest.mark.full
def test_three_that_differ_in_what_does_not_matter_train(changed, workdir):
    """Home, temporary files, caches, current folder, language and hash seed; recipe, text and
    workdir by other paths; another order of flags; what is the host's own."""
    (changed / "link").symlink_to(changed)
    for name in ("one", "two", "home"):
        (changed / name).mkdir()
    local = lambda name: settings(checkpoint__local=changed / name, checkpoint__local_every=1)
    own = [
        "--config=my_recipe.py",
        "--config.data.source=my_corpus.txt",
        f"--workdir={changed}/link/{workdir.name}/",
        *settings(data__cache=changed / "two" / "cache", data__prefetch=5),
        *local("two"),
    ]
    environment = {
        **dict.fromkeys(("HOME", "TMPDIR", "JAXTRAIN_CACHE"), str(changed / "home")),
        **{"LANG": "C", "PYTHONHASHSEED": "7", "JAX_LOG_COMPILES": "0"},
    }
    within = ("env", "-C", str(changed / "elsewhere"))
    done = three(workdir, *local("one"), own=own, within=within, turned=True, **environment)
    assert list(runs.losses(workdir)) == [1, 2, 3]
    assert not [line for each in done for line in each.err.splitlines() if "warning" in line]
