"""A plan as lines of text and tables: memory and time by part, rates, a run's time and cost, single
changes that make it faster. No jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.planner.layer.hardware import GIB, Hardware
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.predict import DAY, Prediction, exactly, predict
from jaxtrain.planner.search.what_if import single_changes
from jaxtrain.planner.step.memory import best_interval, memory
from jaxtrain.planner.step.step_time import StepModel
from jaxtrain.planner.step.time_breakdown import BUBBLE, COMMUNICATION_AXES, MATMULS, MEMORY

HOUR, YEAR = 3600, 365.25 * DAY
# numbers below and from which on a power of ten is written
SMALL, LARGE = Decimal("0.001"), 10**15
# what a number is → its units, the largest first: a unit has numbers from one of it on, and the
# last one all others
UNITS: Mapping[str, Sequence[tuple[float, str]]] = {
    "": [(1, "")],
    "count": [(1e12, " trillion"), (1e9, " billion"), (1e6, " million"), (1, "")],
    "step": [(1, " s"), (0.001, " ms")],
    "run": [(YEAR, " years"), (DAY, " days"), (HOUR, " hours"), (60, " minutes"), (1, " s")],
    "energy": [(1000, " MWh"), (1, " kWh")],
}
# parts of a step in words, where a layout has more of one than another
WORDS = {
    BUBBLE: "pipeline bubble",
    MATMULS: "products",
    MEMORY: "passes over memory",
    **{axis: f"waits for {axis}" for axis in COMMUNICATION_AXES},
}
BESIDE, WIDE = "beside the fastest", 56  # a table's last column, which is text, and its letters
LEAST_GAIN = 0.005  # the least gain that has a line, as a fraction of a step


def table(predictions: Sequence[Prediction]) -> list[list[str]]:
    """Plans as lines of cells, the first with the columns' names, without the keys that have their
    default in all plans. The last column says why a plan is slower than the first."""
    listed, several = [p.figures() for p in predictions], len(predictions) > 1
    keys = [
        key
        for key in layout_flag.KEYS
        if any(figures["layout"][key] != layout_flag.USUAL.get(key) for figures in listed)
    ]
    return [
        [
            "",
            *keys,
            "GiB",
            "bubble",
            "MFU",
            *["days"] * bool(predictions[0].tokens),
            "seconds",
            *[f"{BESIDE:{WIDE}}"] * several,
        ],
        *(
            [
                str(number),
                *(cfg.value_text(figures["layout"][key]) for key in keys),
                f"{p.memory.bytes / GIB:.1f}",
                f"{p.bubble_fraction:.1%}",
                f"{figures['mfu']:.1%}",
                *[amount(figures["train_days"] or 0.0)] * bool(p.tokens),
                amount(p.seconds),
                *[(_slower(p, predictions[0]) if number > 1 else "the fastest").ljust(WIDE)]
                * several,
            ]
            for number, (p, figures) in enumerate(zip(predictions, listed, strict=True), 1)
        ),
    ]


def _slower(prediction: Prediction, fastest: Prediction) -> str:
    """Why a plan is slower than the fastest, and how much more memory it needs, in words."""
    now, then = prediction.time.exposed, fastest.time.exposed
    longer = {name: (now[name] - then.get(name, 0.0)) / fastest.seconds for name in now}
    most = sorted(longer, key=longer.__getitem__, reverse=True)[:2]
    extra = (prediction.memory.bytes - fastest.memory.bytes) / GIB
    return ", ".join(
        [
            *(f"{WORDS.get(n, n)} {longer[n]:+.1%}" for n in most if longer[n] >= LEAST_GAIN),
            f"memory {abs(extra):.3g} GiB {'more' if extra > 0 else 'less'}",
        ]
    )


def explained(prediction: Prediction, price: float = 0, kwh_price: float = 0) -> list[str]:
    """A plan as lines of text. price, kwh_price: US dollars for a device-hour and for a
    kilowatt-hour; 0 if unknown."""
    work, layout = prediction.work, prediction.work.layout
    chunks = f" in {layout.repeats} chunks" if layout.repeats > 1 and layout.stage > 1 else ""
    layers = f"{work.model.layers / layout.stage:.4g} layers a stage{chunks}"
    sequences = f"{layout.microbatch} sequence{'s'[: layout.microbatch > 1]}"
    batch = f"{layout.microbatches} microbatches of {sequences} on each of {layout.batch_shards}"
    return [
        f"layout: {layout_flag.text_of(layout_flag.of(prediction.config))}",
        f"  {layout.devices:,} × {work.hardware.name}, {layers}; {batch} batch shards",
        f"  as the framework {work.settings.name}: {work.settings.text}",
        *_kinds(work),
        *[
            f"  assumed: the experts of the busiest device receive {work.busiest:g} times the mean "
            "number of tokens"
        ]
        * (layout.expert > 1 and not work.model.capacity_factor),
        *_memory(prediction),
        *_time(prediction),
        *_overlap(prediction),
        *_recomputation(prediction),
        *run_lines(
            [(layout.devices, work.hardware)],
            prediction.tokens or 1e9,
            prediction.tokens_per_s,
            prediction.expected.error,
            price,
            kwh_price,
        ),
        *prediction.expected.lines(),
        *_next(prediction),
    ]


def _kinds(work: StepModel) -> list[str]:
    """A line with the layers of each kind, and what one of them takes of a microbatch."""
    seconds = {name: work.of_kind(name).layers.total.seconds for name in work.model.counts[0]}
    kinds = (
        f"{work.model.counts[0][name]} {name} of {amount(each, 'step')}"
        for name, each in seconds.items()
    )
    return [f"  layers by kind, each with a microbatch: {', '.join(kinds)}"] * (len(seconds) > 1)


def _memory(prediction: Prediction) -> list[str]:
    capacity, total = prediction.work.hardware.memory, prediction.memory.bytes
    verdict = "fits" if prediction.fits else "DOES NOT FIT"
    lines = [
        f"memory of the fullest device: {total / GIB:.1f} GiB of {capacity / GIB:.1f}, {verdict}"
    ]
    pools = [f"{pool} {n / GIB:.2f}" for pool, n in prediction.memory.pools.items() if n]
    gaps = total - sum(prediction.memory.parts.values())
    for name, size in {**prediction.memory.parts, "between arrays": gaps}.items():
        if size > 0:
            lines.append(f"  {name:14} {size / GIB:8.2f} GiB  {size / total:6.1%}")
        if name == "activations" and pools:
            lines.append(f"    in slots, GiB: {', '.join(pools)}")
    if prediction.in_flight is not None:
        lines.append(
            f"  at most {prediction.in_flight:.4g} microbatches of an entire stage between "
            "forward and backward, by the table"
        )
    return lines


def _time(prediction: Prediction) -> list[str]:
    time, work, figures = prediction.time, prediction.work, prediction.figures()
    step = f"time: {amount(time.seconds, 'step', prediction.expected.error)} a step"
    if prediction.in_flight is not None:
        closed = amount(work.step().seconds, "step")
        step += f", by the exact clock of its table; {closed} by closed forms"
    lines = [step]
    for name in dict.fromkeys([*time.exposed, *time.hidden]):
        exposed, hidden = time.exposed.get(name, 0.0), time.hidden.get(name, 0.0)
        line = f"  {name:14} {amount(exposed, 'step'):>10}  {exposed / time.seconds:6.1%}"
        if name in COMMUNICATION_AXES:
            tier = work.links.route((name,)).tier
            line += f"  {getattr(work.layout, name)} devices over {tier.name}"
        if hidden:
            line += f", {amount(hidden, 'step')} hidden behind other work"
        if exposed or hidden:
            lines.append(line)
    counted = f"in full, as {work.settings.name} does"
    if work.settings.causal_rates:
        counted = "as masked"
    model, hardware = (figures[f"{kind}_tflops_per_device"] for kind in ("model", "hardware"))
    return [
        *lines,
        f"rate: {model:.1f} TFLOP/s a device, MFU {figures['mfu']:.1%}; {hardware:.1f} with "
        f"recomputation, HFU {figures['hfu']:.1%} (attention counted {counted}); "
        f"{amount(prediction.tokens_per_s, '', prediction.expected.error)} tokens/s",
    ]


def _overlap(prediction: Prediction) -> list[str]:
    """What overlapped cells are expected to gain, beside the step without them."""
    work, layout = prediction.work, prediction.work.layout
    if not layout.overlap:
        return []
    saved, covered = work.saved_by_overlap(), work.settings.rates.cell_overlap
    if not saved:
        why = "no tokens go to experts of other devices"
        if layout.expert > 1:
            why = f"plans count none for {work.hardware.name}"
        return [f"overlapped cells: no gain is expected, for {why}"]
    both = sum(work.ops()[op].seconds for op in "FB")
    config = cfg.replace(prediction.config, {"pipeline.overlap": False}).resolve()
    without = exactly(predict(config, work.hardware, work.settings.name)).seconds
    return [
        f"overlapped cells: F and B of two microbatches are expected to take "
        f"{amount(both - saved, 'step')} a stage at the same time and {amount(both, 'step')} one "
        f"after the other, the step {amount(prediction.seconds, 'step')} and "
        f"{amount(without, 'step')} ({prediction.seconds / without - 1:+.1%})",
        f"  expected, not measured: {covered:.0%} of the experts' messages have products beside "
        "them as compiled, and are taken to slow no product down; F and B by themselves are taken "
        "to hide none",
    ]


def _recomputation(prediction: Prediction) -> list[str]:
    """Bytes that recomputation saves and seconds that it costs, beside those of all layers, by
    closed forms; and the size of a unit that takes least memory."""
    work, layout = prediction.work, prediction.work.layout
    mode, most = layout.recomputation.mode, max(layout.units(work.model.layers))
    layers = layout.recomputation.recomputed(most)
    if not layers:
        return []
    closed, loss_chunk = work.step().seconds, prediction.config.model.loss_chunk
    size = lambda step: memory(step, loss_chunk).bytes
    none, every = (
        dataclasses.replace(work, layout=layout.with_remat(remat)) for remat in ("none", mode)
    )

    def gained(step: StepModel) -> str:
        saved = (size(none) - size(step)) / GIB
        costs = (step.step().seconds - none.step().seconds) * prediction.seconds / closed
        seconds = amount(costs, "step") if costs > 0 else "nothing that closed forms know of"
        return f"saves {saved:.2f} GiB and costs {seconds}"

    of_all = f"; {mode} of all layers {gained(every)}" if layers < most else ""
    lines = [
        f"recomputation: remat={layout.remat} recomputes {layers} of a unit's {most} layers, which "
        f"{gained(work)}{of_all}"
    ]
    interval = best_interval(work)
    if mode == "full" and interval is not None and work.settings.ours:
        lines.append(
            f"  by formula, units of {interval:.2g} layers (pipeline.layers_per_op) take least "
            "memory with full"
        )
    return lines


def run_lines(
    groups: Sequence[tuple[int, Hardware]],
    tokens: float,
    tokens_per_s: float,
    error: float,
    price: float = 0,
    kwh_price: float = 0,
) -> list[str]:
    """Time, energy and cost of a run of so many tokens on groups of devices as lines of text."""
    seconds = Decimal(tokens) / Decimal(tokens_per_s)
    hours = sum(devices for devices, _ in groups) * seconds / HOUR
    known = all(kind.watts for _, kind in groups)
    energy = seconds / HOUR / 1000 * sum(n * Decimal(kind.watts) for n, kind in groups)  # in kWh
    dollars = lambda cost, each: f"US${amount(cost, '', error)} at US${each:g} a"
    return [
        f"run: {amount(tokens, 'count')} tokens take {amount(seconds, 'run', error)}",
        f"device-hours: {amount(hours, '', error)}",
        f"energy: {amount(energy, 'energy', error)} of the devices alone"
        if known
        else "energy: not known (the file of the device has no watts)",
        *[f"cost: {dollars(hours * Decimal(price), price)} device-hour"] * (price > 0),
        *[f"cost of energy: {dollars(energy * Decimal(kwh_price), kwh_price)} kWh"]
        * (kwh_price > 0 and known),
    ]


def amount(number: Decimal | float, what: str = "", error: float = 0.0) -> str:
    """A number ≥ 0 with three significant digits and its unit, and its range if it has an error.

    what: a key of UNITS
    """
    units = UNITS[what]
    size, unit = next((each for each in units if number >= each[0]), units[-1])
    factors = (Decimal(by) / Decimal(size) for by in (1, 1 / (1 + error), 1 + error))
    rounded = (Decimal(f"{Decimal(number) * factor:.3g}") for factor in factors)
    middle, low, high = (f"{n:,f}" if not n or SMALL <= n < LARGE else f"{n:.3g}" for n in rounded)
    return f"{middle}{unit}" + f" ({low} to {high})" * (error > 0)


# --- what would change the answer -----------------------------------------------------------------


def _next(prediction: Prediction) -> list[str]:
    """The next bottlenecks: the hardware figures whose doubling gains most, and faster layouts."""
    now, capacity = prediction.seconds, prediction.work.hardware.memory
    gain = lambda text, seconds: f"  {text}: {amount(seconds, 'step')} ({seconds / now - 1:+.1%})"
    most = now * (1 - LEAST_GAIN)
    on_hardware = sorted(_on_other_hardware(prediction).items(), key=lambda change: change[1])
    faster = [change for change in single_changes(prediction) if change.seconds < most]
    waits = {
        name: seconds
        for name, seconds in prediction.time.exposed.items()
        if name in (*COMMUNICATION_AXES, BUBBLE)
    }
    lines = []
    longest = max(waits, key=waits.__getitem__, default="")
    if longest and waits[longest] > LEAST_GAIN * now:
        lines.append(f"  {longest} is the longest wait, {waits[longest] / now:.1%} of the step")
    lines += [gain(text, seconds) for text, seconds in on_hardware if seconds < most][:2]
    lines += [f"{gain(c.text, c.seconds)}, and fits" for c in faster if c.bytes <= capacity][:2]
    lines += [
        f"{gain(c.text, c.seconds)}, but needs {c.bytes / GIB:.1f} GiB of {capacity / GIB:.1f}"
        for c in faster
        if c.bytes > capacity
    ][:2]
    return ["what would change the answer:", *lines] if lines else []


def _on_other_hardware(prediction: Prediction) -> dict[str, float]:
    """Seconds of the step with each figure of the hardware doubled, by that change in words."""
    hardware = prediction.work.hardware
    peaks = {dtype: 2 * peak for dtype, peak in hardware.peak_tflops.items()}
    times = lambda factor, tier: dataclasses.replace(tier, gb_per_s=factor * tier.gb_per_s)
    doubled: dict[str, dict[str, Any]] = {
        "twice the peak": {"peak_tflops": peaks},
        "twice the memory's bandwidth": {"memory_gb_per_s": 2 * hardware.memory_gb_per_s},
        **{
            f"twice the bandwidth of {tier.name}": {
                "tiers": tuple(times(1 + (other is tier), other) for other in hardware.tiers)
            }
            for tier in hardware.tiers
        },
    }
    # closed forms, scaled as the table scales this step
    exact = prediction.seconds / prediction.work.step().seconds
    on = lambda figures: dataclasses.replace(
        prediction.work, hardware=dataclasses.replace(hardware, **figures)
    )
    return {text: exact * on(figures).step().seconds for text, figures in doubled.items()}
