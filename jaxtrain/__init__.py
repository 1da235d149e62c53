"""jaxtrain: a sharding-based SPMD trainer for transformers in JAX. Start reading at
docs/architecture.md."""

import time

# of a command: nothing is imported before this but what Python itself needs
BEGAN = time.monotonic()

__version__ = "0.1.0"
