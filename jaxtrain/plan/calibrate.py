"""A kind of device measured where this runs, as a hardware file that the planner reads.

    products     a sweep over m, n and k, in bfloat16 and float32
    attention    by the kernel that the trainer would take, forward and backward
    memory       passes over arrays of several sizes; operations so small that only their launch
                 counts
    collectives  of several sizes over groups of the devices that are here

Every measurement is one SPMD program on all devices at once, as a training step is (bench.py). So
the figures are those of one of N devices that all work, which matters where they share something. A
simulated CPU device that works while the others wait is `alone` times as fast.

Times of products and collectives are sums of known terms (costs/hardware.py: Matmul.reached,
costs/collectives.py: Links) with factors that are not negative. These come by least squares of the
relative errors, for times differ by four orders of magnitude.

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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from scipy.optimize import nnls

from jaxtrain import cli
from jaxtrain.config import shown
from jaxtrain.config.errors import UsageError
from jaxtrain.config.flags import MOST_CPU_DEVICES, Flag
from jaxtrain.costs import hardware as kinds
from jaxtrain.costs.collectives import DATA, Links
from jaxtrain.costs.hardware import FIGURES, GIB, Hardware, Matmul, Tier
from jaxtrain.costs.layout import Layout
from jaxtrain.costs.step_time import ATTENTION_BACKWARD
from jaxtrain.devices.startup import start_jax, unused_accelerator
from jaxtrain.plan.bench import Bench, Exchange, Product, groups_of, without
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.run.progress import SearchProgress

MEMORY_USABLE = 0.94  # of a device's memory, where the platform does not say what programs get
BFLOAT16, FLOAT32 = "bfloat16", "float32"


class CalibrationError(RunError):
    """Devices that cannot be measured; the text is one line."""

    status = ExitStatus.BAD_CONFIG


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured on a platform; all sizes are a device's own.

    dtype:       of the products that are swept; of the other one only the peak is measured
    products:    (m, n, k), the largest last
    attention:   (sequences, tokens, heads, size of a head)
    passes:      bytes of an array that is read and written
    collectives: bytes of a whole array
    seconds:     of a timing, at least: so many calls one after the other
    """

    dtype: str
    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    passes: tuple[int, ...]
    collectives: tuple[int, ...]
    seconds: float = 0.02


def _sweep(*sizes: int) -> tuple[tuple[int, int, int], ...]:
    """Every size beside every other one; the largest product last."""
    return tuple(
        sorted(
            ((m, n, k) for m in sizes for n in sizes for k in sizes),
            key=lambda size: (math.prod(size), size),
        )
    )


CPU = Sizes(
    FLOAT32,
    _sweep(64, 256, 1024),
    ((2, 256, 8, 32), (1, 512, 4, 64)),
    (1 << 18, 1 << 20, 1 << 23),
    (1 << 16, 1 << 20, 1 << 23),
)
ACCELERATOR = Sizes(
    BFLOAT16,
    _sweep(512, 2048, 8192),
    ((16, 1024, 12, 64), (4, 2048, 16, 128), (1, 8192, 16, 128)),
    (1 << 22, 1 << 26, 1 << 28),
    (1 << 20, 1 << 24, 1 << 28),
)


# --- fits ---------------------------------------------------------------------------------------


def fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """(factors, none below 0, with which sums of terms come closest to measured seconds; the median
    relative error). terms: a row for each measurement."""
    parts = np.asarray(terms, float) / np.asarray(seconds, float)[:, None]
    scales = np.abs(parts).max(0)
    scales[scales == 0] = 1.0
    factors = nnls(parts / scales, np.ones(len(parts)))[0] / scales
    return factors.tolist(), float(np.median(np.abs(parts @ factors - 1)))


def fit_products(measured: Sequence[Product], launch: float) -> tuple[float, Matmul, float]:
    """(operations a second of a product of any size, the part of that which sizes leave, median
    relative error). launch: seconds of an operation that does nothing."""
    seconds = [without(product.seconds, launch) for product in measured]
    factors, error = fit(
        [[p.flops * factor for factor in (1.0, 1 / p.m, 1 / p.n, 1 / p.k)] for p in measured],
        seconds,
    )
    # all of it by their sizes
    first = factors[0] or min(s / p.flops for s, p in zip(seconds, measured, strict=True))
    m, n, k = (factor / first for factor in factors[1:])
    return 1 / first, Matmul(1.0, (m, n, k)), error


def fit_links(
    measured: Sequence[Exchange], hardware: Hardware, name: str, devices: int
) -> tuple[Tier, float]:
    """The tier that joins the devices of these exchanges, and the median relative error; all of its
    bandwidth is reached."""
    units = [
        dataclasses.replace(hardware, tiers=(Tier(name, 0, *unit),))
        for unit in ((1.0, 1.0, 0.0), (math.inf, 1.0, 1.0))
    ]
    terms = [
        [Links(Layout(data=e.devices), unit).seconds(e.collectives)[DATA] for unit in units]
        for e in measured
    ]
    (bandwidth, latency), error = fit(terms, [exchange.seconds for exchange in measured])
    fastest = FIGURES["gb_per_s"][1]  # where no byte took time
    return Tier(
        name, devices, min(fastest, 1 / bandwidth) if bandwidth else fastest, 1.0, latency
    ), error


