"""Whole runs through the real command, in one process: what a run leaves, kills, resumption,
refusals.

Most are on one device, whose programs are compiled once and then come from the cache: their subject
is the loop and its files. Several processes are in test_processes.py, sizes in test_sizes.py, wrong
flags mostly in test_cli.py, what checkpoints hold in checkpoint/.
"""

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import time

import pytest
from etils import epath
from support import hardware_file, small, train_runs as runs
from support.damage import damage_numbers
from support.train_runs import settings

from jaxtrain import cli, generate_command as generate
from jaxtrain.checkpoint.retention import read_losses
from jaxtrain.config.flags import read_flags
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.goodput import REDONE, USEFUL, Goodput, read_goodput
from jaxtrain.run.metrics import METRICS

STEPS = 48  # of the run that is never stopped, and of those that are killed
RESUMED, GOES_ON = 6, 12  # where other meshes take over, and until where
ONE_DEVICE = settings(mesh__stage=1)


@pytest.fixture(scope="module")
def whole(folder):
    """The workdir and the output of a run that nothing disturbs: all of its checkpoints are
    kept."""
    workdir = folder / "whole"
    done = train(
        workdir, *settings(train__steps=STEPS, train__eval_every=20, metrics__tensorboard=True)
    )
    return workdir, done


@pytest.fixture(scope="module")
def large(folder):
    """The workdir of a run of the larger model on 1 × 4 × 2."""
    workdir = folder / "large"
    runs.train(workdir, *runs.large("1x4x2"), *settings(train__steps=30), devices=8)
    return workdir


@pytest.fixture
def workdir(folder, request):
    """A new workdir beside the others, gone after the test."""
    workdir = folder / re.sub(r"\W+", "-", request.node.name)
    yield workdir
    shutil.rmtree(workdir, ignore_errors=True)


def train(workdir, *flags: str, status: int = 0) -> runs.Done:
    """Runs the training command on one device to its end."""
    return runs.train(workdir, *ONE_DEVICE, *flags, status=status, devices=1)


def training(workdir, *flags: str) -> list[str]:
    """The words of that command."""
    return runs.training(workdir, *ONE_DEVICE, *flags, devices=1)


def assert_close(
    found: tuple[float, float], expected: tuple[float, float], relative: float, what: str
) -> None:
    """Both the loss and the gradient norm."""
    assert found == pytest.approx(expected, rel=relative, abs=0), what


# --- what a run says and leaves -------------------------------------------------------------------


def test_a_run_introduces_itself_and_learns(whole):
    _, done = whole
    lines = done.out.splitlines()
    assert (
        not done.err
        and lines[0] == "documents: no id begins one, id 256 ends it"
        and lines[1].startswith("prepared corpus.txt: ")
        and lines[2] == "mesh: one device (1 × cpu, 1 process)"
    )
    assert re.search(rf"^step {STEPS}/{STEPS} · loss \d\.\d{{4}} · ", done.out, re.MULTILINE)
    # Two of RMSNorm, attention of 4 · 32² and two of 32 · 64 in each of 3 layers; the embedding is
    # the head; a norm before that.
    parameters = 3 * (2 * 32 + 4 * 32**2 + 2 * 32 * 64) + 257 * 32 + 32
    assert f"model: {parameters:,} parameters; 3 layers on one stage" in lines
    assert re.search(r"step: 512 tokens\b.* 2 microbatches of 8 sequences of 32\b", done.out)
    assert "table: 2 microbatches one after the other" in lines
    memory = next(
        re.fullmatch(
            r"memory per device as compiled: (.*) MiB \((.*) of state, (.*) temporary\)", line
        )
        for line in lines
        if "memory" in line
    )
    total, state, temporary = (float(number.replace(",", "")) for number in memory.groups())
    assert 0 < state < total < 20 and total == pytest.approx(state + temporary, abs=0.2)
    assert any(re.match(r"corpus: [\d,]+ tokens, .* held out", line) for line in lines)
    validation, entropy = map(
        float,
        re.search(
            r"validation loss (\S+) nats a token; a table of which byte .* have (\S+)", done.out
        ).groups(),
    )
    assert 1.0 < validation < entropy < math.log(257)  # it has learned more than pairs
    jargon = ["over 1 stages", "devices 0", "slots: ", "bigram", "ending ", "on their own"]
    assert not [line for line in lines if any(word in line for word in jargon)]


