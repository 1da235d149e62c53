"""The documents say what is there: the map of files, the commands, the links, the tests that hold the rules, and the picture."""

import ast
import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from support import ROOT

from jaxtrain import cli, generate, launch, train
from jaxtrain.__main__ import COMMANDS
from jaxtrain.config import checks
from jaxtrain.config.pipeline_setup import make_setup
from jaxtrain.devices import cluster_environment
from jaxtrain.schedule import __main__ as schedule_command
from jaxtrain.schedule.by_name import make_table
from jaxtrain.schedule.orders import CSV, SCHEDULES
from jaxtrain.schedule.slots import assign_slots
from jaxtrain.schedule.table_spec import TableSpec

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
README, ARCHITECTURE = ((ROOT / name).read_text() for name in ("README.md", "docs/architecture.md"))


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def fences(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# --- the map of files ------------------------------------------------------------------------------------------------------------


def mapped() -> list[str]:
    """The paths in the map of docs/architecture.md: a folder ends with a slash, and what is indented below it is in it."""
    paths, folders = [], {}
    for line in fences(section(ARCHITECTURE, "Files"), "text")[0].splitlines():
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        path = folders.get(indent - 2, "") + name
        if name.endswith("/"):
            folders[indent] = path
        paths.append(path)
    return paths


def test_the_map_has_every_file_and_no_other():
    patterns = ("jaxtrain/**/*.py", "configs/*.py", "benchmarks/*.py", "scripts/*", "docs/*.*")
    sources = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern) if path.name != "__init__.py"}
    assert not (missing := sources - set(mapped())), f"not in the map of files: {missing}"
    assert not (gone := [path for path in mapped() if not (ROOT / path).exists()]), f"only in the map of files: {gone}"
    assert len(set(mapped())) == len(mapped())


# --- the commands ----------------------------------------------------------------------------------------------------------------


TABLE = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", section(README, "What works"), re.MULTILINE)
FENCED = [line for path in DOCUMENTS for block in fences(path.read_text(), "bash") for line in block.splitlines() if line]
MISTAKES = [tuple(block.strip().split("\n")) for path in DOCUMENTS for block in fences(path.read_text(), "text") if block.startswith("$ ")]


def words_of(command: str) -> list[str]:
    """A command's words, without its comment and whatever starts it on a cluster."""
    words = shlex.split(command, comments=True)
    starts = {"srun": 1, "mpirun": 3}
    return words[starts.get(words[0], 0) :]


def check_train(arguments: list[str], devices: int | None = None) -> None:
    """Fails unless these are flags of the training command that work, on this many devices where the number is known."""
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in ("--config.data.source", "--config.data.tokenizer") and value not in ("bytes", "none", "stdlib"):
            pathlib.Path(value).mkdir() if value.endswith("/") else pathlib.Path(value).touch()
        if name == "--config.pipeline.schedule" and value.startswith(CSV):
            pathlib.Path(value.removeprefix(CSV)).touch()
    config, flags = cli.parse(arguments, "", train.FLAGS)
    if devices:
        config = checks.check_devices(config, flags.cpu_devices or devices)
        if not config.pipeline.schedule.startswith(CSV):
            make_setup(config.resolve())


