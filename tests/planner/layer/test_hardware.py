"""Kinds of devices: the files that are there, and what is said of others."""

import dataclasses
import json
import math
import os
import re

import pytest

from jaxtrain.planner.layer import hardware
from jaxtrain.planner.layer.hardware import HardwareError, from_json, known, load

NAMED = {
    "a100-40gb",
    "a100-80gb",
    "h100",
    "h200",
    "b200",
    "gb200",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "tpu-7x",
    "h100-a3",
}


def test_those_that_are_promised():
    assert set(known()) >= NAMED


@pytest.mark.parametrize("name", known())
def test_a_file(name):
    """Its figures are possible, it says where they come from, and it is read as it was written."""
    h = load(name)
    assert h.name == name and h.sources
    assert (
        0 < h.matmul.peak <= 1
        and 0 < h.attention[1] <= h.attention[0] <= 1
        and 0 < h.memory_reached <= 1
    )
    assert all(0 < tier.reached <= 1 and tier.gb_per_s > 0 for tier in h.tiers)
    assert [t.gb_per_s for t in h.tiers] == sorted((t.gb_per_s for t in h.tiers), reverse=True)
    assert h.tiers[-1].devices == 0
    assert from_json(json.loads(json.dumps(dataclasses.asdict(h)))) == h


