"""jaxtrain: a sharding-based SPMD trainer for transformers in JAX. Start reading at docs/architecture.md."""

__version__ = "0.1.0"
