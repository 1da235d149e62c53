"""A checkpoint's config and that of the run that resumes it: the settings that may differ, and
those that do. No jax."""

from collections.abc import Iterator

from jaxtrain.config import FilledConfig, ResolvedConfig, StoredConfig, fields, get, value_text
from jaxtrain.config.groups.mixture_settings import OF_SOURCE, mixture_of
from jaxtrain.config.optimizers import record_of
from jaxtrain.config.phases import span_at, spans
from jaxtrain.config.rules.mixture_rules import SOURCES
from jaxtrain.config.rules.phase_rules import PHASES, SIZES
from jaxtrain.config.rules.rules import Violation

# Fixed: what the parameters' shapes, the model's function, the data's position and the optimizer's
# state depend on. That is all of model and data but _FREE, and these:
_FIXED = ("optimizer.name", "train.seed")
_FREE = (
    "model.attention_kernel",
    "model.loss_chunk",
    "model.init_std",
    "model.dropout_residual",
    "model.dropout_attention",
    "model.dropout_embedding",
    "model.mtp_weight",
    "data.cache",
    "data.prefetch",
    "data.validation",
    # rules of their own, or the corpora's checksums, say whether these matter
    "data.source",
    "data.sources",
    "data.bad_records",
    "data.filter",
    "data.duplicates",
    # DeepSeek-V3 sets the first to 0 towards the end
    "model.balance_rate",
    "model.balance_loss",
    "model.z_loss",
)
CANNOT = "cannot continue a checkpoint"


def violations(
    config: FilledConfig, stored: StoredConfig, position: int = 0
) -> Iterator[Violation]:
    """The fields in which a config may not differ from that of the checkpoint which it resumes,
    data's first, for model.max_positions follows data.sequence_length. position: the number of the
    checkpoint's next batch"""
    free = {*_FREE}
    if config.model.positions == "rotary":
        free.add("model.max_positions")
    if config.model.expert_room and stored.model.expert_room:
        free.add("model.expert_room")  # a checkpoint has other parameters with and without it
    optimizer = record_of(config.optimizer.name)
    fixed = {*_FIXED, *(f"optimizer.{setting}" for setting in optimizer.fixed)}
    if config.train.diloco_inner_steps and stored.train.diloco_inner_steps:
        fixed.add("mesh.replica")  # independent replicas have parameters of their own
    elif config.train.diloco_inner_steps or stored.train.diloco_inner_steps:
        fixed.add("train.diloco_inner_steps")
    for path in sorted(fields(), key=lambda path: not path.startswith("data.")):
        value = get(stored, path)
        matters = path in fixed or (path.startswith(("model.", "data.")) and path not in free)
        if matters and value != get(config, path):
            name, size = f"from_{position}", path.partition(".")[2]
            phase = (f"{name}.step={position}", f"{name}.{size}={get(config, path)}")
            later = {path: value, PHASES: (*config.train.phases, *phase)}
            fixes = [*[later] * (path in SIZES), {path: value}]
            yield Violation(path, f"{CANNOT} of {path}={value!r}", fixes)
    yield from _violations_of_sources(config, stored)
    yield from _violations_of_phases(config, stored, position)


def _violations_of_sources(config: FilledConfig, stored: StoredConfig) -> Iterator[Violation]:
    """The checkpoint's sources are the first ones, with the settings of their corpora."""
    fixes = [{SOURCES: stored.data.sources}]
    before, now = mixture_of(stored.data), mixture_of(config.data)
    names = [source.name for source in before]
    if names != [source.name for source in now[: len(before)]]:
        first = f"{', '.join(names)} as the first ones" if names[0] else "data.source alone"
        yield Violation(SOURCES, f"{CANNOT} that has {first}", fixes)
        return
    for old, new in zip(before, now, strict=False):
        for name in OF_SOURCE:
            value = getattr(old.data, name)
            if value != getattr(new.data, name) and f"data.{name}" not in _FREE:
                setting = f"{old.setting}.{name}={value_text(value)}"
                yield Violation(SOURCES, f"{CANNOT} of {setting}", fixes)


def _violations_of_phases(
    config: FilledConfig, stored: StoredConfig, position: int
) -> Iterator[Violation]:
    """Batches that the checkpoint has seen have the sizes and weights with which it saw them."""
    before, now = spans(stored), spans(config)
    for batch in sorted({span.begin for span in (*before, *now) if span.begin < position}):
        old, new = span_at(before, batch), span_at(now, batch)
        # Sources that were added have no weight in these batches.
        added = [0.0] * (len(new.weights) - len(old.weights))
        of_old = [old.batch_size, old.sequence_length, *old.weights, *added]
        if of_old != [new.batch_size, new.sequence_length, *new.weights]:
            rule = (
                f"{CANNOT} of {position} batches: batch {batch} has {new.describe()}, and had "
                f"{old.describe()}"
            )
            path = PHASES if mixture_of(stored.data) == mixture_of(config.data) else SOURCES
            yield Violation(path, rule, [{path: get(stored, path)}])


def changes(stored: StoredConfig, config: ResolvedConfig) -> list[str]:
    """The differences between a checkpoint's config and the one that resumes it: lines such as
    "optimizer.learning_rate: 0.003 → 0.1"."""
    pairs = ((path, get(stored, path), get(config, path)) for path in fields())
    return [
        f"{path}: {_text(before)} → {_text(after)}"
        for path, before, after in pairs
        if before != after
    ]


def _text(value: object) -> str:
    return value_text(value) or ("none" if isinstance(value, tuple) else "''")
