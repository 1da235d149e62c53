"""What the step of a run is, whichever layout it has: the types of its numbers, its kernels, what
its config chooses, and what is assumed of the compiled program."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from jaxtrain.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from jaxtrain.config.sizes import MX_BLOCK
from jaxtrain.planner.layer.layout import Layout, routed_capacity
from jaxtrain.planner.layer.model import Model

ITEM = 2  # bytes of a number in 16 bits
FLOAT32 = 4  # bytes of a float32 or an int32
FP8 = 1
# products of attention's backward over the two of its forward: scores once more, and four
ATTENTION_BACKWARD = 2.5


def bytes_of(dtype: str) -> int:
    """Bytes of a number of a type as a config names it."""
    return FLOAT32 if dtype == "float32" else ITEM


class ProductFormat(NamedTuple):
    """How `precision.matmul` has the operands of products with layers' matrices.

    peak:    its key in a hardware file's peaks
    number:  bytes of a number with its part of a block's scale
    sent:    bytes of a weight's number as it is gathered
    blocks:  blocks of numbers have their own scales, and operands a form for each product
    scaled:  a tensor has a scale, for which a pass finds its largest number
    reached: the part of its peak that products reach, over that of the compute type
    overlaps: other frameworks' products overlap with messages of `model`
    """

    peak: str
    number: float
    sent: float
    blocks: bool = False
    scaled: bool = True
    reached: float = 1.0
    overlaps: float = 1.0


# with the part of a scale of 8 bits, which 32 numbers of MXFP8 share, and 16 of NVFP4
MX, NV = FP8 * (1 + 1 / MX_BLOCK), 0.5 + 1 / 16
FORMATS = {
    "compute": ProductFormat("", ITEM, ITEM),
    "fp8": ProductFormat("float8", FP8, FP8),
    "mxfp8": ProductFormat("mxfloat8", MX, MX, blocks=True, scaled=False),
    # Megatron-Bridge gathers no 4 bits, and its recipes send messages of `model` beside products in
    # the backward alone. reached: fitted to two dense runs on GB300s; 0.6 to 1 are possible.
    "nvfp4": ProductFormat("float4", NV, ITEM, blocks=True, reached=0.8, overlaps=2 / 3),
    "int8": ProductFormat("int8", 1.0, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Rates:
    """What is assumed of the compiled program. "Passes" are reads and writes of an array in memory.

    passes:         over a layer's [tokens, width], forward, besides its products: norms, residuals,
                    dropout
    inner_passes:   over what products make inside attention and MLP: copies by head, activation
    logit_passes:   over a microbatch's logits in 32 bits: written, read for the loss, and for its
                    gradient
    routed_passes:  over the rows of routed tokens, forward: they are gathered in the order of their
                    experts, and summed back
    weight_copies:  of F, R and B over a layer's weights, where a loop over layers copies them out
                    of their stack
    sum_passes:     of W over the sums of a layer's gradients, in 32 bits
    model_overlap:  fraction of the time of `model`'s collectives that overlaps with products
    data_overlap:   fraction of the sums of gradients that overlaps with the backward of the last
                    microbatch
    gather_overlap: fraction of ZeRO-3's all-gathers and reduce-scatters that overlaps with ops
    cell_overlap:   fraction of the messages of routed tokens that overlap with products of the
                    other microbatch in an overlapped cell
    expert_overlap: fraction of them that overlaps with work of another microbatch without cells,
                    inside a node and between nodes
    host_ms:        milliseconds in which the host starts the operations of a layer with experts,
                    forward and backward of one microbatch, but for those that round the operands
                    of one expert
    rounding_us:    microseconds in which it starts these for one operand, in blocks or with a scale
                    for the tensor
    stage_overlap:  messages between stages overlap with ops
    host_overlap:   fractions of the copies of what layers save that overlap with their op's work:
                    to the host's memory, and back
    """

    passes: float = 8.0
    inner_passes: float = 2.0
    logit_passes: float = 3.0
    weight_copies: float = 0.0
    sum_passes: float = 0.0
    model_overlap: float = 0.0
    data_overlap: float = 0.0
    gather_overlap: float = 0.9
    cell_overlap: float = 0.0
    stage_overlap: bool = True
    routed_passes: float = 2.0
    expert_overlap: tuple[float, float] = (0.0, 0.0)
    host_ms: float = 0.0
    rounding_us: tuple[float, float] = (0.0, 0.0)
    host_overlap: tuple[float, float] = (1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Settings of a step. The defaults are those of our own runtime.

    name, text:       the framework that runs the step, and what differs in it
    causal_rates:     rates count the half of attention's operations that a causal mask leaves;
                      otherwise all of them
    precision:        the types of numbers in products
    parallel:         the use of the mesh axes, but for what the layout has
    sequence_parallel: what lies between products is split over `model`, too
    fused_attention:  scores stay on the chip; otherwise they pass through memory
    attention_passes: over the scores, forward, where they do
    attention_backward: products of attention's backward over the two of its forward
    vocabulary_parallel: embedding and head are split over the stages
    weight_bytes, master_bytes, moment_bytes: bytes of a parameter as it is stored, of its 32-bit
                      copy beside the optimizer's state, and of a number of that state
    copied_bytes:     bytes of a copy of its master that an update writes
    sent_gradient, sent_weight: bytes of a number that crosses `data`
    reduced_gradient: bytes of a gradient's number that an op reduces; 0: those of `sent_gradient`
    imbalance:        routed tokens of the busiest device's experts, over the mean, where no room
                      limits them
    fused_experts:    the `precision.matmul` in which one kernel multiplies, activates and rounds
                      all experts' rows, in a CUDA graph of the entire step; "" for none
    tile_rows:        rows of a tile in a kernel of all experts' products. An expert's rows begin
                      and end inside of a tile, which is computed for both of its experts
    sends_once:       a token goes once to each device that has some of its experts, or where these
                      lie in several nodes to each node
    inner_steps:      steps between two exchanges of independent replicas; 0: replicas are not
                      independent
    documents:        tokens attend within their document
    by_xla:           XLA compiles the step: full recomputation leaves out a layer's output, which
                      nothing reads, and ZeRO-3 scatters a matrix's gradient before the next one's
                      is made; otherwise those of a layer together, while the next is gathered
    recomputes:       what "selective" recomputes: "core", attention's core where `pipeline.save`
                      names nothing; "half", every other aten.mm, and all products in FP8 or of
                      groups of tokens, but not attention; "", all that is no product
    by_sequence:      what layers save of a microbatch is taken to be that of one sequence times
                      their number, for searches, which have many sizes of microbatches (saved.py)
    one_link:         fraction of one link's bandwidth that ZeRO-3's collectives reach where they
                      leave an island; 0: they use all links of the island
    fp8_forms:        copies of an activation in FP8: 2 where products that contract another
                      dimension need it transposed
    ours:             our own runtime runs the step, which has tables and slots. In a layer W
                      gathers its inputs again, latents and shared heads are gathered, every device
                      of `model` sends all routed tokens
    changed:          the parts of a step that stand for ours
    """

    name: str = "jaxtrain"
    text: str = "the step that this package compiles"
    causal_rates: bool = True
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sequence_parallel: bool = True
    fused_attention: bool = True
    attention_passes: float = 0.0
    attention_backward: float = ATTENTION_BACKWARD
    vocabulary_parallel: bool = True
    weight_bytes: float = 4.0
    master_bytes: float = 0.0
    copied_bytes: float = 0.0
    moment_bytes: float = 4.0
    sent_gradient: float = 4.0
    sent_weight: float = 4.0
    reduced_gradient: float = 0.0
    imbalance: float = 1.1
    fused_experts: str = ""
    tile_rows: int = 0
    sends_once: bool = False
    inner_steps: int = 0
    documents: bool = False
    by_xla: bool = True
    recomputes: str = ""
    by_sequence: bool = False
    one_link: float = 0.0
    fp8_forms: int = 1
    rates: Rates = Rates()
    ours: ClassVar[bool] = True
    changed: ClassVar[Mapping[type, type]] = {}

    @functools.cached_property
    def format(self) -> ProductFormat:
        """The numbers in products with layers' matrices."""
        return FORMATS[self.precision.matmul]

    @functools.cached_property
    def fp8(self) -> bool:
        """Operands of products with layers' matrices are of FP8, or another format of few bits,
        gathered and sent in it."""
        return self.precision.matmul != "compute"

    @functools.cached_property
    def fp8_in_w(self) -> bool:
        """Products that make weights' gradients are of FP8, too; otherwise activations are gathered
        before they are quantized."""
        return self.fp8 and self.precision.fp8_weight_gradients == "fp8"

    def shards(self, layout: Layout, width: int) -> int:
        """ZeRO's shard count over `data`; 1 if it does not divide the model's width."""
        return 1 if width % layout.data else layout.data

    def reduces_in_ops(self, layout: Layout) -> bool:
        """True if each microbatch's gradients are reduced: as `parallel.reduce` says, by default
        from ZeRO-2 on, and with ZeRO-1 where a step is one microbatch on one stage
        (`Config.resolve`)."""
        if self.parallel.reduce != "auto":
            return self.parallel.reduce == "microbatch"
        return layout.zero > 1 or (layout.zero == layout.stage == layout.microbatches == 1)


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The step of a model with a layout, and the sizes of its activations."""

    model: Model
    layout: Layout
    settings: StepSettings

    @functools.cached_property
    def item(self) -> int:
        """Bytes of an activation's number."""
        return bytes_of(self.settings.precision.compute)

    @functools.cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on one group of `model` devices."""
        return self.layout.microbatch * self.model.sequence / self.layout.context

    @functools.cached_property
    def busiest(self) -> float:
        """Routed tokens of the busiest device's experts, for which the others wait, over the mean:
        no more than its experts have room for, and the mean where a device has all experts."""
        room = self.model.expert_room or math.inf
        return min(self.settings.imbalance, room) if self.layout.expert > 1 else 1.0

    @functools.cached_property
    def routed_tokens(self) -> float:
        """Rows that the busiest device's experts compute of a microbatch. Experts with a capacity
        compute all of it, whether tokens are there or not."""
        capacity = self.model.capacity_factor and routed_capacity(self.model, self.layout)
        return capacity or self.tokens * self.model.experts_per_token * self.busiest
