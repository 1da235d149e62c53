"""Schedules from CSV files: orders of ops for each stage, and tables. No jax."""
