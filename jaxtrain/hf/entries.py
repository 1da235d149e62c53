"""The entries of a family's table: what a field of config.json is in the model, both ways.

    Integer, Float, Switch, Biases    a field is a setting
    Fixed                             settings that all models of the family have
    Only, Same                        a field that jaxtrain can have with some values alone
    PassedOver, Training              fields without effect on what the model computes
    RotaryPositions, …                several fields that belong together

An entry reads what it knows and writes what it reads, so that a table is the family's only
description; docs/models.md is made of it.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config.groups.layer_kinds import models_of_kinds
from jaxtrain.config.groups.model_settings import BIASED
from jaxtrain.hf.fields import MISSING, Fields
from jaxtrain.hf.rope_parameters import SCALINGS, Settings, read_rope, write_rope
from jaxtrain.hf.source_files import REMOTE_CODE


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """Fields of config.json and settings of the model that belong together."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        """The settings that the fields give. settings: those of the entries before

        Raises HfError for a value that the model cannot have.
        """
        raise NotImplementedError

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        """The fields of a model, whose longest sequence has `length` tokens."""
        return {}

    @property
    def sources(self) -> Mapping[str, str]:
        """Setting → the field that gives it."""
        return {}

    @property
    def limits(self) -> Mapping[str, str]:
        """Field → the values that it may have, in words."""
        return {}


@dataclasses.dataclass(frozen=True)
class SettingField(TableEntry):
    """A field that gives one setting."""

    field: str
    setting: str

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        return {self.field: getattr(model, self.setting)}

    @property
    def sources(self) -> Mapping[str, str]:
        return {self.setting: self.field}


@dataclasses.dataclass(frozen=True)
class Integer(SettingField):
    """An integer.

    default: where the field is missing; null: what null stands for, None if it is refused
    least:   the smallest that is read; it is written, too, for a setting that counts nothing, such
             as experts that a model lacks
    """

    default: Any = MISSING
    null: int | None = None
    least: int = 1

    def read(self, fields: Fields, settings: Settings) -> Settings:
        value = fields.integer(self.field, self.default, self.null, self.least)
        most = cfg.setting_of(cfg.fields()[f"model.{self.setting}"]).bounds.at_most
        if most is not None and value > most:
            raise fields.refuse(self.field, f"is above {most}")
        return {self.setting: value}

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        value = getattr(model, self.setting)
        return {self.field: None if value == self.null else max(value, self.least)}


@dataclasses.dataclass(frozen=True)
class Float(SettingField):
    """A float above 0. null: what null stands for, None if it is refused"""

    default: float | None
    null: float | None = None

    def read(self, fields: Fields, settings: Settings) -> Settings:
        if self.null is not None and fields.value(self.field, self.default) is None:
            return {self.setting: self.null}
        return {self.setting: fields.number(self.field, self.default)}

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        value = getattr(model, self.setting)
        return {self.field: None if value == self.null else value}


@dataclasses.dataclass(frozen=True)
class Switch(SettingField):
    """A bool. values: the setting where it is false, and where it is true"""

    default: bool
    values: tuple[Any, Any] = (False, True)

    def read(self, fields: Fields, settings: Settings) -> Settings:
        return {self.setting: self.values[fields.require(self.field, [False, True], self.default)]}

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        return {self.field: getattr(model, self.setting) == self.values[True]}


@dataclasses.dataclass(frozen=True)
class Biases(TableEntry):
    """A bool, and the parts of the model that have biases where it is true."""

    field: str
    parts: tuple[str, ...]
    default: bool

    def read(self, fields: Fields, settings: Settings) -> Settings:
        present = fields.require(self.field, [False, True], self.default)
        biased = {*settings.get("biases", ()), *(self.parts if present else ())}
        return {"biases": tuple(part for part in BIASED if part in biased)}

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        return {self.field: set(self.parts) <= set(model.biases)}

    @property
    def sources(self) -> Mapping[str, str]:
        return {"biases": self.field}


@dataclasses.dataclass(frozen=True)
class Fixed(TableEntry):
    """Settings that no field changes."""

    settings: Mapping[str, Any]

    def read(self, fields: Fields, settings: Settings) -> Settings:
        return dict(self.settings)


@dataclasses.dataclass(frozen=True)
class Only(TableEntry):
    """A field that jaxtrain can have with some values alone.

    allowed: these, the first of which is written
    default: transformers', if it is none of them
    written: whether the family has the field; others ask for what it lacks
    """

    field: str
    allowed: Sequence[Any]
    default: Any = MISSING
    written: bool = True

    def read(self, fields: Fields, settings: Settings) -> Settings:
        fields.require(self.field, self.allowed, self.default)
        return {}

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        return {self.field: self.allowed[0]} if self.written else {}

    @property
    def limits(self) -> Mapping[str, str]:
        return {self.field: " or ".join(map(json.dumps, self.allowed))}


@dataclasses.dataclass(frozen=True)
class Same(TableEntry):
    """A field that has to be the sum of settings, or null.

    others: further values without effect, such as a default that transformers writes
    """

    field: str
    settings: tuple[str, ...]
    written: bool = True
    others: tuple[int, ...] = ()

    def read(self, fields: Fields, settings: Settings) -> Settings:
        total = sum(settings[setting] for setting in self.settings)
        fields.require(self.field, [total, None, *self.others])
        return {}

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        total = sum(getattr(model, setting) for setting in self.settings)
        return {self.field: total} if self.written else {}

    @property
    def limits(self) -> Mapping[str, str]:
        return {self.field: " + ".join(f"model.{setting}" for setting in self.settings)}


@dataclasses.dataclass(frozen=True)
class WholeHeads(TableEntry):
    """Heads that divide the width: transformers asks for it whatever head_dim is."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        if settings["width"] % settings["heads"]:
            raise fields.refuse(
                "num_attention_heads",
                f"does not divide hidden_size={settings['width']}, as transformers asks for",
            )
        return {}

    limits = {"num_attention_heads": "a divisor of hidden_size"}


