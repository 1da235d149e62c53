"""The parameters' initial values: the same numbers on every mesh and placement.

    random_keys                on the host, a key for each parameter of each layer, from seed, name
                               and layer
    with_values_of_own_layers  on one device, the values that modules of the user's own draw by
                               their keys
    initial_values             inside jit, all values from the keys; each device draws its own
                               shards alone

A name is the same for all local units and forms of layers, and the layer is its number in the
model. So a layer has the same key wherever a placement puts it, and whatever other layers are.
"""

import functools
import itertools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxtrain.devices.sharding import constrain, restricted, spec
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.training.parameter_layout import ParameterLayout


def random_keys(layout: ParameterLayout, seed: int, *use: int) -> list[np.ndarray]:
    """The random keys of the parameters, in the order of their leaves: [*leading, 2] uint32. A key
    depends on seed, name and layer only. use: a number for any use but the initial values"""

    # On the host: as a part of the program of the values they would take as long to compile as it.
    def keys_of(path: tuple, s: Spec) -> np.ndarray:
        layers, stack = _layers(layout, path), layout.stack_of(path)
        # Without the unit and the form; and without the names in a module of the user's own, which
        # draws all of its parameters by one key.
        in_layer = () if s.init else path[stack.depth if stack else 2 :]
        text = jax.tree_util.keystr((*path[: 1 if stack else 2], *in_layer))
        # Python's own hash of a text differs between processes.
        name = zlib.crc32(text.encode())
        keys = [
            np.random.SeedSequence([seed, name, int(layer), *use]).generate_state(2)
            for layer in np.maximum(layers, 0).flat  # unused places need a key, too, of any value
        ]
        return np.array(keys, np.uint32).reshape(*layers.shape, 2)

    leaves = jax.tree_util.tree_leaves_with_path(layout.specs, is_leaf=is_spec)
    return [keys_of(path, s) for path, s in leaves]


def with_values_of_own_layers(layout: ParameterLayout, keys: list[np.ndarray]) -> list:
    """The keys of `random_keys`, and in their place the values of parameters of the user's own, as
    they are sharded during an update: each process draws those of its devices."""
    leaves = jax.tree_util.tree_leaves_with_path(layout.specs, is_leaf=is_spec)
    device = Mesh(np.array(jax.local_devices()[:1]), ("one",))

    def values(path: tuple, s: Spec, keys: np.ndarray, sharding: NamedSharding) -> jax.Array:
        assert s.init
        draw, used = jax.jit(s.init), _layers(layout, path) >= 0

        # One program for each layer wherever it lies: one for all of them would round otherwise on
        # another layout, for fusions decide which products and sums become one operation.
        @functools.lru_cache(1)
        def of_layer(place: tuple[int, ...]) -> np.ndarray:
            with jax.set_mesh(device):
                return np.asarray(draw(keys[place])) * used[place]

        def shard(index: Any) -> np.ndarray:
            lead = [range(n)[one] for n, one in zip(used.shape, index, strict=False)]
            drawn = [of_layer(place)[index[used.ndim :]] for place in itertools.product(*lead)]
            return np.stack(drawn).reshape(*map(len, lead), *drawn[0].shape)

        return jax.make_array_from_callback((*used.shape, *s.shape), sharding, shard)

    return [
        key if s.init is None else values(path, s, key, sharding)
        for (path, s), key, sharding in zip(
            leaves, keys, jax.tree.leaves(layout.scattered), strict=True
        )
    ]


def initial_values(layout: ParameterLayout, keys: list[jax.Array]) -> dict:
    """Inside jit: the parameters' initial values, float32, from the keys of `random_keys`, after
    `with_values_of_own_layers`."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(layout.specs, is_leaf=is_spec)
    split_axes = {name for name, size in layout.mesh.shape.items() if size > 1}
    # Parameters of one shape and one sharding are drawn together, for random generators are most of
    # this program's compile time. The groups are by shape, leading dimensions and the mesh axes
    # that shard a parameter.
    groups: dict[tuple, list[int]] = {}
    values = {}
    for i, (path, s) in enumerate(leaves):
        if s.init is not None:
            values[i] = keys[i]
        elif s.std is None:
            constant = jnp.full(s.padded, s.constant, jnp.float32)
            values[i] = _in_used_places(layout, path, s, constant)
        else:
            lead = keys[i].shape[:-1]
            group = s.shape, s.padded, lead, restricted(spec(s.axes), split_axes)
            groups.setdefault(group, []).append(i)
    for (_, _, lead, _), members in groups.items():
        like = leaves[members[0]][1]  # all members are drawn alike
        draw = lambda key, s=like: s.draw(jax.random.wrap_key_data(key, impl="threefry2x32"))
        for _ in (None, *lead):  # over the members, and over stages and layers of a stack
            draw = jax.vmap(draw)
        # The barrier separates the noise's last factor and `std`: XLA merges the two on some
        # layouts, and rounds differently.
        noise = lax.optimization_barrier(draw(jnp.stack([keys[i] for i in members])))
        # Without the constraint XLA draws all numbers on every device and then cuts out its shard.
        noise = constrain(noise, (None, *("stage", "layer")[: len(lead)], *like.axes))
        for n, i in enumerate(members):
            path, s = leaves[i]
            values[i] = _in_used_places(layout, path, s, noise[n] * s.std)
    return jax.tree.unflatten(tree, [values[i] for i in range(len(leaves))])


def _layers(layout: ParameterLayout, path: tuple) -> np.ndarray:
    """The layers of a parameter's stack, [stages, layers], −1 in unused places; [] for a parameter
    outside of stacks."""
    stack = layout.stack_of(path)
    return layout.placement.layer_index(*stack) if stack else np.zeros((), int)


def _in_used_places(layout: ParameterLayout, path: tuple, s: Spec, value: jax.Array) -> jax.Array:
    """`value` in the places of a stack that hold a layer, zero in the others: padding has to stay
    zero, or it would count in norms."""
    used = _layers(layout, path) >= 0
    return jnp.where(used.reshape(*used.shape, *(1 for _ in s.padded)), value, 0)
