"""SGD's first step is the gradient, its plan counts one moment, and an unused setting gets a
note."""

import jax.numpy as jnp

from jaxtrain import config as configs
from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.config.rules.unused import unused_settings
from jaxtrain.models.spec import Spec
from jaxtrain.training.update.optimizer import Optimizer

changes = {"optimizer.name": "sgd", "optimizer.epsilon": 1e-6, "optimizer.clip_norm": 0.0}
config = configs.replace(configs.Config(), changes)
optimizer = Optimizer(config.optimizer, 10, {"a": Spec((2,), ("width",), constant=1.0)})
parameters = {"a": jnp.ones(2)}
updated = optimizer.update({"a": jnp.full(2, -3.0)}, optimizer.init(parameters), parameters)
assert jnp.allclose(updated.values["a"], 1 + 3 * config.optimizer.learning_rate, rtol=1e-6)
assert OPTIMIZERS["sgd"].state_numbers((3, 5), config.optimizer) == 15
assert "optimizer.epsilon=1e-06 has no use with optimizer.name='sgd'" in unused_settings(config)
