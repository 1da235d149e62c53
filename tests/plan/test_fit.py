"""Figures of a kind of device from measured times: what the formulas made is found again, with noise too."""

import math
import random

import pytest

from jaxtrain.costs.hardware import Matmul
from jaxtrain.plan import fit

SIZES = [(m, n, k) for m in (64, 256, 1024) for n in (64, 256, 1024) for k in (64, 256, 1024)]


def swept(matmul: Matmul, peak: float, launch: float, noise: float = 0.0) -> list[fit.Product]:
    """What products would take on such a device, each off by up to `noise`."""
    rng = random.Random(0)
    seconds = lambda m, n, k: 2 * m * n * k / (peak * matmul.reached(m, n, k)) + launch
    return [fit.Product(*size, seconds(*size) * (1 + rng.uniform(-noise, noise))) for size in SIZES]


def test_products_of_a_known_device():
    peak, matmul, error = fit.products(swept(Matmul(1.0, (5.0, 20.0, 80.0)), 3e10, 1e-5), 1e-5)
    assert peak == pytest.approx(3e10) and matmul.half == pytest.approx((5.0, 20.0, 80.0)) and matmul.peak == 1.0
    assert error < 1e-9


def test_noise_and_what_has_no_part():
    peak, matmul, error = fit.products(swept(Matmul(1.0, (0.0, 20.0, 0.0)), 3e10, 0.0, noise=0.1), 0.0)
    assert peak == pytest.approx(3e10, rel=0.1) and matmul.half[1] == pytest.approx(20, rel=0.4)
    assert all(half >= 0 for half in matmul.half) and matmul.half[0] < 8 and matmul.half[2] < 8
    assert 0.01 < error < 0.1


def test_links_of_a_known_device():
    """Gathers, sums over 2 to 8 devices and messages, as costs.step_time counts them."""
    measured = []
    for devices in (2, 4, 8):
        for size in (1e5, 1e6, 1e7):
            for rounds in (1, 2):
                seconds = rounds * (size * (devices - 1) / devices / 2e9 + 2 * math.log2(devices) * 3e-6)
                measured.append(fit.Collective(devices, size, rounds, seconds))
            measured.append(fit.Collective(devices, size, 0, size / 2e9 + 3e-6))
    tier, error = fit.links(measured, "local", 8)
    assert (tier.name, tier.devices) == ("local", 8)
    assert tier.bytes_per_s == pytest.approx(2e9) and tier.latency_us == pytest.approx(3.0) and error < 1e-9


def test_one_memory():
    """Where devices are simulated, a sum over any number takes as long as a message."""
    sums = [fit.Collective(n, size, 2, size / 2e9 + 5e-5, one_memory=True) for n in (2, 8) for size in (1e5, 1e7)]
    messages = [fit.Collective(n, size, 0, size / 2e9 + 5e-5, one_memory=True) for n in (2, 8) for size in (1e5, 1e7)]
    tier, error = fit.links([*sums, *messages], "local", 0)
    assert tier.bytes_per_s == pytest.approx(2e9) and tier.latency_us == pytest.approx(50.0) and error < 1e-9


def test_factors_are_not_negative():
    """By plain least squares the second factor would be -1."""
    found = fit.fit([(1.0, 0.0), (1.0, 1.0)], [2.0, 1.0])
    assert found.factors[1] == 0.0 and found.factors[0] == pytest.approx(1.2)  # (x/2 - 1)² + (x - 1)² is least at 6/5
    assert found.error == pytest.approx((0.4 + 0.2) / 2)
