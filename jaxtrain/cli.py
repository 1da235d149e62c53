"""Command lines: what all commands do with their arguments before they do anything else.

parse(argv, …)          recipe → Config → flags override it → checks. It imports no jax and
                        writes nothing. FlagsError has one line for all that is wrong
start_jax(namespace)    devices, compilation cache, other processes (devices/startup.py). It is
                        called right after parse
"""

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError
from jaxtrain.config.errors import PLACEHOLDER, UsageError, unfilled
from jaxtrain.config.flags import SHARED_FLAGS, Flag, Reading, apply, read_flags, settled
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.data.stores import hub
from jaxtrain.devices import cluster_environment
from jaxtrain.devices.cluster_environment import SIMULATED_DEVICES
from jaxtrain.devices.startup import has_devices, start_jax
from jaxtrain.hf.source_files import CONFIG, SOURCE, tokenizer_of
from jaxtrain.pipeline.run_checks import RULES, RULES_WITH_TABLES
from jaxtrain.run import out_of_memory
from jaxtrain.run.exit_status import ExitStatus, RunError

T = TypeVar("T")
READER_S = 10.0  # seconds to wait until a program reads a pipe that a flag names


class FlagsError(RunError):
    """Raised for flags or a recipe that cannot work; the text is one line."""

    status = ExitStatus.BAD_CONFIG

    def __init__(self, text: str):
        super().__init__(cfg.one_line(text))


@contextlib.contextmanager
def refused_settings() -> Iterator[None]:
    """A context in which a setting or a flag that cannot work is an error of a run, with its
    status: FlagsError in place of ConfigError and UsageError."""
    try:
        yield
    except (ConfigError, UsageError) as error:
        raise FlagsError(str(error)) from error


@contextlib.contextmanager
def run_errors() -> Iterator[None]:
    """A context in which settings that cannot work, and memory that is not there, are a
    RunError."""
    with refused_settings(), out_of_memory.named():
        yield


def command(
    main: Callable[[Sequence[str]], int | None],
) -> Callable[[Sequence[str]], int | None]:
    """The main function of a command, whose errors are `reported` and end it with their status."""

    @functools.wraps(main)
    def main_or_status(argv: Sequence[str]) -> int | None:
        result = reported(lambda: main(argv))
        return result.status if isinstance(result, RunError) else result

    return main_or_status


def reported(command: Callable[[], T]) -> T | RunError:
    """The result of a command; or the error that has ended it, as in `run_errors`, after a line on
    standard error."""
    try:
        with run_errors():
            return command()
    except RunError as error:
        print(cfg.one_line(f"error: {error}"), file=sys.stderr, flush=True)
        return error


def parse(
    argv: Sequence[str],
    description: str,
    extra_flags: Sequence[Flag] = (),
    recipe: Config | None = None,
    check: Callable[[types.SimpleNamespace, Config], object] = lambda namespace, config: None,
    uses_devices: bool = True,
) -> tuple[Config, types.SimpleNamespace]:
    """Returns (the checked config; the values of the other flags as a namespace) for
    a command that takes a recipe.

    argv: the arguments without the program's name
    recipe: the config to override, instead of the one that --config names
    check: raises UsageError for flags that do not fit each other
    uses_devices: the config must fit the devices of this machine

    The namespace's `config` is the recipe's path, `recipe` its config before the flags (of a
    published model where the run starts from one), `workdir` is filled in, and `notes` are lines
    about that model. `--help` ends the process with status 0.

    Raises FlagsError, which suggests flags that fix all errors known by then; HfError for a
    published model that cannot be honoured; ClusterError or
    DevicesError like `start_jax`, if a wrong config makes it ask jax for the devices.
    """

    def complete(
        namespace: types.SimpleNamespace, config: Config, before: Config
    ) -> tuple[Config, types.SimpleNamespace]:
        path = pathlib.Path("recipe") if recipe else find_recipe(namespace.config)
        namespace.workdir = namespace.workdir or default_workdir(str(path))
        namespace.config, namespace.recipe = str(path), before
        if named := [
            f"--config.{path}={text}"
            for path in cfg.fields()
            if PLACEHOLDER.search(text := cfg.value_text(cfg.get(config, path)))
        ]:
            raise unfilled(named)
        if uses_devices:
            refused = _refusal(namespace, config, before)
        else:
            refused = checks.error_of(config, checks.Environment(recipe=before, rules=RULES))
        if not (refused and refused.nearest):
            check(namespace, config)  # also beside an error that no flag mends
        if refused:
            raise refused
        # last, because it may ask the hub
        return hub.with_commits(config, namespace.workdir), namespace

    return parse_unchecked(argv, description, (*SHARED_FLAGS, *extra_flags), complete, recipe)


