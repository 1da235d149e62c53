"""The kind of device is known by its name and by jax's name of it."""

from jaxtrain.planner.layer.hardware import known, load, of_device

assert "h300" in known() and of_device("NVIDIA H300") == load("h300")
assert load("h300").memory > load("h200").memory
