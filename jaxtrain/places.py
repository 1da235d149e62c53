"""The places to which a run will write: each is tested by writing to it before anything is
compiled. jax is needed only for a run of several processes.

    process 0     the run's folder and its files, the checkpoints, tensorboard/
    each process  checkpoints, checkpoint.local, parallel.offload_directory, profile/, rows/

A place that cannot be written ends the command with one line that has the flag or setting, the
reason, and a flag that works. The status is 2, or 74 for an error that may pass (a full disk, a
store that does not answer). The tests leave nothing behind. data/preparing/prepare.py tests the
cache of corpora when it prepares one.
"""

import contextlib
import itertools
import os
import pathlib
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from jaxtrain.checkpoint import manifest, stores
from jaxtrain.checkpoint.steps import read_errors
from jaxtrain.config import (
    CheckpointConfig,
    Config,
    MetricsConfig,
    UsageError,
    addresses,
    flag_text,
)
from jaxtrain.data import row_log
from jaxtrain.experiments import followers
from jaxtrain.run import files, goodput, metrics, run_lock
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.training.stored_op_times import OP_TIMES

PROFILE_FOLDER = "profile"
FILES = (  # of process 0 in the run's folder
    *(
        files.CONFIG_FILE,
        OP_TIMES,
        files.PLANNED,
        files.STARTS_FILE,
        files.SAMPLES_FILE,
        run_lock.NAME,
        goodput.GOODPUT_FILE,
        goodput.GOODPUT_PLOT,
    ),
    *(metrics.METRICS_FILE, metrics.ROLLED_BACK_FILE, metrics.LOSS_PLOT),
)
FOLDERS = (
    *(PROFILE_FOLDER, row_log.FOLDER, metrics.TENSORBOARD_FOLDER, followers.FOLDER),
    *("hang", "hf", "checkpoints"),
)
# seconds until a folder that one host has made appears on the others, which cache its absence
SEEN_S = 40.0
SEEN_HERE_S = 5.0  # the same, on the host itself


class PlaceError(RunError):
    """A place that a run cannot write; the text is one line."""

    status = ExitStatus.BAD_CONFIG


class NoStorageError(PlaceError):
    """A place that the run may be able to write when it is started again."""

    status = ExitStatus.STORAGE


def _problem(text: str, passes: bool = False) -> PlaceError:
    """The error about a place, in one line. passes: it may be gone when the run starts again."""
    return NoStorageError(text) if passes else PlaceError(text)


def check(config: Config, workdir: str) -> None:
    """Raises PlaceError if a run of one process cannot write."""
    if problem := _of_main(config.checkpoint, config.metrics, workdir) or _of_each(config, workdir):
        raise problem


def check_workdir(workdir: str) -> None:
    """Raises UsageError, with a folder that works, for one that can never be a run's: it is told
    together with other errors of flags."""
    problem, free = _of_workdir(workdir), _free(os.path.basename(os.path.abspath(workdir)))
    if problem and free and not isinstance(problem, NoStorageError):
        raise UsageError(str(problem).partition(": use ")[0], {"workdir": free})