def test_the_last_lines_are_the_commands_that_come_next(whole, monkeypatch):
    """Their flags are understood, and they name this run: the same flags continue it."""
    workdir, done = whole
    monkeypatch.chdir(workdir.parent)
    files, text, again = done.out.splitlines()[-3:]
    assert files.startswith(f"files: {workdir.name}: ")
    python, *words = shlex.split(text.removeprefix("write text: "))
    assert os.path.samefile(python, sys.executable)
    assert words[:3] == ["-m", "jaxtrain.generate", f"--workdir={workdir.name}"]
    read_flags(words[2:], "", generate.FLAGS, with_config=False)
    words = shlex.split(again.removeprefix("train on: "))
    config, flags = cli.parse(words[3:], "", ())
    assert (flags.workdir, config.train.steps) == (str(workdir), 2 * STEPS)
    assert flags.cpu_devices == 1


def test_metrics_config_and_files_of_a_run(whole):
    workdir, done = whole
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if "loss" in record]
    assert [record["step"] for record in training] == list(range(1, STEPS + 1))
    for record in training:
        own = {
            "loss",
            "grad_norm",
            "param_norm",
            "learning_rate",
            "weighted_tokens",
            "tokens",
            "batch",
            "step_time_s",
            "tokens_per_s",
            "mfu",
            "goodput",
        }
        assert {"step", "time", "wall_s"} | own <= set(record) <= METRICS.keys()
        assert not {"mtp_loss", "expert_load", "dropped", "skipped"} & set(record)
        assert record["tokens"] == record["step"] * 512 and record["batch"] == record["step"] - 1
        assert record["step_time_s"] > 0 and record["mfu"] is None
        assert record["tokens_per_s"] == pytest.approx(512 / record["step_time_s"])
        assert record["learning_rate"] == pytest.approx(5e-3 * min(record["step"], 4) / 4)
    assert training[0]["loss"] == pytest.approx(math.log(257), abs=0.5) and training[-1]["loss"] < 2
    assert all(
        0 <= later["wall_s"] - earlier["wall_s"] < done.seconds
        for earlier, later in zip(records, records[1:])
    )
    assert 0 < records[0]["wall_s"] < records[-1]["wall_s"] < done.seconds
    (start,) = map(json.loads, (workdir / "starts.jsonl").read_text().splitlines())
    assert (start["step"], start["changed"], start["devices"]) == (0, [], "1 × cpu")
    state = start["memory"]["parameters"] + start["memory"]["moments"]
    assert 0 < state <= start["compiled_memory"]["arguments"] < 1.2 * state
    assert sum(record["step_time_s"] for record in training) < records[-1]["wall_s"]
    # Evaluated after steps 20, 40 and the last, of which this one alone is saved.
    losses = {
        record["step"]: record["validation_loss"]
        for record in records
        if "validation_loss" in record
    }
    assert list(losses) == [20, 40, STEPS] and read_losses(epath.Path(workdir / "checkpoints")) == {
        STEPS: losses[STEPS]
    }
    held_out = {
        record["step"]: record["validation_loss"]
        for record in records
        if "validation_loss" in record
    }
    assert list(held_out) == [20, 40, STEPS] and held_out[20] > held_out[40] > held_out[STEPS]
    assert f"{held_out[STEPS]:.4f}" in done.out
    (start_up,) = [record for record in records if "start_up_s" in record]
    parts = [
        value
        for name, value in start_up.items()
        if name.endswith("_s") and name not in ("wall_s", "start_up_s")
    ]
    assert {
        "imports_s",
        "table_s",
        "data_s",
        "tracing_s",
        "compiling_s",
        "state_s",
        "stepping_s",
    } <= start_up.keys()
    assert (
        start_up["step"] == 1
        and all(part >= 0 for part in parts)
        and sum(parts) == pytest.approx(start_up["start_up_s"], abs=0.01)
    )
    assert start_up["start_up_s"] < done.seconds and "first step after" in done.out
    saved = {record["step"]: record for record in records if "save_s" in record}
    assert list(saved) == runs.checkpoints(workdir)
    assert all(record["save_blocked_s"] > 0 and record["save_s"] > 0 for record in saved.values())
    config = json.loads((workdir / "config.json").read_text())
    assert (
        config["model"]["layers"] == 3
        and config["mesh"]["data"] == 1
        and config["train"]["steps"] == STEPS
    )
    for step in (3, STEPS):
        runs.assert_norm_is_stored(workdir, step)
    assert runs.checkpoints(workdir) == list(range(3, STEPS + 1, 3)) and not runs.unfinished(
        workdir
    )
    assert all(
        (workdir / name).read_bytes().startswith(b"\x89PNG") for name in ("loss.png", "goodput.png")
    )
    goodput = Goodput(read_goodput(workdir))
    assert (
        re.search(r"^goodput \d+\.\d % of \d+\.\d s in 1 start: ", done.out, re.MULTILINE)
        and 0 < training[-1]["goodput"] < 1
    )
    assert {USEFUL, "compiling", "evaluating"} <= goodput.parts().keys()
    assert records[-1]["wall_s"] <= goodput.wall_s() < done.seconds and not goodput.parts()[REDONE]
    events = [path.read_bytes() for path in (workdir / "tensorboard").iterdir()]
    assert (
        len(events) == 1
        and b"train/loss" in events[0]
        and b"validation/validation_loss" in events[0]
    )


