"""The places to which a run will write: each is tested by writing to it before anything is
compiled. jax is needed only for a run of several processes.

    process 0     the run's folder and its files, the checkpoints, tensorboard/
    each process  checkpoints, checkpoint.local, parallel.offload_directory, profile/, rows/

A place that cannot be written ends the command with one line that has the flag or setting, the
reason, and a flag that works. The status is 2, or 74 for an error that may pass (a full disk, a
store that does not answer). The tests leave nothing behind. data/tokens.py tests the cache of
corpora when it prepares one.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from jaxtrain import config as cfg
from jaxtrain.checkpoint import manifest, stores
from jaxtrain.config import Config, addresses
from jaxtrain.config.errors import UsageError
from jaxtrain.data import row_log
from jaxtrain.plan.compare import PLANNED
from jaxtrain.run import files, goodput, metrics, run_lock
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.files import CONFIG_FILE, Unwritable
from jaxtrain.training.stored_op_times import OP_TIMES

PROFILE_FOLDER = "profile"
FILES = (  # of process 0 in the run's folder
    *(CONFIG_FILE, OP_TIMES, PLANNED, run_lock.NAME, goodput.GOODPUT_FILE, goodput.GOODPUT_PLOT),
    *(metrics.METRICS_FILE, metrics.ROLLED_BACK_FILE, metrics.LOSS_PLOT),
)
FOLDERS = (PROFILE_FOLDER, row_log.FOLDER, metrics.TENSORBOARD_FOLDER, "hang", "hf", "checkpoints")
# seconds until a folder that one host has made appears on the others, which cache its absence
SEEN_S = 40.0


class PlaceError(RunError):
    """A place that a run cannot write; the text is one line."""

    status = ExitStatus.BAD_CONFIG


class NoStorageError(PlaceError):
    """A place that the run may be able to write when it is started again."""

    status = ExitStatus.STORAGE


@dataclasses.dataclass(frozen=True)
class Problem:
    """The problem with a place, in one line; passes: it may be gone when the run is started
    again."""

    text: str
    passes: bool = False

    def error(self) -> PlaceError:
        return NoStorageError(self.text) if self.passes else PlaceError(self.text)


def check(config: Config, workdir: str) -> None:
    """Raises PlaceError if a run of one process cannot write."""
    settings, written = config.checkpoint, config.metrics
    problem = _of_main(workdir, settings.directory, written.tensorboard) or _of_each(
        workdir,
        settings.local,
        config.parallel.offload_directory,
        config.train.profile_steps > 0,
        written.rows,
    )
    if problem:
        raise problem.error()


def check_workdir(workdir: str) -> None:
    """Raises UsageError, with a folder that works, for one that can never be a run's: it is told
    together with other errors of flags."""
    problem, free = _of_workdir(workdir), _free(os.path.basename(os.path.abspath(workdir)))
    if problem and free and not problem.passes:
        raise UsageError(problem.text.partition(": use ")[0], {"workdir": free})


def check_together(config: Config, workdir: str) -> None:
    """Raises PlaceError if a run of several processes cannot write. Each must call it, and
    raises the same error. All hosts must see the checkpoints."""
    import jax

    from jaxtrain.devices import cluster

    process, question = jax.process_index(), f"places {next(_questions)}"
    settings, written = config.checkpoint, config.metrics
    with contextlib.ExitStack() as until_all_have_looked:
        if process == 0:
            until_all_have_looked.enter_context(_left_as_it_was(workdir))

        def of_main() -> dict:
            problem, mark = _of_main(workdir, settings.directory, written.tensorboard), ""
            folder = _shared_folder(settings.directory, workdir)
            if folder and not problem:
                mark = until_all_have_looked.enter_context(_marked(folder))
            return {"problem": problem and dataclasses.asdict(problem), "mark": mark}

        answer = cluster.told_by_main(f"{question}/main", of_main)
        problem = (
            Problem(**answer["problem"])
            if answer["problem"]
            else _unseen(answer["mark"])
            or _of_each(
                workdir,
                settings.local,
                config.parallel.offload_directory,
                config.train.profile_steps > 0,
                written.rows,
            )
        )
        reports = cluster.told_to_main(
            f"{question}/each", json.dumps(problem and dataclasses.asdict(problem))
        )

        def first_problem() -> dict | None:
            for number, values in enumerate(map(json.loads, reports)):
                if values:
                    who = f"process {number}: " if number else ""
                    return values | {"text": who + values["text"]}
            return None

        agreed = cluster.told_by_main(f"{question}/all", first_problem)
        cluster.barrier(f"{question} are known")  # process 0, whom all ask, may end now
    if agreed:
        raise Problem(**agreed).error()


_questions = itertools.count()


# --- the places -----------------------------------------------------------------------------------


def _of_main(workdir: str, directory: str, tensorboard: bool) -> Problem | None:
    """The first problem with the places that process 0 alone writes, and with the checkpoints.
    directory: checkpoint.directory; tensorboard: whether there are TensorBoard files."""
    own = cfg.flag_text("config.checkpoint.directory", os.path.realpath(f"{workdir}/checkpoints"))
    inside: dict[str, Unwritable | None] = {
        name: Unwritable(
            "is a link, through which nothing is written"
            f"{f' ({own} names its target)' * (name == 'checkpoints')}"
        )
        for name in FOLDERS[: -1 if directory else None]
        if os.path.islink(os.path.join(workdir, name))
    }
    if problem := _of_workdir(workdir) or _inside(workdir, inside):
        return problem
    inside = {name: files.try_file(os.path.join(workdir, name)) for name in FILES}
    if tensorboard:
        inside[metrics.TENSORBOARD_FOLDER] = files.try_folder(
            os.path.join(workdir, metrics.TENSORBOARD_FOLDER)
        )
    if not directory:
        inside["checkpoints"] = _try_checkpoints(os.path.join(workdir, "checkpoints"))
    return _inside(workdir, inside) or _of_checkpoints(directory, workdir)


def _of_workdir(workdir: str) -> Problem | None:
    if addresses.is_address(workdir) or addresses.fault(workdir):
        return Problem(
            f"--workdir={workdir!r} is an address, not a folder, as checkpoint.directory may "
            f"be: {_another(workdir)}"
        )
    if wrong := addresses.not_utf8(os.path.abspath(workdir)):
        return Problem(f"--workdir={workdir!r} {wrong.rule}: {_another(workdir)}")
    unwritable = files.try_folder(workdir)
    return (
        Problem(f"--workdir={workdir!r} {unwritable.why}: {_another(workdir)}", unwritable.passes)
        if unwritable
        else None
    )


def _of_checkpoints(directory: str, workdir: str) -> Problem | None:
    """directory: checkpoint.directory."""
    if not directory:
        return None
    named = f"checkpoint.directory={directory!r}"
    if not stores.scheme_of(directory):
        unwritable = _try_checkpoints(os.path.expanduser(directory))
        default = files.try_folder(os.path.join(workdir, "checkpoints")) is None
        use = cfg.flag_text(
            "config.checkpoint.directory", "" if default else _free(os.path.basename(directory))
        )
        return (
            Problem(f"{named} {unwritable.why}: use {use}", unwritable.passes)
            if unwritable
            else None
        )
    try:
        manifest.try_step(stores.folder(directory) / f"{files.TRIAL_NAME}.{secrets.token_hex(8)}")
    except stores.AddressError as error:
        return Problem(f"{named} {error.wrong.rule}")
    except Exception as error:
        if not (why := stores.failure(error)):
            raise
        return Problem(f"{named} cannot be written ({why})", passes=True)
    return None


def _try_checkpoints(folder: str) -> Unwritable | None:
    """Why a folder of a file system cannot have checkpoints; None where it can."""
    return files.try_folder(folder, lambda path: manifest.try_step(epath.Path(path)))


def _of_each(workdir: str, local: str, offload: str, profiles: bool, rows: bool) -> Problem | None:
    """The first problem with the places that each process writes. local: checkpoint.local; offload:
    parallel.offload_directory; profiles, rows: whether there are traces, and logs of sequences."""
    folders = [PROFILE_FOLDER] * profiles + [row_log.FOLDER] * rows
    inside = {folder: files.try_folder(os.path.join(workdir, folder)) for folder in folders}
    if offload and (unwritable := files.try_folder(os.path.expanduser(offload))):
        use = cfg.flag_text("config.parallel.offload_directory", "")
        return Problem(
            f"parallel.offload_directory={offload!r} {unwritable.why}: use {use}, and the host's "
            "memory has the optimizer's state",
            unwritable.passes,
        )
    unwritable = files.try_folder(local) if local else None
    if unwritable is None:
        return _inside(workdir, inside)
    shared_memory = "/dev/shm/jaxtrain"
    works = local != shared_memory and files.try_folder(shared_memory) is None
    changes: dict[str, Any] = (
        {"checkpoint.local": shared_memory}
        if works
        else {"checkpoint.local": "", "checkpoint.local_every": 0}
    )
    use = " ".join(cfg.flag_text(f"config.{path}", value) for path, value in changes.items())
    return Problem(f"checkpoint.local={local!r} {unwritable.why}: use {use}", unwritable.passes)


def _inside(workdir: str, inside: Mapping[str, Unwritable | None]) -> Problem | None:
    """The first problem with something in a run's folder."""
    for name, unwritable in inside.items():
        if unwritable:
            return Problem(
                f"--workdir={workdir!r}: its {name} {unwritable.why}: move it away, or "
                f"{_another(workdir)}",
                unwritable.passes,
            )
    return None


