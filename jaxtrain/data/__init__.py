"""Text to tokens to rows to sharded batches."""
