"""Matrices and moments of 16 bits: the compiled step's memory and casts, the same losses as with
parameters of 32 bits, the same bits on every mesh, and checkpoints of each form in each other."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import load_parameters, restore
from jaxtrain.planner.programs.compile_check import cast_bytes
from jaxtrain.planner.programs.program import Program
from jaxtrain.training.state import (
    bytes_per_device,
    stored_parameters,
    stored_shapes,
    with_working,
)
from jaxtrain.training.step import make_step

MASTERS = {"precision.params": "bfloat16"}
ALONE = MASTERS | {"precision.masters": "none"}
NARROW = {"precision.moments": "bfloat16"}
FORMS = {
    "float32": {},
    "masters": MASTERS,
    "masters, 16-bit moments": MASTERS | NARROW,
    "16 bits alone": ALONE | NARROW,
}
NARROW_FORMS = small.named(["masters", "16 bits alone"], ["masters, 16-bit moments"])
BFLOAT16 = {"precision.compute": "bfloat16", "optimizer.clip_norm": plain_loop.CLIP}


@functools.cache
def compiled(form: str, mesh: tuple[int, int, int]):
    """(config, step, its train program compiled); with 16-bit products."""
    # each dimension divides, so ZeRO scatters all matrices
    case = Case(mesh, microbatches=4, changes={"model.vocab_size": 64} | small.PLAIN_LAYER)
    cfg = case.config(BFLOAT16 | FORMS[form])
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        lowered = step.train.lower(step.abstract_state(), step.abstract_batch)
    return cfg, step, lowered.compile()


@pytest.mark.parametrize(
    "form, read, scattered",
    [
        ("masters", 2, 12),
        pytest.param("masters, 16-bit moments", 2, 8, marks=pytest.mark.full),
        ("16 bits alone", 2, 4),
    ],
)
@pytest.mark.parametrize("mesh", small.named([(2, 2, 2)], [(4, 1, 1)]))
def test_the_compiled_step_has_so_many_bytes_a_parameter(form, read, scattered, mesh):
    """2 bytes of each matrix on a device are read, the rest is cut by `data`; vectors, 0.7 % of
    the numbers, are of 32 bits."""
    _, step, program = compiled(form, mesh)
    state, shards = step.abstract_state(), mesh[0]
    others = bytes_per_device((state.step, step.abstract_batch)) + 8  # two counts of updates
    arguments = program.memory_analysis().argument_size_in_bytes - others
    matrices = vectors = 0
    for parameter in step.layout.parameters():
        split = {a for part in parameter.reduction.unsharded for a in np.atleast_1d(part) if a}
        size = parameter.size // math.prod(step.mesh.shape[a] for a in split)
        if parameter.spec.cast:
            # end stages without a shared table scatter it over `stage`, too
            cut = math.prod(step.mesh.shape[a] for a in parameter.reduction.scatter_axes)
            assert cut >= shards
            matrices += size * (read + scattered / cut)
        else:
            cut = math.prod(step.mesh.shape[a] for a in parameter.reduction.scatter_axes)
            vectors += size * (4 + (scattered - 4 * ("masters" in form)) / cut)
    assert arguments == matrices + vectors
    assert vectors < 0.04 * matrices
    kinds = step.state_memory(reduces_in_ops=False)
    held = sum(kinds.get(kind, 0) for kind in ("parameters", "masters", "moments"))
    assert held == arguments + 8


@pytest.mark.parametrize("form", NARROW_FORMS)
@pytest.mark.parametrize("mesh", small.named([(2, 2, 2)], [(4, 1, 1)]))
def test_no_weights_are_cast_before_the_loops(form, mesh):
    """Parameters of 32 bits are, all of them."""
    casts = lambda form: cast_bytes(Program(compiled(form, mesh)[2].as_text()))
    assert casts("float32") > 0 and not casts(form)


@functools.cache
def trained(form: str, mesh: tuple[int, int, int]) -> tuple[list[float], dict]:
    """Losses of some steps and the parameters after them (plain), with 16-bit products."""
    cfg, step, program = compiled(form, mesh)
    losses = []
    with jax.set_mesh(step.mesh):
        state = small.first_state(step, plain_loop.weights(cfg))
        for i in range(plain_loop.STEPS):
            state, metrics = program(state, small.place_batch(step, cfg, small.batch(cfg, i)))
            losses.append(float(metrics["loss"]))
    return losses, small.to_plain(step.layout, state.params)


@pytest.mark.parametrize("mesh", small.named([(2, 2, 2)], [(4, 1, 1)]))
def test_masters_train_as_parameters_of_32_bits_bit_for_bit(mesh):
    """Products read the same 16-bit numbers, whether these are cast before the loops or kept."""
    (losses, params), (expected, same) = trained("masters", mesh), trained("float32", mesh)
    assert losses == expected
    jax.tree.map(np.testing.assert_array_equal, params, same)


# --- meshes ---------------------------------------------------------------------------------------

EXPERTS = {
    "model.experts": 4,
    "model.experts_per_token": 2,
    "model.expert_width": 24,
    "mesh.expert": 2,
}
ADAFACTOR = {
    "optimizer.name": "adafactor",
    "optimizer.factored_size": 16,
    "optimizer.learning_rate": 3e-2,
}
LAYOUTS = {
    "ZeRO 3, padded stacks and vocabulary": Case(
        (2, 2, 2), "1f1b", 1, 2, changes={"model.layers": 3, "parallel.zero": 3}
    ),
    "ZeRO 2, interleaved, context": Case(
        (2, 2, 1), "interleaved", 2, 4, changes={"parallel.zero": 2, "mesh.context": 2}
    ),
    "experts": Case((2, 1, 1), changes=EXPERTS),
    "experts, ZeRO 3": Case((2, 1, 1), changes=EXPERTS | {"parallel.zero": 3}),
    "offload": Case((2, 2, 1), changes={"parallel.offload": "optimizer"}),
    "skip, model": Case((1, 1, 4), changes={"train.on_nonfinite": "skip", "parallel.zero": 0}),
    "adafactor, padded": Case(
        (2, 2, 2),
        changes=ADAFACTOR | {"model.layers": 3},
    ),
    "adafactor, skip, model, padded": Case(
        (1, 1, 4),
        changes=ADAFACTOR | {"train.on_nonfinite": "skip", "parallel.zero": 0},
    ),
    "muon": Case((2, 1, 2), changes={"optimizer.name": "muon", "parallel.zero": 3}),
    "lion": Case((4, 1, 1), changes={"optimizer.name": "lion", "optimizer.learning_rate": 3e-4}),
}
OF_MESHES = {f"{form}: {layout}": (form, layout) for form in FORMS for layout in LAYOUTS}
DEFAULT = ["16 bits alone: ZeRO 2, interleaved, context"]
FULL = sorted({name for name in OF_MESHES if "float32" not in name} - {*DEFAULT})


@functools.cache
def of_one_device(cfg: configs.Config) -> plain_loop.Run:
    return plain_loop.train(cfg)


@pytest.mark.parametrize("case", small.named(DEFAULT, FULL))
def test_a_mesh_rounds_as_one_device(case):
    """In float32, sums in another order differ by 1e-6, so one number in 10⁴ is rounded to its
    other neighbour: the numbers of 16 bits are the same but for one in a hundred (a sign of lion's
    turns where a gradient is rounding alone, and Muon makes small singular values large), and so
    are the losses to 1e-3."""
    form, layout = OF_MESHES[case]
    clipped = {"optimizer.clip_norm": plain_loop.CLIP}
    cfg = LAYOUTS[layout].config(clipped | FORMS[form] | small.PLAIN_LAYER)
    alone = {
        "mesh.data": 1,
        "mesh.stage": 1,
        "mesh.model": 1,
        "mesh.context": 1,
        "mesh.expert": 1,
        "parallel.zero": 1,
        "parallel.reduce": "step",
        "parallel.offload": "none",
        "train.on_nonfinite": "stop",
        "pipeline.schedule": "1f1b",
        "pipeline.repeats": 1,
    }
    expected, got = of_one_device(configs.replace(cfg, alone)), plain_loop.train(cfg)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-3)
    start = plain_loop.weights(cfg)
    for (path, a), b, before in zip(
        jax.tree_util.tree_leaves_with_path(got.params),
        jax.tree.leaves(expected.params),
        jax.tree.leaves(start),
        strict=True,
    ):
        if a.dtype == jnp.bfloat16:
            assert (a != b).mean() < (0.05 if "muon" in case else 0.02), jax.tree_util.keystr(path)
            moved = (a != before.astype(a.dtype)).mean()
            assert moved > 0.1, f"{jax.tree_util.keystr(path)} moved in {moved:.0%} of its numbers"


# --- checkpoints ----------------------------------------------------------------------------------


@functools.cache
def with_state(form: str):
    """(config, step, a state)."""
    cfg = Case((2, 1, 1), changes={"model.layers": 2}).config(BFLOAT16 | FORMS[form])
    step = make_step(cfg, small.mesh_of(cfg))
    return cfg, step, state_of(cfg, step)


def state_of(cfg, step):
    """As after three steps, with moments by chance."""
    state = small.first_state(step, plain_loop.weights(cfg))
    random = np.random.default_rng(1)

    def drawn(a):
        if jnp.issubdtype(a.dtype, jnp.integer):
            return jax.device_put(np.full(a.shape, 3, a.dtype), a.sharding)
        # second moments are never below 0
        numbers = 1e-3 * np.abs(random.standard_normal(a.shape, np.float32))
        return jax.device_put(numbers.astype(a.dtype), a.sharding)

    optimizer, number = jax.tree.map(drawn, (state.optimizer, state.step))
    return dataclasses.replace(state, optimizer=optimizer, step=number)


def save(folder, step, state) -> None:
    saves = Checkpointer(folder, stored_shapes(step.layout, step.optimizer))
    saves.save(3, state.stored, {})
    saves.close()


def read(folder, step):
    abstract = step.abstract_state().stored
    stored = restore(folder, 3, abstract, stored_shapes(step.layout, step.optimizer))
    with jax.set_mesh(step.mesh):
        return with_working(step.layout, stored)


def assert_same_bits(got, expected) -> None:
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        same = a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert same, jax.tree_util.keystr(path)


def test_a_checkpoint_changes_between_all_forms(tmp_path):
    """Numbers of 32 bits become the nearest of 16; those of 16 are the same in 32. A master that
    was stored comes back as a parameter of 32 bits, bit for bit, and the other way."""
    for form in FORMS:
        _, step, state = with_state(form)
        save(tmp_path / form, step, state)
        for other in FORMS:
            _, target, _ = with_state(other)
            got, like = read(tmp_path / form, target), target.abstract_state()
            assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), got) == jax.tree.map(
                lambda a: (a.shape, a.dtype, a.sharding), like
            )
            cast = lambda a, b: np.asarray(a).astype(b.dtype)
            for part in ("params", "optimizer"):
                expected = jax.tree.map(cast, getattr(state, part), getattr(like, part))
                assert_same_bits(getattr(got, part), expected)
            copies = jax.tree.map(cast, got.params, like.read)
            assert_same_bits(got.read, copies)


@pytest.mark.parametrize("form", NARROW_FORMS)
def test_a_resumed_run_goes_on_bit_for_bit(form, tmp_path):
    cfg, step, program = compiled(form, (2, 2, 2))
    state = state_of(cfg, step)
    save(tmp_path, step, state)
    with jax.set_mesh(step.mesh):
        batch = small.place_batch(step, cfg, small.batch(cfg, 3))
        resumed, _ = program(read(tmp_path, step), batch)
        kept = jax.tree.map(lambda a: a.copy(), state)
        straight, _ = program(kept, batch)
    assert_same_bits(resumed, straight)


def test_generation_reads_a_checkpoint_of_any_form(tmp_path):
    """In float32 and in the compute type; from masters, and from 16 bits alone."""
    for form in ("masters", "16 bits alone"):
        cfg, step, state = with_state(form)
        save(tmp_path / form, step, state)
        _, params = load_parameters(tmp_path / form, 3, cfg.model, cfg.precision)
        expected = small.to_plain(step.layout, state.params)["embed"]["table"]
        assert params["embed"]["table"].dtype == jnp.float32
        np.testing.assert_array_equal(
            np.asarray(params["embed"]["table"])[: cfg.model.vocab_size], np.float32(expected)
        )


# --- replicas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["masters", "16 bits alone"])
def test_independent_replicas_exchange_what_updates_change(form):
    """Masters where there are some: after an exchange they are the anchor, and copies and
    parameters of 16 bits are its nearest numbers."""
    changes = {"mesh.replica": 2, "train.diloco_inner_steps": 2, "model.layers": 2}
    cfg = Case((2, 1, 1), changes=changes).config(BFLOAT16 | FORMS[form])
    step = make_step(cfg, small.mesh_of(cfg))
    before, random = small.first_state(step, plain_loop.weights(cfg)), np.random.default_rng(1)

    def moved(a):
        """Each replica's numbers, as steps of its own leave them."""
        numbers = np.float32(a) + 0.01 * random.standard_normal(a.shape, np.float32)
        return jax.device_put(numbers.astype(a.dtype), a.sharding)

    before = dataclasses.replace(before, params=jax.tree.map(moved, before.params), working=None)
    with jax.set_mesh(step.mesh):
        before = with_working(step.layout, before)
    own, anchor = jax.device_get((before.params, before.anchor))
    with jax.set_mesh(step.mesh):
        state = step.exchange(before)
    rate, momentum = cfg.optimizer.outer_learning_rate, cfg.optimizer.outer_momentum
    for params, a, new, read_, spec in zip(
        jax.tree.leaves(own),
        jax.tree.leaves(anchor),
        jax.tree.leaves(state.anchor),
        jax.tree.leaves(state.read),
        jax.tree.leaves(stored_parameters(step.layout)),
        strict=True,
    ):
        del spec
        delta = a - np.float32(params).mean(0)
        expected = a - rate * (1 + momentum) * delta
        np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-7)
        for replica in range(2):
            np.testing.assert_array_equal(read_[replica], np.asarray(new).astype(read_.dtype))
    if form == "masters":
        each = jax.tree.map(lambda p: np.asarray(p)[1], state.params)
        jax.tree.map(np.testing.assert_array_equal, each, jax.device_get(state.anchor))
    assert dataclasses.replace(state, working=None).read is state.params
