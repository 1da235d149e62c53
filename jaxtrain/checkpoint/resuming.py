"""The start of a run from its checkpoints. Each step of the way returns the object of the next:

    open_folder              CheckpointFolder   the folder, and the config that is to go on from it
    CheckpointFolder.choose  ChosenStep         the newest complete persistent checkpoint
    ChosenStep.candidates    Candidates         with newer local ones, once the state's layout is
                                                known
    Candidates.restore       state, StartPoint  the newest of these that turns out to be undamaged

A run that trains goes on with `manager.RunCheckpoints`; a replay takes `ChosenStep.restore`.

Persistent checkpoints can be restored with every layout (regions.py). Local ones, in each machine's
own folder, can be restored with one layout (local.py), are saved more often, and are lost with the
machine.

Every process calls every function here, at the same point of the program: process 0 chooses a step,
and all processes read it. Damage to an array's numbers shows only when they are read, and each
process reads different ones. So one process may find damage that no other sees. The processes tell
each other, and either all of them take an older step or none does.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from jaxtrain.checkpoint import stores
from jaxtrain.checkpoint.local import run_name
from jaxtrain.checkpoint.local_restore import LocalFiles, LocalStep
from jaxtrain.checkpoint.regions import Shards, stored_arrays
from jaxtrain.checkpoint.restoring import restore, wrong_arrays
from jaxtrain.checkpoint.saving import check_orbax
from jaxtrain.checkpoint.steps import (
    IN_WINDOWS,
    NONE,
    TO_TRAIN,
    CheckpointError,
    DamageError,
    Meta,
    StepChoice,
    UnrecognizedEntry,
    choose,
    read_meta,
)
from jaxtrain.config import (
    CheckpointConfig,
    ConfigError,
    StoredConfig,
    fields,
    get,
    replace,
    sources,
    suggestion,
)
from jaxtrain.config.groups.mixture_settings import mixture_of
from jaxtrain.config.phases import spans
from jaxtrain.config.rules.checks import check_resume
from jaxtrain.config.rules.resume import changes, violations
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.data.corpora import Corpora
from jaxtrain.data.tokenizer import DataError
from jaxtrain.devices import cluster
from jaxtrain.pipeline.prepared_run import PreparedRun
from jaxtrain.training.state import TrainState, stored_shapes, with_working
from jaxtrain.training.step import Step


def folder_of_checkpoints(settings: CheckpointConfig, workdir: pathlib.Path) -> epath.Path:
    """The folder or address of a run's persistent checkpoints."""
    return stores.folder(settings.directory or workdir / "checkpoints")


def open_folder(run: PreparedRun, before: int | None = None) -> "CheckpointFolder":
    """The persistent checkpoints of a run. Raises OrbaxError where the installed Orbax cannot save
    them. before: as in CheckpointFolder"""
    check_orbax()
    return CheckpointFolder(run, folder_of_checkpoints(run.config.checkpoint, run.folder), before)


@dataclasses.dataclass(frozen=True, eq=False)
class StartPoint:
    """The beginning of a run in this process: after step `step`, 0 for a new run.

    meta: of the checkpoint; Meta() for a new run
    source: the checkpoint in words, with the machines' folders if it is local; "" for a new run
    unrecognized: entries of the folder that are no complete steps, which the first save sets aside
    """

    step: int = 0
    meta: Meta = Meta()
    source: str = ""
    unrecognized: tuple[UnrecognizedEntry, ...] = ()

    @property
    def resumes(self) -> bool:
        """False for a new run. A published model is resumed from step 0 (hf/importing.py)."""
        return bool(self.source)


