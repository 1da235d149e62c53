"""Weights in 8 bits with factors of blocks: any region has the bytes of the complete tensor, and a
quantisation that is not built is refused by its field."""

import ml_dtypes
import numpy as np
import pytest

from jaxtrain.hf.block_scales import dequantized, read_block, scales_region, scales_shape
from jaxtrain.hf.fields import Fields, HfError

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def block_of(**changes: object):
    return read_block(Fields({"quantization_config": FP8 | changes}, "config.json"))


def test_config():
    assert block_of() == (128, 128)
    assert block_of(weight_block_size=[32, 64], scale_fmt="ue8m0") == (32, 64)
    assert block_of(modules_to_not_convert=["lm_head"]) == (128, 128)
    assert read_block(Fields({}, "config.json")) is None
    assert read_block(Fields({"quantization_config": None}, "config.json")) is None


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
    ],
    ids=str,
)
def test_refused_by_name(changes, message):
    with pytest.raises(HfError) as error:
        block_of(**changes)
    assert str(error.value).startswith(f"config.json: quantization_config.{message}")


@pytest.mark.parametrize("shape", [(7, 5), (8, 12), (9, 13), (1, 1), (17, 3)], ids=str)
def test_regions(shape):
    block, random = (4, 6), np.random.default_rng(0)
    weight = random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = random.random(scales_shape(shape, block), np.float32)
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
        of_scales = tuple(slice(s.start, s.stop) for s in scales_region(region, block))
        of_weight = tuple(slice(s.start, s.stop) for s in region)
        numbers = dequantized(weight[of_weight], scales[of_scales], region, block)
        assert numbers.dtype == np.float32
        assert numbers.tobytes() == np.ascontiguousarray(expected[of_weight]).tobytes()
