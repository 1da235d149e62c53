"""From a run's config to the `StepModel` whose time and memory are computed: the model's sizes,
the layout, the framework and the hardware."""

import dataclasses
from collections.abc import Iterable

from jaxtrain.config import (
    Config,
    MeshConfig,
    ParallelConfig,
    PipelineConfig,
    ends_with_layers,
    kernels,
)
from jaxtrain.config.kernels import QUANTIZED
from jaxtrain.planner.step import hardware as kinds
from jaxtrain.planner.step.frameworks import FRAMEWORKS, Framework
from jaxtrain.planner.step.hardware import Hardware
from jaxtrain.planner.step.layout import Layout
from jaxtrain.planner.step.model import model_of
from jaxtrain.planner.step.settings import bytes_of
from jaxtrain.planner.step.step_time import StepModel

OURS = "jaxtrain"
# XLA's CPU backend copies a layer's weights out of their stack, and adds gradients that it has
# written.
WEIGHT_COPIES, SUM_PASSES = 2.0, 3.0
# Passes over the scores in the forward, in units of 16 bits; the scores have 32. A product writes
# them, a softmax reads them twice and writes them, a product reads them.
SCORE_PASSES = 10.0
# bytes of a parameter: its value after the last exchange, and its momentum, in 32 bits
# (training/diloco.py)
OUTER_BYTES = 8.0
# Fraction of the messages of routed tokens that have products of the other microbatch between their
# start and their done in an overlapped cell, as XLA compiles it for H100s (tests/runtime/
# test_ahead.py): all of them; or where `model` splits layers, so that they do not wait for each
# other in turn, what XLA finds by itself. No time is measured. For TPUs no gain is
# counted: for v5p all are covered, too, but a step is 1 % shorter, and it was compiled for no
# other.
CELL_OVERLAP, UNTIED_OVERLAP = 1.0, 0.75
# Fraction of the time of ZeRO-3's all-gathers and reduce-scatters that has other work beside it, as
# libtpu compiles Llama 3 8B for 64 chips (docs/parts.md): by hardware; those that are left out are
# taken to overlap as GPUs' do.
GATHER_OVERLAP = {"tpu-v5p": 0.26}
DIGITS = 4  # significant digits of an op time


def step_model_of(config: Config, hardware: Hardware, assume: str = OURS) -> StepModel:
    """The step of a resolved config, none of whose mesh sizes is −1, on one kind of hardware.

    assume: the framework that runs it, a name of frameworks.FRAMEWORKS
    """
    return StepModel(
        model_of(config.model, config.data.sequence_length),
        layout_of(config.mesh, config.pipeline, config.parallel, config.data.batch_size),
        framework_of(config, hardware, assume),
        hardware,
        config.precision.compute,
        config.optimizer,
    )


def _cell_overlap(config: Config, hardware: Hardware) -> float:
    """Framework.cell_overlap of a config."""
    if platform_of(hardware) != kernels.GPU:
        return 0.0
    return UNTIED_OVERLAP if config.mesh.model > 1 else CELL_OVERLAP


def _collective_matmul(config: Config, hardware: Hardware) -> bool:
    """Framework.collective_matmul of a config."""
    if config.mesh.model == 1 or config.precision.matmul in QUANTIZED:
        return False
    layout = layout_of(config.mesh, config.pipeline, config.parallel, config.data.batch_size)
    tokens = layout.microbatch * config.data.sequence_length // config.mesh.context
    part = tokens // config.mesh.model * config.model.width * bytes_of(config.precision.compute)
    return kernels.multiplies_while_sending(
        config.parallel.collective_matmul, platform_of(hardware), config.mesh.stage, part
    )


def milliseconds(times: Iterable[float]) -> tuple[float, ...]:
    """Seconds as milliseconds, rounded to four significant digits, in the form of
    `pipeline.times`."""
    return tuple(float(f"{1e3 * seconds:.{DIGITS}g}") for seconds in times)


def hardware_at_hand(name: str, device_kind: str) -> Hardware | None:
    """The hardware of this name, `train.hardware`, or, if it is empty, the one whose devices jax
    calls `device_kind`; None for devices that are not known, such as any CPU. Raises HardwareError
    for a name that is not known."""
    return kinds.load(name) if name else kinds.of_device(device_kind)


