"""What one layer of a model has and computes: its parameters, and the operations of a token."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

# what `model` splits of a product's matrices
OUTPUTS, INPUTS, BATCH = "outputs", "inputs", "batch"
EXPERT, MODEL = "expert", "model"  # mesh axes


class ParameterShape(NamedTuple):
    """One parameter: its name, its shape, and for each dimension the mesh axis that splits it, or
    "".

    cast:    used in the compute type
    product: a matrix whose products may be of FP8
    matrices: (number, rows, columns) of those that Muon orthogonalizes, each on its own
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    cast: bool
    product: bool
    matrices: tuple[tuple[int, int, int], ...] = ()

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
    part:    of the tokens that it multiplies; above 1 where one is multiplied several times
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
    part: float = 1

    @property
    def of_mlp(self) -> bool:
        """True in an MLP, or in the experts in its place."""
        return self.names[0].startswith("mlp.")


def newton_schulz(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """The products [m, k] · [k, n] of one iteration that orthogonalizes a matrix with no more rows
    than columns (training/update/muon.py), as (m, n, k): X Xᵀ, its square, and their sum with X."""
    return (rows, rows, columns), (rows, rows, rows), (rows, columns, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """What one layer has and computes (layer_trace.py).

    arrays:   all parameters, with all experts, norms, biases and counts
    products: in the layer's order
    scores:   scores of attention for each pair of tokens: heads
    core:     multiplications in attention for each pair of tokens
    mixing:   multiplications of a token in products of tokens with tokens, outside of attention
    norms_and_sums: norms of the residual stream, and sums with it
    inner:    numbers of a token that elementwise work has between products, in and out
    choices:  experts that a token uses
    """

    arrays: tuple[ParameterShape, ...]
    products: tuple[Product, ...]
    scores: float
    core: float
    norms_and_sums: int
    inner: float
    choices: int
    mixing: float = 0

    @functools.cached_property
    def size(self) -> int:
        """The number of parameters."""
        return sum(array.size for array in self.arrays)

    @functools.cached_property
    def per_token(self) -> float:
        """Multiplications of a token: the parameters that it is multiplied with, and `mixing`."""
        return sum(map(self.used, self.products)) + self.mixing

    @functools.cached_property
    def hidden(self) -> int:
        """Columns of the hidden layer that a token goes through: an MLP's, or those of all its
        experts together; without an MLP, of the widest value that products read or make."""
        last = [p for p in self.products if p.of_mlp and p.split == INPUTS]
        if not last:
            return max((max(p.inputs, p.outputs) for p in self.products), default=0)
        return sum(p.inputs * (self.choices if p.experts else 1) for p in last)

    def used(self, product: Product) -> float:
        """Parameters of a product that a token is multiplied with."""
        times = product.part * (self.choices if product.experts else 1)
        return product.inputs * product.outputs * times

    def made_again(self, makes_again: Callable[[str], bool]) -> float:
        """Parameters of a token's products that are made again where those of such names are."""
        return sum(
            self.used(product)
            for product in self.products
            if product.read and makes_again(product.makes)
        )

    @functools.lru_cache(2**10)  # noqa: B019 (a command has two layers)
    def on_device(self, model: int, expert: int) -> float:
        """Parameters on a device."""
        sizes = {MODEL: model, EXPERT: expert}
        return sum(a.size / math.prod(sizes.get(axis, 1) for axis in a.axes) for a in self.arrays)
