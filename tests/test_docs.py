"""The documents name what exists: commands, links, paths, functions, the tests that hold the
rules. Their tables and pictures are those of the code."""

import ast
import functools
import importlib.util
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tokenize
import tomllib
import types
from collections.abc import Sequence

import pytest
import test_imports  # its list of rooms
from by_hand import try_docs
from support import ROOT
from support.hf_models import CONFIGS

from jaxtrain import (
    cli,
    convert,
    generate_command as generate,
    launch,
    show_schedule as schedule_command,
    train_command as train,
)
from jaxtrain.__main__ import COMMANDS
from jaxtrain.checkpoint import __main__ as checkpoint_command
from jaxtrain.config import Config, fields
from jaxtrain.config.flags import Flag, read_flags
from jaxtrain.config.rules import checks
from jaxtrain.data import __main__ as data_command
from jaxtrain.devices import cluster_environment
from jaxtrain.experiments import compare, page, sweep, track
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.command import main as plan_command
from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.orders import CSV, SCHEDULES
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table_spec import TableSpec

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
README, ARCHITECTURE, PARTS, TRAPS, FEATURES = (
    (ROOT / name).read_text()
    for name in (
        "README.md",
        "docs/architecture.md",
        "docs/parts.md",
        "docs/traps.md",
        "docs/features.md",
    )
)
README_BYTES = 9 * 1024
ARCHITECTURE_BYTES = 15 * 1024
GLOSSARY_LINES = 20
ENGINES = ("sbatch", "kubectl", "sky", "bash")  # commands that take a template of scripts/launch


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def fences(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# --- the README -----------------------------------------------------------------------------------


def test_the_readme_is_short_and_has_every_room():
    assert len(README.encode()) <= README_BYTES
    folders = [
        line.split()[0].rstrip("/")
        for line in fences(section(README, "Rooms"), "text")[0].splitlines()
    ]
    rooms = {room.partition("/")[0] for room in test_imports.ROOMS}
    assert sorted(folders) == sorted(
        ["jaxtrain", "configs", "benchmarks", "scripts", "tests", "docs", *rooms]
    )


def test_the_architecture_is_short():
    assert len(ARCHITECTURE.encode()) <= ARCHITECTURE_BYTES


def test_the_readme_leads_to_every_document():
    links = set(re.findall(r"\]\(([^)#]+)", README))
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert {str(path.relative_to(ROOT)) for path in documents} - {"README.md"} <= links


def test_the_log_leads_to_every_month():
    links = re.findall(r"\]\(log/([^)]+)\)", (ROOT / "docs/log.md").read_text())
    assert sorted(links) == sorted(path.name for path in (ROOT / "docs/log").iterdir())


# --- the commands ---------------------------------------------------------------------------------


TABLE = try_docs.tabled(FEATURES)
FENCED = [line for path in DOCUMENTS for line in try_docs.fenced(path.read_text())]
MISTAKES = [
    tuple(block.strip().split("\n"))
    for path in DOCUMENTS
    for block in fences(path.read_text(), "text")
    if block.startswith("$ ")
]


def words_of(command: str) -> list[str]:
    """A command's words, without its comment and whatever starts it on a cluster."""
    words = shlex.split(command, comments=True)
    starts = {"srun": 1, "mpirun": 3}
    return words[starts.get(words[0], 0) :]


def check_train(
    arguments: list[str], devices: int | None = None, flags: Sequence[Flag] = train.FLAGS
) -> None:
    """Fails unless these are flags of the training command that work, on this many devices where
    the number is known. flags: of another command with a recipe"""
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in ("--config.data.source", "--config.data.tokenizer") and value not in (
            "bytes",
            "none",
            "stdlib",
        ):
            pathlib.Path(value).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(value).mkdir() if value.endswith("/") else pathlib.Path(value).touch()
        if name in ("--config.data.sources", "--config.data.validation"):
            for item in value.split(","):
                pathlib.Path(item.partition("=")[2]).touch()
        if value == "mean.py:Mean":  # of docs/own_layer.md
            text = (ROOT / "docs" / "own_layer.md").read_text()
            pathlib.Path("mean.py").write_text("".join(fences(text, "python")))
        if name == "--config.pipeline.schedule" and value.startswith(CSV):
            pathlib.Path(value.removeprefix(CSV)).touch()
    config, values = cli.parse(arguments, "", flags)
    if devices:
        config = checks.check_devices(config, values.cpu_devices or devices)
        if not config.pipeline.schedule.startswith(CSV):
            make_setup(config.resolve())


def check(command: str) -> None:
    """Fails unless a command is there and its flags parse; nothing is run."""
    first, *rest = words_of(command)
    if first == "scripts/train.sh":
        check_train(
            rest, cluster_environment.SIMULATED_DEVICES if "--config=" not in command else None
        )
    elif first in ("scripts/test.sh", "scripts/install.sh"):
        assert (ROOT / first).exists() and {*rest} <= ({"--full"} if "test" in first else {*()})
    elif first in ENGINES:
        (template,) = [
            number for number, word in enumerate(rest) if word.startswith("scripts/launch/")
        ]
        assert (ROOT / rest[template]).is_file(), f"{rest[template]} does not exist"
        of_sweep = any(word.startswith("--array=") for word in rest[:template])
        check_module(f"jaxtrain.{'sweep' if of_sweep else 'train'}", rest[template + 1 :])
    elif first == "jaxtrain":
        if rest != ["--help"]:
            assert rest[0] in COMMANDS
            check_module(f"jaxtrain.{rest[0]}", rest[1:])
    elif rest[0] == "-m":
        assert first == "python"
        check_module(rest[1], rest[2:])
    elif first == "pip":
        (extra,) = re.fullmatch(r"jaxtrain\[(\w+)\]", rest[-1]).groups()
        assert (
            extra
            in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
                "dynamic"
            ]["optional-dependencies"]
        )
    else:
        assert first == "python"
        said = help_of(rest[0])
        for flag in rest[1:]:
            assert flag.partition("=")[0] in said, f"{rest[0]} has no {flag}"


