"""What a layer saves, as the planner has it, beside the program's own pools, for random models."""

import dataclasses
import functools
import math
import os
import random
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import small

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.config.sizes import remat_of
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.models.transformer import build
from jaxtrain.parallel.fp8 import fp8_of
from jaxtrain.planner.layer.hardware import Hardware, load
from jaxtrain.planner.search.compare import plan_at_hand
from jaxtrain.planner.step.saved import LeastSaved, layer_bytes
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.runtime.layers.saved_bytes import LayerOnMesh, saved_bytes
from jaxtrain.runtime.runtime import Runtime
from jaxtrain.schedule.placement import Placement

RECIPE = load_recipe(find_recipe("tiny"))
SIMULATED = dataclasses.replace(load("h100"), name="cpu, simulated")
SIZES = 1, 1, 1, 2, 4  # of an axis; most often 1
MOST = 8  # simulated devices
CPU = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def draw(seed: int) -> dict[str, Any]:
    """The settings of a random model and layout, which may break a rule."""
    of = random.Random(seed)
    some = lambda names: tuple(name for name in names if of.random() < 0.4)
    placed = lambda names: tuple(name + of.choice(["", ":host"]) for name in names)
    experts, latent = of.random() < 0.5, of.random() < 0.3
    norm, heads = of.choice(["rmsnorm", "layernorm"]), of.choice([4, 8])
    biases = ["out", *["qkv"] * (not latent), *["mlp"] * (not experts)]
    names = ["attention_norm", "qkv", "attention", "attention_out", "mlp_norm", "mlp_in"]
    names += [
        "mlp_hidden",
        "mlp_out",
        "layer_input",
        *["latent"] * latent,
        *["router", "routed"] * experts,
    ]
    tokens, remat = of.choice([256, 1024, 2048]), of.choice(["none", "selective"])
    of_experts = {
        "model.experts": 8,
        "model.experts_per_token": of.choice([1, 2, 3]),
        "model.shared_experts": of.choice([0, 0, 1, 2]),
        "model.expert_width": of.choice([64, 320]),
        "model.router": of.choice(["softmax", "sigmoid"]),
        "model.dense_layers": of.choice([0, 0, 1]),
        "mesh.expert": of.choice(SIZES),
    }
    of_experts |= of.choice(
        [{}, {"model.expert_room": of.choice([1.0, 2.0])}, {"model.capacity_factor": 1.5}]
    )
    of_latents = {
        "model.attention": "mla",
        "model.kv_rank": 48,
        "model.query_rank": of.choice([0, 40]),
        "model.rope_head_dim": of.choice([8, 16]),
        "model.value_head_dim": of.choice([16, 64]),
    }
    of_heads = {"model.kv_heads": of.choice([2, 4, heads]), "model.qk_norm": of.random() < 0.4}
    return {
        "model.layers": 2,
        "model.width": of.choice([128, 192]),
        "model.heads": heads,
        "model.head_dim": of.choice([16, 24, 64]),
        "model.mlp_width": of.choice([256, 320]),
        "model.activation": of.choice(["swiglu", "gelu"]),
        "model.norm": norm,
        "model.biases": some(biases + ["norm"] * (norm == "layernorm")),
        "model.positions": "rotary" if latent else of.choice(["rotary", "learned"]),
        "model.max_positions": tokens,
        "data.sequence_length": tokens,
        "data.batch_size": 24,
        "data.attend_across_documents": of.random() < 0.5,
        "mesh.data": 1,
        "mesh.stage": of.choice([1, 2]),
        "mesh.model": of.choice(SIZES),
        "mesh.context": of.choice(SIZES),
        "pipeline.schedule": "1f1b",
        "pipeline.microbatches": of.choice([2, 6]),
        "pipeline.repeats": 1,
        "pipeline.remat": remat,
        "pipeline.save": placed(some(names)) if remat == "selective" else (),
        "precision.compute": of.choice(["bfloat16", "bfloat16", "float32"]),
        "precision.matmul": of.choice(["compute", "compute", "fp8", "mxfp8"]),
        "precision.fp8_weight_gradients": of.choice(["fp8", "compute"]),
        "parallel.context": of.choice(["all_gather", "ulysses", "ring"]),
        "parallel.collective_matmul": of.choice(["auto", "on"]),
        **(of_experts if experts else {}),
        **(of_latents if latent else of_heads),
    }


@functools.cache
def config_of(seed: int) -> Config | None:
    """The config of a seed; None if it breaks a rule or needs too many devices."""
    config = configs.replace(RECIPE, draw(seed))
    devices = math.prod(sizes_of(config.mesh))
    known = checks.Environment(devices, "cpu", config)
    kept = devices <= MOST and checks.first_violation(config, known) is None
    return config.resolve() if kept else None


