"""Tensor parallelism crosses `model` no more often than sequence parallelism needs (Korthikanti et
al. 2022, figure 5), and what goes to another stage is a device's part of the sequence. Read in the
compiled programs; where gradients are right, tests/training shows."""

import collections
import functools
import math
import re

import jax
import pytest
from support import small
from support.ticks_text import groups_over

from jaxtrain.devices.mesh import AXES, MODEL
from jaxtrain.hlo.program import Program
from jaxtrain.training.step import make_step

ROWS, TOKENS, WIDTH, MODEL_SIZE = 4, 16, 64, 4
ACTIVATION = ROWS * TOKENS * WIDTH
LAYERS = 3  # of a stage: the loop over them has their number in its text
BASE = {
    "model.width": WIDTH,
    "model.mlp_width": 192,
    "model.layers": 2 * LAYERS,
    "data.batch_size": 4 * ROWS,
}
GPT2 = {"model.activation": "gelu", "model.biases": True}
# Of a layer in each op: collectives of activations, gathered and scattered. R leaves out what no
# residual is made of.
MEGATRON = {"K": (2, 2), "F": (2, 2), "R": (2, 2), "B": (2, 2), "W": (2, 0)}
CASES = {"full, shared heads": {"pipeline.remat": "full", "model.kv_heads": 2}}
MORE = {
    "none": {"pipeline.remat": "none"},
    "selective, gpt2 form": {"pipeline.remat": "selective", **GPT2},
}


@functools.cache
def compiled(case: str) -> Program:
    cfg = small.config((1, 2, MODEL_SIZE), "1f1b", 1, 4, BASE | (CASES | MORE)[case])
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        made = step.gradients.lower(step.abstract_state().params, step.abstract_batch).compile()
    return Program(made.as_text())


def of_ops(case: str) -> dict[str, collections.Counter]:
    """Op → {(collective, elements that a device ends up with, devices that meet): times} in one
    layer."""
    program, found = compiled(case), collections.defaultdict(collections.Counter)
    shape = (1, 1, 2, 1, 1, MODEL_SIZE)
    for i in program.below(program.entry):
        op = re.search(r"/([A-Z])\d/", i.op_name)
        if i.collective and op:
            groups = i.groups(math.prod(shape))
            inside = groups_over(shape, (AXES.index(MODEL),))
            assert all(any(group <= one for one in inside) for group in groups), i.text
            found[op[1]].update((i.collective, size, len(next(iter(groups)))) for size in i.sizes)
    return found


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_no_more_than_sequence_parallelism_needs(case):
    for op, found in of_ops(case).items():
        gathers, scatters = MEGATRON[op]
        large = {key: n for key, n in found.items() if key[1] * MODEL_SIZE >= ACTIVATION}
        assert found["all-gather", ACTIVATION, MODEL_SIZE] <= gathers
        assert found["reduce-scatter", ACTIVATION // MODEL_SIZE, MODEL_SIZE] <= scatters
        assert set(large) <= {
            ("all-gather", ACTIVATION, MODEL_SIZE),
            ("reduce-scatter", ACTIVATION // MODEL_SIZE, MODEL_SIZE),
        }, op
        # What else: gradients of norms and of biases that all devices have, and columns of heads
        # that several share.
        shared = 2 * WIDTH * (WIDTH // 8) if "shared" in case else 0
        assert (
            sum(size * n for (_, size, _), n in found.items())
            - sum(key[1] * n for key, n in large.items())
            <= shared + 4 * WIDTH
        )


def test_every_op_was_seen():
    assert {op for case in CASES for op in of_ops(case)} == set(MEGATRON)
    assert [of_ops("none")[op]["all-gather", ACTIVATION, MODEL_SIZE] for op in "KBW"] == [2, 2, 2]


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_a_stage_sends_its_part_of_the_sequence(case):
    """1/model of the activation, of which the receiving stage gathers the whole only inside its
    ops."""
    program = compiled(case)
    sizes = [
        i.sizes[0] for i in program.below(program.entry) if i.collective == "collective-permute"
    ]
    assert sizes and set(sizes) == {ACTIVATION // MODEL_SIZE}
