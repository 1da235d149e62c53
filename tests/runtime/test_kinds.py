"""Layers of several kinds in the runtime, of one form or of several: gradients of one device on
every schedule, by loops over whole periods and by the layer's index; pools begin with NaN. What a
stage allocates, and which loops its program has. Layers at the ends:
tests/training/test_end_layers.py."""

import collections
import itertools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from support import plain_loop, small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.config.groups.layer_kinds import kinds_of_layers
from jaxtrain.devices import host_memory
from jaxtrain.runtime import state_plan
from jaxtrain.runtime.layers import layer_loops
from jaxtrain.schedule.orders import SCHEDULES
from jaxtrain.training.several_steps import CompiledSteps
from jaxtrain.training.step import make_step

# Kinds of one form differ in what no parameter's shape depends on.
ONE_FORM = ("a.norm_epsilon=0.3", "a.window=5", "b.rotary_base=10", "c.positions=none")
FORMS = ("a.norm_epsilon=0.3", "b.head_dim=8", "b.mlp_width=32", "c.experts=4", "c.expert_width=16")
PATTERNS = {"3:1": ("a", "a", "a", "b"), "5:1": ("c", "c", "c", "c", "c", "b"), "1:1": ("b", "a")}


def kinds(pattern: str, layers: int, settings: tuple[str, ...] = ONE_FORM) -> dict:
    """Changes of a config. Its pattern's kinds alone have settings."""
    named = PATTERNS[pattern]
    settings = tuple(entry for entry in settings if entry[0] in named)
    return {"model.layers": layers, "model.pattern": named, "model.kinds": settings}


SELECTIVE, NONE, K_OF_N = ({"pipeline.remat": remat} for remat in ("selective", "none", "full:1"))
ZERO_3, LAST = {"parallel.zero": 3}, {"parallel.zero": 1, "parallel.reduce": "last"}
INPUTS = {"pipeline.save": ("layer_input",)}
CASES = {
    "periods of two forms, ZeRO-3": Case((2, 1, 1), changes=kinds("3:1", 7, FORMS) | ZERO_3),
    "by index, two forms": Case((1, 3, 1), "zb_h1", 1, 3, kinds("3:1", 7, FORMS) | NONE),
}
MORE = {
    "one stage": Case((1, 1, 2), changes=kinds("5:1", 7) | SELECTIVE),
    "one stage, full": Case((2, 1, 1), changes=kinds("3:1", 7, FORMS)),
    "one stage, k of n": Case((2, 1, 1), changes=kinds("3:1", 12, FORMS) | K_OF_N | ZERO_3),
    "by index": Case((2, 2, 1), "1f1b", 1, 3, kinds("3:1", 7)),
    "by index, ZeRO-3, inputs of layers": Case(
        (2, 4, 1), "gpipe", 1, 4, kinds("5:1", 12) | ZERO_3 | INPUTS
    ),
    "periods on every stage": Case((1, 2, 2), "zb_v", 2, 4, kinds("1:1", 12) | NONE),
    "overlapped, by index": Case((1, 2, 1), "dualpipe_v", 2, 4, kinds("3:1", 7) | K_OF_N),
    "overlapped, periods": Case((1, 2, 1), "dualpipe_v", 2, 4, kinds("1:1", 12) | NONE),
    "overlapped, three forms of experts": Case(
        (1, 2, 1),
        "dualpipe_v",
        2,
        4,
        kinds("5:1", 12, FORMS) | {"mesh.expert": 2, "pipeline.overlap": True},
    ),
    "experts, by index": Case((1, 4, 1), "zb_h2", 1, 8, kinds("5:1", 7, FORMS) | SELECTIVE),
    "reduced in the last W": Case((2, 2, 1), "1f1b", 1, 4, kinds("3:1", 7, FORMS) | LAST),
    "ZeRO-2, a form on one stage": Case(
        (2, 2, 1), "interleaved", 2, 4, kinds("5:1", 7, FORMS) | {"parallel.zero": 2}
    ),
    "dense layers and a module of prediction": Case(
        (2, 2, 1),
        "zb_v",
        2,
        3,
        kinds("3:1", 6, FORMS) | {"model.dense_layers": 1, "model.mtp_depth": 1} | NONE,
    ),
    "units that only one stage has": Case(
        (1, 2, 1),
        "1f1b",
        1,
        4,
        kinds("3:1", 7) | {"pipeline.chunk_layers": (2, 5), "pipeline.layers_per_op": 2},
    ),
}
# Gradients are reduced one trip late, as on GPUs.
ON_GPUS = {
    "ZeRO-3 on GPUs": Case((2, 1, 1), changes=kinds("3:1", 7) | ZERO_3),
    "reduced in the last W on GPUs": Case((2, 2, 1), "1f1b", 1, 4, kinds("1:1", 8) | LAST),
    "reduced in the last W on GPUs, by index": Case(
        (2, 2, 1), "zb_h1", 1, 4, kinds("1:1", 7) | LAST | {"parallel.zero": 3}
    ),
}


