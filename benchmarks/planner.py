"""The planner against published runs: the prediction, the published figure and the error, with the
framework that made each run, and the errors by kind of run.

    python benchmarks/planner.py [--markdown] [--rows=FILE] [--write]

The runs are those of published/*.csv; --rows names a table with the columns of rows_2026.csv, whose
rows alone are predicted. What a source does not state is assumed in the function that reads it.
Figures are TFLOP/s a device, seconds a step or tokens/s a device, as published. An error is the
predicted speed over the published one, less 1.

--write writes what plans and the documentation say of these errors: validation.json of the planner,
the tables of docs/planning.md and docs/published.png.
"""

import argparse
import csv
import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Iterator

FOLDER = pathlib.Path(__file__).parent / "published"
sys.path.insert(0, str(FOLDER.parents[1]))

import errors_by_kind  # noqa: E402 (the path comes first)
import rows_2026  # noqa: E402
from arguments import fail  # noqa: E402
from errors_by_kind import Kind, summary  # noqa: E402
from model_forms import gpt, llama  # noqa: E402

from jaxtrain.config.saved_values import ATTENTION_OUT, MLP_IN, QKV  # noqa: E402
from jaxtrain.planner.layer.hardware import load  # noqa: E402
from jaxtrain.planner.layer.layout import Layout  # noqa: E402
from jaxtrain.planner.layer.model import Model  # noqa: E402
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS  # noqa: E402
from jaxtrain.planner.step.step_time import StepModel  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Row:
    """A published figure, and the run whose figure it is.

    figure: "tflops", "seconds" or "tokens"
    counts: the FLOPs that a rate counts: "hardware", with recomputation, or "model"
    """

    name: str
    work: StepModel
    figure: str
    published: float
    counts: str = "hardware"

    def predicted(self) -> float:
        seconds, devices = self.work.step().seconds, self.work.layout.devices
        if self.figure == "seconds":
            return seconds
        if self.figure == "tokens":
            return self.work.layout.batch * self.work.model.sequence / seconds / devices
        flops = self.work.hardware_flops() if self.counts == "hardware" else self.work.model_flops()
        return flops / seconds / devices / 1e12

    @property
    def error(self) -> float:
        """The predicted speed over the published one, less 1."""
        ratio = self.predicted() / self.published
        return (1 / ratio if self.figure == "seconds" else ratio) - 1

    @property
    def kind(self) -> Kind:
        work = self.work
        model = "experts" if work.model.experts else "dense"
        return Kind(work.hardware.name, model, "bfloat16", work.settings.name)

    @property
    def tflops(self) -> float:
        """Planned TFLOP/s of a device, of the model's operations."""
        work = self.work
        return work.model_flops() / self.work.step().seconds / work.layout.devices / 1e12

    @property
    def seconds_by_part(self) -> dict[str, float]:
        """Seconds of a step by part, but for what other work hides."""
        return dict(self.work.step().exposed)

    @property
    def figures(self) -> tuple[str, str]:
        """The predicted and the published figure."""
        return f"{self.predicted():.1f}", f"{self.published:g} {UNITS[self.figure]}"


def read(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / f"{name}.csv").open() as file:
        yield from csv.DictReader(file)


def pipeline(
    row: dict[str, str], remat: str, zero: int = 0, repeats: int = 1, microbatch: int = 0
) -> Layout:
    """The layout of a row with columns tensor, pipeline, gpus, batch."""
    model, stage, devices, batch = (
        int(row[key]) for key in ("tensor", "pipeline", "gpus", "batch")
    )
    each, data = microbatch or int(row["microbatch"]), devices // (model * stage)
    repeats = int(row.get("chunks", repeats))
    return Layout(
        data=data,
        stage=stage,
        model=model,
        microbatch=each,
        microbatches=batch // (data * each),
        repeats=repeats,
        remat=remat,
        zero=zero,
        schedule="interleaved" if repeats > 1 else "1f1b",
    )


def model_of(row: dict[str, str]) -> Model:
    sizes = (int(row[key]) for key in ("hidden", "heads", "layers", "seq", "vocab"))
    return gpt(*sizes, tied=row.get("tied", "1") != "0")


def megatron2021() -> Iterator[Row]:
    """Full recomputation, as in the paper's end-to-end runs."""
    for row in read("megatron2021_a100"):
        work = StepModel(
            model_of(row), pipeline(row, "full"), FRAMEWORKS["megatron2021"], load("a100-80gb")
        )
        yield Row(
            f"Megatron 2021, {row['params_billion']} B on {row['gpus']} A100",
            work,
            "tflops",
            float(row["tflops_per_gpu"]),
        )


def korthikanti2022() -> Iterator[Row]:
    columns = {
        "full": ("megatron2021", "step_seconds_full_recompute"),
        "selective": ("megatron2022", "step_seconds_selective_and_sp"),
    }
    for row in read("korthikanti2022_a100"):
        for remat, (framework, column) in columns.items():
            work = StepModel(
                model_of(row), pipeline(row, remat), FRAMEWORKS[framework], load("a100-80gb")
            )
            name = f"Korthikanti 2022, {row['model']} on {row['gpus']} A100, {remat}"
            yield Row(name, work, "seconds", float(row[column]))