@functools.cache
def help_of(script: str) -> str:
    """What a script says to --help, as a process."""
    installed = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, ROOT / script, "--help"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=60, env=installed
    )
    return done.stdout


def planned_without_a_search(flags: types.SimpleNamespace, config: Config, recipe: Config) -> None:
    flags.refused = True
    plan_command.planned(flags, config, recipe)


def check_module(module: str, arguments: list[str]) -> None:
    """As `check`, for `python -m MODULE`."""
    if module == "jaxtrain.train":
        check_train(arguments)
    elif module == "jaxtrain.generate":
        generate.check_flags(cli.checked_flags(arguments, "", generate.FLAGS, lambda flags: flags))
    elif module == "jaxtrain.schedule":
        schedule_command.check_flags(
            cli.checked_flags(arguments, "", schedule_command.FLAGS, lambda flags: flags)
        )
    elif module == "jaxtrain.checkpoint":
        command, flagged = checkpoint_command.command_of(arguments)
        cli.checked_flags(
            flagged, "", checkpoint_command.FLAGS[command], lambda flags: flags, words=True
        )
    elif module == "jaxtrain.data":
        command, *rest = arguments
        check_train(rest, flags=data_command.FLAGS[command])
    elif module == "jaxtrain.convert":
        command, *rest = arguments
        own = convert.FLAGS[command]
        reading = read_flags(rest, "", own, with_config=command == "from_hf", with_words=True)
        assert not reading.errors and convert.folder_of(reading.namespace, command)
    elif module == "jaxtrain.sweep":
        cli.checked(read_flags(arguments, "", sweep.FLAGS, with_config=True), sweep.plan_sweep)
    elif module in (of_runs := {"jaxtrain.page": page, "jaxtrain.compare": compare}):
        flags = of_runs[module].FLAGS
        assert cli.checked_flags(arguments, "", flags, lambda flags: flags, words=True).words
    elif module == "jaxtrain.track":
        flags = cli.checked_flags(arguments, "", track.FLAGS, lambda flags: flags, words=True)
        assert flags.words and {flags.to} <= {*track.TRACKERS}
    elif module == "pytest":
        assert all((ROOT / path).exists() for path in arguments)
    elif module == "jaxtrain.plan":
        if not set(arguments) & set(plan_command.COMMANDS):
            cli.parse_unchecked(arguments, "", plan_command.FLAGS, planned_without_a_search)
    else:
        assert module == "jaxtrain.launch"
        at = arguments.index("--")
        flags = cli.checked_flags(arguments[:at], "", launch.FLAGS, lambda flags: flags)
        check_train(arguments[at + 1 :], flags.processes * flags.devices_per_process)


