"""What the commands share: flags → Config, one line for whatever is wrong with them, `--help`, and the start of jax.

    parse(argv, …)          recipe → Config → flags over it → checks     no jax, nothing written; status 2 when something is wrong
    start_jax(namespace)    devices, compilation cache, other processes  the first thing after parse

`--config.group.field=value` goes through ml_collections' config_flags. They cannot override a frozen dataclass, and they answer a bad
path, field or type with a traceback or with status 0: so each override's name is looked at here first, then its text is read by a
ConfigDict of that field alone. What is wrong is collected, not raised, for the error's last words are flags that put everything right.
"""

import ast
import dataclasses
import difflib
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
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
    """Flags that cannot be understood; the text is one line, what is wrong and what to use instead.

    fixes: command flags and their values to use; others: further values of the first of them; setting: the path of a config's setting
    that an unknown flag was meant for, if it was; advice: where nothing of these is.
    """

    def __init__(self, rule: str, fixes: Mapping[str, Any] | None = None, others: Sequence[Any] = (), setting: str = "", advice: str = ""):
        self.rule, self.fixes, self.others, self.setting, self.advice = rule, dict(fixes or {}), tuple(others), setting, advice
        flags = " ".join(cfg.flag_text(name, value) for name, value in self.fixes.items())
        more = f" (or {', '.join(map(cfg.value_text, others))})" if others else ""
        use = flags + more or advice
        super().__init__(rule + (f": use {use}" if use else ""))


@dataclasses.dataclass
class Reading:
    """A command line: flag → value, (setting's path, text) in order, and what is wrong; there the fixes are taken for what was meant."""

    values: dict[str, Any]
    overrides: list[tuple[str, str]]
    errors: list[UsageError]


def parse(argv: Sequence[str], description: str, extra_flags: Sequence[Flag] = ()) -> tuple[Config, types.SimpleNamespace]:
    """The checked config (not resolved) and the values of the other flags, by name, of a command that takes a recipe.

    argv: without the program's name. The namespace's `config` is the recipe's path, `recipe` its config before the flags, and `workdir`
    is filled in. Whatever is wrong ends the process with one line on stderr and status 2, whose flags put everything right that is known
    to be wrong by then; `--help` ends it with status 0.
    """
    reading = read_flags(argv, description, (*SHARED_FLAGS, *extra_flags), with_config=True)
    namespace, errors = types.SimpleNamespace(**reading.values), reading.errors
    _put_right(namespace, errors, check_cluster)
    path, recipe = _recipe(namespace, errors)
    config = apply(recipe, reading.overrides)
    refused = _refusal(namespace, config, recipe)
    if errors:
        changes = {error.setting: cfg.get(config, error.setting) for error in errors if error.setting}
        fail(_all_together(errors, changes | (dict(refused.fixes[0]) if refused and refused.fixes else {})))
    if refused:
        fail(str(refused))
    namespace.config, namespace.recipe = str(path), recipe
    namespace.workdir = namespace.workdir or os.path.join("runs", path.stem)
    return config, namespace


def parse_flags(argv: Sequence[str], description: str, flags: Sequence[Flag]) -> types.SimpleNamespace:
    """The values of the flags of a command that takes no recipe. Errors and `--help` as in `parse`."""
    reading = read_flags(argv, description, flags, with_config=False)
    namespace = types.SimpleNamespace(**reading.values)
    if hasattr(namespace, "coordinator"):
        _put_right(namespace, reading.errors, check_cluster)
    if reading.errors:
        fail(_all_together(reading.errors, {}))
    return namespace


def fail(message: str) -> NoReturn:
    """Ends the process with one line on stderr and status 2."""
    print(cfg.one_line(f"error: {message}"), file=sys.stderr, flush=True)
    jax = sys.modules.get("jax")
    if jax and jax.distributed.is_initialized():
        os._exit(2)  # jax's shutdown would wait minutes for the other processes
    sys.exit(2)


