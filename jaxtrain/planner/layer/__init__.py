"""What a layer of a model has, computes and sends, and the devices and links that do it."""
