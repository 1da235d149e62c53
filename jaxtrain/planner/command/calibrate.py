"""Calibration: measurements of this machine's devices, which become a hardware file.

    products     a sweep over m, n and k, in bfloat16 and float32
    attention    the kernel that the trainer would use, forward and backward
    memory       passes over arrays of several sizes, and operations so small that only their launch
                 counts
    collectives  several sizes over groups of these devices

Every measurement is one SPMD program on all devices at once, like a training step (bench.py). So
the figures are those of a device while all others work, which matters if they share something. A
simulated CPU device that works while the others wait is `alone` times as fast.

Times of products and collectives are sums of known terms (planner/step: Matmul.reached, Links)
with factors that are not negative. The factors minimize the squares of
the relative errors, since times differ by four orders of magnitude.

    python -m jaxtrain.plan --calibrate --out=FILE [--cpu_devices=8]
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
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np
from scipy.optimize import nnls

from jaxtrain import cli
from jaxtrain.config import UsageError, shown
from jaxtrain.config.flags import MOST_CPU_DEVICES, Flag
from jaxtrain.config.sizes import GPU_MEMORY
from jaxtrain.devices.startup import start_jax, unused_accelerator
from jaxtrain.planner.command.bench import Bench, TimedCollectives, groups_of, without
from jaxtrain.planner.layer import hardware as kinds
from jaxtrain.planner.layer.hardware import FIGURES, GIB, Hardware, Matmul, Tier
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.links import DATA, Links
from jaxtrain.planner.layer.settings import ATTENTION_BACKWARD
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.progress import SearchProgress

BFLOAT16, FLOAT32 = "bfloat16", "float32"
# called with the name of the next measurement and the fraction of them that is done
MeasureProgress = Callable[[str, float], None]
Case = TypeVar("Case", bound=tuple)


NO_DATA_SHEET = Hardware(
    name="",
    peak_tflops=dict.fromkeys((BFLOAT16, FLOAT32), 0.0),
    memory_gib=0.0,
    memory_usable=1.0,
    memory_gb_per_s=0.0,
    memory_reached=1.0,
    matmul=Matmul(1.0, (0.0, 0.0, 0.0)),
    attention=(1.0, 1.0),
    launch_us=0.0,
    tiers=(),
    watts=0.0,
    sources=(),
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that are measured on a platform, each that of one device.

    dtype:       the type of the swept products; of the other type only the peak is measured
    products:    (m, n, k), the largest last
    attention:   (sequences, tokens, heads, size of a head)
    passes:      bytes of an array that is read and written
    collectives: bytes of an unsharded array
    seconds:     the least seconds of a timing
    """

    dtype: str
    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    passes: tuple[int, ...]
    collectives: tuple[int, ...]
    seconds: float = 0.02


def _sweep(*sizes: int) -> tuple[tuple[int, int, int], ...]:
    """Products of all combinations of sizes, the largest last."""
    products = [(m, n, k) for m in sizes for n in sizes for k in sizes]
    return tuple(sorted(products, key=lambda size: (math.prod(size), size)))


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


def flops(m: int, n: int, k: int) -> float:
    """FLOPs of the product [m, k] · [k, n]."""
    return 2.0 * m * n * k


# --- fits ---------------------------------------------------------------------------------------


def fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """The factors ≥ 0 with which sums of terms come closest to measured seconds.

    terms: [measurements, factors]. The second result is the median relative error.
    """
    parts = np.asarray(terms, float) / np.asarray(seconds, float)[:, None]
    scales = np.abs(parts).max(0)
    scales[scales == 0] = 1.0
    factors = nnls(parts / scales, np.ones(len(parts)))[0] / scales
    return factors.tolist(), float(np.median(np.abs(parts @ factors - 1)))


def fit_products(
    products: Sequence[tuple[int, int, int]], seconds: Sequence[float]
) -> tuple[float, Matmul, float]:
    """FLOP/s of an infinite product, what smaller ones reach of it, and the median relative error.

    products: (m, n, k); seconds: their times without a launch
    """
    terms = [[flops(*size), *(flops(*size) / length for length in size)] for size in products]
    (per_flop, *per_size), error = fit(terms, seconds)
    # 0 if the sizes explain all of the seconds
    per_flop = per_flop or min(s / flops(*p) for s, p in zip(seconds, products, strict=True))
    m, n, k = (factor / per_flop for factor in per_size)
    return 1 / per_flop, Matmul(1.0, (m, n, k)), error


