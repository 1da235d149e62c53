"""A layer's backward split from its forward: the same results as jax.vjp, and what crosses between
the two."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P
from support import small
from support.small import nbytes, normal

from jaxtrain.config.kernels import TargetDevice
from jaxtrain.devices.mesh import AXES, make_mesh
from jaxtrain.models import grouped_query, rotary, transformer
from jaxtrain.parallel.attention import blockwise, causal
from jaxtrain.runtime.layers.backward_split import (
    LayerOp,
    LayerSplit,
    keep_everything,
    keep_products,
)
from jaxtrain.runtime.layers.equations import inside

BATCH, LENGTH, WIDTH = 2, 12, 32


def mlp(params, x, extra):
    (scale,) = extra
    return x + jnp.tanh(x @ params["up"]) @ params["down"] * scale


def scanned(params, x, extra):
    """A loop inside the layer, over both matrices stacked."""
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])[0] * extra[0]


def checkpointed(params, x, extra):
    return jax.checkpoint(functools.partial(mlp, extra=extra))(params, x)


@jax.custom_vjp
def straight_through(x):
    """Rounds; the gradient passes, doubled, so that it tells its own rule from a derivative."""
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (2 * g,))


def custom(params, x, extra):
    return straight_through(mlp(params, x, extra) * 3) / 3


def ignoring(params, x, extra):
    """One parameter has no gradient, one extra is not used."""
    return x * params["up"].sum()


def jitted(params, x, extra):
    return jax.jit(functools.partial(mlp, extra=extra))(params, jax.nn.silu(x))


LAYERS = {f.__name__: f for f in (mlp, scanned, checkpointed, custom, ignoring, jitted)}


def assert_same_as_vjp(fn, params, x, extra, tolerance=1e-6, keep=keep_everything):
    split = LayerSplit(fn, params, x, extra, keep)

    @jax.jit  # all at once, for compiling is what this costs
    def run(params, x, extra, g):
        y, vjp = jax.vjp(lambda p, x: fn(p, x, extra), params, x)
        got_y, residuals = split.output_and_residuals(params, x, extra)
        apart_dx, stash = split.input_gradient(params, extra, residuals, g)
        apart = split.weight_gradient(params, extra, residuals.for_w, stash)
        return (
            (y, *vjp(g)),
            got_y,
            residuals,
            split.gradients(params, extra, residuals, g),
            apart_dx,
            stash,
            apart,
        )

    g = normal(9, *x.shape).astype(x.dtype)
    whole, got_y, residuals, (gradients, dx), apart_dx, stash, apart = run(params, x, extra, g)
    assert [(r.shape, r.dtype) for r in stash] == [(r.shape, r.dtype) for r in split.weight_stash]
    for crossed, said in (
        (residuals.for_b, split.residuals.for_b),
        (residuals.for_w, split.residuals.for_w),
    ):
        assert [(r.shape, r.dtype) for r in crossed] == [(r.shape, r.dtype) for r in said]
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
    wanted = jax.tree.leaves(whole)
    largest = max(np.abs(w).max() for w in wanted)
    got = jax.tree.leaves((got_y, gradients, dx)), jax.tree.leaves((got_y, apart, apart_dx))
    for a, w in zip(itertools.chain(*got), [*wanted, *wanted], strict=True):
        assert (a.shape, a.dtype) == (w.shape, w.dtype)
        # The floor is for gradients that cancel to nothing, as that of a key's bias.
        assert np.abs(a - w).max() <= tolerance * max(np.abs(w).max(), 1e-2 * largest)
    return split


@pytest.mark.parametrize("keep", [keep_everything, keep_products])
@pytest.mark.parametrize("layer", LAYERS)
def test_same_as_vjp(layer, keep):
    params = {
        "up": normal(1, WIDTH, WIDTH),
        "down": normal(2, WIDTH, WIDTH),
        "stack": normal(3, 2, WIDTH, WIDTH),
    }
    if layer != "scanned":
        del params["stack"]
    assert_same_as_vjp(
        LAYERS[layer], params, normal(4, BATCH, LENGTH, WIDTH), (jnp.float32(0.5),), keep=keep
    )


WINDOW = {"model.window": 5, "model.sinks": True, "model.kv_heads": 2}


@pytest.fixture(
    scope="module",
    params=["llama", "gpt2", "latent", pytest.param("window", marks=pytest.mark.full)],
)
def block(request):
    """(function, parameters of one layer) of a transformer block; no size is another's."""
    kinds = {
        "llama": {"model.kv_heads": 2},
        "gpt2": {
            "model.norm": "layernorm",
            "model.activation": "gelu",
            "model.positions": "learned",
            "model.biases": ("qkv", "out", "mlp", "norm"),
        },
        "window": WINDOW,
        "latent": {
            "model.attention": "mla",
            "model.query_rank": 12,
            "model.kv_rank": 20,
            "model.rope_head_dim": 10,
            "model.value_head_dim": 14,
            "model.biases": ("qkv", "mlp"),
        },
    }
    cfg = small.config(
        changes={"model.mlp_width": 80, "model.head_dim": 6, "model.init_std": 0.2}
        | kinds[request.param]
    )
    parts = transformer.build(cfg.model)
    leaves, tree = jax.tree.flatten(parts.specs["layer"])
    values = [
        s.constant + np.float32(s.std or 0.1) * normal(i, *s.shape) for i, s in enumerate(leaves)
    ]
    return lambda p, x, extra: parts.blocks[""](p)(x, *extra), jax.tree.unflatten(tree, values)


