"""What is asked of parameters on their devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from support.bad_batches import flipped

from jaxtrain.devices.mesh import make_mesh
from jaxtrain.training.parameter_checks import Copies, Finiteness, bit_sum
from jaxtrain.training.state import TrainState


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found(wrong):
    mesh = make_mesh((1, 2, 1, 1, 1, 1), jax.devices()[:2])
    place = lambda a: {"w": jax.device_put(a, NamedSharding(mesh, P("data"))), "step": jnp.int32(3)}
    finite, numbers = Finiteness(mesh), np.full((4, 3), 3e38, np.float32)
    assert finite(place(numbers))
    numbers[3, 1] = wrong
    assert not finite(place(numbers))


# --- copies ---------------------------------------------------------------------------------------


# The mesh's sizes and the spec of each parameter; a parameter, the device whose copy is changed,
# and what is said.
LAYOUTS = {
    "data 4": (
        (1, 4, 1, 1, 1, 1),
        {"w": P()},
        "w",
        2,
        "cpu:2 (process 0) has parameters that are not those of the 3 others that hold them",
    ),
    "stages, each with its own": (
        (1, 3, 2, 1, 1, 1),
        {"layers": P("stage"), "head": P()},
        "layers",
        3,  # stage 1 of data shard 1
        "cpu:3 (process 0) has parameters that are not those of the 2 others that hold them",
    ),
    "an end that all stages hold": (
        (1, 1, 4, 1, 1, 1),
        {"layers": P("stage"), "head": P()},
        "head",
        0,
        "cpu:0 (process 0) has parameters that are not those of the 3 others that hold them",
    ),
    "two copies": (
        (1, 2, 1, 1, 1, 2),
        {"w": P("model"), "norm": P()},
        "w",
        3,
        "cpu:1 (process 0) and cpu:3 (process 0) have parameters that should be the same and "
        "are not",
    ),
    "zero 3, replicas": (
        (3, 2, 1, 1, 1, 1),
        {"w": P(None, "data")},
        "w",
        5,
        "cpu:5 (process 0) has parameters that are not those of the 2 others that hold them",
    ),
    "no copies": ((1, 2, 1, 1, 1, 1), {"w": P("data")}, "w", 1, ""),
}


def state_of(mesh, specs: dict[str, P], lead: bool = False) -> TrainState:
    """Random parameters; with `lead` of two replicas that train apart, and their anchor."""
    random = np.random.default_rng(0)
    place = lambda shape, spec: jax.device_put(
        random.standard_normal(shape, np.float32), NamedSharding(mesh, spec)
    )
    params = {
        name: place((2, 12, 12) if lead else (12, 12), P("replica", *spec) if lead else spec)
        for name, spec in specs.items()
    }
    return TrainState(params, None, None, {"w": place((12, 12), P())} if lead else None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_whose_copy_differs_is_named(layout):
    sizes, specs, name, device, said = LAYOUTS[layout]
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(sizes))])
    state = state_of(mesh, specs)
    copies = Copies(mesh, state)
    assert copies.compare(state)() == ""
    state.params[name] = flipped(state.params[name], device)
    assert copies.compare(state)() == said


def test_replicas_that_train_apart_are_compared_inside_and_their_anchor_across():
    mesh = make_mesh((2, 3, 1, 1, 1, 1), jax.devices()[:6])
    state = state_of(mesh, {"w": P()}, lead=True)
    copies = Copies(mesh, state)
    assert copies.compare(state)() == ""  # each replica has numbers of its own
    wrong = TrainState({"w": flipped(state.params["w"], 4)}, None, None, state.anchor)
    assert (
        copies.compare(wrong)()
        == "cpu:4 (process 0) has parameters that are not those of the 2 others that hold them"
    )
    wrong = TrainState(state.params, None, None, {"w": flipped(state.anchor["w"], 1)})
    assert (
        copies.compare(wrong)()
        == "cpu:1 (process 0) has parameters that are not those of the 5 others that hold them"
    )


def test_a_sum_changes_with_every_bit_and_place():
    """Against numpy's, in integers of 64 bits."""
    x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    weigh = lambda a: int(
        (
            a.reshape(-1).view(np.uint32).astype(np.uint64)
            * (2 * np.arange(15, dtype=np.uint64) + 1)
        ).sum()
        % 2**32
    )
    total = jax.jit(bit_sum)
    assert int(total(x)) == weigh(x)
    for place in range(15):
        for bit in range(32):
            changed = x.copy()
            changed.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)
            assert int(total(changed)) == weigh(changed) != weigh(x)
    assert int(total(x[::-1].copy())) != int(total(x))
