"""Recipes: found by path or by name, and read. No jax.

    --config=mine/run.py                       the file
    --config=tiny | tiny.py | configs/tiny.py  that file where it exists, else the recipe that came with the package

A recipe is a Python file whose get_config() returns a `Config`. What is done with the config is in cli.py.
"""

import dataclasses
import difflib
import importlib.util
import os
import pathlib
import shlex
import sys
import traceback

from jaxtrain.config import Config, ConfigError

PACKAGE = pathlib.Path(__file__).resolve().parent
# The shipped recipes lie inside an installed package (pyproject.toml), and beside it in a checkout.
SHIPPED = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
DEFAULT_RECIPE = "tiny"


class RecipeError(ValueError):
    """A recipe that is not there or cannot be read; the text is one line."""


def shipped_recipes() -> dict[str, pathlib.Path]:
    """Name → file of the recipes that came with the package."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.py"))}


def find_recipe(name: str) -> pathlib.Path:
    """The file of `--config`: the Python file of this path, else the shipped recipe of this name, which may be written NAME, NAME.py or
    configs/NAME.py.

    What is no Python file hides no recipe: a folder `tiny`, say. Raises RecipeError, which names the nearest recipe, where there is none.
    """
    path = pathlib.Path(os.path.expanduser(name))
    by_name = path.suffix in ("", ".py") and path.parent in (pathlib.Path("."), pathlib.Path("configs"))
    shipped = shipped_recipes().get(path.stem) if by_name else None
    if os.path.isfile(path) and (path.suffix == ".py" or not shipped):
        return path.resolve()
    if shipped:
        return shipped
    rule = "is a folder, not a recipe" if os.path.isdir(path) else "is neither a file nor a recipe of jaxtrain's"
    raise RecipeError(f"--config={name!r} {rule}: use {_nearest(path)}")


def _nearest(path: pathlib.Path) -> str:
    """The flag of the recipe most like a path that is none. Where none is like it, the names of all that are shipped follow."""
    shipped, here = shipped_recipes(), pathlib.Path()
    beside = _recipes_in(path.parent) if path.parent != here else []
    known: dict[str, str] = {}  # the first of several with one name counts
    for recipe in [*beside, *map(pathlib.Path, shipped), *_recipes_in(here), *_recipes_in(here / "configs")]:
        known.setdefault(recipe.stem, str(recipe))
    if near := difflib.get_close_matches(path.stem, known, n=1, cutoff=0.5):
        return f"--config={shlex.quote(known[near[0]])}"
    if shipped:
        return f"--config={DEFAULT_RECIPE} (there are {', '.join(shipped)})"
    return "the path of a Python file with a get_config(), for this copy of jaxtrain came without recipes"


def _recipes_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The Python files of a folder that look like recipes; none where it is not there or may not be read."""
    if not (folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)):
        return []
    files = [file for file in sorted(folder.glob("*.py")) if file.is_file() and os.access(file, os.R_OK)]
    return [file for file in files if "def get_config(" in file.read_text(errors="replace")]


def load_recipe(path: pathlib.Path) -> Config:
    """What the file's get_config() returns. RecipeError for whatever goes wrong in it, with the line."""
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a config that is refused leaves nothing behind
    try:
        spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise RecipeError(f"--config={str(path)!r} is not a Python file: use a recipe such as --config={DEFAULT_RECIPE}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not callable(getattr(module, "get_config", None)):
            raise RecipeError(f"--config={str(path)!r} defines no function get_config(): use one that returns a jaxtrain.config.Config")
        config = module.get_config()
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
        where = f", line {line}," if line else ""
        raise RecipeError(
            f"--config={str(path)!r}{where} raises {type(error).__name__}: {error}: mend it, or use --config={DEFAULT_RECIPE}"
        ) from None
    finally:
        sys.dont_write_bytecode = writes
    if not isinstance(config, Config):
        raise RecipeError(f"--config={str(path)!r}: get_config() returns {type(config).__name__}: use a jaxtrain.config.Config")
    for group in dataclasses.fields(Config):
        if not isinstance(getattr(config, group.name), group.type):  # type: ignore[arg-type]
            raise ConfigError(group.name, getattr(config, group.name), "is not a group of settings", f"a {group.type.__name__}")  # type: ignore[union-attr]
    return config
