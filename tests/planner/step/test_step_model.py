"""What a config's step is assumed to be by its framework and the hardware that it is planned for;
and that no setting is ignored in silence."""

import functools
import math
import random

import jax
import pytest
from support import small

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment
from jaxtrain.config.rules.unused import without_use
from jaxtrain.devices.mesh import make_mesh, sizes_of
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.search.predict import exactly, predict
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS
from jaxtrain.planner.step.step_model import (
    DECIDED,
    GATHER_OVERLAP,
    OF_OURS,
    OURS,
    settings_of_run,
    step_model_of,
    unfollowed,
)
from jaxtrain.training.step import make_step

OTHERS = [name for name in FRAMEWORKS if name != OURS]
GROUPS = tuple("model. data. parallel. pipeline. optimizer. precision. train.".split())


def of_recipe(recipe: str, **changes) -> Config:
    """A recipe with other settings, as group__name."""
    changes = {path.replace("__", "."): value for path, value in changes.items()}
    return configs.replace(load_recipe(find_recipe(recipe)), changes)


@pytest.mark.parametrize("name", GATHER_OVERLAP)
def test_as_much_of_zeros_collectives_overlaps_as_libtpu_makes_asynchronous(name):
    changes = {"mesh.data": 8, "mesh.stage": 1, "mesh.model": 1, "parallel.zero": 3}
    config = configs.replace(small.config(), changes | {"parallel.reduce": "auto"}).resolve()
    step = step_model_of(config, load(name)).step()
    hidden, exposed = step.hidden.get("data", 0.0), step.exposed["data"]
    assert hidden / (hidden + exposed) == pytest.approx(GATHER_OVERLAP[name], abs=0.02)


# --- the precision of any framework ---------------------------------------------------------------

LLAMA = of_recipe("llama3_8b", data__batch_size=16, mesh__data=8, pipeline__microbatches=1)

LAYOUT = {"mesh.stage": 1, "parallel.zero": 1, "pipeline.remat": "none", "pipeline.save": ()}


def planned(framework: str, hardware: str = "b200", **changes):
    """The step of LLAMA with ZeRO-1 and other settings on eight devices."""
    changes = {path.replace("__", "."): value for path, value in changes.items()}
    config = configs.replace(LLAMA, LAYOUT | changes).resolve()
    return step_model_of(config, load(hardware), framework)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_products_follow_their_format(framework):
    """Those of layers; attention's core and the passes over memory stay. More than a half remains:
    the head is not quantized, and the numbers are to be rounded."""
    formats = ("compute", "fp8", "mxfp8", "nvfp4", "int8")
    steps = {name: planned(framework, precision__matmul=name).step().exposed for name in formats}
    products = {name: step["matmuls"] for name, step in steps.items()}
    assert products["nvfp4"] < products["fp8"] < 0.8 * products["compute"]
    assert 0.5 * products["compute"] < products["mxfp8"] < 0.8 * products["compute"]
    assert products["int8"] == products["fp8"]  # on a GPU whose peaks for both are the same
    for part in ("attention", "memory"):
        assert len({step[part] for step in steps.values()}) == 1


def test_experts_follow_their_format():
    def products(matmul: str) -> float:
        config = of_recipe(
            "mixtral_8x7b",
            data__batch_size=64,
            mesh__data=2,
            pipeline__microbatches=2,
            precision__matmul=matmul,
        ).resolve()
        return step_model_of(config, load("gb300"), "megatron_core").step().exposed["matmuls"]

    assert products("nvfp4") < products("mxfp8") < 0.75 * products("compute")


def test_a_4_bit_number_is_sent_in_16():
    """Weights that ZeRO-3 gathers; FP8 is gathered in 8 bits."""
    bytes_of = lambda matmul: sum(
        gather.size
        for step in [planned("megatron_core", parallel__zero=3, precision__matmul=matmul)]
        for gather in step.collectives.gathers(step.device.groups[:2])
    )
    assert bytes_of("nvfp4") == bytes_of("compute") == pytest.approx(2 * bytes_of("fp8"), rel=0.01)


