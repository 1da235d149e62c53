"""The last steps before a run begins: the check of its config on the devices, its op times, and the
tables that are made for them. Flags are checked before (train_command.py), the loop comes after
(loop.py)."""

import pathlib
import signal
import sys
import threading

import jax

from jaxtrain.config import Config, ConfigError, ResolvedConfig, replace
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment
from jaxtrain.devices import cluster
from jaxtrain.pipeline.prepared_run import CheckedRun, PreparedRun
from jaxtrain.pipeline.run_checks import RULES_WITH_TABLES, check_run
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.run.progress import SearchProgress
from jaxtrain.training import stored_op_times
from jaxtrain.training.measured_op_times import known_times, measured_times


def check_on_devices(config: Config, recipe: Config) -> CheckedRun:
    """The config, checked for all devices of the run, jax's. recipe: it before the user's changes,
    which an error's flags are relative to. Raises ConfigError as `check_run` does."""
    platform = jax.default_backend()
    environment = Environment(jax.device_count(), platform, recipe, rules=RULES_WITH_TABLES)
    return check_run(config, environment)


def prepare(
    checked: CheckedRun, folder: pathlib.Path, *, reads_times: bool, measures_times: bool
) -> PreparedRun | None:
    """The run with its op times and tables; None if Ctrl-C has stopped the search for a table.

    folder: the run's
    reads_times: op times that are stored in the folder are used
    measures_times: op times may be measured, and tables are made anew for them

    Raises OpTimesError, and ConfigError as `find_tables`.
    """
    config = checked.on_mesh.resolve()
    times = known_times(config, folder if reads_times else None)
    run = find_tables(checked, config.with_times(times or ()), folder)
    if run and times is None and measures_times:
        times = measured_times(run.config, run.setup)
        cluster.log(stored_op_times.describe(times))
        run = find_tables(checked, config.with_times(times), folder)
    return run


def find_tables(
    checked: CheckedRun, config: ResolvedConfig, folder: pathlib.Path
) -> PreparedRun | None:
    """The run with the tables of its resolved config; None if Ctrl-C has stopped the search. Shows
    the progress of a long search. Raises ConfigError as `make_setup` does."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    takes_signals = is_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if takes_signals:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SearchProgress(
            "searching for a table", shown=cluster.is_main(), log=sys.stdout
        ) as progress:
            try:
                setup = make_setup(config, progress)
            except ConfigError:
                requested = replace(checked.requested, {"pipeline.times": config.pipeline.times})
                # raises the error with flags that keep every rule
                checks.check(requested, checked.environment)
                raise
    except KeyboardInterrupt:
        if cluster.is_main():
            print("stopped before training began: nothing was written", file=sys.stderr, flush=True)
        return None
    finally:
        if takes_signals:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    return PreparedRun(checked.requested, checked.environment, config, setup, folder)
