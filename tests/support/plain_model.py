"""A model with random weights as generation uses it: without stages, and made without compiling
anything."""

import jax
import numpy as np

from jaxtrain.config import Config
from jaxtrain.config.groups.layer_kinds import forms_of_layers
from jaxtrain.devices.sharding import named
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.models.transformer import ModelParts, build
from support import small


def plain_model(cfg: Config) -> tuple[ModelParts, dict]:
    """(parts, {"embed", "layers" (leaves [L, ...]), "head", …}) on the config's mesh, over `model`;
    weights do not depend on it."""
    mesh, random = small.mesh_of(cfg), np.random.default_rng(0)
    parts = build(cfg.model, cfg.mesh.model)

    def leaf(s: Spec, lead: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
        value = (
            random.normal(size=(*lead, *s.shape)) * s.std
            if s.std
            else np.full((*lead, *s.shape), s.constant)
        )
        padding = [(0, 0)] * len(lead) + [
            (0, full - n) for full, n in zip(s.padded, s.shape, strict=True)
        ]
        return jax.device_put(
            np.pad(value, padding).astype(np.float32), named(mesh, (*axes, *s.axes))
        )

    def layers(specs: dict, number: int) -> dict:
        return jax.tree.map(lambda s: leaf(s, (number,), ("layer",)), specs, is_leaf=is_spec)

    params = {
        name: jax.tree.map(lambda s: leaf(s, (), ()), specs, is_leaf=is_spec)
        for name, specs in parts.ends.items()
    }
    of_layer, forms = parts.specs["layer"], forms_of_layers(cfg.model)
    if forms:
        stacks = {form: layers(specs, forms.count(form)) for form, specs in of_layer.items()}
        return parts, params | {"layers": stacks}
    return parts, params | {"layers": layers(of_layer, cfg.model.layers)}