def layout_of(
    mesh: MeshConfig, pipeline: PipelineConfig, parallel: ParallelConfig, batch_size: int
) -> Layout:
    """The layout of a resolved config, none of whose mesh sizes is −1, and whose batch the shards
    and microbatches divide."""
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


def framework_of(config: Config, hardware: Hardware, assume: str = OURS) -> Framework:
    """The framework named `assume`, with what a resolved config changes about it: the kernel of
    attention, the stages that have embedding and head, the types and times of collectives, and the
    state of independent replicas."""
    framework = FRAMEWORKS[assume]
    vocabulary = config.pipeline.vocabulary
    if vocabulary != "auto":
        framework = dataclasses.replace(framework, vocabulary_parallel=vocabulary == "parallel")
    elif ends_with_layers(config.model):
        framework = dataclasses.replace(framework, vocabulary_parallel=False)
    if assume == OURS:
        framework = dataclasses.replace(
            framework,
            sent_gradient=4.0 if config.precision.reduce == "float32" else 2.0,
            # experts with a capacity compute that many tokens, whether they are there or not
            imbalance=config.model.capacity_factor or framework.imbalance,
            context_by=config.parallel.context,
            gathers_once=config.parallel.gather == "step",
            gather_overlap=GATHER_OVERLAP.get(hardware.name, framework.gather_overlap),
            cell_overlap=_cell_overlap(config, hardware),
            collective_matmul=_collective_matmul(config, hardware),
            documents=not config.data.attend_across_documents,
            beside_products=config.parallel.collective_matmul,
            inner_steps=config.train.diloco_inner_steps,
            outer_bytes=OUTER_BYTES * (config.train.diloco_inner_steps > 0),
            sent_outer=4.0 if config.precision.outer == "float32" else 1.0,
            fp8=config.precision.matmul in QUANTIZED,
            fp8_blocks=config.precision.matmul == "mxfp8",
            fp8_weight_gradients=config.precision.fp8_weight_gradients == "fp8",
            moment_bytes=bytes_of(config.precision.moments),
        )
        if config.precision.params != "float32":
            number = bytes_of(config.precision.params)
            framework = dataclasses.replace(
                framework,
                weight_bytes=number,
                sent_weight=number,
                master_bytes=4.0 * (config.precision.masters == "float32"),
            )
        if platform_of(hardware) == kernels.CPU:
            framework = dataclasses.replace(
                framework, weight_copies=WEIGHT_COPIES, sum_passes=SUM_PASSES
            )
    case = kernels.attention_case(
        kernels.TargetDevice(platform_of(hardware)),
        config.model,
        config.data,
        config.mesh,
        config.parallel,
        config.precision,
    )
    wanted = config.model.attention_kernel
    chosen = kernels.attention_kernel(case, wanted).kernel if assume == OURS else ""
    if chosen == kernels.SPLASH:
        backward = kernels.backward_of_splash(case, config.model.attention_backward)
        framework = dataclasses.replace(framework, attention_backward=backward.products / 2)
    if framework.fused_attention and _scores_pass_through_memory(case, wanted, assume):
        framework = dataclasses.replace(
            framework,
            fused_attention=False,
            attention_passes=framework.attention_passes or SCORE_PASSES,
        )
    return framework


def _scores_pass_through_memory(case: kernels.AttentionCase, wanted: str, assume: str) -> bool:
    """True if attention has no fused kernel: plain XLA is asked for, or, in our own framework, no
    other kernel takes the case. wanted: model.attention_kernel"""
    if wanted != "auto" or assume != OURS:
        return wanted == kernels.XLA
    # a file of `--calibrate`: plain XLA is what it has measured
    if case.device.platform == kernels.CPU:
        return False
    return kernels.attention_kernel(case).kernel == kernels.XLA


def platform_of(hardware: Hardware) -> str:
    """The platform of a hardware by jax's name: tpu, cpu or gpu."""
    name = hardware.name.lower()
    return next(
        (platform for platform in (kernels.TPU, kernels.CPU) if name.startswith(platform)),
        kernels.GPU,
    )