def test_a_product_reaches_its_peak_where_it_is_large():
    matmul = load("h100").matmul
    assert matmul.reached(1e9, 1e9, 1e9) == pytest.approx(matmul.peak)
    m, n, k = matmul.half
    for sizes in ((m, 1e9, 1e9), (1e9, n, 1e9), (1e9, 1e9, k)):
        assert matmul.reached(*sizes) == pytest.approx(matmul.peak / 2)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("h1000", None, "--hardware='h1000' is not known (a10, a100-40gb, "),
        ("gone.json", None, "cannot be read (No such file or directory)"),
        ("own.json", "{", "does not describe a device (Expecting"),
        ("own.json", "{}", "does not describe a device (lacks 'name'; "),
        (
            "own.json",
            json.dumps({"like": "h100", "tiers": [{"name": "x", "devices": 8, "gb_per_s": 1}]}),
            "joins any number of devices",
        ),
        ("own.json", "[]", "does not describe a device (the file must be an object of keys"),
    ],
)
def test_what_is_none(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(HardwareError) as error:
        load(name)
    assert message in str(error.value) and "\n" not in str(error.value)


PEAKS, TIERS = (
    {"bfloat16": 989},
    [
        {"name": "link", "devices": 8, "gb_per_s": 450},
        {"name": "net", "devices": 0, "gb_per_s": 50},
    ],
)
NO_NUMBERS = (True, "80", None, [80], {}, float("nan"))
PLAIN = {  # figures that stand alone → the least and the most that is accepted
    "memory_gib": (1e-6, 1e6),
    "memory_usable": (1e-6, 1),
    "memory_gb_per_s": (1e-9, 1e6),
    "memory_reached": (1e-6, 1),
    "host_gb_per_s": (1e-9, 1e6),
    "clock_ghz": (0, 1e3),
    "quantized_reached": (1e-6, 1),
    "launch_us": (0, 1e9),
    "watts": (0, 1e6),
    "alone": (1, 1e6),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({key: value}, f"{key}={value!r} must be a number from {least:g} to {most:g}, such as ")
            for key, (least, most) in PLAIN.items()
            for value in (*NO_NUMBERS, -1, -math.inf, math.inf, 1e300, least - 1e-9, 1.001 * most)
        ),
        # bytes
        (
            {"memory_gib": 85899345920},
            "memory_gib=85899345920 must be a number from 1e-06 to 1e+06, such as 1e+06",
        ),
        ({"memory_gib": 10**400}, "memory_gib=1" + "0" * 36 + "... must be a number"),
        ({"memory_gb": 80}, "the key 'memory_gb' is unknown, and 'memory_gib' is the nearest"),
        ({"comment": "mine"}, "the key 'comment' is unknown"),
        *(
            ({"name": name}, f"name={name!r} must be a text of one line")
            for name in (None, 5, "", " ", "two\nlines", ["h100"], True)
        ),
        (
            {"peak_tflops": {"bfloat16": 0}},
            "peak_tflops.bfloat16=0 must be a number from 1e-09 to 1e+06, such as 989",
        ),
        ({"peak_tflops": {"bfloat16": -5}}, "peak_tflops.bfloat16=-5 must"),
        (
            {"peak_tflops": {"bfloat16": 989e12}},
            "peak_tflops.bfloat16=989000000000000.0 must be a number from 1e-09 to 1e+06, "
            "such as 1e+06",
        ),
        ({"peak_tflops": 989}, "peak_tflops must be an object"),
        ({"peak_tflops": {}}, "peak_tflops has none of bfloat16, float32"),
        (
            {"peak_tflops": {"bloat16": 989}},
            "the key 'bloat16' of peak_tflops is unknown, and 'bfloat16' is the nearest",
        ),
        (
            {"matmul": {"peak": 0, "half": [1, 1, 1]}},
            "matmul.peak=0 must be a number from 1e-06 to 1",
        ),
        (
            {"matmul": {"peak": 5, "half": [1, 1, 1]}},
            "matmul.peak=5 must be a number from 1e-06 to 1, such as 1;",
        ),
        (
            {"matmul": {"peak": 1, "half": [1, -1, 1]}},
            "matmul.half=-1 must be a number from 0 to 1e+09",
        ),
        ({"matmul": {"peak": 1, "half": [1, 1]}}, "matmul.half must be a list of 3 numbers"),
        ({"matmul": {"peak": 1, "half": [1, 1, 1], "m": 1}}, "the key 'm' of matmul is unknown"),
        ({"matmul": 5}, "matmul must be an object"),
        ({"attention": [0, 0]}, "attention=0 must"),
        ({"attention": [0.6]}, "attention must be a list of 2 numbers"),
        (
            {"tiers": [TIERS[0] | {"gb_per_s": -1}, TIERS[1]]},
            "tiers[0].gb_per_s=-1 must be a number from 1e-09 to 1e+06",
        ),
        ({"tiers": [TIERS[0] | {"gb_per_s": "450"}, TIERS[1]]}, "tiers[0].gb_per_s='450' must"),
        ({"tiers": [TIERS[0] | {"gb_per_s": math.inf}, TIERS[1]]}, "tiers[0].gb_per_s=inf must"),
        ({"tiers": [TIERS[0], TIERS[1] | {"reached": 0}]}, "tiers[1].reached=0 must"),
        (
            {"tiers": [TIERS[0], TIERS[1] | {"latency_us": 1e300}]},
            "tiers[1].latency_us=1e+300 must",
        ),
        ({"tiers": [TIERS[0], TIERS[1] | {"name": None}]}, "tiers[1].name=None must be a text"),
        (
            {"tiers": [TIERS[0] | {"devices": "8"}, TIERS[1]]},
            "tiers[0].devices='8' must be a whole number",
        ),
        ({"tiers": [TIERS[0] | {"devices": -1}, TIERS[1]]}, "tiers[0].devices=-1 must"),
        (
            {"tiers": [TIERS[0] | {"devices": 10**30}, TIERS[1]]},
            "must be a whole number up to 1,000,000,000",
        ),
        ({"tiers": [TIERS[0] | {"speed": 1}, TIERS[1]]}, "the key 'speed' of tiers[0] is unknown"),
        *(
            (
                {"tiers": [TIERS[0] | {"sides": sides}, TIERS[1]]},
                f"tiers[0].sides={sides!r} must be a whole number up to 3, and 0 for links that",
            )
            for sides in (4, -1, 2.0, True, "3", None)
        ),
        ({"tiers": [5]}, "tiers[0] must be an object"),
        (
            {"tiers": [TIERS[0], TIERS[0] | {"devices": 4}, TIERS[1]]},
            "tiers have devices 8, 4, 0, which must grow",
        ),
        ({"tiers": []}, "the last of tiers joins any number"),
        ({"sources": 5}, "sources must be a list"),
        ({"sources": [5]}, "sources=5 must be a text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_figures_that_cannot_be(tmp_path, changes, message):
    """The key that is wrong is named, and what is suggested instead is there."""
    path = tmp_path / "own.json"
    path.write_text(json.dumps(dataclasses.asdict(load("h100")) | changes))
    with pytest.raises(HardwareError) as error:
        load(str(path))
    assert message in error.value.rule and "\n" not in str(error.value) and not error.value.use


def test_the_limits_are_accepted(tmp_path):
    """Least and most of each figure, and a file of the least keys."""
    for at in (0, 1):
        changes = {key: limits[at] for key, limits in PLAIN.items()}
        own = from_json(dataclasses.asdict(load("h100")) | changes)
        assert all(getattr(own, key) == limits[at] for key, limits in PLAIN.items())
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"name": "own", "like": "h100", "memroy_gib": 5}))
    with pytest.raises(
        HardwareError, match="the key 'memroy_gib' is unknown, and 'memory_gib' is the nearest"
    ):
        load(str(path))


def test_a_pipe(tmp_path):
    """Nobody writes to it: who reads it waits for ever."""
    os.mkfifo(path := tmp_path / "own.json")
    with pytest.raises(HardwareError, match="is not a regular file$"):
        load(str(path))


def test_a_file_that_is_too_deep(tmp_path):
    (tmp_path / "own.json").write_text("[" * 100_000)
    with pytest.raises(HardwareError, match="does not describe a device"):
        load(str(tmp_path / "own.json"))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H-100", "h100"),
        ("A100", "a100-80gb"),
        ("NVIDIA H200", "h200"),
        ("v5p", "tpu-v5p"),
        ("v5", "tpu-v5p"),
        ("a100x", "a100-80gb"),
        ("L4-24GB", "l4"),
        ("", ""),
        ("table.csv", ""),
        ("2", ""),
    ],
)
def test_the_nearest_is_named_if_it_is_near(name, near):
    end = f"JSON file[)]: use --hardware={near}$" if near else "or a JSON file[)]$"
    with pytest.raises(HardwareError, match=end):
        load(name)


