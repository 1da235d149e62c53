"""Errors of settings and flags: one line that ends with flags to copy into a shell. Standard
library only."""

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What stands in printed commands, recipes and templates for what only their user knows, alone or
# as a part of a path, a host:port or a list. No shell changes it, and every command refuses it.
# A text with blanks has none: it is a prompt.
PLACEHOLDER = re.compile(r"(?:^|^\S*[/:,=])YOUR_[A-Z0-9_]+(?:$|[/:,.]\S*$)")
# where a flag's text has one of these, a tuple is read as a Python literal
TUPLE_MARKS = "\"'()[]{}"


class ConfigError(ValueError):
    """A setting that cannot work; its text is one line: field, value, the rule that it breaks, and
    the nearest flags that work.

    field: the path, such as "mesh.model"; value: what it was; rule: what is wrong, to be read after
    "field=value"; nearest: what to use instead, as text (flags, by `suggestion`; may be empty);
    fixes: where given, changes that may mend it, nearest first, of which the first is what to use.

    >>> rule = "does not divide model.heads=4"
    >>> print(ConfigError("mesh.model", 3, rule, fixes=[{"mesh.model": 2}]))
    mesh.model=3 does not divide model.heads=4: use --config.mesh.model=2
    """

    def __init__(
        self,
        field: str,
        value: object,
        rule: str,
        nearest: str = "",
        fixes: Sequence[dict[str, Any]] = (),
    ):
        self.field, self.value, self.rule, self.fixes = field, value, rule, tuple(fixes)
        self.nearest = nearest or (suggestion(self.fixes[0]) if self.fixes else "")
        use = f": use {self.nearest}" if self.nearest else ""
        super().__init__(one_line(f"{field}={shown(value)} {' '.join(rule.split())}{use}"))


class UsageError(ValueError):
    """A command line that cannot work; the text is one line, what is wrong and what to use instead.

    fixes: flags ("stages", or "config." and a setting's path) and the values after which this is
    right; others: further values of the first of them; setting: the path of a setting that an
    unknown flag was meant for, if it was; advice: words after these, or in their place where no
    flag mends it; text: all of it, where that is known.
    """

    def __init__(
        self,
        rule: str,
        fixes: Mapping[str, Any] | None = None,
        others: Sequence[Any] = (),
        setting: str = "",
        advice: str = "",
        text: str = "",
    ):
        self.rule, self.fixes, self.setting, self.advice = rule, dict(fixes or {}), setting, advice
        flags = " ".join(flag_text(name, value) for name, value in self.fixes.items())
        alternatives = f" (or {', '.join(map(value_text, others))})" if others else ""
        use = " ".join(filter(None, [flags + alternatives, advice]))
        super().__init__(text or rule + (f": use {use}" if use else ""))


def nearly(word: str, known: Iterable[str], cutoff: float = 0.8) -> str:
    """The known word that a word nearly is, by difflib, and that has the same digits: with another
    number it is another part, version or year. "" if there is none."""
    digits = re.findall(r"\d", word)
    alike = [each for each in known if re.findall(r"\d", each) == digits]
    return next(iter(difflib.get_close_matches(word, alike, 1, cutoff)), "")


def unfilled(named: Sequence[str]) -> UsageError:
    """The error for placeholders. named: each with its flag, such as --workdir=YOUR_WORKDIR."""
    are = ("is a placeholder", "are placeholders")[len(named) > 1]
    return UsageError(f"{', '.join(named)} {are}", advice="what you have in place of each YOUR_…")


def one_line(text: str) -> str:
    """A text without line breaks; blanks inside a line stay, for they may be part of a value."""
    return " ".join(filter(None, map(str.strip, text.splitlines())))


def suggestion(changes: Mapping[str, Any], others: Sequence[Any] = ()) -> str:
    """Settings as flags that a shell takes, with other values of the first one after them:
    "--config.mesh.model=2 (or 1, 4)"."""
    flags = " ".join(flag_text(f"config.{path}", value) for path, value in changes.items())
    return flags + (
        f" (or {', '.join(shlex.quote(value_text(value)) for value in others)})" if others else ""
    )


def flag_text(name: str, value: Any) -> str:
    """A flag with its value, quoted for a shell: the parser reads the same value back."""
    text = value_text(value)
    return f"--{name}={shlex.quote(text) if text else ''}"


def value_text(value: Any) -> str:
    """A value as it is written in a flag: true, 3,2,2,1, 0.5, a text as it is; "" for an empty
    tuple."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, tuple):
        return str(value)
    plain = all(
        str(item) == str(item).strip() != "" and not set(str(item)) & set(TUPLE_MARKS + ",")
        for item in value
    )
    return ",".join(map(str, value)) if plain else repr(value)


def shown(value: object) -> str:
    """The repr of a value, cut to 200 characters."""
    return cut(repr(value))


def cut(text: str) -> str:
    """A text of at most 200 characters, all of which can be printed."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= 200 else text[:200] + "…"
