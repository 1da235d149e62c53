"""The tables of benchmarks/gpu.py, in Markdown, from its figures. No jax."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from jaxtrain.config import Config
from jaxtrain.planner.layer import hardware

OURS, TORCH = "jaxtrain", "torch"
# The largest relative difference of two sides in the first step and in later ones, whose weights
# differ by rounding already. In bfloat16 a loss is a mean over many tokens' rounding, a norm of
# gradients is not. Models that differ (no rotation, another base, other gates) are further apart:
# tests/benchmarks/test_gpu_torch.py.
CLOSE_LOSSES = {"float32": (1e-5, 1e-4), "bfloat16": (5e-4, 2e-3)}
CLOSE_NORMS = {"float32": (1e-4, 1e-3), "bfloat16": (5e-3, 2e-2)}


def settings(config: Config) -> dict:
    """The values of a case's config that the tables show."""
    d, p = config.data, config.pipeline
    return {
        "batch_size": d.batch_size,
        "sequence_length": d.sequence_length,
        "microbatches": p.microbatches,
        "remat": p.remat,
        "documents_apart": not d.attend_across_documents,
        "compute": config.precision.compute,
    }


@dataclasses.dataclass(frozen=True)
class Side:
    """A side of a case over all its rounds.

    seconds: the median step's
    spread:  the slowest step over the fastest
    mfu:     0 to 1; None if the device's peak is unknown
    memory:  bytes; None if unknown
    """

    seconds: float
    spread: float
    tokens_per_s: float
    mfu: float | None
    memory: int | None
    start_s: float
    losses: Sequence[float]
    norms: Sequence[float]


def side(
    rounds: Sequence[Mapping], about: Mapping, flops_per_token: float | None, device: str
) -> Side:
    """Summarizes a side's rounds.

    flops_per_token: the model's, without recomputation
    device:          jax's or torch's name of it, for the peak
    """
    steps = [s for r in rounds for s in r["seconds"]]
    seconds, initial = statistics.median(steps), rounds[0]
    speed = about["batch_size"] * about["sequence_length"] / seconds
    kind = hardware.of_device(device)
    used = None
    if flops_per_token is not None and kind and about["compute"] in kind.peak_tflops:
        used = speed * flops_per_token / kind.peak(about["compute"])
    start = initial["first_s"] + initial.get("trace_s", 0.0) + initial.get("compile_s", 0.0)
    return Side(
        seconds,
        max(steps) / min(steps),
        speed,
        used,
        initial["memory"],
        start,
        initial["losses"],
        initial["norms"],
    )


