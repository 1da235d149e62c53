"""Every metric that a step's program computes: on meshes the same as on one device, and from
independent replicas what each makes of its own part of the batch.

One model has all of them: experts with a capacity, predictions beyond the next token, updates that
may be skipped. Its vocabulary is padded, and its layers are uneven on the stages.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain.config import Config, MeshConfig, ParallelConfig, PipelineConfig
from jaxtrain.run.metrics import METRICS, host
from jaxtrain.training.one_step import combine_replicas, step_metrics

STEPS = 2
MODEL = {
    "model.layers": 3,
    "model.experts": 8,
    "model.expert_width": 16,
    "model.shared_experts": 1,
    "model.capacity_factor": 0.75,
    "model.router_bias": False,  # a random bias would choose the same experts for all tokens
    "model.mtp_depth": 1,
    "train.z_loss": 0.01,
    "train.on_nonfinite": "skip",
    "optimizer.clip_norm": plain_loop.CLIP,
    "optimizer.learning_rate": 0.1,  # one step moves every norm visibly
    # Without it the first update of a gradient that is rounding alone is as large as any other's,
    # and turns choices of experts.
    "optimizer.epsilon": 1e-4,
} | small.PLAIN_LAYER
ENDS = {"pipeline.vocabulary": "end_stages", "model.tied_embeddings": True, "model.layers": 5}
CASES = {"data 2, stage 2, model 2": Case((2, 2, 2))}
MORE = {
    "data 2, expert 2, zero 3": Case((2, 1, 1), changes={"mesh.expert": 2, "parallel.zero": 3}),
    "data 4, model 2, zero 0": Case((4, 1, 2), changes={"parallel.zero": 0}),
    "replica 2, data 2, zero 2": Case((2, 1, 1), changes={"mesh.replica": 2, "parallel.zero": 2}),
    "stage 4, replica 2, tied": Case(
        (1, 4, 1), changes={"mesh.replica": 2, "model.layers": 5, **ENDS}
    ),
    "data 2, stage 2, offload": Case((2, 2, 1), changes={"parallel.offload": "optimizer"}),
}
INDEPENDENT = {
    "2 of data 2": Case((2, 1, 1)),
    "2 of stage 2": Case((1, 2, 1)),
}
# The step's value of a metric from [replicas] values, by the weighted tokens of each.
COMBINED = {
    "loss": lambda values, tokens: np.average(values, weights=tokens),
    "mtp_loss": lambda values, tokens: np.average(values, weights=tokens),
    "z_loss": lambda values, tokens: np.average(values, weights=tokens),
    "grad_norm": lambda values, tokens: np.mean(values),
    "param_norm": lambda values, tokens: np.mean(values),
    "learning_rate": lambda values, tokens: np.mean(values),
    "dropped": lambda values, tokens: np.mean(values),
    "expert_load": lambda values, tokens: np.max(values),
    "weighted_tokens": lambda values, tokens: np.sum(values),
    "skipped": lambda values, tokens: np.sum(values),
}


@functools.cache
def on_one_device(cfg: Config, replicas: int = 1) -> list[list[dict]]:
    """metrics_of, [replicas][steps], of a config on one device, each replica for its part of each
    batch."""
    batches = [small.batch(cfg, i) for i in range(STEPS)]
    alone = dataclasses.replace(
        cfg.as_read(),
        data=dataclasses.replace(cfg.data, batch_size=cfg.data.batch_size // replicas),
        mesh=MeshConfig(data=1),
        pipeline=PipelineConfig(),
        parallel=ParallelConfig(),
        train=dataclasses.replace(cfg.train, diloco_inner_steps=0),
    )
    microbatches = cfg.pipeline.microbatches

    def part(a: np.ndarray, replica: int) -> np.ndarray:
        return a.reshape(microbatches, replicas, -1, a.shape[-1])[:, replica].reshape(
            -1, a.shape[-1]
        )

    return [
        plain_loop.metrics_of(
            alone, [{k: part(a, r) for k, a in batch.items()} for batch in batches]
        )
        for r in range(replicas)
    ]


def assert_same(got: dict, expected: dict, step: int) -> None:
    """To plain_loop's tolerances: 1e-5 before the first update, 1e-4 after it."""
    assert got.keys() == expected.keys() == COMBINED.keys()
    for name, value in expected.items():
        rtol = 1e-5 if step == 0 else 1e-4
        np.testing.assert_allclose(got[name], value, rtol=rtol, err_msg=f"{name}, step {step}")


def test_every_metric_of_a_program_is_compared():
    of_program = {name for name, metric in METRICS.items() if metric.combine is not host}
    assert of_program == COMBINED.keys()


@pytest.mark.parametrize("name", small.named(CASES, MORE))
def test_same_as_on_one_device(name):
    cfg = (CASES | MORE)[name].config(MODEL)
    got = plain_loop.metrics_of(cfg, [small.batch(cfg, i) for i in range(STEPS)])
    (expected,) = on_one_device(cfg)
    for i in range(STEPS):
        assert_same(got[i], expected[i], i)


@pytest.mark.parametrize("name", small.named([], list(INDEPENDENT)))
def test_independent_replicas(name):
    changes = MODEL | {"mesh.replica": 2, "train.diloco_inner_steps": 5}
    cfg = INDEPENDENT[name].config(changes)
    got = plain_loop.metrics_of(cfg, [small.batch(cfg, i) for i in range(STEPS)])
    each = on_one_device(cfg, 2)
    for i in range(STEPS):
        values = {n: np.stack([steps[i][n] for steps in each]) for n in each[0][i]}
        assert_same(got[i], values, i)
        tokens = values["weighted_tokens"]
        expected = {n: COMBINED[n](v, tokens) for n, v in values.items()}
        assert_same(combine_replicas(got[i]), expected, i)


@pytest.mark.parametrize("name", COMBINED)
def test_a_wrong_rule_is_noticed(name):
    """Each rule of the table gives another number than the right one for some values."""
    values, tokens = np.float32([3.0, 1.0, 7.0]), np.float32([10.0, 0.0, 30.0])
    right = COMBINED[name](values, tokens)
    rules = {metric.combine for metric in METRICS.values()} - {host}
    fitting = {rule for rule in rules if np.isclose(rule(values, tokens), right, rtol=1e-3)}
    assert fitting == {METRICS[name].combine} and len(rules) == 4


def test_a_metric_needs_a_rule():
    with pytest.raises(KeyError, match="unheard_of"):
        step_metrics(unheard_of=jax.numpy.zeros(()))
    with pytest.raises(ValueError, match="mfu is a number of the host"):
        step_metrics(mfu=jax.numpy.zeros(()))
