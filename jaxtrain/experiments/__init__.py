"""Runs side by side: sweeps, comparisons, pages, trackers."""
