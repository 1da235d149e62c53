"""From a config to its step: tables, placement, op times, and the model of its cost. No jax."""