def megatron_core() -> Iterator[Row]:
    """Assumed: one sequence a microbatch, one chunk a stage, attention's core computed again but in
    the smallest model."""
    for row in read("megatron_core_h100"):
        remat = "none" if float(row["params_billion"]) < 10 else "selective"
        work = StepModel(
            model_of(row),
            pipeline(row, remat, zero=1, microbatch=1),
            FRAMEWORKS["megatron_core"],
            load("h100"),
        )
        name = f"Megatron-Core, {row['params_billion']} B on {row['gpus']} H100"
        yield Row(name, work, "tflops", float(row["tflops_per_gpu"]), counts="model")


def zero3() -> Iterator[Row]:
    """GPT-3's sizes; PTD-P as 8-way tensor and 12-way pipeline parallelism, as its 96-way model
    parallelism on 8 GPUs a node."""
    for row in read("megatron2021_zero3_vs_ptdp"):
        devices, batch, each = (int(row[key]) for key in ("gpus", "batch", "microbatch"))
        model = gpt(12288, 96, 96, 2048, 51200)
        if row["scheme"] == "zero3":
            layout = Layout(
                data=devices, microbatch=each, microbatches=batch // (devices * each), zero=3
            )
            work = StepModel(model, layout, FRAMEWORKS["zero3"], load("a100-80gb"))
        else:
            data = devices // 96
            layout = Layout(
                data=data,
                stage=12,
                model=8,
                microbatch=each,
                microbatches=batch // (data * each),
                zero=0,
            )
            work = StepModel(model, layout, FRAMEWORKS["megatron2021"], load("a100-80gb"))
        yield Row(
            f"{row['scheme']}, {row['params_billion']} B on {devices} A100",
            work,
            "tflops",
            float(row["tflops_per_gpu"]),
        )


# MaxText's recipes (configs/tpu of its repository) by size and chip: sequences a device, devices of
# its `tensor` axis, and recomputation.
MAXTEXT_RECIPES = {
    ("16", "v5e"): (6, 1, "full"),
    ("32", "v5e"): (4, 1, "full"),
    ("64", "v5e"): (2, 1, "full"),
    ("32", "v5p"): (6, 4, "minimal"),
    ("64", "v5p"): (3, 4, "minimal"),
    ("128", "v5p"): (1, 8, "minimal"),
}
# what "minimal" saves: all products, and not attention's result
MINIMAL = (QKV, ATTENTION_OUT, MLP_IN)


def maxtext_tpu() -> Iterator[Row]:
    """The sizes that MaxText's `global_parameter_scale` makes of its base of 1 B: of each three
    doublings the first widens attention and the MLP, the second the model, and the third has twice
    the layers (get_individual_scales)."""
    for row in read("maxtext_tpu"):
        each, tensor, remat = MAXTEXT_RECIPES[row["params_billion"], row["chip"]]
        thirds, further = divmod(int(math.log2(int(row["params_billion"]))), 3)
        heads, width = 2 ** (thirds + (further > 0)), 2 ** (thirds + (further > 1))
        sizes = 16 * 2**thirds, 2048 * width, 16 * heads, 16 * heads, 128, 7168 * heads
        model = llama(*sizes, vocabulary=32000, sequence=int(row["seq"]))
        layout = Layout(
            data=int(row["slice_chips"]) // tensor,
            model=tensor,
            microbatch=each * tensor,
            zero=3,
            remat="full" if remat == "full" else "selective",
            save=MINIMAL if remat == "minimal" else (),
        )
        work = StepModel(model, layout, FRAMEWORKS["maxtext"], load(f"tpu-{row['chip']}"))
        yield Row(
            f"MaxText, {row['params_billion']} B on {row['slice_chips']} {row['chip']}",
            work,
            "tflops",
            float(row["tflops_per_chip"]),
            "model",
        )


def gpus_jax() -> Iterator[Row]:
    """Assumed: MaxText computes all again; torchtitan what is no product."""
    for row in read("gpus_jax"):
        devices = int(row["gpus"].split()[0])
        big = "70b" in row["model"]
        sizes = (80, 8192, 64, 8, 128, 28672) if big else (32, 4096, 32, 8, 128, 14336)
        model = llama(*sizes, vocabulary=128256, sequence=int(row["seq"]))
        layout = Layout(
            data=devices,
            microbatch=int(row["per_device_batch"]),
            zero=3,
            remat="full" if big else "selective",
        )
        if row["framework"] == "maxtext":
            work = StepModel(model, layout, FRAMEWORKS["maxtext"], load("h100"))
            yield Row(
                f"MaxText, {row['model']} on {row['gpus']}",
                work,
                "seconds",
                float(row["step_seconds"]),
            )
        else:
            framework = FRAMEWORKS[
                "torchtitan" if "compile" in row["model"] else "torchtitan_eager"
            ]
            published = float(row["mfu_or_tokens"].split()[0])
            yield Row(
                f"torchtitan, {row['model']}",
                StepModel(model, layout, framework, load("h100-96gb-500w")),
                "tokens",
                published,
            )


