"""The complete steps in a folder of checkpoints, and its other entries. Nothing is written, and no
array is read.

    checkpoints/
      200/                      a step, if state/, meta/ and manifest.json in it are complete
      300.orbax-checkpoint-tmp  a save that did not end: the next save removes it
      100.broken-1              a step that was set aside
      anything else             an unrecognized entry

A step is complete if all files have the sizes and checksums of its manifest (manifest.py). These do
not show damage to the numbers of an array, which is found when the array is read (storage.py).

No jax, so that commands find errors before they start it.

Begin with `choose`; `look_at` and `what_is_wrong` are its two checks of a step: the first reads its
meta alone, the second compares its files with the manifest.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from jaxtrain.checkpoint import manifest, stores
from jaxtrain.config import ConfigError, StoredConfig, TrainConfig, from_dict
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.files import CONFIG_FILE, parse_json, read_json

LOSSES = "validation_losses.json"  # beside the steps
ORBAX_UNFINISHED, BROKEN = ".orbax-checkpoint-tmp", ".broken-"
STEP_NAME = re.compile("0|[1-9][0-9]{0,9}")

VERSION = 4  # of the metas that this code writes
IN_WINDOWS = 4  # from this one on large corpora are read in windows (data/order.py)
# Groups of a state's arrays, before the "/" of their names: the parameters of all replicas, those
# of independent replicas' last exchange (training/update/diloco.py), and the average of the
# parameters (`optimizer.ema_decay`).
PARAMETERS, ANCHOR, AVERAGE = "params", "anchor", "ema"

# The keys that a complete step's meta has, with their types.
TO_TRAIN: Mapping[str, type] = {"config": dict, "step": int, "checksum": str, "tokenizer": dict}
_TYPES = {dict: "an object", int: "an integer", str: "a string"}


def trained_group(train: TrainConfig, average: bool = False) -> str:
    """The group of the parameters that are used; average: of those of `optimizer.ema_decay`."""
    return AVERAGE if average else ANCHOR if train.diloco_inner_steps else PARAMETERS


class CheckpointError(RunError):
    """A checkpoint that cannot be read or written as asked; the message is one line."""

    status = ExitStatus.STORAGE


@contextlib.contextmanager
def read_errors(place: object) -> Iterator[None]:
    """A context in which the failure of a file system or a store becomes a CheckpointError that
    names the place."""
    try:
        yield
    except Exception as error:
        of_a_file = (
            not isinstance(error, OSError)
            or error.filename is not None
            or stores.scheme_of(str(place))
        )
        if (
            isinstance(error, RunError | BrokenPipeError)
            or not of_a_file
            or not (why := stores.failure(error))
        ):
            raise
        raise CheckpointError(f"{place} cannot be read ({why})") from None


class DamageError(CheckpointError):
    """A step whose arrays turned out to be damaged when they were read. what: the damage, in words,
    without the step."""

    def __init__(self, folder: str | os.PathLike, what: str):
        super().__init__(f"{folder}: {what}")
        self.what = what


@dataclasses.dataclass(frozen=True)
class Meta:
    """The JSON object that a run stores beside its state, with these keys.

    config:    the run's entire config, by group and setting
    version:   VERSION of the code that wrote it
    step:      the number of steps done
    position:  the number of the next batch; more than `step` if batches were passed over
    wall_s:    seconds that the run had taken until then
    checksum:  the corpus's (data/preparing/prepare.py), or a digest of several ones'
    checksums: those of a mixture's corpora, by the names of their sources
    tokenizer: the tokenizer's description (Tokenizer.describe)
    memory:    the losses and rollbacks that the run remembers (training/recovery.py)
    """

    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: int = VERSION
    step: int = 0
    position: int = 0
    wall_s: float = 0.0
    checksum: str = ""
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    tokenizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Meta":
        """The meta that a JSON object holds. Keys that are missing or have another type get their
        default."""
        types: dict[str, Any] = {
            **dict.fromkeys(("config", "checksums", "tokenizer", "memory"), dict),
            **dict.fromkeys(("version", "step", "position"), int),
            "checksum": str,
            "wall_s": (int, float),
        }
        return cls(
            **{name: values[name] for name, t in types.items() if isinstance(values.get(name), t)}
        )

    def stored_config(self) -> StoredConfig:
        """The config; a setting that it lacks has its default. Raises ConfigError for
        what is no config."""
        return from_dict(self.config).to_store()


@dataclasses.dataclass(frozen=True)
class UnrecognizedEntry:
    """An entry among the checkpoints that is no complete step.

    why: the reason, as a text
    step: the number in its name; None for another name
    holds_data: something could be lost with it
    """

    name: str
    why: str
    step: int | None = None
    holds_data: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclasses.dataclass(frozen=True)
class StepChoice:
    """The newest complete step with its meta, or None and an empty meta; the steps that are
    complete as far as their metas show, ascending; and all unrecognized entries."""

    step: int | None = None
    meta: Meta = Meta()
    steps: tuple[int, ...] = ()
    unrecognized: tuple[UnrecognizedEntry, ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.unrecognized))


ArrayShapes = Mapping[str, tuple[int, ...]]  # array → shape
NONE: Mapping[int, str] = {}
# (meta, shapes of the arrays) of a step → a text with its fault; "" if it has none
StepCheck = Callable[[Meta, ArrayShapes], str]


def nothing_wrong(meta: Meta, shapes: ArrayShapes) -> str:
    """The StepCheck that accepts every step."""
    return ""


def what_is_wrong(step: str | os.PathLike, meta: Meta, wrong: StepCheck = nothing_wrong) -> str:
    """A text with the first fault of a step's folder that has this meta; "" if it is complete. The
    numbers of its arrays are not read."""
    folder = epath.Path(step)
    # From cheap to dear: the manifest; sizes and checksums of files; the database's tree; the bytes
    # between pieces, which only the tree tells; the caller's check of the arrays.
    try:
        files = manifest.read(folder)
        if damage := next(manifest.damages(folder, files), ""):
            return damage
        database = manifest.read_database(folder / manifest.STATE)
        between_pieces = next(manifest.damages_between_pieces(folder, files, database), "")
        return between_pieces or wrong(meta, database.shapes)
    except manifest.ManifestError as error:
        return str(error)
    except manifest.DatabaseError as error:
        return f"its state {error}"


def fault(folder: epath.Path) -> str:
    """A text with the first fault of a step's folder; "" if it is complete. The numbers of its
    arrays are not read."""
    meta = look_at(folder)
    return meta.why if isinstance(meta, UnrecognizedEntry) else what_is_wrong(folder, meta)


def choose(
    directory: str | os.PathLike,
    needs: Mapping[str, type],
    wrong: StepCheck = nothing_wrong,
    damaged: Mapping[int, str] = NONE,
    before: int | None = None,
) -> StepChoice:
    """The newest complete step, and the other steps and entries of the directory.

    Args:
      directory: the folder of checkpoints; it need not exist.
      needs: the keys that a meta must have, as TO_TRAIN.
      wrong: a further check, for the newest step that is complete otherwise; if it fails, for the
        step before.
      damaged: step → its damage, for steps that are known to be damaged.
      before: only steps below this one are looked at; None: all.

    Raises:
      CheckpointError: the folder cannot be read.
    """
    folder = epath.Path(directory)
    # Metas of all steps are read, which are small. Files are compared with their manifest from the
    # newest step on, until one is complete: for all steps that could take minutes.
    metas, unrecognized = _look(folder, needs)
    metas = {step: meta for step, meta in metas.items() if before is None or step < before}
    newest = None
    for step in sorted(metas, reverse=True):
        why = damaged.get(step) or what_is_wrong(folder / str(step), metas[step], wrong)
        if not why:
            newest = step
            break
        unrecognized.append(UnrecognizedEntry(str(step), why, step, holds_data=True))
        del metas[step]
    unrecognized.sort(key=lambda e: (math.inf if e.step is None else e.step, e.name))
    meta = Meta() if newest is None else metas[newest]
    return StepChoice(newest, meta, tuple(sorted(metas)), tuple(unrecognized))


def unrecognized(directory: epath.Path) -> list[UnrecognizedEntry]:
    """The entries of a folder of checkpoints without a state or a meta that could be a step's."""
    return _look(directory, {})[1]