def fit_links(
    measured: Sequence[TimedCollectives], hardware: Hardware, name: str, devices: int
) -> tuple[Tier, float]:
    """The tier that joins the devices of these collectives, and the median relative error."""
    units = [
        dataclasses.replace(hardware, tiers=(Tier(name, 0, *unit),))
        for unit in ((1.0, 1.0, 0.0), (math.inf, 1.0, 1.0))
    ]
    terms = [
        [Links(Layout(data=timed.devices), unit).seconds(timed.collectives)[DATA] for unit in units]
        for timed in measured
    ]
    (per_byte, latency), error = fit(terms, [timed.seconds for timed in measured])
    fastest = FIGURES["gb_per_s"][1]  # where no byte took time
    speed = min(fastest, 1 / per_byte) if per_byte else fastest
    return Tier(name, devices, speed, 1.0, latency), error


# --- the file -----------------------------------------------------------------------------------


def calibrate(
    sizes: Sizes | None = None, report: MeasureProgress = lambda what, done: None
) -> Hardware:
    """The figures of this process's devices, measured in under a minute.

    Raises cli.FlagsError for devices that cannot be measured.
    """
    devices = jax.devices()
    known = kinds.of_device(devices[0].device_kind)
    if jax.process_count() > 1:
        raise cli.FlagsError(
            "--calibrate measures one process's devices: start it on one machine, without "
            "--processes"
        )
    if len(devices) == 1 and known is None:
        kind = devices[0].device_kind
        raise cli.FlagsError(
            f"--calibrate needs two devices to measure links, and {kind!r} is one of no known "
            "kind: use --cpu_devices=8"
        )
    sizes = sizes or (CPU if devices[0].platform == "cpu" else ACCELERATOR)
    bench = Bench(devices, sizes.seconds)
    launch = bench.launch()
    swept = _announced(sizes.products, "products, [{0}, {2}] · [{2}, {1}]", 0.05, 0.5, report)
    seconds = [without(bench.product(*product, sizes.dtype), launch) for product in swept]
    peak, matmul, error = fit_products(sizes.products, seconds)
    fits = [f"{len(seconds)} products {error:.0%}"]
    other = BFLOAT16 if sizes.dtype == FLOAT32 else FLOAT32
    report(f"products in {other}", 0.55)
    largest = sizes.products[-1]
    rate = flops(*largest) / without(bench.product(*largest, other), launch)
    peaks = {sizes.dtype: peak, other: rate / matmul.reached(*largest)}
    announced = _announced(
        sizes.attention, "attention, {2} heads of {3}, {1} tokens", 0.6, 0.1, report
    )
    forward, backward = zip(
        *(bench.attention(*case, sizes.dtype) for case in announced), strict=True
    )
    report("passes over memory", 0.7)
    passes = [bench.streaming(size) for size in sizes.passes][-2:]
    streaming = sum(moved for moved, _ in passes) / sum(seconds for _, seconds in passes)
    base = _base(bench, devices, known, peaks, streaming)
    tiers = base.tiers
    if len(devices) > 1:
        # the measured tier joins all devices, the last one of a data sheet any number
        cases = [
            (n, size, size >> 10) for n in groups_of(len(devices)) for size in sizes.collectives
        ]
        groups = _announced(cases, "collectives of {2} KiB over {0} devices", 0.75, 0.25, report)
        collectives = [timed for n, size, _ in groups for timed in bench.collectives(n, size)]
        name = tiers[0].name if tiers else "local"
        joined = len(devices) if len(tiers) > 1 else 0
        tier, error = fit_links(collectives, base, name, joined)
        fits.append(f"{len(collectives)} collectives {error:.0%}")
        tiers = (tier, *tiers[1:])
    reached = lambda rate: min(1.0, rate / base.peak(sizes.dtype))
    return dataclasses.replace(
        base,
        matmul=dataclasses.replace(matmul, peak=reached(peak)),
        attention=(
            reached(_attention_rate(sizes, forward)),
            reached(ATTENTION_BACKWARD * _attention_rate(sizes, backward)),
        ),
        launch_us=1e6 * launch,
        tiers=tiers,
        sources=_sources(devices, bench.cores, sizes, fits, known),
    )


def _announced(
    cases: Sequence[Case], text: str, begin: float, part: float, report: MeasureProgress
) -> Iterator[Case]:
    """Each case after its report: the text with the case's values, and the fraction that is done.

    begin, part: the fractions of all measurements that come before these, and that these are
    """
    for i, case in enumerate(cases):
        report(text.format(*case), begin + part * i / len(cases))
        yield case


