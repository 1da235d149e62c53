"""The ops of the layers of a unit: one layer cut into F, R, B and W, loops over layers, two units
at once, and the bytes that layers save."""