# --- the file -----------------------------------------------------------------------------------


def calibrate(
    sizes: Sizes | None = None, report: Callable[[str, float], None] = lambda what, done: None
) -> Hardware:
    """The kind of this process's devices, as measured now, when jax has its devices; takes under a
    minute.

    report: is told what begins, and which part of the whole is behind. Raises CalibrationError
    where devices cannot be measured.
    """
    devices = jax.devices()
    known = kinds.of_device(devices[0].device_kind)
    if jax.process_count() > 1:
        raise CalibrationError(
            "--calibrate measures one process's devices: start it on one machine, without "
            "--processes"
        )
    if len(devices) == 1 and known is None:
        kind = devices[0].device_kind
        raise CalibrationError(
            f"--calibrate needs two devices to measure links, and {kind!r} is one of no known "
            "kind: use --cpu_devices=8"
        )
    sizes = sizes or (CPU if devices[0].platform == "cpu" else ACCELERATOR)
    bench = Bench(devices, sizes.seconds)
    call, launch = bench.call(), bench.launch()
    products = []
    for i, (m, n, k) in enumerate(sizes.products):
        report(f"products, [{m}, {k}] · [{k}, {n}]", 0.05 + 0.5 * i / len(sizes.products))
        products.append(bench.product(m, n, k, sizes.dtype, call))
    peak, matmul, error = fit_products(products, launch)
    fitted = [f"{len(products)} products {error:.0%}"]
    other = BFLOAT16 if sizes.dtype == FLOAT32 else FLOAT32
    report(f"products in {other}", 0.55)
    largest = bench.product(*sizes.products[-1], other, call)
    rate = largest.flops / without(largest.seconds, launch)
    peaks = {sizes.dtype: peak, other: rate / matmul.reached(largest.m, largest.n, largest.k)}
    forward, backward = _attention(bench, sizes, peak, call, report)
    report("passes over memory", 0.7)
    passes = [bench.streaming(size, call) for size in sizes.passes][-2:]
    base = _as_fast_as_measured(
        known or _unknown(devices),
        peaks,
        sum(moved for moved, _ in passes) / sum(seconds for _, seconds in passes),
    )
    alone = len(devices) / bench.watch.cores if bench.watch.cores else 1.0
    tiers = base.tiers
    if len(devices) > 1:
        exchanges: list[Exchange] = []
        tried = [(group, size) for group in groups_of(len(devices)) for size in sizes.collectives]
        for i, (group, size) in enumerate(tried):
            report(
                f"collectives of {size >> 10} KiB over {group} devices",
                0.75 + 0.25 * i / len(tried),
            )
            exchanges += bench.exchanges(group, size, call)
        here = (tiers[0].name if tiers else "local", len(devices) if len(tiers) > 1 else 0)
        tier, error = fit_links(exchanges, dataclasses.replace(base, alone=alone), *here)
        fitted.append(f"{len(exchanges)} collectives {error:.0%}")
        tiers = (tier, *tiers[1:])
    cores = bench.watch.cores
    reached = peak / base.peak(sizes.dtype)
    return dataclasses.replace(
        base,
        name=f"{devices[0].device_kind}"
        f"{f', {len(devices)} simulated devices on {cores} cores' * bool(cores)}",
        matmul=dataclasses.replace(matmul, peak=min(1.0, reached)),
        attention_forward=min(1.0, forward * reached),
        attention_backward=min(1.0, backward * reached),
        launch_us=1e6 * launch,
        tiers=tiers,
        alone=alone,
        sources=_sources(devices, cores, sizes, fitted, known),
    )


def _attention(
    bench: Bench, sizes: Sizes, peak: float, call: float, report: Any
) -> tuple[float, float]:
    """Parts of `peak` that attention reaches, forward and backward: geometric means over the sizes,
    half of the scores counted."""
    parts = []
    for i, (sequences, tokens, heads, size) in enumerate(sizes.attention):
        report(
            f"attention, {heads} heads of {size}, {tokens} tokens",
            0.6 + 0.1 * i / len(sizes.attention),
        )
        flops = 0.5 * 4.0 * sequences * heads * tokens**2 * size
        forward, backward = bench.attention(sequences, tokens, heads, size, sizes.dtype, call)
        parts.append((flops / forward / peak, ATTENTION_BACKWARD * flops / backward / peak))
    return statistics.geometric_mean(p for p, _ in parts), statistics.geometric_mean(
        p for _, p in parts
    )


