"""What a training step costs on a kind of device, by the layers that its model has."""
