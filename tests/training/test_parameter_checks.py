"""What is asked of parameters on their devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import make_mesh
from jaxtrain.training.parameter_checks import Finiteness


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found(wrong):
    mesh = make_mesh((1, 2, 1, 1, 1, 1), jax.devices()[:2])
    place = lambda a: {"w": jax.device_put(a, NamedSharding(mesh, P("data"))), "step": jnp.int32(3)}
    finite, numbers = Finiteness(mesh), np.full((4, 3), 3e38, np.float32)
    assert finite(place(numbers))
    numbers[3, 1] = wrong
    assert not finite(place(numbers))
