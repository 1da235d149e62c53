"""Which steps in a folder of checkpoints are whole, and what else lies there. Nothing is written
here, and no array is read.

    checkpoints/
      200/                      a step, if state/, meta/ and manifest.json in it are whole
      300.orbax-checkpoint-tmp  a save that did not end: of no interest, the next save removes it
      100.broken-1              what was set aside
      anything else             a stranger

A step is whole if all files are there with the sizes and checksums of its manifest (manifest.py),
and its state is a database that is whole (database.py). Damage inside of an array's numbers is not
known from these: whoever reads an array finds it (storage.py).

No jax: commands find out what is wrong before they start it.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from jaxtrain.checkpoint import database, manifest, stores
from jaxtrain.checkpoint.database import STATE, DatabaseError
from jaxtrain.checkpoint.manifest import ManifestError
from jaxtrain.checkpoint.stores import scheme_of
from jaxtrain.config import Config, ConfigError, from_dict
from jaxtrain.run.exit_status import ExitStatus, RunError

META = "meta"
CONFIG = "config.json"  # in a run's folder
LOSSES = "validation_losses.json"  # beside the steps
ORBAX_UNFINISHED, BROKEN = ".orbax-checkpoint-tmp", ".broken-"
_STEP = re.compile("0|[1-9][0-9]{0,9}")

VERSION = 3  # of the metas that this code writes
MANIFEST_SINCE = 3  # the version of a meta since which a step has a manifest

# What a run stores beside its state, and what of it is needed to train, and to generate.
TO_TRAIN: Mapping[str, type] = {"config": dict, "step": int, "checksum": str, "tokenizer": dict}
TO_GENERATE: Mapping[str, type] = {"config": dict, "tokenizer": dict}
_TYPES = {dict: "an object", int: "an integer", str: "a string"}


class CheckpointError(RunError):
    """A checkpoint that cannot be read or written as asked; the message is one line."""

    status = ExitStatus.STORAGE


@contextlib.contextmanager
def read_errors(place: object) -> Iterator[None]:
    """A context in which what a file system or a store does not give becomes a CheckpointError that
    names the place."""
    try:
        yield
    except Exception as error:
        of_a_file = (
            not isinstance(error, OSError) or error.filename is not None or scheme_of(str(place))
        )
        if (
            isinstance(error, RunError | BrokenPipeError)
            or not of_a_file
            or not (why := stores.failure(error))
        ):
            raise
        raise CheckpointError(f"{place} cannot be read ({why})") from None


class DamageError(CheckpointError):
    """A step that turned out to be damaged when its arrays were read. what: the damage, in words,
    without the step."""

    def __init__(self, folder: str | os.PathLike, what: str):
        super().__init__(f"{folder}: {what}")
        self.what = what


@dataclasses.dataclass(frozen=True)
class Meta:
    """What a run stores beside its state, as a JSON object with these keys.

    config:    the run's whole config, by group and setting
    version:   VERSION of the code that wrote it; version 1 did not write it
    step:      the number of steps done
    position:  the number of the next batch; more than `step` where batches were passed over. Older
               checkpoints have none: it was the step
    wall_s:    seconds that the run had run
    checksum:  of the corpus
    tokenizer: what Tokenizer.describe gives
    memory:    what the run remembers of its losses and rollbacks (training/recovery.py: Memory);
               older checkpoints have none
    """

    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: int = 1
    step: int = 0
    position: int = 0
    wall_s: float = 0.0
    checksum: str = ""
    tokenizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Meta":
        """The meta that a JSON object holds; what it lacks, or has of another type, is as by
        default."""
        kinds: dict[str, Any] = {
            "config": dict,
            "checksum": str,
            "tokenizer": dict,
            "memory": dict,
            "wall_s": (int, float),
        }
        kinds |= dict.fromkeys(("version", "step", "position"), int)
        found = {
            name: values[name] for name, kind in kinds.items() if isinstance(values.get(name), kind)
        }
        return cls(**{"position": found.get("step", 0)} | found)

    def stored_config(self) -> Config:
        """The config, not resolved; a setting that it lacks has its default. ConfigError for what
        is no config."""
        return from_dict(self.config)


@dataclasses.dataclass(frozen=True)
class Stranger:
    """What lies among the checkpoints and is no whole one.

    why: in words; step: which one it should be by its name, None for another name; holds: whether
    something could be lost with it.
    """

    name: str
    why: str
    step: int | None = None
    holds: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The newest whole step with its meta, or None and None; the steps that are whole by their
    meta, in order; and all strangers."""

    step: int | None
    meta: Meta | None
    steps: tuple[int, ...]
    strangers: tuple[Stranger, ...]

    @property
    def position(self) -> int:
        """The number of the batch that comes next; 0 where there is no step."""
        return self.meta.position if self.meta else 0

    @property
    def memory(self) -> Mapping[str, Any]:
        """The meta's `memory`; empty where there is no step."""
        return self.meta.memory if self.meta else {}

    def __str__(self) -> str:
        return ", ".join(map(str, self.strangers))


