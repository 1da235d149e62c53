"""The time and memory of a training step on a kind of device, in closed form. No jax and no
Config."""
