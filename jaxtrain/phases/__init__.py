"""A run before and after its loop: op times and tables, the first state, what a start says, and how
a run ends. loop.py calls these in order."""
