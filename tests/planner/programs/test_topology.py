"""Devices that are not there: texts that are understood, links that go round, and what is said of
others."""

import re

import pytest

from jaxtrain.config.errors import UsageError
from jaxtrain.planner.layer import hardware
from jaxtrain.planner.programs import topology
from jaxtrain.planner.programs.topology import PLATFORMS, fitting, parse


@pytest.mark.parametrize(
    ("text", "devices", "wrap"),
    [
        ("v5p:8x8x8", 512, (True, True, True)),
        ("V5P:4x4x12", 192, (True, True, True)),
        ("v5p:2x4x4", 32, (False, False, False)),
        ("v4:8x16x16", 2048, (True, True, True)),
        ("v5e:16x16", 256, (True, True, False)),
        ("v6e:4x16", 64, (False, True, False)),
        ("h100:128x8", 1024, (False, False, False)),
        ("h100:3x8", 24, (False, False, False)),
        ("h100:1x2", 2, (False, False, False)),
    ],
)
def test_a_topology(text, devices, wrap):
    found = parse(text)
    assert (found.text, found.devices, found.wrap) == (text.lower(), devices, wrap)


def test_arguments_for_the_compilers():
    """libtpu calls a v5p v5, and two cores of it one device; GPUs are slices, hosts, GPUs of a
    host."""
    tpu = parse("v5p:4x4x8").arguments()
    assert (tpu["topology_name"], tpu["wrap"], tpu["chip_config_name"]) == (
        "v5:4x4x8",
        (True,) * 3,
        "megacore",
    )
    assert "chip_config_name" not in parse("v5e:4x4").arguments()
    gpu = parse("h100:384x8").arguments()
    assert gpu["topology"] == "1x384x8" and "H100" in gpu["target_config"]
    assert (topology.REPOSITORY / topology.REQUIREMENTS).exists()  # whatever the current folder


def test_xla_compiles_for_the_memory_that_plans_count_with():
    """Without an allocator it takes 80 % of the memory for its limit."""
    for gpu in (platform for platform in PLATFORMS.values() if platform.backend == "gpu"):
        target = parse(f"{gpu.name}:1x8").arguments()["target_config"]
        (memory,) = re.findall(r"device_memory_size: (\d+)", target)
        assert int(memory) * 80 // 100 == pytest.approx(hardware.load(gpu.hardware).memory, abs=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "v5x:4x4x4",
            "is none of v4:AxBxC, v5p:AxBxC, v5e:AxB, v6e:AxB, h100:NODESx8: use "
            "--topology=v5p:4x4x4",
        ),
        ("h200:8x8", "use --topology=h100:8x8"),
        ("", "use --topology=v5p:4x4x4"),
        ("v5p:8x8", "is not written as v5p:AxBxC: use --topology=v5p:4x4x4"),
        ("v5p:8x8x", "is not written as v5p:AxBxC"),
        ("v5p:-8x8x8", "is not written as v5p:AxBxC"),
        ("v5p:3x4x4", "the first two dimensions are even"),
        ("v5p:64x64x64", "at most 8960 chips"),
        ("v5e:16x32", "use --topology=v5e:16x16"),
        ("h100:0x8", "use --topology=h100:1x8"),
        ("h100:4x6", "8 in each of several): use --topology=h100:4x8"),
    ],
)
def test_what_is_none_names_the_nearest(text, says):
    with pytest.raises(UsageError, match="--topology=") as error:
        parse(text)
    line = str(error.value)
    assert says in line and "\n" not in line
    assert parse(line.rpartition("--topology=")[2])


@pytest.mark.parametrize(
    ("name", "devices", "text"),
    [
        ("v5p", 16, "v5p:2x2x4"),
        ("v5p", 64, "v5p:4x4x4"),
        ("v5p", 256, "v5p:4x8x8"),
        ("v5p", 2048, "v5p:8x16x16"),
        ("v5e", 64, "v5e:8x8"),
        ("v6e", 32, "v6e:4x8"),
        ("h100", 1, "h100:1x1"),
        ("h100", 3072, "h100:384x8"),
    ],
)
def test_a_topology_of_so_many_devices(name, devices, text):
    assert fitting(name, devices).text == text


@pytest.mark.parametrize(("name", "devices"), [("v5p", 6), ("v5e", 512), ("h100", 12)])
def test_a_number_that_no_topology_has(name, devices):
    with pytest.raises(UsageError, match=f"no {name} topology has {devices} devices"):
        fitting(name, devices)


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=lambda platform: platform.name)
def test_a_platform_is_known_elsewhere(platform):
    """To the planner, by the name that jax gives its devices too."""
    kind = hardware.load(platform.hardware)
    assert kind.memory > 0 and hardware.of_device(platform.device_kind) == kind


def test_compilers_are_looked_for_in_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTRAIN_COMPILERS", str(tmp_path))
    monkeypatch.setattr(topology.sys, "path", [])
    assert (
        topology.compilers() == tmp_path and PLATFORMS["v5p"].missing and PLATFORMS["h100"].missing
    )
    (tmp_path / "libtpu-9.9.dist-info").mkdir()
    (tmp_path / "libtpu-9.9.dist-info" / "METADATA").write_text("Name: libtpu\nVersion: 9.9\n")
    assert (
        not PLATFORMS["v5p"].missing
        and PLATFORMS["v5p"].version == "9.9"
        and PLATFORMS["h100"].missing
    )
