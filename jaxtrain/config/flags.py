"""Flags: a command's own (`--name=value`) and settings (`--config.group.field=value`), and
`--help`, which lists both.

ml_collections' config_flags read the settings. They cannot override a frozen dataclass, and they
answer a wrong path, field or type with a traceback or with status 0. So the name of each override
is checked here, and then a ConfigDict with that one field reads its text. Errors are collected, not
raised, because the message ends with flags that mend all of them (cli.py). No jax.
"""

import ast
import contextlib
import dataclasses
import math
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags

from jaxtrain import __version__, config as cfg
from jaxtrain.config import Config
from jaxtrain.config.errors import PLACEHOLDER, UsageError, nearly, unfilled
from jaxtrain.config.groups.setting import with_entry
from jaxtrain.config.recipes import DEFAULT_RECIPE, RecipeError, load_recipe

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")
SETTING = "config."  # what the name of a setting's flag begins with
WRITTEN = "two dashes before a NAME=VALUE, and quotes around a value with spaces"
MOST_ERRORS = 32  # errors of one command line
MOST_SHOWN = 200  # characters of a flag's name
MOST_CPU_DEVICES = 1024  # each has threads and buffers of its own
MOST_PROCESSES = 2**20  # more than any cluster has
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Flag:
    """A command's own flag, `--name=value`, of the type of its default: bool, int, float or str; or
    the texts of each time that it is given, if the default is a tuple.

    The default is always allowed, even outside of the bounds (such as 0 for "none").
    """

    name: str
    default: bool | int | float | str | tuple[str, ...]
    doc: str
    at_least: float | None = None
    at_most: int = cfg.LARGEST_INT  # of whole numbers


CLUSTER_FLAGS = (
    Flag(
        "cpu_devices",
        0,
        "simulate this many CPU devices in each process; 0: the platform's own devices",
        0,
        MOST_CPU_DEVICES,
    ),
    Flag(
        "coordinator",
        "",
        "host:port of process 0, for several processes without a cluster manager",
    ),
    Flag("processes", 1, "number of processes, with --coordinator", 1, MOST_PROCESSES),
    Flag("process_id", 0, "number of this process, with --coordinator", at_least=0),
)
SHARED_FLAGS = (
    Flag(
        "config",
        DEFAULT_RECIPE,
        "recipe: a Python file whose get_config() returns a jaxtrain.config.Config, the "
        "config.json of a run, or the name of a shipped recipe",
    ),
    Flag(
        "workdir",
        "",
        "folder of checkpoints and metrics; the run continues from a checkpoint in it; empty: "
        "runs/NAME, with the recipe's name",
    ),
    *CLUSTER_FLAGS,
)


@dataclasses.dataclass
class Reading:
    """A command line as it was read.

    values:    flag → value
    overrides: (path of a setting, text), in order
    words:     the arguments that belong to no flag
    errors:    the errors so far; their fixes are in `values` and `overrides` already
    placeholders: flags that have one, as they are written
    """

    values: dict[str, Any]
    overrides: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    words: list[str] = dataclasses.field(default_factory=list)
    errors: list[UsageError] = dataclasses.field(default_factory=list)
    placeholders: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def namespace(self) -> types.SimpleNamespace:
        """The flags' values as attributes, with `words` and `refused`: True if the command ends
        with an error in any case, so a check need do nothing that takes long."""
        return types.SimpleNamespace(**self.values, words=self.words, refused=bool(self.errors))

    def use(self, fixes: Mapping[str, Any]) -> None:
        """Appends these flags to the command line."""
        for name, value in fixes.items():
            if name.startswith(SETTING):
                self.overrides.append((name.removeprefix(SETTING), cfg.value_text(value)))
            else:
                self.values[name] = value


# --- flags ----------------------------------------------------------------------------------------


