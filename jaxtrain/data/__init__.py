"""Text → tokens → sequences → sharded batches."""
