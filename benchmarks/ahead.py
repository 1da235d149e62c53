"""The train step of real recipes and layouts, compiled ahead of time for TPU v5p and H100. Nothing
is run: the compiled programs are read.

    python benchmarks/ahead.py [--recipe=llama3_8b] [--layout=zero3,pipeline] [--platform=v5p,h100]
                               [--layers=8] [--sequence=8192] [--json=FILE] [--append]
                               [--config.mesh.model=4 …]

Needs the compilers of requirements/compilers.txt, and neither a device nor a driver;
JAXTRAIN_COMPILERS names their folder where that is not .venv-compilers. A case takes one to four
minutes; the status is 1 if a compiler refused one, 2 if the flags are wrong. ahead_figures.py and
step_seconds.py say what each figure means; tables are in ahead.md. Layers are a loop:
few of them compile as many do (two at least in each chunk of a stage), and figures of fewer are of
fewer.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

REPOSITORY = pathlib.Path(__file__).parents[1]
sys.path[:0] = [path for path in (str(REPOSITORY),) if path not in sys.path]

from ahead_figures import as_dict, exposed_lines  # noqa: E402 (the path comes first)
from arguments import fail  # noqa: E402
from second_reader import second_reader_lines  # noqa: E402
from step_seconds import StepSeconds  # noqa: E402

from jaxtrain import config as configs  # noqa: E402
from jaxtrain.config import Config  # noqa: E402
from jaxtrain.config.flags import Flag, apply, read_flags  # noqa: E402
from jaxtrain.config.recipes import RecipeError, find_recipe, load_recipe  # noqa: E402
from jaxtrain.config.rules import checks  # noqa: E402
from jaxtrain.planner.programs.topology import (  # noqa: E402
    INSTALL_COMMAND,
    PLATFORMS,
    Refused,
    Topology,
    compile_config,
    compilers,
    fitting,
)

KINDS = ("v5p", "h100")
TABLE = REPOSITORY / "benchmarks" / "ahead.md"
FLAGS = (
    Flag("recipe", "llama3_8b", "recipes, with commas between them"),
    Flag("layout", "", "layouts, with commas between them; empty: all of the recipe's"),
    Flag("platform", ",".join(KINDS), "v5p, h100"),
    Flag(
        "layers",
        0,
        "layers in place of the recipe's; 0: all of them, or as the layout cuts them",
        at_least=0,
    ),
    Flag("sequence", 0, "tokens of a sequence in place of the recipe's", at_least=0),
    Flag("devices", 0, "devices in place of the layout's", at_least=0),
    Flag(
        "products",
        0.7,
        "part of the peak at which XLA's own products run on an H100",
        at_least=0.01,
    ),
    Flag("kernels", 0.5, "part of the peak at which kernels run", at_least=0.01),
    Flag("json", "", "file for the figures, a list of cases"),
    Flag("text", "", "folder for the compiled programs' text"),
    Flag("append", False, "add rows to benchmarks/ahead.md"),
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Settings of a recipe on a number of devices, and their text in the table."""

    devices: int
    text: str
    settings: dict[str, object]