def parse_unchecked(
    argv: Sequence[str],
    description: str,
    flags: Sequence[Flag],
    check: Callable[[types.SimpleNamespace, Config, Config], T],
    recipe: Config | None = None,
) -> T:
    """The result of check(values of the flags, config, recipe before the flags), for a command with
    a recipe. Nothing else is checked, and jax is not asked for devices.

    flags: all flags of the command, `config` included
    check: raises UsageError or ConfigError

    Raises FlagsError for flags that are not understood or that `check` refuses, and HfError as
    `parse`.
    """

    def read(reading: Reading) -> T:
        before, namespace = recipe, reading.namespace
        workdir = getattr(namespace, "workdir", "") or default_workdir(namespace.config)
        if before is None:
            before = load_recipe(namespace.config)
            tokenizer = tokenizer_of(before.data.tokenizer, pathlib.Path(workdir))
            before = cfg.replace(before, {"data.tokenizer": tokenizer})
        config, namespace.notes = apply(before, reading.overrides), ()
        if config.train.init_from and isinstance(config.train.init_from, str):
            # Imported where it is needed: most commands start from no published model.
            from jaxtrain.hf.run_config import read_origin, started_from

            model = read_origin(config.train.init_from, workdir)
            config, before = started_from(model, before, reading.overrides)
            namespace.notes = model.notes_for(config.model, config.data)
        elif os.path.isfile(kept := os.path.join(workdir, SOURCE, CONFIG)):
            from jaxtrain.hf.run_config import notes_of_length

            namespace.notes = notes_of_length(config.data, pathlib.Path(kept))
        return check(namespace, config, before)

    return checked(read_flags(argv, description, flags, with_config=True), read, recipe)


def default_workdir(config: str) -> str:
    """The run's folder for a value of --config: that of a run's config.json continues the run."""
    path = pathlib.Path(config)
    return str(path.parent) if path.suffix == ".json" else os.path.join("runs", path.stem)


def checked_flags(
    argv: Sequence[str],
    description: str,
    flags: Sequence[Flag],
    check: Callable[[types.SimpleNamespace], T],
    words: bool = False,
) -> T:
    """The result of `check` on the flags' values, for a command that takes no recipe. `--help`
    ends the process with status 0. Raises FlagsError.

    check: raises UsageError for flags that do not fit each other
    words: the command takes words that belong to no flag
    """
    return checked(
        read_flags(argv, description, flags, with_config=False, with_words=words),
        lambda reading: check(reading.namespace),
    )


def checked(reading: Reading, check: Callable[[Reading], T], recipe: Config | None = None) -> T:
    """The result of `flags.settled`, which also checks the flags of a run of several processes.

    A RunError, which no flag fixes, is reported with the other errors if there are any, else
    raised. Raises FlagsError.
    """

    def passes(reading: Reading) -> T:
        try:
            if "coordinator" in reading.values:
                check_cluster(reading.namespace)
                cluster_environment.job(reading.namespace, os.environ)
            return check(reading)
        except RunError as error:
            if not reading.errors:
                raise
            raise UsageError(str(error)) from None

    try:
        return settled(reading, passes, recipe)
    except UsageError as error:
        raise FlagsError(str(error)) from None


