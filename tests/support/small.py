"""Small models for tests: configs, batches whose masks differ between rows, and parameters moved
between layouts.

"Plain" parameters are {"embed", "layers", "head", "predictors" if any} of numpy arrays, unpadded,
with the layers in order: leaves [L, ...], or {form: leaves [layers of the form, ...]}.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.parallel import replicas
from jaxtrain.runtime.layers.layer_stack import of_form, with_form
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.state import TrainState, abstract_state, with_working

SMALL = configs.replace(
    Config(),
    {
        "model.layers": 4,
        "model.width": 32,
        "model.heads": 8,
        "model.mlp_width": 64,
        "model.vocab_size": 61,  # a prime: padded wherever the vocabulary is split
        "data.sequence_length": 16,
        "mesh.data": 1,
        "precision.compute": "float32",
        "optimizer.learning_rate": 3e-3,
        "optimizer.warmup_steps": 2,
        "train.steps": 10,
    },
)

# A layer of fewer operations, a quarter less to compile, for samples of layouts; the usual one,
# with rotations and SwiGLU, is on meshes in test_variants.py, test_zero_stages.py and
# test_context.py.
PLAIN_LAYER = {"model.positions": "learned", "model.activation": "gelu"}


def normal(seed: int, *shape: int) -> np.ndarray:
    """Random numbers, float32. By numpy: jax compiles a program for each shape."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def nbytes(tree) -> int:
    """The bytes of a tree of arrays, or of their shapes and dtypes."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def config(mesh=(1, 1, 1), schedule="1f1b", repeats=1, microbatches=4, changes=None) -> Config:
    """A resolved small config on a data × stage × model mesh; `changes` are by path
    ("model.layers")."""
    data, stage, model = mesh
    changes = {
        "mesh.data": data,
        "mesh.stage": stage,
        "mesh.model": model,
        "pipeline.schedule": schedule,
        "pipeline.repeats": repeats,
        "pipeline.microbatches": microbatches,
    } | (changes or {})
    return configs.replace(SMALL, changes).resolve()


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout for a test: mesh is data × stage × model; `changes` of the small config are by path
    ("model.layers"), other axes of the mesh among them. program: which of the step's, for a test
    that reads one."""

    mesh: tuple[int, int, int]
    schedule: str = "1f1b"
    repeats: int = 1
    microbatches: int = 2
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    program: str = "gradients"

    def config(self, shared: Mapping[str, Any] | None = None) -> Config:
        """Resolved; `shared` changes are made before its own. Unless one says otherwise there are 8
        sequences to a microbatch, which every mesh can cut."""
        shared = {"data.batch_size": 8 * self.microbatches} | dict(shared or {})
        return config(
            self.mesh, self.schedule, self.repeats, self.microbatches, shared | dict(self.changes)
        )


def named(always, more) -> list:
    """The names of cases as a test's parameters; those of `more` are for --full."""
    return [*always, *(pytest.param(name, marks=pytest.mark.full) for name in more)]


def mesh_of(cfg: Config) -> jax.sharding.Mesh:
    """Its mesh, on the first of this process's devices."""
    sizes = sizes_of(cfg.mesh)
    return make_mesh(sizes, jax.devices()[: int(np.prod(sizes))])


