"""The sizes of a model: the parameters of its layers, and the operations of a token."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtrain.config import ModelConfig
from jaxtrain.config.sizes import padded_vocabulary

# what `model` splits of a product's matrices
OUTPUTS, INPUTS, BATCH = "outputs", "inputs", "batch"
EXPERT, MODEL = "expert", "model"  # mesh axes


class Array(NamedTuple):
    """One parameter: its name, its shape, and for each dimension the mesh axis that splits it, or
    "".

    cast:    used in the compute type
    product: a matrix whose products may be of FP8
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    cast: bool
    product: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def on_device(self, sizes: dict[str, int]) -> float:
        """Its numbers on a device. sizes: of the mesh axes that split parameters"""
        return self.size / math.prod(sizes.get(axis, 1) for axis in self.axes)


class Product(NamedTuple):
    """The product of one activation with one or several matrices.

    names:   of the matrices
    inputs, outputs: columns of the activation of a token, and of the results together
    split:   what `model` splits: OUTPUTS, of all tokens; INPUTS, whose results are summed; BATCH,
        a dimension that activation and result have too, such as heads; or "", nothing: each device
        multiplies its own tokens
    value:   the number of the activation: products of one share its all-gather
    call:    the number of the call that makes it: products of one share the sum of the gradients of
        their activation; 0 in a module with experts
    experts: experts that have such matrices, of which a token uses some; 0: all tokens use them
    makes:   the name of its result (config/saved_values.py); "" for a result without one
    read:    the backward reads the result
    fp8:     it may be of FP8
    gradient: the number of its result's gradient: products of one share its all-gather
    """

    names: tuple[str, ...]
    inputs: int
    outputs: int
    split: str
    value: int = 0
    call: int = 0
    experts: int = 0
    makes: str = ""
    read: bool = True
    fp8: bool = True
    gradient: int = 0

    @property
    def size(self) -> int:
        """Parameters that a token is multiplied with, of one expert."""
        return self.inputs * self.outputs

    @property
    def of_mlp(self) -> bool:
        """True in an MLP, or in the experts in its place."""
        return self.names[0].startswith("mlp.")


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """What one layer has and computes (layer_trace.py).

    arrays:   all parameters, with all experts, norms, biases and counts
    products: in the layer's order
    scores:   scores of attention for each pair of tokens: heads
    core:     multiplications in attention for each pair of tokens
    norms_and_sums: norms of the residual stream, and sums with it
    inner:    numbers of a token that elementwise work has between products, in and out
    choices:  experts that a token uses
    """

    arrays: tuple[Array, ...]
    products: tuple[Product, ...]
    scores: float
    core: float
    norms_and_sums: int
    inner: float
    choices: int

    @functools.cached_property
    def size(self) -> int:
        """The number of parameters."""
        return sum(array.size for array in self.arrays)

    @functools.cached_property
    def experts(self) -> int:
        """The number of parameters of all experts."""
        return sum(array.size for array in self.arrays if EXPERT in array.axes)

    @functools.cached_property
    def per_token(self) -> int:
        """Parameters that a token is multiplied with."""
        return sum(map(self.used, self.products))

    def used(self, product: Product) -> int:
        """Parameters of a product that a token is multiplied with."""
        return product.size * (self.choices if product.experts else 1)

    def made_again(self, makes_again: Callable[[str], bool]) -> int:
        """Parameters of a token's products that are made again where those of such names are."""
        return sum(
            self.used(product)
            for product in self.products
            if product.read and makes_again(product.makes)
        )

    def on_device(self, model: int, expert: int) -> float:
        """Parameters on a device."""
        return sum(a.on_device({MODEL: model, EXPERT: expert}) for a in self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Model(ModelConfig):
    """A resolved model, whose settings are those of a config, and the tokens of its sequences.
    Layers are traced when they are asked for."""

    sequence: int = 0

    @property
    def score_dim(self) -> int:
        """Dimension of a head's queries and keys."""
        return self.head_dim + self.rope_head_dim

    @property
    def output_dim(self) -> int:
        """Dimension of a head's values."""
        return self.value_head_dim or self.score_dim

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm, 2 with a bias."""
        return 1 + ("norm" in self.biases)

    @property
    def tables(self) -> int:
        """Tables of the vocabulary."""
        return 1 if self.tied_embeddings else 2

    @property
    def gated(self) -> bool:
        """An MLP has three matrices, and not two."""
        return self.activation == "swiglu"

    @property
    def mla(self) -> bool:
        """Attention goes through latents."""
        return self.attention == "mla"

    @property
    def layer_norm(self) -> bool:
        """Norms subtract the mean."""
        return self.norm == "layernorm"

    def hidden(self, dense: bool = False) -> int:
        """Columns of the hidden layer that a token goes through: an MLP's, or all its experts'
        together. dense: as in `layer`"""
        if dense or not self.experts:
            return self.mlp_width
        return (self.experts_per_token + self.shared_experts) * self.expert_width

    def layer(self, dense: bool = False) -> Layer:
        """One layer. dense: of those before the layers that have experts"""
        return self._dense_layer if dense else self._layer

    @functools.cached_property
    def _layer(self) -> Layer:
        return _traces().layer_of(self.of_one_layer, dense=False)

    @functools.cached_property
    def _dense_layer(self) -> Layer:
        has_experts = self.experts > 0
        return _traces().layer_of(self.of_one_layer, dense=True) if has_experts else self._layer

    @functools.cached_property
    def of_one_layer(self) -> ModelConfig:
        """The config of a model with one such layer, by which models of any depth share it."""
        settings = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)
        }
        return ModelConfig(**settings | {"layers": 1})

    @functools.cached_property
    def ends(self) -> tuple[Array, ...]:
        """Parameters before and after the layers, but for the vocabulary's tables and the layers of
        multi-token prediction modules."""
        return _traces().ends_of(self)

    @functools.cached_property
    def end_parameters(self) -> int:
        """The number of parameters in `ends`."""
        return sum(array.size for array in self.ends)

    def device_table_parameters(self, model: int, stages: int = 1) -> float:
        """Parameters of a table of the vocabulary on a device, split over `model` and stages."""
        shards = model * stages
        return padded_vocabulary(self.vocab_size, shards) * self.width / shards

    def parameters(self) -> int:
        """Parameters of the model without its multi-token prediction modules."""
        return _traces().parameters_of(self)

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


def _traces() -> Any:
    """The module that reads layers: it imports jax, which flags that cannot work need not."""
    return importlib.import_module("jaxtrain.planner.layer.layer_trace")


@functools.lru_cache(maxsize=256)
def model_of(config: ModelConfig, sequence: int) -> Model:
    """The model of a resolved config, with sequences of this length; the same object for the
    same config."""
    return Model(**vars(config), sequence=sequence)


def llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp_width: int,
    vocabulary: int,
    sequence: int,
) -> Model:
    """A model of Llama's form: three matrices in an MLP, groups of heads, rotary positions."""
    return Model(
        layers,
        width,
        heads,
        kv_heads,
        head_dim,
        mlp_width=mlp_width,
        vocab_size=vocabulary,
        sequence=sequence,
    )


def gpt(
    width: int,
    heads: int,
    layers: int,
    sequence: int = 2048,
    vocabulary: int = 51200,
    tied: bool = True,
) -> Model:
    """A model of GPT-2's form, as Megatron has it: two matrices in an MLP of four widths, learned
    positions, biases."""
    like = llama(layers, width, heads, heads, width // heads, 4 * width, vocabulary, sequence)
    return dataclasses.replace(
        like,
        activation="gelu",
        tied_embeddings=tied,
        biases=("qkv", "out", "mlp", "norm"),
        positions="learned",
        max_positions=sequence,
        norm="layernorm",
    )