def llama3() -> Iterator[Row]:
    """The 405B model. Assumed: a chunk of one layer, all activations kept, attention counted as
    masked. No constant was fitted to these."""
    for row in read("llama3_h100"):
        model = llama(126, 16384, 128, 8, 128, 53248, 128256, int(row["seq"]))
        data, each = int(row["data"]), int(row["batch_per_data"])
        layout = Layout(
            data=data,
            stage=16,
            model=8,
            context=int(row["context"]),
            microbatches=each,
            repeats=8,
            remat="none",
            zero=1,
            schedule="interleaved",
        )
        work = StepModel(model, layout, FRAMEWORKS["llama3"], load("h100"))
        name = f"Llama 3, 405 B on {row['gpus']} H100, {row['seq']} tokens"
        yield Row(name, work, "tflops", float(row["tflops_per_gpu"]), counts="model")


def rows() -> list[Row]:
    """All published figures that the planner predicts."""
    sources = (megatron2021, korthikanti2022, megatron_core, zero3, maxtext_tpu, gpus_jax, llama3)
    return [row for source in sources for row in source()]


NOT_FITTED = "rows of 2025 and 2026 that nothing was fitted to"
UNITS = {"tflops": "TFLOP/s", "seconds": "s", "tokens": "tokens/s"}


@functools.cache
def of_2026(path: pathlib.Path) -> list[rows_2026.PublishedRun]:
    """The rows of a table with the columns of rows_2026.csv, each of which is planned once."""
    return list(rows_2026.read(path))


def groups_of(recent: list[rows_2026.PublishedRun]) -> dict[str, list]:
    """Planned rows of a table as rows_2026.csv, by what an error of theirs says."""
    planned = [run for run in recent if not run.unplanned]
    return {
        "rows of 2025 and 2026": [run for run in planned if not run.approximate],
        errors_by_kind.APPROXIMATE: [run for run in planned if run.approximate],
    }


def groups() -> dict[str, list]:
    """All runs that are predicted."""
    recent = groups_of(of_2026(FOLDER / "rows_2026.csv"))
    here = of_2026(FOLDER / "measured_here.csv")
    others = of_2026(FOLDER / "not_fitted_2026.csv")
    return {
        "figures of papers up to 2025": rows(),
        **recent,
        NOT_FITTED: others,
        "steps measured here": here,
    }


def lines(runs: list[Row | rows_2026.PublishedRun], markdown: bool) -> Iterator[str]:
    """A line for each run that flags express."""
    if markdown:
        yield "| run | framework | predicted | published | error | where the time goes |"
        yield "|---|---|---|---|---|---|"
    for run in runs:
        parts = run.seconds_by_part
        total = sum(parts.values())
        shares = ", ".join(f"{n} {s / total:.0%}" for n, s in parts.items() if s > 0.02 * total)
        predicted, published = run.figures
        columns = (run.name, run.kind.framework, predicted, published, f"{run.error:+.1%}", shares)
        widths = (-52, -16, 10, 22, 8, 0)
        if markdown:
            yield f"| {' | '.join(columns)} |"
        else:
            yield " ".join(
                text.ljust(-width) if width < 0 else text.rjust(width)
                for text, width in zip(columns, widths, strict=True)
            )


def main(argv: list[str]) -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--markdown", action="store_true", help="print tables of Markdown")
    arguments.add_argument("--rows", type=pathlib.Path, help="predict the rows of this table alone")
    arguments.add_argument("--write", action="store_true", help="write what plans and docs say")
    flags = arguments.parse_args(argv)
    try:
        recent = of_2026(flags.rows or FOLDER / "rows_2026.csv")
    except rows_2026.RowError as error:
        fail(f"--rows={flags.rows} {error}")
    by_name = groups_of(recent) if flags.rows else groups()
    for name, runs in by_name.items():
        print("\n".join((f"\n{name}\n", *lines(runs, flags.markdown))))
    kinds = errors_by_kind.table(errors_by_kind.counted(by_name))
    print("\n".join(("\nby kind of run\n", *kinds)))
    print()
    for name, runs in by_name.items():
        print(f"{len(runs)} {name}: {summary([run.error for run in runs])}")
    for name, runs in (
        (
            "not planned",
            [f"{run.values['row']} ({run.unplanned})" for run in recent if run.unplanned],
        ),
        (
            "ran, and planned not to fit",
            [run.name for run in recent if not (run.unplanned or run.plan.fits)],
        ),
    ):
        print(f"{len(runs)} {name}{': ' * bool(runs)}{'; '.join(runs)}")
    if flags.write:
        errors_by_kind.write(by_name)


if __name__ == "__main__":
    main(sys.argv[1:])
