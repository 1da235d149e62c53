"""Flags: a command's own (`--name=value`) and settings (`--config.group.field=value`), and `--help`, which lists both.

Settings go through ml_collections' config_flags. They cannot override a frozen dataclass, and they answer a bad path, field or type with a
traceback or with status 0: so each override's name is looked at here first, then its text is read by a ConfigDict of that field alone.
What is wrong is collected, not raised, for the error's last words are flags that put everything right (cli.py). No jax.
"""

import ast
import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags

from jaxtrain import __version__
from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.recipes import DEFAULT_RECIPE

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclasses.dataclass(frozen=True)
class Flag:
    """A command's own flag, `--name=value`; its type is its default's (bool, int, float or str)."""

    name: str
    default: bool | int | float | str
    doc: str
    at_least: float | None = None


CLUSTER_FLAGS = (
    Flag("cpu_devices", 0, "simulate this many CPU devices in each process; 0: the platform's own devices", at_least=0),
    Flag("coordinator", "", "host:port of process 0, for a run of several processes that no cluster manager describes"),
    Flag("processes", 1, "number of processes, with --coordinator", at_least=1),
    Flag("process_id", 0, "number of this process, with --coordinator", at_least=0),
)
SHARED_FLAGS = (
    Flag("config", DEFAULT_RECIPE, "recipe: a Python file whose get_config() returns a jaxtrain.config.Config, or a shipped one's name"),
    Flag("workdir", "", "folder of checkpoints and metrics; a checkpoint in it is continued; empty: runs/NAME of the recipe"),
    *CLUSTER_FLAGS,
)


class UsageError(ValueError):
    """Flags that cannot be understood; the text is one line, what is wrong and what to use instead.

    fixes: command flags and their values to use; others: further values of the first of them; setting: the path of a config's setting
    that an unknown flag was meant for, if it was; advice: where nothing of these is.
    """

    def __init__(self, rule: str, fixes: Mapping[str, Any] | None = None, others: Sequence[Any] = (), setting: str = "", advice: str = ""):
        self.rule, self.fixes, self.others, self.setting, self.advice = rule, dict(fixes or {}), tuple(others), setting, advice
        flags = " ".join(cfg.flag_text(name, value) for name, value in self.fixes.items())
        alternatives = f" (or {', '.join(map(cfg.value_text, others))})" if others else ""
        use = flags + alternatives or advice
        super().__init__(rule + (f": use {use}" if use else ""))


@dataclasses.dataclass
class Reading:
    """A command line: flag → value, (setting's path, text) in order, and what is wrong; there the fixes are taken for what was meant."""

    values: dict[str, Any]
    overrides: list[tuple[str, str]]
    errors: list[UsageError]


# --- flags -----------------------------------------------------------------------------------------------------------------------


def read_flags(argv: Sequence[str], description: str, flags: Sequence[Flag], with_config: bool) -> Reading:
    """What a command line says, with all errors in it; of a flag given twice the last counts. `--help` ends the process."""
    if "--help" in argv or "-h" in argv:
        print(help_text(description, flags, with_config))
        sys.exit(0)
    if "--version" in argv:
        print(f"jaxtrain {__version__}")
        sys.exit(0)
    known = {flag.name: flag for flag in flags}
    reading = Reading({flag.name: flag.default for flag in flags}, [], [])
    texts: dict[str, str] = {}
    rest, before = list(argv), ""
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            continued = texts if before in known and before != "config" and isinstance(known[before].default, str) else {}
            reading.errors.append(_stray(token, before, continued, reading, with_config))
            continue
        before, equals, text = token[2:].partition("=")
        name = before
        if name not in known and not (with_config and name.removeprefix("config.") in cfg.fields() and name.startswith("config.")):
            error = _unknown(name, text if equals else _taken(rest), known, with_config)
            reading.errors.append(error)
            texts |= error.fixes
            if error.setting and equals and not error.advice:
                reading.overrides.append((error.setting, text))
            continue
        try:
            if not equals:
                text = _next_value(name, rest, _default_of(name, known))
        except UsageError as error:
            reading.errors.append(error)
            continue
        if name in known:
            texts[name] = text
        else:
            reading.overrides.append((name.removeprefix("config."), text))
    for name, text in texts.items():
        try:
            reading.values[name] = _flag_value(known[name], text) if isinstance(text, str) else text
        except UsageError as error:
            reading.errors.append(error)
            reading.values[name] = error.fixes[name]
    return reading