FLAT = {
    "mesh.stage": 1,
    "mesh.expert": 1,
    "mesh.model": 1,
    "pipeline.microbatches": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.repeats": 1,
    "pipeline.overlap": False,
    "pipeline.save": (),
}
STAGES = {
    **{
        "mesh.model": 1,
        "mesh.data": 16,
        "mesh.stage": 4,
        "parallel.zero": 1,
        "data.batch_size": 256,
    },
    **{"pipeline.schedule": "interleaved", "pipeline.repeats": 2, "pipeline.microbatches": 16},
}
SEPARATE = {"data.attend_across_documents": False, "pipeline.remat": "full"}
DENSE = {
    "zero3": Layout(
        64, "data 64, ZeRO-3", FLAT | {"mesh.data": 64, "parallel.zero": 3, "data.batch_size": 64}
    ),
    "tensor": Layout(
        64,
        "data 16 · model 4, ZeRO-1",
        FLAT | {"mesh.data": 16, "mesh.model": 4, "parallel.zero": 1, "data.batch_size": 64},
    ),
    "pipeline": Layout(64, "data 16 · stage 4 · 2 repeats, 16 microbatches, ZeRO-1", STAGES),
    "pipeline_tensor": Layout(
        64,
        "data 4 · stage 4 · model 4 · 2 repeats, 16 microbatches, ZeRO-1",
        STAGES | {"mesh.data": 4, "mesh.model": 4, "data.batch_size": 64},
    ),
}
LAYOUTS = {
    "llama3_8b": DENSE,
    "mixtral_8x7b": {
        "pipeline": Layout(
            32,
            "the recipe on 32 devices: stage 4 · expert 8 · 2 repeats, 64 microbatches, ZeRO-1, "
            "overlapped cells, layers' inputs kept",
            {"mesh.data": 1},
        ),
        "overlap": Layout(
            32,
            "stage 4 · expert 8, dualpipe_v, 8 microbatches, overlapped cells",
            {
                **{"mesh.data": 1, "pipeline.schedule": "dualpipe_v", "pipeline.remat": "none"},
                **{"pipeline.save": (), "pipeline.microbatches": 8, "data.batch_size": 64},
            },
        ),
        "experts": Layout(
            64,
            "data 8 · expert 8, ZeRO-3",
            FLAT | {"mesh.data": 8, "mesh.expert": 8, "parallel.zero": 3, "data.batch_size": 64},
        ),
    },
    "deepseek_v3": {
        "pipeline": Layout(
            512,
            "4 of 16 stages with 10 of 58 layers, 16 of 120 microbatches: data 2 · stage 4 · "
            "expert 64 in 8 nodes, ZeRO-1, overlapped cells",
            {
                "mesh.stage": 4,
                "model.layers": 10,
                "pipeline.chunk_layers": (1, 4, 4, 1),  # as the recipe's first and last stages
                "pipeline.microbatches": 16,
                "data.batch_size": 2048,
            },
        ),
    },
}
SHARED = {"llama3_8b": SEPARATE, "mixtral_8x7b": SEPARATE, "deepseek_v3": {}}


@dataclasses.dataclass(frozen=True)
class Case:
    """A resolved config to compile."""

    recipe: str
    layout: str
    topology: Topology
    text: str
    config: Config


def cases(values: dict, overrides: list[tuple[str, str]]) -> Iterator[Case]:
    """The cases that the flags ask for, checked. Raises ValueError with one line."""
    platforms, recipes = names(values, "platform", KINDS), names(values, "recipe", LAYOUTS)
    for platform in platforms:
        if PLATFORMS[platform].missing:
            raise ValueError(
                f"--platform={platform} has no compiler in {compilers()}: {INSTALL_COMMAND}"
            )
        for recipe in recipes:
            for name in names(values, "layout", LAYOUTS[recipe]):
                layout = LAYOUTS[recipe][name]
                topology = fitting(platform, values["devices"] or layout.devices)
                planned_for = {"train.hardware": topology.platform.hardware}
                changes = {
                    **planned_for,
                    **SHARED[recipe],
                    **layout.settings,
                    **settings_of_flags(values),
                }
                config = apply(
                    configs.replace(load_recipe(find_recipe(recipe)), changes), overrides
                )
                config = checks.check_devices(
                    config, topology.devices, topology.platform.backend
                ).resolve()
                yield Case(recipe, name, topology, layout.text, config)


def settings_of_flags(values: dict) -> dict[str, object]:
    """Settings that flags of the command stand for."""
    settings = {"model.layers": values["layers"], "data.sequence_length": values["sequence"]}
    return {path: value for path, value in settings.items() if value}