# --- the folder, and the step that is chosen in it ------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointFolder:
    """The folder of a run's persistent checkpoints, and the run that is to go on from one.

    run: its requested config is the one that an error's suggestions change
    directory: the folder or address of the checkpoints
    before: only checkpoints of earlier steps than this are looked at; None: all are
    """

    run: PreparedRun
    directory: epath.Path
    before: int | None = None

    def choose(self, damaged: Mapping[int, str] = NONE) -> "ChosenStep":
        """The newest complete persistent checkpoint; a ChosenStep without one for a new run.

        damaged: step → a text about its damage, for checkpoints whose arrays turned out to be
          damaged; these are not chosen.

        Raises ConfigError if the config cannot continue it; CheckpointError as `choose_together`.
        """
        choice = choose_together(self.directory, damaged, self.before)
        if choice.unrecognized:
            rest = (
                f"the newest complete checkpoint is {choice.step}"
                if choice.step is not None
                else "there is no complete checkpoint"
            )
            cluster.log(f"passed over in {self.directory}: {choice}; {rest}")
        if choice.step is not None:
            # Hosts can have different folders under one path, each with a step of this number; a
            # state that is put together from both would be none.
            read = functools.partial(read_meta, self.directory, choice.step)
            digest = hashlib.sha256(repr(cluster.in_all(read, CheckpointError)).encode())
            cluster.agree({f"checkpoint {choice.step} ": digest.hexdigest()[:12]})
            self.refuse(choice.meta)
        return ChosenStep(self, choice)

    def refuse(self, meta: Meta) -> None:
        """Raises ConfigError if the config cannot continue a checkpoint with this meta."""
        config, stored = self.run.config, self._stored_config(meta)
        origin = config.train.init_from
        of_model = (
            violation
            for violation in violations(config, stored)
            if origin and violation.field.startswith("model.")
        )
        # A model's settings come from train.init_from, so that is the setting to change.
        if violation := next(of_model, None):
            raise ConfigError(
                "train.init_from",
                origin,
                f"is another model than that of {self.directory}: {violation.field}="
                f"{get(config, violation.field)!r} {violation.rule}",
                "another --workdir",
            )
        check_resume(stored, self.run.requested, self.run.environment, meta.position)

    def _stored_config(self, meta: Meta) -> StoredConfig:
        """The config in a meta, with the run's path of the tokenizer if that is the same file, and
        with all of its data for a published model's checkpoint, which has seen none."""
        stored, name = meta.stored_config(), self.run.config.data.tokenizer
        if not meta.step and not meta.checksum:
            data = {p: get(self.run.config, p) for p in fields() if p.startswith("data.")}
            return replace(stored, data).to_store()
        file, digest = pathlib.Path(os.path.expanduser(name)), meta.tokenizer.get("sha256")
        if digest and file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest:
            return replace(stored, {"data.tokenizer": name}).to_store()
        return stored


