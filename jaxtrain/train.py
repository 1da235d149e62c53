"""python -m jaxtrain.train: trains what a recipe describes; `train` is the same for Python
programs. Flags are parsed in cli.py, the training itself is in loop.py."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import threading
import types
from collections.abc import Sequence

from jaxtrain import BEGAN, cli
from jaxtrain.config import Config, ConfigError, flags, one_line, replace
from jaxtrain.config.checks import Environment, first_violation
from jaxtrain.config.errors import UsageError
from jaxtrain.config.mesh_rules import elastic_notes, filled
from jaxtrain.config.unused import unused_settings
from jaxtrain.devices import startup
from jaxtrain.devices.cluster_environment import several_processes
from jaxtrain.pipeline import op_times
from jaxtrain.pipeline.checks import RULES, check_run
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.progress import SearchProgress
from jaxtrain.run.wall_clock import Part, WallClock, imports_without_collection

DESCRIPTION = """
Trains a transformer as a recipe says, on all devices of a mesh.

usage: jaxtrain train [--config=NAME|FILE] [--config.GROUP.FIELD=VALUE …] [--workdir=DIR]
                      [--cpu_devices=N]
       jaxtrain train … --dry_run [--json]      (or python -m jaxtrain.train …)
       jaxtrain train … --replay=STEP
"""
FLAGS = (
    flags.Flag(
        "dry_run",
        False,
        "compile the step, print mesh, memory and collectives, and stop: nothing is run, read "
        "or written",
    ),
    flags.Flag("json", False, "with --dry_run: as one JSON object"),
    flags.Flag(
        "replay",
        0,
        "repeat this step of the run in --workdir and compare it with metrics.jsonl; nothing is "
        "written",
        at_least=0,
    ),
)


def main(argv: Sequence[str], began: float | None = None) -> int:
    """The exit status, one of ExitStatus.

    began: when the command began, by time.monotonic; now if not given.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until there is something to save, Ctrl-C ends the process: compilation does not listen,
        # and Python drops it in a callback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        status = _train(argv, None, WallClock(began))
    except (ConfigError, RunError) as error:
        print(one_line(f"error: {error}"), file=sys.stderr, flush=True)
        return _leave(error.status if isinstance(error, RunError) else ExitStatus.BAD_CONFIG)
    return _leave(ExitStatus.INTERRUPTED) if status is None else status


def check_flags(flags: types.SimpleNamespace, config: Config) -> None:
    """Raises UsageError for flags of this command that do not go together; where others are
    refused, also for a folder that cannot be a run's, which otherwise is tried with all that a run
    writes."""
    if flags.json and not flags.dry_run:
        rule = "--json=true is for --dry_run alone"
        raise UsageError(
            rule, {"dry_run": True}, text=f"{rule}: use --dry_run=true (or --json=false)"
        )
    if flags.replay and flags.dry_run:
        rule = "--replay and --dry_run are two things"
        raise UsageError(rule, {"replay": 0}, text=f"{rule}: use --replay=0 (or --dry_run=false)")
    if flags.replay and flags.refused:  # there is time for what takes jax
        from jaxtrain import replay

        replay.check_step(config, pathlib.Path(flags.workdir), flags.replay)
    if flags.refused and not (flags.dry_run or flags.replay):
        from jaxtrain import places

        places.check_workdir(flags.workdir)
        if not several_processes(flags, os.environ):
            places.check(config, flags.workdir)


def train(flags: Sequence[str] = (), recipe: Config | None = None) -> ExitStatus:
    """Trains in this process as the command does with these flags, for a Python program; what the
    run ended with.

    flags: as on the command line, without the command; recipe: instead of the one that --config
    names. jax.distributed may run already; otherwise it is started where flags or environment
    describe several processes, and such a run can be had once in a process. May be called in any
    thread: signals are taken in the main thread alone, and elsewhere nothing but the last step, or
    an error, ends the run. Where a run can only be ended by ending its process (it is hung, a peer
    is lost, its folder is another run's), that is done here too.

    Raises RunError, with its status, for whatever the command would end with by a line and a
    status.
    """
    try:
        status = _train(flags, recipe, WallClock())
    except ConfigError as error:
        raise cli.FlagsError(str(error)) from error
    return ExitStatus.INTERRUPTED if status is None else status