def names(values: dict, flag: str, known) -> list[str]:
    """The words of a flag, or all known ones if it is empty. Raises ValueError for another word."""
    words = values[flag].split(",") if values[flag] else list(known)
    for word in words:
        if word not in known:
            raise ValueError(
                f"--{flag}={word!r} is none of {', '.join(known)}: use --{flag}={next(iter(known))}"
            )
    return words


def measure(case: Case, values: dict) -> dict:
    """The figures of a case, or the compiler's words as `refused`."""
    platform = case.topology.platform.name
    about = {
        "recipe": case.recipe,
        "layout": case.layout,
        "platform": platform,
        "devices": case.topology.devices,
        "text": case.text,
    }
    about |= {"layers": case.config.model.layers, "sequence": case.config.data.sequence_length}
    try:
        compiled = compile_config(case.topology, case.config)
    except Refused as error:
        return versions() | about | {"refused": error.line}
    if values["text"]:
        folder = pathlib.Path(values["text"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{case.recipe}_{case.layout}_{platform}.txt").write_text(compiled.text)
    figures = StepSeconds(case.config, platform, compiled, values["products"], values["kernels"])
    return versions() | about | as_dict(figures)


def versions() -> dict[str, str]:
    """The day, the commit ("+": with changes since), and the versions of jax and its compilers."""
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+"]
    commit = (
        subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        or "no commit"
    )
    described = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "python": ".".join(map(str, sys.version_info[:2])),
    }
    described["jax"] = importlib.metadata.version("jax")
    described |= {
        platform.package: platform.version for platform in (PLATFORMS[kind] for kind in KINDS)
    }
    return described


def report(row: dict) -> list[str]:
    """The lines that are printed for a case."""
    lines = [
        f"{row['recipe']}, {row['layout']} ({row['text']}), {row['platform']}, "
        f"{row['layers']} layers, {row['sequence']} tokens:"
    ]
    if "refused" in row:
        return [*lines, f"  refused: {row['refused']}"]
    f, s, c = row["flops"], row["seconds"], row["copies"]
    gb = {name: size / 1e9 for name, size in row["memory"].items()}
    lines.append(
        f"  memory: {gb['arguments']:.2f} GB arguments, {gb['temporary']:.2f} GB temporary; "
        f"compiled in {row['compile_seconds']:.0f} s"
    )
    lines.append(
        f"  products: {f['products'] / 1e12:.0f} TF and {f['kernels'] / 1e12:.0f} in kernels, "
        f"{f['ratio']:.3f} of "
        f"{f['planned'] / 1e12:.0f} planned, of these attention "
        f"{f['planned_attention'] / 1e12:.0f} "
        f"(the model's own {f['model'] / 1e12:.0f})"
        + f"; XLA repeats {f['repeated'] / 1e12:.0f} TF to hold less memory"
        * (f["repeated"] > 0)
    )
    lines.append(
        f"  step: {s['step']:.2f} s; stage {row['stage']} is busy for {s['busy']:.2f}, of "
        f"these kernels {s['kernels']:.2f}; "
        f"bubble {s['bubble']:.1%}"
    )
    lines.append(
        "  by op: "
        + ", ".join(
            f"{op} {seconds:.3f}" for op, seconds in s["by_op"].items() if seconds >= 0.0005
        )
    )
    lines.append(f"  memory traffic: {row['memory_bytes'] / 1e9:,.0f} GB")
    kernels = [
        f"{name} {k['times']:.0f} × {k['flops'] / max(k['times'], 1) / 1e9:.0f} GF"
        for name, k in row["kernels"].items()
    ]
    lines.append("  kernels: " + (", ".join(kernels) or "none"))
    lines.append(
        f"  attention: {row['attention']}; arrays of T × T: "
        + (", ".join(row["square_arrays"]) or "none")
    )
    lines.append(
        f"  copies over 1 MB in loops: {c['bytes'] / 1e9:,.0f} GB, {c['seconds']:.3f} s, "
        f"{c['share']:.1%}: {c['longest']}"
    )
    lines += [f"  {describe(t)}" for t in row["collectives"] if t["bytes"] > 1e8]
    waiting = sum(t["seconds"] for t in row["exposed"])
    lines.append(f"  exposed collectives, at the assumed speed of the links: {waiting:.3f} s")
    return lines + exposed_lines(row["exposed"]) + second_reader_lines(row["second_reader"])


def describe(t: dict) -> str:
    """A line about the collectives of a scope, kind, type and axes."""
    overlap = "not asynchronous"
    if t["asynchronous"]:
        asynchronous, hidden = t["asynchronous"] / t["bytes"], t["hidden"] / t["bytes"]
        overlap = (
            f"{asynchronous:.0%} asynchronous, {hidden:.0%} beside products "
            f"({t['flops'] / 1e12:.1f} TF)"
        )
    kind = f"{t['op']:9} {t['kind']:18} {t['type']:5} {t['axes']:12}"
    return (
        f"{kind} {t['times']:6.0f} × {t['bytes'] / t['times'] / 1e6:8.1f} MB, "
        f"{t['bytes'] / 1e9:7.2f} GB; {overlap}"
    )


def table_row(row: dict) -> str:
    """A row of ahead.md."""
    compiler = (
        f"libtpu {row['libtpu']}" if row["platform"] == "v5p" else f"XLA {row['jax-cuda13-pjrt']}"
    )
    case = (
        f"{row['platform']}: {row['recipe']}, {row['text']}; {row['layers']} layers, T = "
        f"{row['sequence']}"
    )
    whose = [f"{row['date']}, {row['commit']}, {row['jax']}, {compiler}", case]
    if "refused" in row:
        return "| " + " | ".join([*whose, row["refused"], *[""] * 7]) + " |"
    f, s, c, m = row["flops"], row["seconds"], row["copies"], row["memory"]
    ops = ", ".join(f"{op} {seconds:.2f}" for op, seconds in s["by_op"].items() if seconds >= 0.005)
    kinds: dict[tuple[str, str], list[float]] = {}
    for t in row["collectives"]:
        total = kinds.setdefault((t["kind"], t["type"]), [0.0, 0.0])
        total[0], total[1] = total[0] + t["bytes"], total[1] + t["hidden"]
    crossing = "; ".join(
        f"{kind} {dtype} {n / 1e9:.1f}, {h / n:.0%}"
        for (kind, dtype), (n, h) in kinds.items()
        if n > 1e8
    )
    cells = [
        *whose,
        f"{m['arguments'] / 1e9:.2f} / {m['temporary'] / 1e9:.1f}",
        f"{f['products'] / 1e12:.0f} ({f['kernels'] / 1e12:.0f}), {f['ratio']:.2f}",
        f"{s['step']:.2f} ({s['busy']:.2f}, {s['bubble']:.1%})",
        ops,
        f"{row['attention']}; {row['square_arrays'][0] if row['square_arrays'] else 'none'}",
        f"{c['seconds']:.2f} ({c['share']:.1%})",
        crossing,
        f"{row['compile_seconds']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str]) -> None:
    """Compiles the cases and prints their figures."""
    reading = read_flags(
        [word for word in argv if word != "--"], __doc__ or "", FLAGS, with_config=True
    )
    if reading.errors:
        fail(str(reading.errors[0]))
    try:
        wanted = list(cases(reading.values, reading.overrides))
    except (RecipeError, ValueError) as error:  # also those of settings and topologies
        fail(str(error))
    records: list[dict] = []
    for case in wanted:
        records.append(measure(case, reading.values))
        print("\n".join(report(records[-1])), flush=True)
        if reading.values["json"]:
            pathlib.Path(reading.values["json"]).write_text(json.dumps(records, indent=1))
        if reading.values["append"]:
            with TABLE.open("a") as file:
                print(table_row(records[-1]), file=file)
    sys.exit(any("refused" in record for record in records))


if __name__ == "__main__":
    main(sys.argv[1:])