@dataclasses.dataclass(frozen=True, eq=False)
class ChosenStep:
    """The persistent checkpoint that a run resumes from, unless its arrays turn out to be damaged
    or a local one is newer; `choice.step` is None for a new run.

    origin: where the run begins that has no checkpoint: with another run's step
        (phases/run_state.py)
    """

    folder: CheckpointFolder
    choice: StepChoice
    origin: StartPoint = StartPoint()

    @property
    def start(self) -> StartPoint:
        """The start of a run from this checkpoint."""
        choice = self.choice
        if choice.step is None:
            return dataclasses.replace(self.origin, unrecognized=choice.unrecognized)
        return StartPoint(choice.step, choice.meta, f"step {choice.step}", choice.unrecognized)

    def check_corpora(self, batches: TrainingBatches) -> None:
        """Raises ConfigError if a corpus of the checkpoint is another one at another path, or if
        its batches had other sources, DataError if a corpus has changed. A corpus may have
        moved."""
        meta = self.choice.meta
        if not self.choice.step:
            return  # a published model's checkpoint of step 0 has seen no corpus
        config = meta.stored_config()
        stored_sources = {one.name: one for one in mixture_of(config.data)}
        stored_checksums = meta.checksums or {"": meta.checksum}
        for source, corpus in batches.corpora.pairs():
            before = stored_checksums.get(source.name, corpus.checksum)
            if corpus.checksum == before:
                continue
            checksums = f"(checksum {corpus.checksum[:12]}, in the checkpoint {before[:12]})"
            stored = stored_sources[source.name].data.source
            if stored != corpus.source:
                use = "the same files"
                with contextlib.suppress(ConfigError):  # those of the checkpoint may be gone
                    sources.check(stored)
                    use = suggestion({source.setting: stored})
                raise ConfigError(
                    source.setting,
                    corpus.source,
                    f"is not the corpus of the checkpoint's {source.setting}={stored!r} "
                    f"{checksums}",
                    f"{use} (or another --workdir)",
                )
            raise DataError(
                f"{source.setting}={corpus.source} has changed since the checkpoint {checksums}: "
                "put it back or use another --workdir"
            )
        stored_mixture = tuple(stored_sources.values())
        corpora = Corpora(stored_mixture, batches.corpora.corpora[: len(stored_mixture)])
        as_stored = TrainingBatches(corpora, spans(config))
        if as_stored.history(meta.position) != batches.history(meta.position):
            raise ConfigError(
                "data.sources",
                self.folder.run.config.data.sources,
                f"cannot continue a checkpoint of {meta.position} batches, which had sequences of "
                "other sources (weight, epochs, exhausted)",
                fixes=[{"data.sources": config.data.sources}],
            )
        if meta.version < IN_WINDOWS and batches.windows > 1:
            cluster.log(
                "warning: the order of sequences in a corpus of this size has changed since the "
                "checkpoint was written: this epoch repeats some and passes over others"
            )

    def log_changes(self) -> None:
        """Lists the settings that differ from those of the checkpoint."""
        if not self.choice.step:
            return
        if changed := changes(self.choice.meta.stored_config(), self.folder.run.config):
            cluster.log(
                f"changed since the checkpoint of step {self.choice.step}:",
                *(f"  {change}" for change in changed),
            )

    def candidates(
        self, step: Step, batches: TrainingBatches, new_state: Callable[[], TrainState]
    ) -> "Candidates":
        """This checkpoint, and the local ones that are newer.

        step: knows the state's layout; batches: the run's, as checked; new_state: as in Candidates

        Raises CheckpointError if the run's id can be neither read nor written.
        """
        run, local = self.folder.run, None
        if run.config.checkpoint.local:
            # Process 0 has the id, for the others may not see the run's own folders yet. All files
            # of a start bear one token: files of two starts are never combined.
            name, start_id = cluster.from_main(
                lambda: (run_name(run.folder, self.folder.directory), secrets.token_hex(4)),
                CheckpointError,
            )
            shards = Shards(stored_arrays(*stored_state(step)))
            files = LocalFiles(pathlib.Path(run.config.checkpoint.local) / name, shards)
            why_not = functools.partial(self._why_not_local, batches.corpora)
            local = LocalCandidates(
                files,
                start_id,
                files.candidates(self.start.step, run.config.train.steps, why_not),
            )
        return Candidates(self, step, batches, new_state, local)

    def restore(self, step: Step, batches: TrainingBatches) -> tuple[TrainState, StartPoint]:
        """The state of this checkpoint, or of the newest one before it that turns out to be
        undamaged. Arguments as of `candidates`; errors as of `choose` and `check_corpora`, because
        an older checkpoint may have other settings and another corpus."""

        def choose_again(damaged: Mapping[int, str]) -> StepChoice:
            chosen = self.folder.choose(damaged)
            chosen.check_corpora(batches)
            chosen.log_changes()
            return chosen.choice

        state, choice = restore_newest(
            self.choice, choose_again, self.folder.directory, *stored_state(step)
        )
        return with_working(step.layout, state), ChosenStep(self.folder, choice).start

    def _why_not_local(self, corpora: Corpora, meta: Meta) -> str:
        """The reason not to resume from a local checkpoint with this meta, in words; "" if there is
        none. A persistent checkpoint that does not fit ends the run, but a local one is only a
        newer copy."""
        stored = meta.checksums or {"": meta.checksum}
        for source, corpus in corpora.pairs():
            if stored.get(source.name, corpus.checksum) != corpus.checksum:
                return f"{source.setting}={corpus.source} has changed since"
        try:
            self.folder.refuse(meta)
        except ConfigError as error:
            return f"{error.field}={error.value!r} {error.rule}"
        return ""


