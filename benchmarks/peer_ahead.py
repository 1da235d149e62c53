"""Our train step beside MaxText's, both compiled ahead of time for 64 TPU v5p chips and read by one
reader. Nothing is run.

    python benchmarks/peer_ahead.py                                     the recorded figures
    python benchmarks/peer_ahead.py --maxtext=DIR --python=PATH [--case=fsdp,model8]
                                    [--side=ours,fastest,defaults] [--text=FOLDER] [--record]
    python benchmarks/peer_ahead.py --read=FOLDER [--record]            programs that --text wrote

DIR is a checkout of MaxText, PATH the Python of an environment that it runs in (README.md says how
to make one, with the libtpu that jaxtrain's compilers have). A compilation takes two minutes and
more. peer_cases.py has the cases and both sides' settings; step_seconds.py and links.py say what
the seconds mean. A side's time is that of its scheduled program plus the seconds for which its
collectives are exposed. Without --maxtext and --python
nothing is compiled.

The status is 1 if a compiler refused a step, 2 if the flags are wrong.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

REPOSITORY = pathlib.Path(__file__).parents[1]
sys.path[:0] = [path for path in (str(REPOSITORY),) if path not in sys.path]

from ahead import names, versions  # noqa: E402 (the path comes first)
from ahead_figures import by_part, exposed, exposed_lines  # noqa: E402
from arguments import fail  # noqa: E402
from peer_cases import CASES, PLATFORM, PeerCase  # noqa: E402
from second_reader import second_reader, second_reader_lines  # noqa: E402
from step_seconds import SecondsReader, Sizes, StepSeconds  # noqa: E402

from jaxtrain.config.flags import Flag, read_flags  # noqa: E402
from jaxtrain.devices.compiler_options import (  # noqa: E402
    GATHERS,
    GATHERS_WHOLE,
    V5P,
    compiler_options,
)
from jaxtrain.planner.programs.loops import StepLoops  # noqa: E402
from jaxtrain.planner.programs.topology import (  # noqa: E402
    INSTALL_COMMAND,
    LONGEST,
    PLATFORMS,
    QUIET,
    Compiled,
    Refused,
    compile_config,
    compilers,
)

RECORD = REPOSITORY / "benchmarks" / "peer_ahead.json"
COMPILE = REPOSITORY / "benchmarks" / "maxtext_compile.py"
SIDES = ("ours", "fastest", "defaults")
FLAGS = (
    Flag("maxtext", "", "folder of MaxText's sources; empty: the recorded figures"),
    Flag("python", "", "MaxText's Python"),
    Flag("case", "", f"cases, with commas between them: {', '.join(CASES)}; empty: all"),
    Flag("side", "", "ours, or MaxText's with its fastest or its default settings; empty: all"),
    Flag("text", "", "folder for the compiled programs"),
    Flag("read", "", "folder that --text wrote: its programs are read, and none is compiled"),
    Flag("record", False, "write the figures to benchmarks/peer_ahead.json"),
)


@dataclasses.dataclass(frozen=True)
class MaxText:
    """A checkout of MaxText, and a Python that it runs in."""

    folder: pathlib.Path
    python: pathlib.Path

    @classmethod
    def of(cls, values: dict[str, Any]) -> "MaxText | None":
        """What the flags name; None if they name neither. Raises ValueError with one line."""
        if not values["maxtext"] and not values["python"]:
            return None
        for flag, other in (("maxtext", "python"), ("python", "maxtext")):
            if not values[flag]:
                raise ValueError(f"--{other} needs --{flag}: give both, or neither")
        folder, python = (pathlib.Path(values[flag]).absolute() for flag in ("maxtext", "python"))
        if not (folder / "src" / "maxtext").is_dir():
            raise ValueError(
                f"--maxtext={values['maxtext']!r} has no src/maxtext: name a checkout of MaxText"
            )
        if not python.is_file() or not os.access(python, os.X_OK):
            raise ValueError(
                f"--python={values['python']!r} is no program: name the python of MaxText's "
                "environment, such as ENVIRONMENT/bin/python"
            )
        return cls(folder, python)

    def compile(self, settings: list[str]) -> tuple[Compiled, dict[str, str]]:
        """Its step with these settings, and the versions that compiled it. Raises Refused."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | QUIET
        with tempfile.TemporaryDirectory() as folder:
            command = [str(self.python), str(COMPILE), str(self.folder), folder, *settings]
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LONGEST,
                check=False,
            )
            if done.returncode:
                raise Refused(f"MaxText\n{done.stderr[-6000:]}")
            figures = json.loads(pathlib.Path(folder, "figures.json").read_text())
            found = figures.pop("versions")
            return Compiled(pathlib.Path(folder, "program.txt").read_text(), **figures), found


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step, with the versions of what compiled it."""

    compiled: Compiled
    versions: dict[str, str]

    def write(self, path: pathlib.Path) -> None:
        """Writes PATH.txt and PATH.json."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = dataclasses.asdict(self.compiled)
        path.with_suffix(".txt").write_text(fields.pop("text"))
        path.with_suffix(".json").write_text(json.dumps([fields, self.versions]))

    @classmethod
    def read(cls, path: pathlib.Path) -> "Program":
        """What `write` wrote."""
        fields, versions = json.loads(path.with_suffix(".json").read_text())
        return cls(Compiled(path.with_suffix(".txt").read_text(), **fields), versions)


