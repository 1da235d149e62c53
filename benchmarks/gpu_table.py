"""The tables of benchmarks/gpu.py, in Markdown, from its figures. Standard library, and the
formulas of jaxtrain/run/metrics.py."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from jaxtrain.config import Config
from jaxtrain.costs import hardware

OURS, TORCH = "jaxtrain", "torch"
# How far two sides may be apart, as parts of theirs, in the first step and in later ones, whose
# weights differ by rounding already. In bfloat16 a loss is a mean over many tokens' rounding, a
# norm of gradients is not. Models that differ (no rotation, another base, other gates) are
# beyond: tests/benchmarks/test_gpu_torch.py.
CLOSE_LOSSES = {"float32": (1e-5, 1e-4), "bfloat16": (5e-4, 2e-3)}
CLOSE_NORMS = {"float32": (1e-4, 1e-3), "bfloat16": (5e-3, 2e-2)}


def settings(config: Config) -> dict:
    """What the tables need of a case's config."""
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
    """A side of a case, all its rounds together. seconds: the median step; spread: the slowest over
    the fastest; mfu: 0 to 1, or None."""

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
    """What a side's rounds come to. flops_per_token: the model's own; device: its kind, for the
    peak."""
    steps = [s for r in rounds for s in r["seconds"]]
    seconds, first = statistics.median(steps), rounds[0]
    speed = about["batch_size"] * about["sequence_length"] / seconds
    kind = hardware.of_device(device)
    used = (
        None
        if flops_per_token is None or kind is None
        else kind.utilization(speed * flops_per_token, about["compute"])
    )
    start = first["first_s"] + first.get("trace_s", 0.0) + first.get("compile_s", 0.0)
    return Side(
        seconds,
        max(steps) / min(steps),
        speed,
        used,
        first["memory"],
        start,
        first["losses"],
        first["norms"],
    )


def sides(report: Mapping) -> dict[str, dict[str, Side]]:
    """Case → side → what it comes to, in the order of the cases."""
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
    """How far two lists of numbers are apart, as parts of theirs: the first, and the most of the
    others; NaN where one is none."""
    first, *others = (abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return first, max(others, key=lambda part: part if part == part else math.inf, default=0.0)


def are_same(ours: Side, theirs: Side, compute: str) -> bool:
    """Whether losses and norms of both sides say that the models are the same."""
    pairs = ((ours.losses, theirs.losses, CLOSE_LOSSES), (ours.norms, theirs.norms, CLOSE_NORMS))
    return all(
        part <= most
        for a, b, close in pairs
        for part, most in zip(difference(a, b), close[compute], strict=True)
    )


# --- text -----------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table's lines."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def steps_table(report: Mapping) -> list[str]:
    """A row for each side of each case, and in the second the ratio of both."""
    rows = []
    for case, both_sides in sides(report).items():
        about = report["settings"][case]
        shape = f"{about['batch_size']} × {about['sequence_length']} in {about['microbatches']}"
        how = (
            f"{shape}, remat "
            f"{about['remat']}{', documents apart' if about['documents_apart'] else ''}, "
            f"{about['compute']}"
        )
        for name, s in both_sides.items():
            both = name == TORCH
            rows.append(
                [
                    *((case, how) if name == next(iter(both_sides)) else ("", "")),
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
    """`are_same` in words."""
    losses, norms = difference(ours.losses, theirs.losses), difference(ours.norms, theirs.norms)
    shown = "; ".join(
        f"{what} {first:.0e}, then {later:.0e}"
        for what, (first, later) in (("losses", losses), ("norms", norms))
    )
    return f"{'yes' if are_same(ours, theirs, compute) else '**no**'}: {shown} apart"


def losses_table(report: Mapping) -> list[str]:
    """The first losses of both sides, and whether they are the same."""
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
    """A row for each kernel: errors and times beside the fallback's."""
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
    """Which kernels our side of each case had, those of several cases once, with what it says of
    slow ones."""
    cases: dict[str, list[str]] = {}
    for r in report["rounds"]:
        for line in r.get("kernels", ()):
            cases.setdefault(line, []).append(r["case"])
    return [f"- {line}: {'; '.join(dict.fromkeys(names))}" for line, names in cases.items()]


def text(report: Mapping) -> str:
    """All of it."""
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
