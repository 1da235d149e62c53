"""The training state: its shapes, where each array lies, and its first values.

    state = {"params": {"embed": …, "layers": {"0": …, "1": …}, "head": …}, "optimizer": optax state, "step": int32}

and "predictors" beside "head" where the model predicts further tokens.

"layers"[c] holds chunk c of all stages, leaves [stages, rows, …] (schedule/placement.py). What is whole on every data shard, and what
is scattered over it, is ZeRO's stage (parallel/zero.py).

Where replicas train apart (training/diloco.py), parameters and optimizer state have a leading dimension [replicas], split over them, and
`Layout.outer` is there once more for each name in OUTER: "anchor", the parameters of the last exchange, and "outer_momentum".
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.sharding import constrain, restricted, spec
from jaxtrain.models.spec import Spec
from jaxtrain.models.transformer import Parts
from jaxtrain.parallel import host_memory, replicas
from jaxtrain.parallel.zero import Reduction, reduction_of
from jaxtrain.schedule.placement import Placement

OUTER = ("anchor", "outer_momentum")


def _is_spec(x) -> bool:
    return isinstance(x, Spec)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where the model's parameters lie: everything about the state that the mesh decides. Its trees are shaped like the parameters."""

    parts: Parts
    placement: Placement
    mesh: Mesh
    zero: int = 1
    dtype: jnp.dtype = jnp.dtype("float32")
    apart: bool = False  # each replica has parameters of its own
    offload: bool = False  # the optimizer's state lies in the host's memory

    @property
    def specs(self) -> dict:
        """A Spec for each parameter; one layer's for each chunk's stack."""
        ends, layer = self.parts.ends, self.parts.specs["layer"]
        return {**ends, "layers": {str(c): layer for c in range(self.placement.units_per_stage)}}

    def _map(self, fn) -> dict:
        """fn(spec, leading shape, leading axes) over all parameters."""

        def part(key, tree):
            if key != "layers":
                return jax.tree.map(lambda s: fn(s, (), ()), tree, is_leaf=_is_spec)
            stack = lambda c: lambda s: fn(s, (self.placement.stages, self.placement.stack_size(int(c))), ("stage", "layer"))
            return {c: jax.tree.map(stack(c), t, is_leaf=_is_spec) for c, t in tree.items()}

        return {k: part(k, t) for k, t in self.specs.items()}

    @property
    def shapes(self) -> dict:
        return self._map(lambda s, shape, _: jax.ShapeDtypeStruct((*shape, *s.padded), self.dtype))

    @property
    def stored_shapes(self) -> dict:
        """Shapes in a checkpoint: of one layer, and without padding."""
        return self._map(lambda s, *_: s.shape)

    @property
    def reductions(self) -> dict:
        """Of gradients, inside a replica where these are apart."""
        over = replicas.sum_axes(self.apart)
        how = lambda s, shape, axes: reduction_of((*axes, *s.axes), (*shape, *s.padded), len(shape), self.mesh, self.zero, over, s.counts)
        return self._map(how)

    def _shardings(self, which: str) -> dict:
        return jax.tree.map(
            lambda r: NamedSharding(self.mesh, getattr(r, which)), self.reductions, is_leaf=lambda r: isinstance(r, Reduction)
        )

    @property
    def shardings(self) -> dict:
        """Of the parameters, or one replica's."""
        return self._shardings("sharded" if self.zero == 3 else "whole")

    @property
    def scattered(self) -> dict:
        """Of the reduced gradients, and of the parameters while they are updated."""
        return self._shardings("storage")

    @property
    def moments(self) -> dict:
        """Of what the optimizer keeps for each parameter."""
        return jax.tree.map(host_memory.on_host, self.scattered) if self.offload else self.scattered

    @property
    def outer(self) -> dict:
        """What replicas exchange, float32: abstract arrays shaped like the parameters, each device's part as small as ZeRO makes it."""
        small = dataclasses.replace(self, zero=max(self.zero, 1)).scattered
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=s), self.shapes, small)

    def keys(self, seed: int) -> list[np.ndarray]:
        """The random keys of the parameters, in the order of their leaves: [*leading, 2] uint32, from seed, name and layer alone.

        Made on the host: as part of the program below they would take as long to compile as the values.
        """

        def own(path, s):
            name, index = _name(path), self._index(path)
            each = [np.random.SeedSequence([seed, zlib.crc32(name.encode()), int(i)]).generate_state(2) for i in np.maximum(index, 0).flat]
            return np.array(each, np.uint32).reshape(*index.shape, 2)

        leaves, _ = jax.tree_util.tree_flatten_with_path(self.specs, is_leaf=_is_spec)
        return [own(path, s) for path, s in leaves]

    def initial(self, keys: list[jax.Array]) -> dict:
        """The parameters' initial values from `keys`: the same for every mesh and placement.

        Parameters of one shape and one sharding are drawn together: random generators are most of what this program costs to compile.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.specs, is_leaf=_is_spec)
        groups: dict[tuple, list[int]] = {}  # by shape, leading dimensions and the mesh axes that cut it
        values = {}
        for i, (path, s) in enumerate(leaves):
            if s.std is None:
                values[i] = self._used(path, s, jnp.full(s.padded, s.constant, self.dtype))
            else:
                lead = keys[i].shape[:-1]
                split = restricted(spec(s.axes), {name for name, size in self.mesh.shape.items() if size > 1})
                groups.setdefault((s.shape, s.padded, lead, split), []).append(i)
        for (_, _, lead, _), members in groups.items():
            first = leaves[members[0]][1]
            draw = lambda key, s=first: s.draw(jax.random.wrap_key_data(key, impl="threefry2x32"))
            for _ in (None, *lead):
                draw = jax.vmap(draw)
            # The barrier keeps the noise's last factor and `std` apart: XLA merges the two on some layouts, and rounds differently.
            noise = lax.optimization_barrier(draw(jnp.stack([keys[i] for i in members])))
            noise = constrain(noise, (None, *("stage", "layer")[: len(lead)], *first.axes))
            for n, i in enumerate(members):
                path, s = leaves[i]
                values[i] = self._used(path, s, noise[n] * s.std).astype(self.dtype)
        return jax.tree.unflatten(tree, [values[i] for i in range(len(leaves))])

    def _index(self, path: tuple) -> np.ndarray:
        """The layers of a parameter's stack, [stages, rows], −1 in unused rows; [] for a parameter that stands alone."""
        return self.placement.layer_index(int(path[1].key)) if path[0].key == "layers" else np.zeros((), int)

    def _used(self, path: tuple, s: Spec, value: jax.Array) -> jax.Array:
        """`value` in the rows that hold a layer, zero in the others."""
        used = self._index(path) >= 0
        return jnp.where(used.reshape(*used.shape, *(1 for _ in s.padded)), value, 0)


