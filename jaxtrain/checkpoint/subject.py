"""What a place is that a command is given: a folder of checkpoints, or one step. Nothing is written
here. No jax.

RUN, RUN/checkpoints, s3://BUCKET/PATH     all steps there
RUN/checkpoints/20                         that step alone, whole or not; also one set aside, or
                                           copied to a folder of another name
anything else                              NoCheckpointsError, with the nearest place that has
                                           checkpoints
"""

import contextlib
import dataclasses
import difflib
import itertools
import os
import pathlib
import re
import shlex

from etils import epath

from jaxtrain.checkpoint import manifest, steps, stores
from jaxtrain.checkpoint.database import STATE
from jaxtrain.checkpoint.steps import BROKEN, CONFIG, META, ORBAX_UNFINISHED, checkpoints_of
from jaxtrain.checkpoint.stores import scheme_of
from jaxtrain.config import addresses
from jaxtrain.run.exit_status import ExitStatus, RunError

_STEPS_NAME = re.compile(rf"\d{{1,10}}({re.escape(BROKEN)}\d+)?")
_LOOKED_AT = 1000  # entries of a folder in which a run is looked for


class NoCheckpointsError(RunError):
    """A place that has no checkpoints; the text is one line."""

    status = ExitStatus.BAD_CONFIG


@dataclasses.dataclass(frozen=True)
class Subject:
    """The folder of checkpoints that a command is about. step: the folder of the one step that is
    meant; None: all are."""

    directory: epath.Path
    step: epath.Path | None = None

    def folders(self) -> list[epath.Path]:
        """The folders of the steps that are meant, whole or not, in order."""
        return (
            [self.step]
            if self.step
            else [self.directory / str(step) for step in steps.names(self.directory)]
        )

    def others(self) -> list[epath.Path]:
        """What runs have set aside in the directory, and saves that did not end or are under way;
        none beside one step."""
        return (
            []
            if self.step
            else sorted(
                (path for path in self.directory.iterdir() if _is_left(path)),
                key=lambda path: path.name,
            )
        )


def find(place: str) -> Subject:
    """What a place is. Raises AddressError, NoCheckpointsError, or CheckpointError where it cannot
    be read."""
    folder = stores.folder(place)
    with steps.read_errors(place):
        if not stores.is_folder(folder):
            raise NoCheckpointsError(
                f"{place!r} "
                f"{'is a file' if folder.exists() else 'does not exist'}{_instead(folder)}"
            )
        if step := step_folder(folder):
            return Subject(step.parent, step)
        directory = checkpoints_of(folder)
        if _has_steps(directory):
            return Subject(directory)
        raise NoCheckpointsError(f"{place!r} has no checkpoints{_instead(folder)}")


def some_run(name: str) -> str:
    """The run below ./runs whose folder's name is most like this; "" if there is none with
    checkpoints."""
    runs = [
        str(path.parent)
        for path in sorted(pathlib.Path("runs").glob("*/checkpoints"))
        if _has_steps(epath.Path(path))
    ]
    return (difflib.get_close_matches(name, runs, n=1, cutoff=0) or [""])[0]


def step_folder(folder: epath.Path) -> epath.Path | None:
    """The folder of the step that this is, by its name and what it holds; None if it is none.
    NoCheckpointsError for an unfinished one."""
    if (folder / CONFIG).exists() or (folder / "checkpoints").exists():
        return None  # a run, whatever its name is
    if ORBAX_UNFINISHED in folder.name or (scheme_of(folder) and steps.is_unfinished(folder)):
        raise NoCheckpointsError(
            f"'{folder}' is a save that did not end, or is under way: use "
            f"{shlex.quote(str(folder.parent))}"
        )
    real = folder if scheme_of(folder) else epath.Path(os.path.realpath(folder))  # a link to a step
    path = (
        real
        if _STEPS_NAME.fullmatch(real.name) and not _STEPS_NAME.fullmatch(folder.name)
        else folder
    )
    if (path / STATE).exists() and ((path / META).exists() or (path / manifest.FILE).exists()):
        return path
    named = _STEPS_NAME.fullmatch(path.name)
    return (
        path
        if named and (_holds(path) or path.parent.name == "checkpoints" or _has_steps(path.parent))
        else None
    )


def _holds(step: epath.Path) -> bool:
    """Whether a folder has something of a step."""
    return any((step / name).exists() for name in (STATE, META, manifest.FILE))


def _has_steps(directory: epath.Path) -> bool:
    """Whether a folder is one of checkpoints: not /proc, whose entries have numbers for names,
    too."""
    if not directory.is_dir():
        return False
    for path in directory.iterdir():
        if _is_left(path) or (
            _STEPS_NAME.fullmatch(path.name) and (directory.name == "checkpoints" or _holds(path))
        ):
            return True
    return False


def _is_left(path: epath.Path) -> bool:
    """Whether an entry of a folder of checkpoints is set aside, or an unfinished save."""
    return (
        BROKEN in path.name and _STEPS_NAME.fullmatch(path.name) is not None
    ) or steps.is_unfinished(path)


def _instead(folder: epath.Path) -> str:
    """What to use, as the end of a line: the nearest place with checkpoints, if there is one."""
    in_store = bool(scheme_of(folder))
    with contextlib.suppress(OSError):
        near = next(filter(_has_checkpoints, _above(folder)), None) if in_store else _near(folder)
        if near:
            return f": use {shlex.quote(os.fspath(near))}"
    near = "" if in_store else some_run(str(folder))
    return f": use {shlex.quote(near) if near else 'the folder of a run'}"


def _above(folder: epath.Path) -> list[epath.Path]:
    """The three folders above one, as far as they are in a bucket's."""
    parents = itertools.islice(folder.parents, 3)
    return [
        path for path in parents if not scheme_of(path) or addresses.fault(os.fspath(path)) is None
    ]


def _has_checkpoints(path: epath.Path) -> bool:
    with contextlib.suppress(OSError, RunError):
        return step_folder(path) is not None or _has_steps(checkpoints_of(path))
    return False


def _near(folder: epath.Path) -> str:
    """The first place with checkpoints above a folder, in it, or beside it, where the likest name
    comes first; "" if there is none."""
    absolute = epath.Path(os.path.abspath(folder))
    likeness = lambda path: -difflib.SequenceMatcher(None, path.name, absolute.name).ratio()
    beside = sorted(_folders_in(absolute.parent), key=likeness)
    path = next(
        filter(_has_checkpoints, (*_above(absolute), *_folders_in(absolute), *beside)), None
    )
    if path is None:
        return ""
    return os.fspath(path) if folder.is_absolute() else os.path.relpath(path)


def _folders_in(folder: epath.Path) -> list[epath.Path]:
    entries = sorted(itertools.islice(folder.iterdir(), _LOOKED_AT)) if folder.is_dir() else []
    return [path for path in entries if path.is_dir()]
