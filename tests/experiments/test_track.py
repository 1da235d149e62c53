"""The records of a run in trackers: which are sent, each once, by the command and by the processes
that follow a run; and that a tracker which fails costs the run a line."""

import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import ROOT, own_trackers, train_runs as runs
from support.processes import children, command_line
from support.train_runs import settings

from jaxtrain import places
from jaxtrain.config import Config, replace
from jaxtrain.config.recipes import config_text
from jaxtrain.experiments import followers, track
from jaxtrain.experiments.run_folder import read_run
from jaxtrain.run.metrics import read_metrics

OWN = f"{ROOT / 'tests' / 'support' / 'own_trackers.py'}:"
PACKAGES = ROOT / ".venv-trackers"
INSTALL = f"python -m pip install --no-deps --target {PACKAGES.name} -r requirements/trackers.txt"


def write_run(folder, steps: int, checkpoint: int = 0, **memory: int):
    """A run with a record of each step, and the newest checkpoint with what the detector says."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config_text(replace(Config(), {"train.steps": 100})))
    lines = [
        {"step": at, "time": 100.5 + at, "wall_s": at, "loss": 1 / at} for at in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if checkpoint:
        meta = folder / "checkpoints" / str(checkpoint) / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        (meta / "metadata").write_text(json.dumps({"memory": memory}))
    return folder


def test_numbers_of_a_step_come_together():
    """A save's are those of the step that the run had reached; a roll-back's those of the next,
    which need not be logged."""
    records = [
        {"step": 0, "time": 1.0, "validation_loss": 4.0},
        {"step": 1, "time": 2.0, "start_up_s": 9.0},
        {"step": 1, "time": 3.0, "loss": 3.0, "mfu": None},
        {"step": 2, "time": 4.0, "loss": 2.0},
        {"step": 1, "time": 5.0, "save_s": 0.5},
        {"step": 2, "time": 6.0, "rolled_back_from": 5, "why": "a spike", "rollbacks": 1},
        {"step": 3, "time": 7.0, "loss": 1.0},
        {"step": 4, "time": 8.0, "loss": 0.5},
        {"step": 4, "time": 9.0, "rolled_back_from": 7, "rollbacks": 2},
        {"step": 10, "time": 10.0, "loss": 0.4},
    ]
    assert track.numbers_by_step(records) == {
        0: {"time": 1.0, "validation_loss": 4.0},
        1: {"time": 3.0, "start_up_s": 9.0, "loss": 3.0},
        2: {"time": 5.0, "loss": 2.0, "save_s": 0.5},
        3: {"time": 7.0, "loss": 1.0, "rolled_back_from": 5, "rollbacks": 1},
        4: {"time": 8.0, "loss": 0.5},
        5: {"time": 9.0, "rolled_back_from": 7, "rollbacks": 2},
        10: {"time": 10.0, "loss": 0.4},
    }


@pytest.mark.parametrize(
    "checkpoint, memory, settled",
    [
        (0, {}, 0),
        (60, {}, 60),
        (60, {"nonfinite_since": None, "spike_since": 59}, 58),
        (60, {"nonfinite_since": 40, "spike_since": 59}, 39),
        (100, {"spike_since": 99}, 100),  # the run has ended
    ],
)
def test_a_step_is_sent_when_it_cannot_come_again(tmp_path, checkpoint, memory, settled):
    assert track.settled_step(read_run(write_run(tmp_path, 70, checkpoint, **memory))) == settled


def test_without_its_checkpoints_a_run_has_what_was_saved(tmp_path):
    with (write_run(tmp_path, 100) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "save_s": 1.0}\n')
    assert track.settled_step(read_run(tmp_path)) == 100


def test_a_tracker_gets_each_step_once(tmp_path):
    feed = lambda: track.feed(tmp_path, f"{OWN}Kept", False)
    kept = lambda: own_trackers.records_of(tmp_path / "kept.jsonl")
    write_run(tmp_path, 7)
    assert feed() == "it has all up to step 0, the newest in a checkpoint, of 7" and kept() == []
    write_run(tmp_path, 7, 5)
    assert feed() == feed() == "it has all up to step 5, the newest in a checkpoint, of 7"
    write_run(tmp_path, 9, 8)
    feed()
    assert [step for _, step, _ in kept()] == [*range(1, 9)]
    assert kept()[1][2] == {"time": 102.5, "wall_s": 2, "loss": 0.5}
    assert len({run for run, _, _ in kept()}) == 1
    track.feed(write_run(tmp_path / "copy", 9, 8), f"{OWN}Kept", False)
    assert own_trackers.records_of(tmp_path / "copy" / "kept.jsonl")[0][0] != kept()[0][0]


def test_links_in_a_folder_are_not_followed(tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    name = f"{OWN}Kept".replace("/", "_")
    (write_run(tmp_path / "run", 3, 2) / "trackers").mkdir()
    (tmp_path / "run" / "trackers" / f"{name}.lock").symlink_to(mine)
    assert track.main([str(tmp_path / "run"), f"--to={OWN}Kept"]) == 74
    assert "Too many levels of symbolic links" in capsys.readouterr().err
    assert mine.read_text() == "mine" and not (tmp_path / "run" / "kept.jsonl").exists()


def test_the_latest_step_waits_for_its_evaluation(tmp_path, monkeypatch):
    """Until the run ends. A tracker that hangs ends by an alarm."""
    alarms: list[int] = []
    monkeypatch.setattr(track, "LOOK_S", 0.01)
    monkeypatch.setattr("signal.alarm", alarms.append)
    kept = lambda: [step for _, step, _ in own_trackers.records_of(tmp_path / "kept.jsonl")]
    write_run(tmp_path, 5, 5)
    reader, writer = os.pipe()
    with os.fdopen(reader) as ends:
        monkeypatch.setattr("sys.stdin", ends)
        feeding = threading.Thread(target=track.feed, args=(tmp_path, f"{OWN}Kept", True))
        feeding.start()
        end = time.monotonic() + 20
        while len(kept()) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        assert kept() == [1, 2, 3, 4]
        os.close(writer)
        feeding.join()
    assert kept() == [1, 2, 3, 4, 5]
    assert set(alarms) == {track.HANG_S}


@pytest.mark.parametrize(
    "flags, line",
    [
        ([], "track is about one run, not 0: jaxtrain track RUN"),
        (["NONE"], "'NONE' is not the folder of a run: "),
        (["RUN"], "--to= is none of wandb, trackio, mlflow and FILE.py:CLASS"),
        (["RUN", "--to=wnadb"], "--to=wnadb is none of wandb, trackio, mlflow and FILE.py:CLASS"),
        (["RUN", "--to=no.py:Kept"], "no.py:Kept: OwnCodeError: names no file: no.py does not "),
        (["RUN", f"--to={OWN}Raises"], f"{OWN}Raises: OSError: nobody answers for RUN"),
    ],
)
def test_what_cannot_work_is_a_line(tmp_path, monkeypatch, capsys, flags, line):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "RUN", 3, 2)
    assert track.main(flags) == (74 if "Error" in line else 2)
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_a_library_that_is_not_there_is_a_line(tmp_path, monkeypatch, capsys):
    """Before a run is compiled, too."""
    needs = "needs a package that is not installed: pip install wandb"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert track.main([str(write_run(tmp_path, 3, 2)), "--to=wandb"]) == 2
    assert f"--to=wandb {needs}" in capsys.readouterr().err
    with pytest.raises(places.PlaceError, match=f"metrics.trackers: wandb {needs}"):
        places.check(replace(Config(), {"metrics.trackers": ("wandb",)}), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_trackers_that_fail_cost_a_line(tmp_path, monkeypatch):
    """One raises, one hangs: the run is told, and waits only as long as it says."""
    write_run(tmp_path, 7, 5)
    lines: list[str] = []
    running = followers.Followers(tmp_path, [f"{OWN}Raises", f"{OWN}Hangs"], lines.append)
    monkeypatch.setattr(followers, "LAST_S", 0.5)
    processes = [process for process, _ in running._running]
    for process in processes:
        process.stdin.close()
    end = time.monotonic() + 60
    while not (lines and (tmp_path / "kept.jsonl").exists()) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes[1].poll() is None and os.getsid(processes[1].pid) == processes[1].pid
    began = time.monotonic()
    running.close()
    assert time.monotonic() - began < 5 and processes[1].poll() == -signal.SIGKILL
    raised, hung = lines
    assert raised == (
        f"warning: the tracker {OWN}Raises has ended ({OWN}Raises: OSError: nobody answers for "
        f"{tmp_path.name}): jaxtrain track {tmp_path} --to={OWN}Raises sends it the rest"
    )
    assert hung.startswith(f"warning: the tracker {OWN}Hangs has ended (by signal 9): jaxtrain ")


# --- the libraries --------------------------------------------------------------------------------


def in_trackers(folder) -> dict[str, str]:
    """The environment of processes whose trackers write into a folder."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests", PACKAGES])),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }


