"""What a compiled step sends, read from its text, in the account's terms."""

import collections
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import Setup
from jaxtrain.training.step import Step, abstract_batch, make_step
from support import hlo
from support.hlo_cost import Costs
from support.step_loops import StepLoops, op_in

FEW = 128  # bytes: losses, norms and counts


def compile_train(cfg: Config, mesh: jax.sharding.Mesh) -> tuple[Step, hlo.Program]:
    step = make_step(cfg, mesh)
    with jax.set_mesh(step.mesh):
        made = step.train.lower(step.abstract_state(), abstract_batch(cfg, step)).compile()
    return step, hlo.Program(made.as_text())


def op_of(*instructions: hlo.Instruction) -> str:
    """The op in whose scope they stand."""
    text = "".join(i.op_name for i in instructions)
    name = op_in(text) or ("gather" if "/gather/" in text else "other")
    return "F" if name == "K" else name


def collectives(program: hlo.Program, i: hlo.Instruction) -> Iterator[tuple[hlo.Instruction, str, list[int]]]:
    """(the collective, its kind, bytes of its operands) of an instruction, or of a fusion around one. TPUs reduce and scatter in a fusion
    of an all-reduce."""
    if i.collective:
        yield i, i.collective, program.operand_bytes(i)
    elif i.opcode == "fusion":
        for inner in program.computations.get(i.calls["calls"], []):
            if inner.collective:
                scatters = inner.collective == "all-reduce" and "all-reduce-scatter" in i.calls["calls"]
                yield inner, "reduce-scatter" if scatters else inner.collective, program.operand_bytes(inner)


def read(mesh: Mapping[str, int], setup: Setup, program: hlo.Program, stage: int) -> collections.Counter:
    """(op, kind, axes, devices) → bytes that a device of the stage sends in a step, by the ring algorithms."""
    device = int(np.ravel_multi_index([stage if name == "stage" else 0 for name in mesh], tuple(mesh.values())))
    found: collections.Counter = collections.Counter()
    for run in StepLoops(program, setup, stage).executed():
        outer, times = run.instruction, run.times
        for i, kind, arrays in collectives(program, outer):
            axes, n = hlo.along(i, mesh)
            size = sum(b for b in arrays if b * (n if kind == "all-gather" else 1) > FEW)
            if kind == "collective-permute":
                n, sent = mesh[axes[0]], size if device in dict(hlo.pairs(i.text)) else 0
            else:
                sent = {"all-gather": size * (n - 1), "all-reduce": 2 * size * (n - 1) / n}.get(kind, size * (n - 1) / n)
            if sent:
                found[op_of(outer, i), kind, axes, n] += float(times * sent)
    return found


def products(setup: Setup, program: hlo.Program, stage: int) -> float:
    """Operations of a step's dots and convolutions on a device of the stage."""
    costs = Costs(program)
    return sum(run.times * costs.flops(run.instruction) for run in StepLoops(program, setup, stage).executed())