def batch(cfg: Config, index: int) -> dict[str, np.ndarray]:
    """Batch `index` of a run, arrays [rows, T]. Rows keep different parts of their tokens, and some
    rows keep none.

    Batches 0, 3, 6, … have a whole first quarter without a valid token: a microbatch, or a data
    shard's part of several.
    """
    random = np.random.default_rng(index)
    rows, length = shape = (cfg.data.batch_size, cfg.data.sequence_length)
    keep = random.random((rows, 1))
    keep[random.random(rows) < 0.2] = 0
    if index % 3 == 0:
        keep[: rows // 4] = 0
    made = {
        "tokens": random.integers(0, cfg.model.vocab_size, shape, np.int32),
        "targets": random.integers(0, cfg.model.vocab_size, shape, np.int32),
        "weights": (random.random(shape) < keep).astype(np.float32),
    }
    if not cfg.data.attend_across_documents:
        starts = random.random(shape) < 0.2
        starts[:, 0] = True
        segments = np.cumsum(starts, 1, dtype=np.int32)
        first = np.maximum.accumulate(np.where(starts, np.arange(length), 0), 1)
        made |= {"segments": segments, "positions": (np.arange(length) - first).astype(np.int32)}
    return made


def place_batch(step, cfg: Config, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Arrays [rows, T] → [microbatches, rows, T] on the step's mesh."""
    m = cfg.pipeline.microbatches
    return {
        k: jax.device_put(a.reshape(m, -1, a.shape[-1]), step.batch_sharding)
        for k, a in arrays.items()
    }


def to_plain(layout: ParameterLayout, tree: dict) -> dict:
    """Parameters (or anything shaped like them) in a layout → plain. Fails unless all padding is
    exactly zero."""
    tree, placement = jax.tree.map(np.asarray, tree), layout.placement
    rows = {form: {} for form in dict.fromkeys(placement.forms or ("",))}
    for c, form in layout.stacks:
        stack = of_form(tree["layers"][str(c)], form)
        for place, layer in np.ndenumerate(placement.layer_index(c, form)):
            row = jax.tree.map(lambda a, place=place: a[place], stack)
            if layer >= 0:
                rows[form][int(layer)] = row
            else:
                assert not any(a.any() for a in jax.tree.leaves(row)), (
                    f"the unused row {place} of chunk {c} is not zero"
                )
    assert sum(map(len, rows.values())) == placement.layers

    def cut(spec, a):
        assert not a[spec.shape[0] :].any(), f"rows of padding of {spec} are not zero"
        return a[: spec.shape[0]]

    plain = {k: jax.tree.map(cut, specs, tree[k]) for k, specs in layout.parts.ends.items()}
    layers = {
        form: jax.tree.map(lambda *a: np.stack(a), *(by_number[i] for i in sorted(by_number)))
        for form, by_number in rows.items()
    }
    plain["layers"] = layers.get("", layers)
    return plain


def from_plain(layout: ParameterLayout, plain: dict) -> dict:
    """Plain parameters, in a layout and on its mesh."""
    placement = layout.placement

    def stack(chunk, form, leaf):
        index = placement.layer_index(chunk, form)
        if form:  # by their numbers among the form's layers
            numbers = np.cumsum([each == form for each in placement.forms]) - 1
            index = np.where(index >= 0, numbers[index], -1)
        return np.where((index >= 0).reshape(*index.shape, *[1] * (leaf.ndim - 1)), leaf[index], 0)

    def pad(spec, a):
        return np.pad(a, [(0, full - n) for full, n in zip(spec.padded, a.shape, strict=True)])

    arrays = {k: jax.tree.map(pad, specs, plain[k]) for k, specs in layout.parts.ends.items()}
    arrays["layers"] = units = {}
    for c, form in layout.stacks:
        layers = of_form(plain["layers"], form)
        stacks = jax.tree.map(lambda a, c=c, form=form: stack(c, form, a), layers)
        units[str(c)] = with_form(units.get(str(c), {}), form, stacks)
    return jax.device_put(arrays, layout.shardings)


def first_state(step, plain: dict) -> TrainState:
    """The state before the first step with plain parameters, in each replica if replicas are
    independent, without compiling anything but the copies of masters."""
    abstract = abstract_state(step.layout, step.optimizer)
    state = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), abstract)
    params, anchor = from_plain(step.layout, plain), None

    def laid_out(tree: dict, like: dict) -> dict:
        put = lambda a, like: jax.device_put(np.asarray(a).astype(like.dtype), like.sharding)
        return jax.tree.map(put, tree, like)

    if step.layout.independent_replicas:
        anchor = laid_out(params, abstract.anchor)
        params = replicas.copies(params, step.mesh)
    params = laid_out(params, abstract.params)
    state = dataclasses.replace(state, params=params, anchor=anchor, working=None)
    return with_working(step.layout, state)