def test_torchtitan_makes_half_of_the_products_again_and_all_in_fp8():
    """Selective recomputation saves every other aten.mm: of Llama's the products with the matrices
    of keys, of attention's result and one of the two that go up, half of all but those down."""
    for matmul, part in (("compute", 0.5), ("fp8", 1.0)):
        step = planned(
            "torchtitan",
            "h100",
            pipeline__remat="selective",
            precision__matmul=matmul,
        )
        forward = [p.forward for p in step.layers._layer("selective").work.products(False)][:-1]
        again = step.layers.ops(False)["R"].exposed["matmuls"]
        assert again == pytest.approx(part * sum(forward))


@pytest.mark.parametrize(
    ("framework", "changes", "weights", "masters", "moments", "sent"),
    [
        ("megatron_core", {}, 2, 4, 4, 2),
        ("megatron_core", {"precision.params": "bfloat16"}, 2, 4, 4, 2),
        (
            "megatron_core",
            {"precision.params": "bfloat16", "precision.masters": "none"},
            2,
            0,
            4,
            2,
        ),
        ("megatron_core", {"precision.moments": "bfloat16"}, 2, 4, 2, 2),
        ("maxtext", {}, 4, 0, 4, 4),
        ("maxtext", {"precision.params": "bfloat16"}, 2, 4, 4, 4),
        ("maxtext", {"precision.params": "bfloat16", "precision.masters": "none"}, 2, 0, 4, 4),
        ("maxtext", {"precision.reduce": "bfloat16"}, 4, 0, 4, 2),
    ],
)
def test_types_of_a_framework_stand_unless_the_config_has_others(
    framework, changes, weights, masters, moments, sent
):
    step, usual = planned(framework, "tpu-v6e", **changes), planned(framework, "tpu-v6e")
    settings = step.settings
    assert (settings.weight_bytes, settings.master_bytes) == (weights, masters)
    assert (settings.moment_bytes, settings.sent_gradient) == (moments, sent)
    changed = settings != usual.settings and changes != {"precision.params": "bfloat16"}
    assert (step.step() != usual.step()) >= changed and (
        (memory(step).bytes < memory(usual).bytes) >= (changed and sent != 2)
    )


# --- no setting is ignored in silence -------------------------------------------------------------

SMALL = {
    "model__vocab_size": 512,
    "data__sequence_length": 256,
    "data__batch_size": 32,
    "precision__compute": "bfloat16",
}
BASES = {
    "dense": of_recipe(
        "tiny", **SMALL, mesh__data=4, mesh__stage=1, mesh__model=1, parallel__zero=3
    ),
    "stages": of_recipe(
        "tiny",
        **SMALL,
        model__layers=8,
        mesh__data=2,
        mesh__stage=2,
        mesh__context=2,
        mesh__model=1,
        pipeline__microbatches=4,
        pipeline__remat="full",
    ),
    "experts": of_recipe(
        "mixtral_tiny", **SMALL, mesh__data=2, mesh__stage=2, mesh__expert=2, mesh__model=1
    ),
}
LISTS = {
    "pipeline.chunk_layers": [(3, 5), (1, 3)],
    "pipeline.times": [(1.0, 2.0, 3.0, 1.0, 1.0, 1.0)],
    "pipeline.save": [("layer_input",), ("qkv", "attention")],
    "model.biases": [("qkv", "out")],
    "model.pattern": [("nope", "full")],
    "parallel.compiler_options": [("xla_gpu_enable_latency_hiding_scheduler=true",)],
}
# Where stages do not share the vocabulary, the first and the last have a table each, tied or not.
# The sum of both gradients is a message that plans of others leave out (docs/limits.md).
LEFT_OUT = ("model.tied_embeddings",)
SETTINGS = [path for path in configs.fields() if path.startswith(GROUPS)]


def drawn(seed: int, bases, devices: int = 0) -> tuple[str, Config, Config]:
    """(a setting, a config, the same with another value of it), both of which keep all rules."""
    draw = random.Random(seed)
    while True:
        base, path = draw.choice(list(bases.values())), draw.choice(SETTINGS)
        field, now = configs.fields()[path], configs.get(base, path)
        values = LISTS.get(path) or [v for v in configs.setting_of(field).choices.names if v != now]
        if isinstance(field.default, bool):
            values = [not now]
        elif not values and isinstance(field.default, int | float):
            values = [2 * now, now + 1, type(field.default)(now / 2)]
        if not values or isinstance(field.default, tuple) and path not in LISTS:
            continue
        changed = configs.replace(base, {path: draw.choice(values)})
        count = math.prod(sizes_of(base.mesh))
        if changed != base and not checks.first_violation(changed, Environment(count, "gpu", base)):
            return path, base, changed