def drawn(pattern: str, schedule: str, stages: int, random: np.random.Generator) -> Case:
    """A layout for a pattern; what is left open is drawn."""
    repeats = 2 if SCHEDULES[schedule].placement == "v" or schedule == "interleaved" else 1
    one_of = lambda *values: values[random.integers(len(values))]
    layers = one_of(*(n for n in (7, 12, 26) if n >= stages * repeats))
    changes = kinds(pattern, layers, one_of(ONE_FORM, FORMS))
    zero, remat = one_of(0, 1, 2, 3), one_of("full", "selective", "none", "full:1", "full:2")
    changes |= {"parallel.zero": zero, "pipeline.remat": remat}
    mesh = one_of((1, stages, 1), (2, stages, 1), (1, stages, 2) if stages < 4 else (2, 4, 1))
    return Case(mesh, schedule, repeats, one_of(3, 4, 8), changes)


random = np.random.default_rng(56)
MATRIX = {
    f"{pattern} {schedule} on {stages}": drawn(pattern, schedule, stages, random)
    for pattern, schedule, stages in itertools.product(PATTERNS, SCHEDULES, (2, 3, 4))
}


@pytest.mark.parametrize("name", small.named(CASES, [*MORE, *ON_GPUS, *MATRIX]))
def test_gradients(monkeypatch, name):
    config = (CASES | MORE | ON_GPUS | MATRIX)[name].config()
    expected = reference(config, 1)
    unfilled = lambda shape, dtype, on_host: jnp.full(shape, jnp.nan, dtype)
    monkeypatch.setattr(layer_loops, "on_nvidia_gpu", lambda: name in ON_GPUS)
    monkeypatch.setattr(host_memory, "empty_pool", unfilled)
    assert_same(gradients(config), expected)


@pytest.mark.full
def test_several_steps_and_evaluation():
    """Two steps in a program are those of one at a time, bit for bit; the loss of an evaluation is
    that of a step."""
    changes = kinds("3:1", 7, FORMS) | {"pipeline.steps_per_program": 2, "pipeline.remat": "none"}
    cfg = Case((2, 2, 1), "zb_h1", 1, 4, changes | {"optimizer.clip_norm": 100.0}).config()
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        programs = CompiledSteps(step.lower().compile(), 2)
        batches = [small.place_batch(step, cfg, small.batch(cfg, i)) for i in range(2)]
        first = lambda: small.first_state(step, plain_loop.weights(cfg))
        together, results = programs.together(first(), batches)
        evaluated = jax.device_get(step.evaluate(first().params, batches[0]))
        state, losses = first(), []
        for batch in batches:
            state, metrics = step.train(state, batch)
            losses.append(metrics["loss"])
    np.testing.assert_array_equal(results["loss"], losses)
    jax.tree.map(np.testing.assert_array_equal, together.params, state.params)
    np.testing.assert_allclose(evaluated.loss, losses[0], rtol=1e-6)


# --- what a stage allocates -----------------------------------------------------------------------

POOLS = (
    "residual_b",
    "residual_w",
    "weight_stash",
    "saved_b",
    "saved_w",
    "saved_stash",
    "layer_input",
)


