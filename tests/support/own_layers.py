"""Layers as a user writes them, which tests copy to a folder of their own: they know nothing of
meshes, stages or ops."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import product


class Mixer(nnx.Module):
    """Two matrices, a gate, a norm and a cumulative sum."""

    def __init__(self, width, *, rngs, inner: int = 48):
        init = nnx.initializers.lecun_normal()
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (width, inner)), axes=("width", "mlp"))
        self.gate = nnx.Param(init(rngs.params(), (width, inner)), axes=("width", "mlp"))
        self.decay = nnx.Param(jnp.linspace(0.1, 2, inner), axes=("mlp",))
        self.scale = nnx.Param(jnp.ones(()))
        self.down = nnx.Param(init(rngs.params(), (inner, width)), axes=("mlp", "width"))
        self.periods = jnp.arange(1.0, inner + 1)

    def __call__(self, x, positions, segments):
        y = self.norm(x)
        gate = jax.nn.silu(y @ self.gate)
        sums = jnp.cumsum(y @ self.up * self.decay[...], 1) / (1 + positions[..., None])
        y = x + self.scale * ((sums / self.periods * gate) @ self.down)
        return y.astype(x.dtype)


class Scanned(nnx.Module):
    """A recurrence from token to token."""

    def __init__(self, width, *, rngs):
        self.inputs = nnx.Linear(width, 2 * width, rngs=rngs)
        self.recurrent = nnx.Param(0.1 * jax.random.normal(rngs.params(), (width, width)))

    def __call__(self, x, positions, segments):
        a, b = jnp.split(self.inputs(x), 2, -1)

        def step(h, token):
            a, b = token
            h = a * h + (1 - a) * jnp.tanh(b + h @ self.recurrent[...])
            return h, h

        tokens = jax.nn.sigmoid(a).swapaxes(0, 1), b.swapaxes(0, 1)
        return x + jax.lax.scan(step, jnp.zeros_like(x[:, 0]), tokens)[1].swapaxes(0, 1)


class Shifted(nnx.Module):
    """Work along dimensions that `mesh.model` splits: cuts, shifts, joins. It has shared
    parameters, a list of modules, an array that is no parameter, `jax.checkpoint`, and names of
    axes in flax's own forms."""

    def __init__(self, width, *, rngs, inner: int = 32):
        init, names = nnx.initializers.lecun_normal(), ("width", "mlp")
        self.fused = nnx.Param(
            nnx.with_partitioning(init, names)(rngs.params(), (width, 3 * inner))
        )
        self.conv = nnx.Param(init(rngs.params(), (4, inner)), out_sharding=(None, "mlp"))
        self.layers = nnx.List([nnx.Linear(inner, inner, rngs=rngs) for _ in range(2)])
        heads = init(rngs.params(), (8, inner // 8, width))
        self.heads = nnx.Param(heads, axes=("heads", None, "width"))
        self.shared, self.norm = self.fused, nnx.LayerNorm(width, rngs=rngs)
        self.table = nnx.Variable(jnp.sin(jnp.arange(64.0)))

    def __call__(self, x, positions, segments):
        batch, tokens, _ = x.shape
        q, k, v = jnp.split(self.norm(x) @ self.fused[...], 3, -1)
        shifted = lambda i: jnp.pad(v, ((0, 0), (i, 0), (0, 0)))[:, :tokens]
        v = jax.nn.relu(sum(shifted(i) * self.conv[i] for i in range(4)))
        heads = lambda a: a.reshape(batch, tokens, 8, -1)

        @jax.checkpoint
        def attend(q, k, v):
            scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
            seen = positions[:, None, :, None] >= positions[:, None, None, :]
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), -1)
            return jnp.einsum("bnts,bsnh->btnh", weights, v)

        y = attend(heads(q), heads(k), heads(v)) * self.table[...][positions][..., None, None]
        z = jax.lax.associative_scan(jnp.add, y, axis=1) / (1 + positions[..., None, None])
        for layer in self.layers:
            z = z + jax.nn.gelu(layer(z.reshape(batch, tokens, -1))).reshape(z.shape)
        z = jnp.concatenate([z[..., 1:], z[..., :1]], -1) + jnp.roll(z, 1, 2)[:, :, ::-1]
        return x + jnp.einsum("btnh,nhd->btd", z, self.heads[...])


class Products(nnx.Module):
    """Marked products, split by columns, by rows and not at all."""

    def __init__(self, width, *, rngs):
        init = nnx.initializers.lecun_normal()
        weight = lambda rows, columns, axes: nnx.Param(
            init(rngs.params(), (rows, columns)), axes=axes, product=True
        )
        self.up = weight(width, 64, ("width", "mlp"))
        self.down = weight(64, width, ("mlp", "width"))
        self.mix = weight(width, width, ("width", "width"))

    def __call__(self, x, positions, segments):
        hidden = product(x, self.up)
        return x + product(product(jax.nn.silu(hidden), self.down), self.mix)


# settings of a model, by name
LAYERS = {
    **{name: {"model.block": f"{{}}:{name}"} for name in ("Mixer", "Scanned", "Shifted")},
    "mixer": {"model.mixer": "{}:Mixer"},
    "Products": {"model.block": "{}:Products"},
    "mamba2": {
        "model.block": "configs/layers/mamba2.py:Mamba2",
        "model.block_settings": ("heads=4", "head_dim=8", "state=8", "chunk=8"),
    },
    "deltanet": {
        "model.mixer": "configs/layers/gated_deltanet.py:GatedDeltaNet",
        "model.block_settings": (
            *("key_heads=2", "value_heads=4", "key_dim=8", "value_dim=8", "chunk=8"),
        ),
    },
}


def settings(name: str, folder: pathlib.Path) -> dict:
    """The settings of a layer of LAYERS, whose file is copied to a folder outside of the
    package."""
    file = folder / "mine.py"
    if not file.exists():
        shutil.copyfile(__file__, file)
    fill = lambda value: value.format(file) if isinstance(value, str) else value
    return {path: fill(value) for path, value in LAYERS[name].items()}
