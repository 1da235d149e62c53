"""jaxtrain: a sharding-based SPMD trainer for transformers in JAX. Start reading at
docs/architecture.md; docs/python.md shows what a Python program or a notebook does with these
names.

A name is imported when it is first used, and jax when something is run: until then its devices
and XLA's flags can be chosen.
"""

import importlib
import time
from typing import TYPE_CHECKING, Any

# of a command: nothing is imported before this but what Python itself needs
BEGAN = time.monotonic()

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxtrain.api import CompiledStep, RunResult, generate, make_step, plan, train
    from jaxtrain.config import (
        CheckpointConfig,
        Config,
        ConfigError,
        DataConfig,
        MeshConfig,
        MetricsConfig,
        ModelConfig,
        OptimizerConfig,
        ParallelConfig,
        PipelineConfig,
        PrecisionConfig,
        TrainConfig,
        fields,
        replace,
    )
    from jaxtrain.config.recipes import find_recipe, load_recipe
    from jaxtrain.models.own_module import product
    from jaxtrain.run.exit_status import ExitStatus, RunError

# modules that have the public names, the fastest to import first
HOMES = (
    "jaxtrain.config",
    "jaxtrain.config.recipes",
    "jaxtrain.run.exit_status",
    "jaxtrain.api",
    "jaxtrain.models.own_module",
)
__all__ = [
    "CheckpointConfig",
    "CompiledStep",
    "Config",
    "ConfigError",
    "DataConfig",
    "ExitStatus",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RunError",
    "RunResult",
    "TrainConfig",
    "fields",
    "find_recipe",
    "generate",
    "load_recipe",
    "make_step",
    "plan",
    "product",
    "replace",
    "train",
]


def __getattr__(name: str) -> Any:
    """A public name, of the first of HOMES that has it, which is imported now."""
    if name in __all__:
        for home in map(importlib.import_module, HOMES):
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