def records_in(folder) -> dict[str, list]:
    """What trackers have, as of support/tracker_records.py."""
    script = ROOT / "tests" / "support" / "tracker_records.py"
    words = [sys.executable, str(script), str(folder)]
    environment = os.environ | in_trackers(folder)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_each_step_once(found: dict[str, list], workdir) -> None:
    expected = track.numbers_by_step(read_metrics(workdir))
    for name, rows in found.items():
        steps = collections.defaultdict(list)
        for _, step, numbers in rows:
            steps[step].append(numbers)
        assert len({run for run, _, _ in rows}) == 1, name
        assert steps.keys() == expected.keys(), name
        for step, numbers in expected.items():
            if name == "trackio":
                numbers = {k: v for k, v in numbers.items() if k != "time"}
            assert sum(map(len, steps[step])) == len(numbers), (name, step, "a number is twice")
            assert {k: v for row in steps[step] for k, v in row.items()} == numbers, (name, step)


@pytest.mark.full
@pytest.mark.skipif(not PACKAGES.exists(), reason=f"no trackers here: {INSTALL}")
def test_a_run_that_is_killed_and_rolled_back_has_each_step_once(tmp_path_factory):
    """The run is killed twice, and a tracker's process in each start; it goes back once. Then the
    same by the command, for trackers that have not followed it."""
    folder = tmp_path_factory.mktemp("tracked")
    runs.write_inputs(folder)
    workdir = folder / "run"
    flags = settings(
        metrics__trackers="wandb,trackio,mlflow",
        metrics__project="tests",
        train__on_nonfinite="rollback",
        train__nonfinite_limit=2,
        train__steps=90,
        train__eval_every=20,
        checkpoint__every=10,
        mesh__stage=1,
    )
    words = ["support.bad_batches", "nan:43,44", "slow:1", "--"]
    words += runs.training(workdir, *flags, devices=1)[1:]
    for step, tracker in ((25, "mlflow"), (65, "wandb"), (80, "trackio")):
        with runs.running(folder, *words, environment=in_trackers(folder)) as command:
            command.wait_for(lambda at=step: runs.last_step(workdir) >= at, "a step")
            (victim,) = [
                pid
                for pid in children(command.process.pid)
                if f"--to={tracker} " in command_line(pid)
            ]
            os.kill(victim, signal.SIGKILL)
            if step < 80:
                command.kill()
            else:
                warned = command.end().err.count("warning: the tracker trackio has ended (by sign")
    assert warned == 1
    assert (workdir / "metrics.rolled_back.jsonl").exists()
    found = records_in(folder)
    assert_each_step_once({name: found[name] for name in ("wandb", "mlflow")}, workdir)
    (went_back,) = [numbers for _, _, numbers in found["wandb"] if "rollbacks" in numbers]
    assert went_back["rolled_back_from"] == 45

    track_it = ["jaxtrain.experiments.track", str(workdir)]
    other = tmp_path_factory.mktemp("backfilled")
    for place in (folder, other, other):
        with runs.running(folder, *track_it, environment=in_trackers(place)) as command:
            said = command.end().out
    assert "mlflow: it has all up to step 90, the newest in a checkpoint, of 90" in said
    for place in (folder, other):
        assert_each_step_once(records_in(place), workdir)
