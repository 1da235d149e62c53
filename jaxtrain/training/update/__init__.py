"""The update of the parameters: the optimizer, what it streams from the host or a disk, rounding,
the exchange of independent replicas, the balance of experts."""
