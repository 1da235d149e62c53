"""The cases of benchmarks/gpu.py compiled for one H100, without it: each fits its memory, with
nothing of T × T elements in it."""

import gpu
import gpu_cases
import pytest
from ahead_figures import square_arrays
from gpu_cases import CASES
from step_seconds import StepSeconds
from support.compilers import compiled_for

from jaxtrain.planner.programs.topology import compile_config, fitting

H100 = 81_559 * 2**20  # bytes of an "80 GB" H100, as its driver counts them


@compiled_for("h100")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_fits_one_gpu(platform, case):
    config = gpu_cases.config_of(case, tiny=False)
    compiled = compile_config(fitting(platform, 1), config)
    memory = compiled.total
    assert memory < float(gpu.DEFAULTS["XLA_PYTHON_CLIENT_MEM_FRACTION"]) * H100
    # A model whose width is its sequences' length has matrices of that shape, too.
    assert config.data.sequence_length == config.model.width or not square_arrays(
        StepSeconds(config, platform, compiled)
    )
