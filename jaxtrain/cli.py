"""What the commands share: flags → Config, one line for whatever is wrong with them, `--help`, and the start of jax.

    parse(argv, …)          recipe → Config → flags over it → checks     no jax, nothing written; status 2 when something is wrong
    start_jax(namespace)    devices, compilation cache, other processes  the first thing after parse

`--config.group.field=value` goes through ml_collections' config_flags. They cannot override a frozen dataclass, and they answer a bad
path, field or type with a traceback or with status 0: so each override is looked at here first, then applied to a ConfigDict of the
recipe's values, from which the dataclass is built again.
"""

import ast
import dataclasses
import difflib
import os
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags

from jaxtrain import __version__, cluster_environment, config_checks
from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError
from jaxtrain.recipes import DEFAULT_RECIPE, RecipeError, find_recipe, load_recipe

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")
SIMULATED_DEVICES = 8


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
    """Flags that cannot be understood; the text is one line."""


def parse(argv: Sequence[str], description: str, extra_flags: Sequence[Flag] = ()) -> tuple[Config, types.SimpleNamespace]:
    """The checked config (not resolved) and the values of the other flags, by name, of a command that takes a recipe.

    argv: without the program's name. The namespace's `config` is the recipe's path, and `workdir` is filled in.
    Whatever is wrong ends the process with one line on stderr and status 2; `--help` ends it with status 0.
    """
    flags = (*SHARED_FLAGS, *extra_flags)
    try:
        values, overrides = read_flags(argv, description, flags, with_config=True)
        namespace = types.SimpleNamespace(**values)
        check_cluster(namespace)
        path = find_recipe(namespace.config)
        config = apply(load_recipe(path), overrides)
        config_checks.check(config)
        config_checks.check_files(config)
    except (UsageError, RecipeError, ConfigError) as error:
        fail(str(error))
    namespace.config = str(path)
    namespace.workdir = namespace.workdir or os.path.join("runs", path.stem)
    return config, namespace


def parse_flags(argv: Sequence[str], description: str, flags: Sequence[Flag]) -> types.SimpleNamespace:
    """The values of the flags of a command that takes no recipe. Errors and `--help` as in `parse`."""
    try:
        namespace = types.SimpleNamespace(**read_flags(argv, description, flags, with_config=False)[0])
        if hasattr(namespace, "coordinator"):
            check_cluster(namespace)
    except UsageError as error:
        fail(str(error))
    return namespace


def fail(message: str) -> NoReturn:
    """Ends the process with one line on stderr and status 2."""
    print(" ".join(f"error: {message}".split()), file=sys.stderr, flush=True)
    sys.exit(2)


# --- flags -----------------------------------------------------------------------------------------------------------------------


def read_flags(
    argv: Sequence[str], description: str, flags: Sequence[Flag], with_config: bool
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """(flag name → value, [(setting's path, text), …]) of a command line. UsageError or ConfigError for what is not known."""
    if "--help" in argv or "-h" in argv:
        print(help_text(description, flags, with_config))
        sys.exit(0)
    if "--version" in argv:
        print(f"jaxtrain {__version__}")
        sys.exit(0)
    known = {flag.name: flag for flag in flags}
    values: dict[str, Any] = {flag.name: flag.default for flag in flags}
    overrides = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            raise UsageError(f"argument {token!r} belongs to no flag: use --flag=value, and quotes around a value with spaces")
        name, equals, text = token[2:].partition("=")
        path = name.removeprefix("config.") if with_config and name.startswith("config.") else ""
        if path and path not in cfg.fields():
            raise _unknown_setting(path, text if equals else (rest[0] if rest else ""))
        if not path and name not in known:
            raise _unknown_flag(name, known, with_config)
        boolean = cfg.fields()[path].type is bool if path else isinstance(known[name].default, bool)
        if not equals:
            text = _next_value(name, rest, boolean)
        if path:
            overrides.append((path, text))
        else:
            values[name] = _flag_value(known[name], text)
    return values, overrides


def _next_value(name: str, rest: list[str], boolean: bool) -> str:
    """The value of a flag that was given without "=", taken off the arguments after it; a boolean flag may stand alone."""
    if boolean and (not rest or rest[0].lower() not in TRUE + FALSE):
        return "true"
    if not rest or rest[0].startswith("--"):
        raise UsageError(f"--{name} has no value: use --{name}=VALUE")
    return rest.pop(0)


def _flag_value(flag: Flag, text: str) -> Any:
    """A flag's text as its type."""
    kind = type(flag.default)
    if kind is bool:
        if text.lower() in TRUE + FALSE:
            return text.lower() in TRUE
        raise UsageError(f"--{flag.name}={text!r} is not a boolean: use true or false")
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"--{flag.name}={text!r} is not {cfg.kind_name(kind)}: use {flag.default!r}") from None
    if flag.at_least is not None and not float(value) >= flag.at_least:
        raise UsageError(f"--{flag.name}={text} must be at least {flag.at_least}: use {flag.at_least}")
    return value


