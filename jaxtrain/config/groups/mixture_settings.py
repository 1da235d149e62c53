"""The sources of a mixture and the validation sets: a `data` group for each. No jax.

`data.sources` and `data.validation` have items NAME=PATH and NAME.SETTING=TEXT. A source is the
settings of `data` with some changed, so what prepares a corpus takes `MixtureSource.data`, and
knows nothing of mixtures. Without `data.sources` there is one source, `data.source`, whose name is
"".

    data.sources=("web=crawl/**/*.jsonl.gz", "code=code.jsonl", "code.weight=0.25")
"""

import dataclasses
from typing import Any

from jaxtrain.config.groups.run_settings import DataConfig
from jaxtrain.config.groups.setting import Item, parse_item, text_value

PARTS = 65_536  # a mixture's weights are multiples of 1/PARTS, so these are the most sources
EXHAUSTED = ("stop", "leave", "repeat")
# The settings of `data` that a source may have for itself.
OF_SOURCE = (
    "tokenizer",
    "text_fields",
    "loss_mask",
    "bad_records",
    "token_dtype",
    "validation_fraction",
    "packing",
    "filter",
    "duplicates",
)
_IN_MIXTURE: dict[str, Any] = {"weight": 1.0, "epochs": 0.0, "exhausted": "stop"}
_DEFAULTS = _IN_MIXTURE | {
    f.name: f.default for f in dataclasses.fields(DataConfig) if f.name in OF_SOURCE
}


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """A source of a mixture, or a validation set.

    name: "" for `data.source`
    data: the settings with which its corpus is prepared; `data.source` is its path
    weight: its part of the rows, over the sum of all sources' weights
    epochs: how often it is read before it is exhausted; 0: without end
    exhausted: what follows then: the run stops; it leaves the mixture, and the others' weights are
        renormalised; or it is repeated
    setting: what has its path
    """

    name: str
    data: DataConfig
    weight: float = 1.0
    epochs: float = 0.0
    exhausted: str = "stop"
    setting: str = "data.source"


def mixture_of(data: DataConfig) -> tuple[MixtureSource, ...]:
    """The sources of a run, in the order of their first items. Items have the form and the types
    that the rules ask for."""
    return _named(data, "sources") or (MixtureSource("", data),)


def validation_sets(data: DataConfig) -> tuple[MixtureSource, ...]:
    """The sets of `data.validation`; the parts that sources hold out are not among them. A set is
    its entire corpus, or the part that its own `validation_fraction` holds out."""
    return _named(dataclasses.replace(data, validation_fraction=0.0), "validation")


def is_evaluated(data: DataConfig) -> bool:
    """True if a run is evaluated: a source holds a part out, or there are sets of their own."""
    held_out = any(source.data.validation_fraction for source in mixture_of(data))
    return held_out or bool(data.validation)


def _named(data: DataConfig, setting: str) -> tuple[MixtureSource, ...]:
    """The sources of a setting's items, in the order of their first ones."""
    settings: dict[str, dict[str, Any]] = {}
    for one in filter(None, map(parse_item, getattr(data, setting))):
        settings.setdefault(one.name, {})[one.setting] = item_value(one)
    alone = dataclasses.replace(data, sources=(), validation=())
    return tuple(
        MixtureSource(
            name,
            dataclasses.replace(
                alone,
                source=given.get("", ""),
                **{key: value for key, value in given.items() if key in OF_SOURCE},
            ),
            **{key: value for key, value in given.items() if key in _IN_MIXTURE},
            setting=f"data.{setting}.{name}",
        )
        for name, given in settings.items()
    )


def item_value(item: Item) -> Any:
    """The value of an item's text; the text itself where it is of another type, or its setting is
    unknown."""
    return text_value(item.text, _DEFAULTS.get(item.setting, ""))
