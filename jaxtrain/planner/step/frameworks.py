"""Frameworks that train transformers, as the differences between them in time and memory: published
runs, with which the planner is compared, were made by frameworks other than ours.

Each difference is physical: an array that is saved or passes through memory, an operation that
    waits.
"""

import dataclasses

# products of attention's backward over the two of its forward: scores once more, and four
ATTENTION_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True)
class Framework:
    """A framework's differences. "Passes" are reads and writes of an array in memory.

    text:             the differences in words
    fused_attention:  scores stay on the chip; otherwise they pass through memory
    attention_passes: over the scores, forward, where they do
    attention_backward: products of attention's backward over the two of its forward
    sequence_parallel: what lies between products is split over `model`, too
    recomputes_core:  "selective" recomputes attention's core; otherwise all that is no product
    passes:           over a layer's [tokens, width], forward, besides its products: norms,
                      residuals, dropout
    inner_passes:     over what products make inside attention and MLP: copies by head, activation
    logit_passes:     over a microbatch's logits in 32 bits: written, read for the loss, and for its
                      gradient
    model_overlap:    fraction of the time of `model`'s collectives that overlaps with products
    collective_matmul: `model`'s collectives overlap with the products whose operands they gather or
                      whose results they sum, and with nothing else
    data_overlap:     fraction of the sums of gradients that overlaps with the backward of the last
                      microbatch
    gather_overlap:   fraction of ZeRO-3's all-gathers and reduce-scatters that overlaps with ops
    one_link:         fraction of one link's bandwidth that ZeRO-3's collectives reach where they
                      leave an island; 0: they use all links of the island
    stage_overlap:    messages between stages overlap with ops
    cell_overlap:     fraction of the messages of routed tokens that overlap with products of the
                      other microbatch in an overlapped cell
    weight_bytes, gradient_bytes, master_bytes: bytes of a parameter's copy that products use, of
                      its gradient, and of its 32-bit copy beside the optimizer's state
    moment_bytes:     bytes of a number of the optimizer's state
    outer_bytes:      bytes of a parameter's state that independent replicas share, sharded over
                      `data` at every stage of ZeRO
    sent_gradient, sent_weight: bytes of a number that crosses `data`
    split_sends:      messages between stages are split over `model`
    vocabulary_parallel: embedding and head are split over the stages
    by_dimension:     ZeRO shards a dimension of each array, so `data` has to divide the width;
                      otherwise it cuts flat buffers anywhere
    slots:            activations lie in slots of a table (memory.py); with several chunks of layers
                      one is recomputed at a time
    imbalance:        routed tokens of the busiest device's experts, over the mean
    context_by:       attention over a split sequence, as `parallel.context`
    inner_steps:      steps between two exchanges of independent replicas; 0: replicas are not
                      independent
    sent_outer:       bytes of a number in such an exchange
    fp8:              products with layers' matrices are of FP8
    fp8_weight_gradients: also those that make weights' gradients
    fp8_blocks:       blocks of their numbers have scales, and operands a form for each product
    gathers_once:     ZeRO-3 gathers parameters once a step, not in each op
    weight_copies:    passes of F, R and B over a layer's weights, where a loop over layers copies
                      them out of their stack
    sum_passes:       passes of W over the sums of a layer's gradients, in 32 bits
    fixed_s:          seconds of a step besides all this: its host, the loss, the norm of gradients
    documents:        tokens attend within their document
    beside_products:  `parallel.collective_matmul` as the config has it
    causal_rates:     its published rates count the half of attention's operations that a causal
                      mask leaves; otherwise all of them
    """

    name: str
    text: str
    fused_attention: bool = True
    attention_passes: float = 0.0
    attention_backward: float = ATTENTION_BACKWARD
    sequence_parallel: bool = True
    recomputes_core: bool = False
    passes: float = 8.0
    inner_passes: float = 2.0
    logit_passes: float = 3.0
    model_overlap: float = 0.0
    collective_matmul: bool = False
    data_overlap: float = 0.0
    gather_overlap: float = 0.9
    one_link: float = 0.0
    stage_overlap: bool = False
    cell_overlap: float = 0.0
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    master_bytes: float = 4.0
    moment_bytes: float = 4.0
    outer_bytes: float = 0.0
    sent_gradient: float = 4.0
    sent_weight: float = 2.0
    split_sends: bool = True
    vocabulary_parallel: bool = False
    by_dimension: bool = False
    slots: bool = False
    imbalance: float = 1.1
    context_by: str = "all_gather"
    inner_steps: int = 0
    sent_outer: float = 4.0
    fp8: bool = False
    fp8_weight_gradients: bool = True
    fp8_blocks: bool = False
    gathers_once: bool = False
    weight_copies: float = 0.0
    sum_passes: float = 0.0
    fixed_s: float = 0.0
    documents: bool = False
    beside_products: str = "auto"
    causal_rates: bool = False