def test_profile_evaluation_and_what_is_kept(whole, workdir):
    """Settings of the loop alone: they change no loss."""
    flags = settings(
        train__steps=10,
        train__profile_steps=2,
        train__eval_every=4,
        checkpoint__every=2,
        checkpoint__keep=2,
        metrics__log_every=5,
    )
    done = train(workdir, *flags, *settings(train__hardware=hardware_file.write(workdir.parent)))
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "validation_loss" in record] == [4, 8, 10]
    logged, reference = runs.losses(workdir), runs.losses(whole[0])
    assert logged == {step: reference[step] for step in (1, 5, 10)}
    assert runs.checkpoints(workdir) == [8, 10]
    (trace,) = (workdir / "profile").rglob("*.xplane.pb")
    # The other ops: test_processes.py. XLA makes one kernel of one device's small loop, in which a
    # trace has no names.
    assert b"/optimizer/" in trace.read_bytes()
    # The planned step beside the measured one, at the end of so short a run; by part in several
    # stages: test_processes.py.
    (planned,) = re.findall(r"^planned step: (\S+) s for simulated, ", done.out, re.MULTILINE)
    assert re.search(
        rf"^planned step {planned} s \(simulated\), measured \S+ s \(\S+ x\)$",
        done.out,
        re.MULTILINE,
    )
    record = json.loads((workdir / "planned.json").read_text())
    assert (
        record["step"] == 10
        and record["steps"] == 5
        and record["trace"]["exposed"].keys() >= {"optimizer", "waiting"}
    )
    assert sum(record["trace"]["exposed"].values()) == pytest.approx(record["trace"]["step_time_s"])
    assert f"largest miss: {record['largest_miss']['part']}, " in done.out


# --- killed and continued -------------------------------------------------------------------------


