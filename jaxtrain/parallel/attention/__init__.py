"""Attention: the choice of a kernel, the kernels, and a sequence split over `context`."""
