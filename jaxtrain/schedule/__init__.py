"""What each stage does in each tick: orders of ops, their packing into a table, slots, clocks,
search, drawings. Without jax."""