def _unknown(devices: Sequence[jax.Device]) -> Hardware:
    """A kind without a data sheet, of which only the memory's size is known."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    if not limit and devices[0].platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    none = dict.fromkeys((BFLOAT16, FLOAT32), 0.0)
    return Hardware(
        "",
        none,
        limit / GIB,
        MEMORY_USABLE,
        0.0,
        1.0,
        Matmul(1.0, (0.0, 0.0, 0.0)),
        1.0,
        1.0,
        0.0,
        (),
        0.0,
        (),
    )


def _as_fast_as_measured(kind: Hardware, peaks: dict[str, float], streaming: float) -> Hardware:
    """The kind with its peaks as high as those that were measured, for none reaches more than all
    of them, and the part of the memory's bandwidth that passes reach."""
    tflops = {
        dtype: max(peak, peaks.get(dtype, 0.0) / 1e12) for dtype, peak in kind.peak_tflops.items()
    }
    gb_per_s = max(kind.memory_gb_per_s, streaming / 1e9)
    return dataclasses.replace(
        kind,
        peak_tflops=tflops,
        memory_gb_per_s=gb_per_s,
        memory_reached=min(1.0, streaming / (1e9 * gb_per_s)),
    )


def _sources(
    devices: Sequence[jax.Device],
    cores: int,
    sizes: Sizes,
    fitted: Sequence[str],
    known: Hardware | None,
) -> tuple[str, ...]:
    """When, where and with what it was measured, how well the fits hold, and what was not
    measured."""
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    seconds = f"CPU-seconds of the process over {cores} cores" if cores else "seconds of the wall"
    sources = [
        f"measured by --calibrate, {when}, on "
        f"{platform.node() or 'a machine without a name'}: {len(devices)} × "
        f"{devices[0].device_kind}, "
        f"jax {jax.__version__}, {seconds}; products and attention in {sizes.dtype}, all "
        "devices at once",
        f"median relative errors of the fits: {', '.join(fitted)}",
    ]
    if known:
        rest = (
            "peaks, memory and power" if len(devices) > 1 else "peaks, memory, power and all links"
        )
        farther = (
            "; links beyond these devices" if len(devices) > 1 and len(known.tiers) > 1 else ""
        )
        sources.append(
            f"{rest} of {known.name}'s file{farther}, not measured: {'; '.join(known.sources)}"
        )
    return tuple(sources)


def summary(hardware: Hardware) -> list[str]:
    """Lines for people."""
    peaks = ", ".join(f"{dtype} {peak:.3g}" for dtype, peak in hardware.peak_tflops.items())
    m, n, k = hardware.matmul.half
    return [
        f"{hardware.name}: TFLOP/s {peaks}",
        f"products reach {hardware.matmul.peak:.0%}, half of it at m {m:.0f}, n {n:.0f} or k "
        f"{k:.0f}",
        f"attention reaches {hardware.attention_forward:.0%} forward, "
        f"{hardware.attention_backward:.0%} backward",
        f"memory {hardware.streaming / 1e9:.3g} GB/s, an operation's launch "
        f"{hardware.launch_us:.1f} µs",
        *(
            f"{t.name}: {t.bytes_per_s / 1e9:.3g} GB/s, {t.latency_us:.1f} µs"
            for t in hardware.tiers
        ),
    ]


# --- the command --------------------------------------------------------------------------------

DESCRIPTION = """usage: python -m jaxtrain.plan.calibrate --out=FILE [--cpu_devices=N]

Measures this machine's devices, all at once, and writes a hardware file for the planner:
--hardware=FILE."""
FLAGS = (
    Flag("out", "hardware.json", "the file that is written"),
    Flag(
        "cpu_devices",
        0,
        "simulate this many CPU devices; 0: the platform's own devices",
        0,
        MOST_CPU_DEVICES,
    ),
)


def check_flags(flags: types.SimpleNamespace) -> types.SimpleNamespace:
    """The flags. Raises UsageError unless a file of that name can be written and read again, before
    a minute is spent."""
    path = pathlib.Path(flags.out)
    if path.suffix != ".json":
        raise UsageError(
            f"--out={shown(flags.out)} is no JSON file",
            {"out": str(path.with_suffix(".json")) if path.name else "hardware.json"},
        )
    cli.check_output("out", flags.out, "hardware.json")
    return flags


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    flags = cli.checked_flags(argv, DESCRIPTION, FLAGS, check_flags)
    flags.coordinator, flags.processes, flags.process_id = "", 1, 0
    try:
        start_jax(flags)
        if unused := unused_accelerator(flags):
            raise CalibrationError(unused)
        with SearchProgress("calibrating") as progress:
            hardware = calibrate(report=progress)
        cli.write_output(
            flags.out,
            (json.dumps(kinds.to_json(hardware), indent=2, ensure_ascii=False) + "\n").encode(),
        )
    except (RunError, cli.FlagsError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.status if isinstance(error, RunError) else ExitStatus.BAD_CONFIG
    print("\n".join([*summary(hardware), f"written to {flags.out}: use --hardware={flags.out}"]))
    return ExitStatus.FINISHED


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
