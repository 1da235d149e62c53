"""The sizes of a model: the parameters of its layers, and the operations of a token."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtrain.config import ModelConfig

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
    def per_token(self) -> int:
        """Parameters that a token is multiplied with."""
        return sum(map(self.used, self.products))

    @functools.cached_property
    def hidden(self) -> int:
        """Columns of the hidden layer that a token goes through: an MLP's, or those of all its
        experts together."""
        last = [p for p in self.products if p.of_mlp and p.split == INPUTS]
        return sum(p.inputs * (self.choices if p.experts else 1) for p in last)

    def used(self, product: Product) -> int:
        """Parameters of a product that a token is multiplied with."""
        return product.inputs * product.outputs * (self.choices if product.experts else 1)

    def made_again(self, makes_again: Callable[[str], bool]) -> int:
        """Parameters of a token's products that are made again where those of such names are."""
        return sum(
            self.used(product)
            for product in self.products
            if product.read and makes_again(product.makes)
        )

    def on_device(self, model: int, expert: int) -> float:
        """Parameters on a device."""
        sizes = {MODEL: model, EXPERT: expert}
        return sum(a.size / math.prod(sizes.get(axis, 1) for axis in a.axes) for a in self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Model(ModelConfig):
    """A resolved model, whose settings are those of a config, and the tokens of its sequences.
    Layers are traced when they are asked for."""

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
        layer = _traces().layer_of(self.of_one_layer, dense=False)
        has_others = self.experts > 0 and self.dense_layers > 0
        return layer, _traces().layer_of(self.of_one_layer, True) if has_others else layer

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


def _traces() -> Any:
    """The module that reads layers: it imports jax, which flags that cannot work need not."""
    return importlib.import_module("jaxtrain.planner.layer.layer_trace")


@functools.lru_cache(maxsize=256)
def model_of(config: ModelConfig, sequence: int) -> Model:
    """The model of a resolved config, with sequences of this length; the same object for the
    same config."""
    return Model(**vars(config), sequence=sequence)
