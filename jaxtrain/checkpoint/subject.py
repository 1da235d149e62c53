"""The checkpoints that a place on a command line stands for: a folder of them, or one step. Nothing
is written. No jax.

RUN, RUN/checkpoints, s3://BUCKET/PATH     all steps there
RUN/checkpoints/20                         that step alone, complete or not; also a step that was
                                           set aside, or copied to a folder of another name
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
from jaxtrain.config import addresses
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.files import CONFIG_FILE

_STEPS_NAME = re.compile(rf"\d{{1,10}}({re.escape(steps.BROKEN)}\d+)?")
_LOOKED_AT = 1000  # entries of a folder in which a run is looked for


class NoCheckpointsError(RunError):
    """A place that has no checkpoints; the text is one line."""

    status = ExitStatus.BAD_CONFIG


@dataclasses.dataclass(frozen=True)
class Subject:
    """The folder of checkpoints that a command is about. step: the folder of the one step that is
    meant, None if all are."""

    directory: epath.Path
    step: epath.Path | None = None

    def folders(self) -> list[epath.Path]:
        """The folders of the steps that are meant, complete or not, in order."""
        every = (self.directory / str(step) for step in steps.step_numbers(self.directory))
        return [self.step] if self.step else list(every)

    def others(self) -> list[epath.Path]:
        """The entries that runs have set aside in the directory, and saves that did not end or are
        under way; none if one step is meant."""
        others = [] if self.step else filter(_is_other, self.directory.iterdir())
        return sorted(others, key=lambda path: path.name)


def find(place: str) -> Subject:
    """The checkpoints that a place stands for. Raises AddressError, NoCheckpointsError, or
    CheckpointError where it cannot be read."""
    folder = stores.folder(place)
    with steps.read_errors(place):
        if not stores.is_folder(folder):
            fault = "is a file" if folder.exists() else "does not exist"
            raise NoCheckpointsError(f"{place!r} {fault}{_instead(folder)}")
        if step := step_folder(folder):
            return Subject(step.parent, step)
        directory = steps.checkpoints_of(folder)
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
    """The folder of the step that a folder, or a link, stands for, by its name and its files; None
    if it is no step. Raises NoCheckpointsError for an unfinished one."""
    if (folder / CONFIG_FILE).exists() or (folder / "checkpoints").exists():
        return None  # a run, whatever its name is
    if steps.ORBAX_UNFINISHED in folder.name or (
        stores.scheme_of(folder) and steps.is_unfinished(folder)
    ):
        raise NoCheckpointsError(
            f"'{folder}' is a save that did not end, or is under way: use "
            f"{shlex.quote(str(folder.parent))}"
        )
    # A link "latest" stands for the step that it leads to, whose name has the number.
    path = folder
    if not stores.scheme_of(folder) and not _STEPS_NAME.fullmatch(folder.name):
        target = epath.Path(os.path.realpath(folder))
        if _STEPS_NAME.fullmatch(target.name):  # a link to a step
            path = target
    if (path / manifest.STATE).exists() and (
        (path / manifest.META).exists() or (path / manifest.FILE).exists()
    ):
        return path
    if _STEPS_NAME.fullmatch(path.name) and (
        _has_parts(path) or path.parent.name == "checkpoints" or _has_steps(path.parent)
    ):
        return path
    return None


def _has_parts(step: epath.Path) -> bool:
    """True for a folder with some part of a step."""
    return any((step / name).exists() for name in (manifest.STATE, manifest.META, manifest.FILE))


def _has_steps(directory: epath.Path) -> bool:
    """True for a folder of checkpoints, and not for /proc, whose entries have numbers for names,
    too."""
    if not directory.is_dir():
        return False
    in_run = directory.name == "checkpoints"
    return any(
        _is_other(path)
        or (_STEPS_NAME.fullmatch(path.name) is not None and (in_run or _has_parts(path)))
        for path in directory.iterdir()
    )


def _is_other(path: epath.Path) -> bool:
    """True for an entry of a folder of checkpoints that is set aside, or an unfinished save."""
    set_aside = steps.BROKEN in path.name and _STEPS_NAME.fullmatch(path.name)
    return bool(set_aside) or steps.is_unfinished(path)


def _instead(folder: epath.Path) -> str:
    """The place to use, as the end of a line: the nearest one with checkpoints, if there is one."""
    near, in_store = "", bool(stores.scheme_of(folder))
    with contextlib.suppress(OSError):
        if in_store:
            near = os.fspath(next(filter(_has_checkpoints, _above(folder)), ""))
        else:
            near = _near(folder)
    near = near or ("" if in_store else some_run(str(folder)))
    return f": use {shlex.quote(near) if near else 'the folder of a run'}"


def _above(folder: epath.Path) -> list[epath.Path]:
    """The three folders above one, without a bucket itself."""
    parents = itertools.islice(folder.parents, 3)
    return [path for path in parents if addresses.fault(os.fspath(path)) is None]


def _has_checkpoints(path: epath.Path) -> bool:
    with contextlib.suppress(OSError, RunError):
        return step_folder(path) is not None or _has_steps(steps.checkpoints_of(path))
    return False


def _near(folder: epath.Path) -> str:
    """The first place with checkpoints above a folder, in it, or next to it, where the likest name
    comes first; "" if there is none."""
    absolute = epath.Path(os.path.abspath(folder))
    likeness = lambda path: -difflib.SequenceMatcher(None, path.name, absolute.name).ratio()
    siblings = sorted(_folders_in(absolute.parent), key=likeness)
    for path in (*_above(absolute), *_folders_in(absolute), *siblings):
        if _has_checkpoints(path):
            return os.fspath(path) if folder.is_absolute() else os.path.relpath(path)
    return ""


def _folders_in(folder: epath.Path) -> list[epath.Path]:
    entries = sorted(itertools.islice(folder.iterdir(), _LOOKED_AT)) if folder.is_dir() else []
    return [path for path in entries if path.is_dir()]
