"""The planner: what a step costs, before it runs."""
