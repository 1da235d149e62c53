"""The table of kernels for attention and for the products of tokens with their experts' matrices:
the one that is used, and why the others are not. Standard library only.

Kernels are tried in the order of the table. Each has rules, which say in one line what it does not
take. The same table checks a kernel that is requested by name, chooses one when a step is traced,
and writes the start-up text. With `auto`, attention uses the first kernel that takes the case:

    kernel      devices               takes                                 is
    splash      TPUs                  heads of any size, also of two;       jax's Pallas kernel
                                      multiples of 128 tokens
    cudnn       NVIDIA GPUs, 16 bits  heads of up to 128 (256 from          cuDNN's flash attention
                                      compute capability 9.0) in steps
                                      of 8; whole sequences, or a window
                                      of them; documents and a window of
                                      a split sequence from 9.0 on; no
                                      soft cap
    cudnn_mask  NVIDIA GPUs, 16 bits  the same for parts of sequences,      the same, given a mask
                                      and documents before 9.0; no sinks
    xla         any                   everything                            products and a softmax
                                                                            in XLA

All take windows and scales of the scores. Sinks need a kernel's log-sum-exp
(parallel/attention/flash.py), which jax's function for a mask does not differentiate.

Products of experts without a capacity depend on the devices alone. Tokens × matrices, and the
gradients of both, use the same kernel:

    megablox      TPUs         everything      jax's Pallas kernels
    large_blocks  NVIDIA GPUs  everything      a loop over blocks of rows in XLA
    blocks        any          everything      the same, with fewer rows

The rules of cuDNN are what jax checks before it calls it (check_is_flash_attention in
jax._src.cudnn.fused_attention_stablehlo).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    ResolvedModel,
)
from jaxtrain.config.splash_backward import STEP, SplashBackward, filled_up, splash_backward

TPU, GPU, CPU = "tpu", "gpu", "cpu"
SPLASH, CUDNN, CUDNN_MASK, XLA = "splash", "cudnn", "cudnn_mask", "xla"
NEIGHBOURS = "neighbours"
LARGEST_MASK = 1 << 28  # elements of a mask that cuDNN is given
CUDNN_TWO_SIZES = 91000  # cuDNN 9.10: the first with queries and values of two sizes
HOPPER = (9, 0)
BLACKWELL = 10  # the major number of those with products of blocks that have their own scales
FP8 = (8, 9)  # the first compute capability with products of 8-bit floating-point numbers
MEGABLOX, LARGE_BLOCKS, BLOCKS = "megablox", "large_blocks", "blocks"
PART = 4 << 20  # bytes that a link sends for much longer than it takes to begin
LONG = 1024  # keys from which attention is a good part of a step


@dataclasses.dataclass(frozen=True)
class TargetDevice:
    """The kind of device that a program is for.

    platform:   as jax names it; "" if not known
    capability: the compute capability of an NVIDIA GPU
    cudnn:      cuDNN's version as it gives it (91200 for 9.12). None where it cannot be asked, as
                ahead of time: then it is the version that the packages require
    """

    platform: str = ""
    capability: tuple[int, int] = HOPPER
    cudnn: int | None = None

    @property
    def name(self) -> str:
        return {TPU: "a TPU", GPU: "a GPU", CPU: "a CPU"}.get(
            self.platform, f"platform {self.platform!r}"
        )


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """The attention of one device.

    bits:       of queries, keys and values
    key_size:   of a head's queries and keys; value_size: of its values
    queries:    number of queries, in the shortest piece of a split sequence; keys: number of keys
    documents:  whether tokens attend inside their document only
    context:    "" for unsplit sequences, else how split ones attend: "all_gather", "ring" or
                "neighbours" (parallel/attention/context.py), or "cache" in generation
    dropout:    whether weights are dropped
    window:     number of keys that a query sees at most; 0: all
    softcap, sinks: whether the scores have a bound, and each head one more score
    """

    device: TargetDevice
    bits: int
    key_size: int
    value_size: int
    queries: int
    keys: int
    documents: bool
    context: str = ""
    dropout: bool = False
    window: int = 0
    softcap: bool = False
    sinks: bool = False

    @property
    def kernel_keys(self) -> int:
        """The keys that the kernel is given with a chunk of queries, or with all."""
        return self.queries + self.window - 1 if self.context == NEIGHBOURS else self.keys

    @property
    def has_two_sizes(self) -> bool:
        """Whether queries and keys have another size than values."""
        return self.key_size != self.value_size

    @property
    def has_segments(self) -> bool:
        """Whether tokens are of several segments: documents, or the missing neighbours of a
        sequence's first chunk."""
        return self.documents or self.context == NEIGHBOURS


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The reason why a kernel does not take a case: a rule, read after the kernel's name, and
    settings with which it would."""

    rule: str
    fixes: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The kernel of a case, also in words, and the refusals of those before it in the table."""

    kernel: str
    words: str
    refusals: dict[str, Refusal]


