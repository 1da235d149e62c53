"""What a layer of our own runtime saves of a microbatch: the runtime's own cut of the layer, traced
for devices that need not be there (runtime/layers/saved_bytes.py). jax is imported for the first
trace."""

import dataclasses

from jaxtrain.config import PrecisionConfig, kernels
from jaxtrain.config.saved_values import LayerBytes
from jaxtrain.config.sizes import SELECTIVE
from jaxtrain.planner.step.step_part import StepPart, once

# Parts of what one device saves of one sequence that a mesh's devices save together at least:
# counts and offsets may not grow with the sequences. Where layers differ with the number of stages,
# attention may save half; of layers drawn at random it was 0.55 at least, of others 0.96.
SURELY, SURELY_STAGES = 0.95, 0.5
SAVE_ALL = ("none", "full")  # modes of remat whose residuals are all that the backward reads


class SavedBytes(StepPart):
    """What layers save."""

    reads = ("stage", "context", "expert", "model", "microbatch", "remat", "save", "expert_nodes")

    @once
    def of_layer(self, dense: bool, remat: str) -> LayerBytes:
        """The bytes of one layer, as in `layer_bytes`."""
        from jaxtrain.runtime.layers.saved_bytes import LayerOnMesh, saved_bytes

        model, layout, settings = self.model, self.layout, self.settings
        platform, sequences = self.hardware.platform, layout.microbatch
        traced = 1 if settings.by_sequence else sequences
        # where a layer differs with the number of stages
        several = layout.stage > 1 and (
            (layout.context > 1 and settings.parallel.context == "ring")
            or (layout.model > 1 and platform == kernels.TPU)
        )
        of_layout = layout.recomputation.mode
        mode, dense = remat or of_layout, dense and model.dense_layers > 0
        # a trace is cut in two ways: with everything saved, and in this mode
        cut = next((m for m in (mode, of_layout) if m not in SAVE_ALL), SELECTIVE)
        # devices of `expert` have a dense layer each
        expert, nodes = (1, 1) if dense else (layout.expert, layout.expert_nodes)
        layer = LayerOnMesh(
            model.of_one_layer,
            # other frameworks have experts in formats that our own products do not take
            settings.precision
            if settings.ours
            else PrecisionConfig(compute=settings.precision.compute),
            dense,
            traced,
            model.sequence // layout.context,
            settings.documents,
            mesh_sizes=(1, 1, 1 + several, layout.context, expert, layout.model),
            platform=platform,
            context=settings.parallel.context if layout.context > 1 else "all_gather",
            expert_nodes=nodes,
            beside_products="on" if self.multiplies_while_sending else "off",
        )
        everything, saved = saved_bytes(layer, cut, layout.save if cut == of_layout else ())
        return LayerBytes(
            *(n * sequences // traced for n in (everything if mode in SAVE_ALL else saved))
        )


class LeastSaved(SavedBytes):
    """At most what layers save, for any mesh by the trace of one sequence on one device, or two of
    `expert`: devices of `context` and `model` split a value, or each have all of it."""

    @once
    def of_layer(self, dense: bool, remat: str) -> LayerBytes:
        """At most the bytes of one layer, as in `layer_bytes`."""
        layout, settings = self.layout, dataclasses.replace(self.settings, by_sequence=True)
        experts, parts = min(layout.expert, 2), layout.context * layout.model
        one = dataclasses.replace(
            layout, stage=1, context=1, expert=experts, model=1, expert_nodes=1
        )
        saved = SavedBytes(self.model, one, settings, self.hardware).of_layer(dense, remat)
        surely = SURELY_STAGES if layout.stage > 1 and parts > 1 else SURELY
        b, w, stash, x = (int(surely * size / parts) for size in saved[:4])
        return LayerBytes(b, w, stash, x, gathered=0, normed=0, remade=0)


def layer_bytes(step: StepPart, dense: bool = False, remat: str = "") -> LayerBytes:
    """The bytes of one layer. dense: of the layers before those with experts; remat: the mode, the
    layout's if not given."""
    return step.part(SavedBytes).of_layer(dense, remat)


def bytes_on_host(step: StepPart, remat: str) -> tuple[float, float]:
    """Bytes that the forward of one layer with this mode of remat leaves in the host's memory of a
    microbatch: (all of them, those that W reads).

    The layer's input stands for all that full recomputation starts from.
    """
    every = step.layout.offloads("activations") or remat == "full"
    return layer_bytes(step, remat=remat).on_host(remat, every and step.layout.saves_on_host)