def kept(seeds: range) -> list[int]:
    return [seed for seed in seeds if config_of(seed)]


def program(config: Config) -> tuple[int, ...]:
    """Bytes of the program's own slots, for a layer: residuals for B and for W, the stash, the
    input; and in the host's memory those for B and for W."""
    sizes = sizes_of(config.mesh)
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes)])
    parts = build(
        config.model,
        config.mesh.model,
        context=config.parallel.context,
        batch_size=config.data.batch_size,
        expert_nodes=config.parallel.expert_nodes,
    )
    runtime = Runtime(
        parts,
        Placement(1, sizes=(1,), stage_of=(0,)),
        None,
        mesh,
        {},
        remat=remat_of(config.pipeline.remat),
        save=config.pipeline.save,
        compute=jnp.dtype(config.precision.compute),
        fp8=fp8_of(config.precision, False),
        collective_matmul=config.parallel.collective_matmul,
    )
    sequences = config.sequences_per_microbatch // config.mesh.expert
    tokens = config.data.sequence_length // config.mesh.context
    with jax.set_mesh(mesh):
        slots = runtime.slot_bytes(sequences, tokens, not config.data.attend_across_documents)
    pools = "residual_b", "residual_w", "weight_stash", "activation"
    return *(slots[pool].all for pool in pools), *(slots[pool].on_host for pool in pools[:2])


def planned(config: Config, hardware: Hardware = SIMULATED, **changes):
    step = step_model_of(config, hardware)
    settings = dataclasses.replace(step.settings, **changes)
    return layer_bytes(dataclasses.replace(step, settings=settings))


def check(seed: int):
    """The planner has the program's bytes, though it has no devices."""
    config = config_of(seed)
    assert config, seed
    layer = planned(config)
    assert (*layer[:4], layer.host_b, layer.host_w) == program(config), seed


@pytest.mark.parametrize("seed", kept(range(9)))
def test_as_the_program_saves(seed):
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("begin", range(12, 612, 100))
def test_as_many_programs_save(begin):
    for seed in kept(range(begin, begin + 100)):
        check(seed)


BOTH = ["h100", "tpu-v5p"]
LAYOUTS = {f"{kind}-{seed}": (kind, seed) for seed in kept(range(100, 106)) for kind in BOTH}
IN_TURN = [name for place, name in enumerate(LAYOUTS) if place % 4 in (0, 3)]  # a seed has one


@pytest.mark.parametrize("case", small.named(IN_TURN, sorted(LAYOUTS.keys() - IN_TURN)))
def test_one_trace_for_several_layouts(case):
    """A trace of the layout itself gives the same as that of the layouts which a layer does not
    tell apart: with more stages, or another setting of collectives that it has not."""
    hardware, seed = LAYOUTS[case]
    config = config_of(seed)
    tokens = config.data.sequence_length // config.mesh.context
    layer = LayerOnMesh(
        config.model,
        config.precision,
        dense=False,
        sequences=config.sequences_per_microbatch // config.mesh.expert,
        tokens=tokens,
        documents=not config.data.attend_across_documents,
        mesh_sizes=sizes_of(config.mesh),
        platform=load(hardware).platform,
        context=config.parallel.context,
        expert_nodes=config.parallel.expert_nodes,
        beside_products=config.parallel.collective_matmul,
    )
    traced = saved_bytes(layer, "selective", config.pipeline.save)
    assert planned(config, load(hardware)) in traced


@pytest.mark.parametrize(
    "seed", [101, *(pytest.param(seed, marks=pytest.mark.full) for seed in kept(range(200, 212)))]
)
def test_bounded_by_one_device(seed):
    """What a search takes before it traces a layout is at most what a layer of that saves, and no
    small part of it."""
    step = step_model_of(config_of(seed), load(("h100", "tpu-v5p")[seed % 2]))
    for remat in ("", "none"):
        saved = layer_bytes(step, remat=remat)
        least = step.part(LeastSaved).of_layer(False, remat)
        for read in (lambda of: of.residual_b + of.residual_w, lambda of: of.weight_stash):
            assert read(saved) / 4 < read(least) <= read(saved)
        assert least.input <= saved.input


BY_SEQUENCE = 1e-3  # of the bytes: counts and offsets that do not grow with the sequences


@pytest.mark.parametrize("recipe", ["llama3_8b", "mixtral_8x7b"])
def test_by_sequence(recipe):
    """What a search takes for a microbatch of several sequences."""
    config = configs.replace(
        load_recipe(find_recipe(recipe)),
        {"data.batch_size": 24, "pipeline.microbatches": 2, "mesh.data": 1},
    )
    exact, scaled = (planned(config.resolve(), load("h100"), by_sequence=by) for by in (0, 1))
    assert scaled == pytest.approx(exact, rel=BY_SEQUENCE)


