"""Which kernel multiplies rows with their experts (dropless), by platform, and why the others do not. Standard library only.

A row is a kernel, in the order in which they are tried. All three forms of a product go to the same one: rows × matrices, and the gradients
of both.

    kernel     devices   is
    megablox   TPUs      jax's Pallas kernels (parallel/megablox.py)
    blocks     any       a loop over blocks of rows in plain XLA (parallel/grouped.py)
"""

import dataclasses

TPU, GPU = "tpu", "gpu"
MEGABLOX, BLOCKS = "megablox", "blocks"
WORDS = {MEGABLOX: "megablox, jax's kernels for TPUs", BLOCKS: "blocks of rows in plain XLA"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel, in words too, and those before it in the table: name → why not. `warning`: what a user would not expect, or nothing."""

    kernel: str
    words: str
    passed_over: dict[str, str]
    warning: str = ""


def product_kernel(platform: str) -> Choice:
    """The kernel for a platform by its name in jax."""
    if platform == TPU:
        return Choice(MEGABLOX, WORDS[MEGABLOX], {})
    warning = ""
    if platform == GPU:
        warning = "products of experts by blocks of rows wait for the host before each block on a GPU: model.capacity_factor has plain ones"
    return Choice(BLOCKS, WORDS[BLOCKS], {MEGABLOX: "is for TPUs"}, warning)


def describe(platform: str) -> list[str]:
    """Lines for people."""
    choice = product_kernel(platform)
    passed = ", ".join(f"{name} {why}" for name, why in choice.passed_over.items())
    lines = [f"products of experts: {choice.words}{f' ({passed})' * bool(passed)}"]
    return lines + [f"warning: {choice.warning}"] * bool(choice.warning)
