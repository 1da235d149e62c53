"""One specification per parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.spec import Spec


def test_noise_does_not_depend_on_padding():
    key = jax.random.key(3)
    plain = Spec((61, 8), ("vocab", "width"), std=0.02).draw(key)
    padded = Spec((61, 8), ("vocab", "width"), std=0.02, padded=(64, 8)).draw(key)
    assert plain.dtype == jnp.float32 and plain.shape == (61, 8)
    np.testing.assert_array_equal(padded[:61], plain)
    assert not padded[61:].any()
    # 488 values: 3 standard errors
    assert abs(float(plain.std()) - 1) < 0.1 and abs(float(plain.mean())) < 0.1


def test_what_counts_and_what_decays():
    assert Spec((61, 8), ("vocab", "width"), padded=(64, 8)).size == 488
    assert Spec((61, 8), ("vocab", "width")).matrix and not Spec((8,), ("width",)).matrix


def test_mistakes():
    with pytest.raises(ValueError, match="1 axis names for a parameter of shape"):
        Spec((2, 3), ("width",))
    with pytest.raises(ValueError, match="only the first dimension"):
        Spec((2, 3), ("width", "mlp"), padded=(2, 4))