def compiling(workdir):
    """The environment of a run that compiles long enough to be hit, and the condition that it does:
    the corpus is prepared just before."""
    cache = workdir.with_name(f"cache-{workdir.name}-{time.monotonic_ns()}")
    return {"JAXTRAIN_CACHE": str(cache)}, lambda: list(cache.glob("*/corpus.json"))


def kill_when(workdir, moment: str, chance: random.Random) -> None:
    """Starts the run and kills it at a moment: a phase, and within it by chance."""
    environment, compiles = compiling(workdir) if moment == "compiling" else ({}, lambda: False)
    at = runs.last_step(workdir)
    conditions = {
        "starting": lambda: True,
        "compiling": compiles,
        "step": lambda: runs.last_step(workdir) > at + chance.randrange(6),
        "saving": lambda: runs.unfinished(workdir) and runs.last_step(workdir) > at + 2,
    }
    with runs.running(
        workdir.parent, *training(workdir, *settings(train__steps=STEPS)), environment=environment
    ) as command:
        if moment == "saving":
            command.stop_in(conditions[moment], moment)
        else:
            command.wait_for(conditions[moment], moment)
            time.sleep(chance.random() * {"starting": 3, "compiling": 2, "step": 0.1}[moment])
        command.kill()


def assert_killed_run_is_the_same(workdir, whole, moments: list[str], seed: int) -> None:
    chance = random.Random(seed)
    for moment in moments:
        kill_when(workdir, moment, chance)
    saved = runs.checkpoints(workdir)
    done = train(workdir, *settings(train__steps=STEPS))
    assert ("continuing from step" in done.out) == bool(saved)
    # the lock of a dead run; what its save has left
    assert "waiting for" not in done.out + done.err and "absl" not in done.err
    assert runs.losses(workdir) == runs.losses(whole[0])
    goodput, lines = Goodput(read_goodput(workdir)), read_goodput(workdir)
    assert sum(goodput.parts().values()) + goodput.down_s == pytest.approx(
        lines[-1].time - lines[0].began, rel=0.02
    )
    assert len(goodput.starts) > 1 and runs.read_metrics(workdir)[-1]["wall_s"] == pytest.approx(
        goodput.wall_s(), abs=5
    )
    assert runs.checkpoints(workdir)[-1] == STEPS and not runs.unfinished(workdir)


def test_killed_while_it_saves_the_same_command_gives_the_same_losses(whole, workdir):
    """Bit for bit, over all steps."""
    assert_killed_run_is_the_same(workdir, whole, ["saving"], seed=random.randrange(1000))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_killed_more_often(whole, workdir, seed):
    moments = random.Random(seed).choices(["starting", "compiling", "step", "saving"], k=6)
    assert_killed_run_is_the_same(workdir, whole, moments, seed)


# --- another mesh ---------------------------------------------------------------------------------


def assert_continues(workdir, whole, stop: int, *flags: str) -> None:
    """Continues `workdir` from its checkpoint of step RESUMED on 8 devices, with the losses of the
    run that was never stopped.

    To 1e-5 in the first step, which has seen the same weights; rounding then grows, so to 1e-4 in
    the others.
    """
    runs.copy_up_to(RESUMED, whole, workdir)
    done = runs.train(workdir, *settings(train__steps=stop), *flags, devices=8)
    assert f"continuing from step {RESUMED}" in done.out
    found, expected = runs.losses(workdir), runs.losses(whole)
    assert list(found) == list(range(1, stop + 1))
    for step in range(RESUMED + 1, stop + 1):
        assert_close(
            found[step], expected[step], 1e-5 if step == RESUMED + 1 else 1e-4, f"step {step}"
        )


@pytest.mark.full
def test_goes_on_on_another_mesh(whole, workdir):
    """From one device to 2 × 2 × 2, of whose stages 3 layers are uneven. Other sizes:
    test_sizes.py."""
    assert_continues(workdir, whole[0], RESUMED + 2, *settings(mesh__data=2, mesh__model=2))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["2x2x2", "8x1x1", "1x8x1"])