# --- folders that all hosts see -------------------------------------------------------------------


def _shared_folder(directory: str, workdir: str) -> str:
    """The folder of checkpoints in a file system; "" for those in a store. directory:
    checkpoint.directory."""
    if stores.scheme_of(directory):
        return ""
    return os.path.abspath(os.path.expanduser(directory) or os.path.join(workdir, "checkpoints"))


def _left_as_it_was(workdir: str) -> contextlib.AbstractContextManager:
    """A context that removes the run's folder, and those in it that are tried, if they did not
    exist before. Several processes that try them at the same time leave folders: whoever has made
    one cannot remove it while another one's trial is in it."""
    path = pathlib.Path(os.path.abspath(workdir))
    return files.without_new_folders(*(path / name for name in FOLDERS), path, *path.parents)


@contextlib.contextmanager
def _marked(folder: str) -> Iterator[str]:
    """A context in which a file of a new name is in a folder, which can be written and is made if
    need be; its path."""
    path = pathlib.Path(folder)
    mark = path / f"{files.TRIAL_NAME}.{secrets.token_hex(8)}"
    with files.without_new_folders(path, *path.parents):
        path.mkdir(parents=True, exist_ok=True)
        mark.touch()
        try:
            yield str(mark)
        finally:
            with contextlib.suppress(OSError):
                mark.unlink()


