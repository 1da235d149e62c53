"""The sizes of a model: the parameters of its layers, and the operations of a sequence."""

import dataclasses
import functools

from jaxtrain.config import ResolvedModel
from jaxtrain.planner.layer.layer import Layer, ParameterShape


@dataclasses.dataclass(frozen=True, eq=False)
class Model(ResolvedModel):
    """A model, whose settings are those of a config, and the tokens of its sequences.
    Layers are traced when they are asked for, and jax is imported then."""

    sequence: int = 0

    @property
    def score_dim(self) -> int:
        """Dimension of a head's queries and keys."""
        return self.head_dim + self.rope_head_dim

    def layer(self, dense: bool = False) -> Layer:
        """One layer. dense: of those before the layers that have experts"""
        return self._layers[dense]

    @functools.cached_property
    def _layers(self) -> tuple[Layer, Layer]:
        """A layer, and one of those before the layers that have experts."""
        from jaxtrain.planner.layer.layer_trace import layer_of

        layer = layer_of(self.of_one_layer, dense=False)
        has_others = self.experts > 0 and self.dense_layers > 0
        return layer, layer_of(self.of_one_layer, dense=True) if has_others else layer

    @functools.cached_property
    def of_one_layer(self) -> ResolvedModel:
        """The config of a model with one such layer, by which models of any depth share it."""
        settings = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(ResolvedModel)
        }
        return ResolvedModel(**settings | {"layers": 1})

    @functools.cached_property
    def ends(self) -> tuple[ParameterShape, ...]:
        """Parameters before and after the layers, but for the vocabulary's tables and the layers of
        multi-token prediction modules."""
        from jaxtrain.planner.layer.layer_trace import ends_of

        return ends_of(self)

    def parameters(self) -> int:
        """Parameters of the model without its multi-token prediction modules."""
        from jaxtrain.models.transformer import build

        return build(dataclasses.replace(self, mtp_depth=0)).parameter_count

    def attention_flops(self) -> float:
        """Forward operations of attention in one layer and sequence, where each token attends to
        all tokens; causal attention needs half of them."""
        return 2.0 * self.sequence**2 * self.layer().core

    def sequence_flops(self, causal: bool = True) -> float:
        """Forward operations of a sequence: products with matrices, attention and the head. causal:
        attention's half counts."""
        layers = self.layers + self.mtp_depth
        per_token = layers * self.layer().per_token
        per_token += self.dense_layers * self.layer(dense=True).per_token
        per_token += self.vocab_size * self.width * (1 + self.mtp_depth)
        per_token += self.mtp_depth * 2 * self.width**2
        attention = (layers + self.dense_layers) * self.attention_flops() * (0.5 if causal else 1.0)
        return 2.0 * self.sequence * per_token + attention

    def training_flops_per_token(self, causal: bool = True) -> float:
        """Operations of forward and backward for one token, recomputation not counted: the backward
        takes twice the forward (PaLM, arXiv:2204.02311, appendix B, which counts attention in
        full). causal: attention's half counts, which makes rates lower."""
        return 3.0 * self.sequence_flops(causal) / self.sequence


@functools.lru_cache(maxsize=256)
def model_of(config: ResolvedModel, sequence: int) -> Model:
    """The model with sequences of this length; the same object for the same settings."""
    return Model(**vars(config), sequence=sequence)
