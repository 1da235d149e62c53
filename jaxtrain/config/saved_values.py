"""The values of a layer that `pipeline.save` can name. models/ names them where they are made, and
costs/ counts them. Standard library only."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxtrain.config.settings import ModelConfig, PipelineConfig
from jaxtrain.config.sizes import SELECTIVE, remat_of


class SavedValue(NamedTuple):
    """A value that a layer may save: what it is, and which models have it."""

    doc: str
    exists: Callable[[ModelConfig], object] = lambda model: True


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
# what selective recomputation saves if no names are given: results of products with weights
PRODUCTS = (LATENT, QKV, ATTENTION, ATTENTION_OUT, ROUTER, MLP_IN)
# in the order in which a layer makes them
SAVED_VALUES: Mapping[str, SavedValue] = {
    LAYER_INPUT: SavedValue("the layer's input, which every selective recomputation saves"),
    ATTENTION_NORM: SavedValue("the input of attention, normed"),
    LATENT: SavedValue(
        "what latent attention compresses its input to", lambda model: model.attention == "mla"
    ),
    QKV: SavedValue("queries, keys and values, before their norms and rotation"),
    ATTENTION: SavedValue("the result of attention's core, before its output matrix"),
    ATTENTION_OUT: SavedValue("the product with attention's output matrix"),
    MLP_NORM: SavedValue("the input of the MLP or the experts, normed"),
    ROUTER: SavedValue("the router's logits", lambda model: model.experts),
    ROUTED: SavedValue("tokens as experts have received them", lambda model: model.experts),
    MLP_IN: SavedValue("the first products of the MLP or the experts: up, and gate"),
    MLP_HIDDEN: SavedValue("the hidden layer of the MLP or the experts, before the last product"),
}


def saves_layer_inputs(mode: str, names: Sequence[str]) -> bool:
    """True if a pipeline with this mode of remat and these names in `pipeline.save` recomputes each
    layer from its own input, which F leaves, and not from the one of its unit."""
    return mode == "full" and tuple(names) == (LAYER_INPUT,)


def saved_with(pipeline: PipelineConfig, remat: str) -> tuple[str, ...]:
    """What remains of `pipeline.save` where a plan's layout has this `remat`: layers' inputs go
    with full recomputation, other names with selective."""
    mode, names = remat_of(remat).mode, pipeline.save
    if mode == remat_of(pipeline.remat).mode or saves_layer_inputs(mode, names):
        return names
    return names if mode == SELECTIVE and tuple(names) != (LAYER_INPUT,) else ()


def saved_values(model: ModelConfig) -> tuple[str, ...]:
    """The names of the values that a model's layers have."""
    return tuple(name for name, value in SAVED_VALUES.items() if value.exists(model))