def test_there_are_commands():
    assert len(TABLE) > 50 and len(FENCED) > 10 and MISTAKES
    rows = [
        line
        for line in FEATURES.splitlines()
        if line.startswith("| ") and line != "| what | command |"
    ]
    assert len(rows) == len(TABLE), "a line of features.md has no command"
    folders = [
        word
        for command in TABLE
        for word in words_of(command)
        if word.startswith("--workdir=") and not word.endswith("/tiny")
    ]
    assert len(set(folders)) == len(folders), "two commands share a folder"


@pytest.mark.parametrize("command", sorted({*TABLE, *FENCED}))
def test_a_command_parses(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if published := re.search(r"init_from=(\S+)", command):
        (tmp_path / published[1]).mkdir(parents=True)
        (tmp_path / published[1] / "config.json").write_text(json.dumps(CONFIGS["llama"]))
        (tmp_path / published[1] / "tokenizer.json").write_text("{}")
    try:
        check(command)
    except SystemExit as end:
        assert end.code == 0 and "--help" in command, f"{command} ends with status {end.code}"


@pytest.mark.parametrize("command, answer", MISTAKES)
def test_a_mistake_is_answered_as_shown(command, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cli.FlagsError) as end:
        check(command.removeprefix("$ "))
    assert (end.value.status, f"error: {end.value}") == (2, answer)


# --- what the documents point at ------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    broken = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_path_of_one_machine(path):
    found = re.findall(r"(?<![\w.:/~-])/(?!dev/)[A-Za-z]+/[^\s`)]*", path.read_text())
    assert not found, "an absolute path means nothing elsewhere"


def names_in(path: pathlib.Path) -> set[str]:
    """Every function of a Python file."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_rule_is_held_by_a_test_that_exists():
    lines = [
        line
        for line in section(TRAPS, "Rules").splitlines()
        if line.startswith("| ") and not line.startswith("| **")
    ][1:]
    assert len(lines) > 40
    for line in lines:
        holders = re.findall(r"`([^`]+)`", line.rstrip("| ").rpartition(" | ")[2])
        assert holders and "/" in holders[0], f"nothing holds this rule: {line}"
        for holder in holders:
            if "/" in holder:
                path = ROOT / holder
                assert path.is_file(), f"{holder} does not exist"
            else:
                assert holder in names_in(path), f"{path.name} has no {holder}"


def defined_in(path: pathlib.Path) -> set[str]:
    """The functions, classes, methods and fields ("Class.method") and constants of a Python
    file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            }
            found |= {
                f"{node.name}.{inner.target.id}"
                for inner in node.body
                if isinstance(inner, ast.AnnAssign)
            }
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        found |= {
            name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
        }
    return found


def check_references(text: str, folder: pathlib.Path) -> int:
    """Fails unless each `path/file.py: name` of a text is there; gives their number."""
    references = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    for path, name in references:
        assert (folder / path).is_file(), f"{path} does not exist"
        assert name in defined_in(folder / path), f"{path} has no {name}"
    return len(references)


