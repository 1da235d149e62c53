"""The checkpoints of one run, as its loop sees them: the one that it resumes from, those that it
saves, and the return to an earlier one.

    choose, check_corpus, log_changes     before anything is compiled
    attach, restore                       when the state's layout is known
    begin; due, after, roll_back; saves   while the run trains
    finish, close                         at its end

Persistent checkpoints can be restored with every layout (manager.py). Local ones, in each machine's
own folder, can be restored with one layout (local.py), are saved more often, and are lost with the
machine.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxtrain.checkpoint import stores
from jaxtrain.checkpoint.local import LocalCheckpointer, run_name
from jaxtrain.checkpoint.local_restore import LocalFiles, LocalStep
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.regions import Shards, stored_arrays
from jaxtrain.checkpoint.restoring import choose_together, restore_newest
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.saving import check_orbax
from jaxtrain.checkpoint.steps import NONE, VERSION, CheckpointError, Meta, StepChoice, read_meta
from jaxtrain.config import (
    CheckpointConfig,
    ConfigError,
    StoredConfig,
    fields,
    get,
    replace,
    sources,
    suggestion,
    to_dict,
)
from jaxtrain.config.rules.checks import check_resume
from jaxtrain.config.rules.resume import changes, violations
from jaxtrain.devices import cluster
from jaxtrain.pipeline.prepared_run import PreparedRun
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.intervals import Intervals
from jaxtrain.training.parameter_checks import Finiteness
from jaxtrain.training.recovery import DetectorState, NumbersError, Rollback, SpikeDetector
from jaxtrain.training.requests import Request
from jaxtrain.training.state import TrainState, stored_shapes, with_working
from jaxtrain.training.step import Step


def folder_of_checkpoints(settings: CheckpointConfig, workdir: pathlib.Path) -> epath.Path:
    """The folder or address of a run's persistent checkpoints."""
    return stores.folder(settings.directory or workdir / "checkpoints")


class ChangedCorpusError(RunError):
    """A corpus that is not the one of the checkpoint; the text is one line."""

    status = ExitStatus.BAD_DATA


