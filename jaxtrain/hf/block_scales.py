"""Weights in 8 bits with a factor for each block, as DeepSeek-V3 is published:

    X.weight            F8_E4M3 [out, in]
    X.weight_scale_inv  F32 [⌈out / 128⌉, ⌈in / 128⌉]
    weight              X.weight · factor of its block, in float32

config.json has the blocks' size (`quantization_config.weight_block_size`).
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxtrain.hf.fields import Fields
from jaxtrain.hf.source_files import QUANTIZATION

SUFFIX = "_scale_inv"  # behind the name of a weight
# Types of tensors are those of the files, whatever these say.
WITHOUT_EFFECT = ("modules_to_not_convert", "dequantize")

BlockSize = tuple[int, int]


def read_block(fields: Fields) -> BlockSize | None:
    """The rows and columns of a block of a quantised model; None for another model. Raises HfError,
    which names the field, for a quantisation that is not built."""
    settings = fields.value(QUANTIZATION, None)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise fields.refuse(QUANTIZATION, "is no object")
    inner = Fields(settings, fields.place, prefix=f"{QUANTIZATION}.")
    inner.require("quant_method", ["fp8"], default=None)
    inner.require("fmt", ["e4m3", None])
    inner.require("activation_scheme", ["dynamic", None])
    inner.require("scale_fmt", [None, "float", "ue8m0"])
    block = inner.value("weight_block_size", None)
    if not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise inner.refuse("weight_block_size", "is no size of blocks, such as [128, 128]")
    inner.pass_over(*WITHOUT_EFFECT)
    inner.finish("fp8")
    fields.notes += inner.notes
    return block[0], block[1]


def scales_shape(shape: Sequence[int], block: BlockSize) -> tuple[int, ...]:
    """The shape of the factors of a weight [out, in]."""
    return tuple(math.ceil(size / part) for size, part in zip(shape, block, strict=True))


def scales_region(region: Sequence[range], block: BlockSize) -> tuple[range, ...]:
    """The region of the factors that a region of the weight needs."""
    return tuple(
        range(span.start // part, math.ceil(span.stop / part))
        for span, part in zip(region, block, strict=True)
    )


def dequantized(
    weight: np.ndarray, scales: np.ndarray, region: Sequence[range], block: BlockSize
) -> np.ndarray:
    """The float32 numbers of a region [rows, columns] of a weight.

    scales: those of `scales_region`
    """
    rows, columns = (
        np.asarray(span) // part - span.start // part
        for span, part in zip(region, block, strict=True)
    )
    numbers = weight.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
        numbers *= scales[rows][:, columns]
    return numbers