def _refusal(
    namespace: types.SimpleNamespace, config: Config, recipe: Config
) -> ConfigError | None:
    """The error of a config on the devices of this command; None if it works. jax is asked for the
    devices only if something is wrong and they are not simulated."""
    loaded: Any = sys.modules.get("jax")
    # A program that trains may have started jax, which the environment does not say.
    if has_devices() and not namespace.cpu_devices:
        devices, platform = loaded.device_count(), loaded.default_backend()
    else:
        started = loaded and loaded.distributed.is_initialized()
        simulated = cluster_environment.simulated_devices(namespace, os.environ, SIMULATED_DEVICES)
        devices = None if started else simulated
        platform = "cpu" if devices else ""
    environment = checks.Environment(devices, platform, recipe, rules=RULES_WITH_TABLES)
    if checks.first_violation(config, dataclasses.replace(environment, rules=RULES)) is None:
        return None
    if not devices:
        start_jax(namespace, config)
        import jax  # slow, but the command ends here in any case

        environment = dataclasses.replace(
            environment, devices=jax.device_count(), platform=jax.default_backend()
        )
    # What a run resumes from decides what may be suggested. Imported here: few runs come this far.
    from jaxtrain.checkpoint.steps import TO_TRAIN, choose

    with contextlib.suppress(OSError, ValueError, RunError):  # it is said where it is read
        folder = config.checkpoint.directory or os.path.join(namespace.workdir, "checkpoints")
        # a store is not asked before it has to be
        if "://" not in folder and (resumed := choose(os.path.expanduser(folder), TO_TRAIN)).step:
            environment = dataclasses.replace(
                environment,
                checkpoint=cfg.replace(
                    resumed.meta.stored_config(),
                    {"data.tokenizer": config.data.tokenizer},  # the checkpoint's may have moved
                ).to_store(),
            )
    return checks.error_of(config, environment)


def check_cluster(namespace: types.SimpleNamespace) -> None:
    """Raises UsageError if the flags of a run of several processes do not fit each other."""
    host, _, port = namespace.coordinator.rpartition(":")
    address = f"{'localhost' if '/' in namespace.coordinator else host or 'localhost'}:29500"
    if namespace.coordinator and not (host and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(
            f"--coordinator={namespace.coordinator!r} is not host:port", {"coordinator": address}
        )
    if namespace.processes > 1 and not namespace.coordinator:
        raise UsageError(
            f"--processes={namespace.processes} needs --coordinator=HOST:PORT (on one machine: "
            "python -m jaxtrain.launch)",
            {"coordinator": address},
        )
    if namespace.process_id >= namespace.processes:
        rule = f"--process_id={namespace.process_id} is not below --processes={namespace.processes}"
        last = namespace.processes - 1
        raise UsageError(rule, {"process_id": last}, range(max(0, last - 3), last))


def check_output(flag: str, name: str, otherwise: str) -> None:
    """Raises UsageError if a file that a flag names cannot be opened for writing. An empty name is
    allowed, and so is a pipe or a device.

    otherwise: the file name to suggest if the flag's cannot be one
    """
    if not name or (os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name)):
        return
    path, new = pathlib.Path(name), not os.path.lexists(name)
    try:
        open(path, "ab").close()
        if new:
            path.unlink()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"--{flag}={cfg.shown(name)} cannot be written ({why})",
            {flag: _writable(path, otherwise)},
        ) from None


def write_output(name: str, content: bytes) -> None:
    """Writes a file that a flag names, completely or not at all. A device, a pipe, and a file in a
    folder without write permission are written directly. Raises FlagsError if the disk is full or
    nobody reads the pipe."""
    try:
        _write(pathlib.Path(name), content)
    except OSError as error:
        why = "nobody reads it" if error.errno == errno.ENXIO else error.strerror
        raise FlagsError(
            f"{name!r} cannot be written ({why}): name a file in a folder of your own, on a disk "
            "that is not full"
        ) from None


def _write(path: pathlib.Path, content: bytes) -> None:
    if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
        with open(_opened(path), "wb") as file:
            os.set_blocking(file.fileno(), True)
            file.write(content)
        return
    path = path.resolve()  # a link is not replaced by a file
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _opened(path: pathlib.Path) -> int:
    """The open descriptor of a device or a pipe. Raises OSError for a pipe that nothing has opened
    for reading within READER_S seconds."""
    end = time.monotonic() + READER_S
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > end:
                raise
        time.sleep(0.05)


def _writable(path: pathlib.Path, otherwise: str) -> str:
    """The name of a file that does not exist and can be written: the path's own name or
    `otherwise`, in this folder, the home folder or that of temporary files."""
    suffix = pathlib.Path(otherwise).suffix
    near = (
        path.with_suffix(suffix).name
        if path.name.isprintable() and 0 < len(path.name) < 100
        else otherwise
    )
    folders = map(pathlib.Path, (".", os.path.expanduser("~"), tempfile.gettempdir()))
    files = (
        str(folder / name)
        for folder in folders
        if os.access(folder, os.W_OK)
        for name in (near, otherwise)
    )
    return next((file for file in files if not os.path.lexists(file)), otherwise)