def read_flags(
    argv: Sequence[str],
    description: str,
    flags: Sequence[Flag],
    with_config: bool,
    with_words: bool = False,
) -> Reading:
    """The reading of a command line, with all errors in it. `--help` and `--version` print and end
    the process.

    Of a flag given twice the last counts, also where an earlier one is wrong. with_config: whether
    settings are flags; with_words: whether words that are no flags (folders, say) belong to the
    command, before, between and after the flags.
    """
    if {"--help", "-h", "--version"} & set(argv):
        asks_help = "--help" in argv or "-h" in argv
        version = f"jaxtrain {__version__}"
        print(help_text(description, flags, with_config) if asks_help else version)
        sys.exit(0)
    known = {flag.name: flag for flag in flags}
    settings = cfg.fields() if with_config else {}
    defaults: dict[str, Any] = {flag.name: flag.default for flag in flags}
    reading = Reading(dict(defaults))
    defaults |= {SETTING + path: field.default for path, field in settings.items()}
    texts: dict[str, Any] = {}  # of flags; a value that is no text is what an unknown flag meant
    missing: dict[str, UsageError] = {}  # flags without a value, if none comes later
    rest, name = list(argv), ""
    while rest:
        token = rest.pop(0)
        if with_words and not token.startswith("-"):
            reading.words.append(token)
            continue
        if not token.startswith("--") or token in ("--", "--="):
            takes_text = name in known and name != "config" and isinstance(defaults[name], str)
            reading.errors.append(
                _stray(token, name, texts if takes_text else {}, reading, settings)
            )
            if token.startswith("-"):
                _take_value(rest)
            continue
        name, equals, text = token[2:].partition("=")
        entry = cfg.entry_of(name.removeprefix(SETTING)) if with_config else None
        if entry and name.startswith(SETTING):
            defaults.setdefault(name, "")
        if name not in defaults:
            error = _unknown(name, text if equals else _take_value(rest), known, settings)
            reading.errors.append(error)
            texts |= error.fixes
            if error.setting and equals and not error.advice:
                reading.overrides.append((error.setting, text))
            continue
        missing.pop(name, None)
        reading.placeholders.pop(name, None)
        value = text if equals else _value_after(rest, defaults[name])
        path = "" if name in known else name.removeprefix(SETTING)
        if value and PLACEHOLDER.search(value):
            reading.placeholders[name] = f"--{name}={value}"
        elif value is None:
            fixes = {} if path else {name: defaults[name]}
            setting = entry[0] if entry else path
            missing[name] = UsageError(f"--{name} has no value", fixes, setting=setting)
            texts.pop(name, None)
        elif path:
            reading.overrides.append((path, value))
        elif isinstance(defaults[name], tuple):
            texts[name] = (*texts.get(name, ()), value)
        else:
            texts[name] = value
    reading.errors += missing.values()
    for name, text in texts.items():
        try:
            reading.values[name] = _flag_value(known[name], text) if isinstance(text, str) else text
        except UsageError as error:
            reading.errors.append(error)
            reading.values[name] = error.fixes.get(name, known[name].default)
    return reading


def _value_after(rest: list[str], default: Any) -> str | None:
    """The value of a flag without "=", removed from the arguments after it; None if there is none.
    A boolean flag needs none."""
    if isinstance(default, bool) and not (rest and rest[0].lower() in TRUE + FALSE):
        return "true"
    return rest.pop(0) if rest and not rest[0].startswith("--") else None


def _take_value(rest: list[str]) -> str:
    """The value after an unknown flag, removed from the arguments; "" if there is none."""
    return rest.pop(0) if rest and not rest[0].startswith("-") else ""


