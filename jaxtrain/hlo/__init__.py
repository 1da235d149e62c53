"""Compiled programs of a step, made for devices that need not be there, and traces of their runs: read and counted."""
