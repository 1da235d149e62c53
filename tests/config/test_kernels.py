"""The table of kernels: what is chosen for which case, why not the others, and what is said about
it."""

import pytest

from jaxtrain import config as cfg
from jaxtrain.config import kernels
from jaxtrain.config.kernels import (
    CUDNN,
    CUDNN_MASK,
    SPLASH,
    XLA,
    AttentionCase,
    TargetDevice,
    attention_kernel,
)

V5P, H100, A100, CPU = (
    TargetDevice("tpu"),
    TargetDevice("gpu", (9, 0), 91200),
    TargetDevice("gpu", (8, 0), 91200),
    TargetDevice("cpu"),
)
MLA = {
    **{
        "model.attention": "mla",
        "model.head_dim": 128,
        "model.rope_head_dim": 64,
        "model.value_head_dim": 128,
        "model.kv_rank": 512,
    },
}
ONE_KERNEL = (
    "attention's backward: one fused kernel of 5 products: the gradients' sums of 8,192 keys fit "
    "in 8 MiB of vector memory"
)
DOCUMENTS = {"data.attend_across_documents": False}


def config(changes=None) -> cfg.Config:
    return cfg.replace(
        cfg.Config(), {"data.sequence_length": 8192, "model.head_dim": 128} | (changes or {})
    ).fill()


def case_of(hardware: TargetDevice, changes=None) -> AttentionCase:
    c = config(changes)
    return kernels.attention_case(hardware, c.model, c.data, c.mesh, c.parallel, c.precision)


def described(hardware: TargetDevice, changes) -> list[str]:
    return list(kernels.describe(config(changes).model, case_of(hardware, changes)))


def chosen(hardware: TargetDevice, **fields) -> str:
    shape = {
        "bits": 16,
        "key_size": 128,
        "value_size": 128,
        "queries": 8192,
        "keys": 8192,
        "documents": True,
    }
    return attention_kernel(AttentionCase(hardware, **shape | fields)).kernel


@pytest.mark.parametrize(
    "hardware, fields, kernel",
    [
        (V5P, {}, SPLASH),
        (V5P, {"bits": 32}, SPLASH),
        (V5P, {"key_size": 192}, SPLASH),
        (V5P, {"queries": 1024, "context": "all_gather"}, SPLASH),
        (V5P, {"queries": 1024, "context": "ring"}, SPLASH),
        (V5P, {"queries": 1000, "keys": 1000}, XLA),
        (V5P, {"queries": 64, "keys": 1024, "context": "all_gather"}, XLA),
        (H100, {}, CUDNN),
        (H100, {"key_size": 256, "value_size": 256}, CUDNN),
        (H100, {"key_size": 192}, CUDNN),
        (H100, {"key_size": 264, "value_size": 264}, XLA),
        (H100, {"key_size": 100, "value_size": 100}, XLA),
        (H100, {"bits": 32}, XLA),
        (H100, {"queries": 1024, "context": "all_gather"}, CUDNN_MASK),
        (H100, {"queries": 1024, "context": "ring"}, XLA),
        # too large a mask
        (H100, {"queries": 1 << 14, "keys": 1 << 15, "context": "all_gather"}, XLA),
        (TargetDevice("gpu", (9, 0), 90900), {"key_size": 192}, XLA),
        # ahead of time nobody can be asked
        (TargetDevice("gpu", (9, 0), None), {"key_size": 192}, CUDNN),
        (V5P, {"window": 512, "softcap": True, "sinks": True}, SPLASH),
        (H100, {"window": 512, "sinks": True}, CUDNN),
        (H100, {"queries": 1024, "window": 512, "context": "neighbours"}, CUDNN),
        (H100, {"softcap": True}, XLA),
        (H100, {"queries": 1024, "context": "all_gather", "sinks": True}, XLA),
        (A100, {"queries": 1024, "window": 512, "context": "neighbours"}, CUDNN_MASK),
        (A100, {"documents": False}, CUDNN),
        (A100, {}, CUDNN_MASK),
        (A100, {"key_size": 192, "documents": False}, XLA),
        (A100, {"key_size": 136, "value_size": 136}, XLA),
        (CPU, {}, XLA),
    ],
)
def test_choice(hardware, fields, kernel):
    assert chosen(hardware, **fields) == kernel


def test_what_is_asked_for_is_chosen():
    case = case_of(A100, DOCUMENTS)
    assert [attention_kernel(case, wanted).kernel for wanted in (XLA, SPLASH, CUDNN)] == [
        XLA,
        SPLASH,
        CUDNN_MASK,
    ]


