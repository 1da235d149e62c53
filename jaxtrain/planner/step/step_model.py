"""From a run's config to the `StepModel` whose time and memory are computed: the model's sizes,
the layout, the settings and the hardware."""

import dataclasses
import math
import os
from collections.abc import Iterable

from jaxtrain import config as cfg
from jaxtrain.config import (
    FilledConfig,
    MeshConfig,
    ParallelConfig,
    PipelineConfig,
    ResolvedConfig,
    ends_with_layers,
    kernels,
)
from jaxtrain.config.groups.layer_kinds import models_of_kinds
from jaxtrain.config.rules.unused import without_use
from jaxtrain.config.sizes import gpu_memory
from jaxtrain.planner.layer import hardware as kinds
from jaxtrain.planner.layer.hardware import Hardware
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.model import model_of
from jaxtrain.planner.layer.settings import Rates, StepSettings, bytes_of
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS
from jaxtrain.planner.step.step_time import StepModel

OURS = "jaxtrain"
# Fraction of a GPU's memory for arrays with PyTorch's allocator, which has no limit: CUDA's context
# and NCCL's buffers have 2 to 5 GB.
TORCH_MEMORY = 0.97
# XLA's CPU backend copies a layer's weights out of their stack, and adds gradients that it has
# written.
WEIGHT_COPIES, SUM_PASSES = 2.0, 3.0
# Passes over the scores in the forward, in units of 16 bits; the scores have 32. A product writes
# them, a softmax reads them twice and writes them, a product reads them.
SCORE_PASSES = 10.0
# Fraction of the messages of routed tokens that have products of the other microbatch between their
# start and their done in an overlapped cell, as XLA compiles it for H100s (tests/runtime/
# test_ahead.py): all of them; or where `model` splits layers, so that they do not wait for each
# other in turn, what XLA finds by itself. No time is measured. For TPUs no gain is
# counted: for v5p all are covered, too, but a step is 1 % shorter, and it was compiled for no
# other.
CELL_OVERLAP, UNTIED_OVERLAP = 1.0, 0.75
# Fraction of the time of ZeRO-3's all-gathers and reduce-scatters that has other work beside it, as
# libtpu compiles Llama 3 8B for 64 chips (docs/log/2026-11.md): by hardware; those that are left
# out are taken to overlap as GPUs' do.
GATHER_OVERLAP = {"tpu-v5p": 0.26}
# Fractions, by bytes, of the copies of what layers save to the host and back that have products
# beside them, as XLA compiles Llama 3 8B (tests/runtime/test_ahead.py), by platform and whether
# there are several stages. What an op needs first is waited for.
HOST_OVERLAP = {
    (kernels.GPU, False): (1.0, 0.43),
    (kernels.GPU, True): (0.6, 0.03),
    (kernels.TPU, False): (0.71, 0.86),
    (kernels.TPU, True): (1.0, 0.75),
}
# A setting → what it decides of the step of another framework, whose own defaults stand where the
# setting is at its default.
DECIDED = {
    "precision.params": ("weight_bytes", "master_bytes", "copied_bytes", "sent_weight"),
    "precision.moments": ("moment_bytes",),
    "precision.reduce": ("sent_gradient",),
    "train.diloco_inner_steps": ("inner_steps",),
}
# Settings that a step reads and plans do not follow, as one line of each plan says: of any
# framework, and of others than ours.
OF_NO_PLAN = ("parallel.compiler_options", "train.on_nonfinite")
OF_OURS = (
    "optimizer.ema_decay",
    "model.router",
    "model.router_normalize",
    "model.z_loss",
    "model.norm",
    "model.attention_backward",
    "data.attend_across_documents",
    "parallel.reduce",
    "parallel.ends",
    "parallel.collective_matmul",
    "pipeline.steps_per_program",
    "pipeline.overlap",
    "pipeline.layers_per_op",
    "pipeline.chunk_layers",
    "pipeline.layer_costs",
    "pipeline.permute",
    "pipeline.times",
    "pipeline.memory",
)


def step_model_of(config: ResolvedConfig, hardware: Hardware, assume: str = OURS) -> StepModel:
    """The step of a config on one kind of hardware.

    assume: the framework that runs it, a name of other_frameworks.FRAMEWORKS
    """
    hardware = with_allocator(hardware, assume)
    return StepModel(
        model_of(config.model, config.data.sequence_length),
        layout_of(config.mesh, config.pipeline, config.parallel, config.data.batch_size),
        settings_of(config, hardware, assume),
        hardware,
    )


def with_allocator(hardware: Hardware, assume: str) -> Hardware:
    """The hardware of which arrays may take what the allocator of a framework takes, unless its
    file says what."""
    of_jax = FRAMEWORKS[assume].by_xla or hardware.platform != kernels.GPU
    if of_jax or hardware.memory_usable != gpu_memory(os.environ):
        return hardware
    return dataclasses.replace(hardware, memory_usable=TORCH_MEMORY)


def milliseconds(times: Iterable[float]) -> tuple[float, ...]:
    """Seconds as milliseconds, rounded to four significant digits, in the form of
    `pipeline.times`."""
    return tuple(float(f"{1e3 * seconds:.4g}") for seconds in times)


def hardware_at_hand(name: str, device_kind: str) -> Hardware | None:
    """The hardware of this name, `train.hardware`, or, if it is empty, the one whose devices jax
    calls `device_kind`; None for devices that are not known, such as any CPU. Raises HardwareError
    for a name that is not known."""
    return kinds.load(name) if name else kinds.of_device(device_kind)


