"""python -m jaxtrain.train: trains what a recipe describes. Flags are parsed in cli.py, the training itself is in loop.py."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys

from jaxtrain import BEGAN, cli
from jaxtrain.config import Config, ConfigError, flags, one_line
from jaxtrain.config.checks import check_run
from jaxtrain.config.pipeline_setup import Setup, make_setup
from jaxtrain.config.unused import unused_settings
from jaxtrain.devices import startup
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.goodput import Part, WallClock
from jaxtrain.run.search_progress import SearchProgress
from jaxtrain.run.start_up import imports_without_collection

DESCRIPTION = """
Trains a transformer as a recipe says, on all devices of a mesh.

usage: jaxtrain train [--config=NAME|FILE] [--config.GROUP.FIELD=VALUE …] [--workdir=DIR] [--cpu_devices=N]
       jaxtrain train … --dry_run [--json]      (or python -m jaxtrain.train …)
       jaxtrain train … --replay=STEP
"""
FLAGS = (
    flags.Flag("dry_run", False, "compile the step, print mesh, memory and collectives, and stop: nothing is run, read or written"),
    flags.Flag("json", False, "with --dry_run: as one JSON object"),
    flags.Flag("replay", 0, "do this step of the run in --workdir again and compare it with metrics.jsonl; writes nothing", at_least=0),
)


def main(argv: list[str], began: float | None = None) -> int:
    """The exit status, one of ExitStatus.

    began: when the command began, by time.monotonic; now if not given.
    """
    clock = WallClock(began)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until there is something to save, Ctrl-C ends the process: compilation does not listen, and Python drops it in a callback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    config, flags = cli.parse(argv, DESCRIPTION, FLAGS)
    if flags.json and not flags.dry_run:
        cli.fail("--json=true is for --dry_run alone: use --dry_run=true (or --json=false)")
    if flags.replay and flags.dry_run:
        cli.fail("--replay and --dry_run are two things: use --dry_run=false (or --replay=0)")
    if not (flags.dry_run or flags.replay):
        cli.check_workdir(flags.workdir)
    with contextlib.redirect_stdout(sys.stderr) if flags.json else contextlib.nullcontext():
        with imports_without_collection():
            startup.start_jax(flags, config)
            if unused := startup.unused_accelerator(flags):
                cli.fail(unused)

            from jaxtrain import loop, replay
            from jaxtrain.devices import cluster
            from jaxtrain.plan.report import dry_run
    clock.enter(Part.TABLE)

    try:
        ready = check_and_find_tables(config, flags.recipe)
        if not ready:
            return _leave(ExitStatus.INTERRUPTED)
        for note in unused_settings(ready.config) if cluster.is_main() else ():
            print(f"note: {note}", file=sys.stderr, flush=True)
        if flags.dry_run:
            plan = dry_run(ready.resolved, ready.setup, clock)
            cluster.say(plan.json() if flags.json else "\n".join(plan.lines()))
            return ExitStatus.FINISHED
        folder = pathlib.Path(flags.workdir)
        if flags.replay:
            return replay.replay(ready.resolved, ready.setup, folder, flags.replay, clock, unresolved=config, recipe=flags.recipe)
        return loop.run(ready.resolved, ready.setup, folder, clock, unresolved=config, recipe=flags.recipe)
    except (ConfigError, RunError) as error:
        print(one_line(f"error: {error}"), file=sys.stderr, flush=True)
        return _leave(error.status if isinstance(error, RunError) else ExitStatus.BAD_CONFIG)


@dataclasses.dataclass(frozen=True, eq=False)
class Ready:
    """A config that every check has passed, with its mesh known; the same resolved; and the tables that were found for it."""

    config: Config
    resolved: Config
    setup: Setup


def check_and_find_tables(config: Config, recipe: Config) -> Ready | None:
    """The config, checked, and its tables; None if Ctrl-C has stopped the search. Shows how far the search is where that lasts.

    Raises ConfigError as `check_run` and `make_setup` do.
    """
    import jax

    from jaxtrain.devices import cluster

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SearchProgress("searching for a table", shown=cluster.is_main()) as progress:
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


def _leave(status: int) -> int:
    """The exit status of a process that stops before its end."""
    import jax

    if jax.process_count() > 1:
        os._exit(status)  # this error may be this process's alone, and jax's shutdown would wait minutes for the others
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], BEGAN))