Shapes = Mapping[str, tuple[int, ...]]  # array → shape
NONE: Mapping[int, str] = {}
# of a step with this meta and these arrays, what is wrong with it, in words; "" if nothing is
Judge = Callable[[Meta, Shapes], str]


def nothing_wrong(meta: Meta, shapes: Shapes) -> str:
    """The `wrong` of `choose` that finds nothing."""
    return ""


def what_is_wrong(step: str | os.PathLike, meta: Meta, wrong: Judge = nothing_wrong) -> str:
    """What is wrong with a step's folder that has this meta, in words; "" if it is whole. The
    numbers of its arrays are not read."""
    folder = epath.Path(step)
    try:
        listed = manifest.read(folder)
        if listed is None and meta.version >= MANIFEST_SINCE:
            return f"it has no {manifest.FILE}"
        if listed and (damage := listed.damage(folder)):
            return damage
        values = database.read(folder / STATE)
        return (listed.damage_beside(folder, values) if listed else "") or wrong(
            meta, database.shapes(values)
        )
    except ManifestError as error:
        return str(error)
    except DatabaseError as error:
        return f"its state {error}"


def choose(
    directory: str | os.PathLike,
    needs: Mapping[str, type],
    wrong: Judge = nothing_wrong,
    damaged: Mapping[int, str] = NONE,
    before: int | None = None,
) -> Choice:
    """The newest whole step, and what else is there.

    Args:
      directory: the folder of checkpoints; it need not exist.
      needs: what a meta must have, as TO_TRAIN.
      wrong: asked of the newest step that is whole otherwise, then of the one before.
      damaged: step → what is wrong with it, for steps of which that is known.
      before: this step and later ones are not looked at; None: all are.

    Raises:
      CheckpointError: the folder cannot be read.
    """
    folder = epath.Path(directory)
    metas, strangers = _look(folder, needs)
    metas = {step: meta for step, meta in metas.items() if before is None or step < before}
    for step in sorted(metas, reverse=True):
        why = damaged.get(step) or what_is_wrong(folder / str(step), metas[step], wrong)
        if not why:
            return Choice(step, metas[step], tuple(sorted(metas)), _sorted(strangers))
        strangers.append(Stranger(str(step), why, step, holds=True))
        del metas[step]
    return Choice(None, None, (), _sorted(strangers))


def strangers(directory: str | os.PathLike) -> tuple[Stranger, ...]:
    """What lies among the checkpoints and has no state or no meta that could be one's."""
    return _sorted(_look(epath.Path(directory), {})[1])


def look_at(step: epath.Path) -> Meta | Stranger:
    """The meta of a step's folder, or what the folder is instead. The step's files are not compared
    with its manifest: `what_is_wrong`."""
    return _look_at_step(step, None, {})


def read_meta(directory: str | os.PathLike, step: int) -> dict:
    """The JSON object that was saved with a step. Raises CheckpointError if there is none."""
    meta = _meta(epath.Path(directory) / str(step))
    if isinstance(meta, str):
        raise CheckpointError(f"{directory} has no checkpoint of step {step}: {meta}")
    return meta


