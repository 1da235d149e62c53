"""Norms of outputs are parameters of the model and of its plan."""

import jax
from support import small

from jaxtrain import config as configs
from jaxtrain.planner.layer.model import model_of
from jaxtrain.training.step import make_step

config = small.config(changes={"model.output_norms": True})
plain = configs.replace(config, {"model.output_norms": False})
step = make_step(config, small.mesh_of(config))
leaves = jax.tree_util.tree_leaves_with_path(step.abstract_state().params)
norms = [leaf for path, leaf in leaves if "output_norm" in str(path)]
added = model_of(config.model, 16).parameters() - model_of(plain.model, 16).parameters()
assert sum(leaf.size for leaf in norms) == added == 4 * 2 * config.model.width
layers = [model_of(of.model, 16).layer() for of in (plain, config)]
assert [layer.norms_and_sums for layer in layers] == [4, 6]
assert [len(layer.arrays) for layer in layers] == [9, 11]
