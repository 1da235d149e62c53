"""Kinds of devices: the files that are there, and what is said of others."""

import dataclasses
import json

import pytest

from jaxtrain.costs import hardware
from jaxtrain.costs.hardware import HardwareError, from_json, known, load, to_json

NAMED = {"a100-40gb", "a100-80gb", "h100", "h200", "b200", "gb200", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"}


def test_those_that_are_promised():
    assert set(known()) >= NAMED


@pytest.mark.parametrize("name", known())
def test_a_file(name):
    """Its figures are possible, it says where they come from, and it is read as it was written."""
    h = load(name)
    assert h.name == name and h.sources
    assert 0 < h.matmul.peak <= 1 and 0 < h.attention_backward <= h.attention_forward <= 1 and 0 < h.memory_reached <= 1
    assert all(0 < tier.reached <= 1 and tier.gb_per_s > 0 for tier in h.tiers)
    assert [t.gb_per_s for t in h.tiers] == sorted((t.gb_per_s for t in h.tiers), reverse=True)
    assert h.tiers[-1].devices == 0
    assert from_json(json.loads(json.dumps(to_json(h)))) == h


def test_a_product_reaches_its_peak_where_it_is_large():
    matmul = load("h100").matmul
    assert matmul.reached(1e9, 1e9, 1e9) == pytest.approx(matmul.peak)
    m, n, k = matmul.half
    for sizes in ((m, 1e9, 1e9), (1e9, n, 1e9), (1e9, 1e9, k)):
        assert matmul.reached(*sizes) == pytest.approx(matmul.peak / 2)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("h1000", None, "--hardware='h1000' is not known (a100-40gb, "),
        ("gone.json", None, "cannot be read (No such file or directory): use --hardware="),
        ("own.json", "{", "does not describe a device (Expecting"),
        ("own.json", "{}", "does not describe a device (lacks 'tiers'; "),
        ("own.json", json.dumps({"tiers": [{"name": "x", "devices": 8, "gb_per_s": 1}]}), "joins any number of devices"),
        ("own.json", "[]", "does not describe a device"),
    ],
)
def test_what_is_none(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(HardwareError) as error:
        load(name)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("H-100", "h100"), ("A100", "a100-80gb"), ("NVIDIA H200", "h200"), ("v5p", "tpu-v5p"), ("v5", "tpu-v5p"), ("", "h100")],
)
def test_the_nearest_is_named(name, near):
    with pytest.raises(HardwareError, match=f"use --hardware={near}$"):
        load(name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("cpu", None),
    ],
)
def test_kinds_by_the_names_that_jax_gives_them(kind, name):
    found = hardware.of_device(kind)
    assert (found and found.name) == (hardware.load(name).name if name else None)


def test_devices_that_share_cores_use_what_waiting_ones_leave():
    """Four devices' work on one core: stages that wait a third of the time cost nothing; what is longer than all the work remains."""
    shared = dataclasses.replace(hardware.load("h100"), alone=4.0)
    assert hardware.load("h100").waited(3.0, 2.0) == 2.0
    assert shared.waited(3.0, 2.0) == 0.0 and shared.waited(3.0, 13.0) == 1.0
    assert hardware.from_json(hardware.to_json(shared)) == shared
    with pytest.raises(ValueError, match="alone"):
        hardware.from_json(hardware.to_json(shared) | {"alone": 0.5})