def test_the_larger_model_goes_on_on_another_mesh(large, workdir, mesh):
    """From 1 × 4 × 2 with two chunks a stage, and 9 layers, which are uneven on any number of
    stages."""
    assert_continues(workdir, large, GOES_ON, *runs.large(mesh))


@pytest.mark.full
def test_goes_from_mesh_to_mesh_and_back(large, workdir):
    runs.copy_up_to(RESUMED, large, workdir)
    for start, mesh in zip(
        range(RESUMED, 30, 3), ["1x8x1", "8x1x1", "2x2x2", "1x8x1", "2x2x2", "8x1x1", "1x4x2"]
    ):
        runs.train(workdir, *settings(train__steps=start + 3), *runs.large(mesh), devices=8)
    found, expected = runs.losses(workdir), runs.losses(large)
    for step, values in found.items():
        assert_close(values, expected[step], 1e-4, f"step {step}")


@pytest.mark.full
@pytest.mark.parametrize("layers", [8, 11])
def test_goes_on_on_every_mesh_from_every_mesh(folder, workdir, layers):
    flags = lambda mesh, steps: [
        *runs.large(mesh),
        *settings(model__layers=layers, train__steps=steps),
    ]
    for first in runs.MESHES:
        runs.train(workdir, *flags(first, 4), devices=8)
        expected = None
        for second in runs.MESHES:
            new = workdir.with_name(f"{workdir.name}-{second}")
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(workdir, new)
            runs.train(new, *flags(second, 6), devices=8)
            found = runs.losses(new)
            expected = expected or found
            for step in (5, 6):
                assert_close(
                    found[step],
                    expected[step],
                    1e-5 * (step - 4),
                    f"{first} → {second}, step {step}",
                )
        shutil.rmtree(workdir)


# --- what else lies in the folder, and what changes -----------------------------------------------


def test_the_newest_whole_checkpoint_is_used_and_what_differs_is_said(whole, workdir):
    """Unrecognized entries do not hold up a run, nor its save of a step whose name one of them has.
    It saves by time too."""
    runs.copy_up_to(9, whole[0], workdir)
    checkpoints = workdir / "checkpoints"
    (checkpoints / "9" / "meta" / "metadata").write_text('{"config": {"mod')
    damage_numbers(checkpoints / "6", "params.layers.mlp.up.weight/c/1")
    (checkpoints / "10").mkdir()
    (checkpoints / "notes.txt").write_text("")
    flags = settings(
        train__steps=10,
        checkpoint__every=0,
        checkpoint__minutes=0.00001,
        optimizer__learning_rate=0.1,
    )
    done = train(workdir, *flags)
    lines = done.out.splitlines()
    said = (
        "9 (its meta is no JSON), 10 (an empty folder), notes.txt (no step's name); the newest "
        "complete checkpoint is 6"
    )
    assert lines[0] == f"passed over in {workdir.name}/checkpoints: {said}"
    damaged = "6 (params/layers/mlp/up/weight cannot be read: its data is damaged)"
    said = said.replace("is 6", "is 3")
    again = lines.index(f"passed over in {workdir.name}/checkpoints: {damaged}, {said}")
    at = lines.index("changed since the checkpoint of step 3:")
    assert at > again
    changes = [
        "optimizer.learning_rate: 0.005 → 0.1",
        "train.steps: 48 → 10",
        "train.eval_every: 20 → 0",
    ]
    changes += [
        "checkpoint.every: 3 → 0",
        "checkpoint.minutes: 10.0 → 1e-05",
        "metrics.tensorboard: true → false",
    ]
    assert lines[at + 1 : at + 7] == [f"  {change}" for change in changes] and not lines[
        at + 7
    ].startswith(" ")
    assert "continuing from step 3" in lines[at:] and min(runs.losses(workdir)) == 1
    start = json.loads((workdir / "starts.jsonl").read_text().splitlines()[-1])
    assert (start["step"], start["source"], start["changed"]) == (3, "step 3", changes)
    assert (
        set(range(4, 10)) & set(runs.checkpoints(workdir)) and runs.checkpoints(workdir)[-1] == 10
    )
    assert sorted(runs.unfinished(workdir)) == [
        "10.broken-1",
        "6.broken-1",
        "9.broken-1",
        "notes.txt",
    ]
    assert (checkpoints / "9.broken-1" / "state").exists() and "Traceback" not in done.err


