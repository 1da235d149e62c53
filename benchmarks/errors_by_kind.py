"""Errors of predicted runs by kind: as text, as the file that plans read, and as a picture."""

import json
import math
import pathlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from jaxtrain.schedule.drawing import as_png

ROOT = pathlib.Path(__file__).resolve().parents[1]
VALIDATION = ROOT / "jaxtrain" / "planner" / "search" / "validation.json"
PAGE, PICTURE = ROOT / "docs" / "planning.md", ROOT / "docs" / "published.png"
# the group whose runs count for no kind
APPROXIMATE = "rows with windows and sinks, planned as full attention"
# between which comments of the page the tables stand
BLOCK = re.compile("(<!-- planner.py -->\n).*(<!-- end -->)", re.DOTALL)


class Kind(NamedTuple):
    """A kind of run: the name of its device's file, dense or experts, the type in which products
    are computed, and the framework without a release."""

    device: str
    model: str
    precision: str
    framework: str


class Run(Protocol):
    """A published run with its plan. error: the predicted speed over the published one, less 1"""

    @property
    def kind(self) -> Kind: ...
    @property
    def error(self) -> float: ...
    @property
    def tflops(self) -> float:
        """Planned TFLOP/s of a device, of the model's operations."""


def most(errors: Sequence[float], part: float = 0.8) -> float:
    """The smallest size of an error that so many of them do not exceed."""
    sizes = sorted(map(abs, errors))
    return sizes[math.ceil(part * len(sizes)) - 1]


def summary(errors: Sequence[float]) -> str:
    """Median and worst size of errors, and how many are small."""
    if not errors:
        return "none"
    sizes = sorted(map(abs, errors))
    within = sum(size <= 0.15 for size in sizes) / len(sizes)
    return (
        f"median error {statistics.median(sizes):.1%}, {within:.0%} within 15 %, "
        f"80 % within {most(errors):.1%}, worst {sizes[-1]:.1%}"
    )


def counted(groups: Mapping[str, Sequence[Run]]) -> list[Run]:
    """The runs whose model is the planned one."""
    return [run for name, runs in groups.items() for run in runs if name != APPROXIMATE]


def by_kind(runs: Sequence[Run]) -> dict[Kind, list[float]]:
    """Errors by kind, in the order of kinds."""
    kinds: dict[Kind, list[float]] = {}
    for run in runs:
        kinds.setdefault(run.kind, []).append(run.error)
    return dict(sorted(kinds.items()))


def table(runs: Sequence[Run]) -> Iterator[str]:
    """A table of Markdown with a line for each kind."""
    yield "| device | layers | products in | framework | rows | median error | all errors, % |"
    yield "|---|---|---|---|---|---|---|"
    for kind, errors in by_kind(runs).items():
        middle = statistics.median(map(abs, errors))
        each = " ".join(f"{100 * error:+.0f}" for error in sorted(errors))
        yield f"| {' | '.join(kind)} | {len(errors)} | {middle:.1%} | {each} |"


def validation(runs: Sequence[Run]) -> str:
    """The file from which plans read the errors of their kind."""
    kinds = [
        {**kind._asdict(), "errors": [round(error, 3) for error in sorted(errors)]}
        for kind, errors in by_kind(runs).items()
    ]
    lines = ",\n".join(f"  {json.dumps(kind)}" for kind in kinds)
    return f'{{"kinds": [\n{lines}\n]}}\n'


def page(groups: Mapping[str, Sequence[Run]], text: str) -> str:
    """The page with today's errors in place of those between its comments."""
    lines = ["| runs | rows | errors |", "|---|---|---|"]
    for name, runs in groups.items():
        lines.append(f"| {name} | {len(runs)} | {summary([run.error for run in runs])} |")
    body = "\n".join((*lines, "", *table(counted(groups)), ""))
    return BLOCK.sub(lambda match: match[1] + body + match[2], text)


def picture(runs: Sequence[Run]) -> bytes:
    """The PNG of the planned speed beside the published one of each run, and of errors by kind."""
    from matplotlib.figure import Figure

    kinds = by_kind(runs)
    figure = Figure(figsize=(13, 0.24 * len(kinds) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    devices = sorted({kind.device for kind in kinds})
    for run in runs:
        colour = f"C{devices.index(run.kind.device) % 10}"
        shape = "o" if run.kind.model == "dense" else "^"
        left.plot(run.tflops / (1 + run.error), run.tflops, shape, color=colour, alpha=0.7, ms=5)
    ends = left.get_xlim()
    left.plot(ends, ends, color="grey", lw=0.8)
    left.fill_between(ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color="0.92")
    left.set(xscale="log", yscale="log", xlabel="published TFLOP/s a device", ylabel="planned")
    left.set_title("each run (△ with experts); grey: within 15 %", fontsize=10)
    right.axvspan(-15, 15, color="0.92")
    for at, (kind, errors) in enumerate(kinds.items()):
        colour = f"C{devices.index(kind.device) % 10}"
        right.plot(
            [100 * e for e in errors], [at] * len(errors), "o", color=colour, alpha=0.7, ms=5
        )
    right.set_yticks(range(len(kinds)), [" · ".join(kind) for kind in kinds], fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("planned speed over published, less 1, %")
    return as_png(figure)


def write(groups: Mapping[str, Sequence[Run]]) -> None:
    """Writes validation.json, the tables of docs/planning.md and the picture."""
    runs = counted(groups)
    VALIDATION.write_text(validation(runs))
    PAGE.write_text(page(groups, PAGE.read_text()))
    PICTURE.write_bytes(picture(runs))
