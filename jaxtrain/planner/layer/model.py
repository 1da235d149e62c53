"""The sizes of a model: the parameters of its layers, and the operations of a sequence."""

import collections
import dataclasses
import functools
from collections.abc import Callable

from jaxtrain.config import ResolvedModel
from jaxtrain.config.groups import layer_kinds
from jaxtrain.planner.layer.layer import Layer, ParameterShape


@dataclasses.dataclass(frozen=True, eq=False)
class Model(ResolvedModel):
    """A model, whose settings are those of a config, and the tokens of its sequences.
    Layers are traced when they are asked for, and jax is imported then.

    Where layers are of several kinds (config/groups/layer_kinds.py), what is said of one layer is
    asked of the model of its kind (`of_kind`).
    """

    sequence: int = 0

    @property
    def score_dim(self) -> int:
        """Dimension of a head's queries and keys."""
        return self.head_dim + self.rope_head_dim

    # --- kinds of layers -------------------------------------------------------------------------

    @functools.cached_property
    def stack(self) -> tuple[str, ...]:
        """The kind of each of `layers`. Prediction modules have a layer of the last one's."""
        return layer_kinds.stacked_kinds(self)

    @functools.cached_property
    def forms(self) -> collections.Counter[str]:
        """Form → the number of its layers among `layers`. A form's layers have the parameters of
        the kind of its name; "" stands for all kinds."""
        form_of = layer_kinds.forms_of_kinds(self.resolved)
        return collections.Counter(form_of[kind] for kind in self.stack)

    @functools.cached_property
    def counts(self) -> tuple[collections.Counter[str], collections.Counter[str]]:
        """Kind → the number of its layers: among `layers`, and among the dense ones before them, or
        where there are none once more among `layers`."""
        first = layer_kinds.kinds_of_layers(self)[: self.dense_layers]
        return collections.Counter(self.stack), collections.Counter(first or self.stack)

    def of_kind(self, kind: str) -> "Model":
        """The model all of whose layers are of this kind; of the form "", of the first kind."""
        if not self.pattern:
            return self
        config = layer_kinds.of_kind(self.resolved, kind or self.stack[0])
        return model_of(config, self.sequence)

    @functools.cached_property
    def layer_costs(self) -> tuple[float, ...]:
        """The operations of each of `layers` over those of the mean one, by which stages and their
        units share work on any hardware; () where layers are of one kind."""
        if len(self.counts[0]) == 1:
            return ()
        mean = self.mean(Model.layer_flops)
        return tuple(self.of_kind(kind).layer_flops() / mean for kind in self.stack)

    def mean(self, number: Callable[["Model"], float], dense: bool = False) -> float:
        """The mean over the layers of a number that models of one kind have. dense: over the layers
        before those with experts"""
        counts = self.counts[dense]
        return sum(n * number(self.of_kind(kind)) for kind, n in counts.items()) / counts.total()

    @functools.cached_property
    def resolved(self) -> ResolvedModel:
        """The config's settings."""
        fields = dataclasses.fields(ResolvedModel)
        return ResolvedModel(**{field.name: getattr(self, field.name) for field in fields})

    # --- of one kind -----------------------------------------------------------------------------

    def layer(self, dense: bool = False) -> Layer:
        """One layer of a model of one kind. dense: of those before the layers that have experts"""
        return self._layers[dense]

    @functools.cached_property
    def _layers(self) -> tuple[Layer, Layer]:
        """A layer, and one of those before the layers that have experts."""
        from jaxtrain.planner.layer.layer_trace import TOKENS, layer_of

        assert not self.pattern, "layers of several kinds: ask `of_kind`"
        tokens = self.sequence if self.block or self.mixer else TOKENS
        layer = layer_of(self.of_one_layer, False, tokens)
        has_others = self.experts > 0 and self.dense_layers > 0
        return layer, layer_of(self.of_one_layer, True, tokens) if has_others else layer

    @functools.cached_property
    def of_one_layer(self) -> ResolvedModel:
        """The config of a model with one such layer, by which models of any depth share it."""
        return dataclasses.replace(self.resolved, layers=1)

    def attention_flops(self) -> float:
        """Forward operations of attention in one layer and sequence, where each token attends to
        all tokens; causal attention needs half of them.

        With a window of w of n tokens causal attention needs w²/2 pairs of tokens for the first w,
        and w for each of the others; these are twice as many: w (2n − w).
        """
        window = min(self.window or self.sequence, self.sequence)
        return 2.0 * window * (2 * self.sequence - window) * self.layer().core

    def layer_flops(self, causal: bool = True, dense: bool = False) -> float:
        """Forward operations of one layer and sequence. causal: attention's half counts"""
        products = 2.0 * self.sequence * self.layer(dense).per_token
        return products + self.attention_flops() * (0.5 if causal else 1.0)

    # --- of the model ----------------------------------------------------------------------------

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

    def sequence_flops(self, causal: bool = True) -> float:
        """Forward operations of a sequence: products with matrices, attention and the head. causal:
        attention's half counts."""
        each = lambda dense: self.mean(lambda kind: kind.layer_flops(causal, dense), dense)
        layers = self.layers * each(False) + self.dense_layers * each(True)
        module = self.of_kind(self.stack[-1]).layer_flops(causal)
        module += 2.0 * self.sequence * 2 * self.width**2
        head = 2.0 * self.sequence * self.vocab_size * self.width
        return layers + head + self.mtp_depth * (module + head)

    def training_flops_per_token(self, causal: bool = True) -> float:
        """Operations of forward and backward for one token, recomputation not counted: the backward
        takes twice the forward (PaLM, arXiv:2204.02311, appendix B, which counts attention in
        full). causal: attention's half counts, which makes rates lower."""
        return 3.0 * self.sequence_flops(causal) / self.sequence


@functools.lru_cache(maxsize=256)
def model_of(config: ResolvedModel, sequence: int) -> Model:
    """The model with sequences of this length; the same object for the same settings."""
    return Model(**vars(config), sequence=sequence)
