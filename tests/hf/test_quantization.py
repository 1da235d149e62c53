"""Weights in 8 and 4 bits with factors of blocks: any region has the bytes of the complete tensor,
and a quantisation that is not built is refused by its field."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import safetensors_files

from jaxtrain.hf.fields import Fields, HfError
from jaxtrain.hf.quantization import Float8, Mxfp4, read_quantization
from jaxtrain.hf.safetensors_folder import SafetensorsFolder

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def quantization_of(**changes: object):
    return read_quantization(Fields({"quantization_config": FP8 | changes}, "config.json"))


def test_config():
    assert quantization_of() == Float8((128, 128))
    assert quantization_of(weight_block_size=[32, 64], scale_fmt="ue8m0") == Float8((32, 64))
    assert quantization_of(modules_to_not_convert=["lm_head"]) == Float8((128, 128))
    assert read_quantization(Fields({}, "config.json")) is None
    assert read_quantization(Fields({"quantization_config": None}, "config.json")) is None
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    assert read_quantization(Fields({"quantization_config": mxfp4}, "config.json")) == Mxfp4()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
        ({"weight_block_size": None}, "weight_block_size=None"),
        ({"weight_block_size": [128]}, "weight_block_size=[128]"),
        ({"weight_block_size": [128, 0]}, "weight_block_size=[128, 0]"),
        ({"bits": 4}, "bits=4"),
        ({"quant_method": "mxfp4"}, "fmt='e4m3'"),
    ],
    ids=str,
)
def test_refused_by_name(changes, message):
    with pytest.raises(HfError) as error:
        quantization_of(**changes)
    assert str(error.value).startswith(f"config.json: quantization_config.{message}")


@pytest.mark.parametrize("shape", [(7, 5), (8, 12), (9, 13), (1, 1), (17, 3)], ids=str)
def test_regions(tmp_path, shape):
    float8, random = Float8((4, 6)), np.random.default_rng(0)
    weight = random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = random.random((-(-shape[0] // 4), -(-shape[1] // 6)), np.float32)
    tensors = {"X": weight, "X_scale_inv": scales}
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    folder = SafetensorsFolder(tmp_path)
    expected_parts = {"X": (shape, "F8_E4M3"), "X_scale_inv": (scales.shape, "F32")}
    assert float8.parts(folder, "X", shape) == expected_parts
    # the definition, number by number
    expected = np.array(
        [
            [np.float32(weight[i, j]) * scales[i // 4, j // 6] for j in range(shape[1])]
            for i in range(shape[0])
        ],
        np.float32,
    )
    for _ in range(20):
        region = [range(*sorted(random.integers(0, size + 1, 2))) for size in shape]
        if not all(region):
            continue
        numbers = float8.read(folder, "X", region)
        assert numbers.dtype == np.float32
        assert numbers.tobytes() == np.ascontiguousarray(expected[np.ix_(*region)]).tobytes()


def test_any_region_in_4_bits(tmp_path):
    """Number by number as the format says: a sign, two bits of exponent, one of mantissa."""
    experts, inputs, outputs = 3, 64, 5
    random = np.random.default_rng(0)
    shape = (experts, outputs, inputs // 32)
    blocks = random.integers(0, 256, (*shape, 16), np.uint8)
    scales = random.integers(100, 140, shape, np.uint8)
    save_file({"X_blocks": blocks, "X_scales": scales}, tmp_path / "model.safetensors")
    folder, mxfp4 = SafetensorsFolder(tmp_path), Mxfp4()
    expected = np.zeros((experts, inputs, outputs), np.float32)
    for e, i, o in np.ndindex(expected.shape):
        byte = int(blocks[e, o, i // 32, i % 32 // 2])
        bits = byte >> 4 if i % 2 else byte & 15
        exponent, mantissa = bits >> 1 & 3, bits & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        factor = 2.0 ** (int(scales[e, o, i // 32]) - 127)
        expected[e, i, o] = (-size if bits & 8 else size) * factor
    assert mxfp4.parts(folder, "X", expected.shape) == {
        "X_blocks": ((3, 5, 2, 16), "U8"),
        "X_scales": ((3, 5, 2), "U8"),
    }
    for _ in range(30):
        region = [range(*sorted(random.integers(0, size + 1, 2))) for size in expected.shape]
        if all(region):
            numbers = mxfp4.read(folder, "X", region)
            index = tuple(slice(span.start, span.stop) for span in region)
            assert numbers.dtype == np.float32
            np.testing.assert_array_equal(numbers, expected[index])
    with pytest.raises(HfError, match="X_blocks has blocks of 32, and the tensor is"):
        mxfp4.parts(folder, "X", (3, 33, 5))
    assert mxfp4.parts(folder, "Y", expected.shape) == {}
