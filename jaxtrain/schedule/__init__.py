"""Pipeline schedules: orders of ops, their packing into a table, slots, clocks, search, drawings.
Without jax."""
