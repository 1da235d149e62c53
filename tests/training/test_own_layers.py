"""Layers of one's own, from files outside of the package, on every layout: the losses and gradients
of one device, the same initial values and checkpoints, and the planner's figures."""

import dataclasses
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import matrix, own_layers, plain_loop, small, trace_products
from support.checkpoint_state import assert_same

from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.restoring import restore
from jaxtrain.config import Config
from jaxtrain.models.spec import is_spec
from jaxtrain.planner.layer.model import model_of
from jaxtrain.training.state import initial_state, stored_shapes
from jaxtrain.training.step import make_step

MESHES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2))
REMATS = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class Case:
    layer: str
    mesh: tuple[int, int, int]  # data × stage × model
    schedule: tuple[str, int]  # with repeats
    zero: int
    remat: str

    def __str__(self) -> str:
        name, repeats = self.schedule
        mesh = "x".join(map(str, self.mesh))
        return f"{self.layer}-{mesh}-{name}{repeats}-zero{self.zero}-{self.remat}"

    def config(self, folder: pathlib.Path) -> Config:
        changes = own_layers.settings(self.layer, folder) | {
            "parallel.zero": self.zero,
            "pipeline.remat": self.remat,
            "data.batch_size": 8,
            # as Mamba-2 and DeltaNet: a state of its own for each document
            "data.attend_across_documents": self.layer not in ("mamba2", "deltanet"),
            # a scan of more trips than are cut
            "data.sequence_length": 32 if self.layer == "Scanned" else 16,
            "optimizer.clip_norm": plain_loop.CLIP,
        }
        return small.config(self.mesh, *self.schedule, 4, small.PLAIN_LAYER | changes)


@functools.cache
def whole() -> tuple[Case, ...]:
    """Layer × mesh × ZeRO 0 and 3 × schedule, with the modes of remat by turns. Some layers are on
    two schedules alone."""
    remats, cases = itertools.cycle(REMATS), []
    some = ("mixer", "Scanned", "Shifted", "Products")
    for layer, mesh, zero in itertools.product(
        ("Mixer", "mamba2", "deltanet", *some), MESHES, (0, 3)
    ):
        schedules = (("1f1b", 1), ("zb_v", 2)) if layer in some else matrix.SCHEDULES
        schedules = schedules if mesh[1] > 1 else (("1f1b", 1),)
        cases += [Case(layer, mesh, each, zero, next(remats)) for each in schedules]
    return tuple(cases)


SAMPLE = (Case("Mixer", (2, 2, 2), ("zb_v", 2), 3, "selective"),)
PASSED = matrix.Passed(
    "own layers",
    pathlib.Path(__file__),
    *(pathlib.Path(module.__file__) for module in (plain_loop, small, own_layers)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("own")


def check(case: Case, folder: pathlib.Path) -> None:
    cfg = case.config(folder)
    plain_loop.assert_same(plain_loop.gradients(cfg), plain_loop.reference(cfg, 1))


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_same_gradients(case, folder):
    check(case, folder)


@pytest.mark.full
@pytest.mark.parametrize("case", whole(), ids=str)
def test_same_gradients_in_the_whole_matrix(case, folder):
    if case in PASSED:
        pytest.skip(f"passed before with the same sources: {PASSED.path}")
    check(case, folder)
    PASSED.add(case)


@pytest.mark.full
@pytest.mark.parametrize("matmul", ["fp8", "mxfp8"])
def test_marked_products_are_of_fp8(matmul, folder):
    """On every mesh alike, and other numbers than those of the compute type."""
    runs = {}
    for format, mesh in itertools.product((matmul, "compute"), ((1, 1, 1), (1, 2, 2))):
        cfg = small.config(
            mesh,
            changes={
                **own_layers.settings("Products", folder),
                "precision.matmul": format,
                "model.width": 64,
                "data.sequence_length": 64,
                "data.batch_size": 8,
            },
        )
        runs[format, mesh[2]] = plain_loop.gradients(cfg)
    one, split = runs[matmul, 1], runs[matmul, 2]
    np.testing.assert_allclose(one.losses, split.losses, rtol=1e-5)
    np.testing.assert_allclose(one.norm, split.norm, rtol=1e-3)
    assert abs(one.losses[0] / runs["compute", 1].losses[0] - 1) > 1e-5


# --- initial values and checkpoints ---------------------------------------------------------------


def test_initial_values_and_checkpoints(folder, tmp_path):
    """One device and 2 × 2 × 2 have the same bits, and restore each other's."""
    layouts = ((1, 1, 1), "1f1b", 1, 0), ((2, 2, 2), "zb_v", 2, 3)
    steps, states = [], []
    for number, (mesh, schedule, repeats, zero) in enumerate(layouts):
        cfg = Case("Mixer", mesh, (schedule, repeats), zero, "full").config(folder)
        step = make_step(cfg, small.mesh_of(cfg))
        with jax.set_mesh(step.mesh):
            state = initial_state(step.layout, step.optimizer, 3)
            shapes = stored_shapes(step.layout, step.optimizer)
            manager = Checkpointer(tmp_path / str(number), shapes)
            manager.save(1, state, {})
            manager.close()
        steps.append(step)
        states.append(state)
    plain = [small.to_plain(step.layout, s.params) for step, s in zip(steps, states, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, *plain)
    own = plain[0]["layers"]["own"]
    assert len({*own["up"][:, 0, 0].tolist(), *own["gate"][:, 0, 0].tolist()}) == 8, "all differ"
    np.testing.assert_allclose(own["up"].std(), own["up"].shape[1] ** -0.5, rtol=0.1)
    np.testing.assert_allclose(own["decay"], [np.linspace(0.1, 2, 48)] * 4, rtol=1e-6)
    for number, other in ((0, 1), (1, 0)):
        step = steps[other]
        shapes = stored_shapes(step.layout, step.optimizer)
        with jax.set_mesh(step.mesh):
            state = restore(tmp_path / str(number), 1, step.abstract_state(), shapes)
            assert_same(state, states[other])


# --- the planner ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["Mixer", "Scanned", "Shifted", "mamba2", "deltanet"])
def test_planned_operations_and_parameters_are_the_trace_s(layer, folder):
    cfg = Case(layer, (1, 1, 1), ("1f1b", 1), 0, "none").config(folder)
    step = make_step(cfg, small.mesh_of(cfg))
    tokens, parts = cfg.data.sequence_length, step.layout.parts
    shape = lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32)
    params = jax.tree.map(shape, parts.specs["layer"], is_leaf=is_spec)
    x = jax.ShapeDtypeStruct((1, tokens, cfg.model.width), jnp.float32)
    positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    (block,) = parts.blocks.values()
    trace = jax.make_jaxpr(lambda params, *args: block(params)(*args))(params, x, positions)
    planned = model_of(cfg.model, tokens)
    assert planned.layer_flops(causal=False) == 2 * trace_products.in_trace(trace.jaxpr)
    assert planned.layer().size == sum(a.size for a in jax.tree.leaves(params))
    assert planned.parameters() == parts.parameter_count