@functools.cache
def figures(config: Config, framework: str) -> tuple[float, float]:
    """Seconds and bytes of a plan for H100s."""
    plan = exactly(predict(config.resolve(), load("h100"), framework))
    return round(plan.seconds, 12), plan.memory.bytes


def named(path: str, config: Config, framework: str) -> bool:
    """True if a line of the plan says that it does not follow the setting."""
    return any(f"{path}=" in line for line in unfollowed(config.resolve(), FRAMEWORKS[framework]))


@pytest.mark.parametrize(
    "seed", [*range(6), *[pytest.param(n, marks=pytest.mark.full) for n in range(6, 120)]]
)
def test_a_setting_that_changes_our_plan_changes_others_or_a_line_says_so(seed):
    path, base, changed = drawn(seed, BASES)
    ours = figures(base, OURS) != figures(changed, OURS)
    for framework in random.Random(seed).sample(OTHERS, 2):
        theirs = figures(base, framework) != figures(changed, framework)
        own = [getattr(FRAMEWORKS[framework], name) for name in DECIDED.get(path, ())]
        asked = [
            getattr(settings_of_run(changed.resolve()), name) for name in DECIDED.get(path, ())
        ]
        same = bool(own) and own == asked or path in LEFT_OUT
        assert theirs or not ours or named(path, changed, framework) or same, (path, framework)
        assert not (theirs and path in OF_OURS), (path, framework)


@functools.cache
def lowered(config: Config) -> tuple[float, float, int]:
    """FLOPs, bytes read and written, and bytes of the arguments of the program of a step on one
    device, as it is before XLA compiles it."""
    config = config.resolve()
    mesh = make_mesh(sizes_of(config.mesh), jax.devices()[:1])
    with jax.set_mesh(mesh):
        program = make_step(config, mesh, make_setup(config)).lower()
    cost = program.cost_analysis()
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(program.in_avals))
    return cost["flops"], cost["bytes accessed"], size


ON_ONE = {f"mesh__{axis}": 1 for axis in ("data", "stage", "context", "expert", "model")}
PROGRAMS = {
    recipe: of_recipe(
        recipe,
        **SMALL | ON_ONE | {"data__batch_size": 4, "data__sequence_length": 64},
        pipeline__microbatches=2,
    )
    for recipe in ("tiny", "mixtral_tiny")
}


@pytest.mark.parametrize(
    "seed", [*range(3), *[pytest.param(n, marks=pytest.mark.full) for n in range(3, 60)]]
)
def test_a_setting_that_changes_our_program_changes_its_plan_or_a_line_says_so(seed):
    path, base, changed = drawn(1000 + seed, PROGRAMS)
    same = figures(base, OURS) == figures(changed, OURS)
    if same and not named(path, changed, OURS) and path not in without_use(changed):
        # Most elementwise work joins other loops when it is compiled: casts of gradients, which one
        # device does not send, are 3 % of the bytes before.
        for now, then, most in zip(lowered(base), lowered(changed), (0.03, 0.05, 0.0), strict=True):
            assert now == pytest.approx(then, rel=most), path


def test_a_line_names_what_has_a_use_and_is_not_followed():
    changes = {
        "pipeline.layers_per_op": 1,
        "parallel.compiler_options": ("xla_gpu_enable_latency_hiding_scheduler=true",),
    }
    for base, uses in (("stages", True), ("dense", False)):  # one stage has no use for the first
        config = configs.replace(BASES[base], changes)
        for framework in (OURS, "maxtext"):
            assert not unfollowed(BASES[base].resolve(), FRAMEWORKS[framework])
            assert named("parallel.compiler_options", config, framework)
            others = uses and framework != OURS
            assert named("pipeline.layers_per_op", config, framework) == others
