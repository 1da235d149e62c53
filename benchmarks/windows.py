"""A layer's attention with windows beside full attention, on the device here: seconds, and errors.
`python benchmarks/windows.py --tokens=8192 --windows=512,1024,4096`.

A line for each window: milliseconds of the kernel that the trainer chooses, forward and with
gradients; their ratio to those of full attention, and that of the scores which have to be computed;
distances of output and gradients from plain XLA in float32, ‖a − exact‖ / ‖exact‖.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from gpu_kernels import distance, measured_seconds, with_gradients

from jaxtrain.config.kernels import AttentionCase, attention_kernel
from jaxtrain.devices.mesh import make_mesh
from jaxtrain.parallel.attention.causal import AttentionSettings, attend_causal
from jaxtrain.parallel.attention.flash import Scores
from jaxtrain.parallel.target_device import target_device


def attend(settings: AttentionSettings, q, k, v, sinks, segments=None) -> jax.Array:
    return attend_causal(q, k, v, segments, settings, None, sinks)


def line_of(args: argparse.Namespace, window: int, documents: bool, full: tuple) -> tuple:
    """(text, seconds forward, seconds with gradients) of a window, 0 for full attention."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape, args.dtype)
    b, t, n, k, h = args.batch, args.tokens, args.heads, args.kv_heads, args.size
    arrays = normal(b, t, n, h), normal(b, t, k, h), normal(b, t, k, h), normal(n)
    direction, fixed = normal(b, t, n, h), ()
    if documents:  # eight in a sequence on average
        begins = np.random.default_rng(0).random((b, t)) < 8 / t
        fixed = (jnp.asarray(np.cumsum(begins, 1), jnp.int32),)
    settings = AttentionSettings(window=window, scores=Scores(softcap=args.softcap))
    chosen = functools.partial(attend, settings)
    plain = functools.partial(attend, dataclasses.replace(settings, kernel="xla"))
    with jax.default_matmul_precision("highest"):
        exact = with_gradients(plain, 4)(
            direction.astype(jnp.float32), *(a.astype(jnp.float32) for a in arrays), *fixed
        )
    both = with_gradients(chosen, 4)
    value, gradients = both(direction, *arrays, *fixed)
    errors = [
        distance(a, e) for a, e in zip((value, *gradients), (exact[0], *exact[1]), strict=True)
    ]
    seconds = (
        measured_seconds(jax.jit(chosen), (*arrays, *fixed)),
        measured_seconds(both, (direction, *arrays, *fixed)),
    )
    bits = 8 * arrays[0].dtype.itemsize
    case = AttentionCase(
        *(target_device(), bits, h, h, t, t, documents),
        window=window,
        softcap=args.softcap > 0,
        sinks=True,
    )
    seen = min(window or t, t)
    needed = (seen * t - seen * (seen - 1) / 2) / (t * (t + 1) / 2)
    ratios = [s / f for s, f in zip(seconds, full or seconds, strict=True)]
    text = (
        f"window {window or 'none':>5}{', documents' * documents}: {1e3 * seconds[0]:.2f} ms "
        f"forward, {1e3 * seconds[1]:.2f} ms with gradients; {ratios[0]:.2f} and {ratios[1]:.2f} "
        f"of full attention's, {needed:.2f} of its scores; errors: output {errors[0]:.1e}, queries "
        f"{errors[1]:.1e}, keys {errors[2]:.1e}, values {errors[3]:.1e}, sinks {errors[4]:.1e} "
        f"({attention_kernel(case).words})"
    )
    return text, *seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    defaults = {"tokens": 8192, "batch": 2, "heads": 32, "kv_heads": 8, "size": 128}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--windows", default="512,1024,4096")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--documents", action="store_true")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(args)}", flush=True)
    full: tuple = ()
    with jax.set_mesh(make_mesh((1,) * 6, jax.devices()[:1])):
        for window in (0, *map(int, args.windows.split(","))):
            text, *seconds = line_of(args, window, args.documents, full)
            full = full or tuple(seconds)
            print(text, flush=True)


if __name__ == "__main__":
    main()
