"""Models of known forms by their sizes, as the planner has them."""

import dataclasses

from jaxtrain.planner.layer.model import Model


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
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
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
