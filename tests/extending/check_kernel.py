"""The kernel is chosen by its name, and attends as plain XLA does."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.parallel.attention.causal import AttentionSettings, attend, attend_causal

q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(1, 8, 2, 4))) for i in range(3))
result = jax.jit(lambda *a: attend_causal(*a, None, AttentionSettings(kernel="float32")))(q, k, v)
np.testing.assert_allclose(result, attend(q, k, v), rtol=1e-5, atol=1e-6)
