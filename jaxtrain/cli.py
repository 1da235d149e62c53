"""What the commands share: flags → Config, and one line for whatever is wrong with them.

parse(argv, …)          recipe → Config → flags over it → checks     no jax, nothing written; FlagsError when something is wrong
start_jax(namespace)    devices, compilation cache, other processes  the first thing after parse (devices/startup.py)
"""

import dataclasses
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, addresses, checks
from jaxtrain.config.flags import SHARED_FLAGS, Flag, UsageError, apply, read_flags
from jaxtrain.config.recipes import RecipeError, find_recipe, load_recipe
from jaxtrain.config.surroundings import Surroundings
from jaxtrain.devices import cluster_environment
from jaxtrain.devices.cluster_environment import SIMULATED_DEVICES
from jaxtrain.devices.startup import start_jax
from jaxtrain.run.exit_status import ExitStatus, RunError


class FlagsError(RunError):
    """Flags that cannot work, or a recipe that cannot; the text is one line."""

    status = ExitStatus.BAD_CONFIG

    def __init__(self, text: str):
        super().__init__(cfg.one_line(text))


def parse(
    argv: Sequence[str], description: str, extra_flags: Sequence[Flag] = (), recipe: Config | None = None
) -> tuple[Config, types.SimpleNamespace]:
    """The checked config (not resolved) and the values of the other flags, by name, of a command that takes a recipe.

    argv: without the program's name; recipe: instead of the one that --config names. The namespace's `config` is the recipe's path,
    `recipe` its config before the flags, and `workdir` is filled in. `--help` ends the process with status 0. Raises FlagsError for
    whatever is wrong, whose flags put everything right that is known to be wrong by then; ClusterError or DevicesError where jax has to be
    asked for its devices, as `start_jax`.
    """
    reading = _read(argv, description, (*SHARED_FLAGS, *extra_flags), recipe)
    namespace, errors, config, recipe = reading.namespace, reading.errors, reading.config, reading.recipe
    refused = _refusal(namespace, config, recipe)
    if errors:
        changes = {error.setting: cfg.get(config, error.setting) for error in errors if error.setting}
        raise FlagsError(_all_together(errors, changes | (dict(refused.fixes[0]) if refused and refused.fixes else {})))
    if refused:
        raise FlagsError(str(refused))
    namespace.config, namespace.recipe = str(reading.path), recipe
    namespace.workdir = namespace.workdir or os.path.join("runs", reading.path.stem)
    return config, namespace


def parse_unchecked(argv: Sequence[str], description: str, flags: Sequence[Flag]) -> tuple[Config, Config, types.SimpleNamespace]:
    """(config, recipe before the flags, values of the flags) of a command that changes the config before it is checked.

    flags: all of the command's, with `config`. Asks nobody for devices. Raises FlagsError for flags that cannot be understood.
    """
    reading = _read(argv, description, flags, None)
    if reading.errors:
        changes = {error.setting: cfg.get(reading.config, error.setting) for error in reading.errors if error.setting}
        raise FlagsError(_all_together(reading.errors, changes))
    return reading.config, reading.recipe, reading.namespace


@dataclasses.dataclass(frozen=True)
class _Read:
    """A command line with its recipe: the config is the recipe's with the flags over it, and nothing of it is checked."""

    namespace: types.SimpleNamespace
    errors: list[UsageError]
    path: pathlib.Path
    recipe: Config
    config: Config


def _read(argv: Sequence[str], description: str, flags: Sequence[Flag], recipe: Config | None) -> _Read:
    reading = read_flags(argv, description, flags, with_config=True)
    namespace, errors = types.SimpleNamespace(**reading.values), reading.errors
    if hasattr(namespace, "coordinator"):
        _put_right(namespace, errors, check_cluster)
    path, recipe = (pathlib.Path("recipe"), recipe) if recipe else _recipe(namespace, errors)
    return _Read(namespace, errors, path, recipe, apply(recipe, reading.overrides))


def parse_flags(argv: Sequence[str], description: str, flags: Sequence[Flag]) -> types.SimpleNamespace:
    """The values of the flags of a command that takes no recipe. Errors end the process with one line and status 2, `--help` with 0."""
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
    sys.exit(ExitStatus.BAD_CONFIG)


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
            raise FlagsError(str(errors[0])) from None


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
    loaded = sys.modules.get("jax")
    started = loaded and loaded.distributed.is_initialized()  # by the program that trains, and the environment says nothing of it
    devices = None if started else cluster_environment.simulated_devices(namespace, os.environ, SIMULATED_DEVICES)
    around = Surroundings(devices, "cpu" if devices else "", recipe, files=True)
    if not devices and checks.first_broken(config, around):
        start_jax(namespace)
        import jax  # where it is known that this command ends here

        around = dataclasses.replace(around, devices=jax.device_count(), platform=jax.default_backend())
    return checks.refusal(config, around)


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
    """Raises FlagsError where the folder of a run can neither be written nor made."""
    if "://" in workdir:
        raise FlagsError(
            f"--workdir={workdir!r} is an address, not a folder: use --workdir={os.path.join('runs', os.path.basename(workdir))!r}"
        )
    if wrong := addresses.not_utf8(workdir) or addresses.not_utf8(os.path.abspath(workdir)):
        raise FlagsError(f"--workdir={workdir!r} {wrong.rule}: use {cfg.flag_text('workdir', wrong.meant[0])}")
    path = pathlib.Path(workdir)
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        use = cfg.flag_text("workdir", str(nearest.with_name(nearest.name + "_run")))
        raise FlagsError(f"--workdir={workdir!r}: {str(nearest)!r} is not a folder: use {use}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise FlagsError(
            f"--workdir={workdir!r}: {str(nearest)!r} may not be written: use {cfg.flag_text('workdir', os.path.join('runs', path.name))}"
        )