def sides(report: Mapping) -> dict[str, dict[str, Side]]:
    """Case → name of the side → its summary, in the order of the cases."""
    device, by_case = (
        report["versions"].get("device") or report["versions"].get("torch device") or "",
        {},
    )
    for case, about in report["settings"].items():
        rounds = [r for r in report["rounds"] if r["case"] == case]
        flops = next((r["flops_per_token"] for r in rounds if "flops_per_token" in r), None)
        by_side = {name: [r for r in rounds if r["side"] == name] for name in (OURS, TORCH)}
        by_case[case] = {
            name: side(of_side, about, flops, device)
            for name, of_side in by_side.items()
            if of_side
        }
    return by_case


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The relative difference of two lists: of their first numbers, and the largest of the others.

    NaN if a number is NaN.
    """
    begin, *later = (abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return begin, max(later, key=lambda part: part if part == part else math.inf, default=0.0)


def are_same(ours: Side, theirs: Side, compute: str) -> bool:
    """True if losses and norms of both sides are as close as those of equal models."""
    pairs = ((ours.losses, theirs.losses, CLOSE_LOSSES), (ours.norms, theirs.norms, CLOSE_NORMS))
    return all(
        part <= most
        for a, b, close in pairs
        for part, most in zip(difference(a, b), close[compute], strict=True)
    )


# --- text -----------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def steps_table(report: Mapping) -> list[str]:
    """The table of steps: a row for each side of each case, the second with the ratio of both."""
    rows = []
    for case, both_sides in sides(report).items():
        about = report["settings"][case]
        shape = f"{about['batch_size']} × {about['sequence_length']} in {about['microbatches']}"
        settings_text = (
            f"{shape}, remat "
            f"{about['remat']}{', documents apart' if about['documents_apart'] else ''}, "
            f"{about['compute']}"
        )
        for name, s in both_sides.items():
            both = name == TORCH
            rows.append(
                [
                    *((case, settings_text) if name == next(iter(both_sides)) else ("", "")),
                    name,
                    f"{1e3 * s.seconds:,.1f}",
                    f"{s.spread:.2f}",
                    f"{s.tokens_per_s:,.0f}",
                    number(s.mfu, ".1%"),
                    number(None if s.memory is None else s.memory / 1e9, ".2f"),
                    f"{s.start_s:.0f}",
                    f"{s.seconds / both_sides[OURS].seconds:.2f}" if both else "",
                ]
            )
    head = (
        "case",
        "sequences × tokens in microbatches",
        "side",
        "step ms",
        "slowest / fastest",
        "tokens/s",
        "MFU",
        "memory GB",
    )
    return table((*head, "compile + first step s", "torch's time / ours"), rows) if rows else []


def verdict(ours: Side, theirs: Side, compute: str) -> str:
    """The result of `are_same` as text, with the differences."""
    losses, norms = difference(ours.losses, theirs.losses), difference(ours.norms, theirs.norms)
    shown = "; ".join(
        f"{what} {begin:.0e}, then {later:.0e}"
        for what, (begin, later) in (("losses", losses), ("norms", norms))
    )
    return f"{'yes' if are_same(ours, theirs, compute) else '**no**'}: {shown} apart"


def losses_table(report: Mapping) -> list[str]:
    """The table of the first losses of both sides, with the verdict on their equality."""
    rows = []
    for case, both_sides in sides(report).items():
        for name, s in both_sides.items():
            same = (
                verdict(both_sides[OURS], s, report["settings"][case]["compute"])
                if name == TORCH
                else ""
            )
            shown = ", ".join(f"{loss:.4f}" for loss in s.losses[:4])
            rows.append(
                [
                    case if name == next(iter(both_sides)) else "",
                    name,
                    shown,
                    ", ".join(f"{n:.3f}" for n in s.norms[:4]),
                    same,
                ]
            )
    return (
        table(
            ("case", "side", "losses of the first steps", "norms of their gradients", "the same"),
            rows,
        )
        if rows
        else []
    )


def kernels_table(report: Mapping) -> list[str]:
    """The table of kernels: a row for each, with errors and times of kernel and fallback."""
    rows = []
    for k in report["kernels"]:
        if "failure" in k:
            rows.append([k["name"], k["failure"], *[""] * 6])
            continue
        a, b = k["kernel"], k["fallback"]
        errors = [f"{a[what]:.1e}, {b[what]:.1e}" for what in ("value_error", "gradient_error")]
        times = [
            f"{1e3 * a['seconds']:.3f}",
            f"{1e3 * b['seconds']:.3f}",
            f"{b['seconds'] / a['seconds']:.2f}",
        ]
        rows.append(
            [
                k["name"],
                *errors,
                *times,
                *(f"{k['flops'] / s['seconds'] / 1e12:,.2f}" for s in (a, b)),
            ]
        )
    head = (
        "kernel, forward and backward",
        "error of values: its, fallback's",
        "of gradients",
        "ms",
        "fallback ms",
        "times as fast",
    )
    return table((*head, "TFLOP/s", "fallback TFLOP/s"), rows) if rows else []


def kernel_lines(report: Mapping) -> list[str]:
    """Lines about the kernels of our side, each with the cases that have it."""
    cases: dict[str, list[str]] = {}
    for r in report["rounds"]:
        for line in r.get("kernels", ()):
            cases.setdefault(line, []).append(r["case"])
    return [f"- {line}: {'; '.join(dict.fromkeys(names))}" for line, names in cases.items()]


def text(report: Mapping) -> str:
    """The report in Markdown."""
    about = ", ".join(
        f"{name} {value}" for name, value in report["versions"].items() if value is not None
    )
    tiny = " Tiny shapes: the times say nothing." if report["tiny"] else ""
    head = [
        f"{report['date']}, {report['minutes']:.1f} minutes. torch.compile: "
        f"{report['torch_compile']}.{tiny}",
        "",
        about,
    ]
    remarks = [f"- {remark}" for remark in report["remarks"]]
    parts = [
        head,
        steps_table(report),
        losses_table(report),
        kernel_lines(report),
        kernels_table(report),
        remarks,
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)
