"""Rotary positions in a config.json, in both of its forms:

    newer   "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, …}
    older   "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 40, …}

Missing parameters of a scaling have transformers' defaults, which are those of ModelConfig.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.hf.fields import Fields

Settings = dict[str, Any]
LENGTH = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class ScalingParameter:
    """A parameter of a scaling.

    setting: of the model
    needed:  transformers has no default
    zero:    0 stands for the default
    """

    setting: str
    needed: bool = False
    zero: bool = False


FACTOR, ORIGINAL = (
    ScalingParameter("rope_factor", needed=True),
    ScalingParameter("rope_original_length"),
)
# Kind of scaling → its parameters.
SCALINGS: Mapping[str, Mapping[str, ScalingParameter]] = {
    "default": {},
    "linear": {"factor": FACTOR},
    "llama3": {
        "factor": FACTOR,
        "low_freq_factor": ScalingParameter("rope_low_freq_factor", needed=True),
        "high_freq_factor": ScalingParameter("rope_high_freq_factor", needed=True),
        LENGTH: ORIGINAL,
    },
    "yarn": {
        "factor": FACTOR,
        LENGTH: ORIGINAL,
        "beta_fast": ScalingParameter("rope_beta_fast", zero=True),
        "beta_slow": ScalingParameter("rope_beta_slow", zero=True),
        "truncate": ScalingParameter("rope_truncate"),
        "attention_factor": ScalingParameter("rope_attention_factor"),
        "mscale": ScalingParameter("rope_mscale", zero=True),
        "mscale_all_dim": ScalingParameter("rope_mscale_all_dim", zero=True),
    },
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary positions that a config.json describes.

    base: of the wavelengths; part: the rotated fraction of a head; scaling: settings of the model
    """

    base: float
    part: float
    scaling: Settings

    @property
    def settings(self) -> Settings:
        """The settings of a model that rotates all of a head."""
        return {"positions": "rotary", "rotary_base": self.base} | self.scaling


def read_ropes(
    fields: Fields, bases: Mapping[str, tuple[str, float]], longest: int
) -> dict[str, Rope]:
    """Type of layer → its rotary positions, of a family where they go by the type:

        newer   "rope_parameters": {"full_attention": {…}, "sliding_attention": {…}}
        older   a field for the base of each type, and "rope_scaling" of the first type

    bases: type → the older form's field, "" if it has none, and transformers' default
    longest: its default of max_position_embeddings

    Raises HfError as `read_rope`.
    """
    shared = ("max_position_embeddings", "partial_rotary_factor", LENGTH)
    fields.pass_over("rope_scaling", *(field for field, _ in bases.values() if field), *shared)
    nested = fields.value("rope_parameters", None) or {}
    if not isinstance(nested, dict):
        raise fields.refuse("rope_parameters", "is no object")
    inner = Fields(nested, fields.place, prefix="rope_parameters.")
    inner.pass_over(*bases)
    inner.finish(" and ".join(bases))
    ropes: dict[str, Rope] = {}
    for kind, (field, base) in bases.items():
        names = (*shared, field) if ropes else (*shared, field, "rope_scaling")
        values = {name: fields.values[name] for name in names if name in fields.values}
        newer = f"rope_parameters.{kind}"
        of_type = Fields(
            values | {newer: nested.get(kind)}, fields.place, {field: "rope_theta"} if ropes else {}
        )
        ropes[kind] = read_rope(of_type, base, longest, newer=newer)
        fields.notes += of_type.notes
    return ropes


def read_rope(
    fields: Fields,
    base: float,
    longest: int,
    part: float = 1.0,
    head: int | None = None,
    newer: str = "rope_parameters",
) -> Rope:
    """The rotary positions of a config.json.

    base, longest, part: transformers' defaults of rope_theta, max_position_embeddings and
        partial_rotary_factor
    head: size of a head, of which a part may be rotated; None: all of it has to be
    newer: the field of the newer form

    Raises HfError for a scaling that is not in SCALINGS, and for fields that contradict each other.
    """
    longest = fields.integer("max_position_embeddings", longest)
    rope = Rope(
        fields.number("rope_theta", base, above=1), fields.number("partial_rotary_factor", part), {}
    )
    given = [name for name in ("rope_scaling", newer) if fields.value(name, None) not in (None, {})]
    if "partial_rotary_factor" in fields.values or not given:
        _check_part(fields, rope.part, head)
    forms = {name: _read_object(fields, name, rope, longest, head) for name in given}
    preferred = next(iter(forms), "")
    for name, form in forms.items():
        if form != forms[preferred]:
            raise fields.refuse(name, f"contradicts {preferred}")
        if "rope_theta" in fields.values and form.base != rope.base:
            raise fields.refuse("rope_theta", f"contradicts {name}")
        if "partial_rotary_factor" in fields.values and form.part != rope.part:
            raise fields.refuse("partial_rotary_factor", f"contradicts {name}")
    return forms.get(preferred, rope)


