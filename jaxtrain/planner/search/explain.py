"""A plan as lines of text and tables: memory and time by part, rates, a run's time and cost, single
changes that make it faster. No jax."""

import dataclasses
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.planner.layer.hardware import GIB
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.predict import Prediction, exactly, how_sure, predict
from jaxtrain.planner.search.what_if import single_changes
from jaxtrain.planner.step.memory import best_interval, memory
from jaxtrain.planner.step.step_time import StepModel
from jaxtrain.planner.step.time_breakdown import BUBBLE, COMMUNICATION_AXES

HOUR = 3600
LARGE = 10**15  # the least number that is written as a power of ten
LEAST_GAIN = 0.005  # the least gain that has a line, as a fraction of a step


def table(predictions: Sequence[Prediction]) -> list[str]:
    """Plans as lines of a table, without the keys that have their default in all of them."""
    layouts = [layout_flag.of(prediction.config) for prediction in predictions]
    unused = {
        "offload": "none",
        "vocabulary": "auto",
        "overlap": False,
        "context": 1,
        "expert": 1,
        "replica": 1,
    }
    keys = [
        key for key in layout_flag.KEYS if any(layout[key] != unused.get(key) for layout in layouts)
    ]
    lines = [[*keys, "GiB", "bubble", "MFU", "step"]]
    for prediction, layout in zip(predictions, layouts, strict=True):
        figures = prediction.figures()
        lines.append(
            [
                *(cfg.value_text(layout[key]) for key in keys),
                f"{figures['memory_gib_per_device']:.1f}",
                f"{figures['bubble_fraction']:.1%}",
                f"{figures['mfu']:.1%}",
                _seconds(prediction.seconds),
            ]
        )
    return aligned(lines)


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


def explained(prediction: Prediction, price: float = 0, kwh_price: float = 0) -> list[str]:
    """A plan as lines of text. price, kwh_price: US dollars for a device-hour and for a
    kilowatt-hour; 0 if unknown."""
    work, layout = prediction.work, prediction.work.layout
    chunks = f" in {layout.repeats} chunks" if layout.repeats > 1 and layout.stage > 1 else ""
    layers = f"{work.model.layers / layout.stage:.4g} layers a stage{chunks}"
    sequences = f"{layout.microbatch} sequence{'s'[: layout.microbatch > 1]}"
    batch = f"{layout.microbatches} microbatches of {sequences} on each of {layout.batch_shards}"
    busiest = (
        f"  assumed: the experts of the busiest device receive {work.busiest:g} times the mean "
        "number of tokens"
    )
    return [
        f"layout: {layout_flag.text_of(layout_flag.of(prediction.config))}",
        f"  {layout.devices:,} × {work.hardware.name}, {layers}; {batch} batch shards",
        f"  as the framework {work.settings.name}: {work.settings.text}",
        *[busiest] * (layout.expert > 1 and not work.model.capacity_factor),
        *_memory(prediction),
        *_time(prediction),
        *_overlap(prediction),
        *_recomputation(prediction),
        _run(prediction, price, kwh_price),
        *how_sure(work.hardware),
        *_next(prediction),
    ]


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
    step = f"time: {_seconds(time.seconds)} a step"
    if prediction.in_flight is not None:
        step += (
            f", by the exact clock of its table; {_seconds(work.step().seconds)} by closed forms"
        )
    lines = [step]
    for name in dict.fromkeys([*time.exposed, *time.hidden]):
        exposed, hidden = time.exposed.get(name, 0.0), time.hidden.get(name, 0.0)
        line = f"  {name:14} {_seconds(exposed):>10}  {exposed / time.seconds:6.1%}"
        if name in COMMUNICATION_AXES:
            tier = work.links.route((name,)).tier
            line += f"  {getattr(work.layout, name)} devices over {tier.name}"
        if hidden:
            line += f", {_seconds(hidden)} hidden behind other work"
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
        f"{amount(Decimal(prediction.tokens_per_s))} tokens/s",
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
    config = cfg.replace(prediction.config, {"pipeline.overlap": False})
    without = exactly(predict(config, work.hardware, work.settings.name)).seconds
    return [
        f"overlapped cells: F and B of two microbatches are expected to take "
        f"{_seconds(both - saved)} a stage at the same time and {_seconds(both)} one after the "
        f"other, the step {_seconds(prediction.seconds)} and {_seconds(without)} "
        f"({prediction.seconds / without - 1:+.1%})",
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
        seconds = _seconds(costs) if costs > 0 else "nothing that closed forms know of"
        return f"saves {saved:.2f} GiB and costs {seconds}"

    of_all = f"; {mode} of all layers {gained(every)}" if layers < most else ""
    lines = [
        f"remat={layout.remat} recomputes {layers} of a unit's {most} layers, which "
        f"{gained(work)}{of_all}"
    ]
    interval = best_interval(work)
    if mode == "full" and interval is not None and work.settings.ours:
        lines.append(
            f"  by formula, units of {interval:.2g} layers (pipeline.layers_per_op) take least "
            "memory with full"
        )
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _run(prediction: Prediction, price: float, kwh_price: float) -> str:
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
    if price:
        line += f", ${amount(hours * Decimal(price))} at ${price:g} a device-hour"
    if kwh_price and energy:
        line += f", ${amount(energy * Decimal(kwh_price))} of energy at ${kwh_price:g} a kWh"
    return line


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
    now, capacity = prediction.seconds, prediction.work.hardware.memory
    gain = lambda text, seconds: f"  {text}: {_seconds(seconds)} ({seconds / now - 1:+.1%})"
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
