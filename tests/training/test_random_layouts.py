"""Random models on random layouts: the gradients of one plain loop (plain_loop.py), or the losses
of some steps in programs of several. What the matrices of the other files do not cross, such as
kinds of layers with context, replicas or offload, is met here by chance; what chance seldom crosses
is asked for in CROSSED."""

import math
import pathlib
import random
from typing import Any

import jax
import pytest
from support import matrix, plain_loop, small

from jaxtrain import config as configs
from jaxtrain.config import Config, ConfigError
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.mesh_rules import AXES
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.training.several_steps import CompiledSteps
from jaxtrain.training.step import make_step

SEEDS = range(100)
DEVICES = 8
SCHEDULES = {  # with repeats
    **dict.fromkeys(("gpipe", "1f1b", "zb_h1", "zb_h2"), 1),
    **dict.fromkeys(("interleaved", "zb_v", "dualpipe_v"), 2),
    "auto": 0,
}
# Each setting has its first value half of the time.
MODEL: dict[str, tuple] = {
    "model.layers": (5, 1, 2, 3, 4, 6, 7, 9),
    "model.vocab_size": (263, 264),
    "model.heads": (2, 4),
    "model.kv_heads": (1, 2),
    "model.activation": ("swiglu", "gelu"),
    "model.tied_embeddings": (False, True),
    "model.mtp_depth": (0, 1, 2),
    "data.sequence_length": (8, 12, 16),
}
EXPERTS: dict[str, tuple] = {
    "model.experts": (4, 8),
    "model.expert_width": (8, 16),
    "model.experts_per_token": (2, 1, 3),
    "model.shared_experts": (0, 1, 2),
    "model.dense_layers": (0, 1, 2, 3),
    "model.router": ("softmax", "sigmoid"),
    "model.router_bias": (False, True),
    "model.balance_loss": (0.01, 0.0),
}
LATENT = {
    "model.attention": "mla",
    "model.head_dim": 8,
    "model.rope_head_dim": 4,
    "model.query_rank": 12,
    "model.kv_rank": 8,
}
MESH = {
    "mesh.stage": (2, 1, 3, 4),
    "mesh.data": (1, 2, 4),
    "mesh.expert": (1, 2, 4),
    "mesh.context": (1, 1, 2),
    "mesh.model": (1, 1, 2),
    "mesh.replica": (1, 1, 1, 2),
}
LAYOUT: dict[str, tuple] = {
    "parallel.zero": (3, 0, 1, 2),
    "parallel.gather": ("layer", "layer", "step"),
    "parallel.reduce": ("auto", "step", "microbatch", "last"),
    "parallel.context": ("ring", "ulysses", "all_gather"),
    "parallel.ends": ("auto", "replicated", "sharded"),
    "parallel.expert_nodes": (1, 1, 2),
    "parallel.collective_matmul": ("auto", "on", "off"),
    "parallel.offload": ("none", "none", "none", "optimizer", "activations", "both"),
    "pipeline.overlap": (False, True),
    "pipeline.remat": ("none", "selective", "full", "full:1", "selective:1"),
    "pipeline.save": ((), (), ("layer_input",), ("attention",), ("mlp_in:host", "qkv")),
    "pipeline.vocabulary": ("auto", "parallel", "end_stages"),
    "pipeline.layers_per_op": (0, 0, 1, 2),
    "pipeline.permute": ("auto", "auto", "early"),
    "pipeline.microbatches": (3, 1, 2, 4, 5, 6),
}
# What a program of several steps does not have is left out.
STEPS: dict[str, Any] = {
    "model.experts": 0,
    "model.dense_layers": 0,
    "parallel.reduce": "auto",
    "parallel.ends": "auto",
    "parallel.offload": "none",
    "pipeline.overlap": False,
}
# stages, devices of `model` and of `expert`, nodes of experts, steps of a program
CROSSED = (
    *((2, 2, 2, 1, 1), (2, 1, 4, 1, 1), (2, 1, 4, 2, 1), (1, 4, 2, 1, 1), (1, 2, 4, 1, 1)),
    *((1, 2, 4, 2, 1), (2, 4, 1, 1, 1), (2, 2, 1, 1, 2), (2, 4, 1, 1, 3), (4, 2, 1, 1, 2)),
)
V_SCHEDULES = ("zb_v", "dualpipe_v")
SMALL = {"model.width": 16, "model.mlp_width": 16, "optimizer.clip_norm": plain_loop.CLIP}
PASSED = matrix.Passed(
    "random_layouts",
    pathlib.Path(__file__),
    *(pathlib.Path(m.__file__) for m in (plain_loop, small)),
)