def _check_part(fields: Fields, part: float, head: int | None) -> None:
    """Raises HfError for a fraction of a head that cannot be rotated. head: see `read_rope`"""
    if part > 1 or (head is None and part < 1):
        rule = f"is not supported: only {'1' if head is None else 'a fraction up to 1'} is"
        raise fields.refuse("partial_rotary_factor", rule)
    if head is not None and (int(head * part) < 2 or int(head * part) % 2):
        rule = f"rotates {int(head * part)} of a head's {head} numbers, which are no pairs"
        raise fields.refuse("partial_rotary_factor", rule)


def _read_object(fields: Fields, name: str, rope: Rope, longest: int, head: int | None) -> Rope:
    """The rotary positions that an object of parameters describes.

    name: its field; rope: what the fields beside it say; longest: max_position_embeddings; head:
        see `read_rope`
    """
    values = fields.values[name]
    if not isinstance(values, dict):
        raise fields.refuse(name, "is no object")
    inner = Fields(values, fields.place, {"type": "rope_type"}, f"{name}.")
    kind = inner.value("rope_type", "default")
    if not isinstance(kind, str) or kind not in SCALINGS:
        reasons = cfg.setting_of(cfg.fields()["model.rope_scaling"]).choices.refused
        reason = reasons.get(kind) if isinstance(kind, str) else None
        raise inner.refuse(
            "rope_type", reason or f"is not supported: only {', '.join(SCALINGS)} are"
        )
    base = inner.number("rope_theta", rope.base, above=1)
    part = inner.number("partial_rotary_factor", rope.part)
    _check_part(inner, part, head)
    scaling: Settings = {} if kind == "default" else {"rope_scaling": kind}
    for key, parameter in SCALINGS[kind].items():
        if key != LENGTH:
            scaling |= _read_parameter(inner, key, parameter)
            continue
        length = fields.integer(LENGTH, longest)
        scaling[parameter.setting] = inner.integer(LENGTH, length)
        if LENGTH in fields.values and scaling[parameter.setting] != length:
            raise fields.refuse(LENGTH, f"contradicts {name}")
    inner.finish(kind)
    fields.notes += inner.notes
    return Rope(base, part, scaling)


def _read_parameter(inner: Fields, key: str, parameter: ScalingParameter) -> Settings:
    """The setting of a scaling's parameter; nothing where the default stands."""
    if type(getattr(cfg.ModelConfig(), parameter.setting)) is bool:
        return {parameter.setting: inner.require(key, [True, False])}
    if parameter.needed:
        return {parameter.setting: inner.number(key)}
    value = inner.value(key, None)
    if value is None or (parameter.zero and value == 0):
        return {}
    return {parameter.setting: inner.number(key)}


def write_rope(model: cfg.ResolvedModel, length: int, part: float | None = None) -> Settings:
    """The fields of a model's rotary positions, in both forms.

    length: tokens of its longest sequence; part: the rotated fraction of a head; None: the family
        rotates all of it
    """
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    scaling = {
        key: getattr(model, parameter.setting)
        for key, parameter in SCALINGS[kind].items()
        if parameter.needed
        or key == LENGTH
        or getattr(model, parameter.setting) != getattr(cfg.ModelConfig(), parameter.setting)
    }
    partial = {} if part is None else {"partial_rotary_factor": part}
    older = {"rope_scaling": {"rope_type": kind} | scaling} if scaling else {}
    newer = {"rope_type": kind, "rope_theta": model.rotary_base} | partial | scaling
    return {
        "max_position_embeddings": length,
        "rope_theta": model.rotary_base,
        **partial,
        **older,
        "rope_parameters": newer,
    }
