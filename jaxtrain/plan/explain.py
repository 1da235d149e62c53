"""A plan in words and columns: memory and time by part, rates, a run's time and cost, what-ifs. No
jax."""

import dataclasses
from collections.abc import Sequence
from decimal import Decimal

from jaxtrain import config as cfg
from jaxtrain.config import Config
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.costs.step_time import BUBBLE, COMMUNICATION_AXES
from jaxtrain.plan import layout_flag
from jaxtrain.plan.predict import Prediction
from jaxtrain.plan.search import Plan
from jaxtrain.plan.what_if import single_changes

HOUR = 3600
LARGE = 10**15  # from which on a number is written as a power of ten
LEAST_GAIN = 0.005  # fraction of a step, from which on a gain has a line


@dataclasses.dataclass(frozen=True)
class Prices:
    """US dollars for a device-hour and for a kilowatt-hour; 0 if unknown."""

    device_hour: float = 0.0
    kwh: float = 0.0


def table(plans: Sequence[Plan]) -> list[str]:
    """Plans as lines of a table, without the keys that have their default in all of them."""
    layouts = [layout_flag.of(plan.prediction.config) for plan in plans]
    unused = {"offload": "none", "vocabulary": "auto"} | dict.fromkeys(
        ("context", "expert", "replica"), 1
    )
    keys = [
        key for key in layout_flag.KEYS if any(layout[key] != unused.get(key) for layout in layouts)
    ]
    rows = [[*keys, "GiB", "bubble", "MFU", "step"]]
    for plan, layout in zip(plans, layouts, strict=True):
        prediction = plan.prediction
        mfu = prediction.model_flops_per_s / prediction.work.hardware.peak(prediction.work.dtype)
        figures = [
            f"{prediction.memory.bytes / GIB:.1f}",
            f"{prediction.bubble_fraction:.1%}",
            f"{mfu:.1%}",
            _seconds(prediction.seconds),
        ]
        rows.append([*(str(layout[key]) for key in keys), *figures])
    return aligned(rows)


