"""The recipe is found by its name, and passes every check."""

from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules.checks import check

config = load_recipe(find_recipe("wide"))
check(config)
assert config.model.width == 512
