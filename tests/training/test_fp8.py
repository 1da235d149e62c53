"""Training with products in FP8: the same losses and scales on every mesh, and what is not finite
stops a step as always."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import plain_loop, small
from support.small import Case, normal

from jaxtrain.devices.mesh import MANUAL_AXES, SUM_AXES, make_mesh
from jaxtrain.parallel import fp8
from jaxtrain.parallel.fp8 import Fp8
from jaxtrain.training.step import make_step

STEPS = 20
SHAPES = {
    "precision.matmul": "fp8",
    "model.width": 64,
    "model.mlp_width": 128,
    "data.sequence_length": 32,
    "data.batch_size": 16,
    "optimizer.learning_rate": 3e-4,
    "train.steps": STEPS,
}
MOE = {"model.experts": 4, "model.expert_width": 64, "model.shared_experts": 1}
MX = {
    "precision.matmul": "mxfp8",
    "model.heads": 4,
    "data.sequence_length": 128,
    "data.batch_size": 8,
}
CASES = {
    "data, stage and model": Case(
        (2, 2, 2),
        "zb_h1",
        changes=small.PLAIN_LAYER | {"pipeline.remat": "selective", "parallel.zero": 3},
    ),
}
MORE = {
    "context and expert": Case((1, 1, 1), changes={**MOE, "mesh.context": 2, "mesh.expert": 2}),
    "context": Case((1, 1, 1), changes={"mesh.context": 2}),
    "expert": Case((1, 1, 1), changes={**MOE, "mesh.expert": 2}),
    "expert, in two steps": Case(
        (1, 2, 1), changes={**MOE, "mesh.expert": 4, "parallel.expert_nodes": 2}
    ),
    "data": Case((2, 1, 1)),
    "stage": Case((1, 2, 1), "zb_h1", changes={"pipeline.remat": "none"}),
    "model": Case((1, 1, 2)),
    "MXFP8, data, stage and model": Case(
        (2, 2, 2), "zb_h1", changes={**MX, "pipeline.remat": "selective", "parallel.zero": 3}
    ),
    "MXFP8, context": Case((1, 1, 1), changes={**MX, "mesh.context": 2}),
    "MXFP8, data": Case((2, 1, 1), changes={**MX, "parallel.zero": 3}),
    "MXFP8, stage": Case((1, 2, 1), "zb_h1", changes={**MX, "pipeline.remat": "none"}),
    "MXFP8, model": Case((1, 1, 2), changes=MX),
    "MXFP8, weights in float32": Case(
        (2, 1, 2), changes={**MX, "precision.fp8_weight_gradients": "compute"}
    ),
    "model, latent attention": Case(
        (1, 1, 2),
        changes={"model.attention": "mla", "model.kv_rank": 32, "model.rope_head_dim": 8},
    ),
    "expert and data, all sharded": Case(
        (2, 2, 1), changes={**MOE, "mesh.expert": 2, "parallel.zero": 3}
    ),
    "weights in float32": Case((2, 2, 1), changes={"precision.fp8_weight_gradients": "compute"}),
}


def losses(case: Case, steps: int = STEPS, changes=None) -> list[float]:
    cfg = case.config(SHAPES | (changes or {}))
    metrics = plain_loop.metrics_of(cfg, [small.batch(cfg, 1)] * steps)
    return [float(of_step["loss"]) for of_step in metrics]


def on_one_device(case: Case) -> Case:
    """The same model in the same microbatches."""
    changes = {k: v for k, v in case.changes.items() if not k.startswith(("mesh", "parallel"))}
    return Case((1, 1, 1), changes=changes)


@pytest.mark.parametrize("name", small.named(CASES, MORE))
def test_losses_are_those_of_one_device(name):
    """A scale is that of the entire tensor, so only the order of sums differs between meshes; what
    that changes at the border between two numbers of FP8 stays small."""
    case = (CASES | MORE)[name]
    alone = losses(on_one_device(case))
    assert alone[-1] < alone[0] - 0.01  # it learns
    np.testing.assert_allclose(losses(case), alone, rtol=0, atol=1e-3)


@pytest.mark.full
def test_biases_and_gates_of_experts():
    """In few steps: a number of FP8 that is rounded to its neighbour makes tokens choose others."""
    gates = {"model.shared_gate": True, "model.attention_gate": True}
    biases = {"model.biases": ("experts", "mlp"), "model.activation": "clamped_swiglu"}
    case = Case((1, 1, 1), changes={**MOE, "mesh.expert": 2, **gates, **biases})
    few, alone = losses(case, 6), losses(on_one_device(case), 6)
    np.testing.assert_allclose(few, alone, rtol=0, atol=1e-3)


def test_losses_differ_from_those_without_fp8():
    one = Case((1, 1, 1))
    by_fp8 = losses(one, 2)
    plain = losses(one, 2, {"precision.matmul": "compute"})
    other = losses(one, 2, {"precision.fp8_gradients": "e4m3"})
    assert by_fp8[0] == other[0] and by_fp8[1] != other[1]
    assert 1e-6 < abs(by_fp8[0] - plain[0]) < 2e-2


# replica, data, stage, context, expert, model
MESHES = small.named(
    [(2, 2, 1, 1, 1, 2), (1, 2, 1, 2, 2, 1)], [(1, 1, 2, 2, 1, 2), (1, 1, 1, 1, 2, 4)]
)


@pytest.mark.parametrize("mesh", MESHES)
def test_scales_are_the_same_on_every_mesh(mesh):
    """Bit by bit, of activations that are split along all of their dimensions, and of weights that
    `data` and `expert` split."""
    x, weights = normal(1, 8, 16, 32), normal(2, 3, 4, 16, 32)
    use = Fp8(np.dtype("float32"), axes=SUM_AXES)
    wanted = fp8.quantized(x, Fp8(np.dtype("float32")))
    wanted_weights = fp8.quantized_weights(weights, use, 3, ())
    spec_x, spec_w = P(("replica", "data", "expert"), "context"), P(None, "expert", "data")
    model = lambda a: lax.with_sharding_constraint(a, P(*(None,) * (a.ndim - 1), "model"))

    def both(x, weights):
        return (
            fp8.quantized(model(x), use),
            fp8.quantized_weights(model(weights), use, 3, ("data", "expert")),
        )

    out = (
        fp8.Quantized(spec_x, P(), use=use),
        fp8.Quantized(spec_w, P(), use=use),
    )
    devices = make_mesh(mesh)
    with jax.set_mesh(devices):
        run = jax.shard_map(
            both,
            in_specs=(spec_x, spec_w),
            out_specs=out,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        got, got_weights = jax.jit(run)(x, weights)
    for a, b in ((got, wanted), (got_weights, wanted_weights)):
        np.testing.assert_array_equal(np.asarray(a.scale), np.asarray(b.scale))
        np.testing.assert_array_equal(np.asarray(a.bits), np.asarray(b.bits))


@pytest.mark.parametrize("mesh", small.named([(2, 2, 1)], [(1, 1, 1)]))
def test_nan_in_a_weight_is_seen(mesh):
    cfg = Case(mesh).config(SHAPES)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        state = small.first_state(step, plain_loop.weights(cfg))
        weight = state.params["layers"]["0"]["mlp"]["down"]["weight"]
        state.params["layers"]["0"]["mlp"]["down"]["weight"] = weight.at[0, 0, 3, 5].set(np.nan)
        _, metrics = step.train(state, small.place_batch(step, cfg, small.batch(cfg, 0)))
        assert not np.isfinite(float(metrics["loss"]))
        assert not np.isfinite(float(metrics["grad_norm"]))