def check(command: str) -> None:
    """Fails unless a command is there and its flags parse; nothing is run."""
    first, *rest = words_of(command)
    if first == "scripts/train.sh":
        check_train(rest, cluster_environment.SIMULATED_DEVICES if "--config=" not in command else None)
    elif first == "scripts/test.sh":
        assert (ROOT / first).exists() and set(rest) <= {"--full"}
    elif first == "jaxtrain":
        if rest != ["--help"]:
            assert rest[0] in COMMANDS
            check_module(f"jaxtrain.{rest[0]}", rest[1:])
    elif rest[0] == "-m":
        assert first == "python"
        check_module(rest[1], rest[2:])
    else:
        assert first == "python"
        said = subprocess.run([sys.executable, ROOT / rest[0], "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
        for flag in rest[1:]:
            assert flag.partition("=")[0] in said, f"{rest[0]} has no {flag}"


def check_module(module: str, arguments: list[str]) -> None:
    """As `check`, for `python -m MODULE`."""
    if module == "jaxtrain.train":
        check_train(arguments)
    elif module == "jaxtrain.generate":
        generate.check_flags(cli.parse_flags(arguments, "", generate.FLAGS))
    elif module == "jaxtrain.schedule":
        schedule_command.check_flags(cli.parse_flags(arguments, "", schedule_command.FLAGS))
    else:
        assert module == "jaxtrain.launch"
        at = arguments.index("--")
        flags = cli.parse_flags(arguments[:at], "", launch.FLAGS)
        check_train(arguments[at + 1 :], flags.processes * flags.devices_per_process)


def test_there_are_commands():
    assert len(TABLE) > 15 and len(FENCED) > 10 and MISTAKES
    assert section(README, "What works").count("\n| ") == len(TABLE) + 1, "a line of README's table has no command"


@pytest.mark.parametrize("command", sorted({*TABLE, *FENCED}))
def test_a_command_parses(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        check(command)
    except SystemExit as end:
        assert end.code == 0 and "--help" in command, f"{command} ends with status {end.code}"


@pytest.mark.parametrize("command, answer", MISTAKES)
def test_a_mistake_is_answered_as_shown(command, answer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        check(command.removeprefix("$ "))
    assert (end.value.code, capsys.readouterr().err.strip()) == (2, answer)


# --- what the documents point at -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    broken = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_path_of_one_machine(path):
    found = re.findall(r"(?<![\w.:/~-])/[A-Za-z]+/[^\s`)]*", path.read_text())
    assert not found, "an absolute path means nothing elsewhere"


def names_in(path: pathlib.Path) -> set[str]:
    """Every function of a Python file."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_rule_is_held_by_a_test_that_exists():
    rows = [line for line in section(ARCHITECTURE, "Rules, and why").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 8
    for row in rows:
        holders = re.findall(r"`([^`]+)`", row.rstrip("| ").rpartition(" | ")[2])
        assert holders and "/" in holders[0], f"nothing holds this rule: {row}"
        for holder in holders:
            if "/" in holder:
                path = ROOT / holder
                assert path.is_file(), f"{holder} does not exist"
            else:
                assert holder in names_in(path), f"{path.name} has no {holder}"


def test_the_table_of_rooms_is_the_tested_one():
    import test_imports  # the list that is held

    rows = re.findall(r"^\| `(\w+)/` \|", section(ARCHITECTURE, "Rooms of the package"), re.MULTILINE)
    assert rows == test_imports.ROOMS[::-1]


def test_the_slots_are_those_of_the_tables():
    rows = re.findall(r"^\| `(\w+)`(?:, (\d) chunks)? \| (\d+, \d+) \| (\d+, \d+) \| (\d+, \d+) \|$", ARCHITECTURE, re.MULTILINE)
    assert {name for name, *_ in rows} == set(SCHEDULES) and len(rows) == len(SCHEDULES)
    for name, repeats, *shown in rows:
        assert int(repeats or 1) == SCHEDULES[name].least_repeats
        for (kind, full), numbers in zip((("activation", True), ("residual_w", False), ("weight_stash", False)), shown, strict=True):
            tables = [make_table(TableSpec(name, 4, int(repeats or 1), m, permute="late", remat_full=full)) for m in (8, 64)]
            assert [assign_slots(table).pool_sizes[kind] for table in tables] == [int(n) for n in numbers.split(", ")], (name, kind)


def test_the_picture_is_of_the_present_table():
    spec = importlib.util.spec_from_file_location("draw_step", ROOT / "docs" / "draw_step.py")
    draw_step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_step)
    assert f"fingerprint {draw_step.fingerprint()}" in draw_step.PICTURE.read_text(), "run python docs/draw_step.py, and look at it"
