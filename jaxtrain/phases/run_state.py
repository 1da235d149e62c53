"""The state of a run before its first step: of a published model, of another run, or from the seed;
the file of a state on disk; and the run's last step.

What a run takes from another one (`train.fork_from`), by `train.fork_inherits`:

    position   weights and moments; it goes on with that run's next step and batch
    moments    weights and moments; it begins with its own step 1 and batch 0
    weights    weights alone

Such a run has its own folder, data, schedule and steps. Once it has a checkpoint it needs the other
run no more.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain.checkpoint import steps, stores, subject
from jaxtrain.checkpoint.restoring import expected_shapes, restore, wrong_arrays
from jaxtrain.checkpoint.resuming import ChosenStep, StartPoint, stored_state
from jaxtrain.config import ConfigError, ResolvedConfig, flag_text, get, to_dict, with_values
from jaxtrain.config.phases import span_at, spans
from jaxtrain.config.rules.phase_rules import PHASES, SIZES
from jaxtrain.config.rules.resume import changes, violations
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.devices import cluster, host_memory
from jaxtrain.devices.state_file import StateFileError, is_on_disk
from jaxtrain.hf import importing
from jaxtrain.hf.tokenizer_files import tokenizer_of_run
from jaxtrain.run.exit_status import RunError
from jaxtrain.training.state import TrainState, initial_state, with_working
from jaxtrain.training.step import Step

# Settings that a fork has in common with its origin, of those that a resumed run may not change;
# those of the model, too, where arrays have other shapes with them.
DILOCO = ("train.diloco_inner_steps", "mesh.replica")
IN_COMMON = {
    "weights": DILOCO,
    "moments": (*DILOCO, "optimizer."),
    "position": (*DILOCO, "optimizer.", *SIZES, PHASES),
}
WEIGHTS = (steps.PARAMETERS, steps.ANCHOR, steps.AVERAGE)
MOMENTS = (*WEIGHTS, "optimizer", "outer_momentum")
# the parts of its first state that are its origin's
INHERITED = {"weights": WEIGHTS, "moments": MOMENTS, "position": (*MOMENTS, "step")}


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
    if file := step.layout.disk:
        with contextlib.closing(file):
            cluster.in_all(file.open, StateFileError)
            cluster.log(file.describe())
            yield
    else:
        yield


# --- another run ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Fork:
    """A complete step of another run, and the start of the run that begins with it. record: what
    that run's config.json says of it"""

    start: StartPoint
    record: dict[str, Any]

    def state(self, step: Step) -> TrainState:
        """The run's state before its first step; all that it does not inherit is zero, as in a new
        one. Every process must call this. Raises CheckpointError in all of them."""
        abstract, stored = stored_state(step)
        directory, number, inherits = (self.record[n] for n in ("checkpoints", "step", "inherits"))
        of = lambda state: {name: getattr(state, name) for name in INHERITED[inherits]}
        arrays = cluster.in_all(
            lambda: restore(directory, number, of(abstract), of(stored)), steps.CheckpointError
        )
        zeros = lambda a: a if is_on_disk(a) else host_memory.zeros(a)
        if inherits == "moments":
            # The learning rate begins anew; what moments know of their age stays with them.
            arrays["optimizer"] = (
                *arrays["optimizer"][:-1],
                jax.tree.map(zeros, abstract.optimizer[-1]),
            )
        rest: Any = dataclasses.replace(abstract, **dict.fromkeys(arrays, None))  # type: ignore[arg-type]
        rest = jax.tree.map(zeros, rest, is_leaf=is_on_disk)
        return with_working(step.layout, dataclasses.replace(rest, **arrays))


