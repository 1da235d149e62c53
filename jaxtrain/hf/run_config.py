"""The config of a run that starts from a published model. No jax.

    a setting of the model      config.json's; where flags or the recipe say something else, it is
                                refused by name
    data.tokenizer              the folder's tokenizer.json, or none (for token files) in a folder
                                without one, unless flags or the recipe name one
    data.sequence_length        at most what a learned position table has, unless they name one
    all others                  those of flags and recipe

A recipe says what differs from the defaults of config/groups/; a default is nobody's choice.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config.flags import apply
from jaxtrain.config.rules.field_rules import field_violation
from jaxtrain.config.sources import holds_tokens
from jaxtrain.data.errors import StoreError
from jaxtrain.data.stores import hub
from jaxtrain.hf.families.family import Family, prediction_modules
from jaxtrain.hf.fields import Fields, HfError, read_json
from jaxtrain.hf.model_config import FREE, differing, read_model
from jaxtrain.hf.quantization import Quantization, read_quantization
from jaxtrain.hf.safetensors_folder import (
    INDEX,
    SINGLE,
    SafetensorsFolder,
    tensor_names,
    weight_files,
)
from jaxtrain.hf.source_files import (
    CONFIG,
    SLOW_TOKENIZERS,
    SMALL_FILES,
    TOKENIZER,
    small_files,
    tokenizer_of,
)
from jaxtrain.run.files import CONFIG_FILE

ADAPTER = "adapter_config.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The settings that a run takes from the model that it starts from.

    name: `train.init_from` of the run: the folder, or the repository at its commit
    folder: of the published model; place: the file that has the settings
    tokenizer: a path or a repository, "" if there is none; notes: lines for people
    """

    name: str
    folder: pathlib.Path
    place: pathlib.Path
    model: cfg.ModelConfig
    tokenizer: str
    notes: tuple[str, ...]

    def notes_for(self, model: cfg.ModelConfig, data: cfg.DataConfig) -> tuple[str, ...]:
        """The notes for a run of this model, which may leave out prediction modules."""
        notes = self.notes
        if self.model.mtp_depth and not model.mtp_depth:
            notes += (
                f"model.mtp_depth=0 leaves out prediction modules: {self.place} says "
                f"{self.model.mtp_depth}",
            )
        return notes + notes_of_length(data, self.place)


@dataclasses.dataclass(frozen=True, eq=False)
class Published(Origin):
    """A published model by its config.json.

    files: name → content of its small files
    values: of config.json
    quantization: of its weights; None if they are not quantised
    """

    files: Mapping[str, bytes]
    values: Mapping[str, Any]
    family: Family
    quantization: Quantization | None

    def tensors(self) -> SafetensorsFolder:
        """The tensors; a repository's are downloaded. Raises HfError as SafetensorsFolder, and
        StoreError."""
        if named := hub.repository("train.init_from", self.name):
            hub.folder(named, (SINGLE,))
            hub.folder(named, tuple(weight_files(self.folder)))
        return SafetensorsFolder(self.folder)

    @property
    def prediction_fields(self) -> list[str]:
        """The fields of config.json that say how many prediction modules there are."""
        field, aliases = self.family.source("mtp_depth"), self.family.aliases
        return [name for name in self.values if aliases.get(name, name) == field]

    def without_predictions(self) -> "Published":
        """Returns the model without modules of multi-token prediction."""
        if not self.model.mtp_depth:
            return self
        names = self.prediction_fields or [self.family.source("mtp_depth")]
        values = {**self.values, **dict.fromkeys(names, 0)}
        return dataclasses.replace(
            self, values=values, model=dataclasses.replace(self.model, mtp_depth=0)
        )


def open_published(name: str, workdir: str = "", setting: str = "train.init_from") -> Published:
    """The published model of a folder, or of a repository of the hub, of which all but the weights
    is downloaded. Raises HfError for what cannot be honoured, StoreError for what cannot be read.

    workdir: of a run whose config.json may have the repository's commit; setting: what names it
    """
    named = hub.repository(setting, name)
    if named is None:
        return read_published(pathlib.Path(os.path.expanduser(name)))
    named = hub.pinned(named, workdir)
    return read_published(hub.folder(named, (*SMALL_FILES, INDEX, ADAPTER)), named)


def read_published(folder: pathlib.Path, repository: hub.Repository | None = None) -> Published:
    """The published model of a folder, which is the repository's in the hub's cache if there is
    one. Raises HfError for what cannot be honoured."""
    folder = folder.absolute()
    place = folder / CONFIG
    values, files = read_json(place), small_files(folder)
    family, model, notes = read_model(values, str(place))
    if repository and repository.note:
        notes.append(repository.note)
    if os.path.lexists(folder / SINGLE) and (folder / INDEX).exists():
        notes.append(f"{INDEX} is left out: {SINGLE} beside it is read, as in transformers")
    if (folder / ADAPTER).exists():
        notes.append(f"{ADAPTER} is left out: the model beside it is read without its adapter")
    with contextlib.suppress(HfError):  # without tensors, which a plan does not need
        notes += [
            f"{beginning}* is left out: the model has no part for these tensors"
            for beginning in family.unread
            if any(name.startswith(beginning) for name in tensor_names(folder))
        ]
    tokenizer = repository.text if repository else str(folder.resolve() / TOKENIZER)
    published = Published(
        repository.text if repository else str(folder),
        folder,
        place,
        model,
        tokenizer if TOKENIZER in files else "",
        tuple(notes),
        files,
        values,
        family,
        read_quantization(Fields(values, str(place))),
    )
    # how the names of the prediction modules' tensors begin
    beginnings = [f"{module}." for module in prediction_modules(model)]
    beginnings += [beginning.removeprefix(family.prefix) for beginning in beginnings]
    if not beginnings:
        return published
    # an index has the names, so that a plan needs no weights
    names = tensor_names(folder) if (folder / INDEX).exists() else published.tensors()
    if any(name.startswith(tuple(beginnings)) for name in names):
        return published
    for field in published.prediction_fields:  # transformers saves no modules
        notes.append(f"{field}={model.mtp_depth} is read as 0: the files have none of its tensors")
    return dataclasses.replace(published.without_predictions(), notes=tuple(notes))


