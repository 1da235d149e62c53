"""XLA's options by platform, each with the reason for it.

They go to the compiler with each program, so neither XLA_FLAGS nor LIBTPU_INIT_ARGS is needed;
`parallel.compiler_options` changes them or adds others. docs/log.md has the options that were
tried.
"""

import dataclasses
from collections.abc import Collection, Sequence

import jax

OptionValue = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of XLA.

    name, value: as XLA takes them
    reason:      its effect, and the program without it
    generations: the device kinds that it is for; all if empty
    only_for:    it is for steps that do one of these things; for all if empty
    """

    name: str
    value: OptionValue
    reason: str
    generations: tuple[str, ...] = ()
    only_for: tuple[str, ...] = ()


# ops of one stage gather the parameters layer by layer
GATHERS = "gathers"
# so they do, and `model` splits no layer
GATHERS_WHOLE = "gathers of whole layers"
# messages go beside another op's products (runtime/layers/interleave.py)
SIDE_BY_SIDE = "side by side"
# products are of FP8
FP8 = "fp8"
# no layer has experts
DENSE = "dense"
# an update exchanges matrices (training/update/muon.py)
MATRICES = "matrices"

V5P = ("TPU v5", "TPU v5p")
V6E = ("TPU v6 lite", "TPU v6e")
IRONWOOD = ("TPU7x",)
OFFLOADED = (
    "reduce-scatters and all-reduces run on the SparseCores and are asynchronous, in part beside "
    "products; without it each is waited for. No chip has confirmed it: "
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=false and …_all_reduce=false "
    "have them on the TensorCores"
)
GPU = (
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "collectives start where their operands are ready and end where their result is read; "
        "without it each is waited for",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        1024,
        "an op with collectives in it is put beside another collective only if all together "
        "stay below this limit: early permutes then "
        "run beside a tick's ops",
    ),
    Option(
        "xla_gpu_experimental_collective_start_as_early_as_possible",
        True,
        "the next layer's parameters are gathered from the beginning of a layer on; in the "
        "backward most began after its last product. Tokens leave for their experts before the "
        "products that go beside them; XLA counts small instructions for more than these",
        only_for=(GATHERS, SIDE_BY_SIDE),
    ),
    Option(
        "xla_gpu_enable_while_loop_double_buffering",
        True,
        "two layers a trip, whose gathered parameters have two places by turns: what a loop "
        "carries has one, to which they were copied",
        only_for=(GATHERS,),
    ),
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        "products are cuBLASLt's, with biases, GELU and FP8's scales in the same kernel: steps of "
        "dense layers take 4 % less on an H100 (benchmarks/README.md). Without it XLA measures "
        "its own kernels beside cuBLASLt's, and where these win a bias is a pass of its own; "
        "experts' products were not measured",
        only_for=(FP8, DENSE),
    ),
)
TPU = (
    *(
        Option(name, value, OFFLOADED, V5P + V6E)
        for name, value in {
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
            "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
            "xla_tpu_enable_reduce_scatter_offload_tracing": True,
            "xla_tpu_enable_all_reduce_offload_tracing": True,
            "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
            "xla_tpu_use_tc_device_shape_on_sc": True,
            "xla_sc_enable_instruction_fusion": False,
            "xla_sc_disable_megacore_partitioning": True,
        }.items()
    ),
    *(
        Option(name, value, f"gathers, too, which v5p leaves synchronous; {OFFLOADED}", V6E)
        for name, value in {
            "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
            "xla_tpu_enable_all_gather_offload_tracing": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
        }.items()
    ),
    Option(
        "xla_tpu_enable_async_all_to_all",
        True,
        "matrices travel to the devices that orthogonalize them, and back, beside the products of "
        "others; without it each message is waited for",
        only_for=(MATRICES,),
    ),
    Option(
        "xla_tpu_scoped_vmem_limit_kib",
        32768,
        "a fusion's tiles may take 32 of the 64 MiB of vector memory: with the default of 16 "
        "products that are fused with what surrounds "
        "them run at 40 to 80 % of the peak by libtpu's own estimate, with this at 80 to 97; "
        "with 64 no reduce-scatter of the TensorCores finds room",
        generations=V5P,
    ),
    Option(
        "xla_tpu_scoped_vmem_limit_kib",
        65536,
        "all of it: products of ZeRO-3's layers take 3 % less by libtpu's estimate, and "
        "reduce-scatters on the SparseCores need none; split over `model` they take longer",
        generations=V5P,
        only_for=(GATHERS_WHOLE,),
    ),
    Option(
        "xla_tpu_scoped_vmem_limit_kib",
        98304,
        "of 128 MiB: products take 14 % less by libtpu's estimate than with its default",
        generations=V6E,
        only_for=(GATHERS_WHOLE,),
    ),
    Option(
        "xla_tpu_scoped_vmem_limit_kib",
        49152,
        "of 64 MiB: products take 16 % less by libtpu's estimate than with its default; that has "
        "gathers and sums on the SparseCores by itself",
        generations=IRONWOOD,
        only_for=(GATHERS_WHOLE,),
    ),
    Option(
        "xla_tpu_enable_async_ragged_all_to_all",
        True,
        "tokens go to their experts and come back beside what does not wait for them, as "
        "shared experts; without it they are waited for",
        generations=V5P,
    ),
)
# devices that are only described call themselves cuda
PLATFORMS = {"gpu": GPU, "cuda": GPU, "tpu": TPU}


def compiler_options(
    device: jax.Device, does: Collection[str] = (), changes: Sequence[str] = ()
) -> dict[str, OptionValue]:
    """XLA's options for a device. does: what a step does, of the names above;
    changes: NAME=VALUE, which replace the platform's options or add to them."""
    chosen = {
        option.name: option.value
        for option in PLATFORMS.get(device.platform, ())
        if not option.only_for or not set(option.only_for).isdisjoint(does)
        if not option.generations or device.device_kind in option.generations
    }
    return chosen | {
        name: _value(text) for name, _, text in (change.partition("=") for change in changes)
    }


def _value(text: str) -> OptionValue:
    """The value of a flag's text: a bool, a number, or the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
