"""A kind of device measured where this runs, as a hardware file that the planner reads.

    products     a sweep over m, n and k, in bfloat16 and float32
    attention    by the kernel that the trainer would take, forward and backward
    memory       passes over arrays of several sizes; operations so small that only their launch counts
    collectives  of several sizes over groups of the devices that are here

Every measurement is one SPMD program on all devices at once, as a training step is. So the figures are those of one of N devices that all
work, which matters where they share something. Simulated CPU devices share their cores: the seconds of one of N that all work are the
process's CPU-seconds over the cores, whatever else the machine does meanwhile; one that works while the others wait is `alone` times as
fast.

    python -m jaxtrain.plan.calibrate --out=FILE [--cpu_devices=8]
"""

import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import statistics
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.config import shown
from jaxtrain.config.errors import UsageError
from jaxtrain.config.flags import MOST_CPU_DEVICES, Flag, read_flags, settled
from jaxtrain.costs import hardware as kinds
from jaxtrain.costs.hardware import GIB, Hardware, Tier
from jaxtrain.costs.step_time import ATTENTION_BACKWARD
from jaxtrain.devices.startup import start_jax, unused_accelerator
from jaxtrain.plan import fit
from jaxtrain.plan.bench import Bench, Stopwatch, groups_of
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.search_progress import SearchProgress

MEMORY_USABLE = 0.94  # of a device's memory, where the platform does not say what programs get
BFLOAT16, FLOAT32 = "bfloat16", "float32"


