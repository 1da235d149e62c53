"""The command `train`: trains a recipe. `parse` and `run` are its two halves, of which the function
`jaxtrain.train` is made, too (api.py). cli.py parses the flags, loop.py has the training loop."""

import contextlib
import functools
import json
import os
import pathlib
import signal
import sys
import types
from collections.abc import Sequence

from jaxtrain import cli
from jaxtrain.config import Config, UsageError, flags
from jaxtrain.config.rules.mesh_rules import elastic_notes
from jaxtrain.config.rules.unused import unused_settings
from jaxtrain.devices import nccl, startup
from jaxtrain.devices.cluster_environment import job, several_processes
from jaxtrain.pipeline.run_checks import default_corpus_notes
from jaxtrain.run import out_of_memory, peers, streams
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.wall_clock import Phase, WallClock, imports_without_collection

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
    flags.Flag("old_nccl", False, "train on ARM with an NCCL below 2.29.3, which can hang"),
)


def main(argv: Sequence[str], began: float | None = None) -> int:
    """The exit status, one of ExitStatus.

    began: when the command began, by time.monotonic; now if not given.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until there is something to save, Ctrl-C ends the process at once: Python would not see it
        # during compilation, and drops it in a callback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    ended = cli.reported(lambda: run(*parse(argv), WallClock(began)))
    if isinstance(ended, RunError):
        if "jaxtrain.devices.cluster" not in sys.modules:  # the others wait for this process
            with contextlib.suppress(RunError):
                reading = flags.read_flags(argv, "", flags.CLUSTER_FLAGS, with_config=False)
                peers.meet(**job(reading.namespace, os.environ), refusal=str(ended))
        return _leave(ended.status)
    return _leave(ExitStatus.INTERRUPTED) if ended is None else ended


def check_flags(flags: types.SimpleNamespace, config: Config) -> None:
    """Raises UsageError for flags of this command that contradict each other. If other flags are
    refused, it is raised for a folder that cannot be a run's too; otherwise `run` checks that
    folder with all that a run writes."""
    if flags.json and not flags.dry_run:
        raise UsageError(
            "--json=true is for --dry_run alone", {"dry_run": True}, advice="(or --json=false)"
        )
    if flags.replay and flags.dry_run:
        raise UsageError(
            "--replay and --dry_run are two things", {"replay": 0}, advice="(or --dry_run=false)"
        )
    if flags.replay and flags.refused:  # there is time for what takes jax
        from jaxtrain import replay

        replay.check_step(config.checkpoint, pathlib.Path(flags.workdir), flags.replay)
    if flags.refused and not (flags.dry_run or flags.replay):
        from jaxtrain import places

        places.check_workdir(flags.workdir)
        if not several_processes(flags, os.environ):
            places.check(config, flags.workdir)


def parse(
    argv: Sequence[str], recipe: Config | None = None
) -> tuple[Config, types.SimpleNamespace]:
    """The config and the other flags' values, as of `cli.parse`. recipe: in place of the one that
    --config names"""
    return cli.parse(argv, DESCRIPTION, FLAGS, recipe, check_flags)


def run(config: Config, flags: types.SimpleNamespace, clock: WallClock) -> ExitStatus | None:
    """Starts jax, and trains, compiles or replays as the flags say. The run's status; None if
    Ctrl-C has ended it before training began. Raises ConfigError or RunError."""
    if not flags.dry_run:
        streams.outlive()
    writes, several = not (flags.dry_run or flags.replay), several_processes(flags, os.environ)
    with imports_without_collection():
        from jaxtrain import places
    if writes and not several:
        places.check(config, flags.workdir)
    # with --json, standard output has the JSON object only
    with contextlib.redirect_stdout(sys.stderr) if flags.json else contextlib.nullcontext():
        with imports_without_collection():
            startup.start_jax(flags, config)
            if unused := startup.unused_accelerator(flags):
                raise cli.FlagsError(unused)

            import jax

            from jaxtrain import loop, replay
            from jaxtrain.devices import cluster
            from jaxtrain.phases import prepare, start_lines
            from jaxtrain.planner.for_training import dry_run, fitting
        gpus = jax.device_count() if jax.default_backend() == "gpu" else 0
        if gpus > 1 and not flags.dry_run:  # before the first collective
            cluster.log(*nccl.describe(nccl.version(), gpus, jax.process_count(), flags.old_nccl))
        if writes and jax.process_count() > 1:
            places.check_together(config, flags.workdir)
        clock.enter(Phase.TABLE)
        folder = pathlib.Path(flags.workdir)
        checked = prepare.check_on_devices(config, flags.recipe)
        notes = (
            *flags.notes,
            *elastic_notes(config, checked.on_mesh),
            *unused_settings(checked.on_mesh, checked.environment.platform),
            *default_corpus_notes(config),
        )
        cluster.log(*(f"note: {note}" for note in notes))
        with out_of_memory.named(functools.partial(fitting, config, checked.environment)):
            prepared = prepare.prepare(
                checked, folder, reads_times=not flags.dry_run, measures_times=writes
            )
            if not prepared:
                return None
            if flags.replay:
                return replay.replay(prepared, flags.replay, clock)
            if not flags.dry_run:
                return loop.run(prepared, clock)
            lines, record = dry_run(prepared, clock, start_lines.before_a_dry_run)
    cluster.log(json.dumps(record) if flags.json else "\n".join(lines))
    return ExitStatus.FINISHED


def _leave(status: int) -> int:
    """Returns the exit status, or ends one of several processes with it."""
    jax = sys.modules.get("jax")
    if jax and jax.distributed.is_initialized():
        # only this process may have the error, and jax's shutdown would wait minutes for the others
        os._exit(status)
    return status