def _flag_value(flag: Flag, text: str) -> Any:
    """The value of a flag's text. Raises UsageError for a text of another type, and for a value
    outside of the bounds that is not the default."""
    kind: Any = type(flag.default)
    if kind is bool:
        if text.lower() in TRUE + FALSE:
            return text.lower() in TRUE
        raise UsageError(
            f"--{flag.name}={cfg.shown(text)} is not a boolean", {flag.name: True}, [False]
        )
    try:
        value = kind(text)
    except ValueError:
        value = cfg.number(text) if kind is float else None
        if value is None:
            rule = f"--{flag.name}={cfg.shown(text)} is not {cfg.kind_name(kind)}"
            raise UsageError(rule, _nearest(flag, text)) from None
    if value == flag.default:
        return value
    if flag.at_least is not None and not value >= flag.at_least:
        raise UsageError(
            f"--{flag.name}={text} must be at least {flag.at_least}",
            {flag.name: kind(flag.at_least)},
        )
    if kind is float and not math.isfinite(value):
        raise UsageError(f"--{flag.name}={text} is not a finite number")
    if kind is int and value > flag.at_most:  # nobody means the bound
        raise UsageError(
            f"--{flag.name}={cfg.shown(value)} must be at most {flag.at_most}",
            {flag.name: flag.default},
        )
    return value


def _nearest(flag: Flag, text: str) -> dict[str, Any]:
    """The flag with the value of its type and within its bounds that is nearest to a text of
    another type, such as 20 for 19.8; {} if there is none."""
    number = cfg.number(text) if isinstance(flag.default, int) else None
    if number is None or abs(number) > flag.at_most:
        return {}
    return {flag.name: max(round(number), int(flag.at_least or 0))}


def _unknown(
    name: str, text: str, known: Mapping[str, Flag], settings: Mapping[str, Any]
) -> UsageError:
    """The error for a flag that does not exist, with the flag that was meant: `--config.mesh.stage`
    for `--stage` or `--mesh.stage`. settings: by path; empty for a command without a recipe."""
    if name in ("help", "version"):
        return UsageError(
            f"--{name}={cfg.shown(text)} is a flag without a value", advice=f"--{name}"
        )
    if settings and name.startswith(SETTING):
        path = name.removeprefix(SETTING)
        member = next((p for p in settings if p.startswith(path + ".")), None)
        if member:
            return UsageError(
                f"{path}={text!r} is a group of settings, such as {member}",
                setting=member,
                advice=f"--config.{member}",
            )
        path_meant = cfg.meant(path)
        advice = "" if path_meant else "--help, which lists all settings"
        return UsageError(
            f"{path}={text!r} is an unknown setting", setting=path_meant, advice=advice
        )
    rule = f"--{name[:MOST_SHOWN]} is an unknown flag"
    name = name.lstrip("-").replace("-", "_")
    meant = [path for path in settings if name == path or path.endswith("." + name)]
    if len(meant) == 1:
        return UsageError(rule, setting=meant[0])
    nearest = nearly(name, [*known, *(SETTING + path for path in settings)])
    if not nearest:
        return UsageError(rule, advice="--help, which lists all flags")
    if nearest not in known:
        return UsageError(rule, setting=nearest.removeprefix(SETTING))
    flag = known[nearest]
    if not text and isinstance(flag.default, bool):
        text = "true"
    try:
        return UsageError(rule, {nearest: _flag_value(flag, text)})
    except UsageError as error:
        return UsageError(rule, error.fixes)


def _stray(
    token: str, before: str, texts: dict[str, str], reading: Reading, settings: Mapping[str, Any]
) -> UsageError:
    """The error for an argument that belongs to no flag: a setting without dashes, or the rest of a
    value with spaces in it.

    before: name of the flag before it
    texts: flag → text of the flags whose value it may belong to
    settings: by path; empty for a command without a recipe
    """
    name, equals, text = token.removeprefix("-").partition("=")
    path, last = name.removeprefix(SETTING), before.removeprefix(SETTING)
    rule = f"argument {cfg.shown(token)} belongs to no flag"
    if equals and path in settings:
        reading.overrides.append((path, text))
        return UsageError(rule, setting=path)
    if token.startswith("-"):
        return UsageError(rule, advice=WRITTEN)
    if before.startswith(SETTING) and last in settings and settings[last].type is str:
        so_far = next((text for path, text in reversed(reading.overrides) if path == last), "")
        reading.overrides.append((last, f"{so_far} {token}".strip()))
        return UsageError(rule, setting=last)
    if isinstance(texts.get(before), str):
        texts[before] = f"{texts[before]} {token}"
        return UsageError(rule, {before: texts[before]})
    return UsageError(rule, advice=WRITTEN)


