"""What surrounds a run's steps: the lock of its folder, signals, metrics, progress. Without jax."""