_MEGATRON_2021 = Framework(
    "megatron2021",
    "no sequence parallelism; scores pass through memory; tensor's sums, gradients' sums and "
    "messages are waited for; dropout",
    fused_attention=False,
    # product, scaled and masked softmax, dropout with its mask, product: written and read, in 16
    # bits
    attention_passes=6.5,
    sequence_parallel=False,
    recomputes_core=True,
    passes=14.0,  # two norms (2 each), two residuals with dropout and bias (5 each)
    inner_passes=3.0,
    logit_passes=8.0,
    sent_gradient=2.0,
)
_TORCHTITAN = Framework(
    "torchtitan",
    "FSDP whose all-gathers overlap with products, torch.compile: fused attention, separate passes "
    "for norms and activations",
    passes=14.0,
    inner_passes=3.0,
    logit_passes=8.0,
    data_overlap=0.9,
    weight_bytes=4.0,
    master_bytes=0.0,
)
FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            "jaxtrain",
            "the step that this package compiles",
            stage_overlap=True,
            data_overlap=0.0,
            weight_bytes=4.0,  # besides the cast of all of it; step_model.py has other types
            master_bytes=0.0,
            sent_weight=4.0,
            vocabulary_parallel=True,
            by_dimension=True,
            slots=True,
            causal_rates=True,
        ),
        _MEGATRON_2021,
        dataclasses.replace(
            _MEGATRON_2021,
            name="megatron2022",
            text="as megatron2021, with sequence parallelism; selective recomputes attention's "
            "core and nothing else",
            sequence_parallel=True,
        ),
        Framework(
            "megatron_core",
            "sequence parallelism, fused attention, distributed optimizer; tensor's and "
            "data's collectives overlap with products in part",
            recomputes_core=True,
            passes=14.0,
            inner_passes=3.0,
            logit_passes=8.0,
            model_overlap=0.6,
            data_overlap=0.9,
            stage_overlap=True,
            sent_gradient=2.0,
        ),
        Framework(
            "maxtext",
            "ZeRO-3 (fsdp) whose all-gathers overlap with products, fused attention, full "
            "recomputation but for named matrices",
            data_overlap=0.9,
            gather_overlap=0.95,
            weight_bytes=4.0,
            master_bytes=0.0,
        ),
        _TORCHTITAN,
        dataclasses.replace(
            _TORCHTITAN,
            name="torchtitan_eager",
            text="as torchtitan without torch.compile: each operation reads and writes its arrays, "
            "casts to 32 bits in norms and rotation",
            passes=40.0,
            inner_passes=8.0,
            logit_passes=12.0,
        ),
        dataclasses.replace(
            _TORCHTITAN,
            name="llama3",
            text="as torchtitan, in a pipeline whose messages overlap with ops; tensor's and "
            "context's collectives are waited for",
            stage_overlap=True,
            causal_rates=True,
        ),
        dataclasses.replace(
            _MEGATRON_2021,
            name="zero3",
            text="DeepSpeed's ZeRO-3 of 2021 without tensor parallelism: parameters gathered one "
            "by one, over one adapter of each node",
            gather_overlap=0.78,
            one_link=0.85,  # many small tensors
        ),
    )
}