def read_origin(name: str, workdir: str) -> Origin:
    """The settings of `train.init_from`. Those of the run in `workdir` count if it began with this
    folder or repository, which is gone or out of reach. Raises HfError for what cannot be honoured,
    StoreError as `open_published`, ConfigError for a folder without config.json."""
    stored, named = pathlib.Path(workdir) / CONFIG_FILE, hub.repository("train.init_from", name)
    path = pathlib.Path(name if named else os.path.expanduser(name)).absolute()
    try:
        # unlike Path.exists, also for a name that is too long
        if not named and not os.path.exists(path / CONFIG):
            rule = f"is no folder with a {CONFIG} of a published model"
            raise cfg.ConfigError("train.init_from", name, rule)
        return open_published(name, workdir)
    except (cfg.ConfigError, StoreError) as error:
        with contextlib.suppress(HfError, ValueError, AttributeError, TypeError):
            run, name = cfg.from_dict(read_json(stored)), str(path)
            if named:
                name = hub.pinned(named, workdir).text
            if run.train.init_from == name:
                tokenizer = tokenizer_of(run.data.tokenizer, stored.parent)
                return Origin(name, path, stored, run.model, tokenizer, ())
        raise error


def notes_of_length(data: cfg.DataConfig, place: pathlib.Path) -> tuple[str, ...]:
    """A note if a run's sequences are longer than those of its published model, whose config.json
    is at `place`."""
    length, longest = data.sequence_length, read_json(place).get("max_position_embeddings")
    # flags may have no number
    if not (isinstance(length, int) and isinstance(longest, int) and 0 < longest < length):
        return ()
    return (
        f"data.sequence_length={length} is beyond max_position_embeddings={longest} of {place}",
    )


def started_from(
    origin: Origin, recipe: cfg.Config, overrides: Sequence[tuple[str, str]]
) -> tuple[cfg.Config, cfg.Config]:
    """(the config of a run that starts from a published model, the same before its flags).

    overrides: (setting, text) of flags

    Raises ConfigError, which names the setting, if recipe or flags contradict the model's; HfError
    for a tokenizer that is not read.
    """
    model = origin.model
    unsaid = {path for path in cfg.fields() if cfg.get(recipe, path) == cfg.get(cfg.Config(), path)}
    taken = {f"model.{name}": value for name, value in vars(model).items()}
    said = "data.tokenizer" not in unsaid or any(path == "data.tokenizer" for path, _ in overrides)
    lacks_tokenizer = not origin.tokenizer and not said
    slow = [
        name for name in SLOW_TOKENIZERS if lacks_tokenizer and (origin.folder / name).is_file()
    ]
    if slow:  # only transformers reads it
        raise HfError(
            f"{origin.folder / slow[0]} is not read without a {TOKENIZER}, which transformers "
            "writes (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)): or use "
            "--config.data.tokenizer=FILE"
        )
    taken["data.tokenizer"] = origin.tokenizer or "none"
    longest = model.max_positions if model.positions == "learned" else 0
    if 0 < longest < recipe.data.sequence_length:
        taken["data.sequence_length"] = longest
    before = cfg.replace(recipe, {path: taken[path] for path in taken if path in unsaid})
    config = apply(before, overrides)
    if lacks_tokenizer and config.train.init_from and not holds_tokens(config.data.source):
        raise HfError(
            f"{origin.folder} has no {TOKENIZER}, and data.source={config.data.source} is text: "
            "name the model's tokenizer with --config.data.tokenizer (bytes trains it on bytes)"
        )
    if config.model.mtp_depth == 0:  # the modules may be left out
        model = dataclasses.replace(model, mtp_depth=0)
    if setting := _contradiction(config.model, model):
        name, value = f"model.{setting}", getattr(cfg.Config(model=model).fill().model, setting)
        raise cfg.ConfigError(
            name,
            getattr(config.model, setting),
            f"contradicts {origin.place}, which says {value}",
            fixes=[{name: value}],
        )
    if config.train.init_from:
        config = cfg.replace(config, {"train.init_from": origin.name})
    return config, before


def _contradiction(model: cfg.ModelConfig, published: cfg.ModelConfig) -> str:
    """The first setting in which a model is another one than the published one; "" if none is. A
    value that no model can have is another one."""
    for name, value in vars(published).items():
        path, other = f"model.{name}", getattr(model, name)
        if name not in FREE and other != value and field_violation(path, other, value):
            return name
    return next(differing(model, published), "")
