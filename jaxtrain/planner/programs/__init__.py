"""Compiled steps, for devices that need not be here: read as text, and compared with their plan and
their traces."""