def _name(path: tuple) -> str:
    """A parameter's name, the same for all chunks."""
    return jax.tree_util.keystr((path[0], *path[2:]) if path[0].key == "layers" else path)


def _optimizer_tree(optimizer: optax.GradientTransformation, shapes: dict, like: dict, other) -> object:
    """A pytree like the optimizer's state: `like`'s leaves where it follows the parameters, `other` elsewhere."""
    state = jax.eval_shape(optimizer.init, shapes)
    return optax.tree_utils.tree_map_params(optimizer, lambda _, leaf: leaf, state, like, transform_non_params=lambda _: other)


def abstract_state(layout: Layout, optimizer: optax.GradientTransformation) -> dict:
    """The state as ShapeDtypeStructs with shardings."""
    whole = NamedSharding(layout.mesh, P())
    shapes = layout.shapes
    state = {"params": shapes, "optimizer": jax.eval_shape(optimizer.init, shapes)}
    shardings = {"params": layout.shardings, "optimizer": _optimizer_tree(optimizer, shapes, layout.moments, whole)}
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings)
    if layout.apart:
        state = jax.tree.map(replicas.each, state) | dict.fromkeys(OUTER, layout.outer)
    return state | {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)}


def stored_shapes(layout: Layout, optimizer: optax.GradientTransformation) -> dict:
    """The state's shapes in a checkpoint, as a pytree of its structure whose leaves are `Stored`."""
    parameters = jax.tree.map(Stored, layout.stored_shapes, is_leaf=lambda x: isinstance(x, tuple))
    state = {"params": parameters, "optimizer": _optimizer_tree(optimizer, layout.shapes, parameters, Stored(()))}
    if layout.apart:
        lead = (replicas.count(layout.mesh),)
        state = jax.tree.map(lambda stored: Stored(stored.shape, lead), state) | dict.fromkeys(OUTER, parameters)
    return state | {"step": Stored(())}


@dataclasses.dataclass(frozen=True)
class Stored:
    """The shape of a leaf as it is stored; a leaf itself, where a tuple would be taken for a pytree.

    lead: dimensions before the layers, in memory and in the checkpoint alike: replicas with parameters of their own.
    """

    shape: tuple[int, ...]
    lead: tuple[int, ...] = ()


def initial_state(layout: Layout, optimizer: optax.GradientTransformation, seed: int) -> dict:
    """The state before the first step; each device makes its own shards."""
    leaves, tree = jax.tree.flatten(abstract_state(layout, optimizer))
    hosts = [host_memory.is_host(a.sharding) for a in leaves]

    def make(keys):
        params = layout.initial(keys)
        state = {"params": params, "optimizer": optimizer.init(params)}
        if layout.apart:
            state = replicas.copies(state, layout.mesh) | {"anchor": params, "outer_momentum": jax.tree.map(jnp.zeros_like, params)}
        state |= {"step": jnp.zeros((), jnp.int32)}
        return [a for a, host in zip(jax.tree.leaves(state), hosts, strict=True) if not host]

    with jax.set_mesh(layout.mesh):
        shardings = [a.sharding for a, host in zip(leaves, hosts, strict=True) if not host]
        made = iter(jax.jit(make, out_shardings=shardings)(layout.keys(seed)))
    # Moments begin at zero. Those on the host are made there: a program would have them in the device's memory first.
    return jax.tree.unflatten(tree, [host_memory.zeros(a) if host else next(made) for a, host in zip(leaves, hosts, strict=True)])


def bytes_per_device(abstract, host: bool = False) -> int:
    """Bytes of a pytree of abstract arrays on one device: in its own memory, or in the host's."""
    here = [a for a in jax.tree.leaves(abstract) if host_memory.is_host(a.sharding) == host]
    return sum(int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in here)
