"""The step of another run that a new run begins with: `train.fork_from` and `train.fork_inherits`.

    position   weights and moments; the run goes on with that run's next step and batch
    moments    weights and moments; the run begins with its own step 1 and batch 0
    weights    weights alone

The run has its own folder, data, schedule and steps. Once it has a checkpoint it needs the other
run no more.
"""

import dataclasses
import hashlib
import re
from typing import Any

import jax

from jaxtrain.checkpoint import manifest, steps, stores, subject
from jaxtrain.checkpoint.restoring import expected_shapes, restore, wrong_arrays
from jaxtrain.checkpoint.resuming import ChosenStep, StartPoint, stored_state
from jaxtrain.config import ConfigError, ResolvedConfig, flag_text, get, to_dict
from jaxtrain.config.phases import span_at, spans
from jaxtrain.config.rules.phase_rules import PHASES, SIZES
from jaxtrain.config.rules.resume import changes, violations
from jaxtrain.devices import cluster, host_memory
from jaxtrain.devices.state_file import is_on_disk
from jaxtrain.run.exit_status import RunError
from jaxtrain.training.state import TrainState, with_working
from jaxtrain.training.step import Step

# Settings that a fork has in common with its origin, of those that a resumed run may not change;
# settings of the model only where arrays have other shapes with them.
MODEL, DILOCO = "model.", ("train.diloco_inner_steps", "mesh.replica")
IN_COMMON = {
    "weights": (MODEL, *DILOCO),
    "moments": (MODEL, *DILOCO, "optimizer."),
    "position": (MODEL, *DILOCO, "optimizer.", *SIZES, PHASES),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Fork:
    """A complete step of another run, with its meta. inherits: `train.fork_inherits`; digest: of
    the step's manifest, which has the checksums of all its files"""

    directory: str
    meta: steps.Meta
    inherits: str
    digest: str

    @property
    def start(self) -> StartPoint:
        """The beginning of the new run."""
        if self.inherits != "position":
            return StartPoint()
        return StartPoint(self.meta.step, dataclasses.replace(self.meta, wall_s=0.0))

    def record(self, config: ResolvedConfig) -> dict[str, Any]:
        """What the run's config.json says of it. config: the run's"""
        stored, step = self.meta.stored_config(), self.meta.step
        return {
            "checkpoints": self.directory,
            "step": step,
            "manifest": self.digest,
            "inherits": self.inherits,
            "tokens": span_at(spans(stored), max(step - 1, 0)).tokens_before(step),
            "changes": changes(stored, config),
        }

    def check(self, config: ResolvedConfig) -> None:
        """Raises ConfigError for a setting of the run with which it cannot begin with this step."""
        stored, own = self.meta.stored_config(), steps.Meta(to_dict(config))
        shapes_differ = wrong_arrays(own, expected_shapes(stored), trained_alone=True)
        name = f"step {self.meta.step} in {self.directory}"
        for each in violations(config, stored, self.meta.position):
            path = each.field
            in_common = path.startswith(IN_COMMON[self.inherits])
            if in_common and (shapes_differ or not path.startswith(MODEL)):
                rule = f"{each.rule} ({name}: train.fork_from)"
                raise ConfigError(path, get(config, path), rule, fixes=[*each.fixes])
        last, begin = config.train.steps, self.start.step
        if last <= begin:
            rule = f"is not beyond {name}, with which the run begins"
            raise ConfigError("train.steps", last, rule, fixes=[{"train.steps": begin + last}])

    def state(self, step: Step) -> TrainState:
        """The run's state before its first step; all that it does not inherit is zero, as in a new
        one. Every process must call this. Raises CheckpointError in all of them."""
        abstract, stored = stored_state(step)
        every = [field.name for field in dataclasses.fields(abstract)]
        names = {"position": every, "moments": [name for name in every if name != "step"]}
        inherited = names.get(self.inherits, [steps.PARAMETERS, steps.ANCHOR])
        of = lambda state: {name: getattr(state, name) for name in inherited}
        read = lambda: restore(self.directory, self.meta.step, of(abstract), of(stored))
        arrays = cluster.in_all(read, steps.CheckpointError)
        zeros = lambda a: a if is_on_disk(a) else host_memory.zeros(a)
        if self.inherits == "moments":
            # The learning rate begins anew; what moments know of their age stays with them.
            rate = jax.tree.map(zeros, abstract.optimizer[-1])
            arrays["optimizer"] = (*arrays["optimizer"][:-1], rate)
        rest = dataclasses.replace(abstract, **dict.fromkeys(inherited))
        rest = jax.tree.map(zeros, rest, is_leaf=is_on_disk)
        return with_working(step.layout, dataclasses.replace(rest, **arrays))


def open_fork(chosen: ChosenStep) -> Fork | None:
    """The step that a new run begins with, and logs what is inherited; None without
    `train.fork_from`, and for a run with a checkpoint of its own. Every process must call this.

    Raises, in all of them: RunError for a step that is not there or cannot be read, ConfigError for
    one that does not fit the run.
    """
    config, own = chosen.folder.run.config, stores.absolute(chosen.folder.directory)
    text = config.train.fork_from
    place, _, number = text.rpartition("@") if re.search(r".@\d{1,10}$", text) else (text, "", "")
    if text and stores.absolute(steps.checkpoints_of(place)) == own:
        rule = "is the run that is to begin with it"
        raise ConfigError("train.fork_from", text, rule, "another --workdir")
    if not text or chosen.start.resumes:
        return None

    def look() -> dict[str, Any]:
        try:
            found = subject.find(place)
        except (subject.NoCheckpointsError, stores.AddressError) as error:
            raise subject.NoCheckpointsError(f"train.fork_from={text!r}: {error}") from None
        step = found.step.name if found.step else number
        before = int(step) + 1 if step else None
        choice = steps.choose(found.directory, steps.TO_TRAIN, wrong_arrays, before=before)
        if choice.step is None or step not in ("", str(choice.step)):
            nearest = place if choice.step is None else f"{place}@{choice.step}"
            use = flag_text("config.train.fork_from", nearest)
            rule = f"train.fork_from={text!r} is no complete step: use {use}"
            raise subject.NoCheckpointsError(rule)
        sums = stores.read_within(found.directory / str(choice.step), manifest.FILE)
        meta, digest = dataclasses.asdict(choice.meta), hashlib.sha256(sums).hexdigest()[:12]
        return {"directory": str(found.directory), "meta": meta, "digest": digest}

    answer = cluster.from_main(look, RunError)
    answer["meta"] = steps.Meta(**answer["meta"])
    fork = Fork(inherits=config.train.fork_inherits, **answer)
    fork.check(config)
    record = fork.record(config)
    cluster.log(
        f"fork: {fork.inherits} of step {fork.meta.step} in {fork.directory} (manifest "
        f"{fork.digest}), after {record['tokens']:,} tokens; settings that differ: "
        f"{'; '.join(record['changes']) or 'none'}"
    )
    return fork
