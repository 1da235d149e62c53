"""Published weights in 8 or 4 bits, which are read as float32 numbers times the factor of a block:

    fp8     X            F8_E4M3 [out, in]                       (DeepSeek-V3)
            X_scale_inv  F32 [⌈out / 128⌉, ⌈in / 128⌉]
            config.json has the blocks' size (`quantization_config.weight_block_size`)
    mxfp4   X_blocks     U8 [experts, out, in / 32, 16]          (gpt-oss)
            X_scales     U8 [experts, out, in / 32]
            X, which is [experts, in, out], has no tensor of its own

mxfp4 is the format of the Open Compute Project's "Microscaling Formats" 1.0: a byte has two numbers
of 4 bits (E2M1), the first one in its lower half, and a factor is a power of two (E8M0).
"""

import dataclasses
import math

import numpy as np

from jaxtrain.hf.fields import Fields, HfError
from jaxtrain.hf.safetensors_folder import FP8, SafetensorsFolder, TensorRegion
from jaxtrain.hf.source_files import QUANTIZATION

SUFFIX = "_scale_inv"  # of factors, behind the name of a weight
# Types of tensors are those of the files, whatever these say.
WITHOUT_EFFECT = ("modules_to_not_convert", "dequantize")
# The numbers of E2M1 by their four bits, of which the first is the sign.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_BIAS, NUMBERS = 127, 32  # of a factor, and of a block of mxfp4

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Float8:
    """Matrices [out, in] of float8 with factors for blocks of rows and columns. words: for
    people"""

    block: tuple[int, int]
    words: str = "float8 matrices"

    def parts(
        self, folder: SafetensorsFolder, name: str, shape: Shape
    ) -> dict[str, tuple[Shape, str]]:
        """The tensors of a folder that hold a quantised one, each with its shape and type; none for
        a tensor that is not quantised.

        shape: of the tensor. Raises HfError for a tensor that cannot be quantised.
        """
        if name not in folder or folder.dtype(name) != FP8:
            return {}
        if len(shape) != 2:
            raise HfError(f"{folder.place(name)} is no matrix, and only these have blocks")
        scales = tuple(math.ceil(size / part) for size, part in zip(shape, self.block, strict=True))
        return {name: (shape, FP8), name + SUFFIX: (scales, "F32")}

    def read(self, folder: SafetensorsFolder, name: str, region: TensorRegion) -> np.ndarray:
        """The float32 numbers of a region of a quantised tensor."""
        spans = [*zip(region, self.block, strict=True)]
        of_scales = [range(s.start // part, math.ceil(s.stop / part)) for s, part in spans]
        scales = folder.read(name + SUFFIX, of_scales)
        rows, columns = (np.asarray(s) // part - s.start // part for s, part in spans)
        numbers = folder.read(name, region).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            numbers *= scales[rows][:, columns]
        return numbers


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """Experts in 4 bits. The methods are those of Float8."""

    words: str = "4-bit numbers"

    def parts(
        self, folder: SafetensorsFolder, name: str, shape: Shape
    ) -> dict[str, tuple[Shape, str]]:
        if name in folder or f"{name}_blocks" not in folder:
            return {}
        if len(shape) != 3 or shape[1] % NUMBERS:
            place = folder.place(f"{name}_blocks")
            raise HfError(f"{place} has blocks of {NUMBERS}, and the tensor is {list(shape)}")
        experts, inputs, outputs = shape
        scales = (experts, outputs, inputs // NUMBERS)
        return {
            f"{name}_blocks": ((*scales, NUMBERS // 2), "U8"),
            f"{name}_scales": (scales, "U8"),
        }

    def read(self, folder: SafetensorsFolder, name: str, region: TensorRegion) -> np.ndarray:
        experts, inputs, outputs = region
        blocks = range(inputs.start // NUMBERS, math.ceil(inputs.stop / NUMBERS))
        stored = (experts, outputs, blocks)
        pairs = folder.read(f"{name}_blocks", (*stored, range(NUMBERS // 2)))
        exponents = folder.read(f"{name}_scales", stored).astype(np.int32) - E8M0_BIAS
        numbers = E2M1[np.stack([pairs & 15, pairs >> 4], -1)].reshape(*pairs.shape[:-1], NUMBERS)
        with np.errstate(over="ignore"):  # the result is checked
            numbers = np.ldexp(numbers, exponents[..., None])
        start = inputs.start - blocks.start * NUMBERS
        rows = numbers.reshape(*pairs.shape[:2], -1)[..., start : start + len(inputs)]
        return rows.swapaxes(1, 2)


Quantization = Float8 | Mxfp4


def read_quantization(fields: Fields) -> Quantization | None:
    """The quantisation of a model's weights; None where they are not quantised. Raises HfError,
    which names the field, for a quantisation that is not built."""
    settings = fields.value(QUANTIZATION, None)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise fields.refuse(QUANTIZATION, "is no object")
    inner = Fields(settings, fields.place, prefix=f"{QUANTIZATION}.")
    method = inner.require("quant_method", ["fp8", "mxfp4"], default=None)
    inner.pass_over(*WITHOUT_EFFECT)
    quantization = _float8(inner) if method == "fp8" else Mxfp4()
    inner.finish(method)
    fields.notes += inner.notes
    return quantization


def _float8(inner: Fields) -> Float8:
    """The quantisation of an object with `quant_method` fp8."""
    inner.require("fmt", ["e4m3", None])
    inner.require("activation_scheme", ["dynamic", None])
    inner.require("scale_fmt", [None, "float", "ue8m0"])
    block = inner.value("weight_block_size", None)
    if not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise inner.refuse("weight_block_size", "is no size of blocks, such as [128, 128]")
    return Float8((block[0], block[1]))
