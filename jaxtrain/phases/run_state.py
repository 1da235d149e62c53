"""The state of a run before its first step: of a published model, of another run, or from the seed;
the file of a state on disk; and the run's last step."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jaxtrain.checkpoint.resuming import ChosenStep
from jaxtrain.checkpoint.steps import CheckpointError
from jaxtrain.config import ConfigError, ResolvedConfig, with_values
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.devices import cluster
from jaxtrain.devices.state_file import StateFileError
from jaxtrain.hf import importing
from jaxtrain.hf.tokenizer_files import tokenizer_of_run
from jaxtrain.phases.fork import Fork, open_fork
from jaxtrain.run.exit_status import RunError
from jaxtrain.training.state import TrainState, initial_state
from jaxtrain.training.step import Step


def until_exhausted(config: ResolvedConfig, batches: TrainingBatches) -> ResolvedConfig:
    """The config of a run that ends where its sources do, which is logged. Raises ConfigError if
    that is before its first step."""
    if (end := batches.end()) is None:
        return config
    source, steps = end
    rule = f"of {source.setting} end after {steps} batches"
    if not steps:
        raise ConfigError("data.sources", config.data.sources, f"has no batch: the epochs {rule}")
    cluster.log(
        f"the {source.epochs:g} epochs {rule}, and so does the run, not at "
        f"train.steps={config.train.steps}"
    )
    return with_values(config, train=with_values(config.train, steps=steps))


@contextlib.contextmanager
def state_on_disk(step: Step) -> Iterator[None]:
    """A context in which the file of the optimizer's state is open, if that is on disk. Every
    process must call this. Raises StateFileError in all of them."""
    # The layout has this object from the beginning, because the state's shapes name it; the file
    # is opened only for a run, not for a dry run.
    file = step.layout.disk
    if not file:
        yield
        return
    with contextlib.closing(file):
        cluster.in_all(file.open, StateFileError)
        cluster.log(file.describe())
        yield


Origin = importing.PublishedWeights | Fork | None  # of a new run's state; None: the seed


def open_origin(chosen: ChosenStep) -> tuple[ChosenStep, Origin]:
    """The start of a run, and the origin of a new one's state. Every process must call this. Raises
    RunError in all of them, and ConfigError as `open_fork`."""
    config = chosen.folder.run.config
    if fork := open_fork(chosen):
        return dataclasses.replace(chosen, origin=fork.start), fork
    if chosen.start.resumes or not config.train.init_from:
        return chosen, None
    # Opened, which checks files and names, and not yet read: that takes the state's layout.
    weights = importing.open_together(config)
    name, size = config.data.tokenizer, config.model.vocab_size
    run = cluster.in_all(lambda: tokenizer_of_run(weights.published, name, size), RunError)
    cluster.log(*(f"note: {note}" for note in run.notes))
    return chosen, weights


def make_state(config: ResolvedConfig, step: Step, origin: Origin) -> TrainState:
    """The state before the first step; every process must call this. origin: if it is open"""
    # An earlier state's numbers may be in the file: a run that goes back to its beginning.
    if step.layout.disk:
        step.layout.disk.clear()
    if isinstance(origin, Fork):
        return origin.state(step)
    if config.train.fork_from:
        raise CheckpointError(f"all checkpoints of this fork of {config.train.fork_from} are gone")
    if config.train.init_from:
        return importing.read_together(origin or importing.open_together(config), step)
    return initial_state(step.layout, step.optimizer, config.train.seed)
