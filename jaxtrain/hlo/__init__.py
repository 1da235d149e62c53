"""Reads the text of compiled steps, and traces of runs."""