def aligned(cells: Sequence[Sequence[str]], words: int = 0) -> list[str]:
    """Lines of cells in columns: the first `words` columns to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<"] * words + [">"] * (len(widths) - words)
    return [
        "  ".join(
            f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)
        )
        for line in cells
    ]


def flags_of(config: Config, recipe: Config) -> str:
    """The flags of `train` that make this config from its recipe."""
    changes = {
        path: value
        for path in cfg.fields()
        if (value := cfg.get(config, path)) != cfg.get(recipe, path)
    }
    return " ".join(cfg.flag_text(f"config.{path}", value) for path, value in changes.items())


def explained(plan: Plan, prices: Prices) -> list[str]:
    """A plan as lines of text."""
    prediction = plan.prediction
    work, layout = prediction.work, prediction.work.layout
    chunks = f" in {layout.repeats} chunks" if layout.repeats > 1 and layout.stage > 1 else ""
    layers = f"{work.model.layers / layout.stage:.4g} layers a stage{chunks}"
    what = (
        f"{layout.microbatches} microbatches of {layout.microbatch} "
        f"sequence{'s'[: layout.microbatch > 1]} on each of "
    )
    return [
        f"layout: {layout_flag.text_of(layout_flag.of(prediction.config))}",
        f"  {layout.devices:,} × {work.hardware.name}, {layers}; {what}{layout.batch_shards} "
        "batch shards",
        f"  as the framework {work.framework.name}: {work.framework.text}",
        *[
            f"  assumed: the busiest device of expert has {work.framework.imbalance:g} times "
            "as many rows as the mean"
        ]
        * (layout.expert > 1),
        *_memory(prediction),
        *_time(prediction),
        *_run(prediction, prices),
        *_next(prediction),
    ]


def _memory(prediction: Prediction) -> list[str]:
    capacity, total = prediction.work.hardware.memory, prediction.memory.bytes
    verdict = "fits" if prediction.fits else "DOES NOT FIT"
    lines = [
        f"memory of the fullest device: {total / GIB:.1f} GiB of {capacity / GIB:.1f}, {verdict}"
    ]
    pools = ", ".join(
        f"{pool} {size / GIB:.2f}" for pool, size in prediction.memory.pools.items() if size
    )
    for name, size in prediction.memory.parts.items():
        lines += [f"  {name:14} {size / GIB:8.2f} GiB  {size / total:6.1%}"] * bool(size)
        lines += [f"    in slots, GiB: {pools}"] * bool(pools and name == "activations")
    gaps = total - sum(prediction.memory.parts.values())
    lines += [f"  {'between arrays':14} {gaps / GIB:8.2f} GiB  {gaps / total:6.1%}"] * (gaps > 0)
    if prediction.in_flight is not None:
        lines.append(
            f"  at most {prediction.in_flight:.4g} microbatches of a whole stage between "
            "forward and backward, by the table"
        )
    return lines


def _time(prediction: Prediction) -> list[str]:
    time, work = prediction.time, prediction.work
    lines = [f"time: {_seconds(time.seconds)} a step"]
    if prediction.in_flight is not None:
        lines[0] += (
            f", by the exact clock of its table; {_seconds(work.step().seconds)} by closed forms"
        )
    seconds = {
        name: (time.exposed.get(name, 0.0), time.hidden.get(name, 0.0))
        for name in (*time.exposed, *time.hidden)
    }
    for name, (exposed, hidden) in seconds.items():
        if not exposed and not hidden:
            continue
        where = ""
        if name in COMMUNICATION_AXES:
            where = (
                f"  {getattr(work.layout, name)} devices over {work.links.route((name,)).tier.name}"
            )
        behind = f", {_seconds(hidden)} hidden behind other work" if hidden else ""
        lines.append(
            f"  {name:14} {_seconds(exposed):>10}  {exposed / time.seconds:6.1%}{where}{behind}"
        )
    peak = work.hardware.peak(work.dtype)
    mfu, hfu = prediction.model_flops_per_s, prediction.hardware_flops_per_s
    rates = (
        f"{mfu / 1e12:.1f} TFLOP/s a device, MFU {mfu / peak:.1%}; {hfu / 1e12:.1f} with "
        f"recomputation, HFU {hfu / peak:.1%}"
    )
    counted = (
        "attention counted as masked"
        if work.framework.causal_rates
        else f"attention counted in full, as {work.framework.name} does"
    )
    return [
        *lines,
        f"rate: {rates} ({counted}); {amount(Decimal(prediction.tokens_per_s))} tokens/s",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _run(prediction: Prediction, prices: Prices) -> list[str]:
    """Time, energy and cost of the run, or of a billion tokens if its length is unknown."""
    tokens = prediction.tokens or 1e9
    seconds = Decimal(tokens) / Decimal(prediction.tokens_per_s)
    hours = prediction.devices * seconds / HOUR
    # in kWh; 0 where no power is known
    energy = hours * Decimal(prediction.work.hardware.watts) / 1000
    used = (
        f"{amount(energy / 1000, 2)} MWh of the devices alone"
        if energy
        else "energy not known (the file of the device has no watts)"
    )
    line = f"{run_time(tokens, prediction.tokens_per_s)}, {amount(hours)} device-hours, {used}"
    if prices.device_hour:
        line += (
            f", ${amount(hours * Decimal(prices.device_hour))} at ${prices.device_hour:g} a "
            "device-hour"
        )
    if prices.kwh and energy:
        line += f", ${amount(energy * Decimal(prices.kwh))} of energy at ${prices.kwh:g} a kWh"
    return [line]


def run_time(tokens: float, tokens_per_s: float) -> str:
    """The time that a run of so many tokens takes, as a line of text."""
    hours = Decimal(tokens) / Decimal(tokens_per_s) / HOUR
    text = f"{amount(hours / 24, 1)} days" if hours >= 24 else f"{amount(hours, 2)} hours"
    return f"run: {tokens / 1e9:,.4g} billion tokens take {text}"


def amount(number: Decimal, digits: int = 0) -> str:
    """A number ≥ 0 with `digits` decimals; a power of ten if it is too large or would round to
    0."""
    power = number >= LARGE or 0 < number < Decimal(5).scaleb(-digits - 1)
    return f"{number:.3g}" if power else f"{number:,.{digits}f}"


# --- what would change the answer -----------------------------------------------------------------


def _next(prediction: Prediction) -> list[str]:
    """The next bottlenecks: the hardware figures whose doubling gains most, and faster layouts."""
    now, capacity, exposed = (
        prediction.seconds,
        prediction.work.hardware.memory,
        prediction.time.exposed,
    )
    gain = lambda text, seconds: f"  {text}: {_seconds(seconds)} ({seconds / now - 1:+.1%})"
    most = now * (1 - LEAST_GAIN)
    hardware = sorted(
        (change for change in _on_other_hardware(prediction) if change[1] < most),
        key=lambda change: change[1],
    )
    faster = [change for change in single_changes(prediction) if change.seconds < most]
    lines = ["what would change the answer:"]
    waits = max(
        (name for name in exposed if name in (*COMMUNICATION_AXES, BUBBLE)),
        key=exposed.__getitem__,
        default="",
    )
    if waits and exposed[waits] > LEAST_GAIN * now:
        lines.append(f"  {waits} is the longest wait, {exposed[waits] / now:.1%} of the step")
    lines += [gain(*change) for change in hardware[:2]]
    lines += [f"{gain(c.text, c.seconds)}, and fits" for c in faster if c.bytes <= capacity][:2]
    needs = f", but needs {{:.1f}} GiB of {capacity / GIB:.1f}"
    lines += [
        gain(c.text, c.seconds) + needs.format(c.bytes / GIB) for c in faster if c.bytes > capacity
    ][:2]
    return lines if len(lines) > 1 else []


def _on_other_hardware(prediction: Prediction) -> list[tuple[str, float]]:
    """The figures of the hardware that could double, and the seconds of the step if each does."""
    hardware = prediction.work.hardware
    doubled: dict[str, Hardware] = {
        "twice the peak": dataclasses.replace(
            hardware, peak_tflops={k: 2 * v for k, v in hardware.peak_tflops.items()}
        ),
        "twice the memory's bandwidth": dataclasses.replace(
            hardware, memory_gb_per_s=2 * hardware.memory_gb_per_s
        ),
    }
    for at, tier in enumerate(hardware.tiers):
        tiers = (
            *hardware.tiers[:at],
            dataclasses.replace(tier, gb_per_s=2 * tier.gb_per_s),
            *hardware.tiers[at + 1 :],
        )
        doubled[f"twice the bandwidth of {tier.name}"] = dataclasses.replace(hardware, tiers=tiers)
    # closed forms, which a table would change as it does this step
    exact = prediction.seconds / prediction.work.step().seconds
    return [
        (text, exact * dataclasses.replace(prediction.work, hardware=other).step().seconds)
        for text, other in doubled.items()
    ]