@dataclasses.dataclass(frozen=True)
class PassedOver(TableEntry):
    """Fields without effect on what the model computes."""

    fields: tuple[str, ...]

    def read(self, fields: Fields, settings: Settings) -> Settings:
        fields.pass_over(*self.fields)
        return {}


@dataclasses.dataclass(frozen=True)
class Training(TableEntry):
    """Fields that change how transformers trains, and nothing else: a note says so."""

    fields: tuple[str, ...]

    def read(self, fields: Fields, settings: Settings) -> Settings:
        fields.only_trains(*self.fields)
        return {}


@dataclasses.dataclass(frozen=True)
class Predictions(SettingField):
    """The number of modules of multi-token prediction. null is read as 0, which is written as 0."""

    default: int

    def read(self, fields: Fields, settings: Settings) -> Settings:
        return {self.setting: fields.integer(self.field, self.default, null=0, least=0)}


@dataclasses.dataclass(frozen=True)
class RotaryPositions(TableEntry):
    """Rotary positions in both forms (rope_parameters.py).

    longest, base: transformers' defaults of max_position_embeddings and rope_theta
    part:    its default of partial_rotary_factor; None: the family rotates all of a head
    scaled:  whether the family has scalings (transformers has longrope alone for Phi-3)
    """

    longest: int
    base: float = 10000.0
    part: float | None = None
    scaled: bool = True

    def read(self, fields: Fields, settings: Settings) -> Settings:
        head = None
        if self.part is not None:
            head = settings["head_dim"] or settings["width"] // settings["heads"]
        rope = read_rope(fields, self.base, self.longest, self.part or 1.0, head)
        if rope.scaling and not self.scaled:
            field = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
            raise fields.refuse(field, "is not supported: transformers has no such scaling here")
        rotated = {} if head is None else {"rotary_dim": int(head * rope.part)}
        return rope.settings | rotated

    def write(self, model: cfg.ResolvedModel, length: int) -> Settings:
        # kinds without rotary positions, or without attention, have no say
        models = models_of_kinds(model).values()
        rotary = (each for each in models if each.positions == "rotary" and not each.mixer)
        model = next(rotary, model)
        if self.part is None:
            return write_rope(model, length)
        part = model.rotary_dim / model.head_dim
        if int(part * model.head_dim) != model.rotary_dim:  # rounded down
            part = (model.rotary_dim + 0.5) / model.head_dim
        return write_rope(model, length, part)

    @property
    def sources(self) -> Mapping[str, str]:
        names = {
            parameter.setting: "rope_parameters"
            for scaling in SCALINGS.values()
            for parameter in scaling.values()
        }
        names |= {"rope_scaling": "rope_parameters", "rotary_base": "rope_theta"}
        return names if self.part is None else names | {"rotary_dim": "partial_rotary_factor"}

    @property
    def limits(self) -> Mapping[str, str]:
        parts = {} if self.part else {"partial_rotary_factor": "1"}
        scalings = SCALINGS if self.scaled else ["default"]
        return {"rope_type": " or ".join(map(json.dumps, scalings))} | parts


@dataclasses.dataclass(frozen=True)
class FullAttention(TableEntry):
    """A family without windows: a sliding window is refused where it is shorter than the longest
    sequence, and so is any other kind of attention. longest: see RotaryPositions"""

    longest: int

    def read(self, fields: Fields, settings: Settings) -> Settings:
        count = settings["layers"]
        if fields.value("layer_types", None) not in (None, ["full_attention"] * count):
            raise fields.refuse(
                "layer_types", f'is not supported: only {count} × "full_attention" is'
            )
        fields.require("use_sliding_window", [False])
        window = fields.integer("sliding_window", None, null=0)
        longest = fields.integer("max_position_embeddings", self.longest)
        if 0 < window < longest:
            raise fields.refuse(
                "sliding_window",
                "is not supported: attention is full (null, or at least "
                f"max_position_embeddings={longest})",
            )
        if window:
            fields.notes.append(
                f"sliding_window={window} is left out: no sequence of "
                f"max_position_embeddings={longest} tokens reaches its end"
            )
        return {}

    limits = {
        "sliding_window": "null or at least max_position_embeddings",
        "layer_types": '"full_attention" alone',
    }


@dataclasses.dataclass(frozen=True)
class RemoteCode(TableEntry):
    """Python files that a folder brings along. None is run: a family whose published folders have
    some is read with jaxtrain's own model, and only if the files' classes are the family's.

    stem: the beginning of their names, such as "DeepseekV3"; "": the family has none
    """

    stem: str = ""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        classes = fields.value(REMOTE_CODE, None)
        if classes is None:
            return {}
        names = [f"{self.stem}{end}" for end in ("Config", "Model", "ForCausalLM")]
        if (
            not self.stem
            or not isinstance(classes, dict)
            or not all(str(name).rpartition(".")[2] in names for name in classes.values())
        ):
            known = f": only {', '.join(names)} are known" if self.stem else ""
            raise fields.refuse(REMOTE_CODE, f"wants remote code, which is not run{known}")
        fields.notes.append(f"{REMOTE_CODE} is left out: jaxtrain's own {self.stem} is used")
        return {}

    @property
    def limits(self) -> Mapping[str, str]:
        return {REMOTE_CODE: f"classes of {self.stem}, which are not run"} if self.stem else {}
