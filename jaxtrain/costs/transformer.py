"""The sizes of a transformer: the parameters of its layers, and the operations of a token."""

import dataclasses
import functools
from typing import NamedTuple

from jaxtrain.config.sizes import padded_vocabulary

# matrices whose outputs `model` splits
COLUMNS = frozenset({"query_key_value", "query", "key_value", "mlp_in"})
# matrices that `model` does not split; of all others it splits the inputs
UNSPLIT = frozenset({"latent", "router"})


class LayerSizes(NamedTuple):
    """Sizes of one layer.

    products:  (name, inputs, outputs) of each matrix that a token is multiplied with; its experts
               count as one matrix, as wide as all of them
    per_token: parameters that a token is multiplied with
    all:       parameters with all experts, norms and biases
    unsplit:   parameters that `model` does not split: latents, the router, norms, biases of
               matrices whose inputs it splits
    """

    products: tuple[tuple[str, int, int], ...]
    per_token: int
    all: int
    unsplit: int


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a model and its sequences; names as in the `model` group of a config, resolved.

    gated:        an MLP has three matrices, and not two
    positions:    rows of the table of learned positions, 0 without one
    norm_vectors: vectors of a norm, 2 with a bias
    value_dim, query_rank, kv_rank, rope_dim: sizes of latent attention (mla), else 0
    experts, experts_per_token, shared_experts, expert_width: of each of `layers`
    dense_layers: layers before those, with an MLP
    capacity_factor, expert_room: capacity of the experts (layout.py)
    predictions:  multi-token prediction modules, each with a layer of its own
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    sequence: int
    gated: bool = True
    tied: bool = False
    biases: bool = False
    positions: int = 0
    norm_vectors: int = 1
    mla: bool = False
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_width: int = 0
    capacity_factor: float = 0.0
    expert_room: float = 0.0
    dense_layers: int = 0
    predictions: int = 0

    @property
    def score_dim(self) -> int:
        """Dimension of a head's queries and keys."""
        return self.head_dim + self.rope_dim

    @property
    def output_dim(self) -> int:
        """Dimension of a head's values."""
        return self.value_dim or self.score_dim

    def hidden(self, dense: bool = False) -> int:
        """Columns of the hidden layer that a token goes through: an MLP's, or all its experts'
        together. dense: as in `layer`."""
        if dense or not self.experts:
            return self.mlp_width
        return (self.experts_per_token + self.shared_experts) * self.expert_width

    def layer(self, dense: bool = False) -> LayerSizes:
        """Sizes of one layer. dense: of the layers before those that have experts."""
        return self._layers[dense]

    @functools.cached_property
    def _layers(self) -> tuple[LayerSizes, LayerSizes]:
        """Sizes by `dense`; a search asks for them thousands of times."""
        return self._layer_sizes(False), self._layer_sizes(True)

    def _layer_sizes(self, dense: bool) -> LayerSizes:
        width, heads, hidden = self.width, self.heads, self.hidden(dense)
        experts = 0 if dense else self.experts
        if self.mla:
            products = [
                ("latent", width, self.query_rank + self.kv_rank + self.rope_dim),
                ("query", self.query_rank or width, heads * self.score_dim),
                ("key_value", self.kv_rank, heads * (self.head_dim + self.value_dim)),
            ]
        else:
            products = [("query_key_value", width, (heads + 2 * self.kv_heads) * self.head_dim)]
        products += [
            ("attention_output", heads * self.output_dim, width),
            *[("router", width, experts)] * bool(experts),
            ("mlp_in", width, hidden * (2 if self.gated else 1)),
            ("mlp_out", hidden, width),
        ]
        per_token = sum(inputs * outputs for _, inputs, outputs in products)
        norms = self.norm_vectors * (2 * width + self.query_rank + self.kv_rank)
        biases = {name: outputs * self.biases for name, _, outputs in products if name != "router"}
        split_biases = sum(biases[name] for name in biases if name in COLUMNS)
        # the router counts the tokens of each expert
        vectors = norms + sum(biases.values()) - split_biases + experts
        matrices = sum(inputs * outputs for name, inputs, outputs in products if name in UNSPLIT)
        total = per_token + split_biases + vectors
        if experts:
            others = experts - self.experts_per_token
            total += self.expert_parameters() // experts * others
        return LayerSizes(tuple(products), per_token, total, vectors + matrices)

    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self.width * self.expert_width * (3 if self.gated else 2)

    def embedding_parameters(self) -> int:
        """Tables at both ends, and the last norm."""
        tables = self.vocab_size * (1 if self.tied else 2) + self.positions
        return tables * self.width + self.norm_vectors * self.width

    # ---------------------------------------------------------------------------------- on a device

    def device_layer_parameters(self, model: int, expert: int, dense: bool = False) -> float:
        """Parameters of one layer on a device: `expert` splits the experts, `model` all but
        `unsplit`."""
        sizes, experts = self.layer(dense), 0 if dense else self.expert_parameters()
        return sizes.unsplit + (sizes.all - sizes.unsplit - experts * (1 - 1 / expert)) / model

    def device_table_parameters(self, model: int, stages: int = 1) -> float:
        """Parameters of a table of the vocabulary on a device, split over `model` and stages."""
        shards = model * stages
        return padded_vocabulary(self.vocab_size, shards) * self.width / shards

    def device_end_parameters(self, model: int, stages: int = 1) -> float:
        """Parameters of the tables at both ends and the last norm on a device."""
        tables = (1 if self.tied else 2) * self.device_table_parameters(model, stages)
        return tables + (self.positions + self.norm_vectors) * self.width

    def joining_parameters(self) -> int:
        """Parameters of a multi-token prediction module without its layer: the matrix that joins
        two streams and three norms (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
        return 2 * self.width**2 + 3 * self.norm_vectors * self.width

    def parameters(self) -> int:
        """Parameters of the model without its multi-token prediction modules."""
        return (
            self.layers * self.layer().all
            + self.dense_layers * self.layer(dense=True).all
            + self.embedding_parameters()
        )

    def attention_flops(self) -> float:
        """Forward operations of attention in one layer and sequence, where each token attends to
        all tokens; causal attention needs half of them."""
        return 2.0 * self.sequence**2 * self.heads * (self.score_dim + self.output_dim)

    def sequence_flops(self, causal: bool = True) -> float:
        """Forward operations of a sequence: products with matrices, attention and the head. causal:
        attention's half counts."""
        layers = self.layers + self.predictions
        per_token = layers * self.layer().per_token
        per_token += self.dense_layers * self.layer(dense=True).per_token
        per_token += self.vocab_size * self.width * (1 + self.predictions)
        per_token += self.predictions * 2 * self.width**2
        attention = (layers + self.dense_layers) * self.attention_flops() * (0.5 if causal else 1.0)
        return 2.0 * self.sequence * per_token + attention

    def training_flops_per_token(self, causal: bool = True) -> float:
        """Operations of forward and backward for one token, recomputation not counted: the backward
        takes twice the forward (PaLM, arXiv:2204.02311, appendix B, which counts attention in
        full). causal: attention's half counts, which makes rates lower."""
        return 3.0 * self.sequence_flops(causal) / self.sequence


def gpt(
    width: int,
    heads: int,
    layers: int,
    sequence: int = 2048,
    vocabulary: int = 51200,
    tied: bool = True,
) -> Transformer:
    """Megatron's GPT: two matrices in an MLP of four widths, learned positions, biases."""
    return Transformer(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp_width=4 * width,
        vocab_size=vocabulary,
        sequence=sequence,
        gated=False,
        tied=tied,
        biases=True,
        positions=sequence,
        norm_vectors=2,
    )
