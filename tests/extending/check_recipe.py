"""The recipe is found by its name, and passes every check."""

from jaxtrain.config.checks import check
from jaxtrain.config.recipes import find_recipe, load_recipe

config = load_recipe(find_recipe("wide"))
check(config)
assert config.model.width == 512
