"""Full recomputation from each layer's own input (`pipeline.save=layer_input`): the gradients of
one plain loop, and what R leaves out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.models import transformer
from jaxtrain.runtime.backward_split import LayerOp, LayerSplit

SAVES = {"pipeline.remat": "full", "pipeline.save": ("layer_input",), "model.layers": 7}
EXPERTS = {"model.experts": 4, "model.expert_width": 16, "mesh.expert": 2}
CASES = {
    "1f1b": Case((2, 2, 1), changes=SAVES),
    "interleaved, model": Case((1, 2, 2), "interleaved", 2, 4, SAVES),
    "gpipe, the last unit too": Case((1, 3, 1), "gpipe", 2, 5, SAVES),
    "zb_h1, k of n, ZeRO-3": Case(
        (2, 2, 1), "zb_h1", 1, 4, SAVES | {"pipeline.remat": "full:2", "parallel.zero": 3}
    ),
    "zb_v, experts": Case((1, 2, 1), "zb_v", 2, 4, SAVES | EXPERTS),
    "dualpipe_v, overlapped": Case(
        (1, 2, 1), "dualpipe_v", 2, 5, SAVES | EXPERTS | {"pipeline.overlap": True}
    ),
    "context": Case((1, 2, 1), changes=SAVES | {"mesh.context": 2}),
    "units of a chunk": Case((1, 2, 1), "zb_h2", 1, 4, SAVES | {"pipeline.layers_per_op": 2}),
    "offloaded": Case((1, 2, 1), changes=SAVES | {"parallel.offload": "activations"}),
    "auto": Case((1, 4, 1), "auto", 1, 4, SAVES),
}
ALWAYS = ["zb_h1, k of n, ZeRO-3"]


@pytest.mark.parametrize(
    "name", small.named(ALWAYS, [name for name in CASES if name not in ALWAYS])
)
def test_gradients(name):
    config = CASES[name].config()
    assert_same(gradients(config), reference(config, 1))


@pytest.mark.full
def test_fp8_rounds_as_without():
    """R makes again in FP8 what F made."""
    fp8 = {"precision.matmul": "fp8", "model.layers": 7}
    cases = (Case((1, 2, 1), "zb_h1", 1, 4, changes) for changes in (SAVES | fp8, fp8))
    assert_same(*(gradients(case.config()) for case in cases))


@pytest.mark.parametrize("changes", [{}, {"model.experts": 4, "model.expert_width": 16}])
def test_r_makes_no_output(changes):
    """The residuals are those of F, and the layer's last product is not among the products."""
    cfg = small.config(changes=changes).model
    parts = transformer.build(cfg)
    random = np.random.default_rng(0)
    some = lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    params = jax.tree.map(lambda s: some(s.shape), parts.specs["layer"])
    x, extra = some((2, 16, cfg.width)), (jnp.arange(16, dtype=jnp.int32)[None], None)
    layer = lambda params, x, extra: parts.block(params)(x, *extra)
    with jax.set_mesh(small.mesh_of(small.config())):
        split = LayerSplit(layer, params, x, extra)
        ops = [jax.jit(split.output_and_residuals), jax.jit(split.residuals_of)]
        texts = [op.lower(params, x, extra).compile().as_text() for op in ops]
        (_, of_f), of_r = (op(params, x, extra) for op in ops)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), of_f, of_r)
    in_f, in_r = (len(re.findall(r" dot\(", text)) for text in texts)
    assert in_f - in_r == 1
    unread = jax.tree.map(
        lambda f, r: f and not r, split.reads(LayerOp.FORWARD), split.reads(LayerOp.RECOMPUTE)
    )
    (path,) = (path for path, one in jax.tree.leaves_with_path(unread) if one)
    assert "down" in jax.tree_util.keystr(path)
