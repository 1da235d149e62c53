"""`--calibrate` on this process's simulated devices, of sizes that take no time; and, in full, whether the planner orders layouts by it."""

import math
import os
import subprocess
import sys
import time

import jax
import pytest
from support import ROOT

from jaxtrain.costs import hardware as kinds
from jaxtrain.plan import bench, calibrate

TINY = calibrate.Sizes(
    "float32",
    products=((8, 8, 8), (8, 32, 8), (32, 8, 8), (8, 8, 32), (128, 128, 128)),
    attention=((1, 32, 2, 8),),
    passes=(1 << 12, 1 << 16),
    collectives=(1 << 12,),
    seconds=0.0005,
)


def test_a_file_that_the_planner_reads(tmp_path):
    said = []
    measured = calibrate.calibrate(TINY, lambda what, done: said.append((what, done)))
    calibrate.write(measured, str(tmp_path / "cpu.json"))
    hardware = kinds.load(str(tmp_path / "cpu.json"))
    assert hardware == measured
    assert {*hardware.peak_tflops} == {"bfloat16", "float32"} and all(0 < peak < 100 for peak in hardware.peak_tflops.values())
    figures = (hardware.attention_forward, hardware.attention_backward, hardware.streaming, hardware.memory, hardware.tiers[0].gb_per_s)
    assert all(0 < figure < math.inf for figure in figures)
    assert [tier.devices for tier in hardware.tiers] == [0] and hardware.tiers[0].latency_us >= 0
    cores = len(os.sched_getaffinity(0))
    assert hardware.alone == (jax.device_count() / cores if cores < jax.device_count() else 1.0)
    assert f"jax {jax.__version__}" in hardware.sources[0] and "8 × cpu" in hardware.sources[0]
    assert [done for _, done in said] == sorted(done for _, done in said) and 0 < said[0][1] < said[-1][1] < 1


def test_seconds_of_devices_that_share_cores_are_cpu_seconds():
    """A call that sleeps takes none of them; on devices of their own it takes what the clock says."""
    calls = []
    nap = lambda: calls.append(time.sleep(0.01))
    assert bench.Stopwatch(2, False, 0.001).seconds(nap) < 0.005
    assert bench.Stopwatch(0, False, 0.001).seconds(nap) >= 0.01


@pytest.mark.parametrize(
    ("devices", "groups"), [(1, []), (2, [2]), (6, [2, 6]), (8, [2, 4, 8]), (12, [2, 4, 12])], ids=lambda value: str(value)
)
def test_groups(devices, groups):
    assert bench.groups_of(devices) == groups


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ("--out=cpu.txt", "error: --out='cpu.txt' is no JSON file: use --out=cpu.json"),
        ("--out=no/such/folder/cpu.json", "error: --out='no/such/folder/cpu.json' cannot be written there: use --out=cpu.json"),
        ("--cpu_devices=-1", "error: --cpu_devices=-1 must be at least 0: use --cpu_devices=0"),
    ],
)
def test_errors_are_one_line(flag, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert calibrate.main([flag]) == 2
    assert capsys.readouterr().err.splitlines() == [error]


def test_one_device_of_no_known_kind_has_no_links(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    with pytest.raises(calibrate.CalibrationError, match="needs two devices to measure links.*use --cpu_devices=8"):
        calibrate.calibrate(TINY)


@pytest.mark.full
def test_the_planner_orders_layouts_of_a_calibrated_machine():
    """Every pair of benchmarks/cpu_step.py's layouts whose measured times differ by more than a tenth: some seven CPU-minutes."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC")}
    command = [sys.executable, str(ROOT / "benchmarks" / "planned_order.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
