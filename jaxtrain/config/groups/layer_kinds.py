"""Kinds of layers: which layer is of which kind, and the model of the layers of one kind. No jax.

`model.pattern` names a kind for each layer. A kind is the model's settings with some changed, by
BUILTIN and `model.kinds`; `of_kind` changes them, and everything that makes or plans a layer takes
the result. Kinds whose layers have equal parameters are of one form, and lie in one stack:

    pattern=("window", "window", "full")                   kinds window, full      one form, ""
    pattern=("full", "dense"), experts=8                   kinds full, dense       forms full, dense
    pattern=()                                             one kind, ""            one form, ""
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

from jaxtrain.config.groups.model_settings import ModelConfig, ResolvedModel
from jaxtrain.config.groups.setting import parse_item, text_value, with_entry

_WITH_ATTENTION: dict[str, object] = {"block": "", "mixer": ""}
# Kinds that need no entry in `model.kinds`, and what they change.
BUILTIN: dict[str, dict[str, object]] = {
    "window": _WITH_ATTENTION,
    "full": {"window": 0, **_WITH_ATTENTION},
    "nope": {"window": 0, "positions": "none", **_WITH_ATTENTION},
    "dense": {"experts": 0},
    "block": {},
    "mixer": {},
}
# Settings of the whole model, which no kind changes.
OF_MODEL = frozenset(
    "layers dense_layers width pattern kinds vocab_size max_positions tied_embeddings mtp_depth "
    "mtp_weight embedding_scale logit_scale logit_softcap loss_chunk dropout_embedding "
    "balance_rate mup_base_width".split()
)
# The settings of layers, with their defaults.
SETTINGS: dict[str, Any] = {
    f.name: f.default for f in dataclasses.fields(ModelConfig) if f.name not in OF_MODEL
}
# Settings on which no parameter's shape, initial values or name depend.
SHAPELESS = frozenset(
    "window positions rotary_base rotary_dim rope_scaling rope_factor rope_original_length "
    "rope_low_freq_factor rope_high_freq_factor rope_beta_fast rope_beta_slow rope_truncate "
    "rope_attention_factor rope_mscale rope_mscale_all_dim attention_scale attention_softcap "
    "attention_kernel attention_backward activation_alpha activation_limit dropout_residual "
    "dropout_attention norm_epsilon router_scale router_normalize balance_loss z_loss".split()
)
# Pairs of settings. The first fills in the second, which follows where a kind changes the first
# alone.
_FOLLOWS = (
    ("heads", "kv_heads"),
    ("head_dim", "rotary_dim"),
    ("head_dim", "value_head_dim"),
    ("mlp_width", "expert_width"),
)
AnyModel = TypeVar("AnyModel", bound=ModelConfig)


def kinds_of_layers(model: ModelConfig) -> tuple[str, ...]:
    """The kind of each layer, `dense_layers` first; "" where there is no pattern."""
    pattern, layers = model.pattern or ("",), model.dense_layers + model.layers
    return (pattern * -(-layers // len(pattern)))[:layers]


def stacked_kinds(model: ModelConfig) -> tuple[str, ...]:
    """The kind of each of `model.layers`, without the dense layers before them."""
    return kinds_of_layers(model)[model.dense_layers :]


def kind_names(model: ModelConfig) -> tuple[str, ...]:
    """The kinds of `model.layers`, in the order of the first layer of each."""
    return tuple(dict.fromkeys(stacked_kinds(model)))


def models_of_kinds(model: AnyModel) -> dict[str, AnyModel]:
    """Kind → the model of its layers, in the order of the first layer of each, dense ones first."""
    return {kind: of_kind(model, kind) for kind in dict.fromkeys(kinds_of_layers(model))}


@functools.lru_cache(2**10)
def of_kind(model: AnyModel, kind: str) -> AnyModel:
    """The model of the layers of one kind: without a pattern, and with the kind's settings. Whether
    there is such a kind is a rule's question (rules/kind_rules.py).

    >>> model = ModelConfig(pattern=("window", "full"), window=8, kinds=("full.rotary_base=1e6",))
    >>> of_kind(model, "window").window, of_kind(model, "full").window
    (8, 0)
    >>> of_kind(model, "full").rotary_base
    1000000.0
    """
    if not kind and not model.pattern:
        return model
    changes = changes_of_kind(model, kind)
    if not isinstance(model, ResolvedModel):
        return dataclasses.replace(model, pattern=(), kinds=(), **changes)
    for name, follower in _FOLLOWS:
        if name in changes and getattr(model, follower) == getattr(model, name):
            changes.setdefault(follower, changes[name])
    changed = dataclasses.replace(model, pattern=(), kinds=(), **changes)
    # defaults that only layers of this kind have, such as the width of experts
    return cast(AnyModel, changed.resolve(model.max_positions))


@functools.lru_cache(2**10)
def forms_of_kinds(model: ModelConfig) -> dict[str, str]:
    """Kind → its form, the name of the first kind with the same parameters; "" for all where there
    is one form."""
    shaping = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in SHAPELESS]
    first: dict[tuple, str] = {}
    forms = {}
    for kind in kind_names(model):
        values = vars(of_kind(model, kind))
        forms[kind] = first.setdefault(tuple(values[name] for name in shaping), kind)
    return forms if len(first) > 1 else dict.fromkeys(forms, "")


def forms_of_layers(model: ModelConfig) -> tuple[str, ...]:
    """The form of each of `model.layers`; () where all are of one."""
    forms = forms_of_kinds(model)
    return tuple(forms[kind] for kind in stacked_kinds(model)) if any(forms.values()) else ()


class Periods(NamedTuple):
    """Kinds of layers that repeat from the first one on: `period` so many times, and then `rest`,
    which is less than two periods where there is one at all."""

    period: tuple[str, ...]
    repetitions: int
    rest: tuple[str, ...]


@functools.lru_cache(2**10)
def periods_of(kinds: tuple[str, ...]) -> Periods:
    """The shortest period that kinds have at least twice; all are `rest` where there is none.

    >>> periods_of(("window", "full", "window", "full", "window"))
    Periods(period=('window', 'full'), repetitions=2, rest=('window',))
    >>> periods_of(("window", "window", "full"))
    Periods(period=(), repetitions=0, rest=('window', 'window', 'full'))
    """
    period = pattern_of(kinds)
    number = len(kinds) // max(1, len(period))
    if number < 2:
        return Periods((), 0, kinds)
    return Periods(period, number, kinds[len(period) * number :])


def pattern_of(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that gives layers these kinds.

    >>> pattern_of(["window", "full", "window"])
    ('window', 'full')
    """
    sizes = range(1, len(kinds))
    return tuple(kinds[: next((n for n in sizes if kinds[n:] == kinds[:-n]), len(kinds))])


def has_experts(model: ModelConfig) -> bool:
    """True if layers of any kind have experts."""
    return any(each.experts for each in models_of_kinds(model).values())


def has_dropout(model: ModelConfig) -> bool:
    """True if training drops numbers of the embeddings, or in layers of any kind."""
    kinds = models_of_kinds(model).values()
    rates = (each.dropout_residual + each.dropout_attention for each in kinds)
    return model.dropout_embedding + max(rates) > 0


def changes_of_kind(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Setting → its value in layers of a kind, where it is not the model's; of a model whose
    `kinds` have the form and the types that the rules ask for (rules/kind_rules.py)."""
    settings: dict[str, Any] = {}
    arguments: tuple[str, ...] = ()
    for one in filter(None, map(parse_item, model.kinds)):
        if one.name == kind and one.part:  # of block_settings
            arguments = with_entry(arguments, one.part, one.text)
            settings[one.setting] = arguments
        elif one.name == kind and one.setting in SETTINGS:
            settings[one.setting] = text_value(one.text, SETTINGS[one.setting])
    return BUILTIN.get(kind, {}) | settings