def check_together(config: Config, workdir: str) -> None:
    """Raises RunError, a PlaceError by its status, if a run of several processes cannot write, or
    if a folder that they have to share is not the same for all. Each must call it, and raises the
    same error."""
    import jax

    from jaxtrain.devices import cluster

    path, directory = os.path.join(os.getcwd(), workdir), config.checkpoint.directory
    checkpoints = directory or os.path.join(path, "checkpoints")
    shared = {
        f"--workdir={workdir!r}": path,
        f"checkpoint.directory={directory!r}"
        if directory
        else f"the checkpoints of --workdir={workdir!r}": checkpoints,
    }
    # Process 0 writes a file with a random name into each shared folder, and the others look for
    # it: that is the only proof that two paths on two hosts mean one folder.
    with contextlib.ExitStack() as until_all_have_looked:

        def of_main() -> list[str]:
            # The run's folder, and those in it that are tried, are removed if they did not exist
            # before, when all have looked: whoever has made one cannot remove it while another
            # process's trial is in it.
            folder = pathlib.Path(os.path.abspath(workdir))
            tried = (*(folder / name for name in FOLDERS), folder, *folder.parents)
            until_all_have_looked.enter_context(files.without_new_folders(*tried))
            if problem := _of_main(config.checkpoint, config.metrics, workdir):
                raise problem
            mark = f"{files.TRIAL_NAME}.{secrets.token_hex(8)}"
            for place in shared.values():
                until_all_have_looked.enter_context(_marked(stores.folder(place), mark))
            return [mark, socket.gethostname(), *shared]

        def of_each() -> None:
            if problem := _unseen(shared, *marked) or _of_each(config, workdir):
                who = f"process {jax.process_index()}: " if jax.process_index() else ""
                raise type(problem)(f"{who}{problem}")

        marked = cluster.from_main(of_main, PlaceError)
        cluster.in_all(of_each, RunError)


# --- the places -----------------------------------------------------------------------------------


def _of_main(
    checkpoint: CheckpointConfig, records: MetricsConfig, workdir: str
) -> PlaceError | None:
    """The first problem with the places that process 0 alone writes, and with the checkpoints."""
    directory = checkpoint.directory
    target_flag = flag_text(
        "config.checkpoint.directory", os.path.realpath(f"{workdir}/checkpoints")
    )
    inside: dict[str, files.Unwritable | None] = {
        name: files.Unwritable(
            "is a link, through which nothing is written"
            f"{f' ({target_flag} names its target)' * (name == 'checkpoints')}"
        )
        for name in FOLDERS[: -1 if directory else None]
        if os.path.islink(os.path.join(workdir, name))
    }
    if problem := _of_workdir(workdir) or _inside(workdir, inside):
        return problem
    for name in records.trackers:
        if fault := followers.fault_of(name):
            return _problem(f"metrics.trackers: {name} {fault}")
    # The folder itself first: an error about a file in it would be about the wrong place.
    inside = {name: files.try_file(os.path.join(workdir, name)) for name in FILES}
    if records.tensorboard:
        inside[metrics.TENSORBOARD_FOLDER] = files.try_folder(
            os.path.join(workdir, metrics.TENSORBOARD_FOLDER)
        )
    if not directory:
        inside["checkpoints"] = _try_checkpoints(os.path.join(workdir, "checkpoints"))
    return _inside(workdir, inside) or _of_checkpoints(directory, workdir)


def _of_workdir(workdir: str) -> PlaceError | None:
    if addresses.is_address(workdir) or addresses.fault(workdir):
        return _problem(
            f"--workdir={workdir!r} is an address, not a folder, as checkpoint.directory may "
            f"be: {_another(workdir)}"
        )
    if wrong := addresses.not_utf8(os.path.abspath(workdir)):
        return _problem(f"--workdir={workdir!r} {wrong.rule}: {_another(workdir)}")
    unwritable = files.try_folder(workdir)
    return (
        _problem(f"--workdir={workdir!r} {unwritable.why}: {_another(workdir)}", unwritable.passes)
        if unwritable
        else None
    )


def _of_checkpoints(directory: str, workdir: str) -> PlaceError | None:
    """directory: checkpoint.directory."""
    if not directory:
        return None
    named = f"checkpoint.directory={directory!r}"
    if not stores.scheme_of(directory):
        unwritable = _try_checkpoints(os.path.expanduser(directory))
        default = files.try_folder(os.path.join(workdir, "checkpoints")) is None
        use = flag_text(
            "config.checkpoint.directory", "" if default else _free(os.path.basename(directory))
        )
        return (
            _problem(f"{named} {unwritable.why}: use {use}", unwritable.passes)
            if unwritable
            else None
        )
    # A store is tried by a save, with all the rights that one needs: a listing alone may be allowed
    # where writing is not.
    try:
        manifest.try_step(stores.folder(directory) / f"{files.TRIAL_NAME}.{secrets.token_hex(8)}")
    except stores.AddressError as error:
        return _problem(f"{named} {error.wrong.rule}")
    except Exception as error:
        if not (why := stores.failure(error)):
            raise
        return _problem(f"{named} cannot be written ({why})", passes=True)
    return None


