"""One MFU: of a run, of its plan and of a benchmark's table the same for the same step time, on
every kind of device."""

import sys

import jax
import pytest
from support import ROOT

from jaxtrain import config as configs
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.models import transformer
from jaxtrain.planner.layer.hardware import known, load
from jaxtrain.planner.layer.model import model_of as sizes_of_model
from jaxtrain.planner.search.predict import predict
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.training.reporting import Speedometer

sys.path.append(str(ROOT / "benchmarks"))
import gpu_table

RECIPES = ("llama3_8b", "gpt2_124m", "mixtral_8x7b", "deepseek_v3", "deepseek_tiny")


class Clock:
    """Time that a test moves."""

    now = 0.0

    def spent(self, *parts) -> float:
        return self.now


def model_of(config):
    return sizes_of_model(config.model, config.data.sequence_length)


def mfu_of_a_run(config, kind, devices: int, seconds: float) -> float | None:
    """What is logged of a step that took so many seconds."""
    clock, work = Clock(), step_model_of(config, kind)
    assert work.layout.devices == devices
    tokens = config.data.batch_size * config.data.sequence_length
    speedometer = Speedometer(tokens, work.tokens_at_peak(), 0, clock)
    clock.now = seconds
    speedometer.lap(1)
    return speedometer.since_asked()["mfu"]


@pytest.mark.parametrize("name", known())
def test_a_run_its_plan_and_a_benchmark_agree(name):
    kind = load(name)
    dtype = "bfloat16" if "bfloat16" in kind.peak_tflops else "float32"
    changes = {
        "mesh.data": 8,
        "mesh.stage": 1,
        "mesh.model": 1,
        "pipeline.microbatches": 1,
        "precision.compute": dtype,
    }
    config = configs.replace(
        load_recipe(find_recipe("llama3_8b")),
        changes | {"pipeline.schedule": "1f1b", "pipeline.repeats": 1},
    ).resolve()
    figures = predict(config, kind).figures()
    assert figures["attention_flops"] == "causal"
    assert mfu_of_a_run(config, kind, 8, figures["step_time_s"]) == pytest.approx(figures["mfu"])

    # what gpu_table knows is jax's name
    pattern = {"tpu-v5p": "TPU v5p", "h100": "NVIDIA H100 80GB HBM3"}.get(name)
    if pattern:
        about = {
            "batch_size": config.data.batch_size / 8,
            "sequence_length": config.data.sequence_length,
            "compute": dtype,
        }
        rounds = [
            {
                "seconds": [figures["step_time_s"]],
                "memory": 0,
                "first_s": 0.0,
                "losses": [],
                "norms": [],
            }
        ]
        side = gpu_table.side(rounds, about, model_of(config).training_flops_per_token(), pattern)
        assert side.mfu == pytest.approx(figures["mfu"])


def test_other_frameworks_count_as_their_papers_do():
    """Llama 3 8B with 8,192 tokens: attention counted in full is a tenth of the operations more."""
    config = configs.replace(
        load_recipe(find_recipe("llama3_8b")), {"mesh.data": 8, "mesh.stage": 1, "mesh.model": 1}
    ).resolve()
    by = {
        program: predict(config, load("h100"), program)
        for program in ("jaxtrain", "llama3", "megatron_core")
    }
    assert [by[program].figures()["attention_flops"] for program in by] == [
        "causal",
        "causal",
        "full",
    ]
    assert by["megatron_core"].work.model_flops() / by[
        "jaxtrain"
    ].work.model_flops() == pytest.approx(1.125, abs=0.02)
    assert by["llama3"].work.model_flops() == by["jaxtrain"].work.model_flops()


@pytest.mark.parametrize("recipe", RECIPES)
def test_operations_are_those_of_the_model_s_matrices(recipe):
    """Counted from the specifications of its parameters: of experts those that a token chooses; the
    head once for each token predicted."""
    config = load_recipe(find_recipe(recipe)).fill()
    model, sizes = config.model, model_of(config)
    parts = transformer.build(model)
    part = lambda spec: model.experts_per_token / model.experts if "experts" in spec.axes else 1
    matrices = lambda name: sum(
        round(s.size * part(s)) for s in jax.tree.leaves(parts.specs.get(name, {})) if s.matrix
    )
    count = model.layers * matrices("layer") + matrices("first") + matrices("predictors")
    count += (1 + model.mtp_depth) * model.vocab_size * model.width
    key = model.head_dim + model.rope_head_dim
    width = model.heads * (key + (model.value_head_dim or key)) / 2
    layers = model.dense_layers + model.layers + model.mtp_depth
    # PaLM's, with half of attention
    formula = 6.0 * count + 6.0 * layers * width * config.data.sequence_length
    assert sizes.training_flops_per_token() == pytest.approx(formula, rel=1e-12)
    assert sizes.training_flops_per_token(causal=False) == pytest.approx(
        2 * formula - 6.0 * count, rel=1e-12
    )
