"""The best learning rate by the model's width, with μP (model.mup_base_width) and without.

    python benchmarks/mup.py [--widths=64,256,512] [--rates=0.001,0.002] [--steps=200] [--seed=0]
                             [--csv=FILE] [--picture=FILE] [-- --config.… …]

Each run is a model of two layers on one CPU device, with the same batches; wider ones have more
heads, and the narrowest is the base. A run's loss is the mean of its last tenth of the steps. A run
that is in the CSV file is not repeated. The picture has the file's runs of this seed.
"""

import csv
import pathlib
import sys

import arguments

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
COLUMNS = ("mup", "width", "rate", "seed", "loss")
Run = tuple[int, int, float, int]  # 1 with μP, width, learning rate, seed
PANELS = {1: "with μP", 0: "without"}


def loss_of(run: Run, base: int, steps: int, flags: list[str]) -> float:
    """The mean training loss of a run's last tenth of the steps. base: width of the base model"""
    import jaxtrain

    mup, width, rate, seed = run
    changes = {
        "model.layers": 2,
        "model.width": width,
        "model.heads": max(1, width // 16),
        "model.mlp_width": 2 * width,
        "model.activation": "gelu",
        "model.init_std": 0.05,
        "model.mup_base_width": base * mup,
        "data.sequence_length": 64,
        "data.batch_size": 8,
        "precision.compute": "float32",
        "optimizer.learning_rate": rate,
        "optimizer.warmup_steps": steps // 10,
        "train.steps": steps,
        "train.seed": seed,
    }
    changes |= dict(flag.removeprefix("--config.").split("=", 1) for flag in flags)
    step = jaxtrain.make_step(jaxtrain.Config(), changes, cpu_devices=1)
    state, losses = step.initial_state(), []
    for number in range(steps):
        state, metrics = step.train(state, step.batch(number))
        losses.append(float(metrics["loss"]))
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def read(file: pathlib.Path) -> dict[Run, float]:
    """The losses of the runs in a CSV file."""
    if not file.exists():
        return {}
    with file.open() as lines:
        return {
            (int(mup), int(width), float(rate), int(seed)): float(loss)
            for mup, width, rate, seed, loss in list(csv.reader(lines))[1:]
        }


def best_rates(losses: dict[Run, float], mup: int, base: int) -> dict[int, float]:
    """Width → the rate of the least loss. The base's runs are those of both."""
    of_width: dict[int, dict[float, float]] = {}
    for (with_mup, width, rate, _), loss in losses.items():
        if with_mup == mup or width == base:
            of_width.setdefault(width, {})[rate] = loss
    return {width: min(runs, key=runs.__getitem__) for width, runs in sorted(of_width.items())}


def draw(losses: dict[Run, float], base: int, picture: pathlib.Path) -> None:
    """Losses over rates, with a line for each width, and a mark at its least loss."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "mup", "font.size": 11}
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    widths = sorted({width for _, width, _, _ in losses})
    for axes, (mup, title) in zip(panels, PANELS.items(), strict=True):
        best = best_rates(losses, mup, base)
        for number, width in enumerate(widths):
            runs = sorted(
                (rate, loss)
                for (with_mup, of_width, rate, _), loss in losses.items()
                if of_width == width and (with_mup == mup or width == base)
            )
            colour = plt.get_cmap("viridis")(number / max(1, len(widths) - 1) * 0.85)
            axes.plot(*zip(*runs, strict=True), "o-", ms=3, color=colour, label=f"width {width}")
            axes.plot(best[width], dict(runs)[best[width]], "o", ms=9, color=colour, mfc="none")
        axes.set(title=title, xscale="log", xlabel="optimizer.learning_rate")
        axes.grid(alpha=0.3, which="both")
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
    sys.path.insert(0, str(REPOSITORY))
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
        best = best_rates(of_seed, mup, base)
        words = ", ".join(f"{rate:g} at width {width}" for width, rate in best.items())
        print(f"{title}: best rate {words}: moves by {max(best.values()) / min(best.values()):g} ×")
    if options.picture:
        draw(of_seed, base, options.picture)


if __name__ == "__main__":
    main()
