"""The order of the rooms: imports go to rooms further down or stay inside their own, nothing is
imported in a circle, and what checks a command's flags does without jax."""

import ast
import pathlib

import pytest
from support import ROOMS, ROOT

from jaxtrain.__main__ import IN_ROOMS

TOP = len(ROOMS)  # modules beside the rooms, and a room's commands
COMMANDS = ("__main__", "main", "calibrate")  # plan --calibrate has flags of its own
WITHOUT_JAX = (
    *(
        "schedule",
        "config",
        "run",
        "data",
        "checkpoint.steps",
        "experiments.run_folder",
        "experiments.page",
        "devices.cluster_environment",
        "training.stored_op_times",
    ),
    *("planner.layer", "planner.step", "planner.search"),
)
PLANNED_TIMES = "jaxtrain.planner.step.planned_op_times"
WITH_JAX = ("data.loader", "planner.layer.layer_trace")  # of those
NEEDS_JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "jaxtrain").rglob("*.py"))}


def imports(name: str, source: str) -> set[str]:
    """Every module that a source imports, also inside functions; of `from package import module`,
    the module."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [
                        *package.split(".")[: len(package.split(".")) - node.level + 1],
                        *filter(None, [base]),
                    ]
                )
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {base}
    return found


def level(name: str) -> int:
    """The place of a module's room from below; TOP for commands and what they share, phases/ among
    it. KeyError for a room that has no place."""
    parts = name.split(".")[1:]
    is_room = len(parts) > 1 or (
        bool(parts) and MODULES.get(name, pathlib.Path()).name == "__init__.py"
    )
    if not is_room or parts[-1] in COMMANDS or parts[0] == "phases":
        return TOP
    if ".".join(parts) in IN_ROOMS.values():
        return TOP
    folder = MODULES.get(name, ROOT / "jaxtrain" / "/".join(parts)).parent
    room = str(folder.relative_to(ROOT / "jaxtrain"))
    places = {room: place for place, room in enumerate(ROOMS)} | {"planner": TOP}
    return places[room if room in places else parts[0]]


def within(name: str, names: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"jaxtrain.{known}.") for known in names)


GRAPH = {name: imports(name, path.read_text()) for name, path in MODULES.items()}


def test_reading_of_imports():
    source = (
        "import jax.numpy as jnp\nfrom jaxtrain import config\ndef f():\n    from jaxtrain.config "
        "import Config\n    from . import paths\n"
    )
    assert imports("jaxtrain.config", source) == {
        "jax.numpy",
        "jaxtrain.config",
        "jaxtrain.config.paths",
    }
    assert level("jaxtrain.schedule.table") == level("jaxtrain.schedule") == 0 and level(
        "jaxtrain.schedule.__main__"
    ) == TOP == level("jaxtrain.loop")


def test_every_room_has_its_place():
    assert sorted(ROOMS) == sorted(
        str(path.parent.relative_to(ROOT / "jaxtrain"))
        for folder in ("*", "planner/*")
        for path in (ROOT / "jaxtrain").glob(f"{folder}/__init__.py")
        if path.parent.name != "planner"
    )


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name):
    up = {
        other for other in GRAPH[name] & MODULES.keys() - {"jaxtrain"} if level(other) > level(name)
    }
    assert not up, (
        f"{name} imports {', '.join(sorted(up))}: the order of the rooms is "
        f"{' < '.join(ROOMS)} < commands"
    )


@pytest.mark.parametrize("name", [n for n in MODULES if not within(n, ("planner",))])
def test_the_planner_is_asked_through_two_modules(name):
    """A reader of the trainer may pass the planner over: its commands ask one small module, rooms
    below the planner's another one."""
    asked = {"jaxtrain.planner.for_training" if level(name) == TOP else PLANNED_TIMES}
    if name in ("jaxtrain.plan", "jaxtrain.api"):
        asked = {"jaxtrain.planner.command.main"}
    others = {module for module in GRAPH[name] & MODULES.keys() if within(module, ("planner",))}
    assert others <= asked, f"{name} asks {', '.join(sorted(others - asked))}"


def test_there_is_no_circle():
    """The package itself is left out: it imports its public names when they are used."""
    done, path = set(), []

    def visit(name):
        assert name not in path, "circle: " + " → ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in GRAPH[name] & MODULES.keys() - {name, "jaxtrain"}:
            visit(other)
        path.pop()
        done.add(name)

    for name in MODULES:
        visit(name)


@pytest.mark.parametrize(
    "name",
    [n for n in MODULES if within(n, WITHOUT_JAX) and not within(n, WITH_JAX) and level(n) != TOP],
)
def test_flags_are_checked_without_jax(name):
    assert not {other.partition(".")[0] for other in GRAPH[name]} & NEEDS_JAX
