"""A model with random weights as generation uses it: without stages, and made without compiling
anything."""

import jax
import numpy as np

from jaxtrain.config import Config
from jaxtrain.devices.sharding import named
from jaxtrain.models.spec import Spec
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

    def tree(name: str, lead: tuple[int, ...] = (), axes: tuple[str, ...] = ()) -> dict:
        return jax.tree.map(
            lambda s: leaf(s, lead, axes), parts.specs[name], is_leaf=lambda x: isinstance(x, Spec)
        )

    return parts, {name: tree(name) for name in parts.ends} | {
        "layers": tree("layer", (cfg.model.layers,), ("layer",))
    }
