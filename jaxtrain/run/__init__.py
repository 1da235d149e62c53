"""The surroundings of a run's steps: its folder's lock, signals, metrics, progress. Without jax."""
