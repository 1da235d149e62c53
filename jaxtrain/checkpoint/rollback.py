"""A run's way back to an earlier checkpoint, in the same process: the state has the same shardings, so no program is compiled again."""

from typing import Any

import jax

from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.training.recovery import Finding, Memory, Rollback
from jaxtrain.training.state import TrainState, initial_state
from jaxtrain.training.step import Step


def roll_back(saves: Checkpointer, finding: Finding, state: Any, step: Step, seed: int) -> tuple[Rollback, TrainState]:
    """The way back to the newest whole checkpoint from before `finding.since`, and its state; without one, to the first state.

    A save that is under way is finished first. Later checkpoints are set aside, for their steps come again. `state` is deleted, to make
    room. Every process must call this. Raises CheckpointError as `choose_together` and `restore` do.
    """
    saves.wait()
    choice = saves.choose_together(before=finding.since)
    at = choice.step or 0
    saves.set_aside_after(at, f"the run went back to step {at}")
    for array in jax.tree.leaves(state):
        array.delete()
    restored = saves.restore(at, step.abstract_state()) if choice.step else initial_state(step.layout, step.optimizer, seed)
    position = choice.position if finding.batch is None else finding.batch + 1
    memory = Memory.from_json(choice.meta.memory) if choice.meta else Memory()
    return Rollback(finding.at, at, position, finding.why, memory), restored