def _attention_rate(sizes: Sizes, seconds: Sequence[float]) -> float:
    """FLOP/s of attention forward with half of the scores: the geometric mean over the sizes."""
    cases = zip(sizes.attention, seconds, strict=True)
    return statistics.geometric_mean(
        0.5 * 4.0 * sequences * heads * tokens**2 * size / s
        for (sequences, tokens, heads, size), s in cases
    )


def _base(
    bench: Bench,
    devices: Sequence[jax.Device],
    known: Hardware | None,
    peaks: dict[str, float],
    streaming: float,
) -> Hardware:
    """The data sheet with peaks and bandwidth raised to what was measured, and `memory_reached`.

    Devices without a data sheet have only these figures and the memory's size. peaks: FLOP/s by
    type; streaming: bytes a second
    """
    kind, cores = devices[0].device_kind, bench.cores
    if known is None:
        # what jax's allocator gives to programs
        limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
        if not limit and devices[0].platform == "cpu":
            pages = GPU_MEMORY * os.sysconf("SC_PHYS_PAGES")
            limit = os.sysconf("SC_PAGE_SIZE") * pages / len(devices)
        known = dataclasses.replace(NO_DATA_SHEET, memory_gib=limit / GIB)
    tflops = {
        dtype: max(peak, peaks.get(dtype, 0.0) / 1e12) for dtype, peak in known.peak_tflops.items()
    }
    gb_per_s = max(known.memory_gb_per_s, streaming / 1e9)
    return dataclasses.replace(
        known,
        name=f"{kind}, {len(devices)} simulated devices on {cores} cores" if cores else kind,
        peak_tflops=tflops,
        memory_gb_per_s=gb_per_s,
        memory_reached=min(1.0, streaming / (1e9 * gb_per_s)),
        alone=len(devices) / cores if cores else 1.0,
    )


def _sources(
    devices: Sequence[jax.Device],
    cores: int,
    sizes: Sizes,
    fits: Sequence[str],
    known: Hardware | None,
) -> tuple[str, ...]:
    """Sources of a file's figures: when, where and how they were measured, the errors of the fits,
    and what was not measured."""
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    seconds = f"CPU-seconds of the process over {cores} cores" if cores else "seconds of the wall"
    sources = [
        f"measured by --calibrate, {when}, on "
        f"{platform.node() or 'a machine without a name'}: {len(devices)} × "
        f"{devices[0].device_kind}, "
        f"jax {jax.__version__}, {seconds}; products and attention in {sizes.dtype}, all "
        "devices at once",
        f"median relative errors of the fits: {', '.join(fits)}",
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
    """The figures as lines of text."""
    peaks = ", ".join(f"{dtype} {peak:.3g}" for dtype, peak in hardware.peak_tflops.items())
    m, n, k = hardware.matmul.half
    return [
        f"{hardware.name}: TFLOP/s {peaks}",
        f"products reach {hardware.matmul.peak:.0%}, half of it at m {m:.0f}, n {n:.0f} or k "
        f"{k:.0f}",
        "attention reaches {:.0%} forward, {:.0%} backward".format(*hardware.attention),
        f"memory {hardware.streaming / 1e9:.3g} GB/s, an operation's launch "
        f"{hardware.launch_us:.1f} µs",
        *(
            f"{t.name}: {t.bytes_per_s / 1e9:.3g} GB/s, {t.latency_us:.1f} µs"
            for t in hardware.tiers
        ),
    ]


# --- the command --------------------------------------------------------------------------------

DESCRIPTION = """usage: python -m jaxtrain.plan --calibrate --out=FILE [--cpu_devices=N]

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
    """The flags. Raises UsageError, before a minute is spent, if the file cannot be written."""
    path = pathlib.Path(flags.out)
    if path.suffix != ".json":
        raise UsageError(
            f"--out={shown(flags.out)} is no JSON file",
            {"out": str(path.with_suffix(".json")) if path.name else "hardware.json"},
        )
    cli.check_output("out", flags.out, "hardware.json")
    return flags


@cli.command
def main(argv: Sequence[str]) -> int:
    """Calibrates and writes the file. Returns the exit status."""
    flags = cli.checked_flags(argv, DESCRIPTION, FLAGS, check_flags)
    flags.coordinator, flags.processes, flags.process_id = "", 1, 0
    start_jax(flags)
    if unused := unused_accelerator(flags):
        raise cli.FlagsError(unused)
    with SearchProgress("calibrating") as progress:
        hardware = calibrate(report=progress)
    text = json.dumps(dataclasses.asdict(hardware), indent=2, ensure_ascii=False) + "\n"
    cli.write_output(flags.out, text.encode())
    print("\n".join([*summary(hardware), f"written to {flags.out}: use --hardware={flags.out}"]))
    return ExitStatus.FINISHED


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
