"""XLA's options: each platform's own, and what a config changes; they reach the compiler with the
step's programs."""

import dataclasses

import jax
import pytest
from support import small

from jaxtrain import config as configs
from jaxtrain.devices.compiler_options import (
    DENSE,
    FP8,
    GATHERS,
    GATHERS_WHOLE,
    PLATFORMS,
    SIDE_BY_SIDE,
    compiler_options,
)
from jaxtrain.training import step as training_step
from jaxtrain.training.step import make_step


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    device_kind: str = ""


def test_by_platform_and_generation():
    assert compiler_options(Device("cpu"), [GATHERS]) == {}
    assert compiler_options(Device("cuda")) == compiler_options(Device("gpu", "NVIDIA H100")) != {}
    v5p, v4 = (compiler_options(Device("tpu", kind)) for kind in ("TPU v5", "TPU v4"))
    # v4 has not so much
    assert (
        v5p["xla_tpu_scoped_vmem_limit_kib"] == 32768 and "xla_tpu_scoped_vmem_limit_kib" not in v4
    )
    zero3 = compiler_options(Device("tpu", "TPU v5"), [GATHERS, GATHERS_WHOLE])
    assert zero3["xla_tpu_scoped_vmem_limit_kib"] == 65536
    assert compiler_options(Device("tpu", "TPU v5"), [GATHERS]) == v5p
    gathering = (
        compiler_options(Device("gpu"), [GATHERS]).keys() - compiler_options(Device("gpu")).keys()
    )
    # it would make two ticks of each of a pipeline's
    twice, early = (
        "xla_gpu_enable_while_loop_double_buffering",
        "xla_gpu_experimental_collective_start_as_early_as_possible",
    )
    assert {twice, early} <= gathering
    side_by_side = compiler_options(Device("gpu"), [SIDE_BY_SIDE])
    assert side_by_side[early] is True and twice not in side_by_side
    triton = "xla_gpu_enable_triton_gemm"
    dense, fp8, experts = (compiler_options(Device("gpu"), does) for does in ([DENSE], [FP8], []))
    assert dense[triton] is fp8[triton] is False and triton not in experts
    assert all(option.reason for options in PLATFORMS.values() for option in options)


SUMS, GATHERED = ("TPU v5", "TPU v6 lite"), ("TPU v6 lite",)


@pytest.mark.parametrize(
    ("kind", "generations"),
    [("reduce_scatter", SUMS), ("all_reduce", SUMS), ("all_gather", GATHERED)],
)
def test_collectives_on_the_sparse_cores(kind, generations):
    """One flag away from off: no chip has confirmed it."""
    name = f"xla_tpu_enable_sparse_core_collective_offload_{kind}"
    for generation in ("TPU v4", "TPU v5", "TPU v5 lite", "TPU v6 lite", "TPU7x"):
        device = Device("tpu", generation)
        assert compiler_options(device).get(name, False) == (generation in generations)
        assert compiler_options(device, (), [f"{name}=false"])[name] is False


def test_changes_come_last_and_have_types():
    changes = (
        "xla_gpu_experimental_parallel_collective_overlap_limit=1",
        "xla_a=False",
        "xla_b=0.5",
        "xla_c=x=y",
    )
    got = compiler_options(Device("gpu"), (), changes)
    assert (
        got["xla_gpu_experimental_parallel_collective_overlap_limit"] == 1
        and got["xla_gpu_enable_latency_hiding_scheduler"] is True
    )
    assert (got["xla_a"], got["xla_b"], got["xla_c"]) == (False, 0.5, "x=y")


@pytest.mark.parametrize("model", [{}, {"model.experts": 4}])
def test_products_of_dense_layers(monkeypatch, model):
    """A step tells whether it has experts."""
    told: list[list[str]] = []
    monkeypatch.setattr(
        training_step, "compiler_options", lambda device, does, changes: told.append(does) or {}
    )
    cfg = configs.replace(small.config(), model).resolve()
    make_step(cfg, small.mesh_of(cfg))
    assert (DENSE in told[0]) == (not model)


def test_they_reach_the_compiler():
    cfg = configs.replace(small.config(), {"parallel.compiler_options": ("xla_no_such_option=1",)})
    step = make_step(cfg, small.mesh_of(cfg))
    with (
        jax.set_mesh(step.mesh),
        pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"),
    ):
        step.evaluate.lower(step.abstract_state().params, step.abstract_batch).compile()
