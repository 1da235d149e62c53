"""What a layer of our own runtime saves of a microbatch: the runtime's own cut of the layer, traced
for devices that need not be there (runtime/saved_bytes.py). jax is imported for the first trace."""

import functools

from jaxtrain.config import ModelConfig, PrecisionConfig, kernels
from jaxtrain.config.saved_values import LayerBytes
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.planner.step.settings import StepSettings
from jaxtrain.planner.step.step_model import platform_of
from jaxtrain.planner.step.step_time import StepModel


def layer_bytes(step: StepModel, dense: bool = False, remat: str = "") -> LayerBytes:
    """The bytes of one layer. dense: of the layers before those with experts; remat: the layout's
    if not given. Full recomputation saves all, in R instead of F."""
    model, layout, settings = step.model, step.layout, step.settings
    platform, sequences = platform_of(step.hardware), layout.microbatch
    traced = 1 if settings.by_sequence else sequences
    ring = layout.context > 1 and settings.context_by == "ring"
    # where a layer differs with the number of stages
    several = layout.stage > 1 and (ring or (layout.model > 1 and platform == kernels.TPU))
    part = sequences * model.sequence * model.width * step.item // (layout.context * layout.model)
    everything, selective = _traced(
        model.of_one_layer,
        _precision(settings),
        layout.save if layout.recomputation.mode == SELECTIVE else (),
        (1, 1, 1 + several, layout.context, layout.expert, layout.model),
        (traced, model.sequence // layout.context),
        platform,
        dense and model.dense_layers > 0,
        settings.documents,
        settings.context_by if layout.context > 1 else "all_gather",
        layout.expert_nodes,
        layout.model > 1
        and kernels.multiplies_while_sending(
            settings.beside_products, platform, layout.stage, part
        ),
    )
    saved = selective if (remat or layout.recomputation.mode) == SELECTIVE else everything
    return LayerBytes(*(n * sequences // traced for n in saved))


@functools.lru_cache(2**6)
def _precision(settings: StepSettings) -> PrecisionConfig:
    """The formats of a layer's numbers."""
    matmul = "mxfp8" if settings.fp8_blocks else "fp8" if settings.fp8 else "compute"
    weights = "fp8" if settings.fp8_weight_gradients else "compute"
    return PrecisionConfig(compute=settings.dtype, matmul=matmul, fp8_weight_gradients=weights)


@functools.lru_cache(2**12)
def _traced(
    model: ModelConfig,
    precision: PrecisionConfig,
    save: tuple[str, ...],
    mesh: tuple[int, ...],
    microbatch: tuple[int, int],
    platform: str,
    dense: bool,
    documents: bool,
    context: str,
    expert_nodes: int,
    beside_products: bool,
) -> tuple[LayerBytes, LayerBytes]:
    """`saved_bytes` of a layer, once for all that it depends on."""
    from jaxtrain.runtime.saved_bytes import saved_bytes

    return saved_bytes(
        model,
        precision,
        save,
        mesh,
        microbatch,
        platform,
        dense=dense,
        documents=documents,
        context=context,
        expert_nodes=expert_nodes,
        beside_products="on" if beside_products else "off",
    )
