"""The setting is a flag, its rule names a fix that works, and it is reported where it is unused."""

from jaxtrain import config as configs
from jaxtrain.config.rules.checks import error_of
from jaxtrain.config.rules.unused import unused_settings

both = {"optimizer.decay_from": 6, "optimizer.decay_steps": 4}
config = configs.replace(configs.Config(), {"optimizer.schedule": "constant", **both})
assert "use --config.optimizer.decay_from=0" in str(error_of(config))
assert error_of(configs.replace(config, {"optimizer.decay_from": 0})) is None
unused = unused_settings(configs.replace(configs.Config(), {"optimizer.decay_from": 6}))
assert "optimizer.decay_from=6 has no use with optimizer.schedule='cosine'" in unused
