"""The order of the package: every import goes to a lower layer or stays in its own, there is no circle, and layer 0 does without jax."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# The longest prefix counts. A new file of a new kind has to be given its layer here.
LAYERS = {
    "jaxtrain.config": 0,
    "jaxtrain.config_checks": 0,
    "jaxtrain.config_history": 0,
    "jaxtrain.config_rules": 0,
    "jaxtrain.config_mesh_rules": 0,
    "jaxtrain.config_search": 0,
    "jaxtrain.config_unused": 0,
    "jaxtrain.recipes": 0,
    "jaxtrain.cluster_environment": 0,
    "jaxtrain.metrics": 0,
    "jaxtrain.progress": 0,
    "jaxtrain.run_lock": 0,
    "jaxtrain.signals": 0,
    "jaxtrain.checkpoint.steps": 0,
    "jaxtrain.data": 0,
    "jaxtrain.pipeline.placement": 0,
    "jaxtrain.pipeline.show": 0,
    "jaxtrain.pipeline.table": 0,
    "jaxtrain.pipeline.table_csv": 0,
    "jaxtrain.pipeline.validator": 0,
    "jaxtrain.pipeline.progress": 0,
    "jaxtrain.pipeline.orders": 0,
    "jaxtrain.pipeline.lay": 0,
    "jaxtrain.pipeline.list_schedule": 0,
    "jaxtrain.pipeline.search": 0,
    "jaxtrain.pipeline.schedules": 0,
    "jaxtrain.pipeline.slots": 0,
    "jaxtrain.pipeline.columns": 0,
    "jaxtrain.pipeline.setup": 0,
    "jaxtrain.pipeline.simulate": 0,
    "jaxtrain.mesh": 1,
    "jaxtrain.sharding": 1,
    "jaxtrain.cluster": 1,
    "jaxtrain.parallel": 2,
    "jaxtrain.models": 3,
    "jaxtrain.pipeline": 4,
    "jaxtrain.training": 4,
    "jaxtrain.data.loader": 5,
    "jaxtrain.checkpoint": 5,
    "jaxtrain.plan": 5,
    "jaxtrain.loop": 6,
    "jaxtrain.__main__": 7,
    "jaxtrain.cli": 7,
    "jaxtrain.train": 7,
    "jaxtrain.generate": 7,
    "jaxtrain.launch": 7,
    "jaxtrain.schedule": 7,
}
NEEDS_JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "jaxtrain").rglob("*.py"))}


def imports(name: str, source: str) -> set[str]:
    """Every module that a source imports, also inside functions; of `from package import module`, the module."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {base}
    return found


def layer(name: str) -> int | None:
    prefixes = [known for known in LAYERS if name == known or name.startswith(known + ".")]
    return LAYERS[max(prefixes, key=len)] if prefixes else None


GRAPH = {name: imports(name, path.read_text()) for name, path in MODULES.items()}


def code(name: str) -> bool:
    """Whether a module holds more than its package's docstring."""
    return not (MODULES[name].name == "__init__.py" and not GRAPH[name])


def test_reading_of_imports():
    source = (
        "import jax.numpy as jnp\nfrom jaxtrain import config\ndef f():\n    from jaxtrain.config import Config\n    from . import cli\n"
    )
    assert imports("jaxtrain.config", source) == {"jax.numpy", "jaxtrain.config", "jaxtrain.cli"}
    assert layer("jaxtrain.data.loader") == 5 and layer("jaxtrain.data.tokens") == 0 and layer("jaxtrain.elsewhere") is None


@pytest.mark.parametrize("name", [n for n in MODULES if code(n)])
def test_imports_go_down(name):
    assert layer(name) is not None, f"{name} has no layer: give it one in {__file__}"
    up = {other for other in GRAPH[name] if other in MODULES and code(other) and layer(other) > layer(name)}
    assert not up, f"{name} (layer {layer(name)}) imports {', '.join(f'{other} (layer {layer(other)})' for other in up)}"


def test_there_is_no_circle():
    done, path = set(), []

    def visit(name):
        assert name not in path, "circle: " + " → ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in GRAPH[name] & MODULES.keys() - {name}:
            visit(other)
        path.pop()
        done.add(name)

    for name in MODULES:
        visit(name)


@pytest.mark.parametrize("name", [n for n in MODULES if layer(n) == 0])
def test_layer_0_needs_no_jax(name):
    assert not {other.partition(".")[0] for other in GRAPH[name]} & NEEDS_JAX
