"""A run as its folder and the system see it, and the contexts in which it runs."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

from jaxtrain import cli
from jaxtrain.checkpoint.resuming import StartPoint
from jaxtrain.config import ResolvedConfig, TrainConfig
from jaxtrain.config.groups.mixture_settings import is_evaluated
from jaxtrain.devices import cluster
from jaxtrain.run.files import warned
from jaxtrain.run.goodput import GoodputLog, plot_goodput
from jaxtrain.run.intervals import Intervals
from jaxtrain.run.metrics import VALIDATION_LOSS, read_metrics
from jaxtrain.run.run_lock import FolderError, RunLock
from jaxtrain.run.signals import Signals
from jaxtrain.run.wall_clock import WallClock
from jaxtrain.run.watchdog import Watchdog


@dataclasses.dataclass(frozen=True, eq=False)
class RunContext:
    """Resolved settings, files, clocks, signals of a run."""

    config: ResolvedConfig
    folder: pathlib.Path
    clock: WallClock
    goodput: GoodputLog
    signals: Signals
    watchdog: Watchdog


@contextlib.contextmanager
def watched(
    train: TrainConfig, folder: pathlib.Path, clock: WallClock
) -> Iterator[tuple[Signals, Watchdog]]:
    """A context in which no other run uses the folder. Whatever ends this run, a signal or a hang,
    leaves no lock.

    Raises FolderError as RunLock.take, and FlagsError for a ConfigError inside.
    """
    lock = RunLock(folder)
    try:
        with Signals(lock.release, notices=cluster.is_main()) as signals:
            cluster.from_main(lambda: lock.take(cluster.log), FolderError)
            peers = cluster.connect_peers()
            watchdog = Watchdog(folder, peers, clock, train.hang_after, lock.release)
            watchdog.evaluate_s = train.evaluate_seconds if train.evaluate else 0.0
            with watchdog.watching(), cli.refused_settings():
                yield signals, watchdog
    finally:
        lock.release()


@contextlib.contextmanager
def timed(folder: pathlib.Path, clock: WallClock, start: StartPoint) -> Iterator[GoodputLog]:
    """A context whose wall time by parts is logged in the run's folder. At its end the goodput of
    all starts is logged and drawn."""
    main = cluster.is_main()
    goodput = GoodputLog(folder if main else None, clock, start.step, start.meta.wall_s)
    with contextlib.closing(goodput):
        yield goodput
        cluster.log(goodput.summary())
    if main:
        with warned(folder / "goodput.png", cluster.log):
            plot_goodput(folder)


def evaluates_first(config: ResolvedConfig, start: StartPoint, folder: pathlib.Path) -> bool:
    """True if a run that starts here is evaluated before its first step: what it starts from has
    learned something, there are sets whose losses are followed, or a kill came between the save of
    this step and its evaluation. Every process must call this."""
    if start.step:
        due = Intervals.of(config.train, config.checkpoint, 1).evaluates(start.step)
        is_of_it = lambda record: record["step"] == start.step and VALIDATION_LOSS in record
        has_record = lambda: any(map(is_of_it, read_metrics(folder)))
        return due and is_evaluated(config.data) and not cluster.from_main(has_record, FolderError)
    has_learned = start.resumes or config.train.init_from or config.train.fork_from
    return bool(has_learned or (config.train.eval_every and config.data.validation))