def layout_of(
    mesh: MeshConfig,
    pipeline: PipelineConfig,
    parallel: ParallelConfig,
    batch_size: int,
) -> Layout:
    """The layout of a resolved config whose batch the shards and microbatches divide."""
    return Layout(
        data=mesh.data,
        stage=mesh.stage,
        model=mesh.model,
        context=mesh.context,
        expert=mesh.expert,
        replica=mesh.replica,
        microbatch=batch_size // (mesh.replica * mesh.data * mesh.expert * pipeline.microbatches),
        microbatches=pipeline.microbatches,
        repeats=max(1, pipeline.repeats),
        layers_per_op=pipeline.layers_per_op,
        remat=pipeline.remat,
        save=pipeline.save,
        zero=parallel.zero,
        shards_ends=parallel.ends == "sharded",
        expert_nodes=parallel.expert_nodes if mesh.expert > 1 else 1,
        schedule=pipeline.schedule,
        offload=parallel.offload,
        disk=parallel.offload_to("optimizer") == "disk",
        steps=pipeline.steps_per_program if mesh.stage > 1 else 1,
        overlap=pipeline.overlap and mesh.stage > 1,
    )


def settings_of(config: FilledConfig, hardware: Hardware, assume: str = OURS) -> StepSettings:
    """The settings of the framework named `assume` with what a config changes about them:
    the types of its numbers, the optimizer, the kernel of attention, the use of the mesh, and the
    stages that have embedding and head.

    A framework has its own types of weights, masters, moments and sums of gradients. They follow
    the config where it has another type than this trainer's default: Megatron's weights have 16
    bits and its masters 32, unless `precision.params` is not float32.
    """
    settings, vocabulary = FRAMEWORKS[assume], config.pipeline.vocabulary
    if assume != OURS:
        run, fields = settings_of_run(config), cfg.fields()
        changed = [path for path in DECIDED if cfg.get(config, path) != fields[path].default]
        settings = dataclasses.replace(
            settings,
            parallel=dataclasses.replace(config.parallel, collective_matmul="off"),
            **{name: getattr(run, name) for path in changed for name in DECIDED[path]},
        )
    else:
        on_cpu, several = hardware.platform == kernels.CPU, config.mesh.stage > 1
        covered = UNTIED_OVERLAP if config.mesh.model > 1 else CELL_OVERLAP
        settings = dataclasses.replace(
            settings_of_run(config),
            rates=Rates(
                gather_overlap=GATHER_OVERLAP.get(hardware.name, Rates.gather_overlap),
                cell_overlap=covered * (hardware.platform == kernels.GPU),
                weight_copies=WEIGHT_COPIES * on_cpu,
                sum_passes=SUM_PASSES * on_cpu,
                host_overlap=HOST_OVERLAP.get((hardware.platform, several), Rates.host_overlap),
            ),
        )
    parallel = settings.vocabulary_parallel and not ends_with_layers(config.model)
    # of the kind that sees most tokens, which takes most of attention's time
    model = max(models_of_kinds(config.model).values(), key=lambda kind: kind.window or math.inf)
    case = kernels.attention_case(
        kernels.TargetDevice(hardware.platform),
        model,
        config.data,
        config.mesh,
        config.parallel,
        config.precision,
    )
    wanted, backward = model.attention_kernel, settings.attention_backward
    chosen = kernels.attention_kernel(case, wanted).kernel if assume == OURS else ""
    if chosen == kernels.SPLASH:
        backward = kernels.backward_of_splash(case, model.attention_backward).products / 2
    # not on CPUs: what a file of `--calibrate` has for attention was measured in plain XLA
    plain = wanted == kernels.XLA or (chosen == kernels.XLA and hardware.platform != kernels.CPU)
    return dataclasses.replace(
        settings,
        precision=config.precision,
        optimizer=config.optimizer,
        vocabulary_parallel=parallel if vocabulary == "auto" else vocabulary == "parallel",
        fused_attention=settings.fused_attention and not plain,
        attention_passes=settings.attention_passes or SCORE_PASSES * plain,
        attention_backward=backward,
    )


def settings_of_run(config: FilledConfig) -> StepSettings:
    """The settings of our own step by a config, but for those that depend on the hardware
    and those of every framework."""
    precision = config.precision
    # "auto" where it is what the layout's own default stands for, which other layouts have, too
    automatic = cfg.replace(config, {"parallel.reduce": "auto"})
    chosen = config.parallel.reduce != automatic.fill().parallel.reduce
    stored = bytes_of(precision.params)
    masters = precision.params != "float32" and precision.masters == "float32"
    return StepSettings(
        weight_bytes=stored,
        sent_weight=stored,
        master_bytes=4.0 * masters,
        copied_bytes=stored * masters,
        moment_bytes=bytes_of(precision.moments),
        sent_gradient=bytes_of(precision.reduce),
        precision=precision,
        optimizer=config.optimizer,
        parallel=config.parallel if chosen else automatic.parallel,
        inner_steps=config.train.diloco_inner_steps,
        documents=not config.data.attend_across_documents,
    )


def unfollowed(config: ResolvedConfig, settings: StepSettings) -> list[str]:
    """A line that names the settings of a config which the plan of a framework's step does
    not follow, among those that are not at their defaults and have a use; [] for none."""
    idle, names = without_use(config), (*OF_NO_PLAN, *OF_OURS * (not settings.ours))
    usual = cfg.replace(config, {path: cfg.fields()[path].default for path in names}).fill()
    changed = [
        f"{path}={cfg.value_text(cfg.get(config, path))}"
        for path in names
        if path not in idle and cfg.get(config, path) != cfg.get(usual, path)
    ]
    text = f"a plan of the framework {settings.name} does not follow {', '.join(changed)}"
    return [cfg.one_line(text)] * bool(changed)
