"""What a run will write is tried before anything is compiled: which places are refused, what is
said of them, and that nothing is left."""

import concurrent.futures
import errno
import itertools
import json
import os
import pathlib
import shlex
import socket
import sys
import threading

import jax
import pytest
from support import ROOT

from jaxtrain import config as configs, places, train_command as train
from jaxtrain.checkpoint import manifest
from jaxtrain.config import Config, flags
from jaxtrain.devices import cluster
from jaxtrain.places import NoStorageError, PlaceError, check, check_together
from jaxtrain.run import files
from jaxtrain.run.exit_status import ExitStatus, RunError

ALL = {"metrics.tensorboard": True, "metrics.rows": True, "train.profile_steps": 2}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a file, a link to nothing, links in a circle, and a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("/nowhere/at/all")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "runs" / "old").mkdir(parents=True)
    return tmp_path


def config(**changes) -> Config:
    return configs.replace(
        Config(), ALL | {name.replace("__", "."): value for name, value in changes.items()}
    )


def contents(folder: pathlib.Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def refused(checked: Config, workdir: str, status: ExitStatus = ExitStatus.BAD_CONFIG) -> str:
    """The line about a place. Nothing is left, and with the flags that it says to use all is
    well."""
    before = contents(pathlib.Path.cwd())
    with pytest.raises(PlaceError) as raised:
        check(checked, workdir)
    assert raised.value.status == status and contents(pathlib.Path.cwd()) == before
    line = str(raised.value)
    assert "\n" not in line
    pairs = [
        word.removeprefix("--").partition("=") for word in shlex.split(line.rpartition("use ")[2])
    ]
    changes = {name.removeprefix("config."): value for name, _, value in pairs}
    workdir = changes.pop("workdir", workdir)
    check(
        configs.replace(
            checked, {path: flags.setting_value(path, text) for path, text in changes.items()}
        ),
        workdir,
    )
    assert contents(pathlib.Path.cwd()) == before
    return line


WORKDIRS = {
    "file": "is not a folder",
    "file/run": "cannot be written: 'HERE/file' is not a folder",
    "dangling": "is a link to '/nowhere/at/all', which does not exist",
    "dangling/run": (
        "cannot be written: 'HERE/dangling' is a link to '/nowhere/at/all', which does not exist"
    ),
    "circle": "is a link to 'circle', which does not exist",
    "/dev/null": "is not a folder",
    "/etc/passwd/run": "cannot be written: '/etc/passwd' is not a folder",
    "/proc/run": "cannot be written (No such file or directory)",
    f"{'n' * 256}": "cannot be written (File name too long)",
}


def test_a_workdir_that_is_no_text(here):
    assert "holds bytes that are not UTF-8" in refused(config(), "a\udcff")


def test_a_user_without_a_home_folder_gets_no_folder_called_tilde(here, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(
        files, "try_folder", lambda path: files.Unwritable("x") if "/" in path else None
    )
    assert places._free("x") == ""
    assert not (here / "~").exists()


@pytest.mark.parametrize("place", WORKDIRS, ids=lambda place: place[:20])
def test_folders_that_cannot_be_written(here, place):
    """Also for root, whom access rights do not hold. A folder that is there is not proposed: it may
    be another run's."""
    rule = WORKDIRS[place].replace("HERE", str(here))
    name = (os.path.basename(place))[:100]
    (here / "runs" / name).mkdir(exist_ok=True)
    assert refused(config(), place) == f"--workdir={place!r} {rule}: use --workdir=runs/{name}-2"
    line = refused(config(checkpoint__directory=place), "runs/new")
    assert line == f"checkpoint.directory={place!r} {rule}: use --config.checkpoint.directory="
    local = os.path.join(here, place)
    line = refused(config(checkpoint__local=local, checkpoint__local_every=1), "runs/new")
    assert line.startswith(f"checkpoint.local={local!r} {rule}: use --config.checkpoint.local=")
    if place in ("file", "dangling"):
        (here / "runs" / "old" / "checkpoints").symlink_to(here / place)
        assert refused(config(), "runs/old").startswith("--workdir='runs/old': its checkpoints is ")


@pytest.mark.parametrize("name", [*places.FILES, "tensorboard", "checkpoints", "profile", "rows"])
def test_what_is_in_the_way_in_the_run_s_folder(here, name):
    """A folder or a FIFO in place of a file, a file in place of a folder; what is there stays."""
    path, is_file = here / "runs" / "old" / name, name in places.FILES
    if is_file:
        path.mkdir()
        kinds = [("a folder, not a file", path.rmdir), ("a FIFO, not a file", path.unlink)]
    else:
        path.touch()
        kinds = [("not a folder", path.unlink)]
    for kind, remove in kinds:
        line = (
            f"--workdir='runs/old': its {name} is {kind}: move it away, or use --workdir=runs/old-2"
        )
        assert refused(config(), "runs/old") == line
        remove()
        if kind != kinds[-1][0]:
            os.mkfifo(path)
    check(config(), "runs/old")
    path.touch() if is_file else path.mkdir()
    check(config(), "runs/old")


@pytest.mark.parametrize("name", [*places.FOLDERS])
def test_a_folder_of_a_run_that_is_a_link_is_refused_by_name(here, name):
    """Nothing is written through it, not for a trial either; the run's own folder may be a link."""
    (here / "big").mkdir()
    (here / "runs" / "old" / name).symlink_to(here / "big")
    (here / "linked").symlink_to("runs/old")
    line = refused(config(), "linked")
    assert line.startswith(f"--workdir='linked': its {name} is a link, through which nothing is wr")
    directory = f"--config.checkpoint.directory={here}/big"
    assert (directory in line) == (name == "checkpoints")
    if name == "checkpoints":
        check(config(checkpoint__directory=str(here / "big")), "linked")
    assert contents(here / "big") == []


def test_addresses_in_place_of_folders(here, monkeypatch):
    assert refused(config(), "s3://bucket/run") == (
        "--workdir='s3://bucket/run' is an address, not a folder, as checkpoint.directory may "
        "be: use --workdir=runs/run"
    )
    assert refused(config(), "S3:/bucket/run").endswith("use --workdir=runs/run")
    monkeypatch.setattr("jaxtrain.config.addresses._is_installed", lambda store: False)
    with pytest.raises(
        PlaceError,
        match="^checkpoint.directory='s3://b/r' needs the package s3fs, which is not installed: "
        "pip install",
    ):
        check(config(checkpoint__directory="s3://b/r"), "runs/new")


def test_what_may_pass_is_worth_a_restart(here, monkeypatch):
    """A store that does not answer. A full disk: tests/chaos/test_full_disk.py."""
    monkeypatch.setattr(manifest, "try_step", lambda place: raise_(OSError("it is away")))
    monkeypatch.setattr("jaxtrain.checkpoint.stores.folder", pathlib.Path)
    with pytest.raises(
        NoStorageError, match=r"^checkpoint.directory='s3://b/r' cannot be written \(it is away\)$"
    ) as raised:
        check(config(checkpoint__directory="s3://b/r"), "runs/new")
    assert raised.value.status == ExitStatus.STORAGE and raised.value.status.goes_on


REFUSED = OSError(errno.EPERM, "Operation not permitted", "a", None, "b")


@pytest.mark.parametrize("call", ["rename", "replace"])
def test_places_are_tried_in_the_ways_of_a_run(here, monkeypatch, call):
    """A mount that takes new files and does not rename: a run would be lost at its first save."""

    def refuse(*_):
        raise REFUSED

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(PlaceError, match=r"does not let files be renamed \(Operation not permi"):
        check(config(), "runs/old")
    assert contents(here / "runs") == [str(here / "runs" / "old")]


def test_a_step_is_tried_as_it_is_saved(here, monkeypatch):
    """Its size and checksums are asked for, too; TensorStore's error is the system's."""
    full = ValueError("ABORTED: Error writing [os_error_code='28'] [source locations='x.cc:1']")
    for fault, why in (
        (full, "No space left on device"),
        (OSError(5, "Input/output error"), "Inp"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "write", lambda step, fault=fault: raise_(fault))
            with pytest.raises(NoStorageError, match=rf"its checkpoints cannot be written \({why}"):
                check(config(), "runs/old")
            with pytest.raises(NoStorageError, match=rf"^checkpoint.directory='c' .*\({why}"):
                check(config(checkpoint__directory="c"), "runs/old")
    assert contents(here / "runs") == [str(here / "runs" / "old")]


def raise_(error: Exception):
    raise error


def test_only_what_will_be_written_is_tried(here):
    for name in ("tensorboard", "profile", "rows", "checkpoints"):
        (here / "runs" / "old" / name).touch()
    nothing = config(
        metrics__tensorboard=False,
        metrics__rows=False,
        train__profile_steps=0,
        checkpoint__directory="elsewhere",
    )
    check(nothing, "runs/old")
    assert not (here / "elsewhere").exists()


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def flags_of_tiny(here, monkeypatch):
    (here / "corpus.txt").write_text("some text\n" * 1000)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(here / "cache"))
    return [
        f"--config={ROOT / 'configs' / 'tiny.py'}",
        "--config.data.source=corpus.txt",
        "--cpu_devices=8",
        "--config.train.steps=4",
    ]


def test_the_command_refuses_before_jax_has_started(here, flags_of_tiny, monkeypatch, capsys):
    """And does not where nothing is written."""
    started = RuntimeError("jax is started")

    def start_jax(*_):
        raise started

    monkeypatch.setattr("jaxtrain.devices.startup.start_jax", start_jax)
    before = contents(here)
    assert (
        train.main([*flags_of_tiny, "--config.checkpoint.directory=/proc/x"])
        == ExitStatus.BAD_CONFIG
    )
    line = (
        "error: checkpoint.directory='/proc/x' cannot be written (No such file or directory): use "
        "--config.checkpoint.directory=\n"
    )
    assert capsys.readouterr().err == line and contents(here) == before
    for flag in ("--dry_run", "--replay=3"):
        with pytest.raises(RuntimeError, match="jax is started"):
            train.main(
                [*flags_of_tiny, "--workdir=/proc/x", "--config.checkpoint.directory=/proc/x", flag]
            )


# --- several processes ----------------------------------------------------------------------------


class Board:
    """What processes tell each other, for two that are threads here."""

    def __init__(self, monkeypatch):
        self.told: dict[str, str] = {}
        self.here = threading.local()
        self.barrier = threading.Barrier(2, timeout=30)
        monkeypatch.setattr(cluster, "_questions", itertools.repeat(0))
        monkeypatch.setattr(jax, "process_index", lambda: self.here.process)
        monkeypatch.setattr(cluster, "told_by_main", self.told_by_main)
        monkeypatch.setattr(cluster, "told_to_main", self.told_to_main)
        monkeypatch.setattr(cluster, "barrier", lambda name: self.barrier.wait())

    def told_by_main(self, question, decide):
        if self.here.process == 0:
            self.told[question] = json.dumps(decide())
        self.barrier.wait()
        answer = json.loads(self.told[question])
        self.barrier.wait()
        return answer

    def told_to_main(self, question, report):
        self.told[f"{question}/{self.here.process}"] = report
        self.barrier.wait()
        return (
            [self.told[f"{question}/{process}"] for process in range(2)]
            if self.here.process == 0
            else []
        )

    def ask(self, *of_each: tuple[Config, str]) -> list[str]:
        """What check_together raises in each process."""
        said = ["", ""]

        def process(number: int) -> None:
            self.here.process = number
            try:
                check_together(*of_each[number])
            except RunError as error:
                said[number] = f"{int(error.status)} {error}"

        threads = [threading.Thread(target=process, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said


def test_several_try_a_folder_that_is_new(tmp_path):
    """Each removes what it has made, be it while another one is about to write in it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert set(pool.map(files.try_folder, [tmp_path / "a" / "b"] * 400)) == {None}
    finally:
        sys.setswitchinterval(interval)


def test_several_processes_agree(here, monkeypatch):
    """Process 0's places, those of each host, and a folder that hosts do not share; all end with
    the same line, and nothing is left."""
    board, before = Board(monkeypatch), contents(here)
    good, file = (config(), "runs/new"), str(here / "file")
    assert board.ask(good, good) == ["", ""]
    said = board.ask((config(), "file"), good)
    assert said == ["2 --workdir='file' is not a folder: use --workdir=runs/file"] * 2
    bad = (config(checkpoint__local=file, checkpoint__local_every=1), "runs/new")
    said = board.ask(good, bad)
    assert said[0] == said[1] and said[0].startswith(
        f"2 process 1: checkpoint.local={file!r} is not a folder: use "
    )
    assert contents(here) == before


def test_processes_share_their_folders(here, monkeypatch):
    """Whatever they call them; another folder is named with both processes, and nothing is left."""
    board, host = Board(monkeypatch), socket.gethostname()
    monkeypatch.setattr(places, "SEEN_HERE_S", 0.2)
    monkeypatch.chdir(here)
    (here / "link").symlink_to(here / "runs")
    before = contents(here)
    good = (config(), "runs/new")
    for workdir in ("link/new", "./runs/../runs/new/", str(here / "runs" / "new")):
        assert board.ask(good, (config(), workdir)) == ["", ""]
    same = (config(checkpoint__directory="link/steps"), "runs/new")
    assert board.ask((config(checkpoint__directory="runs/steps"), "runs/new"), same) == ["", ""]
    for other, names in (
        ((config(), "runs/other"), ("--workdir='runs/other'", "--workdir='runs/new'")),
        (
            (config(checkpoint__directory="steps"), "runs/new"),
            ("checkpoint.directory='steps'", "the checkpoints of --workdir='runs/new'"),
        ),
    ):
        said = board.ask(good, other)
        assert said[0] == said[1] and said[0] == (
            f"2 process 1: {names[0]} on {host} is not the folder of {names[1]} on {host} (process "
            "0): all processes of a run need the same one, under whatever path"
        )
    assert contents(here) == before