@pytest.mark.parametrize(
    ("kind", "name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 312),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 312),
        ("NVIDIA A800-SXM4-80GB", "a800", 312),
        ("NVIDIA A10G", "a10g", 70),
        ("NVIDIA A10", "a10", 125),
        ("NVIDIA H100 80GB HBM3", "h100", 989),
        ("NVIDIA H100 PCIe", "h100-pcie", 756),
        ("NVIDIA H100 NVL", "h100-nvl", 835),
        ("NVIDIA H800", "h800", 989),
        ("NVIDIA H20", "h20", 148),
        ("NVIDIA H200", "h200", 989),
        ("NVIDIA H200 NVL", "h200-nvl", 835),
        ("NVIDIA GH200 480GB", "gh200", 989),
        ("NVIDIA B200", "b200", 2250),
        ("NVIDIA GB200", "gb200", 2500),
        ("NVIDIA L4", "l4", 121),
        ("NVIDIA L40S", "l40s", 362),
        ("NVIDIA L40", "l40", 181),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 165.2),
        ("AMD Instinct MI300X", "mi300x", 1307),
        ("TPU v3", "tpu-v3", 61.5),
        ("TPU v4", "tpu-v4", 275),
        ("TPU v5 lite", "tpu-v5e", 197),
        ("TPU v5e", "tpu-v5e", 197),
        ("TPU v5p", "tpu-v5p", 459),
        ("TPU v5", "tpu-v5p", 459),
        ("TPU v6 lite", "tpu-v6e", 918),
        ("TPU v6e", "tpu-v6e", 918),
        ("TPU7x", "tpu-7x", 1153.5),
        ("cpu", None, 0),
        ("Some Future Chip", None, 0),
    ],
)
def test_kinds_by_the_names_that_jax_gives_them(kind, name, teraflops):
    """No name is that of two files."""
    matches = [
        file
        for file in known()
        if (pattern := load(file).device_kind) and re.search(pattern, kind, re.IGNORECASE)
    ]
    assert matches == ([name] if name else [])
    found = hardware.of_device(kind)
    assert (found and found.name) == name and (found is None or found.peak() == teraflops * 1e12)


def test_a_device_of_ironwood_is_half_of_a_chip():
    """Of 2,307 TFLOP/s in bfloat16, 4,614 in FP8, 192 GiB, 7,380 GB/s, 9,216 chips."""
    half = load("tpu-7x")
    assert (2 * half.peak(), 2 * half.peak("float8")) == (2307e12, 4614e12)
    assert (2 * half.memory_gib, 2 * half.memory_gb_per_s) == (192, 7380)
    chip, ici, _ = half.tiers
    assert chip.devices == 2 and ici.devices == 2 * 9216 and ici.sides == 3


def test_float32_runs_as_the_file_says():
    """As TF32 on NVIDIA GPUs, in six passes on TPUs."""
    peaks = [load(name).peak("float32") for name in ("a100-80gb", "tpu-v5p")]
    assert peaks == pytest.approx([156e12, 76.5e12])


def test_a_kind_that_is_like_another(tmp_path):
    """Has its figures but for its own, and neither its name for jax nor its sources."""
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"name": "own", "like": "h800", "memory_gib": 40}))
    own, h800 = load(str(path)), load("h800")
    assert own == dataclasses.replace(h800, name="own", memory_gib=40.0, device_kind="", sources=())
    assert (own.matmul, own.tiers[0].gb_per_s) == (load("h100").matmul, 200)
    for value, message in (
        ("h8000", "like='h8000' is no kind of device, and 'h800' is"),
        (5, "like=5 is no kind"),
    ):
        path.write_text(json.dumps({"name": "own", "like": value}))
        with pytest.raises(HardwareError, match=message):
            load(str(path))


def test_a_pattern_that_is_none(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"name": "own", "like": "h100", "device_kind": "("}))
    with pytest.raises(HardwareError, match="device_kind='\\(' must be a regular expression"):
        load(str(path))


def test_devices_that_share_cores_use_what_waiting_ones_leave():
    """Four devices' work on one core: stages that wait a third of the time cost nothing; what is
    longer than all the work remains."""
    shared = dataclasses.replace(hardware.load("h100"), alone=4.0)
    assert hardware.load("h100").waited(3.0, 2.0) == 2.0
    assert shared.waited(3.0, 2.0) == 0.0 and shared.waited(3.0, 13.0) == 1.0
    assert hardware.from_json(dataclasses.asdict(shared)) == shared
    with pytest.raises(ValueError, match="alone"):
        hardware.from_json(dataclasses.asdict(shared) | {"alone": 0.5})
