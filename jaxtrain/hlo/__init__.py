"""Reads compiled programs of a step, for devices that need not be there, and traces of runs."""