def _unknown_setting(path: str, text: str) -> ConfigError:
    groups = {p.split(".")[0] for p in cfg.fields()}
    if path in groups:
        first = next(p for p in cfg.fields() if p.startswith(path + "."))
        return ConfigError(path, text, "is a group of settings", f"one of its fields, such as --config.{first}")
    error = cfg.unknown_field(path, text)
    return ConfigError(path, text, error.rule, f"--config.{error.nearest}")


def _unknown_flag(name: str, known: dict[str, Flag], with_config: bool) -> UsageError:
    """The error for a flag that does not exist; `--stage` and `--mesh.stage` mean `--config.mesh.stage`."""
    paths = list(cfg.fields()) if with_config else []
    meant = [p for p in paths if name == p or p.endswith("." + name)]
    like = difflib.get_close_matches(name, [*known, *(f"config.{p}" for p in paths)], n=1)
    near = [f"--config.{meant[0]}"] if meant else [f"--{flag}" for flag in like]
    return UsageError(f"--{name} is an unknown flag: use {(near or ['--help, which lists all flags'])[0]}")


def check_cluster(namespace: types.SimpleNamespace) -> None:
    """UsageError where the flags of a run of several processes do not fit together."""
    host, _, port = namespace.coordinator.rpartition(":")
    if namespace.coordinator and not (host and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"--coordinator={namespace.coordinator!r} is not host:port: use --coordinator={host or 'localhost'}:29500")
    if namespace.processes > 1 and not namespace.coordinator:
        raise UsageError(f"--processes={namespace.processes} needs --coordinator=HOST:PORT (one machine: python -m jaxtrain.launch)")
    if namespace.process_id >= namespace.processes:
        last = namespace.processes - 1
        raise UsageError(f"--process_id={namespace.process_id} is not below --processes={namespace.processes}: use 0 to {last}")


def check_workdir(workdir: str) -> None:
    """Ends the process with one line and status 2 where the folder of a run can neither be written nor made."""
    if "://" in workdir:
        fail(f"--workdir={workdir!r} is an address, not a folder: use --workdir={os.path.join('runs', os.path.basename(workdir))!r}")
    path = pathlib.Path(workdir)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        fail(f"--workdir={workdir!r}: {str(there)!r} is not a folder: use --workdir={str(there.with_name(there.name + '_run'))!r}")
    if not os.access(there, os.W_OK | os.X_OK):
        fail(f"--workdir={workdir!r}: {str(there)!r} may not be written: use --workdir={os.path.join('runs', path.name)!r}")


# --- overrides -------------------------------------------------------------------------------------------------------------------


def apply(config: Config, overrides: Sequence[tuple[str, str]]) -> Config:
    """A config with (path, text) overrides, in order. ConfigError for a text that is not of its setting's type."""
    config = cfg.from_dict(cfg.to_dict(config))  # integers given for floats become floats: ConfigDict keeps each value's type
    for path, text in overrides:
        config = _override(config, path, text)
    return config


def _override(config: Config, path: str, text: str) -> Config:
    """One override, by ml_collections' flags on a ConfigDict of the config."""
    values = absl_flags.FlagValues()
    try:
        item = cfg.item_type(cfg.fields()[path].type)
        argument = f"--config.{path}={_tuple_text(text, item) if item else text}"
        config_flags.DEFINE_config_dict("config", ConfigDict(cfg.to_dict(config)), flag_values=values, sys_argv=["", argument])
        values(["", argument])
        changed: Any = values["config"].value
        return cfg.from_dict(changed.to_dict())
    except (absl_flags.Error, ValueError, TypeError, AttributeError, KeyError, SyntaxError):
        kind = cfg.kind_name(cfg.fields()[path].type)
        raise ConfigError(path, text, f"is not {kind}", repr(_nearest_value(config, path, text))) from None