def _put_right(namespace: types.SimpleNamespace, errors: list[UsageError], check: Callable[[types.SimpleNamespace], None]) -> None:
    """Collects a check's errors, each with its fixes in the namespace from then on."""
    for _ in range(8):
        try:
            return check(namespace)
        except UsageError as error:
            errors.append(error)
            vars(namespace).update(error.fixes)


def _recipe(namespace: types.SimpleNamespace, errors: list[UsageError]) -> tuple[pathlib.Path, Config]:
    """The recipe's file and config; where it cannot be had, one that can, and the error."""
    try:
        path = find_recipe(namespace.config)
        return path, load_recipe(path)
    except RecipeError as error:
        fixes = {"config": error.nearest} if error.nearest else {}
        errors.append(UsageError(error.rule, fixes, error.others, advice=error.advice))
        try:
            path = find_recipe(error.nearest)
            return path, load_recipe(path)
        except RecipeError:  # there are none, or the nearest does not work either
            fail(str(errors[0]))


def _all_together(errors: Sequence[UsageError], changes: Mapping[str, Any]) -> str:
    """The first error, with the flags that put right all of them and the config."""
    flags = {name: value for error in errors for name, value in error.fixes.items()} | {f"config.{p}": v for p, v in changes.items()}
    if len(errors) == 1 and len(flags) <= 1 and not errors[0].setting:
        return str(errors[0])
    use = " ".join(cfg.flag_text(name, value) for name, value in flags.items())
    return f"{errors[0].rule}: use {use}" if use else str(errors[0])


def _refusal(namespace: types.SimpleNamespace, config: Config, recipe: Config) -> ConfigError | None:
    """What is wrong with a config, with the number of devices taken into account: jax is asked for it only where something is wrong, and
    it may find other devices than simulated ones."""
    devices = cluster_environment.simulated_devices(namespace, os.environ, SIMULATED_DEVICES)
    around = config_checks.Surroundings(devices, "cpu" if devices else "", recipe, files=True)
    if not devices and config_checks.first_broken(config, around):
        start_jax(namespace)
        import jax  # where it is known that this command ends here

        around = dataclasses.replace(around, devices=jax.device_count(), platform=jax.default_backend())
    return config_checks.refusal(config, around)


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
            own = texts if before in known and before != "config" and isinstance(known[before].default, str) else {}
            reading.errors.append(_stray(token, before, own, reading, with_config))
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


def check_cluster(namespace: types.SimpleNamespace) -> None:
    """UsageError where the flags of a run of several processes do not fit together."""
    host, _, port = namespace.coordinator.rpartition(":")
    address = f"{host or 'localhost'}:29500"
    if namespace.coordinator and not (host and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"--coordinator={namespace.coordinator!r} is not host:port", {"coordinator": address})
    if namespace.processes > 1 and not namespace.coordinator:
        rule = f"--processes={namespace.processes} needs --coordinator=HOST:PORT (one machine: python -m jaxtrain.launch)"
        raise UsageError(rule, {"coordinator": address})
    if namespace.process_id >= namespace.processes:
        rule = f"--process_id={namespace.process_id} is not below --processes={namespace.processes}"
        last = namespace.processes - 1
        raise UsageError(rule, {"process_id": last}, range(max(0, last - 3), last))


def check_workdir(workdir: str) -> None:
    """Ends the process with one line and status 2 where the folder of a run can neither be written nor made."""
    if "://" in workdir:
        fail(f"--workdir={workdir!r} is an address, not a folder: use --workdir={os.path.join('runs', os.path.basename(workdir))!r}")
    path = pathlib.Path(workdir)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        use = cfg.flag_text("workdir", str(there.with_name(there.name + "_run")))
        fail(f"--workdir={workdir!r}: {str(there)!r} is not a folder: use {use}")
    if not os.access(there, os.W_OK | os.X_OK):
        fail(f"--workdir={workdir!r}: {str(there)!r} may not be written: use {cfg.flag_text('workdir', os.path.join('runs', path.name))}")


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
