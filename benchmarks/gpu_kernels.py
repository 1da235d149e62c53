"""Kernels against their fallbacks, for benchmarks/gpu.py: values, gradients and times.
`python benchmarks/gpu_kernels.py FOLDER`.

A comparison is two functions of the same arrays: the kernel as the trainer chooses it, and plain
XLA. The errors of both are distances from plain XLA in float32, ‖a − exact‖ / ‖exact‖. A kernel
that is right is as far from it as the fallback is: by bfloat16's rounding, 2e-3 to 1e-2.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from worker import one_line, report_result

REPEATS = 5  # times that are measured, of which the median counts
LEAST_SECONDS = 0.05  # of a measured time, which is that of several calls


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A kernel and its fallback.

    function, reference: (*arrays, *fixed) → an array
    shapes: of the arrays, by which it is differentiated
    fixed: what is not differentiated: groups' sizes, documents
    flops: operations of the function, forward; its backward has twice as many (attention's: 2.5
        times)
    """

    name: str
    function: Callable
    reference: Callable
    shapes: tuple[tuple[int, ...], ...]
    flops: float
    backward: float = 2.0
    fixed: tuple[Any, ...] = ()


# --- what is compared -----------------------------------------------------------------------------


def comparisons(tiny: bool, dtype: str) -> list[Comparison]:
    """Attention as the shipped recipes have it, and the experts' products, up and down."""
    if tiny:
        sizes = [("tiny", 2, 128, 4, 2, 16)]
        groups = [("tiny", 96, 16, 24, 4)]
    else:
        sizes = [("gpt2_124m", 64, 1024, 12, 12, 64), ("llama3_8b", 2, 8192, 32, 8, 128)]
        groups = [
            ("mixtral_8x7b, up", 16384, 4096, 14336, 8),
            ("mixtral_8x7b, down", 16384, 14336, 4096, 8),
        ]
    listed = [attention(*shape, dtype, documents) for shape in sizes for documents in (False, True)]
    return listed + [comparison for shape in groups for comparison in products(*shape)]


def attention(
    model: str, b: int, t: int, n: int, k: int, h: int, dtype: str, documents: bool
) -> Comparison:
    """b sequences of t tokens, n heads of size h and k of keys and values; documents of random
    lengths, eight in a sequence on average."""
    from jaxtrain.config.kernels import AttentionCase, attention_kernel
    from jaxtrain.parallel.attention.causal import AttentionSettings, attend_causal
    from jaxtrain.parallel.target_device import target_device

    def attend(kernel: str, q, k, v, segments=None):
        return attend_causal(q, k, v, segments, AttentionSettings(kernel=kernel))

    flops = 2 * b * n * h * t * t  # two products over half of the scores
    fixed: tuple = ()
    if documents:
        begins = np.random.default_rng(0).random((b, t)) < 8 / t
        segments = np.cumsum(begins, 1, dtype=np.int32)
        fixed, flops = (segments,), 4 * n * h * seen(segments)
    case = AttentionCase(target_device(), 32 if dtype == "float32" else 16, h, h, t, t, documents)
    name = (
        f"attention{', documents apart' * documents}, {model}: {attention_kernel(case).words} "
        "beside plain XLA"
    )
    by = lambda kernel: functools.partial(attend, kernel)
    return Comparison(
        name, by("auto"), by("xla"), ((b, t, n, h), (b, t, k, h), (b, t, k, h)), flops, 2.5, fixed
    )


