"""What a config meets beside its own rules: devices, files, a checkpoint, and the rules about
these. No jax."""

import dataclasses
import difflib
import itertools
import os
import pathlib
from collections.abc import Iterator

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.rules import Broken, Rule, values_for
from jaxtrain.costs import hardware
from jaxtrain.costs.hardware import HardwareError
from jaxtrain.schedule.orders import CSV, SCHEDULES
from jaxtrain.schedule.search import Report, silent

# settings that are paths, and the word that they may be
FILES = (("data.source", "stdlib"), ("data.tokenizer", "bytes"))
FOLDERS = "data.source"  # the one that may be a folder


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a config is checked against beside its own rules; what is not known is not checked.

    devices:    their number; platform: theirs, as jax names it
    recipe:     the config before the command's flags, whose values are worth a try
    files:      whether files that it names must be there
    tables:     whether its tables are made; a suggestion's are wherever files are looked for, if
                they can fail
    checkpoint: the config of the checkpoint that is continued
    report:     is told how far the search for a table has come
    """

    devices: int | None = None
    platform: str = ""
    recipe: Config = dataclasses.field(default_factory=Config)
    files: bool = False
    tables: bool = False
    checkpoint: Config | None = None
    report: Report = silent


NOTHING = Surroundings()


def rules_of(around: Surroundings) -> Iterator[Rule]:
    if around.platform not in ("", "gpu"):
        yield lambda config: _kernel_is_there(config, around.platform)
    if around.files:
        yield from (
            lambda config, path=path, word=word: _file_is_there(config, path, word)
            for path, word in FILES
        )
        yield _schedule_is_there
        yield _hardware_is_known


def _kernel_is_there(config: Config, platform: str) -> Broken | None:
    path = "model.attention_kernel"
    if config.model.attention_kernel != "cudnn":
        return None
    return Broken(
        path,
        f"is for NVIDIA GPUs, and the devices here are of platform {platform!r}",
        values_for(path, ["auto"]),
    )


def _file_is_there(config: Config, path: str, word: str) -> Broken | None:
    value = cfg.get(config, path)
    file = pathlib.Path(value).expanduser()
    if value == word or (path, value) == ("data.tokenizer", "none"):
        return None
    if os.path.isfile(file) or (value and path == FOLDERS and os.path.isdir(file)):
        return None
    close = itertools.chain(_files_like(file), [word])
    if value and os.path.exists(file):
        return Broken(
            path,
            f"is not a regular file{' or a folder' * (path == FOLDERS)}",
            values_for(path, close),
        )
    return Broken(path, f"is neither {word!r} nor an existing path", values_for(path, close))


def _schedule_is_there(config: Config) -> Broken | None:
    schedule = config.pipeline.schedule
    path = pathlib.Path(schedule.removeprefix(CSV))
    if not schedule.startswith(CSV) or path.is_file():
        return None
    close = itertools.chain((CSV + name for name in _files_like(path)), SCHEDULES)
    rule = "names no file (python -m jaxtrain.schedule --csv=FILE writes one)"
    return Broken("pipeline.schedule", rule, values_for("pipeline.schedule", close))


def _hardware_is_known(config: Config) -> Broken | None:
    path, compute = "train.hardware", config.precision.compute
    if not config.train.hardware:
        return None
    try:
        kind = hardware.load(config.train.hardware)
    except HardwareError as error:
        return Broken(path, error.rule, values_for(path, (error.use, "")))
    if compute in kind.peak_tflops:
        return None
    rule = f"has no peak for precision.compute={compute!r}"
    return Broken(
        path,
        rule,
        itertools.chain(values_for("precision.compute", kind.peak_tflops), values_for(path, [""])),
    )


def _files_like(path: pathlib.Path) -> Iterator[str]:
    """The path of the file beside one that is not there whose name is most like its name, if one
    is."""
    names = (
        {other.name: str(other) for other in path.parent.iterdir()} if path.parent.is_dir() else {}
    )
    yield from (names[name] for name in difflib.get_close_matches(path.name, names, n=1))
