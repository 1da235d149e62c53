"""What a layer of our own runtime saves of a microbatch: the runtime's own cut of the layer, traced
for devices that need not be there (runtime/saved_bytes.py). jax is imported for the first trace."""

from jaxtrain.config import PrecisionConfig, kernels
from jaxtrain.config.saved_values import LayerBytes
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.planner.step.step_part import StepPart

SAVE_ALL = ("none", "full")  # modes of remat whose residuals are all that the backward reads


def layer_bytes(step: StepPart, dense: bool = False, remat: str = "") -> LayerBytes:
    """The bytes of one layer. dense: of the layers before those with experts; remat: the mode, the
    layout's if not given."""
    from jaxtrain.runtime.saved_bytes import saved_bytes

    model, layout, settings = step.model, step.layout, step.settings
    platform, sequences = step.hardware.platform, layout.microbatch
    # Other frameworks have experts in formats that our own products do not take.
    in_compute = PrecisionConfig(compute=settings.precision.compute)
    traced = 1 if settings.by_sequence else sequences
    ring = layout.context > 1 and settings.parallel.context == "ring"
    # where a layer differs with the number of stages
    several = layout.stage > 1 and (ring or (layout.model > 1 and platform == kernels.TPU))
    of_layout = layout.recomputation.mode
    mode = remat or of_layout
    # a trace is cut in two ways: with everything saved, and in this mode
    cut = next((m for m in (mode, of_layout) if m not in SAVE_ALL), SELECTIVE)
    # a dense layer is the same on all devices of `expert`, whose batch is cut
    experts = not (dense and model.dense_layers)
    everything, saved = saved_bytes(
        model.of_one_layer,
        settings.precision if settings.ours else in_compute,
        cut,
        layout.save if cut == of_layout else (),
        (1, 1, 1 + several, layout.context, layout.expert if experts else 1, layout.model),
        (traced, model.sequence // layout.context),
        platform,
        dense=not experts,
        documents=settings.documents,
        context=settings.parallel.context if layout.context > 1 else "all_gather",
        expert_nodes=layout.expert_nodes if experts else 1,
        beside_products="on" if step.multiplies_while_sending else "off",
    )
    of_mode = everything if mode in SAVE_ALL else saved
    return LayerBytes(*(n * sequences // traced for n in of_mode))


def bytes_on_host(step: StepPart, remat: str) -> tuple[float, float]:
    """Bytes that the forward of one layer with this mode of remat leaves in the host's memory of a
    microbatch: (all of them, those that W reads).

    The layer's input stands for all that full recomputation starts from.
    """
    every = step.layout.offloads("activations") or remat == "full"
    return layer_bytes(step, remat=remat).on_host(remat, every and step.layout.saves_on_host)