def test_every_question_is_answered_by_what_exists():
    where = section(ARCHITECTURE, "Where is …")
    rows = [line for line in where.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        question, answer = row.strip("| ").split(" | ")
        assert question.endswith("?") and check_references(answer, ROOT / "jaxtrain"), row


MODULES: dict[str, list[pathlib.Path]] = {}
for path in sorted((ROOT / "jaxtrain").rglob("*.py")):
    MODULES.setdefault(path.stem, []).append(path)


@pytest.mark.parametrize("name", ["architecture.md", "parts.md", "traps.md", "extending.md"])
def test_what_a_module_is_said_to_have_exists(name):
    """Of code such as `columns.results`, where the first word is a module's name and the whole is
    no setting."""
    spans = re.findall(
        r"`(?:[\w/]*/)?(\w+)\.(\w+(?:\.\w+)?)(?:\(\))?`", (ROOT / "docs" / name).read_text()
    )
    named = [
        (module, what)
        for module, what in spans
        if module in MODULES and what not in ("py", "md", "sh")
    ]
    named = [(module, what) for module, what in named if f"{module}.{what}" not in fields()]
    for module, what in named:
        there = set().union(*(defined_in(path) for path in MODULES[module]))
        assert what in there | {inner.partition(".")[2] for inner in there}, (
            f"no {module}.py has {what}"
        )
    assert len(named) > 5 or name != "parts.md"


SOURCES = [
    path
    for folder in ("jaxtrain", "tests", "benchmarks", "scripts", "configs", "docs")
    for path in (ROOT / folder).rglob("*.py")
]
TEXTS = [
    *DOCUMENTS,
    *SOURCES,
    *ROOT.glob("scripts/*.sh"),
    *ROOT.glob("tests/*/*.sh"),
    *(path for path in ROOT.glob("scripts/launch/*") if path.is_file()),
    *ROOT.glob("requirements*.txt"),
    *ROOT.glob("requirements/*.txt"),
]
FILES = {
    str(path.relative_to(ROOT))
    for folder in ("jaxtrain", "tests", "benchmarks", "scripts", "configs", "docs")
    for path in (ROOT / folder).rglob("*.*")
} | {path.name for path in ROOT.glob("*.*")}
# "/cli.py", "/jaxtrain/cli.py": each file by its name, with any number of its folders before it.
ENDINGS = {
    "/" + "/".join(pathlib.PurePath(path).parts[start:])
    for path in FILES
    for start in range(len(pathlib.PurePath(path).parts))
}
# A path: folders and a file's name with one of the suffixes of this repository's text.
PATH = re.compile(
    r"(?<![\w/.*<>{}$-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|toml|yaml|sbatch|txtpb))(?![\w/*]|\.\w)"
)
# Paths that users give or get. Names in capitals stand for any name. The log and the changelog are
# not checked: their entries are as old as their day.
EXAMPLES = {"run.py", "mean.py", "mine.py", "mine/run.py", "planned.py", "crd.yaml", "path/file.py"}
HISTORY = ("docs/log", "CHANGELOG.md")


@functools.cache
def prose(path: pathlib.Path) -> str:
    """A document's text without the targets of links; a Python file's docstrings and comments."""
    text = path.read_text()
    if path.suffix != ".py":
        return re.sub(r"\]\([^)]*\)", "]", text)
    nodes = ast.walk(ast.parse(text))
    described = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, described)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(docstrings + comments)


def test_every_path_that_is_named_exists():
    gone = {}
    for path in TEXTS:
        name = str(path.relative_to(ROOT))
        named = set() if name.startswith(HISTORY) else set(PATH.findall(prose(path))) - EXAMPLES
        paths = {other for other in named if not re.search(r"NAME|ROOM|MODULE|FILE", other)}
        if missing := sorted(other for other in paths if f"/{other}" not in ENDINGS):
            gone[name] = missing
    assert not gone


