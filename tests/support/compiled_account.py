"""What a compiled step sends, read from its text, in the account's terms."""

import collections
from collections.abc import Mapping

import jax

from jaxtrain.config import Config
from jaxtrain.pipeline.setup import Setup
from jaxtrain.planner.layer.links import sent
from jaxtrain.planner.programs.compile_check import step_loops
from jaxtrain.planner.programs.compiled_collectives import collectives
from jaxtrain.planner.programs.loops import op_in
from jaxtrain.planner.programs.program import Instruction, Program
from jaxtrain.training.step import Step, make_step


def compile_train(cfg: Config, mesh: jax.sharding.Mesh) -> tuple[Step, Program]:
    step = make_step(cfg, mesh)
    with jax.set_mesh(step.mesh):
        made = step.train.lower(step.abstract_state(), step.abstract_batch).compile()
    return step, Program(made.as_text())


def op_of(*instructions: Instruction) -> str:
    """The op in whose scope they stand."""
    text = "".join(i.op_name for i in instructions)
    name = op_in(text) or ("gather" if "/gather/" in text else "other")
    return name.replace("K", "F")


def read(
    mesh: Mapping[str, int], setup: Setup, program: Program, stage: int
) -> collections.Counter:
    """(op, kind, axes, devices) → bytes that a device of the stage sends in a step, by the ring
    algorithms."""
    found: collections.Counter = collections.Counter()
    for run in step_loops(program, setup, stage).executed():
        for c in collectives(program, run.instruction, mesh, stage):
            if size := sent(c.kind, c.sending, c.devices):
                op = op_of(run.instruction, c.instruction)
                found[op, c.kind, c.axes, c.devices] += float(run.times * size)
    return found