def test_gathered_keys_are_not_saved():
    """Where cuDNN is given masks, the forward leaves these and a device's own keys and values: what
    is gathered costs no arithmetic. (Padding them by nothing made arrays of their own.)"""
    settings = {"mesh.data": 1, "mesh.model": 1, "data.batch_size": 1, "pipeline.microbatches": 1}
    config = configs.replace(load_recipe(find_recipe("llama3_8b")), settings)
    whole, half = (
        planned(configs.replace(config, {"mesh.context": n}).resolve(), load("h100")).residual_b
        for n in (1, 2)
    )
    tokens = config.data.sequence_length
    masks = 2 * tokens // 4 * (tokens // 2 + tokens)
    assert half == pytest.approx(whole / 2 + masks, rel=1e-3)


def test_a_run_traces_no_layer():
    """What a run compares its steps with has no use for bytes; they are traced when asked for."""
    settings = {"mesh.data": 8, "data.batch_size": 64, "model.mlp_width": 264}
    config = configs.replace(RECIPE, settings | {"train.hardware": "h100"}).resolve()
    before = saved_bytes.cache_info().misses
    plan = plan_at_hand(config, "cpu").prediction
    assert plan.seconds > 0 and saved_bytes.cache_info().misses == before
    assert plan.memory.bytes > 0 and saved_bytes.cache_info().misses == before + 1


ALONE = """
import dataclasses, jax
from jax._src import xla_bridge
from jaxtrain import config
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.step.saved import LeastSaved, layer_bytes
from jaxtrain.planner.step.step_model import step_model_of

settings = {"mesh.context": 2, "mesh.data": 1, "data.batch_size": 8, "mesh.model": 2}
resolved = config.replace(load_recipe(find_recipe("tiny")), settings).resolve()
step = step_model_of(resolved, load("h100"))
step.model.layer()
assert not xla_bridge.backends_are_initialized()
saved = layer_bytes(step)
precision = config.PrecisionConfig(compute="bfloat16")
of_16_bits = dataclasses.replace(step.settings, precision=precision)
assert not xla_bridge.backends_are_initialized()

traced = []
def program(x):
    layout = step.layout.with_remat("selective")
    other = dataclasses.replace(step, layout=layout, settings=of_16_bits)
    traced.append(layer_bytes(other))
    return x + 1
mesh = jax.make_mesh((1,), ("x",))
with jax.set_mesh(mesh):
    jaxpr = jax.make_jaxpr(program)(1.0)
assert [equation.primitive.name for equation in jaxpr.eqns] == ["add"], jaxpr
print(len(jax.devices()), saved.input, traced[0].input)
"""


def test_without_devices():
    """A trace, of a layer's products or of what it saves, starts no backend of jax, which must not
    be before `jax.distributed.initialize`; leaves the caller's trace and mesh alone; and needs none
    of the devices."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=CPU)
    assert done.returncode == 0, done.stderr
    devices, *inputs = map(int, done.stdout.split())
    assert devices == 1 and inputs[0] == 2 * inputs[1] > 0


def test_a_dense_layer_is_traced_once_for_all_sizes_of_expert():
    """It saves the same however many devices have the experts of the other layers."""
    config = load_recipe(find_recipe("deepseek_tiny"))
    works = [
        step_model_of(
            configs.replace(
                config,
                {
                    **{f"mesh.{axis}": 1 for axis in ("data", "stage", "model", "context")},
                    "mesh.expert": expert,
                    "data.batch_size": 2 * expert,
                    "pipeline.microbatches": 1,
                    "pipeline.repeats": 1,
                },
            ).resolve(),
            load("h100"),
        )
        for expert in (2, 4)
    ]
    first = layer_bytes(works[0], dense=True)
    traced = saved_bytes.cache_info().misses
    assert layer_bytes(works[1], dense=True) == first
    assert saved_bytes.cache_info().misses == traced
    work, by_expert = works[1], []
    for expert in (1, 4):
        layer = LayerOnMesh(
            work.model.of_one_layer,
            work.settings.precision,
            dense=True,
            sequences=work.layout.microbatch,
            tokens=work.model.sequence,
            documents=False,
            mesh_sizes=(1, 1, 1, 1, expert, 1),
            platform="gpu",
            context="all_gather",
            expert_nodes=1,
            beside_products="off",
        )
        by_expert.append(saved_bytes(layer, "selective", ()))
    assert by_expert[0] == by_expert[1]
