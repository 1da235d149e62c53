"""Single-device Flax NNX transformers with logical axis names; nothing here knows about
parallelism."""
