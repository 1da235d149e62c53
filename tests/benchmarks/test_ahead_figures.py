"""What the compilers for TPU v5p and H100 make of a step may not get worse: figures of small cases,
each with a bound.

A bound with "today" beside it is what the program is, not what it should be: whoever makes it
better lowers it. For --full; benchmarks/ahead.py prints the same figures of the real recipes.
"""

import functools
from typing import Any

import pytest
from ahead_figures import PLAIN, as_dict
from step_seconds import StepSeconds
from support.compilers import needs

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.config.rules import checks
from jaxtrain.planner.programs.topology import PLATFORMS, compile_config, fitting

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
ONE_STAGE = {
    "mesh.data": 16,
    "mesh.stage": 1,
    "mesh.model": 1,
    "pipeline.microbatches": 1,
    "data.batch_size": 16,
    "parallel.zero": 3,
}
STAGES = {
    "mesh.stage": 4,
    "pipeline.schedule": "interleaved",
    "pipeline.repeats": 2,
    "pipeline.microbatches": 8,
}
STAGES |= {"pipeline.permute": "early", "parallel.zero": 1}
CASES = {
    "zero3": ONE_STAGE,
    "pipeline": STAGES | {"mesh.data": 4, "mesh.model": 1, "data.batch_size": 32},
    "pipeline, model": STAGES | {"mesh.data": 2, "mesh.model": 2, "data.batch_size": 16},
}


@functools.cache
def figures(platform: str, case: str) -> dict[str, Any]:
    backend = PLATFORMS[platform].backend
    config = checks.check_devices(
        configs.replace(Config(), MODEL | CASES[case]), DEVICES, backend
    ).resolve()
    return as_dict(
        StepSeconds(config, platform, compile_config(fitting(platform, DEVICES), config))
    )


# (platform, case) → figure → the most that it may be:
#   products      operations of products and kernels over the plan
#   gigabytes     of temporary memory
#   milliseconds  of the busiest stage
#   copies        their part of these
#   square        kinds of arrays of T × T
#   exposed       gigabytes of collectives without products beside them
#   plain         1 for attention without a kernel
BOUNDS: dict[tuple[str, str], dict[str, float]] = {
    ("v5p", "zero3"): {
        "products": 1.06,  # rotary positions are products, too
        "gigabytes": 1.65,
        "milliseconds": 58,
        # today: queries, keys and values before the kernel, tokens first to heads first
        "copies": 0.022,
        "square": 0,
        "exposed": 3.4,  # today: no gather is asynchronous, gradients are summed in float32
        "plain": 0,
    },
    ("h100", "zero3"): {
        "products": 1.01,
        # two layers' gathered parameters, and the gradients of one that wait for their reduction
        "gigabytes": 1.5,
        "milliseconds": 31,
        "copies": 0.004,
        "square": 0,
        "exposed": 0.5,  # the last layer's gradients
        "plain": 0,
    },
    ("h100", "pipeline"): {
        "products": 1.01,
        "gigabytes": 1.7,
        "milliseconds": 67,
        "copies": 0.004,
        "square": 0,
        # what stands after the last tick, and the vocabulary's sums over stages; permutes are
        # beside the ops
        "exposed": 1.6,
        "plain": 0,
    },
}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The figures that have bounds."""
    return {
        "products": found["flops"]["ratio"],
        "gigabytes": found["memory"]["temporary"] / 1e9,
        "milliseconds": 1000 * found["seconds"]["busy"],
        "copies": found["copies"]["share"],
        "square": len(found["square_arrays"]),
        "exposed": sum(traffic["bytes"] - traffic["hidden"] for traffic in found["collectives"])
        / 1e9,
        "plain": found["attention"] == PLAIN,
    }


@pytest.mark.parametrize(
    ("platform", "case"), [pytest.param(*key, marks=needs(key[0])) for key in BOUNDS]
)
def test_no_figure_falls_back(platform, case):
    found, bounds = summary(figures(platform, case)), BOUNDS[platform, case]
    print(platform, case, {name: round(value, 4) for name, value in found.items()})
    assert found.keys() == bounds.keys()
    assert {name: value for name, value in found.items() if value > bounds[name]} == {}