def _tuple_text(text: str, item: type) -> str:
    """`prompt`, `prompt,answer`, `1,2` or a Python literal as the tuple that it means; ValueError or SyntaxError for a broken literal."""
    if any(mark in text for mark in "\"'()[]{}"):
        value = ast.literal_eval(text)
        return repr((value,) if isinstance(value, item) else value)
    return repr(tuple(item(name.strip()) for name in text.split(",") if name.strip()))


def _nearest_value(config: Config, path: str, text: str) -> Any:
    """A value of the setting's type for a text that is none: the nearest integer if it works, else the recipe's own value."""
    current = cfg.get(config, path)
    try:
        near = cfg.retyped(path, float(text))
        config_checks.check(cfg.replace(config, {path: near}))
    except ValueError:
        return current
    return near


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


# --- jax -------------------------------------------------------------------------------------------------------------------------


def start_jax(namespace: types.SimpleNamespace, config: Config | None = None) -> None:
    """Sets up jax's devices, compilation cache and, in a run of several processes, jax.distributed. Call it before jax is used.

    `--cpu_devices=N` simulates N CPU devices. Where nothing asks for a number of devices, jax finds no accelerator and the run is a
    single process, 8 are simulated, and a line on stdout says so. `config`: of what will run, if known.
    """
    set_xla_flags(os.environ, config is not None and (config.model.experts or config.model.mtp_depth) > 0)
    import jax  # not before the config is known to be right: this takes a second, and a mistake should not

    from jaxtrain import cluster

    settings: Any = jax.config  # its attributes have no declared types
    asked = "xla_force_host_platform_device_count" in os.environ["XLA_FLAGS"] or settings.jax_num_cpu_devices >= 0
    if namespace.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", namespace.cpu_devices)
    elif not asked and not cluster_environment.several_processes(namespace, os.environ):
        # This is the number of devices of jax's CPU platform alone: beside an accelerator it changes nothing.
        jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
    cluster.initialize(namespace)
    use_compilation_cache()
    if not asked and not namespace.cpu_devices and jax.process_count() == 1 and jax.default_backend() == "cpu":
        print(f"no accelerator found: simulating {jax.device_count()} CPU devices (--cpu_devices=N for another number)", flush=True)


def set_xla_flags(environment: Any, side_by_side: bool = False) -> None:
    """Gives XLA's CPU collectives time and threads, where the user does not say how much: simulated devices share a few cores, and XLA ends
    the process when a collective waits too long (40 s) for its slowest device.

    side_by_side: an op may have several collectives that do not depend on each other. One that waits holds a thread, and XLA makes as many
    threads as there are devices: where all wait, none is left for those waited for. More threads cost a tenth of a step's CPU time.
    """
    words = environment.get("XLA_FLAGS", "").split()
    names = {word.partition("=")[0] for word in words}
    for kind in ("call_warn_stuck", "call_terminate", ""):
        name = "--xla_cpu_collective_" + "_".join(filter(None, (kind, "timeout_seconds")))
        if name not in names:
            words.append(f"{name}=3000")
    environment["XLA_FLAGS"] = " ".join(words)
    if side_by_side:
        environment.setdefault("NPROC", "32")  # what XLA takes for the number of cores


def use_compilation_cache() -> None:
    """Keeps compiled programs for the next start, but not those of several CPU devices. Call it when jax has its devices.

    A program of XLA's CPU backend that comes out of the cache no longer keeps its collectives in one order (in the compiled one a
    shared resource of the thunks does): two devices may then enter two collectives in opposite order and wait for ever
    (docs/log.md, 2026-11-21).
    """
    import jax

    settings: Any = jax.config  # its attributes have no declared types
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif settings.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", compilation_cache(os.environ))


def compilation_cache(environment: Any) -> str:
    """The folder of compiled programs: $JAXTRAIN_CACHE/xla or ~/.cache/jaxtrain/xla ($JAX_COMPILATION_CACHE_DIR wins, in jax itself)."""
    base = environment.get("JAXTRAIN_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "jaxtrain")
    return os.path.join(base, "xla")
