"""python -m jaxtrain.train: trains what a recipe describes. Flags are parsed in cli.py, the training itself is in loop.py."""

import contextlib
import os
import signal
import sys

from jaxtrain import cli
from jaxtrain.config import Config, ConfigError
from jaxtrain.config_checks import check_devices
from jaxtrain.pipeline.progress import Progress
from jaxtrain.pipeline.setup import make_setup

STOPPED = 128 + signal.SIGINT  # what shells say of a process that Ctrl-C ends
DESCRIPTION = """
Trains a transformer as a recipe says, on all devices of a mesh.

usage: python -m jaxtrain.train [--config=configs/NAME.py] [--config.GROUP.FIELD=VALUE …] [--workdir=DIR] [--cpu_devices=N]
       … --dry_run [--json]
"""
FLAGS = (
    cli.Flag("dry_run", False, "compile the step, print mesh, memory and collectives, and stop: nothing is run, read or written"),
    cli.Flag("json", False, "with --dry_run: as one JSON object"),
)


def main(argv: list[str]) -> int:
    """The exit status: 0, also after SIGTERM or Ctrl-C (the step is saved); 1 for a loss that is not finite; 2 if the flags, the config
    or the data cannot work; 130 for Ctrl-C while a table is searched for."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until there is something to save, Ctrl-C ends the process: compilation does not listen, and Python drops it in a callback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    config, flags = cli.parse(argv, DESCRIPTION, FLAGS)
    if flags.json and not flags.dry_run:
        cli.fail("--json=true is for --dry_run alone: use --dry_run --json")
    if not flags.dry_run:
        cli.check_workdir(flags.workdir)
    with contextlib.redirect_stdout(sys.stderr) if flags.json else contextlib.nullcontext():
        cli.start_jax(flags, config)
    import jax  # after the flags are known to be right

    from jaxtrain import cluster, loop
    from jaxtrain.checkpoint.layout import CheckpointError
    from jaxtrain.data.tokens import DataError
    from jaxtrain.plan.report import dry_run

    try:
        config = check_devices(config, jax.device_count(), jax.default_backend())
        if not find_tables(config.resolve()):
            return _leave(STOPPED)
        if flags.dry_run:
            made = dry_run(config.resolve())
            if cluster.is_main():
                print(made.json() if flags.json else "\n".join(made.lines()), flush=True)
        else:
            loop.run(config.resolve(), flags.workdir)
    except (ConfigError, DataError, CheckpointError, loop.LossError) as error:
        print(" ".join(f"error: {error}".split()), file=sys.stderr, flush=True)
        return _leave(1 if isinstance(error, loop.LossError) else 2)
    return 0


def find_tables(config: Config) -> bool:
    """Finds the tables of a resolved config, which are then remembered, and shows how far it is where that lasts; False if Ctrl-C stopped
    it. Raises ConfigError as `make_setup` does."""
    from jaxtrain import cluster

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Progress("searching for a table", shown=cluster.is_main()) as progress:
            make_setup(config, progress)
    except KeyboardInterrupt:
        if cluster.is_main():
            print("stopped before training began: nothing was written", file=sys.stderr, flush=True)
        return False
    finally:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGINT, before)
    return True


def _leave(status: int) -> int:
    """The exit status of a process that stops before its end."""
    import jax

    if jax.process_count() > 1:
        os._exit(status)  # this error may be this process's alone, and jax's shutdown would wait minutes for the others
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
