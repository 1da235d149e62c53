"""Checkpoints that are independent of the layout that wrote them."""
