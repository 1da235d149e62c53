"""A run's way back to an earlier checkpoint, in the same process: the state has the same shardings,
so no program is compiled again."""

from typing import Any

import jax
from etils import epath

from jaxtrain.checkpoint.manager import Checkpointer, choose_together
from jaxtrain.checkpoint.restoring import restore_newest
from jaxtrain.training.recovery import Finding, Memory, NumbersError, Rollback
from jaxtrain.training.state import TrainState, initial_state, stored_shapes
from jaxtrain.training.step import Step


def roll_back(
    directory: epath.Path, saves: Checkpointer, finding: Finding, state: Any, step: Step, seed: int
) -> tuple[Rollback, TrainState]:
    """The way back to the newest whole checkpoint from before `finding.since`, and its state;
    without one, to the first state.

    A save that is under way is finished first. Later checkpoints are set aside, for their steps
    come again. `state` is deleted, to make room. Every process must call this.

    Raises NumbersError where there are checkpoints, and none from before; CheckpointError as
    `choose_together` and `restore_newest` do.
    """
    saves.close()
    choice = choose_together(directory, before=finding.since)
    if choice.step is None and (kept := choose_together(directory).steps):
        rule = (
            f"the checkpoints that are kept begin with step {kept[0]}, and the run would have to "
            "go back further"
        )
        raise NumbersError(
            f"{finding.why}; {rule}: keep more of them (checkpoint.keep), or make them less "
            "often (checkpoint.every)"
        )
    for array in jax.tree.leaves(state):
        array.delete()
    if choice.step:
        shapes, placement = stored_shapes(step.layout, step.optimizer), step.layout.placement
        choose_again = lambda damaged: choose_together(directory, damaged, finding.since)
        restored, choice = restore_newest(
            choice, choose_again, directory, step.abstract_state(), shapes, placement
        )
    else:
        restored = initial_state(step.layout, step.optimizer, seed)
    at = choice.step or 0
    saves.set_aside_after(at, f"the run went back to step {at}")
    position = choice.position if finding.batch is None else finding.batch + 1
    return Rollback(
        finding.at, at, position, finding.why, Memory.from_json(choice.memory)
    ), restored
