"""`python -m jaxtrain.experiments.compare RUN …`: the settings in which runs differ, what each has
reached, and their losses in one picture. jax is imported only where FLOPs are counted."""

import math
import pathlib
import sys
import types
from collections.abc import Sequence

import numpy as np

from jaxtrain import cli
from jaxtrain.config import ConfigError, UsageError, fields, get, own_code, value_text
from jaxtrain.config.flags import Flag
from jaxtrain.experiments.run_folder import RunFolder, read_run
from jaxtrain.run import files, streams
from jaxtrain.run.metrics import METRICS, VALIDATION_LOSS, short

DESCRIPTION = """
Compares runs: prints the settings in which they differ and what each has reached, and draws their
training and validation losses by step, token, hour and FLOP into one picture. Runs may be going on.

usage: jaxtrain compare RUN … [--out=FILE]
"""
PICTURES = (".png", ".svg", ".pdf")
PICTURE = "compare.png"
FLAGS = (Flag("out", PICTURE, f"the picture's file ({', '.join(PICTURES)})"),)
WIDEST = 40  # characters of a cell
NONE = "–"  # of a figure that a run does not have
# abscissa of a panel → its metric, and what makes its unit of that's; 0: the run's FLOPs per token
OVER = {
    "step": ("step", 1.0),
    "tokens": ("tokens", 1.0),
    "hours": ("wall_s", 1 / 3600),
    "FLOPs of the model": ("tokens", 0.0),
}
SMOOTHED = 50  # points of a training loss that are drawn: means of as many records as that takes


@cli.command
def main(argv: Sequence[str]) -> None:
    """Ends with status 2 and one line on stderr for what cannot work."""
    runs, out = cli.checked_flags(argv, DESCRIPTION, FLAGS, check, words=True)
    print("\n".join(table(runs)), flush=True)
    print(f"\nlosses: {draw(runs, out) or 'no run has any yet'}", flush=True)


def check(flags: types.SimpleNamespace) -> tuple[list[RunFolder], pathlib.Path]:
    """The runs, and the picture's path. Raises UsageError."""
    if not flags.words:
        raise UsageError("no run is named", advice="jaxtrain compare RUN …")
    out = pathlib.Path(flags.out)
    if out.suffix not in PICTURES:
        raise UsageError(
            f"--out={flags.out!r} does not end in {', '.join(PICTURES)}", {"out": PICTURE}
        )
    cli.check_output("out", flags.out, PICTURE)
    return list(map(read_run, flags.words)), out


def label(run: RunFolder) -> str:
    """The end of the path of a run's folder, by which tables and pictures name it."""
    return "/".join(run.folder.resolve().parts[-2:])


# --- the table ------------------------------------------------------------------------------------


def figures(run: RunFolder) -> dict[str, str]:
    """Name → text, for what a run has reached: steps, tokens, time, its last and best losses."""
    metrics = ("step", "tokens", "wall_s")
    last = {metric: curve[-1][1] for metric in metrics if (curve := run.curve(metric))}
    texts = {
        "steps": f"{last.get('step', 0)} of {run.config.train.steps}",
        "tokens": short(last["tokens"]) if "tokens" in last else NONE,
        "hours": f"{last['wall_s'] / 3600:.3g}" if "wall_s" in last else NONE,
    }
    for metric in ("loss", VALIDATION_LOSS):
        losses, title = run.curve(metric), METRICS[metric].title
        step, best = min(losses, key=lambda point: point[1], default=(0, math.nan))
        texts[f"last {title}"] = f"{losses[-1][1]:.4f}" if losses else NONE
        texts[f"best {title}"] = f"{best:.4f} at {step}" if losses else NONE
    return texts


def table(runs: Sequence[RunFolder]) -> list[str]:
    """Lines of text: the settings that differ between the runs, and what each has reached. The runs
    are the columns, or the lines where that is the narrower table."""
    texts = {path: [value_text(get(run.config, path)) for run in runs] for path in fields()}
    rows = {path: values for path, values in texts.items() if len({*values}) > 1}
    reached = [figures(run) for run in runs]
    rows |= {name: [each[name] for each in reached] for name in reached[0]}
    grid = [("", *map(label, runs)), *((name, *values) for name, values in rows.items())]
    if len(runs) > len(rows):
        grid = [*zip(*grid, strict=True)]
    cut = lambda text: text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
    return streams.aligned([[*map(cut, line)] for line in grid])


# --- the picture ----------------------------------------------------------------------------------


def draw(runs: Sequence[RunFolder], path: pathlib.Path) -> pathlib.Path | None:
    """Draws training losses (lines) and validation losses (dashed) by step, token, hour and FLOP
    into one picture. Its path; None if no run has a loss."""
    if not any(run.curve("loss") for run in runs):
        return None
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot: no display, no state

    colours = colormaps["tab10" if len(runs) <= 10 else "turbo"].resampled(max(10, len(runs)))
    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    for axes, (name, (over, unit)) in zip(figure.subplots(2, 2, sharey=True).flat, OVER.items()):
        axes.set(xlabel=name, ylabel=f"loss ({METRICS['loss'].unit})")
        axes.grid(alpha=0.3)
        for k, run in enumerate(runs):
            scale = unit or _flops_per_token(run)
            axes.plot(*_points(run, "loss", over, scale), color=colours(k), label=label(run))
            axes.plot(
                *_points(run, VALIDATION_LOSS, over, scale), "o--", markersize=3, color=colours(k)
            )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(files.fresh(path))
    return path


def _points(run: RunFolder, metric: str, over: str, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """The abscissae and values of a loss. Not all records have the abscissa `over`, which is given
    in units of `unit`, so it is interpolated between those of steps."""
    steps, values = np.array(run.curve(metric)).reshape(-1, 2).T
    first = dict(sorted(run.curve(over), reverse=True)) or {0: math.nan}  # of a step's records
    known = np.array(sorted(first.items()))
    abscissae = unit * np.interp(steps, known[:, 0], known[:, 1])
    width = max(1, len(steps) // SMOOTHED) if metric == "loss" else 1
    mean = lambda numbers: np.convolve(numbers, np.full(width, 1 / width), "valid")
    return (mean(abscissae), mean(values)) if len(steps) else (steps, values)


def _flops_per_token(run: RunFolder) -> float:
    """The model's operations for a token, as the planner counts them; NaN where its layer is code
    that is not here."""
    from jaxtrain.planner.for_training import model_of

    try:
        return model_of(
            run.config.fill().model, run.config.data.sequence_length
        ).training_flops_per_token()
    except (ConfigError, own_code.OwnCodeError):
        return math.nan


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
