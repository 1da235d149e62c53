"""Published models, which are folders of config.json and safetensors, to checkpoints and back."""
