"""What operations and collectives cost on a kind of device, in closed form. No jax."""
