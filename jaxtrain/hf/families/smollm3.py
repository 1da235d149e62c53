"""SmolLM3, some of whose layers have no rotary positions."""

import dataclasses

from jaxtrain.config import ResolvedModel
from jaxtrain.hf.entries import Biases, Integer, RotaryPositions, Settings, TableEntry
from jaxtrain.hf.families.family import Family, decoder, decoder_rules
from jaxtrain.hf.fields import Fields
from jaxtrain.hf.layer_types import Windows, models_of_layers, settings_of

LONGEST = 32768


@dataclasses.dataclass(frozen=True)
class NopeLayers(TableEntry):
    """The layers without rotary positions, by model.pattern: those whose number in no_rope_layers
    is 0, or every no_rope_layer_interval-th one where there is no list."""

    def read(self, fields: Fields, settings: Settings) -> Settings:
        layers = settings["layers"]
        if settings["window"]:
            raise fields.refuse("sliding_window", "is not supported beside no_rope_layers")
        rotates = fields.value("no_rope_layers", None)
        if rotates is None:
            interval = fields.integer("no_rope_layer_interval", 4)
            rotates = [int(number % interval != 0) for number in range(1, layers + 1)]
        fields.pass_over("no_rope_layer_interval")
        if not isinstance(rotates, list) or not all(n in (0, 1) for n in rotates):
            raise fields.refuse("no_rope_layers", "is no list of 0 and 1")
        if len(rotates) < layers:
            raise fields.refuse(
                "no_rope_layers", f"has less than the {layers} of num_hidden_layers"
            )
        return settings_of(["full" if rotates[n] else "nope" for n in range(layers)], 0)

    def write(self, model: ResolvedModel, length: int) -> Settings:
        layers = models_of_layers(model)
        return {"no_rope_layers": [int(layer.positions == "rotary") for layer in layers]}

    sources = {"pattern": "no_rope_layers"}


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3 3B",
    table=(
        *decoder(vocab=128256, width=2048, layers=36, heads=16, epsilon=1e-6, tied=True),
        Integer("num_key_value_heads", "kv_heads", 4, null=0),
        Integer("head_dim", "head_dim", None, null=0),
        Integer("intermediate_size", "mlp_width", 11008),
        Biases("attention_bias", ("qkv", "out"), False),
        Biases("mlp_bias", ("mlp",), False),
        RotaryPositions(LONGEST, base=2e6),
        Windows(switched=True, typed=True),
        NopeLayers(),
    ),
    rules=decoder_rules,
)
