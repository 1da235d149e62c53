"""The new kind of remat is a setting, has op times, and saves products but no kernel's results; the
planner has its bytes."""

import jax
import jax.numpy as jnp

from jaxtrain import config as configs
from jaxtrain.config.rules.checks import check
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.step.saved import layer_bytes
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.runtime.layers.backward_split import keep_dots, keep_products

changes = {"mesh.data": 1, "mesh.stage": 2, "pipeline.remat": "dots"}
config = configs.replace(configs.Config(), changes).resolve()
check(config)
assert make_setup(config).table.stages == 2


def layer(x, weight):
    return jax.lax.while_loop(lambda y: y.sum() < 0, jnp.sin, x @ weight)


equations = jax.make_jaxpr(layer)(jnp.ones((2, 3)), jnp.ones((3, 3))).eqns
assert [keep_products(equation) for equation in equations] == [True, True]
assert [keep_dots(equation) for equation in equations] == [True, False]

step = step_model_of(config, load("h100"))
dots, selective, everything = (layer_bytes(step, remat=mode) for mode in ("", "selective", "none"))
saved = [sum(of_mode[:2]) for of_mode in (dots, selective, everything)]
assert saved == sorted(set(saved)), saved