def _default_of(name: str, known: Mapping[str, Flag]) -> Any:
    return known[name].default if name in known else cfg.fields()[name.removeprefix("config.")].default


def _taken(rest: list[str]) -> str:
    """The value after a flag without "=", taken off the arguments; "" where none stands there."""
    return rest.pop(0) if rest and not rest[0].startswith("-") else ""


def _next_value(name: str, rest: list[str], default: Any) -> str:
    """The value of a flag that was given without "=", taken off the arguments after it; a boolean flag may stand alone."""
    if isinstance(default, bool) and (not rest or rest[0].lower() not in TRUE + FALSE):
        return "true"
    if not rest or rest[0].startswith("--"):
        setting = name.removeprefix("config.") if name.startswith("config.") else ""
        raise UsageError(f"--{name} has no value", {} if setting else {name: default}, setting=setting)
    return rest.pop(0)


def _flag_value(flag: Flag, text: str) -> Any:
    """A flag's text as its type."""
    kind = type(flag.default)
    if kind is bool:
        if text.lower() in TRUE + FALSE:
            return text.lower() in TRUE
        raise UsageError(f"--{flag.name}={text!r} is not a boolean", {flag.name: True}, [False])
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"--{flag.name}={text!r} is not {cfg.kind_name(kind)}", {flag.name: flag.default}) from None
    if flag.at_least is not None and not float(value) >= flag.at_least:
        raise UsageError(f"--{flag.name}={text} must be at least {flag.at_least}", {flag.name: kind(flag.at_least)})
    return value


def _unknown(name: str, text: str, known: Mapping[str, Flag], with_config: bool) -> UsageError:
    """The error for a flag that does not exist; `--stage` and `--mesh.stage` mean `--config.mesh.stage`."""
    if with_config and name.startswith("config."):
        path = name.removeprefix("config.")
        if path in {p.split(".")[0] for p in cfg.fields()}:
            first = next(p for p in cfg.fields() if p.startswith(path + "."))
            return UsageError(f"{path}={text!r} is a group of settings, such as {first}", setting=first, advice=f"--config.{first}")
        return UsageError(f"{path}={text!r} is an unknown setting", setting=cfg.meant(path))
    rule, paths = f"--{name} is an unknown flag", list(cfg.fields()) if with_config else []
    meant = [p for p in paths if name == p or p.endswith("." + name)]
    like = difflib.get_close_matches(name, [*known, *(f"config.{p}" for p in paths)], n=1)
    if meant or (like and like[0] not in known):
        return UsageError(rule, setting=meant[0] if meant else like[0].removeprefix("config."))
    if not like:
        return UsageError(rule, advice="--help, which lists all flags")
    flag = known[like[0]]
    try:
        return UsageError(rule, {flag.name: _flag_value(flag, text or ("true" if isinstance(flag.default, bool) else ""))})
    except UsageError as error:
        return UsageError(rule, error.fixes)


def _stray(token: str, before: str, texts: dict[str, str], reading: Reading, with_config: bool) -> UsageError:
    """The error for an argument that belongs to no flag: a setting without dashes, or the rest of a value with blanks in it.

    before: the name of the flag before it; texts: of the flags whose value it may belong to.
    """
    name, equals, text = token.removeprefix("-").partition("=")
    path, last = name.removeprefix("config."), before.removeprefix("config.")
    rule = f"argument {token!r} belongs to no flag"
    if with_config and equals and path in cfg.fields():
        reading.overrides.append((path, text))
        return UsageError(rule, setting=path)
    if with_config and before.startswith("config.") and last in cfg.fields() and cfg.fields()[last].type is str:
        so_far = next((text for path, text in reversed(reading.overrides) if path == last), "")
        reading.overrides.append((last, f"{so_far} {token}".strip()))
        return UsageError(rule, setting=last)
    if before in texts:
        texts[before] = f"{texts[before]} {token}"
        return UsageError(rule, {before: texts[before]})
    return UsageError(rule, advice="--flag=value, and quotes around a value with spaces")


