"""From which checkpoint a run goes on, and whether its config and its corpus are of one run with
it."""

import dataclasses
import pathlib
from collections.abc import Mapping

import jax
from etils import epath

from jaxtrain.checkpoint import stores
from jaxtrain.checkpoint.manager import choose_together
from jaxtrain.checkpoint.steps import NONE, Choice, Meta
from jaxtrain.config import Config, ConfigError
from jaxtrain.config.checks import Environment, check_resume
from jaxtrain.config.resume import changes
from jaxtrain.data.tokens import Corpus, DataError
from jaxtrain.devices import cluster
from jaxtrain.pipeline.checks import RULES, with_tables


def folder_of_checkpoints(config: Config, workdir: pathlib.Path) -> epath.Path:
    """Where a run's checkpoints lie."""
    return stores.folder(config.checkpoint.directory or workdir / "checkpoints")


@dataclasses.dataclass(frozen=True)
class Resumption:
    """The checkpoints of a run, and the config that is to go on from one of them. Every process
    calls every method.

    directory:  of the checkpoints
    config:     of the run, resolved
    unresolved, recipe: the config before it was resolved, and before the command's flags, from
        which an error's suggestions start
    before:     checkpoints of this step and later ones are not looked at; None: all are
    """

    directory: epath.Path
    config: Config
    unresolved: Config
    recipe: Config
    before: int | None = None

    def choose(self, damaged: Mapping[int, str] = NONE) -> Choice:
        """The newest whole checkpoint, if there is one. ConfigError if the config cannot continue
        it.

        damaged: step → why, for those whose arrays turned out to be damaged.
        """
        choice = choose_together(self.directory, damaged, self.before)
        if choice.strangers:
            rest = (
                f"the newest whole checkpoint is {choice.step}"
                if choice.step
                else "there is no whole checkpoint"
            )
            cluster.say(f"passed over in {self.directory}: {choice}; {rest}")
        if choice.meta:
            self._refuse(choice.meta)
        return choice

    def check_corpus(self, choice: Choice, corpus: Corpus) -> None:
        """DataError where the corpus is not the checkpoint's."""
        if choice.meta and choice.meta.checksum != corpus.checksum:
            raise DataError(
                f"data.source={corpus.source} has changed since the checkpoint (checksum "
                f"{corpus.checksum[:12]}, "
                f"then {choice.meta.checksum[:12]}): put it back or use another --workdir"
            )

    def say_changes(self, choice: Choice) -> None:
        """Lists the settings that are not those of the checkpoint."""
        if choice.meta and (changed := changes(choice.meta.stored_config(), self.config)):
            cluster.say(
                f"changed since the checkpoint of step {choice.step}:",
                *(f"  {change}" for change in changed),
            )

    def choose_again(self, corpus: Corpus, damaged: Mapping[int, str]) -> Choice:
        """The choice when newer ones turned out to be damaged. Errors as when it was chosen
        first."""
        choice = self.choose(damaged)
        self.check_corpus(choice, corpus)
        self.say_changes(choice)
        return choice

    def why_not(self, corpus: Corpus, meta: Meta) -> str:
        """What speaks against going on from a checkpoint with this meta, in words, or ""."""
        if meta.checksum != corpus.checksum:
            return f"data.source={corpus.source} has changed since"
        try:
            self._refuse(meta)
        except ConfigError as error:
            return f"{error.field}={error.value!r} {error.rule}"
        return ""

    def _refuse(self, meta: Meta) -> None:
        """ConfigError where the config cannot continue a checkpoint with this meta."""
        environment = Environment(
            jax.device_count(), jax.default_backend(), self.recipe, rules=RULES
        )
        check_resume(meta.stored_config(), self.unresolved, with_tables(environment))
