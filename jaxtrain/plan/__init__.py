"""The planner: the time and memory of a run before it runs, and the best layout."""