@pytest.mark.parametrize(
    "changes, shape",
    [
        ({}, (128, 128, 8192, 8192, False, "")),
        (MLA | DOCUMENTS, (192, 128, 8192, 8192, True, "")),
        ({"mesh.context": 4, "parallel.context": "ulysses"}, (128, 128, 8192, 8192, False, "")),
        ({"mesh.context": 4}, (128, 128, 1024, 8192, False, "all_gather")),
        # a window of as many tokens as other devices have, and one less
        (
            {"mesh.context": 4, "model.window": 3073, "parallel.context": "ring"},
            (128, 128, 1024, 8192, False, "all_gather"),
        ),
        (
            {"mesh.context": 4, "model.window": 3072, "parallel.context": "ring"},
            (128, 128, 1024, 8192, False, "neighbours"),
        ),
        (
            {"mesh.context": 4, "model.window": 8192, "parallel.context": "ring"},
            (128, 128, 1024, 8192, False, "ring"),
        ),
    ],
)
def test_case_of_a_config(changes, shape):
    case = case_of(V5P, changes)
    assert (
        case.key_size,
        case.value_size,
        case.queries,
        case.keys,
        case.documents,
        case.context,
    ) == shape


@pytest.mark.parametrize(
    "hardware, changes, lines",
    [
        (V5P, DOCUMENTS, ["attention: splash, jax's kernel for TPUs", ONE_KERNEL]),
        (
            V5P,
            {"data.sequence_length": 32768, "mesh.context": 2},
            [
                "attention: splash, jax's kernel for TPUs",
                "attention's backward: one fused kernel of 5 products, in 4 calls: the gradients' "
                "sums of 8,192 keys fit in 8 MiB of vector memory",
            ],
        ),
        (
            V5P,
            {"model.attention_backward": "two_kernels"},
            [
                "attention: splash, jax's kernel for TPUs",
                "attention's backward: two kernels of 7 products "
                "(model.attention_backward=two_kernels)",
            ],
        ),
        (
            V5P,
            {"model.head_dim": 2048},
            [
                "attention: splash, jax's kernel for TPUs",
                "attention's backward: two kernels of 7 products: the gradients' sums of a block "
                "of keys do not fit in 8 MiB of vector memory",
            ],
        ),
        (H100, DOCUMENTS, ["attention: cuDNN's flash attention (splash is for TPUs)"]),
        (CPU, {}, ["attention: plain XLA (splash is for TPUs, cudnn is for NVIDIA GPUs)"]),
        (
            H100,
            {"model.attention_kernel": "cudnn"},
            ["attention: cuDNN's flash attention (model.attention_kernel=cudnn)"],
        ),
        (
            V5P,
            {"data.sequence_length": 8200},
            [
                "attention: plain XLA (splash takes multiples of 128 tokens, not "
                "8200, cudnn is for NVIDIA GPUs)",
                "warning: on a TPU attention by plain XLA takes several times as long:"
                " splash takes multiples of 128 tokens, not 8200 "
                "(--config.data.sequence_length=8192 prevents this)",
            ],
        ),
        (
            H100,
            {"mesh.context": 4},
            [
                "attention: cuDNN's flash attention, given a mask"
                " (splash is for TPUs, cudnn is for unsplit sequences, not "
                "parallel.context='all_gather')",
                "warning: on a GPU attention by cuDNN's flash attention, given a mask also "
                "computes the scores that its mask hides:"
                " cudnn is for unsplit sequences, not parallel.context='all_gather' "
                "(--config.parallel.context=ulysses prevents this)",
            ],
        ),
        (
            H100,
            {"model.attention_kernel": "xla"},
            [
                "attention: plain XLA (model.attention_kernel=xla)",
                "warning: on a GPU attention by plain XLA takes several times as long: cudnn "
                "is not requested"
                " (--config.model.attention_kernel=auto prevents this)",
            ],
        ),
        (
            CPU,
            {"model.attention_kernel": "splash"},
            [
                "attention: splash, jax's kernel for TPUs, interpreted "
                "(model.attention_kernel=splash)",
                ONE_KERNEL,
                "warning: splash is interpreted on a CPU, for tests: a step takes minutes "
                "(--config.model.attention_kernel=auto)",
            ],
        ),
    ],
)
def test_what_is_said(hardware, changes, lines):
    assert described(hardware, changes) == lines


def test_more_chunks_than_tokens_are_refused():
    """A rule of mesh.context, which comes later, says what is wrong with it."""
    refused = kernels.refusal(
        SPLASH, case_of(V5P, {"data.sequence_length": 16, "mesh.context": 13})
    )
    assert refused and refused.rule.endswith("not 0")


def test_a_short_sequence_is_no_warning():
    assert len(described(V5P, {"data.sequence_length": 200})) == 1


def test_products_of_experts():
    """By their devices; by capacity there are none by groups."""
    experts = {"model.experts": 8, "model.expert_width": 64, "data.sequence_length": 128}
    said = lambda hardware, **changes: "\n".join(described(hardware, experts | changes))
    assert "products of experts: megablox, jax's kernels for TPUs\n" in said(V5P) + "\n"
    assert (
        "products of experts: blocks of rows in plain XLA (megablox is for TPUs, large_blocks "
        "are for GPUs)" in said(CPU)
    )
    assert "products of experts: large blocks of rows in plain XLA (megablox is for TPUs)" in said(
        H100
    )
    assert "warning: products of experts" in said(H100) and "warning" not in said(CPU)
    assert "products" not in said(H100, **{"model.capacity_factor": 1.0})
