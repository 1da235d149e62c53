"""The training step and what belongs to it: state, optimizer, evaluation, reports, recovery."""
