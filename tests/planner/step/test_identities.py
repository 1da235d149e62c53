"""Published formulas, to the digits that were printed, and the planner's own counts beside them."""

import pytest

from benchmarks.model_forms import gpt
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS, activation_bytes
from jaxtrain.planner.step.step_time import StepModel

DAY = 86400.0
VOCABULARY, SEQUENCE = 51200, 2048
# Of Narayanan et al. 2021, table 1: width, heads, layers, billions of parameters.
SIZES = [
    (2304, 24, 24, 1.7),
    (4096, 32, 36, 7.5),
    (8192, 64, 48, 39.1),
    (12288, 96, 80, 145.6),
    (25600, 160, 128, 1008.0),
]
GPT3 = (12288, 96, 96)


# Formulas as published: h width, l layers, s sequence, V vocabulary, B batch, p pipeline, d data
# parallel.


def megatron_parameters(h: int, layers: int, s: int, vocabulary: int) -> float:
    """P = 12 l h² (1 + 13/12h + (V + s)/12lh), of a GPT with tied tables (Narayanan 2021, equation
    2)."""
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))


def megatron_flops(
    batch: int, s: int, layers: int, h: int, vocabulary: int, recompute: bool = True
) -> float:
    """F = 96 B s l h² (1 + s/6h + V/16lh) of a step with full recomputation (Narayanan 2021,
    equation 3); without it the layers' part is 72/96 of that, and the head's the same."""
    factor = 96 if recompute else 72
    head = vocabulary / (16 * layers * h) * 96 / factor
    return factor * batch * s * layers * h**2 * (1 + s / (6 * h) + head)


def training_seconds(
    tokens: float, parameters: float, devices: int, flops_per_device: float
) -> float:
    """8 T P / (n X): of a run over T tokens with full recomputation (Narayanan 2021, equation
    4)."""
    return 8 * tokens * parameters / (devices * flops_per_device)


def layers_in_flight(layers: int, p: int, m: int = 1) -> float:
    """Layers whose activations the first stage of 1F1B holds at once, as if for one microbatch
    (Korthikanti 2022, section 4.2.3)."""
    return layers * (1 + (p - 1) / (p * m) if m > 1 else 1.0)


def zero_bytes(parameters: float, stage: int, d: int, optimizer: float = 12.0) -> float:
    """Bytes of a device's parameters and gradients in 16 bits, and of the optimizer's state, by the
    stage of ZeRO (Rajbhandari 2020, section 5): 2 Ψ, 2 Ψ and K Ψ, shared out over d devices from
    the back."""
    shared = {0: (1, 1, 1), 1: (1, 1, d), 2: (1, d, d), 3: (d, d, d)}[stage]
    return parameters * (2 / shared[0] + 2 / shared[1] + optimizer / shared[2])


@pytest.mark.parametrize("width, heads, layers, billions", SIZES)
def test_parameters(width, heads, layers, billions):
    formula = megatron_parameters(width, layers, SEQUENCE, VOCABULARY)
    assert formula / 1e9 == pytest.approx(billions, abs=0.05 if billions < 1000 else 0.5)
    # The formula leaves out the last norm alone.
    assert gpt(width, heads, layers).parameters() == pytest.approx(formula, rel=1e-5)


@pytest.mark.parametrize(
    "layers, width, tokens, devices, teraflops, days",
    [(96, 12288, 300e9, 1024, 140, 34), (128, 25600, 450e9, 3072, 163, 84)],
)
def test_training_time(layers, width, tokens, devices, teraflops, days):
    parameters = megatron_parameters(width, layers, SEQUENCE, VOCABULARY)
    assert round(training_seconds(tokens, parameters, devices, teraflops * 1e12) / DAY) == days


@pytest.mark.parametrize(
    "width, heads, layers, devices, batch, teraflops, seconds",
    [(12288, 96, 80, 1536, 2304, 148, 24.82), (2304, 24, 24, 32, 512, 137, 3.53)],
)
def test_flops_of_a_step(width, heads, layers, devices, batch, teraflops, seconds):
    """By the published rate they take the published time; the planner counts the same
    operations."""
    formula = megatron_flops(batch, SEQUENCE, layers, width, VOCABULARY)
    assert formula / (devices * teraflops * 1e12) == pytest.approx(seconds, abs=0.005)
    work = StepModel(
        gpt(width, heads, layers),
        Layout(microbatches=batch, remat="full"),
        FRAMEWORKS["megatron2021"],
        load("a100-80gb"),
    )
    assert work.hardware_flops() == pytest.approx(formula, rel=1e-9)
    assert work.model_flops() == pytest.approx(
        megatron_flops(batch, SEQUENCE, layers, width, VOCABULARY, recompute=False), rel=1e-9
    )


def test_activations_of_a_layer():
    """Table 2 of Korthikanti et al. 2022, for s = 2048, b = 1 and the 175B model; 5as/h is 80
    there."""
    sbh = SEQUENCE * 12288
    factor = lambda remat, sequence_parallel, t: (
        activation_bytes(remat, sequence_parallel, SEQUENCE, 1, 12288, 96, t) / sbh
    )
    values = {
        "none": factor("none", False, 1),
        "tensor": factor("none", False, 8),
        "sequence": factor("none", True, 8),
        "selective": factor("selective", False, 8),
        "selective_sequence": factor("selective", True, 8),
        "full": factor("full", True, 8),
    }
    assert values == pytest.approx(
        {
            "none": 114,
            "tensor": 23,
            "sequence": 14.25,
            "selective": 13,
            "selective_sequence": 4.25,
            "full": 2,
        },
        rel=1e-12,
    )


def test_layers_in_flight():
    assert layers_in_flight(96, 16) == 96
    assert layers_in_flight(96, 16, 3) == 96 * (1 + 15 / 48)


@pytest.mark.parametrize("stage, gigabytes", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero(stage, gigabytes):
    """7.5 billion parameters on 64 devices: figure 1 of Rajbhandari et al. 2020."""
    assert zero_bytes(7.5e9, stage, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_a_worked_example():
    """GPT-3 with t = 8 and p = 16: 2.7 GB of 16-bit parameters and 16.4 GB of 12 bytes of state
    each."""
    parameters = megatron_parameters(12288, 96, SEQUENCE, VOCABULARY) / 128
    assert (round(2 * parameters / 1e9, 1), round(12 * parameters / 1e9, 1)) == (2.7, 16.4)
