"""Text from a model: prefill, decoding with a cache, sampling."""
