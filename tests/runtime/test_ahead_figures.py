"""What the compilers for TPU v5p and H100 make of a step may not get worse: figures of small cases, each with a bound.

A bound with "today" beside it is what the program is, not what it should be: whoever makes it better lowers it. For --full;
benchmarks/ahead.py prints the same figures of the real recipes.
"""

import functools
from typing import Any

from support import ahead
from support.step_figures import StepFigures

from jaxtrain import config as configs
from jaxtrain.config import Config, checks

DEVICES = 16
MODEL = {
    "model.layers": 8,
    "model.width": 2048,
    "model.heads": 16,
    "model.kv_heads": 4,
    "model.mlp_width": 5632,
    "model.vocab_size": 32768,
    "data.sequence_length": 4096,
    "data.attend_across_documents": False,
    "pipeline.remat": "full",
    "precision.compute": "bfloat16",
}
ONE_STAGE = {"mesh.data": 16, "mesh.stage": 1, "mesh.model": 1, "pipeline.microbatches": 1, "data.batch_size": 16, "parallel.zero": 3}
STAGES = {"mesh.stage": 4, "pipeline.schedule": "interleaved", "pipeline.repeats": 2, "pipeline.microbatches": 8}
STAGES |= {"pipeline.permute": "early", "parallel.zero": 1}
CASES = {
    "zero3": ONE_STAGE,
    "pipeline": STAGES | {"mesh.data": 4, "mesh.model": 1, "data.batch_size": 32},
    "pipeline, model": STAGES | {"mesh.data": 2, "mesh.model": 2, "data.batch_size": 16},
}


@functools.cache
def figures(platform: str, case: str) -> dict[str, Any]:
    backend = ahead.PLATFORMS[platform].backend
    kernel = {"model.attention_kernel": "cudnn"} if backend == "gpu" else {}
    config = checks.check_devices(configs.replace(Config(), MODEL | CASES[case] | kernel), DEVICES, backend).resolve()
    return StepFigures(config, platform, ahead.compile_config(platform, config, DEVICES, program="train")).as_dict()
