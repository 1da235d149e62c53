"""Pipeline schedules as tables, and the one runtime that executes them."""