# --- overrides -------------------------------------------------------------------------------------------------------------------


def apply(config: Config, overrides: Sequence[tuple[str, str]]) -> Config:
    """A config with (path, text) overrides, of which the last for a path counts. A text that is not of its setting's type stays a text,
    which the checks refuse."""
    return cfg.replace(cfg.converted(config), {path: _value(path, text) for path, text in overrides})


def _value(path: str, text: str) -> Any:
    """A text as its setting's type, by ml_collections' flags; the text itself if it is none of that type."""
    group, name = path.split(".")
    field, values = cfg.fields()[path], absl_flags.FlagValues()
    try:
        item = cfg.item_type(field.type)
        argument = f"--config.{path}={_tuple_text(text, item) if item else text}"
        config_flags.DEFINE_config_dict("config", ConfigDict({group: {name: field.default}}), flag_values=values, sys_argv=["", argument])
        values(["", argument])
        changed: Any = values["config"].value
        return cfg.convert(path, changed.to_dict()[group][name])
    except (absl_flags.Error, ValueError, TypeError, AttributeError, KeyError, SyntaxError):
        return text


def _tuple_text(text: str, item: type) -> str:
    """`prompt`, `prompt,answer`, `1,2` or a Python literal as the tuple that it means; ValueError or SyntaxError for a broken literal."""
    if any(mark in text for mark in cfg.TUPLE_MARKS):
        value = ast.literal_eval(text)
        return repr((value,) if isinstance(value, item) else value)
    return repr(tuple(item(name.strip()) for name in text.split(",") if name.strip()))


# --- help ------------------------------------------------------------------------------------------------------------------------


def help_text(description: str, flags: Sequence[Flag], with_config: bool) -> str:
    """`--help`: usage, every flag, every setting with its type, default and doc."""
    lines = [*description.strip().splitlines(), "", "Flags (--flag=value or --flag value):"]
    rows = [(f"--{flag.name}={_default(flag.default)}", flag.doc) for flag in flags]
    lines += _table([*rows, ("--help", "this text"), ("--version", "jaxtrain's version")])
    if not with_config:
        return "\n".join(lines)
    lines += ["", "Settings: each is a flag, over the recipe's value. Types and defaults (a recipe has its own values):"]
    for group in dataclasses.fields(Config):
        kind: Any = group.type
        lines += ["", f"  {group.name}: {kind.__doc__}"]
        rows = []
        for field in dataclasses.fields(kind):
            choices = field.metadata["choices"]
            doc = field.metadata["doc"] + (f" [{' | '.join(map(str, choices))}]" if choices else "")
            rows.append((f"--config.{group.name}.{field.name}: {cfg.plain_type(field.type)} = {_default(field.default)}", doc))
        lines += _table(rows)
    lines += [
        "",
        "Examples:",
        "  --config=gpt2_124m --workdir=runs/gpt2 --config.data.source=corpus.jsonl",
        "  --config.mesh.data=2 --config.mesh.stage=4 --config.pipeline.microbatches=8",
        "  --config.data.text_fields=prompt,answer --config.data.loss_mask=prompt",
        "A second run with the same --workdir continues from its newest checkpoint, also on another mesh.",
    ]
    return "\n".join(lines)


def _default(value: Any) -> str:
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else ",".join(map(str, value))
        if isinstance(value, tuple)
        else str(value)
    )


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(left) for left, _ in rows)
    return [f"    {left:{width}}  {right}" for left, right in rows]