def _train(argv: Sequence[str], recipe: Config | None, clock: WallClock) -> ExitStatus | None:
    """What the run ended with; None if Ctrl-C has ended it before training began. Raises
    ConfigError or RunError."""
    config, flags = cli.parse(argv, DESCRIPTION, FLAGS, recipe, check_flags)
    if not flags.dry_run:
        streams.outlive()
    writes, several = not (flags.dry_run or flags.replay), several_processes(flags, os.environ)
    with imports_without_collection():
        from jaxtrain import places
    if writes and not several:
        places.check(config, flags.workdir)
    # there the object stands alone
    with contextlib.redirect_stdout(sys.stderr) if flags.json else contextlib.nullcontext():
        with imports_without_collection():
            startup.start_jax(flags, config)
            if unused := startup.unused_accelerator(flags):
                raise cli.FlagsError(unused)

            from jaxtrain import loop, replay
            from jaxtrain.devices import cluster
            from jaxtrain.plan.report import dry_run
        if writes and several:
            places.check_together(config, flags.workdir)
        clock.enter(Part.TABLE)
        folder = pathlib.Path(flags.workdir)
        ready = check_and_find_tables(with_planned_times(config, flags, folder), flags.recipe)
        if not ready:
            return None
        cluster.log(
            *(
                f"note: {note}"
                for note in (*elastic_notes(config, ready.config), *unused_settings(ready.config))
            )
        )
        plan = dry_run(ready.resolved, ready.setup, clock) if flags.dry_run else None
    if plan:
        cluster.log(plan.json() if flags.json else "\n".join(plan.lines()))
        return ExitStatus.FINISHED
    ready = with_measured_times(ready, flags, folder)
    if not ready:
        return None
    if flags.replay:
        return replay.replay(
            ready.resolved,
            ready.setup,
            folder,
            flags.replay,
            clock,
            unresolved=config,
            recipe=flags.recipe,
        )
    return loop.run(
        ready.resolved, ready.setup, folder, clock, unresolved=config, recipe=flags.recipe
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Ready:
    """A config that every check has passed, with its mesh known; the same resolved; and the tables
    that were found for it."""

    config: Config
    resolved: Config
    setup: Setup


def check_and_find_tables(config: Config, recipe: Config) -> Ready | None:
    """The config, checked, and its tables; None if Ctrl-C has stopped the search. Shows how far the
    search is where that lasts.

    Raises ConfigError as `check_run` and `make_setup` do.
    """
    import jax

    from jaxtrain.devices import cluster

    before = (
        signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread()
        else None
    )
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SearchProgress(
            "searching for a table", shown=cluster.is_main(), log=sys.stdout
        ) as progress:
            checked = check_run(config, jax.device_count(), jax.default_backend(), recipe, progress)
            resolved = checked.resolve()
            return Ready(checked, resolved, make_setup(resolved, progress))
    except KeyboardInterrupt:
        if cluster.is_main():
            print("stopped before training began: nothing was written", file=sys.stderr, flush=True)
        return None
    finally:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGINT, before)


def with_planned_times(
    config: Config, flags: types.SimpleNamespace, folder: pathlib.Path
) -> Config:
    """The config with the op times that are planned for its devices, where it gives none and does
    not want them measured: those in the run's folder, or else new ones. A config that breaks a rule
    stays as it is: `check_and_find_tables` says which. Raises OpTimesError."""
    import jax

    from jaxtrain.devices import cluster
    from jaxtrain.training.op_times import planned_times, stored_times

    environment = Environment(jax.device_count(), jax.default_backend(), flags.recipe, rules=RULES)
    if (
        config.pipeline.measure_times
        or config.pipeline.times
        or config.mesh.stage == 1
        or first_violation(config, environment)
    ):
        return config
    meshed = filled(config, jax.device_count())
    if not op_times.needed(meshed):
        return config
    resolved = meshed.resolve()
    times = None if flags.dry_run else stored_times(resolved, folder)
    if times:
        cluster.log(op_times.describe(times))
    return replace(config, {"pipeline.times": planned_times(resolved) if times is None else times})


def with_measured_times(
    ready: Ready, flags: types.SimpleNamespace, folder: pathlib.Path
) -> Ready | None:
    """The same with the run's op times and the tables for them, where the config wants them
    measured: those in the run's folder, or else measured now, but for a replay, which writes
    nothing. None if Ctrl-C has stopped the search.

    Raises OpTimesError, and ConfigError as `check_and_find_tables`.
    """
    from jaxtrain.devices import cluster
    from jaxtrain.training.op_times import measured_times, stored_times

    if not (ready.resolved.pipeline.measure_times and op_times.needed(ready.resolved)):
        return ready
    times = stored_times(ready.resolved, folder)
    if times is None and not flags.replay:
        times = measured_times(ready.resolved, ready.setup)
    if times is not None:
        cluster.log(op_times.describe(times))
    return (
        check_and_find_tables(replace(ready.config, {"pipeline.times": times}), flags.recipe)
        if times
        else ready
    )


def _leave(status: int) -> int:
    """The exit status of a process that stops before its end."""
    jax = sys.modules.get("jax")
    if jax and jax.distributed.is_initialized():
        # this error may be this process's alone, and jax's shutdown would wait minutes for the
        # others
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(streams.run(lambda argv: main(argv, BEGAN), sys.argv[1:]))