def maxtext_reader(case: PeerCase, compiled: Compiled) -> SecondsReader:
    """MaxText's program, whose text has the trips of all its loops: every stage runs the same."""
    config, mesh = case.config, case.maxtext_mesh
    length = config.data.sequence_length
    tokens = config.data.batch_size * length * config.model.experts_per_token
    sizes = Sizes(length, length, tokens // (case.topology.devices * config.pipeline.microbatches))
    loops = StepLoops(compiled.program, 0, op_runs={}, busy_ticks=0)
    return SecondsReader(loops, mesh, PLATFORM, sizes)


def summary(reader: SecondsReader, compiled: Compiled, bubble: float = 0.0) -> dict[str, Any]:
    """The figures of a side as JSON: bytes and seconds; `total` has the exposed collectives."""
    parts, collectives = by_part(reader), exposed(reader)
    step = reader.busy_seconds / (1 - bubble)
    waiting = sum(record["seconds"] for record in collectives)
    return {
        "seconds": {
            **parts,
            "bubble": bubble,
            "step": step,
            "exposed": waiting,
            "total": step + waiting,
        },
        "memory": {"arguments": compiled.memory["argument"], "temporary": compiled.memory["temp"]},
        "exposed": collectives,
        "second_reader": second_reader(reader, compiled),
        "compile_seconds": compiled.tracing + compiled.compiling,
    }


def options(case: PeerCase) -> str:
    """XLA's options of our step on these chips, as flags for MaxText."""
    device, mesh = types.SimpleNamespace(platform="tpu", device_kind=V5P[0]), case.config.mesh
    does = [GATHERS] * (mesh.stage == 1) + [GATHERS_WHOLE] * (mesh.stage * mesh.model == 1)
    chosen = compiler_options(device, does)  # type: ignore[arg-type]
    return " ".join(f"--{name}={str(value).lower()}" for name, value in chosen.items())


def compile_side(case: PeerCase, side: str, maxtext: MaxText) -> Program:
    """A side's step and what compiled it. Raises Refused."""
    about = versions()
    if side == "ours":
        return Program(compile_config(case.topology, case.config), about)
    compiled, found = maxtext.compile(case.maxtext_settings(side == "fastest", options(case)))
    return Program(compiled, about | found)


def figures(case: PeerCase, side: str, program: Program) -> dict[str, Any]:
    """The figures of a side of a case."""
    compiled = program.compiled
    about = {"case": case.name, "side": side} | program.versions
    if side != "ours":
        return about | summary(maxtext_reader(case, compiled), compiled)
    ours = StepSeconds(case.config, PLATFORM, compiled)
    train = ours.setup.train
    bubble = ours.setup.simulation().bubble_fraction_coupled if train else 0.0
    return about | summary(ours, compiled, bubble)


def report(row: dict[str, Any]) -> list[str]:
    """The lines that are printed for a side of a case."""
    who = "ours" if row["side"] == "ours" else f"MaxText, {row['side']}"
    lines = [f"{CASES[row['case']].text}; {who} (jax {row['jax']}, libtpu {row['libtpu']}):"]
    if "refused" in row:
        return [*lines, f"  refused: {row['refused']}"]
    s, m = row["seconds"], row["memory"]
    lines.append(
        f"  {s['total']:.3f} s: step {s['step']:.3f} (products {s['products']:.3f}, kernels "
        f"{s['kernels']:.3f}, other {s['other']:.3f}, bubble {s['bubble']:.1%}), exposed "
        f"collectives {s['exposed']:.3f}"
    )
    lines.append(
        f"  memory: {m['arguments'] / 1e9:.2f} GB arguments, {m['temporary'] / 1e9:.2f} GB "
        f"temporary; compiled in {row['compile_seconds']:.0f} s"
    )
    return lines + exposed_lines(row["exposed"]) + second_reader_lines(row["second_reader"])


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """The table of all cases: seconds of each side, and ours over MaxText's."""
    lines = [
        f"{'case':10} {'ours s':>8} {'fastest s':>10} {'defaults s':>11} {'ours / fastest':>15} "
        f"{'/ defaults':>11} {'without exposed':>16} {'aim':>5}"
    ]
    for case in CASES.values():
        sides = {row["side"]: row for row in rows if row["case"] == case.name}
        seconds = {name: row["seconds"] for name, row in sides.items() if "seconds" in row}
        if not seconds:
            continue
        total = {name: f"{s['total']:.3f}" for name, s in seconds.items()}
        lines.append(
            f"{case.name:10} {total.get('ours', ''):>8} {total.get('fastest', ''):>10} "
            f"{total.get('defaults', ''):>11} {over(seconds, 'fastest', 'total'):>15} "
            f"{over(seconds, 'defaults', 'total'):>11} {over(seconds, 'fastest', 'step'):>16} "
            f"{case.aim or '':>5}"
        )
    return lines


def over(seconds: dict[str, dict[str, float]], side: str, figure: str) -> str:
    """A figure of ours over that of a side of MaxText's; "" if one is missing."""
    if "ours" not in seconds or side not in seconds:
        return ""
    return f"{seconds['ours'][figure] / seconds[side][figure]:.3f}"


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the newest of each side of each case, in the order of CASES."""
    rows = {(row["case"], row["side"]): row for row in old + new}
    return [rows[case, side] for case in CASES for side in SIDES if (case, side) in rows]


def recorded() -> list[dict[str, Any]]:
    """The rows of benchmarks/peer_ahead.json."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else []


def rows_of(programs: Iterator[tuple[str, str, Program | Refused]]) -> Iterator[dict[str, Any]]:
    """The figures of each (case, side, program), or the compiler's words as `refused`."""
    for case, side, program in programs:
        if isinstance(program, Refused):
            yield {"case": case, "side": side} | versions() | {"refused": program.line}
        else:
            yield figures(CASES[case], side, program)


def compiled_programs(
    wanted: list[tuple[str, str]], maxtext: MaxText, text: str
) -> Iterator[tuple[str, str, Program | Refused]]:
    """Each (case, side) with its program, which is also written to the folder `text`."""
    for case, side in wanted:
        try:
            program = compile_side(CASES[case], side, maxtext)
        except Refused as error:
            yield case, side, error
            continue
        if text:
            program.write(pathlib.Path(text, f"{case}_{side}"))
        yield case, side, program


def written_programs(
    wanted: list[tuple[str, str]], folder: str
) -> Iterator[tuple[str, str, Program | Refused]]:
    """Each (case, side) that was written to a folder, with its program."""
    for case, side in wanted:
        if pathlib.Path(folder, f"{case}_{side}.json").exists():
            yield case, side, Program.read(pathlib.Path(folder, f"{case}_{side}"))


def checked(values: dict[str, Any]) -> tuple[list[tuple[str, str]], MaxText | None]:
    """The (case, side) pairs that the flags ask for, and MaxText. Raises ValueError."""
    cases, sides = names(values, "case", CASES), names(values, "side", SIDES)
    maxtext, folder = MaxText.of(values), values["read"]
    if maxtext and folder:
        raise ValueError("--read and --maxtext exclude each other: leave one out")
    if maxtext and PLATFORMS[PLATFORM].missing:
        raise ValueError(f"no compiler for v5p in {compilers()}: {INSTALL_COMMAND}")
    if folder and not pathlib.Path(folder).is_dir():
        raise ValueError(f"--read={folder!r} is no folder: name one that --text wrote")
    for flag in ("text", "record"):
        if values[flag] and not (maxtext or (folder and flag == "record")):
            raise ValueError(f"--{flag} needs --maxtext and --python: nothing new is compiled")
    return [(case, side) for case in cases for side in sides], maxtext


def main(argv: list[str]) -> None:
    """Prints the recorded figures, or compiles the cases and prints theirs."""
    words = [word for word in argv if word != "--"]
    reading = read_flags(words, __doc__ or "", FLAGS, with_config=False)
    if reading.errors:
        fail(str(reading.errors[0]))
    values = reading.values
    try:
        wanted, maxtext = checked(values)
    except ValueError as error:
        fail(str(error))
    if maxtext:
        new = rows_of(compiled_programs(wanted, maxtext, values["text"]))
    elif values["read"]:
        new = rows_of(written_programs(wanted, values["read"]))
    else:
        new = (row for row in recorded() if (row["case"], row["side"]) in wanted)
    rows = []
    for row in new:
        rows.append(row)
        print("\n".join(report(row)), flush=True)
        if values["record"]:
            RECORD.write_text(json.dumps(merged(recorded(), rows), indent=1) + "\n")
    dates = ", ".join(sorted({row["date"] for row in rows})) or "nothing was recorded"
    print(f"\nseconds with exposed collectives ({dates}):", *ratios(rows), sep="\n")
    sys.exit(any("refused" in row for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
