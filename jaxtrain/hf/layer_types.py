"""The entries of a family's table about layers that differ: `layer_types` and what goes by it, and
the layers without experts. They give `model.pattern`, a kind for each layer, and `model.kinds`.

    layer_types  sliding, sliding, full    pattern=("window", "window", "full"), window=…
    layer_types  full, full                pattern=()
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from jaxtrain.config import ModelConfig, ResolvedModel, value_text
from jaxtrain.config.groups.layer_kinds import BUILTIN, kinds_of_layers, of_kind, pattern_of
from jaxtrain.config.rules.model_rules import OF_EXPERTS
from jaxtrain.hf.entries import RotaryPositions, SettingField, TableEntry
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.rope_parameters import Settings, read_ropes, write_rope

SLIDING, FULL = "sliding_attention", "full_attention"
# The settings of a model without any experts.
NO_EXPERTS: Settings = {"experts": 0} | {name: getattr(ModelConfig(), name) for name in OF_EXPERTS}


def models_of_layers(model: ResolvedModel) -> list[ResolvedModel]:
    """The model of each layer, `dense_layers` first."""
    return [of_kind(model, kind) for kind in kinds_of_layers(model)]


def settings_of(kinds: Sequence[str], window: int) -> Settings:
    """The pattern of layers of these kinds, and the settings of a model whose layers are all of
    one. window: in tokens, of the layers with a window"""
    if len(set(kinds)) > 1:
        return {"pattern": pattern_of(kinds), "window": window}
    return {"pattern": (), "window": window} | BUILTIN[kinds[0]]


def layer_types(
    fields: Fields, layers: int, default: list[str], allowed: Sequence[str]
) -> list[str]:
    """The type of each layer. default: where layer_types is missing. Raises HfError for a type that
    is not allowed."""
    types = fields.value("layer_types", None)
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != layers:
        raise fields.refuse("layer_types", f"has no type for each of {layers} layers")
    if not all(kind in allowed for kind in types):
        only = " or ".join(json.dumps(kind) for kind in allowed)
        raise fields.refuse("layer_types", f"is not supported: only {only} is")
    return types


@dataclasses.dataclass(frozen=True)
class Windows(TableEntry):
    """Layers with a sliding window of attention, and others with full attention.

    window:      transformers' default of sliding_window
    switched:    whether the window needs use_sliding_window
    typed:       whether layer_types, where given, says which layers have the window
    every:       every so many-th layer has full attention where layer_types is missing; 0: none
    every_field: the field of older files that has another such number; "": the family has none
    start:       default of max_window_layers, the first layer with a window; None: the family has
                 no such field, and all layers have it
    full:        kind of the layers with full attention
    """

    window: int | None = None
    switched: bool = False
    typed: bool = False
    every: int = 0
    every_field: str = ""
    start: int | None = None
    full: str = "full"

    def read(self, fields: Fields, settings: Settings) -> Settings:
        switch = fields.require("use_sliding_window", [False, True] if self.switched else [False])
        is_on = switch or not self.switched
        window = fields.integer("sliding_window", self.window, null=0) * is_on
        types = self._types(fields, settings["layers"], bool(window))
        if SLIDING in types and not window:
            field = "sliding_window" if is_on else "use_sliding_window"
            raise fields.refuse(field, f'gives no window, and layer_types has "{SLIDING}"')
        kinds = ["window" if kind == SLIDING else self.full for kind in types]
        return settings_of(kinds, window if SLIDING in types else 0)

    def _types(self, fields: Fields, layers: int, window: bool) -> list[str]:
        """The type of each layer. window: whether there is one"""
        every = fields.integer(self.every_field, self.every) if self.every_field else self.every
        start = (
            0 if self.start is None else fields.integer("max_window_layers", self.start, least=0)
        )
        is_full = lambda n: (n + 1) % every == 0 if every else not window or n < start
        default = [FULL if is_full(n) else SLIDING for n in range(layers)]
        return layer_types(fields, layers, default, (SLIDING, FULL) if self.typed else default[:1])

    def write(self, model: ResolvedModel, length: int) -> Settings:
        windows = [layer.window for layer in models_of_layers(model)]
        types = [SLIDING if window else FULL for window in windows]
        return (
            {"sliding_window": max(windows) or None}
            | ({"use_sliding_window": any(windows)} if self.switched else {})
            | ({"layer_types": types} if self.typed else {})
            | ({} if self.start is None else {"max_window_layers": windows.count(0)})
        )

    @property
    def sources(self) -> Mapping[str, str]:
        typed = {"pattern": "layer_types"} if self.typed else {}
        return {"window": "sliding_window"} | typed

    @property
    def limits(self) -> Mapping[str, str]:
        return {"layer_types": f'"{SLIDING}" or "{FULL}"'} if self.typed else {}


@dataclasses.dataclass(frozen=True)
class RotaryByType(RotaryPositions):
    """Rotary positions whose base and scaling differ between the layers with a window and those
    with full attention. `Windows` comes before.

    base, local: transformers' defaults of both bases, that of full attention first
    local_field: the field of older files with the base in layers with a window; "": there is none
    """

    local: float = 10000.0
    local_field: str = ""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        bases = {FULL: ("rope_theta", self.base), SLIDING: (self.local_field, self.local)}
        ropes = read_ropes(fields, bases, self.longest)
        full, local = ropes[FULL].settings, ropes[SLIDING].settings
        if not settings["pattern"]:
            return local if settings["window"] else full
        names = [*full, *local] if "rope_scaling" in local else ["rotary_base", "rope_scaling"]
        value = lambda rope, name: rope.get(name, getattr(ModelConfig(), name))
        kinds = (
            f"window.{name}={value_text(value(local, name))}"
            for name in dict.fromkeys(names)
            if value(local, name) != value(full, name)
        )
        return full | {"kinds": tuple(kinds)}

    def write(self, model: ResolvedModel, length: int) -> Settings:
        layers = models_of_layers(model)
        by_type = {SLIDING if layer.window else FULL: layer for layer in reversed(layers)}
        forms = {kind: write_rope(layer, length) for kind, layer in by_type.items()}
        newer = {kind: form["rope_parameters"] for kind, form in forms.items()}
        local = {self.local_field: forms.get(SLIDING, {}).get("rope_theta", self.local)}
        return (
            (forms.get(FULL) or forms[SLIDING])
            | {"rope_parameters": newer}
            | (local if self.local_field else {})
        )

    @property
    def sources(self) -> Mapping[str, str]:
        return {**super().sources, "kinds": self.local_field or "rope_parameters"}


@dataclasses.dataclass(frozen=True)
class DenseLayers(SettingField):
    """The number of layers before those with experts, which num_hidden_layers counts, too. One that
    is not below num_hidden_layers leaves no layer with experts."""

    default: int

    def read(self, fields: Fields, settings: Settings) -> Settings:
        dense = fields.integer(self.field, self.default, least=0)
        if dense >= settings["layers"]:
            return NO_EXPERTS
        return {"layers": settings["layers"] - dense, self.setting: dense}

    def write(self, model: ResolvedModel, length: int) -> Settings:
        layers = model.dense_layers + model.layers
        # prediction modules are layers behind all others, whose number decides, too
        dense = model.dense_layers if model.experts else layers + model.mtp_depth
        return {"num_hidden_layers": layers, self.field: dense}


@dataclasses.dataclass(frozen=True)
class SparseLayers(TableEntry):
    """The layers with experts: every decoder_sparse_step-th one that mlp_only_layers does not list.
    `Windows` comes before."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        layers = settings["layers"]
        step = fields.integer("decoder_sparse_step", 1)
        listed = fields.value("mlp_only_layers", None) or []
        if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
            raise fields.refuse("mlp_only_layers", "is no list of layers")
        dense = [n for n in range(layers) if n in set(listed) or (n + 1) % step]
        if len(dense) == layers:
            return NO_EXPERTS
        if dense == list(range(len(dense))):
            return {"layers": layers - len(dense), "dense_layers": len(dense)}
        return _with_dense_layers(settings, dense)

    def write(self, model: ResolvedModel, length: int) -> Settings:
        models = models_of_layers(model)
        dense = [n for n, m in enumerate(models) if n < model.dense_layers or not m.experts]
        return {
            "num_hidden_layers": len(models),
            "mlp_only_layers": dense,
            "decoder_sparse_step": 1,
        }

    sources = {"dense_layers": "mlp_only_layers"}


def _with_dense_layers(settings: Settings, dense: Sequence[int]) -> Settings:
    """The pattern and the kinds of a model with experts in all layers but `dense`: these are of
    kind "dense", or where layers differ otherwise, of a kind such as "full_dense"."""
    alone = "mixer" if settings.get("mixer") else "window" if settings["window"] else "full"
    pattern = settings["pattern"] or (alone,)
    kinds = [pattern[n % len(pattern)] for n in range(settings["layers"])]
    without_experts = {kind: f"{kind}_dense" if settings["pattern"] else "dense" for kind in kinds}
    changes = tuple(
        f"{without_experts[kind]}.{setting}={value_text(value)}"
        for kind in dict.fromkeys(kinds[n] for n in dense)
        if settings["pattern"]
        for setting, value in {**BUILTIN[kind], "experts": 0}.items()
    )
    for n in dense:
        kinds[n] = without_experts[kinds[n]]
    return {"pattern": pattern_of(kinds), "kinds": changes}
