"""Published formulas, to the digits that were printed, and the planner's own counts beside them."""

import pytest

from jaxtrain.costs import identities
from jaxtrain.costs.hardware import load
from jaxtrain.costs.layout import Layout
from jaxtrain.costs.program import PROGRAMS
from jaxtrain.costs.step_time import Work
from jaxtrain.costs.transformer import gpt

DAY = 86400.0
VOCABULARY, SEQUENCE = 51200, 2048
# Of Narayanan et al. 2021, table 1: width, heads, layers, billions of parameters.
SIZES = [(2304, 24, 24, 1.7), (4096, 32, 36, 7.5), (8192, 64, 48, 39.1), (12288, 96, 80, 145.6), (25600, 160, 128, 1008.0)]
GPT3 = (12288, 96, 96)


@pytest.mark.parametrize("width, heads, layers, billions", SIZES)
def test_parameters(width, heads, layers, billions):
    formula = identities.megatron_parameters(width, layers, SEQUENCE, VOCABULARY)
    assert formula / 1e9 == pytest.approx(billions, abs=0.05 if billions < 1000 else 0.5)
    # The formula leaves out the last norm alone.
    assert gpt(width, heads, layers).parameters() == pytest.approx(formula, rel=1e-5)


@pytest.mark.parametrize(
    "layers, width, tokens, devices, teraflops, days", [(96, 12288, 300e9, 1024, 140, 34), (128, 25600, 450e9, 3072, 163, 84)]
)
def test_training_time(layers, width, tokens, devices, teraflops, days):
    parameters = identities.megatron_parameters(width, layers, SEQUENCE, VOCABULARY)
    assert round(identities.training_seconds(tokens, parameters, devices, teraflops * 1e12) / DAY) == days


@pytest.mark.parametrize(
    "width, heads, layers, devices, batch, teraflops, seconds",
    [(12288, 96, 80, 1536, 2304, 148, 24.82), (2304, 24, 24, 32, 512, 137, 3.53)],
)
def test_flops_of_a_step(width, heads, layers, devices, batch, teraflops, seconds):
    """By the published rate they take the published time; the planner counts the same operations."""
    formula = identities.megatron_flops(batch, SEQUENCE, layers, width, VOCABULARY)
    assert formula / (devices * teraflops * 1e12) == pytest.approx(seconds, abs=0.005)
    work = Work(gpt(width, heads, layers), Layout(microbatches=batch, remat="full"), PROGRAMS["megatron2021"], load("a100-80gb"))
    assert work.hardware_flops() == pytest.approx(formula, rel=1e-9)
    assert work.model_flops() == pytest.approx(
        identities.megatron_flops(batch, SEQUENCE, layers, width, VOCABULARY, recompute=False), rel=1e-9
    )


def test_activations_of_a_layer():
    """Table 2 of Korthikanti et al. 2022, for s = 2048, b = 1 and the 175B model; 5as/h is 80 there."""
    sbh = SEQUENCE * 12288
    values = {kind: identities.activation_bytes(kind, SEQUENCE, 1, 12288, 96, 8) / sbh for kind in identities.ACTIVATIONS}
    assert values == pytest.approx(
        {"none": 114, "tensor": 23, "sequence": 14.25, "selective": 13, "selective_sequence": 4.25, "full": 2}, rel=1e-12
    )


def test_layers_in_flight():
    assert identities.layers_in_flight(96, 16) == 96
    assert identities.layers_in_flight(96, 16, 3) == 96 * (1 + 15 / 48)


@pytest.mark.parametrize("stage, gigabytes", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero(stage, gigabytes):
    """7.5 billion parameters on 64 devices: figure 1 of Rajbhandari et al. 2020."""
    assert identities.zero_bytes(7.5e9, stage, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_a_worked_example():
    """GPT-3 with t = 8 and p = 16: 2.7 GB of 16-bit parameters and 16.4 GB of 12 bytes of state each."""
    parameters = identities.megatron_parameters(12288, 96, SEQUENCE, VOCABULARY) / 128
    assert (round(2 * parameters / 1e9, 1), round(12 * parameters / 1e9, 1)) == (2.7, 16.4)
