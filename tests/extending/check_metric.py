"""A step's program computes the metric on a mesh: the largest value that its gradients have, and of
independent replicas the largest of all."""

import jax
import numpy as np
from support import small

from jaxtrain.run.metrics import METRICS
from jaxtrain.training.one_step import combine_replicas
from jaxtrain.training.step import make_step

jax.config.update("jax_num_cpu_devices", 4)
config = small.config((2, 1, 2), microbatches=2, changes={"model.layers": 1})
step = make_step(config, small.mesh_of(config))
with jax.set_mesh(step.mesh):
    state = step.abstract_state()
    state = jax.tree.map(
        lambda a: jax.device_put(np.full(a.shape, 0.1, a.dtype), a.sharding), state
    )
    batch = small.place_batch(step, config, small.batch(config, 0))
    gradients = jax.device_get(step.gradients(state.params, batch).gradients)
    _, metrics = step.train(state, batch)
expected = max(np.abs(gradient).max() for gradient in jax.tree.leaves(gradients))
np.testing.assert_allclose(metrics["largest_gradient"], expected, rtol=1e-5)
each = {"largest_gradient": np.float32([3, 5]), "weighted_tokens": np.float32([9, 1])}
assert combine_replicas(each)["largest_gradient"] == 5
assert METRICS["largest_gradient"].line(5.0) == ""