def checkpoints_of(place: str | os.PathLike) -> epath.Path:
    """The folder of checkpoints of a run, by the run's folder or by itself; it need not exist."""
    folder = stores.folder(place)
    if scheme_of(folder):
        return folder
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = folder / CONFIG
        if config.is_file() and (
            directory := json.loads(config.read_bytes())["checkpoint"]["directory"]
        ):
            return stores.folder(directory)
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def names(directory: str | os.PathLike) -> list[int]:
    """The steps that have a folder there, whole or not, in order; none if there is no such
    directory."""
    folder = epath.Path(directory)
    found = (
        [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []
    )
    return sorted(int(path.name) for path in found if not is_unfinished(path))


def is_unfinished(path: epath.Path) -> bool:
    """Whether something among the checkpoints is a save that did not end: by its name, or, in an
    object store, where nothing is renamed and a save has its step's name from the beginning,
    because it has no manifest yet."""
    if ORBAX_UNFINISHED in path.name:
        return True
    return (
        bool(scheme_of(path))
        and _STEP.fullmatch(path.name) is not None
        and not (path / manifest.FILE).exists()
    )


def _sorted(strangers: list[Stranger]) -> tuple[Stranger, ...]:
    return tuple(sorted(strangers, key=lambda s: (math.inf if s.step is None else s.step, s.name)))


def _look(folder: epath.Path, needs: Mapping[str, type]) -> tuple[dict[int, Meta], list[Stranger]]:
    """The metas of the steps that have both parts, by step; and the strangers."""
    metas: dict[int, Meta] = {}
    strangers: list[Stranger] = []
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error.strerror}): put a readable folder there or use "
            "another --workdir"
        ) from None
    for name in names:
        if name.startswith(".") or name == LOSSES or ORBAX_UNFINISHED in name or BROKEN in name:
            continue
        if not _STEP.fullmatch(name):
            strangers.append(Stranger(name, "no step's name"))
            continue
        if is_unfinished(folder / name):
            continue
        meta = _look_at_step(folder / name, int(name), needs)
        if isinstance(meta, Stranger):
            strangers.append(meta)
        else:
            metas[int(name)] = meta
    return metas, strangers


def _look_at_step(
    folder: epath.Path, step: int | None, needs: Mapping[str, type]
) -> Meta | Stranger:
    """The meta of a step's folder, or what the folder is instead."""

    def stranger(why: str, holds: bool = True) -> Stranger:
        return Stranger(folder.name, why, step, holds)

    try:
        if not folder.exists():
            return stranger("a link to nothing", False)
        if not folder.is_dir():
            return stranger("a file", False)
        if next(iter(folder.iterdir()), None) is None:
            return stranger("an empty folder", False)
        if not (folder / STATE).is_dir():
            return stranger("it has no state")
    except OSError as error:
        return stranger(f"it cannot be read: {error.strerror}")
    meta = _meta(folder)
    if isinstance(meta, str):
        return stranger(meta)
    why = _lacks(meta, step, needs) or _orbax_stumbles(folder / "_CHECKPOINT_METADATA")
    return stranger(why) if why else Meta.from_json(meta)


def _meta(folder: epath.Path) -> dict | str:
    """The meta of a step's folder; what is wrong with it, in words, where it is none."""
    path = folder / META / "metadata"
    try:
        meta = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return "it has no meta"
    except OSError as error:
        return f"its meta cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return "its meta is no JSON"
    return meta if isinstance(meta, dict) else "its meta is no JSON object"


def _orbax_stumbles(path: epath.Path) -> str:
    """What is wrong with Orbax's own file of a step, which it reads of all steps before it saves;
    "" also where there is none."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, RecursionError):
        return f"its {path.name} is no JSON"
    fits = isinstance(values, dict) and isinstance(values.get("item_handlers", {}), dict | str)
    return "" if fits else f"its {path.name} is not Orbax's"


def _lacks(meta: dict, step: int | None, needs: Mapping[str, type]) -> str:
    """What a meta lacks of `needs`, in words; "" if nothing."""
    for key, kind in needs.items():
        if key not in meta:
            return f"its meta has no {key!r}"
        if type(meta[key]) is not kind:
            return f"its meta's {key!r} is not {_TYPES[kind]}"
    if "step" in needs and meta["step"] != step:
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
