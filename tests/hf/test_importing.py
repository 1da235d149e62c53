"""A published model on the devices of a run: the state is that of the checkpoint of step 0 that
`convert from_hf` writes, bit for bit, on any layout; and each process reads
its own shards alone."""

import json
import math
import os

import jax
import numpy as np
import pytest
from support import safetensors_files, small
from support.hf_imported import complete, imported
from support.hf_models import CONFIGS, FIRST, OTHERS, llama_tensors, write_llama

from jaxtrain import convert
from jaxtrain.checkpoint.regions import regions, stored_arrays
from jaxtrain.checkpoint.restoring import restore
from jaxtrain.config import Config, replace
from jaxtrain.config.rules.mesh_rules import filled
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.hf import importing, safetensors_folder
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.run_config import read_published, started_from
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.training.state import stored_shapes
from jaxtrain.training.step import make_step

ONE = {"mesh.data": 1}
LAYOUTS = {
    "one device": ONE,
    "data · stage · model": {"mesh.stage": 2, "mesh.model": 2},
    "two units a stage": {"mesh.stage": 2, "pipeline.layers_per_op": 1},
    "uneven stages": {"mesh.stage": 2, "pipeline.chunk_layers": (1, 2)},
    "zero 3": {"mesh.model": 2, "parallel.zero": 3},
    "zero 3 on stages": {"mesh.stage": 2, "parallel.zero": 3},
    "replicas": {"mesh.replica": 2, "mesh.model": 2},
    "independent replicas": {"mesh.replica": 2, "mesh.stage": 2, "train.diloco_inner_steps": 2},
    "optimizer on the host": {"mesh.model": 2, "parallel.offload": "optimizer"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder, bfloat16=True)
    return folder


def config_of(folder, changes) -> Config:
    model = read_published(folder)
    defaults = {"data.sequence_length": 16, "data.batch_size": 8, "pipeline.microbatches": 2}
    recipe = replace(Config(), defaults | changes)
    devices = 1 if changes == ONE else 8
    return filled(started_from(model, recipe, [])[0], devices)


def step_of(config: Config):
    resolved = config.resolve()
    sizes = sizes_of(resolved.mesh)
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes)])
    return make_step(resolved, mesh, make_setup(resolved))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_state_is_that_of_the_checkpoint(folder, tmp_path, name):
    config = config_of(folder, LAYOUTS[name])
    independent = config.train.diloco_inner_steps > 0
    flags = [
        f"--config.{path}={value}"
        for path, value in LAYOUTS[name].items()
        if independent and path.startswith(("mesh.replica", "train."))
    ]
    assert convert.main(["from_hf", str(folder), f"--workdir={tmp_path}", *flags]) == 0
    step = step_of(config)
    source = importing.open_weights(read_published(folder), config.fill())
    state = importing.state_on_devices(source, step)
    stored = stored_shapes(step.layout, step.optimizer)
    expected = restore(tmp_path / "checkpoints", 0, step.abstract_state(), stored)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
    if independent:
        table = np.asarray(state.params["embed"]["table"])
        assert (table == np.asarray(state.anchor["embed"]["table"])).all() and table.any()


@pytest.mark.parametrize("name", small.named(FIRST, OTHERS))
def test_every_family(name, tmp_path):
    """Experts, fused and interleaved columns, biases, prediction modules: every leaf has what
    complete tensors give."""
    values, random = CONFIGS[name], np.random.default_rng(0)
    numbers = complete(
        values, lambda shapes: {n: random.standard_normal(s, np.float32) for n, s in shapes.items()}
    )
    (tmp_path / "config.json").write_text(json.dumps(values))
    safetensors_files.write(tmp_path / "model.safetensors", numbers)
    changes = {"mesh.stage": 2, "mesh.model": 2, "parallel.zero": 3}
    config = config_of(tmp_path, changes)
    step = step_of(config)
    weights = importing.open_weights(read_published(tmp_path), config.fill())
    state = importing.state_on_devices(weights, step)
    expected = small.first_state(step, imported(values, lambda shapes: numbers, changes).plain)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def test_a_device_s_shards_alone_are_read(folder, monkeypatch):
    config = config_of(folder, {"mesh.data": 1, "mesh.model": 4, "mesh.stage": 2})
    step, read = step_of(config), []
    source = importing.open_weights(read_published(folder), config.fill())
    preadv = os.preadv

    def counted(descriptor, buffers, place):
        read.append(preadv(descriptor, buffers, place))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(safetensors_folder, "PAGE", 0)  # gaps between small runs are not read
    expected, published = 0, importing.published_arrays(source)
    stored = stored_shapes(step.layout, step.optimizer)
    for array in stored_arrays(step.abstract_state(), stored):
        for leaf in array.leaves if array.name in published else ():
            index = leaf.sharding.devices_indices_map(leaf.shape)[step.mesh.devices.flat[5]]
            bounds = tuple(i.indices(n)[:2] for i, n in zip(index, leaf.shape, strict=True))
            for region in regions(leaf, bounds, array.shape):
                window = [range(part.start, part.stop) for part in region.stored[:-1]]
                numbers = np.empty([len(span) for span in window], array.dtype)
                published[array.name].read(window, numbers)
                expected += numbers.size * 2  # bfloat16
    complete = sum(array.size for array in llama_tensors().values()) * 2
    assert sum(read) == expected < complete / 5


def test_damage_is_named(folder, tmp_path):
    config = config_of(folder, ONE)
    tensors = llama_tensors()
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name][3, 20] = np.inf
    write_llama(tmp_path, **{name.replace(".", "_"): tensors[name]})
    source = importing.open_weights(read_published(tmp_path), config.fill())
    with pytest.raises(HfError, match=f"safetensors: {name} has numbers that are not finite"):
        importing.state_on_devices(source, step_of(config))
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(HfError, match="is no complete safetensors file"):
        importing.open_weights(read_published(tmp_path), config.fill())