class CalibrationError(RunError):
    """Devices that cannot be measured, or a file that cannot be written; the text is one line."""

    status = ExitStatus.BAD_CONFIG


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured on a platform; all sizes are a device's own.

    dtype:      of the products that are swept; of the other one only the peak is measured
    products:   (m, n, k)
    attention:  (sequences, tokens, heads, size of a head)
    passes:     bytes of an array that is read and written
    collectives: bytes of a whole array
    seconds:    of a timing, at least: so many calls one after the other
    """

    dtype: str
    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    passes: tuple[int, ...]
    collectives: tuple[int, ...]
    seconds: float


def _sweep(small: int, middle: int, large: int) -> tuple[tuple[int, int, int], ...]:
    """Every size small, middle and large beside the others, and pairs of them; the largest product last."""
    sizes = {(m, n, k) for m in (small, middle, large) for n in (small, middle, large) for k in (small, middle, large)}
    return tuple(sorted(sizes, key=lambda size: (math.prod(size), size)))


CPU = Sizes(
    FLOAT32,
    _sweep(64, 256, 1024),
    ((2, 256, 8, 32), (1, 512, 4, 64)),
    (1 << 18, 1 << 20, 1 << 23),
    (1 << 16, 1 << 20, 1 << 23),
    0.02,
)
ACCELERATOR = Sizes(
    BFLOAT16,
    _sweep(512, 2048, 8192),
    ((16, 1024, 12, 64), (4, 2048, 16, 128), (1, 8192, 16, 128)),
    (1 << 22, 1 << 26, 1 << 28),
    (1 << 20, 1 << 24, 1 << 28),
    0.02,
)


# --- the file --------------------------------------------------------------------------------------------------------------------


def calibrate(sizes: Sizes | None = None, report: Callable[[str, float], None] = lambda what, done: None) -> Hardware:
    """The kind of this process's devices, as measured now. Call it when jax has its devices; takes under a minute.

    report: is told what begins, and which part of the whole is behind. Raises CalibrationError where devices cannot be measured.
    """
    devices = jax.devices()
    known = kinds.of_device(devices[0].device_kind)
    if jax.process_count() > 1:
        raise CalibrationError("--calibrate measures one process's devices: start it on one machine, without --processes")
    if len(devices) == 1 and known is None:
        kind = devices[0].device_kind
        raise CalibrationError(f"--calibrate needs two devices to measure links, and {kind!r} is one of no known kind: use --cpu_devices=8")
    sizes = sizes or (CPU if devices[0].platform == "cpu" else ACCELERATOR)
    bench = Bench.of(devices, sizes.seconds)
    call, launch = bench.call(), bench.launch()
    swept, peaks, matmul, error = _products(bench, sizes, call, launch, report)
    fitted = [f"{len(swept)} products {error:.0%}"]
    forward, backward = _attention(bench, sizes, peaks[sizes.dtype], call, report)
    report("passes over memory", 0.7)
    passes = [bench.pass_over(size, call) for size in sizes.passes]
    streaming = sum(moved for moved, _ in passes[-2:]) / sum(seconds for _, seconds in passes[-2:])
    tiers: tuple[Tier, ...] = known.tiers if known else ()
    if len(devices) > 1:
        measured: list[fit.Collective] = []
        tried = [(group, size) for group in groups_of(len(devices)) for size in sizes.collectives]
        for i, (group, size) in enumerate(tried):
            report(f"collectives of {size >> 10} KiB over {group} devices", 0.75 + 0.25 * i / len(tried))
            measured += bench.collectives(group, size, call)
        tier, error = fit.links(measured, tiers[0].name if tiers else "local", len(devices) if len(tiers) > 1 else 0)
        fitted.append(f"{len(measured)} collectives {error:.0%}")
        tiers = (tier, *tiers[1:])
    watch = bench.watch
    base = _at_least_as_measured(known or _unknown(devices, peaks, streaming), peaks, streaming)
    reached = peaks[sizes.dtype] / base.peak(sizes.dtype)
    return dataclasses.replace(
        base,
        name=_name(devices, watch),
        matmul=dataclasses.replace(matmul, peak=min(1.0, reached)),
        attention_forward=min(1.0, forward * reached),
        attention_backward=min(1.0, backward * reached),
        memory_reached=min(1.0, streaming / (1e9 * base.memory_gb_per_s)),
        launch_us=1e6 * launch,
        tiers=tiers,
        alone=len(devices) / watch.cores if watch.cores else 1.0,
        sources=_sources(devices, watch, sizes, fitted, known),
    )


def _products(
    bench: Bench, sizes: Sizes, call: float, launch: float, report: Any
) -> tuple[list[fit.Product], dict[str, float], Any, float]:
    """(what was swept, operations a second by dtype without the losses of sizes, these, the fit's error)."""
    swept = []
    for i, (m, n, k) in enumerate(sizes.products):
        report(f"products, [{m}, {k}] · [{k}, {n}]", 0.05 + 0.5 * i / len(sizes.products))
        swept.append(bench.product(m, n, k, sizes.dtype, call))
    peak, matmul, error = fit.products(swept, launch)
    other = BFLOAT16 if sizes.dtype == FLOAT32 else FLOAT32
    report(f"products in {other}", 0.55)
    largest = bench.product(*sizes.products[-1], other, call)
    rate = largest.flops / fit.without(largest.seconds, launch)
    return swept, {sizes.dtype: peak, other: rate / matmul.reached(largest.m, largest.n, largest.k)}, matmul, error


def _attention(bench: Bench, sizes: Sizes, peak: float, call: float, report: Any) -> tuple[float, float]:
    """Parts of `peak` that attention reaches, forward and backward: geometric means over the sizes, half of the scores counted."""
    parts = []
    for i, (sequences, tokens, heads, size) in enumerate(sizes.attention):
        report(f"attention, {heads} heads of {size}, {tokens} tokens", 0.6 + 0.1 * i / len(sizes.attention))
        flops = 0.5 * 4.0 * sequences * heads * tokens**2 * size
        forward, backward = bench.attention(sequences, tokens, heads, size, sizes.dtype, call)
        parts.append((flops / forward / peak, ATTENTION_BACKWARD * flops / backward / peak))
    return statistics.geometric_mean(p for p, _ in parts), statistics.geometric_mean(p for _, p in parts)


def _unknown(devices: Sequence[jax.Device], peaks: dict[str, float], streaming: float) -> Hardware:
    """A kind without a data sheet: what was measured is all there is."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    if not limit and devices[0].platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    tflops = {dtype: peak / 1e12 for dtype, peak in peaks.items()}
    memory, gb_per_s = limit / GIB, streaming / 1e9
    return Hardware("", tflops, memory, MEMORY_USABLE, gb_per_s, 1.0, kinds.Matmul(1.0, (0.0, 0.0, 0.0)), 1.0, 1.0, 0.0, (), 0.0, ())


def _at_least_as_measured(kind: Hardware, peaks: Mapping[str, float], streaming: float) -> Hardware:
    """The kind with its peaks as high as those that were measured: none reaches more than all of them."""
    tflops = {dtype: max(peak, peaks.get(dtype, 0.0) / 1e12) for dtype, peak in kind.peak_tflops.items()}
    return dataclasses.replace(kind, peak_tflops=tflops, memory_gb_per_s=max(kind.memory_gb_per_s, streaming / 1e9))


def _name(devices: Sequence[jax.Device], watch: Stopwatch) -> str:
    shared = f", {len(devices)} simulated devices on {watch.cores} cores" if watch.cores else ""
    return f"{devices[0].device_kind}{shared}"


def _sources(
    devices: Sequence[jax.Device], watch: Stopwatch, sizes: Sizes, fitted: Sequence[str], known: Hardware | None
) -> tuple[str, ...]:
    """When, where and with what it was measured, how well the fits hold, and what was not measured."""
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    seconds = f"CPU-seconds of the process over {watch.cores} cores" if watch.cores else "seconds of the wall"
    kernels = f"products and attention in {sizes.dtype}, all devices at once"
    sources = [
        f"measured by --calibrate, {when}, on {platform.node() or 'a machine without a name'}: {len(devices)} × {devices[0].device_kind}, "
        f"jax {jax.__version__}, {seconds}; {kernels}",
        f"median relative errors of the fits: {', '.join(fitted)}",
    ]
    if known:
        rest = "peaks, memory and power" if len(devices) > 1 else "peaks, memory, power and all links"
        farther = "; links beyond these devices" if len(devices) > 1 and len(known.tiers) > 1 else ""
        sources.append(f"{rest} of {known.name}'s file{farther}, not measured: {'; '.join(known.sources)}")
    return tuple(sources)


def write(hardware: Hardware, file: str) -> None:
    """Writes the file that `costs.hardware.load` reads. Raises CalibrationError where it cannot be written."""
    try:
        pathlib.Path(file).write_text(json.dumps(kinds.to_json(hardware), indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise CalibrationError(f"{file!r} cannot be written ({os.strerror(error.errno or 0)}): use --out=hardware.json") from None


def check_file(file: str) -> None:
    """Raises UsageError unless a file of that name can be written and read again, before a minute is spent."""
    path = pathlib.Path(file)
    if path.suffix != ".json":
        raise UsageError(f"--out={shown(file)} is no JSON file", {"out": str(path.with_suffix(".json")) if path.name else "hardware.json"})
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"--out={shown(file)} cannot be written there", {"out": "hardware.json" if os.path.isdir(path.name) else path.name}
        )


def summary(hardware: Hardware) -> list[str]:
    """Lines for people."""
    peaks = ", ".join(f"{dtype} {peak:.3g}" for dtype, peak in hardware.peak_tflops.items())
    m, n, k = hardware.matmul.half
    lines = [
        f"{hardware.name}: TFLOP/s {peaks}",
        f"products reach {hardware.matmul.peak:.0%}, half of it at m {m:.0f}, n {n:.0f} or k {k:.0f}",
        f"attention reaches {hardware.attention_forward:.0%} forward, {hardware.attention_backward:.0%} backward",
        f"memory {hardware.streaming / 1e9:.3g} GB/s, an operation's launch {hardware.launch_us:.1f} µs",
        *(f"{t.name}: {t.bytes_per_s / 1e9:.3g} GB/s, {t.latency_us:.1f} µs" for t in hardware.tiers),
    ]
    return lines


# --- the command -----------------------------------------------------------------------------------------------------------------

DESCRIPTION = """usage: python -m jaxtrain.plan.calibrate --out=FILE [--cpu_devices=N]

Measures this machine's devices, all at once, and writes a hardware file for the planner: --hardware=FILE."""
FLAGS = (
    Flag("out", "hardware.json", "the file that is written"),
    Flag("cpu_devices", 0, "simulate this many CPU devices; 0: the platform's own devices", 0, MOST_CPU_DEVICES),
)


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    reading = read_flags(argv, DESCRIPTION, FLAGS, with_config=False)
    try:
        settled(reading, lambda reading: check_file(reading.values["out"]))
        flags = types.SimpleNamespace(**reading.values, coordinator="", processes=1, process_id=0)
        start_jax(flags)
        if unused := unused_accelerator(flags):
            raise CalibrationError(unused)
        with SearchProgress("calibrating") as progress:
            hardware = calibrate(report=progress)
        write(hardware, flags.out)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return ExitStatus.BAD_CONFIG
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.status
    print("\n".join([*summary(hardware), f"written to {flags.out}: use --hardware={flags.out}"]))
    return ExitStatus.FINISHED


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
