"""The assumed speed of a collective's links."""

import pytest
from links import bytes_per_s

from jaxtrain.planner.layer import hardware
from jaxtrain.planner.programs.compiled_collectives import CompiledCollective
from jaxtrain.planner.programs.program import Program

MESH = {"data": 4, "stage": 2, "model": 8}


def collective(kind: str, axes: tuple[str, ...], devices: int) -> CompiledCollective:
    program = Program("ENTRY %e (a: f32[4]) -> f32[4] {\n  %a = f32[4]{0} parameter(0)\n}\n")
    return CompiledCollective(program.named["a"], kind, "f32", axes, devices, 1.0, 1.0)


@pytest.mark.parametrize(
    ("devices", "speed"), [(64, 540), (16, 360), (8, 270), (4, 180), (2, 90), (1, 90)]
)
def test_rings_of_a_torus(devices, speed):
    v5p = hardware.load("tpu-v5p")
    found = bytes_per_s(v5p, MESH, collective("all-gather", ("data",), devices))
    assert found == pytest.approx(1e9 * speed)


def test_a_permute_has_one_link():
    v5p = hardware.load("tpu-v5p")
    assert bytes_per_s(v5p, MESH, collective("collective-permute", ("data",), 64)) == 90e9


def test_gpus_of_a_node_and_of_several():
    h100 = hardware.load("h100")
    of = lambda *axes: bytes_per_s(h100, MESH, collective("all-gather", axes, 8))
    assert of("model") == 450e9 and of("stage") == of("data", "model") == 50e9
