"""What a layer of our own runtime saves of a microbatch: the runtime's own cut of the layer, traced
for devices that need not be there (runtime/saved_bytes.py). jax is imported for the first trace."""

import functools

from jaxtrain.config import ModelConfig, PrecisionConfig, kernels
from jaxtrain.config.saved_values import LayerBytes
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.planner.step.step_time import StepModel

SAVE_ALL = ("none", "full")  # modes of remat whose residuals are all that the backward reads


def layer_bytes(step: StepModel, dense: bool = False, remat: str = "") -> LayerBytes:
    """The bytes of one layer. dense: of the layers before those with experts; remat: the mode, the
    layout's if not given."""
    model, layout, settings = step.model, step.layout, step.settings
    platform, sequences = step.hardware.platform, layout.microbatch
    traced = 1 if settings.by_sequence else sequences
    ring = layout.context > 1 and settings.parallel.context == "ring"
    # where a layer differs with the number of stages
    several = layout.stage > 1 and (ring or (layout.model > 1 and platform == kernels.TPU))
    mode, own = remat or layout.recomputation.mode, layout.recomputation.mode
    # a trace is cut in two ways: with everything saved, and in this mode
    cut = next((m for m in (mode, own) if m not in SAVE_ALL), SELECTIVE)
    everything, saved = _traced(
        model.of_one_layer,
        settings.precision,
        cut,
        layout.save if cut == own else (),
        (1, 1, 1 + several, layout.context, layout.expert, layout.model),
        (traced, model.sequence // layout.context),
        platform,
        dense and model.dense_layers > 0,
        settings.documents,
        settings.parallel.context if layout.context > 1 else "all_gather",
        layout.expert_nodes,
        step.multiplies_while_sending,
    )
    of_mode = everything if mode in SAVE_ALL else saved
    return LayerBytes(*(n * sequences // traced for n in of_mode))


@functools.lru_cache(2**12)
def _traced(
    model: ModelConfig,
    precision: PrecisionConfig,
    mode: str,
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
        mode,
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