def seen(segments: np.ndarray) -> int:
    """Pairs of a query and a key of its own document that is not behind it; segments [B, T] as they
    follow each other."""
    count = 0
    for row in segments:
        lengths = np.bincount(row)
        count += int((lengths * (lengths + 1) // 2).sum())
    return count


def products(
    model: str, tokens: int, inputs: int, outputs: int, groups: int
) -> Iterator[Comparison]:
    """Products of tokens sorted by expert, in uneven groups, one of them empty.

    The chosen kernel is compared with a plain product for each expert, whose sizes the program
    knows, the fastest that is possible; and with the fallback by blocks, if that is not the chosen
    one.
    """
    from jaxtrain.config.kernels import BLOCKS, PRODUCTS, product_kernel
    from jaxtrain.parallel.experts.products import KERNELS
    from jaxtrain.parallel.target_device import target_device

    shares = np.random.default_rng(0).dirichlet(np.full(groups - 1, 4.0))
    sizes = np.zeros(groups, np.int32)
    sizes[1:] = np.floor(shares * tokens)
    sizes[1] += tokens - sizes.sum()

    def one_by_one(x, weights, _):
        import jax.numpy as jnp

        ends = np.cumsum(sizes)
        return jnp.concatenate(
            [
                x[end - size : end] @ weights[i]
                for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
            ]
        )

    chosen = product_kernel(target_device()).kernel
    references = {"a plain product for each": one_by_one}
    if chosen != BLOCKS:
        references[PRODUCTS[BLOCKS]] = differentiable(KERNELS[BLOCKS])
    for other, reference in references.items():
        name, function = (
            f"product by groups, {model}: {PRODUCTS[chosen]} beside {other}",
            differentiable(KERNELS[chosen]),
        )
        shapes = ((tokens, inputs), (groups, inputs, outputs))
        flops = 2 * tokens * inputs * outputs
        yield Comparison(name, function, reference, shapes, flops, fixed=(sizes,))


def differentiable(kernel: Any) -> Callable:
    """A product of rows and matrices by products.Products, with its gradients."""
    import jax

    def backward(residuals, g):
        x, weights, sizes = residuals
        return kernel.rows_gradient(g, weights, sizes), kernel.weights_gradient(x, g, sizes), None

    product = jax.custom_vjp(lambda x, weights, sizes: kernel.product(x, weights, sizes))
    product.defvjp(
        lambda x, weights, sizes: (kernel.product(x, weights, sizes), (x, weights, sizes)), backward
    )
    return product


# --- the measurements -----------------------------------------------------------------------------


def with_gradients(function: Callable, count: int) -> Callable:
    """(direction, *arrays, *fixed) → the function's value, and the gradients of its product with
    the direction by the arrays."""
    import jax

    def both(direction, *arguments):
        arrays, fixed = arguments[:count], arguments[count:]
        value, back = jax.vjp(lambda *arrays: function(*arrays, *fixed), *arrays)
        return value, back(direction.astype(value.dtype))

    return jax.jit(both)


def distance(a, exact) -> float:
    """‖a − exact‖ / ‖exact‖; not a number where one of `a` is none."""
    import jax.numpy as jnp

    a = a.astype(jnp.float32)
    return float(jnp.linalg.norm((a - exact).ravel()) / jnp.linalg.norm(exact.ravel()))


def measured_seconds(function: Callable, arguments: tuple) -> float:
    """The median time of a call, its results waited for after so many calls that it takes
    LEAST_SECONDS."""
    import jax

    jax.block_until_ready(function(*arguments))

    def several(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            result = function(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / count

    count = max(1, round(LEAST_SECONDS / several(1)))
    return statistics.median(several(count) for _ in range(REPEATS))


def compare(c: Comparison, dtype: str) -> dict:
    """Errors and seconds of one comparison."""
    import jax
    import jax.numpy as jnp

    keys, count = iter(jax.random.split(jax.random.key(1), 1 + len(c.shapes))), len(c.shapes)
    arrays = [jax.random.normal(next(keys), shape, dtype) for shape in c.shapes]
    fixed = tuple(jnp.asarray(a) for a in c.fixed)
    direction = jax.random.normal(
        next(keys), jax.eval_shape(c.reference, *arrays, *fixed).shape, dtype
    )
    arguments = (direction, *arrays, *fixed)
    with jax.default_matmul_precision("highest"):
        exactly = with_gradients(c.reference, count)
        exact, exact_gradients = exactly(
            *(a.astype(jnp.float32) for a in (direction, *arrays)), *fixed
        )
    row: dict[str, Any] = {"name": c.name, "flops": c.flops * (1 + c.backward)}
    for side, function in (("kernel", c.function), ("fallback", c.reference)):
        run = with_gradients(function, count)
        value, gradients = run(*arguments)
        errors = [distance(g, e) for g, e in zip(gradients, exact_gradients, strict=True)]
        row[side] = {
            "value_error": distance(value, exact),
            "gradient_error": max(errors),
            "seconds": measured_seconds(run, arguments),
        }
    return row


def run(folder: pathlib.Path) -> dict:
    """Makes all comparisons of the case in a folder. Returns the worker's result."""
    case = json.loads((folder / "case.json").read_text())
    import jax

    from jaxtrain.devices.mesh import make_mesh

    results: list[dict] = []
    with jax.set_mesh(make_mesh((1,) * 6, jax.devices()[:1])):
        for comparison in comparisons(case["tiny"], case["dtype"]):
            try:
                results.append(compare(comparison, case["dtype"]))
            except Exception as error:  # one that fails is a line; the others go on
                results.append(
                    {
                        "name": comparison.name,
                        "failure": one_line(f"{type(error).__name__}: {error}"),
                    }
                )
            print(json.dumps(results[-1]), flush=True)
    return {"kernels": results}


if __name__ == "__main__":
    report_result(lambda: run(pathlib.Path(sys.argv[1])))