# --- overrides ------------------------------------------------------------------------------------


def apply(config: Config, overrides: Sequence[tuple[str, str]]) -> Config:
    """The config with overrides (path, text), one after the other; that of an item NAME=VALUE
    changes a tuple of them. A text of another type than its setting's stays a text, which the
    checks refuse."""
    changes: dict[str, Any] = {}
    for path in cfg.fields():
        with contextlib.suppress(cfg.ConfigError):
            changes[path] = cfg.convert(path, cfg.get(config, path))
    for path, text in overrides:
        entry = cfg.entry_of(path)
        if not entry:
            changes[path] = setting_value(path, text)
            continue
        setting, name = entry
        if isinstance(entries := changes.get(setting), tuple):
            changes[setting] = with_entry(entries, name, text)
    return cfg.replace(config, changes)


def setting_value(path: str, text: str) -> Any:
    """The value of a setting's text, as ml_collections' flags read it, for every command; the text
    itself if it is of another type."""
    group, name = path.split(".")
    field, values = cfg.fields()[path], absl_flags.FlagValues()
    try:
        item = cfg.item_type(field.type)
        argument = f"--config.{path}={_tuple_text(text, item) if item else text}"
        config_flags.DEFINE_config_dict(
            "config",
            ConfigDict({group: {name: field.default}}),
            flag_values=values,
            sys_argv=["", argument],
        )
        values(["", argument])
        changed: Any = values["config"].value
        return cfg.convert(path, changed.to_dict()[group][name])
    except (absl_flags.Error, ValueError, TypeError, AttributeError, KeyError, SyntaxError):
        return text


def _tuple_text(text: str, item: type) -> str:
    """The Python literal of the tuple that a text means: `prompt`, `prompt,answer`, `1,2`, or a
    literal. Raises ValueError or SyntaxError for a broken literal."""
    if any(mark in text for mark in cfg.TUPLE_MARKS):
        value = ast.literal_eval(text)
        return repr((value,) if isinstance(value, item) else value)
    return repr(tuple(item(name.strip()) for name in text.split(",") if name.strip()))


# --- all that is wrong, in one line ---------------------------------------------------------------


def settled(reading: Reading, check: Callable[[Reading], T], recipe: Config | None = None) -> T:
    """The result of `check` on a command line.

    recipe: the config to override, instead of the one that --config names

    While the check refuses the command line, the error's fixes are appended to it, and it is
    checked once more. So a suggestion works, and it fixes all errors at once. Raises UsageError
    with the first error, these fixes, and the errors that no flag fixes; with placeholders, or
    values that cannot be read, alone where there are any, since all else may follow from them.
    """
    errors = reading.errors
    if named := [*reading.placeholders.values(), *filter(PLACEHOLDER.search, reading.words)]:
        raise unfilled(named)
    if not all(error.fixes or error.setting or error.advice for error in errors):
        raise UsageError(_all_together(errors, reading, recipe))
    for _ in range(MOST_ERRORS):
        known = {name: value for error in errors for name, value in error.fixes.items()}
        try:
            result = check(reading)
        except (UsageError, cfg.ConfigError) as refused:
            error = refused if isinstance(refused, UsageError) else _usage_error(refused)
        else:
            if not errors:
                return result
            raise UsageError(_all_together(errors, reading, recipe))
        if error.fixes.items() <= known.items():  # these fixes did not help
            errors.append(UsageError(error.rule) if error.fixes else error)
            raise UsageError(_all_together(errors, reading, recipe)) from None
        errors.append(error)
        reading.use(error.fixes)
    raise UsageError(errors[0].rule)  # a fix undoes another


