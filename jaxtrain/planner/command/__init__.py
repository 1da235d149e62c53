"""The command `python -m jaxtrain.plan`, its picture, and the measurement of devices."""