def read_meta(directory: str | os.PathLike, step: int) -> dict:
    """The JSON object that was saved with a step. Raises CheckpointError if it is missing."""
    meta = _meta(epath.Path(directory) / str(step))
    if isinstance(meta, str):
        raise CheckpointError(f"{directory} has no checkpoint of step {step}: {meta}")
    return meta


def checkpoints_of(place: str | os.PathLike) -> epath.Path:
    """The folder of checkpoints of a run, by the run's folder or by itself; it need not exist."""
    folder = stores.folder(place)
    if stores.scheme_of(folder):
        return folder
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = folder / CONFIG_FILE
        if config.is_file() and (
            directory := read_json(config, folder=folder)["checkpoint"]["directory"]
        ):
            return stores.folder(directory)
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def step_numbers(directory: str | os.PathLike) -> list[int]:
    """The steps that have a folder in a directory, complete or not, ascending; [] if there is no
    such directory. Saves that did not end are left out."""
    folder = epath.Path(directory)
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if STEP_NAME.fullmatch(path.name) and not is_unfinished(path)
    )


def is_unfinished(path: epath.Path) -> bool:
    """True for an entry among the checkpoints that is a save which did not end: by its name, or, in
    an object store, where a save has its step's name from the beginning, for lack of a manifest."""
    return ORBAX_UNFINISHED in path.name or (
        bool(stores.scheme_of(path))
        and STEP_NAME.fullmatch(path.name) is not None
        and not (path / manifest.FILE).exists()
    )


