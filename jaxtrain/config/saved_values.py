"""The values of a layer that `pipeline.save` can name, and the bytes that a layer saves. models/
names the values where they are made. Standard library only."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxtrain.config import ModelConfig, PipelineConfig, models_of_kinds
from jaxtrain.config.sizes import SELECTIVE, remat_of


class SavedValue(NamedTuple):
    """A value that a layer may save: what it is, and which models have it."""

    doc: str
    exists: Callable[[ModelConfig], object] = lambda model: True


class LayerBytes(NamedTuple):
    """Bytes on a device that one layer saves of one microbatch.

    residual_b, residual_w: from the forward, for B alone and for W
    weight_stash: from B, for W
    input:        the layer's input
    gathered:     of the stash, the largest array that B has gathered over `model`
    normed:       of `residual_w`, the largest array of the input's shape
    remade:       of the stash, the largest such array in 32 bits: what a norm has made again
    host_b, host_w: of `residual_b` and `residual_w`, what lies in the host's memory
    """

    residual_b: int
    residual_w: int
    weight_stash: int
    input: int
    gathered: int
    normed: int
    remade: int
    host_b: int = 0
    host_w: int = 0

    def on_host(self, remat: str, every: bool) -> tuple[int, int]:
        """Bytes in the host's memory with this mode of remat, and those of them that W reads.
        every: all that the forward leaves, which is the input with full, lies there"""
        if remat == "full":
            return self.input * every, 0
        if every:
            return self.residual_b + self.residual_w, self.residual_w
        return self.host_b + self.host_w, self.host_w


LAYER_INPUT = "layer_input"
ATTENTION_NORM = "attention_norm"
LATENT = "latent"
QKV = "qkv"
ATTENTION = "attention"
ATTENTION_OUT = "attention_out"
MLP_NORM = "mlp_norm"
ROUTER = "router"
ROUTED = "routed"
MLP_IN = "mlp_in"
MLP_HIDDEN = "mlp_hidden"
MLP_OUT = "mlp_out"
ON_HOST = ":host"  # after a name in `pipeline.save`: the value is saved in the host's memory
# what selective recomputation saves if no names are given: results of products with weights
PRODUCTS = (LATENT, QKV, ATTENTION, ATTENTION_OUT, ROUTER, MLP_IN, MLP_OUT)
# in the order in which a layer makes them
SAVED_VALUES: Mapping[str, SavedValue] = {
    LAYER_INPUT: SavedValue("the layer's input, which every selective recomputation saves"),
    ATTENTION_NORM: SavedValue(
        "the input of attention, normed", lambda model: model.norm_place != "after"
    ),
    LATENT: SavedValue(
        "what latent attention compresses its input to", lambda model: model.attention == "mla"
    ),
    QKV: SavedValue("queries, keys, values and gate, before norms and rotation"),
    ATTENTION: SavedValue("the result of attention's core, before its output matrix"),
    ATTENTION_OUT: SavedValue("the product with attention's output matrix"),
    MLP_NORM: SavedValue(
        "the input of the MLP or the experts, normed",
        lambda model: model.norm_place != "after" and not model.parallel_block,
    ),
    ROUTER: SavedValue("the router's logits", lambda model: model.experts),
    ROUTED: SavedValue("tokens as experts have received them", lambda model: model.experts),
    MLP_IN: SavedValue("the first products of the MLP or the experts: up, and gate"),
    MLP_HIDDEN: SavedValue("the hidden layer of the MLP or the experts, before the last product"),
    MLP_OUT: SavedValue("the product with the last matrix of the MLP or the experts"),
}


def names_of(save: Sequence[str]) -> tuple[str, ...]:
    """The names in `pipeline.save`, without the memory that they name."""
    return tuple(name.removesuffix(ON_HOST) for name in save)


def names_on_host(save: Sequence[str]) -> tuple[str, ...]:
    """The names of the values that `pipeline.save` has in the host's memory."""
    return names_of([name for name in save if name.endswith(ON_HOST)])


def saves_layer_inputs(mode: str, names: Sequence[str]) -> bool:
    """True if a pipeline with this mode of remat and these names in `pipeline.save` recomputes each
    layer from its own input, which F leaves, and not from the one of its unit."""
    return mode == "full" and names_of(names) == (LAYER_INPUT,)


def goes_with(mode: str, names: Sequence[str]) -> bool:
    """True if `pipeline.save` may have these names with this mode of remat: layers' inputs alone go
    with full recomputation, other names with selective."""
    if names_of(names) == (LAYER_INPUT,):
        return saves_layer_inputs(mode, names)
    return mode == SELECTIVE or not names


def saved_with(pipeline: PipelineConfig, remat: str) -> tuple[str, ...]:
    """`pipeline.save` where a plan's layout has this `remat`; () if they do not go together."""
    return pipeline.save if goes_with(remat_of(remat).mode, pipeline.save) else ()


def saved_values(model: ModelConfig) -> tuple[str, ...]:
    """The names of the values that a model's layers have, whatever their kind."""
    kinds = models_of_kinds(model).values()
    return tuple(name for name, value in SAVED_VALUES.items() if any(map(value.exists, kinds)))