def pools_of(monkeypatch, case: Case) -> tuple:
    """(the step, the Pools that its program plans): nothing is compiled."""
    planned, make = [], state_plan.UnitPlan.pools
    note = lambda *given: planned.append(make(*given)) or planned[-1]
    monkeypatch.setattr(state_plan.UnitPlan, "pools", note)
    cfg = case.config()
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        step.gradients.trace(step.abstract_state().params, step.abstract_batch)
    return step, planned[-1]


@pytest.mark.parametrize("settings", [ONE_FORM, FORMS])
def test_slots_have_the_layers_of_each_kind(monkeypatch, settings):
    """7 layers, a a a b on one stage and a a a on the other: a slot has room for three a and one b,
    or for four layers of arrays of the same shapes; `slot_bytes` says so."""
    changes = kinds("3:1", 7, settings) | K_OF_N | INPUTS
    step, pools = pools_of(monkeypatch, Case((1, 2, 1), "1f1b", 1, 4, changes))
    slots = step.setup.train.pool_sizes
    # of the recomputed first layer of a unit, and of the others
    layers = {"residual_b": {"a": 1}}
    layers["saved_b"] = {"a": 3} if settings is ONE_FORM else {"a": 2, "b": 1}
    for pool, of_kinds in layers.items():
        arrays = getattr(pools, pool)
        got = {kind: arrays[kind][0].shape[0] // slots[pool] for kind in arrays}
        assert {kind: got[kind] for kind in of_kinds} == of_kinds
        assert not any(count for kind, count in got.items() if kind not in of_kinds)
    size = lambda arrays: sum(
        math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arrays)
    )
    said = step.slot_bytes()
    for pool in POOLS:
        assert size(getattr(pools, pool)) == max(1, slots[pool]) * said[pool].all, pool


def test_stacks_have_the_layers_of_each_form():
    """12 layers in units of 3 on 2 stages: b is the last layer of each stage's second unit."""
    changes = kinds("5:1", 12, FORMS) | {"pipeline.layers_per_op": 3}
    cfg = Case((1, 2, 1), "1f1b", 1, 4, changes).config()
    step = make_step(cfg, small.mesh_of(cfg))
    assert kinds_of_layers(cfg.model)[3:6] == ("c", "c", "b")
    layers = step.abstract_state().params["layers"]
    sizes = {
        unit: {form: jax.tree.leaves(stack)[0].shape[:2] for form, stack in forms.items()}
        for unit, forms in layers.items()
    }
    assert sizes == {"0": {"c": (2, 3)}, "1": {"c": (2, 2), "b": (2, 1)}}


# --- which loops a program has --------------------------------------------------------------------


def equations(changes: dict) -> collections.Counter:
    """Primitive → its equations in the program of gradients on two stages, each body once."""
    cfg = Case((1, 2, 1), "1f1b", 1, 4, NONE | changes).config(small.PLAIN_LAYER)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        traced = step.gradients.trace(step.abstract_state().params, step.abstract_batch)
    found: collections.Counter = collections.Counter()

    def count(jaxpr):
        for equation in jaxpr.eqns:
            found[equation.primitive.name] += 1
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                count(inner)

    count(traced.jaxpr.jaxpr)
    return found


def test_a_kind_has_one_body_in_each_op():
    """Products of a layer stand once for each kind in F, B and W, whether stages have the same
    layers or not. Each op has a loop over periods and one over the three layers of a kind in it; by
    index it has one for each kind."""
    one, periods, by_index = (
        equations(changes)
        for changes in ({"model.layers": 16}, kinds("3:1", 16, FORMS), kinds("3:1", 14, FORMS))
    )
    products = lambda found: found["dot_general"]
    head = 3  # logits, and the gradients of their operands
    assert products(periods) == products(by_index) == 2 * products(one) - head
    ops = 3
    loops = lambda found: found["scan"] + found["while"]
    assert loops(periods) == loops(one) + ops
    assert loops(by_index) == loops(one) + 2 * ops