# --- the state ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LocalCandidates:
    """The local checkpoints that a run may resume from. start_id: of this start of the run, for the
    files that it will write; steps: newest first."""

    files: LocalFiles
    start_id: str
    steps: list[LocalStep]


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """The checkpoints that a run's state can come from; `step` knows its layout.

    new_state: makes the state before the first step; every process calls it
    local: None if the settings ask for no local checkpoints
    """

    chosen: ChosenStep
    step: Step
    batches: TrainingBatches
    new_state: Callable[[], TrainState]
    local: LocalCandidates | None

    @property
    def expected(self) -> StartPoint:
        """The start of the run if the newest candidate is undamaged."""
        if self.local and self.local.steps:
            newest = self.local.steps[0]
            return StartPoint(newest.step, newest.meta, f"step {newest.step}")
        return self.chosen.start

    def restore(
        self, initial: concurrent.futures.Future[TrainState] | None
    ) -> tuple[TrainState, StartPoint]:
        """The state of the newest candidate that turns out to be undamaged, and the start of the
        run from it.

        initial: the state of a new run, if one is expected; it is made otherwise, where all local
          candidates turn out to be damaged and there is no persistent one
        """
        local = self.local.files.restore(self.local.steps) if self.local else None
        # Local first: its candidates are newer than the chosen persistent step.
        if self.local and local:
            abstract = self.step.abstract_state().stored
            stored = jax.tree.unflatten(jax.tree.structure(abstract), local.leaves)
            start = StartPoint(
                local.step,
                local.meta,
                f"step {local.step}, {local.source}",
                self.chosen.choice.unrecognized,
            )
            return with_working(self.step.layout, stored), start
        if self.chosen.start.resumes:
            return self.chosen.restore(self.step, self.batches)
        return (initial.result() if initial else self.new_state()), self.chosen.start


def stored_state(step: Step) -> tuple[TrainState, TrainState]:
    """The arrays that a checkpoint stores of a step's state: as ShapeDtypeStructs with shardings,
    and as Stored."""
    return step.abstract_state().stored, stored_shapes(step.layout, step.optimizer)


# --- what all processes do together ---------------------------------------------------------------


def choose_together(
    directory: str | os.PathLike, damaged: Mapping[int, str] = NONE, before: int | None = None
) -> StepChoice:
    """The step that a run resumes from, and what else is in the directory: process 0's answer, on
    every process. damaged, before: as in `choose`.

    Raises CheckpointError if no step is complete, but something of one exists: a new run would
    push it aside.
    """

    def decide() -> dict:
        choice = choose(directory, TO_TRAIN, wrong_arrays, damaged, before)
        lost = ", ".join(str(entry) for entry in choice.unrecognized if entry.holds_data)
        if choice.step is None and lost:
            raise CheckpointError(
                f"{directory} has no complete checkpoint: {lost}: move it away to begin anew, or "
                "use another --workdir"
            )
        return dataclasses.asdict(choice)

    values = cluster.from_main(decide, CheckpointError)
    return StepChoice(
        values["step"],
        Meta(**values["meta"]),
        tuple(values["steps"]),
        tuple(UnrecognizedEntry(**entry) for entry in values["unrecognized"]),
    )


def restore_newest(
    choice: StepChoice,
    choose_again: Callable[[Mapping[int, str]], StepChoice],
    directory: str | os.PathLike,
    *state: Any,
) -> tuple[Any, StepChoice]:
    """The state of the chosen step, or of the newest one before it whose arrays are undamaged; and
    the choice of that step.

    Args:
      choice: of a step.
      choose_again: step → its damage, for all that turned out to be damaged → the next choice,
        which has a step.
      directory, state: as in `restore`, whose last two arguments are `state`.

    Raises:
      CheckpointError: as `restore` on any process, for what is no damage; and as `choose_again`.
    """
    damaged: dict[int, str] = {}

    def read(step: int) -> tuple[Any, str]:
        try:
            return restore(directory, step, *state), ""
        except DamageError as error:
            return None, error.what

    while True:
        assert choice.step is not None
        restored, damage = cluster.in_all(functools.partial(read, choice.step), CheckpointError)
        # The damage that one process has read is everybody's: all take an older step together.
        damage = next(filter(None, cluster.gather(damage)), "")
        if not damage:
            return restored, choice
        del restored  # its memory is needed for the next one
        damaged[choice.step] = damage
        choice = choose_again(damaged)