def _unseen(mark: str) -> Problem | None:
    """The problem where this host does not see, or may not write, the folder of a file of process
    0's. mark: that file, "" if the checkpoints are in a store."""
    if not mark:
        return None
    folder, end = os.path.dirname(mark), time.monotonic() + SEEN_S
    while not os.path.exists(mark):
        if time.monotonic() > end:
            return Problem(
                f"{folder!r} on {socket.gethostname()} is not the folder of process 0: checkpoints "
                "need one that all hosts share under the same path"
            )
        time.sleep(0.1)
    unwritable = _try_checkpoints(folder)
    return (
        Problem(f"{folder!r} on {socket.gethostname()} {unwritable.why}", unwritable.passes)
        if unwritable
        else None
    )


# --- places that work -----------------------------------------------------------------------------


def _another(workdir: str) -> str:
    """Advice for another workdir."""
    free = _free(os.path.basename(os.path.abspath(workdir)))
    return f"use {cfg.flag_text('workdir', free)}" if free else "use another --workdir"


def _free(name: str) -> str:
    """A new folder of a name like this that can be written; "" if none is known."""
    bases = ["runs", os.path.expanduser("~/runs")]
    with contextlib.suppress(OSError):  # there is none that can be written
        bases.append(os.path.join(tempfile.gettempdir(), "runs"))
    # what stands for bytes that are no UTF-8 is not printable
    name = "".join(letter if letter.isprintable() else "_" for letter in name)
    for base in (base for base in bases if not base.startswith("~")):  # of a user without a home
        folders = (
            os.path.join(base, f"{name[:100] or 'run'}{'' if n == 1 else f'-{n}'}")
            for n in itertools.count(1)
        )
        folder = next(folder for folder in folders if not os.path.lexists(folder))
        if files.try_folder(folder) is None:
            return folder
    return ""
