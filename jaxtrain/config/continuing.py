"""What may differ between a checkpoint's config and the one that continues it, and what does. No
jax."""

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.rules import Broken, values_for

# What must stay as it is for a checkpoint to be continued: the model's shape and function, the
# data's position, the optimizer's state.
_KEPT = ("optimizer.name", "precision.params", "train.seed")  # and all of model and data, but for:
_FREE = (
    *(
        "model.attention_kernel",
        "model.loss_chunk",
        "model.init_std",
        "model.mtp_weight",
        "data.cache",
        "data.prefetch",
    ),
    "data.bad_records",  # the corpus's checksum says whether it matters
    # DeepSeek-V3 sets the first to 0 towards the end
    *("model.balance_rate", "model.balance_loss", "model.z_loss"),
)
CANNOT = "cannot continue a checkpoint"


def broken_continuation(config: Config, stored: Config) -> Broken | None:
    """The first field, of resolved configs, in which they may not differ."""
    # model.max_positions follows data's
    for path in sorted(cfg.fields(), key=lambda path: not path.startswith("data.")):
        if path == "model.max_positions" and config.model.positions == "rotary":
            continue
        if (
            path == "model.expert_room"
            and min(stored.model.expert_room, config.model.expert_room) > 0
        ):
            continue  # with and without it, a checkpoint has other parameters
        kept = path in _KEPT or (path.startswith(("model.", "data.")) and path not in _FREE)
        if kept and cfg.get(stored, path) != cfg.get(config, path):
            return _cannot_continue(path, stored)
    if bool(stored.train.diloco_inner_steps) != bool(config.train.diloco_inner_steps):
        return _cannot_continue("train.diloco_inner_steps", stored)
    # each has parameters of its own
    if config.train.diloco_inner_steps and stored.mesh.replica != config.mesh.replica:
        return _cannot_continue("mesh.replica", stored)
    return None


def changes(stored: Config, config: Config) -> list[str]:
    """What differs between a checkpoint's config and the one that continues it: lines such as
    "optimizer.learning_rate: 0.003 → 0.1".

    Both with their dependent defaults and the mesh's sizes filled in. A setting that the checkpoint
    does not know had its default.
    """
    stored, config = stored.resolve(), config.resolve()
    pairs = ((path, cfg.get(stored, path), cfg.get(config, path)) for path in cfg.fields())
    shown = lambda value: cfg.value_text(value) or ("none" if isinstance(value, tuple) else "''")
    return [
        f"{path}: {shown(before)} → {shown(after)}"
        for path, before, after in pairs
        if before != after
    ]


def _cannot_continue(path: str, stored: Config) -> Broken:
    value = cfg.get(stored, path)
    return Broken(path, f"{CANNOT} of {path}={value!r}", values_for(path, [value]))