KernelRule = Callable[[AttentionCase], Refusal | None]


def _not_if(
    refused: Callable[[AttentionCase], object], rule: str, *fixes: dict[str, Any]
) -> KernelRule:
    """The rule of a kernel that does not take some cases."""
    return lambda case: Refusal(rule, fixes) if refused(case) else None


def _for(platform: str, devices: str) -> KernelRule:
    return _not_if(lambda case: case.device.platform not in ("", platform), f"is for {devices}")


def _in_steps(case: AttentionCase) -> Refusal | None:
    if case.queries % STEP == case.keys % STEP == 0:
        return None
    parts = (
        ""
        if case.queries == case.keys
        else ", also for each of the two chunks of a device of mesh.context"
    )
    step = STEP * (case.keys // max(case.queries, 1))
    nearest = max(1, round(case.keys / step)) * step
    return Refusal(
        f"takes multiples of {STEP} tokens{parts}, not {case.queries}",
        ({"data.sequence_length": nearest},),
    )


def _cudnn_heads(case: AttentionCase) -> Refusal | None:
    most = 256 if case.device.capability >= HOPPER else 128
    if any(size > most or size % 8 for size in (case.key_size, case.value_size)):
        sizes = (
            f"{case.key_size}"
            if case.key_size == case.value_size
            else f"{case.key_size} and {case.value_size}"
        )
        return Refusal(f"is for heads whose size is a multiple of 8, at most {most}, not {sizes}")
    return None


def _cudnn_whole(case: AttentionCase) -> Refusal | None:
    if case.context not in ("", NEIGHBOURS):
        return Refusal(
            f"is for unsplit sequences, not parallel.context={case.context!r}",
            ({"parallel.context": "ulysses"},),
        )
    return None


def _cudnn_mask_size(case: AttentionCase) -> Refusal | None:
    if case.queries * case.kernel_keys > LARGEST_MASK:
        return Refusal(
            f"would need a mask of {case.queries:,} × {case.kernel_keys:,}",
            ({"parallel.context": "ulysses"},) if case.context else (),
        )
    return None


_WITHOUT_DROPOUT = _not_if(
    lambda case: case.dropout, "drops no weights", {"model.dropout_attention": 0.0}
)
CUDNN_RULES: tuple[KernelRule, ...] = (
    _for(GPU, "NVIDIA GPUs"),
    _WITHOUT_DROPOUT,
    _not_if(
        lambda case: case.bits != 16,
        "is for 16 bits, not precision.compute='float32'",
        {"precision.compute": "bfloat16"},
    ),
    _cudnn_heads,
    _not_if(
        lambda case: case.has_two_sizes and case.device.capability < HOPPER,
        "takes queries and values of two sizes from compute capability 9.0 on",
    ),
    _not_if(
        lambda case: (
            case.has_two_sizes and (case.device.cudnn or CUDNN_TWO_SIZES) < CUDNN_TWO_SIZES
        ),
        "takes queries and values of two sizes from cuDNN 9.10 on: python -m pip install -U "
        "nvidia-cudnn-cu13",
    ),
    _not_if(lambda case: case.softcap, "has no model.attention_softcap"),
)
CUDNN_WITHOUT_MASK: tuple[KernelRule, ...] = (
    _cudnn_whole,
    _not_if(
        lambda case: case.documents and case.device.capability < HOPPER,
        "takes documents without a mask from compute capability 9.0 on",
    ),
    _not_if(
        lambda case: case.has_segments and case.device.capability < HOPPER,
        "takes windows of split sequences without a mask from compute capability 9.0 on",
    ),
)
CUDNN_WITH_MASK: tuple[KernelRule, ...] = (
    _not_if(lambda case: case.context == "cache", "is for training"),
    _not_if(
        lambda case: case.context == "ring",
        "is not for parallel.context='ring'",
        {"parallel.context": "ulysses"},
    ),
    _not_if(lambda case: case.sinks, "has no model.sinks"),
    _cudnn_mask_size,
)
TABLE: dict[str, tuple[str, tuple[KernelRule, ...]]] = {
    SPLASH: ("splash, jax's kernel for TPUs", (_for(TPU, "TPUs"), _WITHOUT_DROPOUT, _in_steps)),
    CUDNN: ("cuDNN's flash attention", (*CUDNN_RULES, *CUDNN_WITHOUT_MASK)),
    CUDNN_MASK: ("cuDNN's flash attention, given a mask", (*CUDNN_RULES, *CUDNN_WITH_MASK)),
    XLA: ("plain XLA", ()),
}
PRODUCTS = {
    MEGABLOX: "megablox, jax's kernels for TPUs",
    LARGE_BLOCKS: "large blocks of rows in plain XLA",
    BLOCKS: "blocks of rows in plain XLA",
}
NAMES = ("auto", XLA, CUDNN, SPLASH)  # of model.attention_kernel


def refusal(kernel: str, case: AttentionCase) -> Refusal | None:
    """The reason why a kernel does not take the case; None if it does."""
    return next((refused for rule in TABLE[kernel][1] if (refused := rule(case))), None)


def attention_kernel(case: AttentionCase, wanted: str = "auto") -> KernelChoice:
    """The kernel for a case: the first of the table that takes it, or what was asked for by name.

    `splash` by name is that kernel on any platform, interpreted where there is no TPU; `cudnn` is
    either of its two entries. Nothing is raised: a kernel that was asked for and does not take the
    case is refused before anything is traced (config/rules/model_rules.py).
    """
    if wanted in (SPLASH, XLA):
        interpreted = wanted == SPLASH and case.device.platform != TPU
        return KernelChoice(wanted, TABLE[wanted][0] + ", interpreted" * interpreted, {})
    refusals: dict[str, Refusal] = {}
    for kernel, (words, _) in TABLE.items():
        if wanted == CUDNN and kernel not in (CUDNN, CUDNN_MASK):
            continue
        if not (refused := refusal(kernel, case)):
            return KernelChoice(kernel, words, refusals)
        refusals[kernel] = refused
    return KernelChoice(CUDNN, TABLE[CUDNN][0], refusals)


def reach(way: str, parts: int, tokens: int, window: int) -> str:
    """How a device's tokens reach those of others: `AttentionCase.context`.

    way: parallel.context; parts: mesh.context; tokens: of a sequence; window: 0: all tokens
    """
    if parts == 1 or way == "ulysses":
        return ""
    if not 0 < window < tokens:
        return way
    # The window before each of a device's two chunks, or the other devices' tokens if these are no
    # more.
    return NEIGHBOURS if window - 1 < (parts - 1) * (tokens // (2 * parts)) else "all_gather"


def attention_case(
    device: TargetDevice,
    model: ResolvedModel,
    data: DataConfig,
    mesh: MeshConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
) -> AttentionCase:
    """The attention of a step on one device, in layers of one kind."""
    tokens, latent, parts = data.sequence_length, model.attention == "mla", max(mesh.context, 1)
    context = reach(parallel.context, parts, tokens, model.window)
    return AttentionCase(
        device,
        bits=32 if precision.compute == "float32" else 16,
        key_size=model.head_dim + (model.rope_head_dim if latent else 0),
        value_size=model.value_head_dim if latent else model.head_dim,
        queries=tokens // (2 * parts) if context else tokens,
        keys=tokens,
        documents=not data.attend_across_documents,
        context=context,
        dropout=model.dropout_attention > 0,
        window=model.window if model.window < tokens else 0,
        softcap=model.attention_softcap > 0,
        sinks=model.sinks,
    )


def backward_of_splash(case: AttentionCase, wanted: str = "auto") -> SplashBackward:
    """The backward of a case that splash takes. wanted: model.attention_backward"""
    parts = case.keys // (2 * case.queries) if case.context == "ring" else 1
    keys = case.kernel_keys // parts
    if case.window:
        keys = filled_up(case.queries, keys, case.window)
    return splash_backward(wanted, keys, case.key_size, case.value_size)


def product_kernel(hardware: TargetDevice) -> KernelChoice:
    """The kernel of the products of experts."""
    if hardware.platform == TPU:
        return KernelChoice(MEGABLOX, PRODUCTS[MEGABLOX], {})
    refusals = {MEGABLOX: Refusal("is for TPUs")}
    if hardware.platform == GPU:
        return KernelChoice(LARGE_BLOCKS, PRODUCTS[LARGE_BLOCKS], refusals)
    return KernelChoice(
        BLOCKS, PRODUCTS[BLOCKS], refusals | {LARGE_BLOCKS: Refusal("are for GPUs")}
    )


def has_fp8(device: TargetDevice) -> bool:
    """True for a device that multiplies 8-bit floating-point numbers."""
    return device.platform == GPU and device.capability >= FP8


# values of precision.matmul with products of 8-bit floating-point numbers
QUANTIZED = ("fp8", "mxfp8")


def multiplies_blocks(device: TargetDevice) -> bool:
    """True for a device that multiplies blocks of 8-bit numbers with a scale for each."""
    return device.platform == GPU and device.capability[0] == BLACKWELL


def describe_products(precision: PrecisionConfig, device: TargetDevice) -> Iterator[str]:
    """Lines of text about products with the matrices of layers, if they are not of the compute
    type."""
    if precision.matmul in QUANTIZED:
        blocks = precision.matmul == "mxfp8"
        kind = "MXFP8, a scale for each 32 numbers" if blocks else "FP8"
        yield f"products: {kind}, e4m3 forward and {precision.fp8_gradients} gradients"
        if not (multiplies_blocks(device) if blocks else has_fp8(device)):
            yield (
                f"warning: {device.name} has no products of {precision.matmul.upper()}: its "
                f"numbers are rounded, then multiplied as {precision.compute}, which is slower "
                "than --config.precision.matmul=compute"
            )


def describe(model: ModelConfig, case: AttentionCase) -> Iterator[str]:
    """Lines of text: the kernels of a step on the case's device, which others were refused and why,
    and a warning for each that is slow."""
    wanted, device = model.attention_kernel, case.device
    choice = attention_kernel(case, wanted)
    asked = f" (model.attention_kernel={wanted})" if wanted != "auto" else ""
    yield f"attention: {choice.words}{asked}{_refusals(choice)}"
    if choice.kernel == SPLASH:
        backward = model.attention_backward
        yield f"attention's backward: {backward_of_splash(case, backward).words(backward)}"
    if choice.kernel == SPLASH and device.platform != TPU:
        yield (
            f"warning: splash is interpreted on {device.name}, for tests: a step takes minutes "
            "(--config.model.attention_kernel=auto)"
        )
    elif choice.kernel in (XLA, CUDNN_MASK) and device.platform != CPU and case.keys >= LONG:
        fast = {TPU: SPLASH, GPU: CUDNN}.get(device.platform, XLA)
        refused = choice.refusals.get(fast) or Refusal(
            "is not requested", ({"model.attention_kernel": "auto"},)
        )
        ends = " or ".join(
            f"--config.{path}={value}" for fix in refused.fixes for path, value in fix.items()
        )
        slow = (
            "takes several times as long"
            if choice.kernel == XLA
            else "also computes the scores that its mask hides"
        )
        yield (
            f"warning: on {device.name} attention by {choice.words} {slow}: {fast} "
            f"{refused.rule}{f' ({ends} prevents this)' * bool(ends)}"
        )
    if model.experts and not model.capacity_factor:
        choice = product_kernel(device)
        yield f"products of experts: {choice.words}{_refusals(choice)}"
        if device.platform == GPU:
            yield (
                "warning: products of experts have no kernel on a GPU, and wait for the host "
                "before each block of rows: --config.model.capacity_factor=1.25 makes them plain "
                "matmuls"
            )


def _refusals(choice: KernelChoice) -> str:
    """The refusals of a choice, in brackets, with a rule that several kernels share once; "" if
    there are none."""
    rules = {refusal.rule: name for name, refusal in reversed(choice.refusals.items())}
    passed = ", ".join(f"{name} {rule}" for rule, name in reversed(rules.items()))
    return f" ({passed})" if passed else ""


def multiplies_while_sending(requested: str, platform: str, stages: int, part: int) -> bool:
    """Whether products over `model` are cut into parts that go beside permutes
    (parallel/collective_matmul.py). Not with several stages: a permute waits for all devices, and
    those of other stages run other ops. requested: `parallel.collective_matmul`; part: bytes that
    a device sends to the next one at a time."""
    if requested == "auto":
        return platform in (TPU, GPU) and stages == 1 and part >= PART
    return requested == "on"