def _usage_error(error: cfg.ConfigError) -> UsageError:
    """The UsageError with the flags of a ConfigError."""
    fixes = {SETTING + path: value for path, value in error.fixes[0].items()} if error.fixes else {}
    return UsageError(str(error).rpartition(": use ")[0] or str(error), fixes, text=str(error))


def _all_together(errors: Sequence[UsageError], reading: Reading, recipe: Config | None) -> str:
    """A text with the first error that flags fix, the flags that fix all of these, and the errors
    that no flag fixes."""
    if len(errors) == 1 and not errors[0].setting:
        return str(errors[0])
    flags = {name: value for error in errors for name, value in error.fixes.items()}
    meant: dict[str, Any] = {}  # settings that unknown flags were meant for, and their final values
    if settings := [error.setting for error in errors if error.setting]:
        with contextlib.suppress(RecipeError):
            recipe = recipe or load_recipe(reading.values["config"])
            config = apply(recipe, reading.overrides)
            meant = {SETTING + path: cfg.get(config, path) for path in settings}
    flags = {name: flags[name] for name in flags if not name.startswith(SETTING)} | meant | flags
    use = " ".join(cfg.flag_text(name, value) for name, value in flags.items())
    fixed = [error for error in errors if error.fixes or error.setting]
    others = [str(error) for error in errors if error not in fixed]
    text = f"{fixed[0].rule}: use {use}" if use else others.pop(0)
    return text + (f" (and {'; '.join(others)})" if others else "")


# --- help -----------------------------------------------------------------------------------------


WIDTH = 100  # columns
ABOUT_SETTINGS = """
Settings, with type and default. A recipe may set another value, and a flag overrides it:
"""
EXAMPLES = """
Examples:
  --config=gpt2_124m --workdir=runs/gpt2 --config.data.source=corpus.jsonl
  --config.mesh.data=2 --config.mesh.stage=4 --config.pipeline.microbatches=8
  --config.data.text_fields=prompt,answer --config.data.loss_mask=prompt
A second run with the same --workdir continues from its newest checkpoint, also on another mesh."""


def help_text(description: str, flags: Sequence[Flag], with_config: bool) -> str:
    """The text of `--help`: the description, every flag, and every setting with its type, default
    and doc."""
    entries = [
        *((f"--{flag.name}={cfg.value_text(flag.default)}", flag.doc) for flag in flags),
        ("--help", "this text"),
        ("--version", "jaxtrain's version"),
    ]
    parts = [description.strip(), "", "Flags (--flag=value or --flag value):"]
    parts += _two_columns(entries)
    if not with_config:
        return "\n".join(parts)
    parts.append(ABOUT_SETTINGS)
    for group in dataclasses.fields(Config):
        kind: Any = group.type
        doc = " ".join(kind.__doc__.split())
        parts.append(textwrap.fill(f"  {group.name}: {doc}", WIDTH, subsequent_indent=" " * 4))
        entries = []
        for field in dataclasses.fields(kind):
            default = cfg.value_text(field.default)
            name = f"--config.{group.name}.{field.name}: {cfg.plain_type(field.type)} = {default}"
            setting = cfg.setting_of(field)
            choices = " | ".join(map(str, setting.choices.names))
            entries.append((name, setting.doc + (f" [{choices}]" if choices else "")))
        parts += [*_two_columns(entries), ""]
    return "\n".join(parts) + EXAMPLES


def _two_columns(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Lines with each name on the left and its text, wrapped, on the right."""
    width = max(len(name) for name, _ in entries)
    return [
        textwrap.fill(
            f"    {name:{width}}  {text}",
            WIDTH,
            subsequent_indent=" " * (width + 6),
            break_on_hyphens=False,
        )
        for name, text in entries
    ]