def _try_checkpoints(folder: str) -> files.Unwritable | None:
    """Why a folder of a file system cannot have checkpoints; None where it can."""
    return files.try_folder(folder, lambda path: manifest.try_step(epath.Path(path)))


def _of_each(config: Config, workdir: str) -> PlaceError | None:
    """The first problem with the places that each process writes."""
    local, offload = config.checkpoint.local, config.parallel.offload_directory
    folders = [PROFILE_FOLDER] * bool(config.train.profile_steps)
    folders += [row_log.FOLDER] * config.metrics.rows
    inside = {folder: files.try_folder(os.path.join(workdir, folder)) for folder in folders}
    if offload and (unwritable := files.try_folder(os.path.expanduser(offload))):
        use = flag_text("config.parallel.offload_directory", "")
        return _problem(
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
    use = " ".join(flag_text(f"config.{path}", value) for path, value in changes.items())
    return _problem(f"checkpoint.local={local!r} {unwritable.why}: use {use}", unwritable.passes)


def _inside(workdir: str, inside: Mapping[str, files.Unwritable | None]) -> PlaceError | None:
    """The first problem with something in a run's folder."""
    for name, unwritable in inside.items():
        if unwritable:
            return _problem(
                f"--workdir={workdir!r}: its {name} {unwritable.why}: move it away, or "
                f"{_another(workdir)}",
                unwritable.passes,
            )
    return None


# --- folders that all hosts see -------------------------------------------------------------------


@contextlib.contextmanager
def _marked(folder: epath.Path, mark: str) -> Iterator[None]:
    """A context in which a file of this name is in a folder, which can be written and is made if
    need be."""
    # A store has no folders that could be left behind, only the file.
    path = pathlib.Path(folder)
    with files.without_new_folders(*([] if stores.scheme_of(folder) else [path, *path.parents])):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).write_text(mark)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (folder / mark).unlink()


def _unseen(shared: Mapping[str, str], mark: str, host: str, *of_main: str) -> PlaceError | None:
    """The problem where this process does not see, or may not write, a folder of process 0's.

    shared: setting → folder or address, the checkpoints last; mark: the name of process 0's file in
    its own ones, whose settings are `of_main`; host: its host
    """
    here, place = socket.gethostname(), ""
    for (setting, place), other in zip(shared.items(), of_main, strict=True):
        end = time.monotonic() + (SEEN_HERE_S if here == host else SEEN_S)
        with read_errors(setting):
            while not (stores.folder(place) / mark).exists():
                if time.monotonic() > end:
                    return _problem(
                        f"{setting} on {here} is not the folder of {other} on {host} (process 0): "
                        "all processes of a run need the same one, under whatever path"
                    )
                time.sleep(0.1)
    unwritable = None if stores.scheme_of(place) else _try_checkpoints(os.path.expanduser(place))
    return (
        _problem(f"{place!r} on {here} {unwritable.why}", unwritable.passes) if unwritable else None
    )


# --- places that work -----------------------------------------------------------------------------


def _another(workdir: str) -> str:
    """Advice for another workdir."""
    free = _free(os.path.basename(os.path.abspath(workdir)))
    return f"use {flag_text('workdir', free)}" if free else "use another --workdir"


def _free(name: str) -> str:
    """A new folder of a name like this that can be written; "" if none is known."""
    # Suggested folders are tried too: a suggestion that fails would cost a second start.
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
