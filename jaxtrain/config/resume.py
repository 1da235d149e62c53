"""Resuming a checkpoint with another config: which settings may differ, and which do. No jax."""

from collections.abc import Iterator

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.config.rules import Violation

# Fixed: what the parameters' shapes, the model's function, the data's position and the optimizer's
# state depend on. That is all of model and data but _FREE, and these:
_FIXED = ("optimizer.name", "precision.params", "train.seed")
_FREE = (
    "model.attention_kernel",
    "model.loss_chunk",
    "model.init_std",
    "model.mtp_weight",
    "data.cache",
    "data.prefetch",
    "data.bad_records",  # the corpus's checksum says whether it matters
    # DeepSeek-V3 sets the first to 0 towards the end
    "model.balance_rate",
    "model.balance_loss",
    "model.z_loss",
)
CANNOT = "cannot continue a checkpoint"


def violations(config: Config, stored: Config) -> Iterator[Violation]:
    """The fields in which a resolved config may not differ from the stored one of its checkpoint,
    data's first, for model.max_positions follows data.sequence_length."""
    for path in sorted(cfg.fields(), key=lambda path: not path.startswith("data.")):
        if cfg.get(stored, path) != cfg.get(config, path) and not _may_differ(path, config, stored):
            value = cfg.get(stored, path)
            yield Violation(path, f"{CANNOT} of {path}={value!r}", [{path: value}])


def _may_differ(path: str, config: Config, stored: Config) -> bool:
    if path == "model.max_positions" and config.model.positions == "rotary":
        return True
    if path == "model.expert_room":  # a checkpoint has other parameters with and without it
        return bool(config.model.expert_room) == bool(stored.model.expert_room)
    inner_steps = (config.train.diloco_inner_steps, stored.train.diloco_inner_steps)
    if path == "train.diloco_inner_steps":
        return all(inner_steps)
    if path == "mesh.replica":  # independent replicas have parameters of their own
        return not all(inner_steps)
    fixed = path in _FIXED or path.startswith(("model.", "data."))
    return path in _FREE or not fixed


def changes(stored: Config, config: Config) -> list[str]:
    """What differs between a checkpoint's config and the one that resumes it: lines such as
    "optimizer.learning_rate: 0.003 → 0.1".

    Both with their dependent defaults and the mesh's sizes filled in. A setting that the checkpoint
    does not know had its default.
    """
    stored, config = stored.resolve(), config.resolve()
    pairs = ((path, cfg.get(stored, path), cfg.get(config, path)) for path in cfg.fields())
    return [
        f"{path}: {_text(before)} → {_text(after)}"
        for path, before, after in pairs
        if before != after
    ]


def _text(value: object) -> str:
    return cfg.value_text(value) or ("none" if isinstance(value, tuple) else "''")
