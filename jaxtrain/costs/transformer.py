"""A transformer by its sizes: what its layers have of parameters, and what a token costs in each of them."""

import dataclasses
import functools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class _LayerCounts:
    """products: as Transformer has them; token, all, whole: parameters that a token is multiplied with, all, those that `model` does not
    split."""

    products: tuple[tuple[str, int, int], ...]
    token: int
    all: int
    whole: int


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a model and its sequences; names as in the `model` group of a config, resolved.

    gated: three matrices in an MLP, and not two; positions: rows of the table of learned positions, 0 without one; norm_vectors: of a
    norm, 2 with a bias; value_dim, query_rank, kv_rank, rope_dim: of latent attention (mla), else 0
    experts, experts_per_token, shared_experts, expert_width: of each of `layers`; dense_layers: before those, with an MLP
    capacity_factor, expert_room: for how many rows experts have room (layout.py)
    predictions: modules that predict further tokens, each with a layer of its own
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
        """Columns of the hidden layer that a token goes through: of an MLP, or of all its experts together. dense: as in `products`."""
        if dense or not self.experts:
            return self.mlp_width
        return (self.experts_per_token + self.shared_experts) * self.expert_width

    def products(self, dense: bool = False) -> tuple[tuple[str, int, int], ...]:
        """(name, inputs, outputs) of each matrix that a token is multiplied with in a layer; experts count as one, as wide as a token's.

        dense: a layer of those before the others. `model` splits what is named in COLUMNS by its outputs, and the others by their inputs.
        """
        return self._counts[dense].products

    @functools.cached_property
    def _counts(self) -> "dict[bool, _LayerCounts]":
        """What a search asks for thousands of times, by `dense`."""
        counts = {}
        for dense in (False, True):
            products = self._products(dense)
            token = sum(inputs * outputs for _, inputs, outputs in products)
            chosen = 0 if dense else self.experts_per_token * self.width * self.expert_width * (3 if self.gated else 2)
            vectors = self._vectors(dense, products)
            whole = vectors + sum(inputs * outputs for name, inputs, outputs in products if name in WHOLE)
            split_biases = sum(outputs for name, _, outputs in products if name in COLUMNS) if self.biases else 0
            experts = 0 if dense else self.expert_parameters() - chosen
            counts[dense] = _LayerCounts(products, token, token + experts + split_biases + vectors, whole)
        return counts

    def _products(self, dense: bool) -> tuple[tuple[str, int, int], ...]:
        width, heads = self.width, self.heads
        if self.mla:
            attention = [
                ("latent", width, self.query_rank + self.kv_rank + self.rope_dim),
                ("query", self.query_rank or width, heads * self.score_dim),
                ("key_value", self.kv_rank, heads * (self.head_dim + self.value_dim)),
            ]
        else:
            attention = [("query_key_value", width, (heads + 2 * self.kv_heads) * self.head_dim)]
        attention.append(("attention_output", heads * self.output_dim, width))
        hidden = self.hidden(dense)
        if self.experts and not dense:
            attention.append(("router", width, self.experts))
        return (*attention, ("mlp_in", width, hidden * (2 if self.gated else 1)), ("mlp_out", hidden, width))

    def token_parameters(self, dense: bool = False) -> int:
        """Numbers of one layer's matrices that a token is multiplied with."""
        return self._counts[dense].token

    def layer_parameters(self, dense: bool = False) -> int:
        """All parameters of one layer: all experts, norms, and biases where there are any."""
        return self._counts[dense].all

    def whole_parameters(self, dense: bool = False) -> int:
        """Parameters of one layer that `model` does not split: latents, the router, norms, biases of what is split by its inputs."""
        return self._counts[dense].whole

    def _vectors(self, dense: bool, products: Sequence[tuple[str, int, int]]) -> int:
        """Numbers of one layer's vectors that `model` does not split: norms, biases, and the router's count of rows by expert."""
        norms = self.norm_vectors * (2 * self.width + self.query_rank + self.kv_rank)
        biases = sum(outputs for name, _, outputs in products if name not in COLUMNS and name != "router")
        return norms + biases * self.biases + (0 if dense else self.experts)

    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self.width * self.expert_width * (3 if self.gated else 2)

    def embedding_parameters(self) -> int:
        """Tables at both ends, and the last norm."""
        tables = self.vocab_size * (1 if self.tied else 2) + self.positions
        return tables * self.width + self.norm_vectors * self.width

    # -------------------------------------------------------------------------------------------------------- on a device

    def device_layer_parameters(self, model: int, expert: int, dense: bool = False) -> float:
        """Parameters of one layer on a device: `expert` splits the experts, `model` all but `whole_parameters`."""
        whole, experts = self.whole_parameters(dense), 0 if dense else self.expert_parameters()
        return whole + (self.layer_parameters(dense) - whole - experts * (1 - 1 / expert)) / model

    def device_table_parameters(self, model: int, stages: int = 1) -> float:
        """Parameters of a table of the vocabulary on a device, split over `model` and so many stages."""
        return padded_vocabulary(self.vocab_size, model * stages) * self.width / (model * stages)

    def device_end_parameters(self, model: int, stages: int = 1) -> float:
        """Parameters of the tables at both ends and the last norm on a device."""
        tables = (1 if self.tied else 2) * self.device_table_parameters(model, stages)
        return tables + (self.positions + self.norm_vectors) * self.width

    def joining_parameters(self) -> int:
        """Parameters of a multi-token prediction module without its layer: the matrix that joins two streams and three norms
        (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
        return 2 * self.width**2 + 3 * self.norm_vectors * self.width

    def parameters(self) -> int:
        """Parameters of the model without its multi-token prediction modules."""
        return self.layers * self.layer_parameters() + self.dense_layers * self.layer_parameters(dense=True) + self.embedding_parameters()

    def attention_flops(self) -> float:
        """Forward operations of attention in one layer and sequence, each token with all tokens; causal attention needs half of them."""
        return 2.0 * self.sequence**2 * self.heads * (self.score_dim + self.output_dim)

    def sequence_flops(self, causal: bool = True) -> float:
        """Forward operations of a sequence: products with matrices, attention and the head. causal: attention's half counts."""
        tokens = 2.0 * (self.layers * self.token_parameters() + self.dense_layers * self.token_parameters(dense=True))
        head = 2.0 * self.vocab_size * self.width * (1 + self.predictions)
        extra = self.predictions * 2.0 * (self.token_parameters() + 2 * self.width**2)
        attention = (self.layers + self.dense_layers + self.predictions) * self.attention_flops() * (0.5 if causal else 1.0)
        return self.sequence * (tokens + head + extra) + attention

    def training_flops_per_token(self, causal: bool = True) -> float:
        """Operations of forward and backward for one token, recomputation not counted: the backward takes twice the forward (PaLM,
        arXiv:2204.02311, appendix B, which counts attention in full). causal: attention's half counts, which makes rates lower."""
        return 3.0 * self.sequence_flops(causal) / self.sequence


TILE = 128  # matrix units want the vocabulary in multiples of this


def padded_vocabulary(vocab_size: int, shards: int) -> int:
    """Rows of a table held in memory: divisible by the shards, and large vocabularies by whole tiles on each."""
    unit = shards if vocab_size < 32 * TILE else shards * TILE
    return -(-vocab_size // unit) * unit


COLUMNS = frozenset({"query_key_value", "query", "key_value", "mlp_in"})  # matrices whose outputs `model` splits
WHOLE = frozenset({"latent", "router"})  # those that it does not split


def gpt(width: int, heads: int, layers: int, sequence: int = 2048, vocabulary: int = 51200, tied: bool = True) -> Transformer:
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