def open_fork(chosen: ChosenStep) -> Fork | None:
    """The step that a new run begins with, and logs what is inherited; None without
    `train.fork_from`, and for a run with a checkpoint of its own. Every process must call this.

    Raises, in all of them: RunError for a step that is not there or cannot be read, ConfigError for
    one that does not fit the run.
    """
    config, run_directory = chosen.folder.run.config, stores.absolute(chosen.folder.directory)
    text, inherits = config.train.fork_from, config.train.fork_inherits
    place, _, number = text.rpartition("@") if re.search(r".@\d{1,10}$", text) else (text, "", "")
    if text and stores.absolute(steps.checkpoints_of(place)) == run_directory:
        raise ConfigError(
            "train.fork_from", text, "is the run that is to begin with it", "another --workdir"
        )
    if not text or chosen.start.resumes:
        return None

    def look() -> list[Any]:
        try:
            found = subject.find(place)
        except subject.NoCheckpointsError as error:
            raise subject.NoCheckpointsError(f"train.fork_from={text!r}: {error}") from None
        step = found.step.name if found.step else number
        before = int(step) + 1 if steps.STEP_NAME.fullmatch(step) else None
        choice = steps.choose(found.directory, steps.TO_TRAIN, wrong_arrays, before=before)
        if choice.step is None or step not in ("", str(choice.step)):
            nearest = found.directory if found.step else place
            at = "" if choice.step is None else f"@{choice.step}"
            raise subject.NoCheckpointsError(
                f"train.fork_from={text!r} is no complete step: use "
                f"{flag_text('config.train.fork_from', f'{nearest}{at}')}"
            )
        return [str(found.directory), dataclasses.asdict(choice.meta)]

    directory, values = cluster.from_main(look, RunError)
    meta = steps.Meta(**values)
    start = (
        StartPoint(meta.step, dataclasses.replace(meta, wall_s=0.0))
        if inherits == "position"
        else StartPoint()
    )
    name, stored = f"step {meta.step} in {directory}", meta.stored_config()
    shapes_differ = wrong_arrays(
        steps.Meta(to_dict(config)), expected_shapes(stored), trained_alone=True
    )
    in_common = (*IN_COMMON[inherits], *["model."] * bool(shapes_differ))
    for each in violations(config, stored, meta.position):
        if each.field.startswith(in_common):
            raise ConfigError(
                each.field,
                get(config, each.field),
                f"{each.rule} ({name}: train.fork_from)",
                fixes=[*each.fixes],
            )
    if config.train.steps <= start.step:
        raise ConfigError(
            "train.steps",
            config.train.steps,
            f"is not beyond {name}, with which the run begins",
            fixes=[{"train.steps": start.step + config.train.steps}],
        )
    record = {
        "checkpoints": directory,
        "step": meta.step,
        "inherits": inherits,
        "tokens": span_at(spans(stored), max(meta.step - 1, 0)).tokens_before(meta.step),
        "changes": changes(stored, config),
    }
    cluster.log(
        f"fork: {inherits} of {name}, after {record['tokens']:,} tokens; settings that differ: "
        f"{'; '.join(record['changes']) or 'none'}"
    )
    return Fork(start, record)


# --- the state ------------------------------------------------------------------------------------


RunOrigin = importing.PublishedWeights | Fork | None  # of a new run's state; None: the seed


def open_origin(chosen: ChosenStep) -> tuple[ChosenStep, RunOrigin]:
    """The start of a run, and the origin of a new one's state. Every process must call this. Raises
    RunError in all of them, and ConfigError as `open_fork`."""
    config = chosen.folder.run.config
    if fork := open_fork(chosen):
        return dataclasses.replace(chosen, origin=fork.start), fork
    if chosen.start.resumes or not config.train.init_from:
        return chosen, None
    # Opened, which checks files and names, and not yet read: that takes the state's layout.
    weights = importing.open_together(config)
    run = cluster.in_all(
        lambda: tokenizer_of_run(weights.published, config.data.tokenizer, config.model.vocab_size),
        RunError,
    )
    cluster.log(*(f"note: {note}" for note in run.notes))
    return chosen, weights


def make_state(config: ResolvedConfig, step: Step, origin: RunOrigin) -> TrainState:
    """The state before the first step; every process must call this. origin: if it is open"""
    # An earlier state's numbers may be in the file: a run that goes back to its beginning.
    if step.layout.disk:
        step.layout.disk.clear()
    if isinstance(origin, Fork):
        return origin.state(step)
    if config.train.fork_from:
        raise steps.CheckpointError(
            f"all checkpoints of this fork of {config.train.fork_from} are gone"
        )
    if config.train.init_from:
        return importing.read_together(origin or importing.open_together(config), step)
    return initial_state(step.layout, step.optimizer, config.train.seed)