def test_broken_checkpoints_alone_are_no_new_start(stopped):
    """It would push aside what may be all that is left of a long run."""
    for step in runs.checkpoints(stopped):
        (stopped / "checkpoints" / str(step) / "state" / "manifest.ocdbt").unlink()
    why = "state/manifest.ocdbt is missing"
    message = assert_refused(stopped, status=ExitStatus.STORAGE)
    assert message.startswith(
        f"{stopped.name}/checkpoints has no complete checkpoint: 3 ({why}), 6 ({why}): move it "
        "away to begin anew"
    )


# --- stopped --------------------------------------------------------------------------------------


def test_sighup_and_ctrl_c_save_and_stop(whole, workdir):
    """Each with its status and a checkpoint of the last step; the run then goes on, with the losses
    of one never stopped. SIGTERM is as SIGHUP: test_processes.py, and each at every moment:
    chaos/test_stops.py.

    While it runs a second one is refused, which changes nothing but time. In a locale of ASCII the
    log is in ASCII; where it cannot be written the run goes on without.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        before, words = (
            runs.last_step(workdir),
            training(workdir, *settings(train__steps=10_000, checkpoint__every=0)),
        )
        with runs.running(
            workdir.parent, *words, environment={"PYTHONIOENCODING": "ascii"}
        ) as command:
            command.wait_for(lambda before=before: runs.last_step(workdir) > before + 1, "a step")
            if number == signal.SIGHUP:
                second = train(workdir, *settings(train__steps=10_000), status=2)
                (error,) = second.err.splitlines()
                who = (
                    rf"process {command.process.pid} on {re.escape(socket.gethostname())}, which "
                    r"started 20\d\d-\d\d-\d\d .* UTC"
                )
                assert re.fullmatch(
                    rf"error: --workdir='{workdir.name}' is in use by the run of {who}: stop "
                    r"that run, or .*",
                    error,
                ), error
                assert not second.out and "run.lock" in os.listdir(workdir)
            command.signal(number)
            done = command.end(
                status=ExitStatus.STOPPED if number == signal.SIGHUP else ExitStatus.INTERRUPTED
            )
        assert not [name for name in os.listdir(workdir) if "lock" in name]
        step = runs.last_step(workdir)
        assert before < step < 10_000
        assert (
            f"stopped at step {step} of 10000" in done.out
            and "mesh: one device (1 x cpu, 1 process)\n" in done.out
        )
        assert runs.checkpoints(workdir)[-1] == step and not runs.unfinished(workdir)
        assert (workdir / "loss.png").exists()
    with runs.running(
        workdir.parent, *training(workdir, *settings(train__steps=step + 2)), shell=">/dev/full"
    ) as command:
        done = command.end(0)
    lost = (
        "warning: standard output cannot be written (No space left on device): this run goes on "
        "without its log; "
    )
    assert (done.out, done.err) == ("", f"{lost}metrics.jsonl has the losses\n")
    found, expected = runs.losses(workdir), runs.losses(whole[0])
    assert list(found) == list(range(1, step + 3))
    common = found.keys() & expected.keys()
    assert {s: found[s] for s in common} == {s: expected[s] for s in common}


def test_ctrl_c_before_there_is_anything_to_save(folder, workdir):
    """At once, although a program is being compiled, and without a traceback."""
    environment, _ = compiling(workdir)
    with runs.running(folder, *runs.training(workdir), environment=environment) as command:
        command.wait_for(
            lambda: "corpus: " in command.output(),
            "the text that is said while the step is compiled",
        )
        began = time.monotonic()
        command.signal(signal.SIGINT)
        done = command.end(status=-signal.SIGINT)
        assert time.monotonic() - began < 2
    assert "Traceback" not in done.err and not workdir.exists()


def test_a_loss_that_is_not_finite(folder, workdir):
    """The status of bad numbers, the batch's position, and the last good checkpoint, which is
    finite."""
    flags = settings(optimizer__learning_rate=1e30, optimizer__warmup_steps=0, checkpoint__every=1)
    done = train(workdir, *flags, status=ExitStatus.BAD_NUMBERS)
    last = runs.last_step(workdir)
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == last and None in (records[-1]["loss"], records[-1]["grad_norm"])
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.err
    place = (
        rf"step {last}, batch {last - 1}: epoch 0, sequences \d+, .*corpus.txt "
        r"\(checksum \w+, seed 0\)"
    )
    assert re.match(
        rf"error: the loss is \S+ \(gradient norm \S+\) at {place}; the last checkpoint is kept",
        error,
    ), error
    # What was saved last is what the first good steps have made.
    assert runs.checkpoints(workdir) == list(range(1, last)) and not runs.unfinished(workdir)
    assert runs.stored_numbers_are_finite(workdir, last - 1)


# --- refused --------------------------------------------------------------------------------------


@pytest.fixture
def stopped(whole, workdir):
    """A workdir that stands at step 6 of 12."""
    runs.copy_up_to(RESUMED, whole[0], workdir)
    return workdir


def assert_refused(
    workdir, *flags: str, devices: int = 1, status: int = ExitStatus.BAD_CONFIG
) -> str:
    """The one line on standard error; nothing in the workdir has changed."""
    files = runs.contents(workdir)
    done = runs.train(
        workdir, *(ONE_DEVICE if devices == 1 else ()), *flags, status=status, devices=devices
    )
    assert runs.contents(workdir) == files
    (error,) = done.err.splitlines()
    assert "compiled" not in done.out
    assert error.startswith("error: ")
    return error.removeprefix("error: ")


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            settings(model__width=64),
            "model.width=64 cannot continue a checkpoint of model.width=32: use "
            "--config.model.width=32 (or another --workdir)",
        ),
        pytest.param(
            settings(data__seed=1),
            "data.seed=1 cannot continue a checkpoint of data.seed=0: use "
            "--config.data.seed=0 (or another --workdir)",
            marks=pytest.mark.full,
        ),
    ],
    ids=["model", "data"],
)
def test_a_config_that_cannot_continue(stopped, flags, message):
    assert assert_refused(stopped, *flags) == message


def test_a_changed_corpus(folder, stopped):
    text = (folder / "corpus.txt").read_text()
    try:
        (folder / "corpus.txt").write_text(text.replace("mesh", "mush", 1))
        message = assert_refused(stopped, status=ExitStatus.BAD_DATA)
    finally:
        (folder / "corpus.txt").write_text(text)
    assert re.match(
        r"data.source=\S*corpus.txt has changed since the checkpoint "
        r"\(checksum \w+, in the checkpoint \w+\): ",
        message,
    )


def test_a_corpus_that_has_moved(folder, stopped):
    """The same content at another path continues the run; one byte of difference is refused."""
    moved = folder / "elsewhere" / "part.txt"
    moved.parent.mkdir()
    moved.write_text((folder / "corpus.txt").read_text().replace("mesh", "mush", 1))
    flag = f"--config.data.source={moved}"
    message = assert_refused(stopped, flag)
    assert re.fullmatch(
        rf"data.source='{moved}' is not the corpus of the checkpoint's data.source='\S*corpus.txt' "
        r"\(checksum \w+, in the checkpoint \w+\): use --config.data.source=\S*corpus.txt "
        r"\(or another --workdir\)",
        message,
    )
    moved.write_text((folder / "corpus.txt").read_text())
    said = train(stopped, flag, *settings(train__steps=GOES_ON)).out
    assert "continuing from step" in said
    assert re.search(rf"data.source: \S*corpus.txt → {moved}", said)
    assert runs.last_step(stopped) == GOES_ON


def test_a_finished_run_says_so(whole):
    workdir, _ = whole
    before = runs.contents(workdir)
    done = train(workdir, *settings(train__steps=STEPS))
    assert f"already has its {STEPS} steps: raise train.steps to go on" in done.out
    assert runs.contents(workdir) == before


@pytest.mark.full
def test_a_stop_at_a_step_and_an_evaluation_that_a_kill_prevented(folder, workdir):
    """The run goes on after train.stop_at as if it had not stopped, by the rates of all its steps.
    A kill between the last save and its evaluation is a run without that record: the next start
    makes up for it."""
    straight, flags = folder / "straight", settings(train__steps=8, optimizer__schedule="cosine")
    evaluations = lambda of: [r for r in runs.read_metrics(of) if "validation_loss" in r]
    train(straight, *flags)
    done = train(workdir, *flags, *settings(train__stop_at=5))
    assert runs.checkpoints(workdir)[-1] == 5 and "train.stop_at=0" in done.out
    for _ in range(2):
        (evaluation,) = evaluations(workdir)
        lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if "validation_loss" not in line]
        (workdir / "metrics.jsonl").write_text("".join(kept))
        assert "continuing from step 5" in train(workdir, *flags, *settings(train__stop_at=5)).out
        assert evaluations(workdir)[0]["validation_loss"] == evaluation["validation_loss"]
    done = train(workdir, *flags, *settings(train__stop_at=5))
    assert "already has its 5 steps: raise train.stop_at to go on" in done.out
    train(workdir, *flags)
    assert runs.losses(workdir) == runs.losses(straight)
    last = [evaluations(of)[-1]["validation_loss"] for of in (workdir, straight)]
    assert last[0] == last[1] and len(evaluations(workdir)) == 2


def test_a_workdir_that_cannot_be_made(folder):
    (folder / "file").write_text("")
    assert (
        assert_refused(folder / "file")
        == "--workdir='file' is not a folder: use --workdir=runs/file"
    )


def test_devices_that_the_mesh_does_not_use(folder, workdir):
    message = assert_refused(workdir, *settings(mesh__model=2), devices=6)
    assert message.startswith(
        "mesh.stage=2 does not fit: mesh.stage=2 × mesh.model=2 = 4 does not divide the 6 "
        "devices: use "
    )
    assert not workdir.exists()


WRONG = {
    "--config.mesh.stag=4": "mesh.stag='4' is an unknown setting: use --config.mesh.stage",
    "--config.mesh.stage=four": "mesh.stage='four' is not an integer: use --config.mesh.stage=2",
    "--config.model.heads=5": "model.heads=5",
    "--config.pipeline.repeats=2": "pipeline.repeats=2 does not fit pipeline.schedule='1f1b'",
    "--wrkdir=x": "--wrkdir is an unknown flag: use --workdir",
    "--config.data.source=no.txt": "data.source='no.txt' is neither 'stdlib' nor an existing path",
}


ALWAYS = "--config.data.source=no.txt"


@pytest.mark.parametrize("flag", small.named([ALWAYS], [flag for flag in WRONG if flag != ALWAYS]))
def test_wrong_flags_end_the_command_at_once(folder, workdir, flag):
    began, before = time.monotonic(), sorted(os.listdir(folder))
    message = assert_refused(workdir, flag, devices=runs.DEVICES)
    assert time.monotonic() - began < 5
    assert message.startswith(WRONG[flag])
    assert not workdir.exists() and sorted(os.listdir(folder)) == before
