"""A setting: a field of a group, with its doc and the values that it may have. No jax."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from jaxtrain.config.errors import value_text

LARGEST_INT = 2**31 - 1  # steps and token counts live in int32 on the devices


@dataclasses.dataclass(frozen=True)
class Choices:
    """The names that a setting, or each item of a tuple, may have.

    names:    in the order of help; (): any
    prefix:   texts that begin with this are allowed besides them; "": none
    own_code: whether code of one's own is allowed besides them, FILE.py:NAME or MODULE:NAME
    counted:  the names that a colon and a whole number may follow, such as full:2
    refused:  further names that a user may know, each with the reason why it is no choice
    """

    names: tuple = ()
    prefix: str = ""
    own_code: bool = False
    counted: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Range:
    """The bounds of a number, or of each item of a tuple; None: no bound."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def admit(self, value: float) -> bool:
        """True if a value is within the bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """In words, such as "at least 0 and below 1"."""
        known = ((name, limit) for name, limit in vars(self).items() if limit is not None)
        return " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in known)


@dataclasses.dataclass(frozen=True)
class SettingRecord:
    """What is known of a setting besides its name, type and default. rules/checks.py checks it;
    --help prints the doc and the choices.

    doc: one line, with the unit
    """

    doc: str
    choices: Choices = Choices()
    bounds: Range = Range()


def setting(default: Any, doc: str, allowed: Choices | Range | None = None) -> Any:
    """A dataclass field of a group. allowed: None: all values of the annotated type"""
    choices = allowed if isinstance(allowed, Choices) else Choices()
    bounds = allowed if isinstance(allowed, Range) else Range()
    return dataclasses.field(
        default=default, metadata={"setting": SettingRecord(doc, choices, bounds)}
    )


def setting_of(field: dataclasses.Field) -> SettingRecord:
    """The record of a field that `setting` has made."""
    return field.metadata["setting"]


# --- entries --------------------------------------------------------------------------------------


class Item(NamedTuple):
    """An item NAME=TEXT, NAME.SETTING=TEXT or NAME.SETTING.PART=TEXT. setting, part: "" where there
    is none"""

    name: str
    setting: str
    part: str
    text: str


def parse_item(item: str) -> Item | None:
    """The parts of an item; None if it does not have this form."""
    match = re.fullmatch(r"([\w-]+)(?:\.([^.=]+))?(?:\.([^.=]+))?=(.*)", item, re.DOTALL)
    return Item(*match.groups("")) if match else None


def as_entries(value: Any) -> Any:
    """The items NAME=VALUE of a dict, a tuple of texts; any other value as it is. A value that is
    itself a dict has items NAME.SETTING=VALUE, and NAME=VALUE of its "path"."""
    if not isinstance(value, Mapping):
        return value
    return tuple(
        f"{name}{'' if inner == 'path' else f'.{inner}'}={entry_text(one)}"
        for name, given in value.items()
        for inner, one in (given.items() if isinstance(given, Mapping) else [("path", given)])
    )


def entry_text(value: Any) -> str:
    """A value in an item NAME=VALUE. The items of a tuple have a + between them."""
    many = isinstance(value, tuple | list)
    return "+".join(map(value_text, value)) if many else value_text(value)


def text_value(text: str, default: Any) -> Any:
    """The value of an item's text, of the type of a default; the text itself where it is of another
    type."""
    if isinstance(default, tuple):
        return tuple(part for part in re.split("[+,]", text) if part)
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(default, str):
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if isinstance(default, int) and number.is_integer() else number


def with_entry(entries: tuple[str, ...], name: str, text: str) -> tuple[str, ...]:
    """Items NAME=VALUE with this one, behind the others or in the place of one of its name."""
    by_name = {entry.partition("=")[0]: entry for entry in entries}
    return tuple((by_name | {name: f"{name}={text}"}).values())


def without_entries(entries: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Items without those of a name, NAME=TEXT and NAME.SETTING=TEXT."""
    return tuple(each for each in entries if not each.startswith((f"{name}=", f"{name}.")))


# --- records --------------------------------------------------------------------------------------


Record = TypeVar("Record")


def as_type(kind: type[Record], record: object, **values: object) -> Record:
    """A record of the given type with the fields of another one, some of them changed. Nothing is
    checked, and all fields are copied at once, because the search for a setting that works makes
    thousands of configs."""
    copy = object.__new__(kind)
    copy.__dict__.update(vars(record))
    copy.__dict__.update(values)
    return copy


def with_values(record: Record, **values: object) -> Record:
    """A record with some fields changed: dataclasses.replace without checks."""
    return as_type(type(record), record, **values)