def test_every_name_that_is_said_to_be_in_a_file_exists():
    """In the form "NAME.py: name", of names with an underscore, a dot or small and large letters: a
    plain word after a colon may be one of a sentence."""
    for path in TEXTS:
        if str(path.relative_to(ROOT)).startswith(HISTORY):
            continue
        for file, name in re.findall(r"((?:\w+/)*\w+\.py): ?([A-Za-z_][\w.]*\w)", prose(path)):
            files = [ROOT / other for other in FILES if f"/{other}".endswith(f"/{file}")]
            if files and re.search(r"[_.]|[A-Z][a-z]", name):
                names = set().union(*map(defined_in, files))
                assert name in names, f"{path.relative_to(ROOT)}: {file} has no {name}"


def test_a_path_that_is_gone_is_noticed():
    said = "as in jaxtrain/gone.py, data/loader.py (and no_file.md)."
    assert PATH.findall(said) == ["jaxtrain/gone.py", "data/loader.py", "no_file.md"]
    assert [f"/{path}" in ENDINGS for path in PATH.findall(said)] == [False, True, False]


def test_every_module_says_what_it_has():
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_what_is_to_be_extended_exists():
    text = (ROOT / "docs/extending.md").read_text()
    assert check_references(text, ROOT) > 10
    paths = re.findall(r"`((?:jaxtrain|tests|configs|docs)/[\w/.]*)`", text)
    assert len(paths) > 30 and not [path for path in paths if not (ROOT / path).exists()]


def test_the_glossary_is_short():
    rows = [
        line for line in section(ARCHITECTURE, "Glossary").splitlines() if line.startswith("| ")
    ][1:]
    assert 10 < len(rows) <= GLOSSARY_LINES
    words = [word for row in rows for word in row.split(" | ")[0].strip("| ").split(", ")]
    assert len(words) == len(set(words))


def test_the_table_of_rooms_is_the_tested_one():
    rows = re.findall(
        r"^\| `([\w/]+)/` \|", section(ARCHITECTURE, "Rooms of the package"), re.MULTILINE
    )
    assert rows == test_imports.ROOMS[::-1]


def test_the_slots_are_those_of_the_tables():
    rows = re.findall(
        r"^\| `(\w+)`(?:, (\d) chunks)? \| (\d+, \d+) \| (\d+, \d+) \| (\d+, \d+) \|$",
        PARTS,
        re.MULTILINE,
    )
    assert {name for name, *_ in rows} == set(SCHEDULES) and len(rows) == len(SCHEDULES)
    for name, repeats, *shown in rows:
        assert int(repeats or 1) == SCHEDULES[name].least_repeats
        for (kind, full), numbers in zip(
            (("activation", True), ("residual_w", False), ("weight_stash", False)),
            shown,
            strict=True,
        ):
            tables = [
                make_table(
                    TableSpec(name, 4, int(repeats or 1), m, permute="late", remat_full=full)
                )
                for m in (8, 64)
            ]
            assert [assign_slots(table).pool_sizes[kind] for table in tables] == [
                int(n) for n in numbers.split(", ")
            ], (name, kind)


def drawing(name: str) -> types.ModuleType:
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_published_models_is_of_the_present_tables():
    write_models = drawing("write_models")
    assert write_models.text() == write_models.PAGE.read_text(), "run python docs/write_models.py"


def test_the_picture_of_a_tick_is_of_the_present_table():
    draw_step = drawing("draw_step")
    assert f"fingerprint {draw_step.fingerprint()}" in draw_step.PICTURE.read_text(), (
        "run python docs/draw_step.py, and look at it"
    )


def test_the_picture_of_stages_is_of_the_present_plan():
    draw_stages = drawing("draw_stages")
    assert draw_stages.draw() == draw_stages.PICTURE.read_text(), (
        "run python docs/draw_stages.py, and look at it"
    )


def test_the_picture_of_the_idea_is_of_the_present_tables():
    draw_idea = drawing("draw_idea")
    assert draw_idea.draw() == draw_idea.PICTURE.read_text(), (
        "run python docs/draw_idea.py, and look at it"
    )