POSITIONS = jnp.arange(LENGTH, dtype=jnp.int32)[None]
SEGMENTS = jnp.asarray(np.repeat([[0, 1, 2, 3], [0, 0, 1, 1]], LENGTH // 4, axis=1), jnp.int32)


@pytest.mark.parametrize(
    "keep, segments",
    [
        (keep_everything, None),
        (keep_products, SEGMENTS),
        pytest.param(keep_everything, SEGMENTS, marks=pytest.mark.full),
    ],
    ids=["everything, one document", "products, documents", "everything, documents"],
)
def test_a_block_keeps_no_weight_and_no_mask(block, segments, keep):
    fn, params = block
    split = assert_same_as_vjp(
        fn, params, normal(4, BATCH, LENGTH, WIDTH), (POSITIONS, segments), 3e-6, keep
    )
    weights = {a.shape for a in jax.tree.leaves(params)} | {
        a.shape[::-1] for a in jax.tree.leaves(params)
    }
    for kept in jax.tree.leaves(split.residuals):
        assert kept.dtype == jnp.float32, f"{kept} is a mask, or positions"
        assert kept.shape not in weights, f"{kept} is a weight"
        assert BATCH in kept.shape or BATCH * LENGTH in kept.shape, f"{kept} is no activation"


@pytest.mark.parametrize(
    "keep", [pytest.param(keep_everything, marks=pytest.mark.full), keep_products]
)
def test_attention_by_blocks_stays_whole(block, keep, monkeypatch):
    """One loop in F and one in B, none in W; output and log-sum-exp cross, so that B need not
    attend again."""
    for name, value in (("LEAST_KEYS", 1), ("LEAST_BLOCK", 1), ("SCORES", 2 * 8 * 4 * 4)):
        monkeypatch.setattr(blockwise, name, value)
    fn, params = block
    x = normal(4, BATCH, LENGTH, WIDTH)
    split = assert_same_as_vjp(fn, params, x, (POSITIONS, SEGMENTS), 3e-6, keep)
    extra, kept = (POSITIONS, SEGMENTS), split.residuals
    ops = {
        LayerOp.FORWARD: (split.output_and_residuals, params, x, extra),
        LayerOp.INPUT_GRADIENT: (split.input_gradient, params, extra, kept, x),
        LayerOp.WEIGHT_GRADIENT: (
            split.weight_gradient,
            params,
            extra,
            kept.for_w,
            split.weight_stash,
        ),
        LayerOp.BACKWARD: (split.gradients, params, extra, kept, x),
    }
    loops = {
        op: [e.primitive.name for e in jax.make_jaxpr(run)(*args).eqns].count("while")
        for op, (run, *args) in ops.items()
    }
    assert loops == {
        LayerOp.FORWARD: 1,
        LayerOp.INPUT_GRADIENT: 1,
        LayerOp.WEIGHT_GRADIENT: 0,
        LayerOp.BACKWARD: 1,
    }


FORWARD = {"pallas_call": ["pallas_call"], "cudnn": ["dot_product_attention_fwd", "while"]}
BACKWARD = {"pallas_call": ["pallas_call"], "cudnn": ["dot_product_attention_bwd", "while"]}


@pytest.mark.parametrize("keep", [keep_everything, keep_products])
@pytest.mark.parametrize("kernel, platform", [("pallas_call", "tpu"), ("cudnn", "gpu")])
@pytest.mark.parametrize("more", [{}, pytest.param(WINDOW, marks=pytest.mark.full)])
def test_attention_by_a_kernel_stays_whole(kernel, platform, more, keep, monkeypatch):
    """One call in F (and in K and R, which are the same op), and one of the kernel's gradient in
    B; none in W. What crosses is no mask, no place of a document and
    nothing else than activations, each once."""
    monkeypatch.setattr(causal, "target_device", lambda: TargetDevice(platform))
    for module in (rotary, grouped_query):
        monkeypatch.setattr(module, "orders_by_heads", lambda: platform == "tpu")
    tokens, changes = (
        256,
        {"model.kv_heads": 2, "data.sequence_length": 256, "precision.compute": "bfloat16"} | more,
    )
    parts = transformer.build(small.config(changes=changes | {"model.head_dim": 8}).model)
    shape = lambda s: jax.ShapeDtypeStruct(s.padded, jnp.bfloat16 if s.cast else jnp.float32)
    params, x = (
        jax.tree.map(shape, parts.specs["layer"]),
        jax.ShapeDtypeStruct((BATCH, tokens, WIDTH), jnp.bfloat16),
    )
    numbers = jax.ShapeDtypeStruct((BATCH, tokens), jnp.int32)
    extra, ops = (numbers, numbers), {}
    with jax.set_mesh(make_mesh((1,) * len(AXES), jax.devices()[:1])):
        split = LayerSplit(
            lambda p, x, extra: parts.blocks[""](p)(x, *extra), params, x, extra, keep
        )
        kept = split.residuals
        for op, run, *args in (
            ("F", split.output_and_residuals, params, x, extra),
            ("B", split.input_gradient, params, extra, kept, x),
            ("W", split.weight_gradient, params, extra, kept.for_w, split.weight_stash),
        ):
            ops[op] = sorted(
                n
                for n in primitives(jax.make_jaxpr(run)(*args).jaxpr)
                if n in {*FORWARD[kernel], *BACKWARD[kernel]}
            )
    assert ops == {"F": FORWARD[kernel], "B": BACKWARD[kernel], "W": []}
    # norms leave one number of a token
    of_kernel = [a for a in jax.tree.leaves(kept) if a.dtype != jnp.bfloat16 and a.shape[-1] > 1]
    assert [a.shape for a in of_kernel if a.ndim > 2] == [(BATCH, 8, tokens)], (
        "the log-sum-exp, in the kernel's order, is what a kernel leaves in float32"
    )
    assert not [
        a for a in jax.tree.leaves(kept) if a.dtype == jnp.int32 or a.shape.count(tokens) > 1
    ]
    heads = [a.shape for a in jax.tree.leaves(kept) if a.shape[-2:] == (8, 8)]
    assert heads.count((BATCH, tokens, 8, 8)) <= 2, "queries and output, once"


def primitives(jaxpr) -> list[str]:
    """The names of a jaxpr's equations and of those in them, but not of what a kernel is made
    of."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation.primitive.name)
        if found[-1] != "pallas_call":
            found += [name for inner in inside(equation) for name in primitives(inner)]
    return found


def test_a_block_keeps_less_than_vjp(block):
    fn, params = block
    x, extra = normal(4, BATCH, LENGTH, WIDTH), (POSITIONS, SEGMENTS)
    saved = jax.tree.leaves(
        jax.eval_shape(lambda p, x: jax.vjp(lambda p, x: fn(p, x, extra), p, x)[1], params, x)
    )
    split = LayerSplit(fn, params, x, extra)
    assert nbytes(split.residuals) < 0.8 * nbytes(saved)


def test_the_narrower_of_a_conversion_is_kept():
    """In bfloat16 nothing crosses in float32 that a bfloat16 value was widened to."""

    def fn(params, x, extra):
        return (x.astype(jnp.float32) ** 3).astype(jnp.bfloat16) @ params

    split = LayerSplit(fn, jnp.ones((4, 4), jnp.bfloat16), jnp.ones((2, 4), jnp.bfloat16), ())
    assert jnp.bfloat16 in [r.dtype for r in jax.tree.leaves(split.residuals)]
    assert all(
        r.dtype == jnp.bfloat16 or r.shape != (2, 4)
        for r in jax.tree.leaves(split.residuals)
        if r.size > 8
    )


def test_no_equation_of_the_forward_runs_again(block):
    """The backward has the matmuls of the gradients alone: two for each of the forward's."""
    fn, params = block
    x, extra = normal(4, BATCH, LENGTH, WIDTH), (POSITIONS, None)
    split = LayerSplit(fn, params, x, extra)
    _, residuals = jax.eval_shape(split.output_and_residuals, params, x, extra)
    matmuls = lambda f, *a: str(jax.make_jaxpr(f)(*a)).count("dot_general")
    assert matmuls(split.gradients, params, extra, residuals, x) == 2 * matmuls(
        split.output_and_residuals, params, x, extra
    )


def test_selective_keeps_matmuls_alone(block):
    """The layer's input and the results of products with weights; no scores of attention."""
    fn, params = block
    split = LayerSplit(
        fn, params, normal(4, BATCH, LENGTH, WIDTH), (POSITIONS, SEGMENTS), keep_products
    )
    assert not [r for r in jax.tree.leaves(split.residuals) if r.shape.count(LENGTH) > 1], (
        "scores are kept"
    )
    everything = LayerSplit(fn, params, normal(4, BATCH, LENGTH, WIDTH), (POSITIONS, SEGMENTS))
    assert nbytes(split.residuals) < 0.7 * nbytes(everything.residuals)
    matmuls = lambda f, *a: str(jax.make_jaxpr(f)(*a)).count("dot_general")
    x, extra = normal(4, BATCH, LENGTH, WIDTH), (POSITIONS, SEGMENTS)
    _, stash = jax.eval_shape(split.input_gradient, params, extra, split.residuals, x)
    apart = matmuls(split.input_gradient, params, extra, split.residuals, x)
    apart += matmuls(split.weight_gradient, params, extra, split.residuals.for_w, stash)
    # Two for each of the forward's, and attention's two again.
    assert apart == 2 * matmuls(split.output_and_residuals, params, x, extra) + 2


def test_b_and_w_share_no_matmul(block):
    fn, params = block
    x, extra = normal(4, BATCH, LENGTH, WIDTH), (POSITIONS, None)
    split = LayerSplit(fn, params, x, extra)
    matmuls = lambda f, *a: str(jax.make_jaxpr(f)(*a)).count("dot_general")
    _, stash = jax.eval_shape(split.input_gradient, params, extra, split.residuals, x)
    forward, b = (
        matmuls(split.output_and_residuals, params, x, extra),
        matmuls(split.input_gradient, params, extra, split.residuals, x),
    )
    w = matmuls(split.weight_gradient, params, extra, split.residuals.for_w, stash)
    weights = sum(len(a.shape) > 1 for a in jax.tree.leaves(params))
    assert (w, b) == (weights, 2 * forward - weights)


def test_what_checkpoint_computes_again_stays_in_the_backward():
    params = {"up": normal(1, WIDTH, WIDTH), "down": normal(2, WIDTH, WIDTH)}
    x, extra = normal(4, BATCH, LENGTH, WIDTH), (jnp.float32(0.5),)
    plain, again = LayerSplit(mlp, params, x, extra), LayerSplit(checkpointed, params, x, extra)
    assert len(jax.tree.leaves(again.residuals)) == 1 < len(jax.tree.leaves(plain.residuals))


@pytest.mark.parametrize("manual", [False, True])
def test_each_op_fixes_a_layout_itself(manual):
    """What crosses is the array before its layout was fixed, or the reader could give it
    another."""
    fixed = lambda x: with_layout_constraint(x, Layout((0, 1, 2)))

    def layer(params, x, extra):
        spread = jax.shard_map(
            fixed,
            mesh=jax.make_mesh((1,), ("model",)),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        return (spread if manual else fixed)(jnp.sin(x @ params["up"])) @ params["down"]

    params, x = (
        {"up": normal(1, WIDTH, WIDTH), "down": normal(2, WIDTH, WIDTH)},
        normal(4, BATCH, LENGTH, WIDTH),
    )
    split = assert_same_as_vjp(layer, params, x, ())
    assert len(jax.tree.leaves(split.residuals)) == 3  # x; sine and cosine
    _, stash = jax.eval_shape(split.input_gradient, params, (), split.residuals, x)
    for_w = split.residuals.for_w
    assert "layout_constraint" in str(
        jax.make_jaxpr(split.weight_gradient)(params, (), for_w, stash)
    )
