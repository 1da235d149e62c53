"""The sizes of a transformer: the parameters of its layers, and the operations of a token."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxtrain.config import ModelConfig
from jaxtrain.config.saved_values import ATTENTION_OUT, LATENT, MLP_IN, QKV, ROUTER
from jaxtrain.config.sizes import padded_vocabulary

# matrices whose outputs `model` splits
COLUMNS = frozenset({"query_key_value", "query", "key_value", "mlp_in"})
# matrix → its part in `model.biases`; "": it never has a bias
BIASES = {
    "query_key_value": "qkv",
    "latent": "qkv",
    "query": "",
    "key_value": "",
    "attention_output": "out",
    "router": "router",
    "mlp_in": "mlp",
    "mlp_out": "mlp",
}
# matrices that `model` does not split; of all others it splits the inputs
UNSPLIT = frozenset({"latent", "router"})


class Array(NamedTuple):
    """One parameter: its shape, and for each dimension the mesh axis that splits it, or "".
    exact: a matrix that is used in float32, whatever the compute type"""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    exact: bool = False

    @property
    def cast(self) -> bool:
        """True for a parameter that is used in the compute type."""
        return len(self.shape) > 1 and not self.exact

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class LayerSizes(NamedTuple):
    """Sizes of one layer.

    products:  (name, inputs, outputs) of each matrix that a token is multiplied with; its experts
               count as one matrix, as wide as all of them
    per_token: parameters that a token is multiplied with
    arrays:    all parameters, with all experts, norms, biases and counts
    all:       their number
    unsplit:   parameters that `model` does not split: latents, the router, norms, biases of
               matrices whose inputs it splits
    """

    products: tuple[tuple[str, int, int], ...]
    per_token: int
    arrays: tuple[Array, ...]
    all: int
    unsplit: int


# Products of a layer → the value (config/saved_values.py) that each makes; nothing reads the last
# product's in the backward.
MAKES = {
    "latent": LATENT,
    "query": QKV,
    "key_value": QKV,
    "query_key_value": QKV,
    "attention_output": ATTENTION_OUT,
    "router": ROUTER,
    "mlp_in": MLP_IN,
}


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a model and its sequences; names as in the `model` group of a config, resolved.

    gated:        an MLP has three matrices, and not two
    positions:    rows of the table of learned positions, 0 without one
    biases:       the parts that have biases, as in `model.biases`
    layer_norm:   norms subtract the mean
    qk_norm:      a layer has a norm of queries and one of keys, of one head's size
    value_dim, query_rank, kv_rank, rope_dim: sizes of latent attention (mla), else 0
    experts, experts_per_token, shared_experts, expert_width: of each of `layers`
    dense_layers: layers before those, with an MLP
    capacity_factor, expert_room: capacity of the experts (layout.py)
    router_groups, router_group_limit: groups of experts, and those that a token may use
    predictions:  multi-token prediction modules, each with a layer of its own
    config:       the config itself, resolved, from which the layer is traced (saved.py)
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
    biases: tuple[str, ...] = ()
    positions: int = 0
    layer_norm: bool = False
    qk_norm: bool = False
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
    router_groups: int = 1
    router_group_limit: int = 1
    dense_layers: int = 0
    predictions: int = 0
    config: ModelConfig = dataclasses.field(default=ModelConfig(), compare=False)

    @property
    def score_dim(self) -> int:
        """Dimension of a head's queries and keys."""
        return self.head_dim + self.rope_dim

    @property
    def output_dim(self) -> int:
        """Dimension of a head's values."""
        return self.value_dim or self.score_dim

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm, 2 with a bias."""
        return 1 + ("norm" in self.biases)

    @property
    def tables(self) -> int:
        """Tables of the vocabulary."""
        return 1 if self.tied else 2

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
        arrays = tuple(self._layer_arrays(products, dense))
        return LayerSizes(
            tuple(products),
            sum(inputs * outputs for _, inputs, outputs in products),
            arrays,
            sum(array.size for array in arrays),
            sum(array.size for array in arrays if not any(array.axes)),
        )

    def _layer_arrays(self, products: list[tuple[str, int, int]], dense: bool) -> Iterator[Array]:
        """The parameters of one layer with these products."""
        width, experts, expert = self.width, self.experts, self.expert_width
        widened = 2 if self.gated else 1  # matrices
        for name, inputs, outputs in products:
            rows, columns = ("", "model") if name in COLUMNS else ("model", "")
            if name in UNSPLIT:
                rows = columns = ""
            if experts and not dense and name == "mlp_in":
                yield from [Array((experts, width, expert), ("expert", rows, columns))] * widened
                inputs, outputs = width, widened * self.shared_experts * expert
            elif experts and not dense and name == "mlp_out":
                yield Array((experts, expert, width), ("expert", rows, columns))
                inputs, outputs = self.shared_experts * expert, width
            each = [outputs]
            if name == "query_key_value":
                each = [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
            elif name == "mlp_in":
                each = [outputs // widened] * widened
            for size in each if inputs and outputs else []:
                yield Array((inputs, size), (rows, columns), exact=name == "router")
                if BIASES[name] in self.biases:
                    yield Array((size,), (columns,))
        for size in (width, width, self.query_rank, self.kv_rank):
            yield from self._norm(size)
        if self.qk_norm:
            yield from self._norm(self.head_dim) * 2
        if experts and not dense:  # the router counts each expert's tokens, and what it drops
            counts = 2 if self.capacity_factor or self.expert_room else 1
            yield from [Array((experts,), ("",))] * counts

    def _norm(self, size: int) -> list[Array]:
        return [Array((size,), ("",))] * (self.norm_vectors if size else 0)

    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self.width * self.expert_width * (3 if self.gated else 2)

    @functools.cached_property
    def end_arrays(self) -> tuple[Array, ...]:
        """Parameters before and after the layers, but for the vocabulary's tables and the layers of
        multi-token prediction modules."""
        positions = [Array((self.positions, self.width), ("", ""))] * bool(self.positions)
        return (*positions, *self._norm(self.width), *self.joining_arrays() * self.predictions)

    @functools.cached_property
    def end_parameters(self) -> int:
        """The number of parameters in `end_arrays`."""
        return sum(array.size for array in self.end_arrays)

    def joining_arrays(self) -> list[Array]:
        """Parameters of a multi-token prediction module without its layer: the matrix that joins
        two streams and three norms (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
        return [Array((2 * self.width, self.width), ("", "")), *self._norm(self.width) * 3]

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

    def parameters(self) -> int:
        """Parameters of the model without its multi-token prediction modules."""
        alone = dataclasses.replace(self, predictions=0)
        return (
            self.layers * self.layer().all
            + self.dense_layers * self.layer(dense=True).all
            + self.tables * self.vocab_size * self.width
            + alone.end_parameters
        )

    def made_again(self, makes_again: Callable[[str], bool]) -> float:
        """Parameters of a token's products, in one layer, for whose results `makes_again` is
        true."""
        return sum(
            inputs * outputs
            for name, inputs, outputs in self.layer().products
            if name in MAKES and makes_again(MAKES[name])
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
        biases=("qkv", "out", "mlp", "norm"),
        positions=sequence,
        layer_norm=True,
    )
