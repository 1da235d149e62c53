"""The training step: loss, optimizer, state, step."""
