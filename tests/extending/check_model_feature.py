"""Factors of outputs are parameters of the model and of its plan."""

import jax
from support import small

from jaxtrain import config as configs
from jaxtrain.planner.layer.model import model_of
from jaxtrain.training.step import make_step

config = small.config(changes={"model.branch_scale": 0.5})
plain = configs.replace(config, {"model.branch_scale": 0.0})
step = make_step(config, small.mesh_of(config))
leaves = jax.tree_util.tree_leaves_with_path(step.abstract_state().params)
factors = [leaf for path, leaf in leaves if "_factors" in str(path)]
added = model_of(config.model, 16).parameters() - model_of(plain.model, 16).parameters()
assert sum(leaf.size for leaf in factors) == added == 4 * 2 * config.model.width
layers = [model_of(of.model, 16).layer() for of in (plain, config)]
assert [len(layer.arrays) for layer in layers] == [9, 11]
# The gradient of a factor reads the product before it.
assert [layer.products[-1].read for layer in layers] == [False, True]
