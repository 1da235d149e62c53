"""Sources that lie in object stores: listed, streamed, or read in place by ranges. No jax."""