class TrainedCorpus(NamedTuple):
    """The corpus that a run trains on: its `data.source`, the checksum of tokens, documents and
    mask, and the tokenizer's description."""

    source: str
    checksum: str
    tokenizer: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. Every process calls every method, at the same point of the
    program.

    Args:
      run: the run, whose requested config is changed by what an error suggests.
      before: only checkpoints of earlier steps than this are looked at; None: all are.

    Raises OrbaxError where the installed Orbax cannot save them.

    saves: the persistent ones that this run saves, once `begin` has opened them.
    """

    def __init__(self, run: PreparedRun, before: int | None = None):
        check_orbax()
        self.directory = folder_of_checkpoints(run.config.checkpoint, run.folder)
        self._run, self._config, self._before = run, run.config, before
        self._choice = StepChoice()
        self._candidates: list[LocalStep] = []  # newest first
        self._local_files: LocalFiles | None = None
        self._local_saves: LocalCheckpointer | None = None
        self._source = ""  # of a local checkpoint that was restored

    # ---------------------------------------------------------------- resuming

    @property
    def step(self) -> int:
        """The step that the run resumes from; 0 for a new run. Until `restore` has read its arrays,
        a damaged checkpoint may still be replaced by an earlier one."""
        return (self._candidates[0].step if self._candidates else self._choice.step) or 0

    @property
    def resumes(self) -> bool:
        """False for a new run. A published model is resumed from step 0 (hf/importing.py)."""
        return bool(self._candidates) or self._choice.step is not None

    @property
    def meta(self) -> Meta:
        """The meta of the checkpoint of `step`; Meta() for a new run."""
        return self._candidates[0].meta if self._candidates else self._choice.meta

    @property
    def source(self) -> str:
        """A text with the step that the state was restored from, and the machines' folders if the
        checkpoint was local."""
        return f"step {self.step}{self._source}"

    def choose(self, damaged: Mapping[int, str] = NONE) -> None:
        """Chooses the newest complete persistent checkpoint, if there is one.

        damaged: step → a text about its damage, for checkpoints whose arrays turned out to be
          damaged; these are not chosen.

        Raises ConfigError if the config cannot continue it; CheckpointError as `choose_together`.
        """
        choice = self._choice = choose_together(self.directory, damaged, self._before)
        if choice.unrecognized:
            rest = (
                f"the newest complete checkpoint is {choice.step}"
                if choice.step is not None
                else "there is no complete checkpoint"
            )
            cluster.log(f"passed over in {self.directory}: {choice}; {rest}")
        if choice.step is not None:
            read = functools.partial(read_meta, self.directory, choice.step)
            digest = hashlib.sha256(repr(cluster.in_all(read, CheckpointError)).encode())
            cluster.agree({f"checkpoint {choice.step} ": digest.hexdigest()[:12]})
            self._refuse(choice.meta)

    def check_corpus(self, corpus: TrainedCorpus) -> None:
        """Keeps the corpus that the run trains on, which may have moved since the persistent
        checkpoint that `choose` chose.

        Raises ConfigError if it is another one at another path, ChangedCorpusError if it has
        changed.
        """
        self._corpus = corpus
        meta = self._choice.meta
        if not self._choice.step or meta.checksum == corpus.checksum:
            return  # a published model's checkpoint of step 0 has seen no corpus
        checksums = f"(checksum {corpus.checksum[:12]}, in the checkpoint {meta.checksum[:12]})"
        stored = meta.stored_config().data.source
        if stored != corpus.source:
            rule = f"is not the corpus of the checkpoint's data.source={stored!r} {checksums}"
            use = "the same files"
            with contextlib.suppress(ConfigError):  # those of the checkpoint may be gone
                sources.check(stored)
                use = suggestion({"data.source": stored})
            raise ConfigError("data.source", corpus.source, rule, f"{use} (or another --workdir)")
        raise ChangedCorpusError(
            f"data.source={corpus.source} has changed since the checkpoint {checksums}: put it "
            "back or use another --workdir"
        )

    def log_changes(self) -> None:
        """Lists the settings that differ from those of the checkpoint."""
        if not self._choice.step:
            return
        if changed := changes(self._choice.meta.stored_config(), self._config):
            cluster.log(
                f"changed since the checkpoint of step {self._choice.step}:",
                *(f"  {change}" for change in changed),
            )

    def attach(self, step: Step, begin: Callable[[], TrainState]) -> None:
        """Takes the run's step, which knows the state's layout, and looks for local checkpoints
        that are newer than the persistent one.

        begin: returns the state before the first step; every process calls it

        Raises CheckpointError if the run's id can be neither read nor written.
        """
        self._step, self._begin = step, begin
        local = self._config.checkpoint.local
        if not local:
            return
        name, self._start = cluster.from_main(
            lambda: (run_name(self._run.folder, self.directory), secrets.token_hex(4)),
            CheckpointError,
        )
        shards = Shards(stored_arrays(*self._laid_out(step)))
        self._local_files = LocalFiles(pathlib.Path(local) / name, shards)
        self._candidates = self._local_files.candidates(
            self.step, self._config.train.steps, self._why_not
        )

    def restore(self) -> TrainState | None:
        """The state of the newest checkpoint that turns out to be undamaged; None for a new run."""
        local = self._local_files.restore(self._candidates) if self._local_files else None
        self._candidates = []
        if local:
            self._source = f", {local.source}"
            self._choice = dataclasses.replace(self._choice, step=local.step, meta=local.meta)
            abstract = self._step.abstract_state().stored
            stored = jax.tree.unflatten(jax.tree.structure(abstract), local.leaves)
            return with_working(self._step.layout, stored)
        return self.restore_persistent(self._step) if self.resumes else None

    def restore_persistent(self, step: Step) -> TrainState:
        """The state of the chosen persistent checkpoint, or of the newest one before it that turns
        out to be undamaged. Errors as of `choose` and `check_corpus`."""

        def choose_again(damaged: Mapping[int, str]) -> StepChoice:
            self.choose(damaged)
            self.check_corpus(self._corpus)
            self.log_changes()
            return self._choice

        state, self._choice = restore_newest(
            self._choice, choose_again, self.directory, *self._laid_out(step)
        )
        return with_working(step.layout, state)

    def _laid_out(self, step: Step) -> tuple[TrainState, TrainState]:
        """What a checkpoint stores of the state, as ShapeDtypeStructs with shardings and as
        Stored."""
        return step.abstract_state().stored, stored_shapes(step.layout, step.optimizer)

    def _refuse(self, meta: Meta) -> None:
        """Raises ConfigError if the config cannot continue a checkpoint with this meta."""
        stored, folder = self._stored_config(meta), self._config.train.init_from
        of_model = (
            violation
            for violation in violations(self._config, stored)
            if folder and violation.field.startswith("model.")
        )
        if violation := next(of_model, None):
            rule = (
                f"is another model than that of {self.directory}: {violation.field}="
                f"{get(self._config, violation.field)!r} {violation.rule}"
            )
            raise ConfigError("train.init_from", folder, rule, "another --workdir")
        check_resume(stored, self._run.requested, self._run.environment)

    def _stored_config(self, meta: Meta) -> StoredConfig:
        """The config in a meta, with the run's path of the tokenizer if that is the same file, and
        with all of its data for a published model's checkpoint, which has seen none."""
        stored, name = meta.stored_config(), self._config.data.tokenizer
        if not meta.step and not meta.checksum:
            free = [path for path in fields() if path.startswith("data.")]
            return replace(stored, {path: get(self._config, path) for path in free}).to_store()
        file, digest = pathlib.Path(os.path.expanduser(name)), meta.tokenizer.get("sha256")
        if digest and file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest:
            return replace(stored, {"data.tokenizer": name}).to_store()
        return stored

    def _why_not(self, meta: Meta) -> str:
        """The reason not to resume from a checkpoint with this meta, in words; "" if there is
        none."""
        if meta.checksum != self._corpus.checksum:
            return f"data.source={self._corpus.source} has changed since"
        try:
            self._refuse(meta)
        except ConfigError as error:
            return f"{error.field}={error.value!r} {error.rule}"
        return ""

    # ---------------------------------------------------------------- saving

    def begin(
        self,
        intervals: Intervals,
        detector: SpikeDetector,
        wall_s: Callable[[], float],
        log: Callable[[str], object],
    ) -> None:
        """Opens the checkpoints for saving. `after` begins the saves themselves.

        Args:
          intervals: the steps after which saves are due.
          detector: decides whether the run's numbers may be saved; its state is saved with them.
          wall_s: returns the seconds that the run has taken, over all its starts.
          log: gets a line for each entry that is set aside, and for each save that fails.
        """
        self._intervals, self._detector, self._wall_s = intervals, detector, wall_s
        self._finite = Finiteness(self._step.mesh)
        settings = self._config.checkpoint
        _, stored = self._laid_out(self._step)
        retention = Retention(settings.keep, settings.keep_every, settings.keep_best)
        self.saves = Checkpointer(
            self.directory,
            stored,
            retention,
            self._choice.unrecognized,
            log,
            waits=self._step.layout.disk is not None,
        )
        if self._local_files:
            self._local_saves = LocalCheckpointer(
                self._local_files.folder, self._local_files.shards, self._start, self.step, log
            )

    @property
    def busy(self) -> bool:
        """True while a persistent save is under way in this process."""
        return self.saves.busy

    @property
    def longest_s(self) -> float:
        """The seconds that the longest persistent save has taken; 0 before the first has ended."""
        return self.saves.longest_s

    def due(self, at: int) -> bool:
        """True if the settings ask for a checkpoint after step `at`."""
        return self._intervals.saves(at) or self._intervals.saves_locally(at)

    def after(self, at: int, state: TrainState, position: int, asked: Request) -> bool:
        """Begins to save step `at` where that is due or asked for, and its numbers are good. The
        state may be donated when this returns.

        position: the number of the next batch.

        Returns True if a persistent save was due. Raises NumbersError if parameters that are
        not finite end the run.
        """
        persistent = (bool(asked) or self._intervals.saves(at)) and Request.HURRY not in asked
        locally = self._intervals.saves_locally(at)
        if self._detector.fault or not (persistent or locally):
            return False
        finite = self._finite((state.read, state.anchor))
        if not self._detector.check_parameters(at, position, finite):
            return False
        meta = Meta(
            to_dict(self._config),
            VERSION,
            at,
            position,
            self._wall_s(),
            self._corpus.checksum,
            self._corpus.tokenizer,
            self._detector.state.to_json(),
        )
        if self._local_saves and locally:
            self._local_saves.save(at, state.stored, dataclasses.asdict(meta))
        if persistent:
            self.saves.save(at, state.stored, dataclasses.asdict(meta))
        return persistent

    def roll_back(self, state: TrainState) -> tuple[Rollback, TrainState]:
        """Goes back to the newest complete checkpoint from before the detector's fault, or to the
        initial state if there is no checkpoint at all. Returns the roll-back and the state.

        A save that is under way is finished first. Later checkpoints are set aside, because their
        steps are trained again. `state` is deleted, to free its memory. Nothing is compiled.

        Raises NumbersError if there are checkpoints, but none from before the fault;
        CheckpointError as `choose_together` and `restore_newest` do.
        """
        fault = self._detector.fault
        assert fault
        self.saves.close()
        choice = choose_together(self.directory, before=fault.since)
        if choice.step is None and (later := choose_together(self.directory).steps):
            raise NumbersError(
                f"{fault.why}; the checkpoints that are kept begin with step {later[0]}, and the "
                "run would have to go back further: keep more of them (checkpoint.keep), or make "
                "them less often (checkpoint.every)"
            )
        for array in jax.tree.leaves(state):
            array.delete()
        if choice.step is not None:
            choose_again = functools.partial(choose_together, self.directory, before=fault.since)
            stored, choice = restore_newest(
                choice, choose_again, self.directory, *self._laid_out(self._step)
            )
            state = with_working(self._step.layout, stored)
        else:
            state = self._begin()
        at = choice.step or 0
        self.saves.set_aside_after(at, f"the run went back to step {at}")
        position = choice.meta.position if fault.batch is None else fault.batch + 1
        detector = DetectorState.from_json(choice.meta.memory)
        rollback = Rollback(fault.at, at, position, fault.why, detector)
        if self._local_saves:
            self._local_saves.give_up(at)
        return rollback, state

    def finish(self, at: int) -> None:
        """Waits for the last save. Local checkpoints are removed if step `at`, the last, is saved
        persistently.

        Raises CheckpointError if the last save has failed.
        """
        self.saves.wait()
        if self._local_saves and self.saves.newest == at:
            self._local_saves.forget()

    def close(self) -> None:
        """Waits for saves that are under way, whether they succeed or not."""
        if self._local_saves:
            self._local_saves.close()
        self.saves.close()