def draw(chance: random.Random, requested: dict[str, Any] | None = None) -> dict[str, Any]:
    """Settings, the requested ones among them, of which some may not go together."""

    def each(of: dict[str, tuple]) -> dict[str, Any]:
        return {
            path: values[0] if chance.random() < 0.5 else chance.choice(values[1:])
            for path, values in of.items()
        }

    settings = SMALL | each(MODEL) | each(MESH) | each(LAYOUT)
    settings |= each(EXPERTS) if chance.random() < 0.75 else {}
    settings |= LATENT if chance.random() < 0.3 else {}
    settings |= requested or {}
    shards = math.prod(settings[f"mesh.{axis}"] for axis in ("replica", "data", "expert"))
    sequences = shards * settings["pipeline.microbatches"] * chance.choice((1, 1, 2))
    schedule, repeats = chance.choice(tuple(SCHEDULES.items()))
    scheduled = {"pipeline.schedule": schedule, "pipeline.repeats": repeats}
    return {"data.batch_size": sequences} | scheduled | settings


def crossed(seed: int) -> dict[str, Any]:
    """The settings that a layout of CROSSED asks for, with each schedule in turn."""
    stage, model, expert, nodes, steps = CROSSED[seed % len(CROSSED)]
    sizes = {"mesh.stage": stage, "mesh.model": model, "mesh.expert": expert}
    ways = {"parallel.expert_nodes": nodes, "pipeline.steps_per_program": steps}
    name = V_SCHEDULES[seed // len(CROSSED) % len(V_SCHEDULES)]
    settings = sizes | ways | {"pipeline.schedule": name, "pipeline.repeats": 2}
    if steps > 1:  # a clipped step runs once more, alone
        return settings | STEPS | {"optimizer.clip_norm": (100.0, plain_loop.CLIP)[seed // 20 % 2]}
    return settings | ({"model.experts": 8} if expert > 1 else {})


def drawn(seed: int, requested: dict[str, Any] | None = None) -> Config:
    """The first config of this seed that can run. Its first batch has three tokens in a row that
    count, so that each module of prediction has one."""
    chance = random.Random(seed)
    while True:
        cfg = configs.replace(small.SMALL, draw(chance, requested))
        devices = math.prod(getattr(cfg.mesh, axis) for axis in AXES)
        if not 1 < devices <= DEVICES:
            continue
        try:
            cfg = checks.check_devices(cfg, devices, "cpu").resolve()
            make_setup(cfg)
        except ConfigError:
            continue
        weights = small.batch(cfg, 0)["weights"]
        if (weights[:, 2:] * weights[:, 1:-1] * weights[:, :-2]).any():
            return cfg


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_same_gradients(seed):
    if seed in PASSED:
        pytest.skip(f"passed before with the same sources: {PASSED.path}")
    cfg = drawn(seed)
    plain_loop.assert_same(plain_loop.gradients(cfg), plain_loop.reference(cfg, 1))
    PASSED.add(seed)


def losses_together(cfg: Config, count: int) -> plain_loop.Run:
    """The losses of so many steps, in programs of `pipeline.steps_per_program` each."""
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        programs = CompiledSteps(step.lower().compile(), step.steps_per_program)
        state, metrics = small.first_state(step, plain_loop.weights(cfg)), []
        for begin in range(0, count, programs.number):
            made = [small.batch(cfg, begin + i) for i in range(programs.number)]
            batches = [small.place_batch(step, cfg, batch) for batch in made]
            state, results = programs.together(state, batches)
            metrics.append(jax.device_get(results))
    losses = [float(loss) for each in metrics for loss in each["loss"]]
    return plain_loop.Run(losses, float(metrics[0]["grad_norm"][0]), {}, {})


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_crossed(seed):
    if f"crossed {seed}" in PASSED:
        pytest.skip(f"passed before with the same sources: {PASSED.path}")
    cfg = drawn(seed, crossed(seed))
    if (steps := cfg.pipeline.steps_per_program) == 1:
        plain_loop.assert_same(plain_loop.gradients(cfg), plain_loop.reference(cfg, 1))
    else:
        plain_loop.assert_same(
            losses_together(cfg, 2 * steps), plain_loop.reference(cfg, 2 * steps)
        )
    PASSED.add(f"crossed {seed}")
