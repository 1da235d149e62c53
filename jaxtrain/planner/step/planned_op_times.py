"""What rooms of the trainer ask the planner for: a config's op times on a kind of device, and the
sizes of a model by which other times follow. No jax."""

from jaxtrain.config import ResolvedConfig
from jaxtrain.planner.layer.hardware import Hardware, HardwareError, load
from jaxtrain.planner.layer.model import Model, model_of
from jaxtrain.planner.step.step_model import (
    hardware_at_hand,
    milliseconds,
    step_model_of,
)

__all__ = [
    "HardwareError",
    "Model",
    "hardware_at_hand",
    "load",
    "milliseconds",
    "model_of",
    "op_times",
]


def op_times(config: ResolvedConfig, hardware: Hardware) -> tuple[float, ...]:
    """The planned op times of a config, in ms, as `pipeline.times` takes them."""
    return milliseconds(step_model_of(config, hardware).op_times())
