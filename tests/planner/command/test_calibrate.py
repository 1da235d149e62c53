"""Figures of a kind of device from measured times, found again with noise too; `--calibrate` on
this process's simulated devices, of sizes that take no time; and, in full, whether the planner
orders layouts by it."""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys

import jax
import pytest
from support import ROOT

from jaxtrain import cli
from jaxtrain.planner.command import calibrate
from jaxtrain.planner.command.bench import TimedCollectives
from jaxtrain.planner.layer import hardware as kinds
from jaxtrain.planner.layer.hardware import Matmul
from jaxtrain.planner.layer.links import DATA, GATHER, PERMUTE, SCATTER, SUM, Collective

TINY = calibrate.Sizes(
    "float32",
    products=((8, 8, 8), (8, 32, 8), (32, 8, 8), (8, 8, 32), (128, 128, 128)),
    attention=((1, 32, 2, 8),),
    passes=(1 << 12, 1 << 16),
    collectives=(1 << 12,),
    seconds=0.0005,
)
SIZES = [(m, n, k) for m in (64, 256, 1024) for n in (64, 256, 1024) for k in (64, 256, 1024)]


def test_a_file_that_the_planner_reads(tmp_path):
    said = []
    measured = calibrate.calibrate(TINY, lambda what, done: said.append((what, done)))
    (tmp_path / "cpu.json").write_text(json.dumps(dataclasses.asdict(measured)))
    hardware = kinds.load(str(tmp_path / "cpu.json"))
    assert hardware == measured
    assert {*hardware.peak_tflops} == {"bfloat16", "float32"} and all(
        0 < peak < 100 for peak in hardware.peak_tflops.values()
    )
    figures = (
        *hardware.attention,
        hardware.streaming,
        hardware.memory,
        hardware.tiers[0].gb_per_s,
    )
    assert all(0 < figure < math.inf for figure in figures)
    assert [tier.devices for tier in hardware.tiers] == [0] and hardware.tiers[0].latency_us >= 0
    cores = len(os.sched_getaffinity(0))
    assert hardware.alone == (jax.device_count() / cores if cores < jax.device_count() else 1.0)
    assert f"jax {jax.__version__}" in hardware.sources[0] and "8 × cpu" in hardware.sources[0]
    assert [done for _, done in said] == sorted(done for _, done in said) and 0 < said[0][1] < said[
        -1
    ][1] < 1


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ("--out=cpu.txt", "error: --out='cpu.txt' is no JSON file: use --out=cpu.json"),
        (
            "--out=no/such/folder/cpu.json",
            "error: --out='no/such/folder/cpu.json' cannot be written (No such file or "
            "directory): use --out=cpu.json",
        ),
        ("--cpu_devices=-1", "error: --cpu_devices=-1 must be at least 0: use --cpu_devices=0"),
    ],
)
def test_errors_are_one_line(flag, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert calibrate.main([flag]) == 2
    assert capsys.readouterr().err.splitlines() == [error]


def test_one_device_of_no_known_kind_has_no_links(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    with pytest.raises(
        cli.FlagsError, match="needs two devices to measure links.*use --cpu_devices=8"
    ):
        calibrate.calibrate(TINY)


def swept(matmul: Matmul, peak: float, noise: float = 0.0) -> list[float]:
    """Seconds of products on such a device, each off by up to `noise`."""
    rng = random.Random(0)
    seconds = lambda m, n, k: 2 * m * n * k / (peak * matmul.reached(m, n, k))
    return [seconds(*size) * (1 + rng.uniform(-noise, noise)) for size in SIZES]


def timed(devices: int, size: float, seconds: float, *kinds: str) -> TimedCollectives:
    return TimedCollectives(
        devices, tuple(Collective(kind, (DATA,), size) for kind in kinds), seconds
    )


def test_products_of_a_known_device():
    seconds = swept(Matmul(1.0, (5.0, 20.0, 80.0)), 3e10)
    peak, matmul, error = calibrate.fit_products(SIZES, seconds)
    assert (
        peak == pytest.approx(3e10)
        and matmul.half == pytest.approx((5.0, 20.0, 80.0))
        and matmul.peak == 1.0
    )
    assert error < 1e-9


def test_noise_and_what_has_no_part():
    seconds = swept(Matmul(1.0, (0.0, 20.0, 0.0)), 3e10, noise=0.1)
    peak, matmul, error = calibrate.fit_products(SIZES, seconds)
    assert peak == pytest.approx(3e10, rel=0.1) and matmul.half[1] == pytest.approx(20, rel=0.4)
    assert all(half >= 0 for half in matmul.half) and matmul.half[0] < 8 and matmul.half[2] < 8
    assert 0.01 < error < 0.1


def test_links_of_a_known_device():
    """Gathers, sums over 2 to 8 devices and messages, as the planner counts them."""
    measured = []
    for devices in (2, 4, 8):
        for size in (1e5, 1e6, 1e7):
            once = size * (devices - 1) / devices / 2e9 + 2 * math.log2(devices) * 3e-6
            measured += [
                timed(devices, size, once, GATHER),
                timed(devices, size, 2 * once, GATHER, SCATTER),
            ]
            measured += [
                timed(devices, size, 2 * once, SUM),
                timed(devices, size, size / 2e9 + 3e-6, PERMUTE),
            ]
    tier, error = calibrate.fit_links(measured, kinds.load("h100"), "local", 8)
    assert (tier.name, tier.devices) == ("local", 8)
    assert (
        tier.bytes_per_s == pytest.approx(2e9)
        and tier.latency_us == pytest.approx(3.0)
        and error < 1e-9
    )


def test_one_memory():
    """Where devices are simulated, a sum over any number takes as long as a message."""
    simulated = dataclasses.replace(kinds.load("h100"), alone=4.0)
    measured = [
        timed(n, size, size / 2e9 + 5e-5, kind)
        for n in (2, 8)
        for size in (1e5, 1e7)
        for kind in (SUM, PERMUTE)
    ]
    tier, error = calibrate.fit_links(measured, simulated, "local", 0)
    assert (
        tier.bytes_per_s == pytest.approx(2e9)
        and tier.latency_us == pytest.approx(50.0)
        and error < 1e-9
    )


def test_factors_are_not_negative():
    """By plain least squares the second factor would be -1."""
    factors, error = calibrate.fit([(1.0, 0.0), (1.0, 1.0)], [2.0, 1.0])
    # (x/2 - 1)² + (x - 1)² is least at 6/5
    assert factors[1] == 0.0 and factors[0] == pytest.approx(1.2)
    assert error == pytest.approx((0.4 + 0.2) / 2)


@pytest.mark.full
def test_the_planner_orders_layouts_of_a_calibrated_machine():
    """Every pair of benchmarks/cpu_step.py's layouts whose measured times differ by more than a
    tenth: some seven CPU-minutes."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC")
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "planned_order.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
