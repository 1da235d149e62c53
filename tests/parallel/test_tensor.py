"""Tensor parallelism crosses `model` no more often than sequence parallelism needs (Korthikanti et
al. 2022, figure 5), and what goes to another stage is a device's part of the sequence. Read in the
compiled programs; where gradients are right, tests/training shows. The embedding split by rows over
`model`, against plain indexing: on its own, and inside the runtime's manual region."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import small
from support.ticks_text import groups_over

from jaxtrain.devices.mesh import AXES, BATCH_AXES, MANUAL_AXES, MODEL, make_mesh, psum
from jaxtrain.devices.sharding import constrain, named
from jaxtrain.parallel.tensor import add_lookup_gradient, lookup
from jaxtrain.planner.programs.program import Program
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
GPT2 = {"model.activation": "gelu", "model.biases": ("qkv", "out", "mlp")}
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


# --- the embedding table --------------------------------------------------------------------------

VOCABULARY, EMBEDDING, BATCH, LENGTH = 64, 6, 4, 8
GENERATOR = np.random.default_rng(0)
TABLE = GENERATOR.normal(size=(VOCABULARY, EMBEDDING)).astype(np.float32)
TOKENS = GENERATOR.integers(0, VOCABULARY, (BATCH, LENGTH), np.int32)
TOKENS[0, :4] = (
    0,
    VOCABULARY - 1,
    VOCABULARY // 2,
    VOCABULARY // 2 - 1,
)  # the ends of parts; and 0 again, elsewhere
TOKENS[1, 0] = 0
GRADIENT = GENERATOR.normal(size=(BATCH, LENGTH, EMBEDDING)).astype(np.float32)

MESHES = [(1, 1, 1, 1, 1, 2), (1, 1, 1, 1, 1, 4), (1, 2, 1, 1, 1, 2), (1, 2, 2, 1, 1, 2)]


def run_on_table(fn, sizes, *arrays, manual: bool):
    """fn(table-like, batch-like…) → batch-like or table-like, under jit on a mesh, or in a region
    that is manual but for `model`."""
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(sizes))])
    rows = P(BATCH_AXES)
    with jax.set_mesh(mesh):
        if manual:
            out = rows if fn is lookup else P()
            fn = jax.shard_map(
                fn if fn is lookup else lambda *a: psum(add_lookup_gradient(*a), BATCH_AXES),
                in_specs=(P(), *(rows for _ in arrays[1:])),
                out_specs=out,
                axis_names=set(MANUAL_AXES),
                check_vma=False,
            )
        table = jax.device_put(arrays[0], named(mesh, ("vocab", "width")))
        compiled = jax.jit(fn).lower(table, *arrays[1:]).compile()
        return compiled(table, *arrays[1:]), Program(compiled.as_text())


@pytest.mark.parametrize("manual", [False, True], ids=["jit", "runtime"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_lookup(sizes, manual):
    got, program = run_on_table(lookup, sizes, TABLE, TOKENS, manual=manual)
    np.testing.assert_array_equal(got, TABLE[TOKENS])
    assert got.sharding.shard_shape(got.shape)[1] == LENGTH // sizes[-1], (
        "the sequence leaves split"
    )
    gathered = [
        i
        for i in program.below(program.entry)
        if i.collective == "all-gather" and max(i.sizes) >= TABLE.size
    ]
    assert not gathered, "the table was gathered"


@pytest.mark.parametrize("manual", [False, True], ids=["jit", "runtime"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gradient_is_added_to_what_is_there(sizes, manual):
    start = np.zeros_like(TABLE) if manual else TABLE  # the region's sum is over all devices
    got, _ = run_on_table(add_lookup_gradient, sizes, start, TOKENS, GRADIENT, manual=manual)
    wanted = start.copy()
    np.add.at(wanted, TOKENS, GRADIENT)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_gradient_of_lookup_itself():
    mesh = make_mesh((1, 1, 1, 1, 1, 4), jax.devices()[:4])
    wanted = jax.grad(lambda t: (t[TOKENS] * GRADIENT).sum())(TABLE)
    with jax.set_mesh(mesh):
        got = jax.jit(
            jax.grad(
                lambda t: (constrain(lookup(t, TOKENS), ("batch", "token", None)) * GRADIENT).sum()
            )
        )(TABLE)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_bfloat16_rows():
    """On CPU too, whose compiler aborts on a 16-bit sum over devices."""
    got, _ = run_on_table(
        lookup, (1, 1, 2, 1, 1, 2), TABLE.astype(jnp.bfloat16), TOKENS, manual=True
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, TABLE.astype(jnp.bfloat16)[TOKENS])


def test_a_bfloat16_gradient_is_added_in_float32():
    rounded = GRADIENT.astype(jnp.bfloat16)
    got, _ = run_on_table(
        add_lookup_gradient, (1, 1, 1, 1, 1, 4), TABLE, TOKENS, rounded, manual=False
    )
    wanted = TABLE.copy()
    np.add.at(wanted, TOKENS, rounded.astype(np.float32))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_the_table_on_one_device():
    assert lookup(jnp.asarray(TABLE), TOKENS).shape == (BATCH, LENGTH, EMBEDDING)
    total = functools.reduce(
        lambda a, _: add_lookup_gradient(a, TOKENS, GRADIENT), range(2), jnp.zeros_like(TABLE)
    )
    np.testing.assert_allclose(total.sum(), 2 * GRADIENT.sum(), rtol=1e-4)