def _look(
    folder: epath.Path, needs: Mapping[str, type]
) -> tuple[dict[int, Meta], list[UnrecognizedEntry]]:
    """The metas of the steps that have state and meta, by step; and the unrecognized entries."""
    metas: dict[int, Meta] = {}
    unrecognized: list[UnrecognizedEntry] = []
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error.strerror}): put a readable folder there or use "
            "another --workdir"
        ) from None
    # Files of systems and tools, the losses, remains of saves, and steps that were set aside are
    # known; of all else the user is told, for it may be a step under another name.
    for name in names:
        if name.startswith(".") or name == LOSSES or ORBAX_UNFINISHED in name or BROKEN in name:
            continue
        if not STEP_NAME.fullmatch(name):
            unrecognized.append(UnrecognizedEntry(name, "no step's name"))
        elif not is_unfinished(folder / name):
            meta = look_at(folder / name, needs)
            if isinstance(meta, UnrecognizedEntry):
                unrecognized.append(meta)
            else:
                metas[int(name)] = meta
    return metas, unrecognized


def look_at(folder: epath.Path, needs: Mapping[str, type] = TO_TRAIN) -> Meta | UnrecognizedEntry:
    """The meta of a step's folder, or the reason that it is none; a folder that is named like a
    step has that step's. Its files are not compared with its manifest: `what_is_wrong` does that.

    needs: as in `choose`.
    """
    step = int(folder.name) if STEP_NAME.fullmatch(folder.name) else None

    def entry(why: str, holds_data: bool = True) -> UnrecognizedEntry:
        return UnrecognizedEntry(folder.name, why, step, holds_data)

    try:
        if not folder.exists():
            return entry("a link to nothing", False)
        if not folder.is_dir():
            return entry("a file", False)
        if next(iter(folder.iterdir()), None) is None:
            return entry("an empty folder", False)
        if not (folder / manifest.STATE).is_dir():
            return entry("it has no state")
    except OSError as error:
        return entry(f"it cannot be read: {error.strerror}")
    meta = _meta(folder)
    if isinstance(meta, str):
        return entry(meta)
    why = _lacks(meta, step, needs)
    return entry(why) if why else Meta.from_json(meta)


def _meta(folder: epath.Path) -> dict | str:
    """The meta of a step's folder, or its fault in words."""
    try:
        meta = parse_json(stores.read_within(folder, f"{manifest.META}/metadata"))
    except (FileNotFoundError, NotADirectoryError):
        return "it has no meta"
    except OSError as error:
        return f"its meta cannot be read: {error.strerror}"
    except ValueError:
        return "its meta is no JSON"
    return meta if isinstance(meta, dict) else "its meta is no JSON object"


def _lacks(meta: dict, step: int | None, needs: Mapping[str, type]) -> str:
    """The first key of `needs` that a meta lacks or has wrong, in words; "" if none."""
    for key, kind in needs.items():
        if key not in meta:
            return f"its meta has no {key!r}"
        if type(meta[key]) is not kind:
            return f"its meta's {key!r} is not {_TYPES[kind]}"
    # A step that was copied to another number would take the place of a good one.
    if step is not None and meta.get("step", step) != step:
        return f"its meta is of step {meta['step']}"
    if "config" in needs:
        for group in ("model", "data"):
            if not meta["config"].get(group):
                return f"its meta's config has no {group!r}"
        try:
            from_dict(meta["config"])
        except ConfigError as error:
            return f"in its meta's config {error.field}={error.value!r:.40} {error.rule}"
    return ""
