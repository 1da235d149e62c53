"""Experts: routing, the collectives between their devices, and products over groups of rows."""
