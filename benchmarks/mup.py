"""The best learning rate by the model's width, with μP (model.mup_base_width) and without.

    python benchmarks/mup.py [--widths=64,256,512] [--rates=0.001,0.002] [--steps=200] [--seed=0]
                             [--csv=FILE] [--picture=FILE] [-- --config.… …]

Each run is a model of two layers on one CPU device, with the same batches; wider ones have more
heads, and the narrowest is the base. A run's loss is the mean of its last tenth of the steps. A run
that is in the CSV file is not repeated. The picture has the file's runs of this seed.
"""

import csv
import os
import pathlib
import subprocess
import sys
import tempfile

import arguments

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from jaxtrain.experiments.run_folder import read_run  # noqa: E402

COLUMNS = ("mup", "width", "rate", "seed", "loss")
Run = tuple[int, int, float, int]  # 1 with μP, width, learning rate, seed
PANELS = {1: "with μP", 0: "without"}


def loss_of(run: Run, base: int, steps: int, flags: list[str]) -> float:
    """The mean training loss of a run's last tenth of the steps. base: width of the base model"""
    mup, width, rate, seed = run
    settings = {
        "model.layers": 2,
        "model.width": width,
        "model.heads": max(1, width // 16),
        "model.mlp_width": 2 * width,
        "model.activation": "gelu",
        "model.tied_embeddings": False,
        "model.init_std": 0.05,
        "model.mup_base_width": base * mup,
        "data.sequence_length": 64,
        "data.batch_size": 8,
        "mesh.stage": 1,
        "mesh.model": 1,
        "pipeline.microbatches": 1,
        "optimizer.learning_rate": rate,
        "optimizer.warmup_steps": steps // 10,
        "train.steps": steps,
        "train.seed": seed,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "metrics.log_every": 1,
        "metrics.tensorboard": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "jaxtrain.train", "--cpu_devices=1"),
                *(f"--config.{path}={value}" for path, value in settings.items()),
                *(f"--workdir={folder}/run", *flags),
            ],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        losses = read_run(f"{folder}/run").curve("loss")[-max(1, steps // 10) :]
    return sum(loss for _, loss in losses) / len(losses)


def read(file: pathlib.Path) -> dict[Run, float]:
    """The losses of the runs in a CSV file."""
    if not file.exists():
        return {}
    with file.open() as lines:
        return {
            (int(mup), int(width), float(rate), int(seed)): float(loss)
            for mup, width, rate, seed, loss in list(csv.reader(lines))[1:]
        }


def curves(losses: dict[Run, float], mup: int, base: int) -> dict[int, list[tuple[float, float]]]:
    """Width → (rate, loss) by ascending rate. The base's runs are those of both panels."""
    of_width: dict[int, list[tuple[float, float]]] = {}
    for (with_mup, width, rate, _), loss in sorted(losses.items()):
        if with_mup == mup or width == base:
            of_width.setdefault(width, []).append((rate, loss))
    return dict(sorted(of_width.items()))


def best_rate(curve: list[tuple[float, float]]) -> float:
    """The rate of the least loss, by the parabola over log(rate) through the lowest run and its
    neighbours; the lowest run's at either end of the curve."""
    lowest = min(range(len(curve)), key=lambda i: curve[i][1])
    if not 0 < lowest < len(curve) - 1:
        return curve[lowest][0]
    import numpy as np

    rates, losses = zip(*curve[lowest - 1 : lowest + 2], strict=True)
    square, slope, _ = np.polyfit(np.log(rates), losses, 2)
    return float(np.exp(-slope / (2 * square)))


def draw(losses: dict[Run, float], base: int, picture: pathlib.Path) -> None:
    """Losses over rates, with a line for each width, and one at its best rate."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "mup", "font.size": 11}
    import matplotlib.pyplot as plt
    import numpy as np

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    widths = sorted({width for _, width, _, _ in losses})
    colours = dict(zip(widths, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(widths)))))
    for axes, (mup, title) in zip(panels, PANELS.items(), strict=True):
        for width, curve in curves(losses, mup, base).items():
            colour, best = colours[width], best_rate(curve)
            axes.plot(*zip(*curve, strict=True), "o-", ms=3, color=colour, label=f"width {width}")
            axes.axvline(best, color=colour, ls=":")
        axes.set(title=title, xscale="log", xlabel="optimizer.learning_rate")
        axes.grid(alpha=0.3)
    least = min(losses.values())
    panels[0].set(ylabel="training loss", ylim=(least - 0.03, least + 0.6))
    panels[0].legend(frameon=False)
    figure.savefig(picture, format="svg", metadata={"Date": None})


def main() -> None:
    """Prints each run's loss, then the best rates."""
    parser = arguments.parser(__doc__, "settings of all runs, --config.PATH=VALUE, after --")
    numbers = lambda kind: lambda text: [kind(part) for part in text.split(",")]
    parser.add_argument("--widths", type=numbers(int), default=[64, 256, 512])
    rates = [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016]
    parser.add_argument("--rates", type=numbers(float), default=rates)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=pathlib.Path, default=REPOSITORY / "benchmarks" / "mup.csv")
    parser.add_argument("--picture", type=pathlib.Path, help="an SVG file; none if not given")
    options = parser.parse_args()
    base, losses = min(options.widths), read(options.csv)
    for width in options.widths:
        for mup in [1] if width == base else PANELS:
            for rate in options.rates:
                run = (mup, width, rate, options.seed)
                if run in losses:
                    continue
                losses[run] = loss_of(run, base, options.steps, options.changes)
                is_new = not options.csv.exists()
                with options.csv.open("a", newline="") as lines:
                    csv.writer(lines).writerows(
                        [*[COLUMNS] * is_new, (*run, round(losses[run], 4))]
                    )
                print(f"{PANELS[mup]:8} width {width:4} rate {rate:<8g} loss {losses[run]:.4f}")
    of_seed = {run: loss for run, loss in losses.items() if run[3] == options.seed}
    for mup, title in PANELS.items():
        best = {w: best_rate(curve) for w, curve in curves(of_seed, mup, base).items()}
        words = ", ".join(f"{rate:.2g} at width {width}" for width, rate in best.items())
        print(f"{title}: best rate {words}: by {max(best.values()) / min(best.values()):.2g} ×")
    if options.picture:
        draw(of_seed, base, options.picture)


if __name__ == "__main__":
    main()
