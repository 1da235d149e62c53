"""A small training state whose numbers are known, for any layout: what the checkpoint tests save
and expect back."""

import copy
import dataclasses
import math
import zlib

import jax
import ml_dtypes
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxtrain import config as configs
from jaxtrain.checkpoint.manager import Checkpointer
from jaxtrain.checkpoint.regions import Shards, stored_arrays
from jaxtrain.checkpoint.restoring import restore
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.steps import choose
from jaxtrain.devices.mesh import AXES
from jaxtrain.parallel import replicas
from jaxtrain.schedule.placement import Placement
from jaxtrain.training.state import Stack, Stored

VOCABULARY, WIDTH, HIDDEN = 13, 8, 16

# What is stored: one layer's shape, or the whole leaf's without padding.
LAYER = {"mlp": {"w": Stored((WIDTH, HIDDEN))}, "norm": Stored((WIDTH,))}
EMBED, HEAD = {"table": Stored((VOCABULARY, WIDTH))}, {"w": Stored((WIDTH, VOCABULARY))}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh of replicas × data × stages × model devices, and how the layers are placed on it;
    several replicas train apart.

    scatters: whether moments are scattered over data.
    """

    layers: int = 7
    stages: int = 1
    chunks: int = 1
    data: int = 1
    model: int = 1
    padded: int = 16
    replicas: int = 1
    scatters: bool = True

    @property
    def placement(self) -> Placement:
        return Placement(self.layers, self.stages, self.chunks)

    @property
    def mesh(self) -> Mesh:
        shape = (self.replicas, self.data, self.stages, 1, 1, self.model)
        devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
        return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def stored_shapes(layout: Layout) -> dict:
    """The `stored_shapes` of a Checkpointer for this layout."""

    stages = range(layout.stages)

    def in_stack(tree: dict, unit: int) -> dict:
        held = tuple(layout.placement.layers_of(unit, stage) for stage in stages)
        stack = Stack(held, layout.layers)
        return jax.tree.map(lambda one: dataclasses.replace(one, stack=stack), tree)

    def parameters():
        return copy.deepcopy({"embed": EMBED, "head": HEAD}) | {
            "layers": {str(c): in_stack(LAYER, c) for c in range(layout.chunks)}
        }

    adam = optax.ScaleByAdamState(Stored(()), parameters(), parameters())
    stored = {"params": parameters(), "optimizer": (adam, optax.EmptyState())}
    if layout.replicas > 1:
        lead = lambda one: dataclasses.replace(one, lead=(layout.replicas,))
        stored = jax.tree.map(lead, stored) | {"anchor": parameters()}
    return stored | {"step": Stored(())}


def abstract_state(layout: Layout) -> dict:
    """The state as ShapeDtypeStructs with shardings. Moments are sharded over data too, and one of
    them is bfloat16."""
    mesh, placement = layout.mesh, layout.placement

    def leaf(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def tree(dtype, scattered):
        scattered = scattered and layout.scatters
        data = "data" if scattered else None
        vocabulary = ("stage", "data", "model") if scattered else "model"
        columns = (
            ("stage", "data") if scattered and WIDTH % (layout.stages * layout.data) == 0 else None
        )
        embed = {"table": leaf((layout.padded, WIDTH), dtype, "model", columns)}
        head = {"w": leaf((WIDTH, layout.padded), dtype, None, vocabulary)}
        layers = {}
        for c in range(layout.chunks):
            rows = (layout.stages, placement.stack_size(c))
            w = leaf((*rows, WIDTH, HIDDEN), dtype, "stage", None, data, "model")
            layers[str(c)] = {
                "mlp": {"w": w},
                "norm": leaf((*rows, WIDTH), dtype, "stage", None, data),
            }
        return {"embed": embed, "layers": layers, "head": head}

    adam = optax.ScaleByAdamState(
        leaf((), np.int32), tree(np.float32, True), tree(ml_dtypes.bfloat16, True)
    )
    made = {"params": tree(np.float32, False), "optimizer": (adam, optax.EmptyState())}
    if layout.replicas > 1:
        made = jax.tree.map(replicas.each, made) | {"anchor": tree(np.float32, True)}
    return made | {"step": leaf((), np.int32)}


def stored_numbers(name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
    """The numbers of the stored array `name`: all different from zero, and from those of other
    names."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.uniform(1, 100, shape).astype(dtype)


def state(layout: Layout) -> dict:
    """The known state in this layout; each process makes its own shards."""
    placement = layout.placement
    shapes = stored_shapes(layout)

    def make(path, leaf, stored):
        keys = [jax.tree_util.keystr((k,), simple=True) for k in path]
        numbers = np.zeros(leaf.shape, leaf.dtype)
        lead, stored = stored.lead, stored.shape
        each = (slice(None),) * len(lead)
        if "layers" in keys:
            at = keys.index("layers") + 1
            full = stored_numbers(
                "/".join(keys[:at] + keys[at + 1 :]), (*lead, layout.layers, *stored), leaf.dtype
            )
            for place, layer in np.ndenumerate(placement.layer_index(int(keys[at]))):
                if layer >= 0:
                    numbers[(*each, *place)] = full[(*each, layer)]
        else:
            numbers[(*each, *(slice(n) for n in stored))] = stored_numbers(
                "/".join(keys), (*lead, *stored), leaf.dtype
            )
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: numbers[index])

    abstract = abstract_state(layout)
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    return jax.tree.unflatten(
        tree, [make(path, leaf, s) for (path, leaf), s in zip(leaves, tree.flatten_up_to(shapes))]
    )


def meta_of(step: int) -> dict:
    """The meta of a complete step."""
    config = configs.to_dict(configs.Config().to_store())
    return {"config": config, "step": step, "checksum": "12" * 32, "tokenizer": {"kind": "bytes"}}


def checkpointer(folder, layout: Layout, keep: int = 3, **arguments) -> Checkpointer:
    """A Checkpointer of this layout; arguments: as of the class."""
    shapes = stored_shapes(layout)
    return Checkpointer(folder, shapes, Retention(keep), **arguments)


def shards_of(layout: Layout) -> Shards:
    """The distinct shards of the state."""
    return Shards(stored_arrays(abstract_state(layout), stored_shapes(layout)))


def latest_step(folder) -> int | None:
    """The newest complete step, None if there is none."""
    return choose(folder, {}).step


def restored(folder, step: int, layout: Layout) -> dict:
    """The state of a step in this layout."""
    return restore(folder, step, abstract_state(layout), stored_shapes(layout))


def assert_same(got, expected):
    """Fails unless both states are the same bit for bit, with the same shardings, on this process's
    devices."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected)):
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding), where
        for x, y in zip(a.addressable_shards, b.addressable_shards):
            assert x.device == y.device, where
            assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes(), (
                f"{where} on {x.device}"
            )
