"""Bytes of the numbers that a step computes with."""

ITEM = 2  # bytes of a number in 16 bits


def bytes_of(dtype: str) -> int:
    """Bytes of a number of a type as a config names it."""
    return 2 * ITEM if dtype == "float32" else ITEM
